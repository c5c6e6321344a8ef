"""The configuration of the learning algorithms, a module for each: what all roles know of an algorithm."""
