--- @include log_entries
--- @keys flow, log, produced, ledger, pushes
-- Both sides of the ledger at one instant: {ledger pairs, produced pairs, worker, incarnation, seq, lost, transitions,
-- worker, ... of the entries after the committed position}; all '' for an entry that was put in by hand.
local committed = redis.call('HGET', keys.flow, 'committed_id') or '0-0'
local flight = {}
each_entry(committed, function(fields, pushed)
  for _, name in ipairs({'worker', 'incarnation', 'seq', 'lost', 'transitions'}) do
    flight[#flight + 1] = pushed and fields[name] or ''
  end
end)
local ledger = redis.pcall('HGETALL', keys.ledger)
return {ledger.err and {} or ledger, redis.call('HGETALL', keys.produced), flight}
