--- @include common
--- @keys flow
--- @args coordinator, ended, silence_seconds
-- Takes or keeps the run for `coordinator` ('' lets go), unless another one that is not `ended` ('' for none) was there
-- within `silence_seconds`. Returns '' if it is held now (or there is no run), else the name of the other one.
begin()
if redis.call('EXISTS', keys.flow) == 0 then return '' end
local flow = read_fields(keys.flow, 'coordinator', 'coordinator_seen')
local held = flow.coordinator
local now = redis.call('TIME')[1]
if held and held ~= '' and held ~= args.coordinator and held ~= args.ended
   and math.abs(tonumber(now) - (tonumber(flow.coordinator_seen) or 0)) < tonumber(args.silence_seconds) then return held end
redis.call('HSET', keys.flow, 'coordinator', args.coordinator, 'coordinator_seen', now)
return ''
