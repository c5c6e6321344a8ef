--- @include common, positions, epochs, log_entries, ledger
--- @keys flow, log, claims, produced, incarnations, pushed, ledger, pushes
--- @args epoch, owner, number, position, taken_after, before, digest, mode, accounts...
-- For a Redis that may know less than its trainer, whose ledger through `position` is `accounts`: epoch, ledger, credit
-- and what was pushed become what the ledger, the log behind its position and the claims that are held say; new entries
-- of the log come after the position. `digest` is that of the names of all entries that the trainer took through
-- `position`, `before` that of those through `taken_after`. `mode`: 'compare' changes nothing; 'if_same' changes nothing
-- if the log holds others there; 'anyway' makes the log begin behind them then. `owner` is as in check_epoch. `number`
-- counts the calls of one trainer (0: not counted): one that arrives late, after it was repeated, changes nothing.
-- Returns 1, 0 if fenced, or 2 if the log holds others.
if fenced(args.epoch, args.owner) then return 0 end
local epoch, number, answer = string.match(redis.call('HGET', keys.flow, 'forwarded') or '', '^(%d+):(%d+):(%d)$')
if epoch == args.epoch and args.number ~= '0' and tonumber(args.number) <= tonumber(number) then return tonumber(answer) end
begin()
local digest = args.before
if after(args.position, args.taken_after) then
  each_entry(args.taken_after, function(fields, pushed, id)
    local from = {fields['worker'] or '', fields['incarnation'] or '', fields['seq'] or ''}
    digest = redis.sha1hex(digest .. ' ' .. (pushed and id .. ' ' .. table.concat(from, ':') or id))
  end, args.position)
end
local same = digest == args.digest
if args.mode == 'compare' and after(redis.call('HGET', keys.flow, 'trimmed_id'), args.position) then same = false end
if not same and args.mode ~= 'anyway' then return 2 end
if args.mode == 'compare' then return 1 end
local totals, marks, credit = {}, {}, 0
local function add(worker, fragments, transitions)
  local total = totals[worker] or {0, 0}
  totals[worker] = {total[1] + fragments, total[2] + transitions}
end
for index = 2, #args.accounts, 2 do
  local worker, account = args.accounts[index], cjson.decode(args.accounts[index + 1])
  local incarnations = whole(redis.call('HGET', keys.incarnations, worker)) or 0
  add(worker, account.consumed.fragments, account.consumed.transitions)
  for _, count in pairs(account.dropped) do add(worker, count.fragments, count.transitions) end
  for incarnation, seq in pairs(account.high_water) do
    marks[worker .. ':' .. incarnation] = seq
    incarnations = math.max(incarnations, tonumber(incarnation) + 1)
  end
  if incarnations > 0 then redis.call('HSET', keys.incarnations, worker, incarnations) end
end
if args.position ~= '0-0' and type(redis.pcall('XADD', keys.log, args.position, 'x', '')) ~= 'table' then
  redis.call('XDEL', keys.log, args.position)  -- it leaves its id behind: every later entry comes after it
end
local first = same and args.taken_after or args.position  -- before it, not all that was learned has to be there
if after(first, redis.call('HGET', keys.flow, 'trimmed_id') or '0-0') then
  redis.call('HSET', keys.flow, 'trimmed_id', first)
end
each_entry(args.position, function(fields, pushed)
  local seq, size = whole(fields['seq']), whole(fields['transitions'])
  if pushed and fields['worker'] and fields['incarnation'] and seq and size then
    local from = fields['worker'] .. ':' .. fields['incarnation']
    local gap = math.max(0, seq - (marks[from] or -1) - 1)
    add(fields['worker'], 1 + gap, (1 + gap) * size)
    credit = credit + 1 + math.max(0, gap - (whole(fields['lost']) or 0))
    marks[from] = math.max(marks[from] or -1, seq)
  end
end)
for _, from in ipairs(redis.call('HKEYS', keys.pushed)) do  -- what came between those entries is never read
  if string.match(from, ':%d+$') and not marks[from] then redis.call('HDEL', keys.pushed, from) end
end
for from, seq in pairs(marks) do redis.call('HSET', keys.pushed, from, seq) end
for _, name in ipairs(redis.call('HKEYS', keys.produced)) do
  local worker = string.match(name, '^(.*):fragments$')
  if worker then add(worker, 0, 0) end
end
for _, id in ipairs(redis.call('ZRANGE', keys.claims, 0, -1)) do
  local from, seq = string.match(id, '^(.*):(%d+)$')
  if not from or tonumber(seq) <= (marks[from] or -1) then redis.call('ZREM', keys.claims, id) end
end
for worker, total in pairs(totals) do
  local function stale(count)
    return whole(redis.call('HGET', keys.produced, worker .. count .. ':stale')) or 0
  end
  redis.call('HSET', keys.produced, worker .. ':fragments', total[1] + stale(':fragments'),
    worker .. ':transitions', total[2] + stale(':transitions'))
end
local consumed = tonumber(redis.call('HGET', keys.flow, 'consumed') or '0')
redis.call('HSET', keys.flow, 'claimed', consumed + credit + redis.call('ZCARD', keys.claims),
  'epoch', args.epoch, 'owner', owner_or(args.owner), 'committed_id', args.position,
  'forwarded', args.epoch .. ':' .. args.number .. ':' .. (same and 1 or 2))
write_ledger(args.accounts)
return same and 1 or 2
