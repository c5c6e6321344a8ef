local function fields_of(entry)
  local fields = {}
  for i = 1, #entry[2], 2 do fields[entry[2][i]] = entry[2][i + 1] end
  return fields
end
local function newest(key)
  local found = redis.call('XREVRANGE', key, '+', '-', 'COUNT', 1)[1]
  return found and found[1]
end
-- visit(fields, whether a worker pushed it, id) for each entry after a position, through `last` if given. `pushes` repeats all fields but the
-- fragments and is read in place of the log, since Redis answers nobody while a script reads a log of gigabytes. Another
-- length or end of the log means that entries were put in or taken out by hand; then the log itself is read.
local function each_entry(position, visit, last)
  local small = redis.call('XLEN', keys.log) == redis.call('XLEN', keys.pushes)
    and newest(keys.log) == newest(keys.pushes)
  local start = '(' .. position
  while true do
    local page = redis.call('XRANGE', small and keys.pushes or keys.log, start, last or '+', 'COUNT', small and 1000 or 32)
    if #page == 0 then return end
    local pushed = {}
    for _, push in ipairs(small and page or redis.call('XRANGE', keys.pushes, page[1][1], page[#page][1])) do
      pushed[push[1]] = true
    end
    for _, entry in ipairs(page) do visit(fields_of(entry), pushed[entry[1]], entry[1]) end
    start = '(' .. page[#page][1]
  end
end
