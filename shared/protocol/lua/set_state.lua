--- @include common, epochs, wakeups
--- @keys flow, wakeups
--- @args state, reason, expected, epoch, fields...
-- Sets the run's state with its reason and more fields: only from the state `expected`, and only for the trainer of
-- `epoch`, unless these are ''. Returns 1 if it changed, 0 if not, -1 if fenced.
local state = redis.call('HGET', keys.flow, 'state')
if not state then return no_run() end
if args.expected ~= '' and state ~= args.expected then return 0 end
if args.epoch ~= '' and fenced(args.epoch) then return -1 end
begin()
redis.call('HSET', keys.flow, 'state', args.state, 'reason', args.reason, unpack(args.fields))
if args.state == 'finished' and args.epoch ~= '' then redis.call('HDEL', keys.flow, 'at_work') end  -- says its trainer
if args.state == 'running' and state == 'finished' then
  redis.call('HDEL', keys.flow, 'at_work', 'deaths', 'taking')
end
wake()
return 1
