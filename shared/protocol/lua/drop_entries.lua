--- @include common, positions, quarantine
--- @keys flow, log, quarantine
--- @args first, last, why, durable
-- Puts the log entries from `first` to `last` into quarantine. Returns how many are there for it, or -1 if a published
-- version or the checkpoint at `durable` has learned from them.
if redis.call('EXISTS', keys.flow) == 0 then return 0 end
begin()
return quarantine(args.first, args.last, args.why, args.durable)
