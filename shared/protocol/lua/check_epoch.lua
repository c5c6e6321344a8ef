--- @include common, epochs
--- @keys flow
--- @args epoch
-- Returns 1 if this trainer may still write; a Redis that has forgotten its epoch learns it again.
if fenced(args.epoch) then return 0 end
begin()
redis.call('HSET', keys.flow, 'epoch', args.epoch)
return 1
