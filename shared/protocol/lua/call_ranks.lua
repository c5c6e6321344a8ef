--- @include common, epochs
--- @keys flow, ranks
--- @args epoch, invitation
-- Calls the other ranks of the newest trainer: with an invitation (JSON), or '' once the group has begun. Returns 0 if
-- fenced.
if fenced(args.epoch) then return 0 end
begin()
redis.call('XADD', keys.ranks, 'MAXLEN', '~', '64', '*', 'epoch', args.epoch, 'invitation', args.invitation)
return 1
