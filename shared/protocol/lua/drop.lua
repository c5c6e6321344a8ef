--- @include common, positions, epochs, ledger, wakeups
--- @keys flow, ledger, wakeups, lost_bodies, quarantine
--- @args epoch, committed_id, claims, process, decided, accounts...
-- Drops the log entry at `committed_id` and gives `claims` back, once per id. `process` and `accounts` are as in publish;
-- `decided` is 'lost_body' or 'poison' if it is dropped for that, else ''. Returns 'dropped', 'known', 'fenced',
-- 'behind', 'missed' (its body is lost, and it was committed while its body was there) or 'late' (it was committed, but
-- its credit was not given back).
if fenced(args.epoch) then return 'fenced' end
if behind(args.epoch, args.process) then return 'behind' end
begin()
local committed = redis.call('HGET', keys.flow, 'committed_id')
local lost, known = args.decided == 'lost_body', not after(args.committed_id, committed)
local why = args.decided == 'poison' and (redis.call('HGET', keys.quarantine, args.committed_id) or 'again')
if known and not (why and not string.find(why, '^dropped')) then
  return lost and redis.call('SISMEMBER', keys.lost_bodies, args.committed_id) == 0 and 'missed' or 'known'
end
if lost then redis.call('SADD', keys.lost_bodies, args.committed_id) end
redis.call('HSET', keys.quarantine, args.committed_id, why and 'dropped: ' .. why or 'dropped')
redis.call('HINCRBY', keys.flow, 'claimed', 0 - args.claims)  -- not minus zero, which some servers refuse
wake()
if known then return 'late' end
redis.call('HSET', keys.flow, 'committed_id', args.committed_id)
write_ledger(args.accounts)
return 'dropped'
