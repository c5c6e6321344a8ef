--- @include common
--- @keys flow
--- @args expected, fields...
-- Writes field, value, ... if the scaling is `expected` ('' for any): a decision of the coordinator does not undo an
-- order that a person has given meanwhile. Returns 1 if it was written.
local flow = redis.call('HMGET', keys.flow, 'state', 'scaling')
if not flow[1] then return no_run() end
if args.expected ~= '' and (flow[2] or 'fixed') ~= args.expected then return 0 end
begin()
redis.call('HSET', keys.flow, unpack(args.fields))
return 1
