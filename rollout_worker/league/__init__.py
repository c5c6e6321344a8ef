"""Worker's side of a league: seats of each episode, and opponents."""
