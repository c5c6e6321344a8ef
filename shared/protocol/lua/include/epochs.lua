-- An epoch in Redis that is lower than a trainer's own means that Redis was rolled back.
-- A newer trainer has taken over; or, if an owner is given, another one that got the same epoch from such a Redis.
local function fenced(epoch, owner)
  local flow = redis.call('HMGET', keys.flow, 'epoch', 'owner')
  local found, its = flow[1], flow[2] or ''
  if not found or tonumber(found) > tonumber(epoch) then return true end
  return (owner or '') ~= '' and its ~= '' and its ~= owner and tonumber(found) == tonumber(epoch)
end
local function owner_or(owner)  -- '' keeps the one that is there
  return owner ~= '' and owner or redis.call('HGET', keys.flow, 'owner') or ''
end
local function behind(epoch, process)  -- Redis may know less than the trainer; process: its run_id, '' for any
  if tonumber(redis.call('HGET', keys.flow, 'epoch') or '0') < tonumber(epoch) then return true end
  return process ~= '' and process ~= string.match(redis.call('INFO', 'server'), 'run_id:(%w+)')
end
