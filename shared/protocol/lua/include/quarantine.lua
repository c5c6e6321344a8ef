-- Puts entries that no published version has learned from into quarantine; returns how many, -1 if one has. An
-- entry that is dropped already stays dropped for its own reason. `durable` is the position of the newest checkpoint: with
-- the object store as transport it is of a version that may not be published yet.
local function quarantine(first, last, why, durable)
  local published = redis.call('HGET', keys.flow, 'published_id') or redis.call('HGET', keys.flow, 'committed_id')
  if not (after(first, published) and after(first, durable)) then return -1 end
  local put = 0
  for _, entry in ipairs(redis.call('XRANGE', keys.log, first, last)) do
    put = put + redis.call('HSETNX', keys.quarantine, entry[1], why)
  end
  return put
end
