-- Stream ids are compared as numbers, never as text.
local function digits(id)  -- 20 of each, since a number in Lua holds only 15
  local ms, seq = string.match(id, '^(%d+)-(%d+)$')
  return ms and #ms <= 20 and #seq <= 20 and string.rep('0', 20 - #ms) .. ms .. string.rep('0', 20 - #seq) .. seq
end
local function after(a, b)
  a = digits(a)
  return a and a > digits(b)  -- what is no position comes after none
end
