--- @include common, epochs, ledger, wakeups
--- @keys flow, board, ledger, wakeups
--- @args epoch, version, history, consumed, committed_id, header, blob, place, checkpoint, process, accounts...
-- One step: the board, the version, the credit and the ledger move together. `consumed` counts the version's fragments,
-- `checkpoint` names the one that has the weights, `place` the body in shared memory ('' if the blob does), `process` is
-- the Redis process that the trainer's ledger was matched with last ('' for any), `accounts` is what has changed of it.
-- A version that is there already (a restarted trainer arrives at it again) changes nothing but the place of the same
-- weights, since the memory may have lost them. `history` names the experience that it comes from.
-- Returns {reply, state, reason, bytes in the log}; reply: published, known, other (another history), fenced, behind.
if fenced(args.epoch) then return {'fenced', '', '', 0} end
if behind(args.epoch, args.process) then return {'behind', '', '', 0} end
begin()
local version, wanted = tonumber(redis.call('HGET', keys.flow, 'version') or '0'), tonumber(args.version)
local reply = 'known'
if wanted == version then
  if (redis.call('HGET', keys.flow, 'history') or '') ~= args.history then
    reply = 'other'
  else  -- without a look: trainers may write the board, not read it (deploy/users.acl)
    redis.call('HSET', keys.board, 'blob', args.blob, 'place', args.place, 'checkpoint', args.checkpoint)
  end
end
if wanted > version then
  reply = 'published'
  redis.call('HSET', keys.board, 'version', args.version, 'header', args.header, 'blob', args.blob,
    'place', args.place, 'checkpoint', args.checkpoint)
  redis.call('HSET', keys.flow, 'version', args.version, 'committed_id', args.committed_id,
    'published_id', args.committed_id, 'history', args.history)
  redis.call('HINCRBY', keys.flow, 'consumed', args.consumed)
  write_ledger(args.accounts)
  wake()
end
local flow = read_fields(keys.flow, 'state', 'reason', 'pushed_bytes', 'trimmed_bytes')
return {reply, flow.state, flow.reason, tonumber(flow.pushed_bytes) - tonumber(flow.trimmed_bytes)}
