"""Commands over the recorded metrics of runs: as tables and files, as pictures, side by side."""
