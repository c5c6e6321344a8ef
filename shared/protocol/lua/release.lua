--- @include common, wakeups
--- @keys flow, claims, wakeups
--- @args worker
-- Gives back the claims of a worker ('*': of all); returns how many.
begin()
local released = 0
for _, id in ipairs(redis.call('ZRANGE', keys.claims, 0, -1)) do
  if args.worker == '*' or string.sub(id, 1, #args.worker + 1) == args.worker .. ':' then
    redis.call('ZREM', keys.claims, id)
    released = released + 1
  end
end
if released > 0 then
  redis.call('HINCRBY', keys.flow, 'claimed', -released)
  wake()
end
return released
