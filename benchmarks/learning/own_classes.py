"""The classes of examples/own_exploration.py, whose folder is no package."""

import sys

from benchmarks.provenance import ROOT

sys.path.append(str(ROOT / "examples"))
from own_exploration import Persistent, Recent  # type: ignore[import-not-found]

__all__ = ["Persistent", "Recent"]
