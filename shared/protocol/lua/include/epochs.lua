-- An epoch in Redis that is lower than a trainer's own means that Redis was rolled back.
local function fenced(epoch)  -- a newer trainer has taken over
  local found = redis.call('HGET', keys.flow, 'epoch')
  return not found or tonumber(found) > tonumber(epoch)
end
local function replaced(epoch, owner)  -- another trainer has got the same epoch from a Redis that was rolled back
  local flow = redis.call('HMGET', keys.flow, 'epoch', 'owner')
  return owner ~= '' and tonumber(flow[1]) == tonumber(epoch) and flow[2] and flow[2] ~= '' and flow[2] ~= owner
end
local function owner_or(owner)  -- '' keeps the one that is there
  return owner ~= '' and owner or redis.call('HGET', keys.flow, 'owner') or ''
end
local function behind(epoch, process)  -- Redis may know less than the trainer; process: its run_id, '' for any
  if tonumber(redis.call('HGET', keys.flow, 'epoch') or '0') < tonumber(epoch) then return true end
  return process ~= '' and process ~= string.match(redis.call('INFO', 'server'), 'run_id:(%w+)')
end
