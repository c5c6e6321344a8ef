local function write_ledger(accounts)  -- '1' if they are the whole ledger, then worker, account, worker, ...
  if accounts[1] == '1' then redis.call('DEL', keys.ledger) end
  for from = 2, #accounts, 1000 do  -- unpack takes only some thousands
    redis.call('HSET', keys.ledger, unpack(accounts, from, math.min(from + 999, #accounts)))
  end
end
