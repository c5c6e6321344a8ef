"""All multi-key steps in Redis, as Lua scripts: each is atomic, and each is safe to send twice.

The flow hash is the protocol's state: `epoch` (the trainer that may write), `state` (running, stopping, finished),
`version` (newest published), `consumed` (fragments behind it), `claimed` (claims granted, less those given back),
`settled_id` (log position that the ledger accounts for), byte counts, and the bounds K, L, lease, max_log_bytes.
Stream ids are compared as numbers, never as text.

A Redis whose memory is full refuses the first write of a script, if it is one that may need memory; a script that has
begun is let through. So each step begins with a write that needs none and changes nothing: control steps, which are
what frees the memory, go on. Only a claim asks first, and waits. On a master that has become a replica the same first
write is refused, so that no step answers from an old copy.
"""

from __future__ import annotations

from typing import Any

import redis

from shared.script_calls import Step

INCARNATIONS_KEPT = 16
"""Per worker, in the ledger and in `pushed`; a fragment is not in flight longer than its worker's last few lives."""

COMMON = """
local function begin() redis.call('HDEL', KEYS[1], '') end  -- see above
local function number(field) return tonumber(redis.call('HGET', KEYS[1], field) or '0') end
local function whole(text) return tonumber(string.match(text or '', '^%-?%d+$')) end  -- nil: foreign
local function now_ms()
  local t = redis.call('TIME')
  return tonumber(t[1]) * 1000 + math.floor(tonumber(t[2]) / 1000)
end
local function digits(id)  -- of 20 each, since a number of Lua's bears but 15
  local ms, seq = string.match(id, '^(%d+)-(%d+)$')
  return ms and #ms <= 20 and #seq <= 20 and string.rep('0', 20 - #ms) .. ms .. string.rep('0', 20 - #seq) .. seq
end
local function after(a, b)
  a = digits(a)
  return a and a > digits(b)  -- what is no position comes after none
end
local function wake(key) redis.call('XADD', key, 'MAXLEN', '~', '64', '*', 'w', '1') end
local function fields_of(entry)
  local fields = {}
  for i = 1, #entry[2], 2 do fields[entry[2][i]] = entry[2][i + 1] end
  return fields
end
local function each_entry(log, pushes, position, visit)  -- a page at a time: fragments are large
  local start = '(' .. position
  while true do
    local page = redis.call('XRANGE', log, start, '+', 'COUNT', 32)
    if #page == 0 then return end
    local ours = {}
    for _, push in ipairs(redis.call('XRANGE', pushes, page[1][1], page[#page][1])) do ours[push[1]] = true end
    for _, entry in ipairs(page) do visit(fields_of(entry), ours[entry[1]]) end
    start = '(' .. page[#page][1]
  end
end
local function fenced(epoch)  -- a lower epoch than one's own is that of a Redis that was set back
  local found = redis.call('HGET', KEYS[1], 'epoch')
  return not found or tonumber(found) > tonumber(epoch)
end
local function write_ledger(key, first)  -- ARGV from `first` on: '1' to begin anew, then worker, account, ...
  if ARGV[first] == '1' then redis.call('DEL', key) end
  for from = first + 1, #ARGV, 1000 do  -- unpack bears only some thousands
    redis.call('HSET', key, unpack(ARGV, from, math.min(from + 999, #ARGV)))
  end
end
local function behind(epoch, process)
  if number('epoch') < tonumber(epoch) then return true end
  return process ~= '' and process ~= string.match(redis.call('INFO', 'server'), 'run_id:(%w+)')
end
"""

CREATE = (
    COMMON
    + """
-- KEYS flow. ARGV: field, value, ... Creates the flow of a new run; 0 if it is there already.
if redis.call('EXISTS', KEYS[1]) == 1 then return 0 end
redis.call('HSET', KEYS[1], unpack(ARGV))
return 1
"""
)

REGISTER = (
    COMMON
    + """
-- KEYS flow, incarnations, claims, wakeups, pushed. ARGV: worker, the lowest incarnation that it may get, and how many
-- are kept. A new incarnation of a worker; what the one before had claimed is given back. Answers {incarnation, epoch}.
if redis.call('EXISTS', KEYS[1]) == 0 then return redis.error_reply('NORUN no such run') end
begin()
local incarnation = math.max(whole(redis.call('HGET', KEYS[2], ARGV[1])) or 0, tonumber(ARGV[2]))
redis.call('HSET', KEYS[2], ARGV[1], incarnation + 1)
local kept = tonumber(ARGV[3])
for old = math.max(0, incarnation - 2 * kept), incarnation - kept do
  redis.call('HDEL', KEYS[5], ARGV[1] .. ':' .. old, ARGV[1] .. ':' .. old .. ':refused')
end
redis.call('HDEL', KEYS[5], ARGV[1] .. ':' .. incarnation .. ':refused')  -- of another process, before a set-back
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
    COMMON
    + """
-- KEYS flow, claims, wakeups. ARGV: worker, or '*' for all. Gives back its claims; answers how many.
begin()
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
    COMMON
    + """
-- KEYS flow, claims, incarnations, draining, wakeups, pushed. ARGV: worker, incarnation, seq.
-- Answers {word, version, epoch, wakeup id}; word: granted, wait_credit, wait_log, wait_memory, drain, superseded,
-- taken (this Redis was set back in time and gave an incarnation twice: register anew), or the state. A worker that
-- Redis does not know registered before it was set back.
local flow = redis.call('HMGET', KEYS[1], 'state', 'version', 'epoch', 'claimed', 'consumed', 'fragments_per_update',
  'max_policy_lag', 'lease_ms', 'max_log_bytes', 'pushed_bytes', 'trimmed_bytes', 'memory_full')
if not flow[1] then return redis.error_reply('NORUN no such run') end
local function answer(word)
  local last = redis.call('XREVRANGE', KEYS[5], '+', '-', 'COUNT', 1)
  return {word, flow[2], flow[3], last[1] and last[1][1] or '0-0'}
end
if flow[1] ~= 'running' then return answer(flow[1]) end
local lives = whole(redis.call('HGET', KEYS[3], ARGV[1])) or 0
if lives > tonumber(ARGV[2]) + 1 then return answer('superseded') end
if redis.call('SISMEMBER', KEYS[4], ARGV[1]) == 1 then return answer('drain') end
local last = whole(redis.call('HGET', KEYS[6], ARGV[1] .. ':' .. ARGV[2])) or -1
if last >= tonumber(ARGV[3]) then return answer('taken') end
local now = now_ms()
local expired = redis.call('ZRANGEBYSCORE', KEYS[2], '-inf', '(' .. now)
local claimed = tonumber(flow[4]) - #expired
local id = ARGV[1] .. ':' .. ARGV[2] .. ':' .. ARGV[3]
local held = redis.call('ZSCORE', KEYS[2], id)
local word = 'granted'
if not held or tonumber(held) < now then
  if claimed - tonumber(flow[5]) >= (tonumber(flow[7]) + 1) * tonumber(flow[6]) then
    word = 'wait_credit'
  elseif tonumber(flow[10]) - tonumber(flow[11]) >= tonumber(flow[9]) then
    word = 'wait_log'
  else
    local asked = redis.pcall('HSET', KEYS[1], 'claimed', flow[4])  -- as it is; the first write: is there memory?
    if type(asked) == 'table' then
      if not string.find(asked.err, 'OOM', 1, true) then return asked end
      word = 'wait_memory'
    else
      claimed = claimed + 1
    end
  end
end
begin()
for _, lapsed in ipairs(expired) do redis.call('ZREM', KEYS[2], lapsed) end  -- unpack bears only some thousands
if claimed ~= tonumber(flow[4]) then redis.call('HSET', KEYS[1], 'claimed', claimed) end
if word == 'wait_memory' then
  redis.call('HSET', KEYS[1], 'memory_full', 1)
elseif word == 'granted' then
  if flow[12] then redis.call('HDEL', KEYS[1], 'memory_full') end
  if lives <= tonumber(ARGV[2]) then redis.call('HSET', KEYS[3], ARGV[1], ARGV[2] + 1) end
  redis.call('ZADD', KEYS[2], now + tonumber(flow[8]), id)
end
return answer(word)
"""
)

PUSH = (
    COMMON
    + """
-- KEYS flow, claims, log, pushed, produced, incarnations, trail, pushes. ARGV: worker, incarnation, seq, epoch,
-- transitions, blob, entry of the trail, entries of it to keep, the blob's field in the log ('fragment', or 'body' if
-- it is the place of one on a shard), bytes of the fragment, how many pushes of this incarnation were 'stale' as
-- far as the worker has heard. Answers 'pushed', 'duplicate' (a resend), 'stale' (its claim was given away and there is
-- no room), 'superseded' (a newer incarnation acts the same in its place), 'epoch' (this Redis is older than the claim:
-- it was restored from the past), or 'finished'. What was refused stays refused: the same number is that of another
-- fragment once the worker has heard of it, and that of the same fragment before.
local flow = redis.call('HMGET', KEYS[1], 'state', 'epoch', 'claimed', 'consumed', 'fragments_per_update',
  'max_policy_lag')
if not flow[1] then return redis.error_reply('NORUN no such run') end
begin()
redis.call('XLEN', KEYS[8])  -- a damaged one is told of before anything is written
if tonumber(ARGV[4]) > tonumber(flow[2]) then return 'epoch' end
local from, seq = ARGV[1] .. ':' .. ARGV[2], tonumber(ARGV[3])
local last = whole(redis.call('HGET', KEYS[4], from)) or -1
if seq <= last then
  if redis.call('ZREM', KEYS[2], from .. ':' .. ARGV[3]) == 1 then redis.call('HINCRBY', KEYS[1], 'claimed', -1) end
  return 'duplicate'
end
if flow[1] == 'finished' then return 'finished' end
local lives = whole(redis.call('HGET', KEYS[6], ARGV[1])) or 0
if tonumber(ARGV[2]) < lives - 1 then return 'superseded' end
local heard = tonumber(ARGV[11])
if (whole(redis.call('HGET', KEYS[4], from .. ':refused')) or 0) > heard then return 'stale' end  -- sent again
local function leave_trail()  -- also of a fragment that is refused: its environments have moved on
  redis.call('HDEL', KEYS[4], ARGV[1] .. ':tries')
  if ARGV[8] == '0' then
    redis.call('DEL', KEYS[7])
  else
    redis.call('RPUSH', KEYS[7], ARGV[7])
    redis.call('LTRIM', KEYS[7], -tonumber(ARGV[8]), -1)
  end
end
local function produced(fate, fragments)
  redis.call('HINCRBY', KEYS[5], ARGV[1] .. ':fragments' .. fate, fragments)
  redis.call('HINCRBY', KEYS[5], ARGV[1] .. ':transitions' .. fate, fragments * tonumber(ARGV[5]))
end
if redis.call('ZREM', KEYS[2], from .. ':' .. ARGV[3]) == 0 then
  if tonumber(flow[3]) - tonumber(flow[4]) >= (tonumber(flow[6]) + 1) * tonumber(flow[5]) then
    redis.call('HSET', KEYS[4], from .. ':refused', heard + 1)
    produced('', 1)
    produced(':stale', 1)
    leave_trail()
    return 'stale'
  end
  redis.call('HINCRBY', KEYS[1], 'claimed', 1)
end
local lost = seq - last - 1  -- pushed before, to a Redis that has lost them since; what it still holds for them goes
if lost > 0 then
  for _, id in ipairs(redis.call('ZRANGE', KEYS[2], 0, -1)) do
    local whose, its = string.match(id, '^(.*):(%d+)$')
    if whose == from and tonumber(its) < seq then
      redis.call('HINCRBY', KEYS[1], 'claimed', 0 - redis.call('ZREM', KEYS[2], id))
    end
  end
end
local written = redis.call('HINCRBY', KEYS[1], 'pushed_bytes', ARGV[10])
local id = redis.call('XADD', KEYS[3], '*', 'worker', ARGV[1], 'incarnation', ARGV[2], 'seq', ARGV[3],
  'lost', lost, 'transitions', ARGV[5], 'end', written, ARGV[9], ARGV[6])
redis.call('XADD', KEYS[8], id, 'x', '')
redis.call('HSET', KEYS[4], from, ARGV[3])
produced('', 1 + lost)
leave_trail()
return 'pushed'
"""
)

TAKE_OVER = (
    COMMON
    + """
-- KEYS flow. ARGV: an epoch that is known to have been. A new trainer: fences all older ones. Answers the new epoch.
if redis.call('EXISTS', KEYS[1]) == 0 then return redis.error_reply('NORUN no such run') end
begin()
local epoch = math.max(number('epoch'), tonumber(ARGV[1])) + 1
redis.call('HSET', KEYS[1], 'epoch', epoch)
return epoch
"""
)

CHECK_EPOCH = (
    COMMON
    + """
-- KEYS flow. ARGV: epoch. 1 if this trainer may still write; a Redis that has forgotten its epoch learns it again.
if fenced(ARGV[1]) then return 0 end
begin()
redis.call('HSET', KEYS[1], 'epoch', ARGV[1])
return 1
"""
)

SET_STATE = (
    COMMON
    + """
-- KEYS flow, wakeups. ARGV: state, reason, expected state or '', a trainer's epoch or '', more fields. 1 if it changed.
local state = redis.call('HGET', KEYS[1], 'state')
if not state then return redis.error_reply('NORUN no such run') end
if ARGV[3] ~= '' and state ~= ARGV[3] then return 0 end
if ARGV[4] ~= '' and fenced(ARGV[4]) then return -1 end
begin()
redis.call('HSET', KEYS[1], 'state', ARGV[1], 'reason', ARGV[2], unpack(ARGV, 5))
if ARGV[1] == 'finished' and ARGV[4] ~= '' then redis.call('HDEL', KEYS[1], 'at_work') end  -- says its trainer
if ARGV[1] == 'running' and state == 'finished' then redis.call('HDEL', KEYS[1], 'at_work', 'deaths', 'taking') end
wake(KEYS[2])
return 1
"""
)

SCALE = (
    COMMON
    + """
-- KEYS flow. ARGV: the scaling that must stand ('' for any), then field, value, ... A decision of the coordinator does
-- not undo an order that a person has given meanwhile. 1 if it was written.
local flow = redis.call('HMGET', KEYS[1], 'state', 'scaling')
if not flow[1] then return redis.error_reply('NORUN no such run') end
if ARGV[1] ~= '' and (flow[2] or 'fixed') ~= ARGV[1] then return 0 end
begin()
redis.call('HSET', KEYS[1], unpack(ARGV, 2))
return 1
"""
)

PUBLISH = (
    COMMON
    + """
-- KEYS flow, board, ledger, wakeups. ARGV: epoch, version, fragments consumed for it, settled id, header JSON, blob,
-- checkpoint name ('' unless the weights are in the store), the Redis process that the trainer's books were matched
-- with last ('' for any), then what has changed of the ledger: see write_ledger.
-- One step: the board, the version, the credit and the ledger move together. A version that is there already
-- (a restarted trainer arrives at it again) changes nothing. Answers {word, state, reason, bytes in the log}.
if fenced(ARGV[1]) then return {'fenced', '', '', 0} end
if behind(ARGV[1], ARGV[8]) then return {'behind', '', '', 0} end
begin()
local version, wanted = number('version'), tonumber(ARGV[2])
local word = 'known'
if wanted > version then
  word = 'published'
  redis.call('HSET', KEYS[2], 'version', ARGV[2], 'header', ARGV[5], 'blob', ARGV[6], 'checkpoint', ARGV[7])
  redis.call('HSET', KEYS[1], 'version', ARGV[2], 'settled_id', ARGV[4], 'published_id', ARGV[4])
  redis.call('HINCRBY', KEYS[1], 'consumed', ARGV[3])
  write_ledger(KEYS[3], 9)
  wake(KEYS[4])
end
local flow = redis.call('HMGET', KEYS[1], 'state', 'reason', 'pushed_bytes', 'trimmed_bytes')
return {word, flow[1], flow[2], tonumber(flow[3]) - tonumber(flow[4])}
"""
)

DROP = (
    COMMON
    + """
-- KEYS flow, ledger, wakeups, lost_bodies, quarantine. ARGV: epoch, settled id, claims to give back, Redis process as
-- for PUBLISH, 'lost_body' or 'poison' where it is for that, then the ledger: see write_ledger. It is dropped, and its
-- credit given again, once per id. 'missed': settled otherwise, with its body. 'late': settled, with its credit still.
if fenced(ARGV[1]) then return 'fenced' end
if behind(ARGV[1], ARGV[4]) then return 'behind' end
begin()
local settled = redis.call('HGET', KEYS[1], 'settled_id')
local lost, known = ARGV[5] == 'lost_body', not after(ARGV[2], settled)
local why = ARGV[5] == 'poison' and (redis.call('HGET', KEYS[5], ARGV[2]) or 'again')
if known and not (why and not string.find(why, '^dropped')) then
  return lost and redis.call('SISMEMBER', KEYS[4], ARGV[2]) == 0 and 'missed' or 'known'
end
if lost then redis.call('SADD', KEYS[4], ARGV[2]) end
redis.call('HSET', KEYS[5], ARGV[2], why and 'dropped: ' .. why or 'dropped')
redis.call('HINCRBY', KEYS[1], 'claimed', 0 - ARGV[3])  -- not minus zero, which some servers refuse
wake(KEYS[3])
if known then return 'late' end
redis.call('HSET', KEYS[1], 'settled_id', ARGV[2])
write_ledger(KEYS[2], 6)
return 'dropped'
"""
)

TRIM = (
    COMMON
    + """
-- KEYS flow, log, wakeups, lost_bodies, quarantine, pushes. ARGV: epoch, id of the last entry that a durable checkpoint
-- covers.
-- What the ledger does not account for yet stays all the same: a version that is durable before it is on the board.
-- Answers how many entries were removed (none while Redis is set back behind this trainer), or -1 when fenced.
if fenced(ARGV[1]) then return -1 end
if behind(ARGV[1], '') then return 0 end
begin()
local through, settled = ARGV[2], redis.call('HGET', KEYS[1], 'settled_id')
if after(through, settled) then through = settled end
if not redis.call('XREVRANGE', KEYS[2], through, '-', 'COUNT', 1)[1] then return 0 end
local freed = nil
local push = redis.call('XREVRANGE', KEYS[6], through, '-', 'COUNT', 1)
while push[1] and not freed do  -- the last entry that a worker pushed and that is there tells
  local entry = redis.call('XRANGE', KEYS[2], push[1][1], push[1][1])
  freed = entry[1] and fields_of(entry[1])['end']
  push = redis.call('XREVRANGE', KEYS[6], '(' .. push[1][1], '-', 'COUNT', 1)
end
if freed then redis.call('HSET', KEYS[1], 'trimmed_bytes', freed) end
redis.call('HSET', KEYS[1], 'trimmed_id', through)
for _, id in ipairs(redis.call('SMEMBERS', KEYS[4])) do
  if not after(id, through) then redis.call('SREM', KEYS[4], id) end
end
for _, i in ipairs(redis.call('HKEYS', KEYS[5])) do if not after(i, through) then redis.call('HDEL', KEYS[5], i) end end
local removed = 0
for _, key in ipairs({KEYS[6], KEYS[2]}) do
  removed = redis.call('XTRIM', key, 'MINID', '=', through) + redis.call('XDEL', key, through)
end
wake(KEYS[3])
return removed
"""
)

SET_FORWARD = (
    COMMON
    + """
-- KEYS flow, log, claims, produced, incarnations, pushed, ledger, pushes. ARGV: epoch, position, '1', worker, its
-- account in the ledger up to there, ...
-- For a Redis that may know less than its trainer: epoch, books, credit and what was pushed become what the ledger, the
-- log behind its position and the claims that are held say; the log goes on behind the position. Answers 1, or 0 if
-- fenced.
if fenced(ARGV[1]) then return 0 end
begin()
local books, marks, credit = {}, {}, 0
local function book(worker, fragments, transitions)
  local line = books[worker] or {0, 0}
  books[worker] = {line[1] + fragments, line[2] + transitions}
end
for index = 4, #ARGV, 2 do
  local worker, account = ARGV[index], cjson.decode(ARGV[index + 1])
  local lives = whole(redis.call('HGET', KEYS[5], worker)) or 0
  book(worker, account.consumed.fragments, account.consumed.transitions)
  for _, count in pairs(account.dropped) do book(worker, count.fragments, count.transitions) end
  for incarnation, seq in pairs(account.high_water) do
    marks[worker .. ':' .. incarnation] = seq
    lives = math.max(lives, tonumber(incarnation) + 1)
  end
  if lives > 0 then redis.call('HSET', KEYS[5], worker, lives) end
end
if ARGV[2] ~= '0-0' and type(redis.pcall('XADD', KEYS[2], ARGV[2], 'x', '')) ~= 'table' then
  redis.call('XDEL', KEYS[2], ARGV[2])  -- it left its id behind: whatever comes now comes after it
  redis.call('HSET', KEYS[1], 'trimmed_id', ARGV[2])  -- what was learnt up to there is not all there (any more)
end
each_entry(KEYS[2], KEYS[8], ARGV[2], function(fields, ours)
  local seq, size = whole(fields['seq']), whole(fields['transitions'])
  if ours and fields['worker'] and fields['incarnation'] and seq and size then
    local from = fields['worker'] .. ':' .. fields['incarnation']
    local gap = math.max(0, seq - (marks[from] or -1) - 1)
    book(fields['worker'], 1 + gap, (1 + gap) * size)
    credit = credit + 1 + math.max(0, gap - (whole(fields['lost']) or 0))
    marks[from] = math.max(marks[from] or -1, seq)
  end
end)
for from, seq in pairs(marks) do
  if (whole(redis.call('HGET', KEYS[6], from)) or -1) < seq then redis.call('HSET', KEYS[6], from, seq) end
end
for _, id in ipairs(redis.call('ZRANGE', KEYS[3], 0, -1)) do
  local from, seq = string.match(id, '^(.*):(%d+)$')
  if not from or tonumber(seq) <= (marks[from] or -1) then redis.call('ZREM', KEYS[3], id) end
end
for worker, line in pairs(books) do
  local stale = redis.call('HMGET', KEYS[4], worker .. ':fragments:stale', worker .. ':transitions:stale')
  redis.call('HSET', KEYS[4], worker .. ':fragments', line[1] + (whole(stale[1]) or 0),
    worker .. ':transitions', line[2] + (whole(stale[2]) or 0))
end
redis.call('HSET', KEYS[1], 'claimed', number('consumed') + credit + redis.call('ZCARD', KEYS[3]),
  'epoch', ARGV[1], 'settled_id', ARGV[2])
write_ledger(KEYS[7], 3)
return 1
"""
)

IN_FLIGHT = (
    COMMON
    + """
-- KEYS flow, log, produced, ledger, pushes. One consistent look at the books: {settled id, ledger pairs, produced
-- pairs, worker, incarnation, seq, lost, transitions, worker, ... of the entries after the settled id}; all '' for one
-- that was put in by hand.
local settled = redis.call('HGET', KEYS[1], 'settled_id') or '0-0'
local flight = {}
each_entry(KEYS[2], KEYS[5], settled, function(fields, ours)
  for _, name in ipairs({'worker', 'incarnation', 'seq', 'lost', 'transitions'}) do
    flight[#flight + 1] = ours and fields[name] or ''
  end
end)
local ledger = redis.pcall('HGETALL', KEYS[4])
return {settled, ledger.err and {} or ledger, redis.call('HGETALL', KEYS[3]), flight}
"""
)

WRITE = (
    COMMON
    + """
-- KEYS flow, key. ARGV: a command that changes this key, its arguments. For small bounded writes, also when memory is
-- full: what is shown to people, scores, orders to the fleet.
begin()
return redis.call(ARGV[1], KEYS[2], unpack(ARGV, 2))
"""
)

HEARTBEAT = """
-- KEYS heartbeats. ARGV: role:id, JSON. Stamped with the server's clock, so that machines' clocks don't matter.
local t = redis.call('TIME')
redis.call('HDEL', KEYS[1], '')
redis.call('HSET', KEYS[1], ARGV[1], t[1] .. '.' .. string.format('%06d', tonumber(t[2])) .. ' ' .. ARGV[2])
return 1
"""


def write_small(client: redis.Redis, flow: str, key: str, command: str, *arguments: str | int) -> Any:
    """A write of a few bytes to one of the run's keys, let through also when the memory of Redis is full."""
    return Step(client, WRITE)([flow, key], [command, *arguments])
