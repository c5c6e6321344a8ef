local function wake() redis.call('XADD', keys.wakeups, 'MAXLEN', '~', '64', '*', 'w', '1') end
