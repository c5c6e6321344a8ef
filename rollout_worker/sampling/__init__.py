"""Sampling of fragments, in environments or from recorded experience, and the trace that a successor resumes."""
