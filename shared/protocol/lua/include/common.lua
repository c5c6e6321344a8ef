-- A Redis whose memory is full refuses the first write of a script, if it is one that may need memory; a script that
-- has begun is let through. So each step begins with a write that needs none and changes nothing: control steps, which
-- are what frees the memory, run on. Only a claim asks first, and waits. On a master that has become a replica the same
-- first write is refused, so that no step answers from an old copy.
local function begin() redis.call('HDEL', keys.flow, '') end
local function read_fields(key, ...)  -- of a hash, by name; false where it has no such field
  local fields, names = {}, {...}
  for index, value in ipairs(redis.call('HMGET', key, ...)) do fields[names[index]] = value end
  return fields
end
local function no_run() return redis.error_reply('NORUN no such run') end
local function whole(text) return tonumber(string.match(text or '', '^%-?%d+$')) end  -- nil: not written by Stagecoach
