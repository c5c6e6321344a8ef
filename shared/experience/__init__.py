"""What experience is made of: fragments, spaces, columns, counters."""
