"""`python -m benchmarks.rehearsal`: see rehearsal.py."""

import sys

from benchmarks.rehearsal.rehearsal import main

if __name__ == "__main__":
    sys.exit(main())
