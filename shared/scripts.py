"""All multi-key steps in Redis, as Lua scripts: each is atomic, and each is safe to send twice.

The flow hash is the protocol's state: `epoch` (the trainer that may write), `state` (running, stopping, finished),
`version` (newest published), `consumed` (fragments behind it), `claimed` (claims granted, less those given back),
`settled_id` (log position that the ledger accounts for), byte counts, and the bounds K, L, lease, max_log_bytes.
Stream ids are compared as numbers, never as text.
"""

from __future__ import annotations

_COMMON = """
local function number(field) return tonumber(redis.call('HGET', KEYS[1], field) or '0') end
local function now_ms()
  local t = redis.call('TIME')
  return tonumber(t[1]) * 1000 + math.floor(tonumber(t[2]) / 1000)
end
local function id_parts(id)
  local ms, seq = string.match(id, '^(%d+)-(%d+)$')
  return tonumber(ms), tonumber(seq)
end
local function after(a, b)
  local a_ms, a_seq = id_parts(a)
  local b_ms, b_seq = id_parts(b)
  return a_ms > b_ms or (a_ms == b_ms and a_seq > b_seq)
end
local function wake(key) redis.call('XADD', key, 'MAXLEN', '~', '64', '*', 'w', '1') end
local function each_entry(log, position, visit)  -- a page at a time: fragments are large
  local start = '(' .. position
  while true do
    local page = redis.call('XRANGE', log, start, '+', 'COUNT', 32)
    if #page == 0 then return end
    for _, entry in ipairs(page) do
      local fields = {}
      for i = 1, #entry[2], 2 do fields[entry[2][i]] = entry[2][i + 1] end
      visit(fields)
    end
    start = '(' .. page[#page][1]
  end
end
local function fenced(epoch)
  local found = redis.call('HGET', KEYS[1], 'epoch')
  return found ~= epoch
end
"""

CREATE = (
    _COMMON
    + """
-- KEYS flow. ARGV: field, value, ... Creates the flow of a new run; 0 if it is there already.
if redis.call('EXISTS', KEYS[1]) == 1 then return 0 end
redis.call('HSET', KEYS[1], unpack(ARGV))
return 1
"""
)

REGISTER = (
    _COMMON
    + """
-- KEYS flow, incarnations, claims, wakeups. ARGV: worker.
-- A new incarnation of a worker; what the one before had claimed is given back. Answers {incarnation, epoch}.
if redis.call('EXISTS', KEYS[1]) == 0 then return redis.error_reply('NORUN no such run') end
local incarnation = redis.call('HINCRBY', KEYS[2], ARGV[1], 1) - 1
local prefix = ARGV[1] .. ':'
for _, id in ipairs(redis.call('ZRANGE', KEYS[3], 0, -1)) do
  if string.sub(id, 1, #prefix) == prefix then
    redis.call('ZREM', KEYS[3], id)
    redis.call('HINCRBY', KEYS[1], 'claimed', -1)
    wake(KEYS[4])
  end
end
return {incarnation, redis.call('HGET', KEYS[1], 'epoch')}
"""
)

RELEASE = (
    _COMMON
    + """
-- KEYS flow, claims, wakeups. ARGV: worker, or '*' for all. Gives back its claims; answers how many.
local released = 0
for _, id in ipairs(redis.call('ZRANGE', KEYS[2], 0, -1)) do
  if ARGV[1] == '*' or string.sub(id, 1, #ARGV[1] + 1) == ARGV[1] .. ':' then
    redis.call('ZREM', KEYS[2], id)
    released = released + 1
  end
end
if released > 0 then
  redis.call('HINCRBY', KEYS[1], 'claimed', -released)
  wake(KEYS[3])
end
return released
"""
)

CLAIM = (
    _COMMON
    + """
-- KEYS flow, claims, incarnations, draining, wakeups. ARGV: worker, incarnation, seq.
-- Answers {word, version, epoch, wakeup id}; word: granted, wait_credit, wait_log, drain, superseded, or the state.
local flow = redis.call('HMGET', KEYS[1], 'state', 'version', 'epoch', 'claimed', 'consumed', 'fragments_per_update',
  'max_policy_lag', 'lease_ms', 'max_log_bytes', 'pushed_bytes', 'trimmed_bytes')
if not flow[1] then return redis.error_reply('NORUN no such run') end
local function answer(word)
  local last = redis.call('XREVRANGE', KEYS[5], '+', '-', 'COUNT', 1)
  return {word, flow[2], flow[3], last[1] and last[1][1] or '0-0'}
end
if flow[1] ~= 'running' then return answer(flow[1]) end
if redis.call('HGET', KEYS[3], ARGV[1]) ~= tostring(tonumber(ARGV[2]) + 1) then return answer('superseded') end
if redis.call('SISMEMBER', KEYS[4], ARGV[1]) == 1 then return answer('drain') end
local now = now_ms()
local claimed = tonumber(flow[4])
local expired = redis.call('ZRANGEBYSCORE', KEYS[2], '-inf', '(' .. now)
if #expired > 0 then
  redis.call('ZREM', KEYS[2], unpack(expired))
  claimed = claimed - #expired
  redis.call('HSET', KEYS[1], 'claimed', claimed)
end
local id = ARGV[1] .. ':' .. ARGV[2] .. ':' .. ARGV[3]
local held = redis.call('ZSCORE', KEYS[2], id)
if not held then
  if claimed - tonumber(flow[5]) >= (tonumber(flow[7]) + 1) * tonumber(flow[6]) then return answer('wait_credit') end
  if tonumber(flow[10]) - tonumber(flow[11]) >= tonumber(flow[9]) then return answer('wait_log') end
  redis.call('HSET', KEYS[1], 'claimed', claimed + 1)
end
redis.call('ZADD', KEYS[2], now + tonumber(flow[8]), id)
return answer('granted')
"""
)

PUSH = (
    _COMMON
    + """
-- KEYS flow, claims, log, pushed, produced. ARGV: worker, incarnation, seq, epoch seen, transitions, blob.
-- Answers 'pushed', 'duplicate' (a resend), 'stale' (its claim was given away and there is no room), 'epoch' (this
-- Redis is older than the claim: it was restored from the past), or 'finished'.
local flow = redis.call('HMGET', KEYS[1], 'state', 'epoch', 'claimed', 'consumed', 'fragments_per_update',
  'max_policy_lag')
if not flow[1] then return redis.error_reply('NORUN no such run') end
if tonumber(ARGV[4]) > tonumber(flow[2]) then return 'epoch' end
local from = ARGV[1] .. ':' .. ARGV[2]
local last = redis.call('HGET', KEYS[4], from)
if last and tonumber(ARGV[3]) <= tonumber(last) then return 'duplicate' end
if flow[1] == 'finished' then return 'finished' end
local function produced(fate)
  redis.call('HINCRBY', KEYS[5], ARGV[1] .. ':fragments' .. fate, 1)
  redis.call('HINCRBY', KEYS[5], ARGV[1] .. ':transitions' .. fate, ARGV[5])
end
if redis.call('ZREM', KEYS[2], from .. ':' .. ARGV[3]) == 0 then
  if tonumber(flow[3]) - tonumber(flow[4]) >= (tonumber(flow[6]) + 1) * tonumber(flow[5]) then
    local digest = redis.sha1hex(ARGV[6])
    if redis.call('HGET', KEYS[4], from .. ':refused') ~= digest then  -- else it is sent again
      redis.call('HSET', KEYS[4], from .. ':refused', digest)
      produced('')
      produced(':stale')
    end
    return 'stale'
  end
  redis.call('HINCRBY', KEYS[1], 'claimed', 1)
end
local written = redis.call('HINCRBY', KEYS[1], 'pushed_bytes', #ARGV[6])
redis.call('XADD', KEYS[3], '*', 'worker', ARGV[1], 'incarnation', ARGV[2], 'seq', ARGV[3],
  'transitions', ARGV[5], 'end', written, 'fragment', ARGV[6])
redis.call('HSET', KEYS[4], from, ARGV[3])
produced('')
return 'pushed'
"""
)

TAKE_OVER = (
    _COMMON
    + """
-- KEYS flow. A new trainer: fences all older ones. Answers the new epoch.
if redis.call('EXISTS', KEYS[1]) == 0 then return redis.error_reply('NORUN no such run') end
return redis.call('HINCRBY', KEYS[1], 'epoch', 1)
"""
)

CHECK_EPOCH = (
    _COMMON
    + """
-- KEYS flow. ARGV: epoch. 1 if this trainer may still write.
if fenced(ARGV[1]) then return 0 end
return 1
"""
)

SET_STATE = (
    _COMMON
    + """
-- KEYS flow, wakeups. ARGV: state, reason, expected state or '', a trainer's epoch or ''. 1 if it changed.
local state = redis.call('HGET', KEYS[1], 'state')
if not state then return redis.error_reply('NORUN no such run') end
if ARGV[3] ~= '' and state ~= ARGV[3] then return 0 end
if ARGV[4] ~= '' and fenced(ARGV[4]) then return -1 end
redis.call('HSET', KEYS[1], 'state', ARGV[1], 'reason', ARGV[2])
wake(KEYS[2])
return 1
"""
)

PUBLISH = (
    _COMMON
    + """
-- KEYS flow, board, ledger, wakeups. ARGV: epoch, version, fragments consumed for it, settled id, ledger JSON,
-- header JSON, blob, checkpoint name ('' unless the weights are in the store).
-- One step: the board, the version, the credit and the ledger move together. A version that is there already
-- (a restarted trainer arrives at it again) changes nothing. Answers {word, state, reason, bytes in the log}.
if fenced(ARGV[1]) then return {'fenced', '', '', 0} end
local version, wanted = number('version'), tonumber(ARGV[2])
local word = 'known'
if wanted > version then
  word = 'published'
  redis.call('HSET', KEYS[2], 'version', ARGV[2], 'header', ARGV[6], 'blob', ARGV[7], 'checkpoint', ARGV[8])
  redis.call('HSET', KEYS[1], 'version', ARGV[2], 'settled_id', ARGV[4])
  redis.call('HINCRBY', KEYS[1], 'consumed', ARGV[3])
  redis.call('SET', KEYS[3], ARGV[5])
  wake(KEYS[4])
end
local flow = redis.call('HMGET', KEYS[1], 'state', 'reason', 'pushed_bytes', 'trimmed_bytes')
return {word, flow[1], flow[2], tonumber(flow[3]) - tonumber(flow[4])}
"""
)

DROP = (
    _COMMON
    + """
-- KEYS flow, ledger, wakeups. ARGV: epoch, settled id, claims to give back, ledger JSON.
-- The trainer dropped the entry at that id; its credit is given again. Once per id.
if fenced(ARGV[1]) then return 'fenced' end
local settled = redis.call('HGET', KEYS[1], 'settled_id')
if not after(ARGV[2], settled) then return 'known' end
redis.call('HSET', KEYS[1], 'settled_id', ARGV[2])
redis.call('HINCRBY', KEYS[1], 'claimed', -tonumber(ARGV[3]))
redis.call('SET', KEYS[2], ARGV[4])
wake(KEYS[3])
return 'dropped'
"""
)

TRIM = (
    _COMMON
    + """
-- KEYS flow, log, wakeups. ARGV: epoch, id of the last entry that a durable checkpoint covers.
-- Answers the number of entries removed, or -1 when fenced.
if fenced(ARGV[1]) then return -1 end
local last = redis.call('XREVRANGE', KEYS[2], ARGV[2], '-', 'COUNT', 1)
if not last[1] then return 0 end
local ms, seq = id_parts(ARGV[2])
local freed
while last[1] and not freed do -- what a stranger added has no 'end': the entry before it tells
  for i = 1, #last[1][2], 2 do
    if last[1][2][i] == 'end' then freed = last[1][2][i + 1] end
  end
  last = redis.call('XREVRANGE', KEYS[2], '(' .. last[1][1], '-', 'COUNT', 1)
end
if freed then redis.call('HSET', KEYS[1], 'trimmed_bytes', freed) end
redis.call('HSET', KEYS[1], 'trimmed_id', ARGV[2])
local removed = redis.call('XTRIM', KEYS[2], 'MINID', '=', string.format('%.0f-%.0f', ms, seq + 1))
wake(KEYS[3])
return removed
"""
)

SET_FORWARD = (
    _COMMON
    + """
-- KEYS flow, log, claims, produced, incarnations. ARGV: epoch, log position of a checkpoint, then for each worker its
-- id, fragments and transitions (what the checkpoint's ledger has settled) and the incarnations it has had.
-- For a Redis that knows less than the checkpoint: credit and produced become what the checkpoint, the log behind its
-- position and the claims that are held say. Answers 1, or 0 if fenced.
if fenced(ARGV[1]) then return 0 end
local books, pushed = {}, 0
local function book(worker, fragments, transitions)
  local line = books[worker] or {0, 0}
  books[worker] = {line[1] + fragments, line[2] + transitions}
end
for i = 3, #ARGV, 4 do
  book(ARGV[i], tonumber(ARGV[i + 1]), tonumber(ARGV[i + 2]))
  if tonumber(redis.call('HGET', KEYS[5], ARGV[i]) or '0') < tonumber(ARGV[i + 3]) then
    redis.call('HSET', KEYS[5], ARGV[i], ARGV[i + 3])
  end
end
each_entry(KEYS[2], ARGV[2], function(fields)
  if fields['end'] then
    book(fields['worker'], 1, tonumber(fields['transitions']))
    pushed = pushed + 1
  end
end)
for worker, line in pairs(books) do
  local stale = redis.call('HMGET', KEYS[4], worker .. ':fragments:stale', worker .. ':transitions:stale')
  redis.call('HSET', KEYS[4], worker .. ':fragments', line[1] + tonumber(stale[1] or '0'),
    worker .. ':transitions', line[2] + tonumber(stale[2] or '0'))
end
redis.call('HSET', KEYS[1], 'claimed', number('consumed') + pushed + redis.call('ZCARD', KEYS[3]))
return 1
"""
)

IN_FLIGHT = (
    _COMMON
    + """
-- KEYS flow, log, produced, ledger. One consistent look at the books: {settled id, ledger JSON, produced pairs,
-- worker, transitions, worker, transitions, ... of the entries after the settled id}.
local settled = redis.call('HGET', KEYS[1], 'settled_id') or '0-0'
local flight = {}
each_entry(KEYS[2], settled, function(fields)
  flight[#flight + 1] = fields['worker'] or '?'
  flight[#flight + 1] = fields['transitions'] or '0'
end)
return {settled, redis.call('GET', KEYS[4]) or '', redis.call('HGETALL', KEYS[3]), flight}
"""
)

HEARTBEAT = """
-- KEYS heartbeats. ARGV: role:id, JSON. Stamped with the server's clock, so that machines' clocks don't matter.
local t = redis.call('TIME')
redis.call('HSET', KEYS[1], ARGV[1], t[1] .. '.' .. string.format('%06d', tonumber(t[2])) .. ' ' .. ARGV[2])
return 1
"""
