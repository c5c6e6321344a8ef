"""Leagues: who may play whom, drawn the same by every process, and the players in a run's store."""
