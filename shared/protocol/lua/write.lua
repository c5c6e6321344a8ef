--- @include common
--- @keys flow, key
--- @args command, arguments...
-- One command that changes `key`, for small bounded writes, also when memory is full: what is shown to people, scores,
-- orders to the fleet.
begin()
return redis.call(args.command, keys.key, unpack(args.arguments))
