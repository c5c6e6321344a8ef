--- @include common, window
--- @keys flow, claims, log, pushed, produced, incarnations, action_trace, pushes
--- @args worker, incarnation, seq, epoch, transitions, field, value, bytes, refusals, action_trace_entry, action_trace_length, sessions, late
-- Appends a fragment to the log and takes back its claim. `field` is 'fragment' and `value` its body, or 'body' and the
-- body's place on a shard; `bytes` is the body's size; `action_trace_length` is how many entries the action trace keeps; `refusals`
-- is how many pushes of this incarnation were 'stale' as far as the worker has heard; `sessions` is 'NAME=NUMBER,…' of a
-- gateway's sessions: the first message of each that is in no fragment so far; `late` counts their turns that came too
-- late for any.
-- Returns 'pushed', 'duplicate' (a resend), 'stale' (its claim was given back and the window has no room), 'superseded' (a
-- newer incarnation acts the same in its place), 'epoch' (this Redis is older than the claim: it was restored from the
-- past), or 'finished'. A fragment that was refused stays refused: the same number belongs to another fragment once the
-- worker has heard of the refusal, and to the same fragment before.
local flow = read_fields(keys.flow, 'state', 'epoch', 'claimed', 'consumed', 'fragments_per_update',
  'max_policy_lag', 'version')
if not flow.state then return no_run() end
begin()
redis.call('XLEN', keys.pushes)  -- fails here if the key is damaged, before anything is written
if tonumber(args.epoch) > tonumber(flow.epoch) then return 'epoch' end
local from, seq = args.worker .. ':' .. args.incarnation, tonumber(args.seq)
local claim = from .. ':' .. args.seq
local last = whole(redis.call('HGET', keys.pushed, from)) or -1
if seq <= last then
  if redis.call('ZREM', keys.claims, claim) == 1 then redis.call('HINCRBY', keys.flow, 'claimed', -1) end
  return 'duplicate'
end
if flow.state == 'finished' then return 'finished' end
local incarnations = whole(redis.call('HGET', keys.incarnations, args.worker)) or 0
if tonumber(args.incarnation) < incarnations - 1 then return 'superseded' end
local heard = tonumber(args.refusals)
if (whole(redis.call('HGET', keys.pushed, from .. ':refused')) or 0) > heard then return 'stale' end  -- sent again
local function append_action_trace()  -- also for a fragment that is refused: its environments have moved on
  redis.call('HDEL', keys.pushed, args.worker .. ':tries')
  for name, number in string.gmatch(args.sessions, '([^=,]+)=(%d+)') do
    redis.call('HSET', keys.pushed, 'session:' .. name, number)
  end
  for _, fate in ipairs({'', ':stale'}) do
    if args.late ~= '0' then redis.call('HINCRBY', keys.produced, args.worker .. ':transitions' .. fate, args.late) end
  end
  if args.action_trace_length == '0' then
    redis.call('DEL', keys.action_trace)
  else
    redis.call('RPUSH', keys.action_trace, args.action_trace_entry)
    redis.call('LTRIM', keys.action_trace, -tonumber(args.action_trace_length), -1)
  end
end
local function produced(fate, fragments)
  redis.call('HINCRBY', keys.produced, args.worker .. ':fragments' .. fate, fragments)
  redis.call('HINCRBY', keys.produced, args.worker .. ':transitions' .. fate, fragments * tonumber(args.transitions))
end
if redis.call('ZREM', keys.claims, claim) == 0 then
  if window_is_full(tonumber(flow.claimed), flow) then
    redis.call('HSET', keys.pushed, from .. ':refused', heard + 1)
    produced('', 1)
    produced(':stale', 1)
    append_action_trace()
    return 'stale'
  end
  redis.call('HINCRBY', keys.flow, 'claimed', 1)
end
local lost = seq - last - 1  -- pushed before, to a Redis that has lost them since; the claims that it still holds go
if lost > 0 then
  for _, id in ipairs(redis.call('ZRANGE', keys.claims, 0, -1)) do
    local whose, its = string.match(id, '^(.*):(%d+)$')
    if whose == from and tonumber(its) < seq then
      redis.call('HINCRBY', keys.flow, 'claimed', 0 - redis.call('ZREM', keys.claims, id))
    end
  end
end
local written = redis.call('HINCRBY', keys.flow, 'pushed_bytes', args.bytes)
local id = redis.call('XADD', keys.log, '*', 'worker', args.worker, 'incarnation', args.incarnation, 'seq', args.seq,
  'lost', lost, 'transitions', args.transitions, 'end', written, 'version', flow.version or '', args.field, args.value)
redis.call('XADD', keys.pushes, id, 'worker', args.worker, 'incarnation', args.incarnation, 'seq', args.seq,
  'lost', lost, 'transitions', args.transitions, 'body', args.field == 'body' and args.value or '')
redis.call('HSET', keys.pushed, from, args.seq)
produced('', 1 + lost)
append_action_trace()
return 'pushed'
