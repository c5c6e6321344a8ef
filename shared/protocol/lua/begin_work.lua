--- @include common, positions, epochs, quarantine
--- @keys flow, log, quarantine
--- @args epoch, deaths_allowed, durable
-- A trainer begins its work; `deaths_allowed` deaths in a row over the same entries put these into quarantine,
-- if the checkpoint at `durable` has not learned from them. Returns
-- {deaths in a row without a new version since, whether the trainer before died, what that was about to take ('first
-- last', or ''), how many died there, how many entries are in quarantine for it now}; {-1} if fenced.
if fenced(args.epoch) then return {-1, 0, '', 0, 0} end
begin()
local flow = read_fields(keys.flow, 'at_work', 'version', 'deaths', 'deaths_version', 'taking', 'suspect',
  'suspect_deaths')
local deaths, suspect, there = whole(flow.deaths) or 0, flow.suspect or '', whole(flow.suspect_deaths) or 0
local taking, died, put = flow.taking or '', 0, 0
if flow.deaths_version ~= flow.version then deaths, suspect, there = 0, '', 0 end
if flow.at_work and flow.at_work ~= args.epoch then
  deaths, died = deaths + 1, 1
  if taking == '' then
    there = 0
  elseif taking == suspect then
    there = there + 1
  else
    suspect, there = taking, deaths == 2 and 2 or 1  -- the first one wrote nothing down
  end
  if there >= tonumber(args.deaths_allowed) then
    local first, last = string.match(taking, '^(%d+%-%d+) (%d+%-%d+)$')
    put = first and quarantine(first, last, there .. ' trainers died in a row over it', args.durable) or 0
    if put > 0 then suspect = '' end
  end
end
redis.call('HSET', keys.flow, 'at_work', args.epoch, 'deaths', deaths, 'deaths_version', flow.version, 'suspect', suspect,
  'suspect_deaths', there, 'taking', '')
return {deaths, died, taking, there, put}
