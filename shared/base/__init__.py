"""What every other package stands on: errors, printable text, addresses, processes. Imports nothing of Stagecoach."""
