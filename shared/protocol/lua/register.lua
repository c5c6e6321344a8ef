--- @include common, wakeups
--- @keys flow, incarnations, claims, wakeups, pushed
--- @args worker, at_least, kept
-- A new incarnation of a worker, at least `at_least`; the claims of the incarnation before are given back. `kept` is
-- how many incarnations `pushed` remembers. Returns {incarnation, epoch}.
if redis.call('EXISTS', keys.flow) == 0 then return no_run() end
begin()
local incarnation = math.max(whole(redis.call('HGET', keys.incarnations, args.worker)) or 0, tonumber(args.at_least))
redis.call('HSET', keys.incarnations, args.worker, incarnation + 1)
local kept, prefix = tonumber(args.kept), args.worker .. ':'
for old = math.max(0, incarnation - 2 * kept), incarnation - kept do
  redis.call('HDEL', keys.pushed, prefix .. old, prefix .. old .. ':refused')
end
redis.call('HDEL', keys.pushed, prefix .. incarnation .. ':refused')  -- of another process, before a rollback
for _, id in ipairs(redis.call('ZRANGE', keys.claims, 0, -1)) do
  if string.sub(id, 1, #prefix) == prefix then
    redis.call('ZREM', keys.claims, id)
    redis.call('HINCRBY', keys.flow, 'claimed', -1)
    wake()
  end
end
return {incarnation, redis.call('HGET', keys.flow, 'epoch')}
