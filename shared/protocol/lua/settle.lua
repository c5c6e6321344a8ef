--- @include common
--- @keys flow, pushed, produced, incarnations
--- @args worker, incarnation, sessions, late
-- Settles turns of a gateway's sessions that came too late for any fragment, when no fragment follows them; `sessions` and
-- `late` are as in a push. Safe to repeat: turns are counted only while a session's number grows.
-- Returns 1, or 0 if that is settled already, or a newer incarnation acts in its place.
begin()
local incarnations = whole(redis.call('HGET', keys.incarnations, args.worker)) or 0
if tonumber(args.incarnation) < incarnations - 1 then return 0 end
local grew = 0
for name, number in string.gmatch(args.sessions, '([^=,]+)=(%d+)') do
  local session = 'session:' .. name
  if tonumber(number) > (whole(redis.call('HGET', keys.pushed, session)) or 0) then
    redis.call('HSET', keys.pushed, session, number)
    grew = 1
  end
end
if grew == 0 then return 0 end
for _, fate in ipairs({'', ':stale'}) do
  redis.call('HINCRBY', keys.produced, args.worker .. ':transitions' .. fate, args.late)
end
return 1
