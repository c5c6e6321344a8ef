"""Fragments: acted in environments or cut from recorded experience, and the trace that a successor takes up."""
