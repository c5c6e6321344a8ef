"""State of a run in Redis: keys, scripts, flow control, the experience log, the policy board and the ledger."""
