"""The Ray actors of a run: started, watched, replaced, placed and scaled."""
