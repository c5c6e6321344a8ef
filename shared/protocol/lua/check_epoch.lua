--- @include common, epochs
--- @keys flow
--- @args epoch, owner
-- Returns 1 if this trainer may still write; a Redis that has forgotten its epoch learns it again. `owner` is as in
-- take_over, '' for any.
if fenced(args.epoch, args.owner) then return 0 end
begin()
redis.call('HSET', keys.flow, 'epoch', args.epoch, 'owner', owner_or(args.owner))
return 1
