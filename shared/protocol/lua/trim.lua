--- @include common, positions, epochs, log_entries, wakeups
--- @keys flow, log, wakeups, lost_bodies, quarantine, pushes
--- @args epoch, through, process
-- Removes the log entries up to `through`, the last one that a durable checkpoint covers. What the ledger does not
-- account for yet stays all the same: a version may be durable before it is on the board.
-- `process` is as in publish. Returns how many entries were removed (0 while Redis is behind), or -1 if fenced.
if fenced(args.epoch) then return -1 end
if behind(args.epoch, args.process) then return 0 end
begin()
local through, committed = args.through, redis.call('HGET', keys.flow, 'committed_id')
if after(through, committed) then through = committed end
if not redis.call('XREVRANGE', keys.log, through, '-', 'COUNT', 1)[1] then return 0 end
local freed = nil
local push = redis.call('XREVRANGE', keys.pushes, through, '-', 'COUNT', 1)
while push[1] and not freed do  -- the last entry that a worker pushed and that is there tells
  local entry = redis.call('XRANGE', keys.log, push[1][1], push[1][1])
  freed = entry[1] and fields_of(entry[1])['end']
  push = redis.call('XREVRANGE', keys.pushes, '(' .. push[1][1], '-', 'COUNT', 1)
end
if freed then redis.call('HSET', keys.flow, 'trimmed_bytes', freed) end
redis.call('HSET', keys.flow, 'trimmed_id', through)
for _, id in ipairs(redis.call('SMEMBERS', keys.lost_bodies)) do
  if not after(id, through) then redis.call('SREM', keys.lost_bodies, id) end
end
for _, id in ipairs(redis.call('HKEYS', keys.quarantine)) do
  if not after(id, through) then redis.call('HDEL', keys.quarantine, id) end
end
local removed = 0
for _, key in ipairs({keys.pushes, keys.log}) do
  removed = redis.call('XTRIM', key, 'MINID', '=', through) + redis.call('XDEL', key, through)
end
wake()
return removed
