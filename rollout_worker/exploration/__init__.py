"""How actions are chosen from what a policy says: drawn, greedy, random, or disturbed."""
