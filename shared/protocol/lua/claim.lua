--- @include common, window
--- @keys flow, claims, incarnations, draining, wakeups, pushed
--- @args worker, incarnation, seq
-- Asks for permission to act fragment `seq`. Returns {reply, version, epoch, wakeup id, history, token of the shared
-- memory that the trainer reads}; reply: granted, wait_credit,
-- wait_log, wait_memory, drain, superseded, taken (this Redis was rolled back and gave an incarnation twice: register
-- anew), or the run's state if it is not running. A worker that Redis does not know registered before a rollback.
local flow = read_fields(keys.flow, 'state', 'version', 'epoch', 'claimed', 'consumed', 'fragments_per_update',
  'max_policy_lag', 'lease_ms', 'max_log_bytes', 'pushed_bytes', 'trimmed_bytes', 'memory_full', 'history',
  'memory')
if not flow.state then return no_run() end
local function with_flow(reply)
  local last = redis.call('XREVRANGE', keys.wakeups, '+', '-', 'COUNT', 1)
  return {reply, flow.version, flow.epoch, last[1] and last[1][1] or '0-0', flow.history or '',
    flow.memory or ''}
end
if flow.state ~= 'running' then return with_flow(flow.state) end
local incarnations = whole(redis.call('HGET', keys.incarnations, args.worker)) or 0
if incarnations > tonumber(args.incarnation) + 1 then return with_flow('superseded') end
if redis.call('SISMEMBER', keys.draining, args.worker) == 1 then return with_flow('drain') end
local last = whole(redis.call('HGET', keys.pushed, args.worker .. ':' .. args.incarnation)) or -1
if last >= tonumber(args.seq) then return with_flow('taken') end
local time = redis.call('TIME')
local now = tonumber(time[1]) * 1000 + math.floor(tonumber(time[2]) / 1000)
local expired = redis.call('ZRANGEBYSCORE', keys.claims, '-inf', '(' .. now)
local claimed = tonumber(flow.claimed) - #expired
local id = args.worker .. ':' .. args.incarnation .. ':' .. args.seq
local held = redis.call('ZSCORE', keys.claims, id)
local reply = 'granted'
if not held or tonumber(held) < now then
  if window_is_full(claimed, flow) then
    reply = 'wait_credit'
  elseif tonumber(flow.pushed_bytes) - tonumber(flow.trimmed_bytes) >= tonumber(flow.max_log_bytes) then
    reply = 'wait_log'
  else
    local asked = redis.pcall('HSET', keys.flow, 'claimed', flow.claimed)  -- as it is; the first write: is there memory?
    if type(asked) == 'table' then
      if not string.find(asked.err, 'OOM', 1, true) then return asked end
      reply = 'wait_memory'
    else
      claimed = claimed + 1
    end
  end
end
begin()
for _, lapsed in ipairs(expired) do redis.call('ZREM', keys.claims, lapsed) end  -- unpack takes only some thousands
if claimed ~= tonumber(flow.claimed) then redis.call('HSET', keys.flow, 'claimed', claimed) end
if reply == 'wait_memory' then
  redis.call('HSET', keys.flow, 'memory_full', 1)
elseif reply == 'granted' then
  if flow.memory_full then redis.call('HDEL', keys.flow, 'memory_full') end
  if incarnations <= tonumber(args.incarnation) then
    redis.call('HSET', keys.incarnations, args.worker, args.incarnation + 1)
  end
  redis.call('ZADD', keys.claims, now + tonumber(flow.lease_ms), id)
end
return with_flow(reply)
