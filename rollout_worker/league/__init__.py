"""A worker's side of a league: who sits in which seat of each episode, and how opponents act."""
