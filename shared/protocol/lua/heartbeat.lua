--- @keys heartbeats
--- @args id, beat
-- Writes the heartbeat (JSON) of a process of one role, stamped with the server's clock: machines' clocks do not matter.
local time = redis.call('TIME')
redis.call('HDEL', keys.heartbeats, '')
local stamp = time[1] .. '.' .. string.format('%06d', tonumber(time[2]))
redis.call('HSET', keys.heartbeats, args.id, stamp .. ' ' .. args.beat)
return 1
