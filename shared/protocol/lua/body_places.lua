--- @include log_entries
--- @keys log, pushes
-- Where the log has its bodies on shards: {worker, place, worker, place, ...}.
local places = {}
each_entry('0-0', function(fields, pushed)
  if pushed and fields['body'] and fields['body'] ~= '' then
    places[#places + 1] = fields['worker'] or '?'
    places[#places + 1] = fields['body']
  end
end)
return places
