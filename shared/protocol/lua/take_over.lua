--- @include common
--- @keys flow
--- @args seen, at_least, memory, owner
-- A new trainer: fences all older ones, if the epoch is still the one that it has `seen`. So a command that arrives late,
-- after its sender has repeated it or is dead, fences nobody. `at_least` is an epoch that is known to have been;
-- `memory` is the token of the shared memory that this trainer reads, or ''. `owner` is a token of its own: a Redis that
-- was rolled back gives an epoch twice. Returns the new epoch, or 0.
if redis.call('EXISTS', keys.flow) == 0 then return no_run() end
begin()
local epoch = tonumber(redis.call('HGET', keys.flow, 'epoch') or '0')
if epoch ~= tonumber(args.seen) then return 0 end
epoch = math.max(epoch, tonumber(args.at_least)) + 1
redis.call('HSET', keys.flow, 'epoch', epoch, 'memory', args.memory, 'owner', args.owner)
return epoch
