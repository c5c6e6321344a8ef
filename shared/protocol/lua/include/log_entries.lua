local function fields_of(entry)
  local fields = {}
  for i = 1, #entry[2], 2 do fields[entry[2][i]] = entry[2][i + 1] end
  return fields
end
local function each_entry(position, visit)  -- visit(fields, whether a worker pushed it); by page: fragments are large
  local start = '(' .. position
  while true do
    local page = redis.call('XRANGE', keys.log, start, '+', 'COUNT', 32)
    if #page == 0 then return end
    local pushed = {}
    for _, push in ipairs(redis.call('XRANGE', keys.pushes, page[1][1], page[#page][1])) do pushed[push[1]] = true end
    for _, entry in ipairs(page) do visit(fields_of(entry), pushed[entry[1]]) end
    start = '(' .. page[#page][1]
  end
end
