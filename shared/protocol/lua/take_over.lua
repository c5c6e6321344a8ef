--- @include common
--- @keys flow
--- @args at_least, memory
-- A new trainer: fences all older ones. `at_least` is an epoch that is known to have been; `memory` is the token of the
-- shared memory that this trainer reads, or ''. Returns the new epoch.
if redis.call('EXISTS', keys.flow) == 0 then return no_run() end
begin()
local epoch = math.max(tonumber(redis.call('HGET', keys.flow, 'epoch') or '0'), tonumber(args.at_least)) + 1
redis.call('HSET', keys.flow, 'epoch', epoch, 'memory', args.memory)
return epoch
