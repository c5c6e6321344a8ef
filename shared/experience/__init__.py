"""Experience as data: fragments, spaces, columns, counters."""
