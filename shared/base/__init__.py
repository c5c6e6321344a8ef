"""Foundations of every other package: errors, printable text, addresses, processes. Imports nothing of Stagecoach."""
