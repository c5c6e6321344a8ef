--- @keys flow
--- @args fields...
-- Creates the flow of a new run from field, value, ...; returns 0 if it exists already.
if redis.call('EXISTS', keys.flow) == 1 then return 0 end
redis.call('HSET', keys.flow, unpack(args.fields))
return 1
