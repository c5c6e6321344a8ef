--- @include common
--- @keys flow
--- @args expected, fields...
-- Writes field, value, ... if the scaling is `expected` ('' for any): a decision of the coordinator does not undo an
-- order that a person has given meanwhile. Returns 1 if it was written.
local flow = read_fields(keys.flow, 'state', 'scaling')
if not flow.state then return no_run() end
if args.expected ~= '' and (flow.scaling or 'fixed') ~= args.expected then return 0 end
begin()
redis.call('HSET', keys.flow, unpack(args.fields))
return 1
