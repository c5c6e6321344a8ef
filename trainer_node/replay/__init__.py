"""Uses of the archived log after the run: the same learner, moved again by the same entries (`rerun.py`)."""
