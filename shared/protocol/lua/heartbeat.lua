--- @keys heartbeats
--- @args role, beat
-- Writes the heartbeat (JSON) of `role` (role:id), stamped with the server's clock: machines' clocks do not matter.
local time = redis.call('TIME')
redis.call('HDEL', keys.heartbeats, '')
local stamp = time[1] .. '.' .. string.format('%06d', tonumber(time[2]))
redis.call('HSET', keys.heartbeats, args.role, stamp .. ' ' .. args.beat)
return 1
