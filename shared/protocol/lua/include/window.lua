local function window_is_full(claimed, flow)  -- (L + 1) · K fragments are in flight
  return claimed - tonumber(flow.consumed) >= (tonumber(flow.max_policy_lag) + 1) * tonumber(flow.fragments_per_update)
end
