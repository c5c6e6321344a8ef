"""The user's own modules: environments, algorithms, transforms, rewards.

They are found in the folder of the config and in the folder where the user stands. Those come last on the path of every
process, so that nothing in them takes the place of a module of Stagecoach or of a package that it needs.
"""

from __future__ import annotations

import importlib
import re
import sys
import traceback
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from shared.errors import ConfigError, UserError
from shared.extras import with_extra

PACKAGES = ("coordinator", "rollout_worker", "trainer_node", "shared")
"""The top-level names that belong to Stagecoach."""
SOURCE = Path(__file__).parent.parent
"""The folder that holds them."""
_OURS = re.compile(rf"<frozen |/lib/python3\.\d+/|^{re.escape(str(SOURCE))}/({'|'.join(PACKAGES)})/")
"""Files of ours, of Python, and of what is installed."""


def extend_imports(folders: Iterable[str]) -> None:
    """Makes the modules in these folders importable, after everything that is installed."""
    own = {Path(folder).resolve() for folder in folders} - {SOURCE}
    sys.path[:] = [entry for entry in sys.path if Path(entry or ".").resolve() not in own]
    sys.path += [str(folder) for folder in sorted(own)]


def import_object(path: str, field: str, error: type[UserError] = ConfigError, kind: str = "name") -> Any:
    """`package.module:name` → the object; `kind` says what it should be (a Class, a function).

    Raises:
        error: with the config field, what Python found, and what was expected.
    """
    module, _, name = path.partition(":")
    expected = f"expected package.module:{kind}, importable from the config's folder or the working directory"
    if not name:
        raise error(f"{field}={path}: {expected}")
    try:
        return getattr(importlib.import_module(module), name)
    except (Exception, SystemExit) as failed:
        said, at = with_extra(str(failed)), place(failed)
        if at or not isinstance(failed, (ImportError, AttributeError, ValueError)):
            text = f"it raised {type(failed).__name__}: {said}{at}{_clash()}"
            raise error(f"{field}={path} cannot be imported: {text}") from failed
        raise error(f"{field}={path} cannot be imported: {said}; {expected}{_clash()}") from None


def place(error: BaseException) -> str:
    """Where a user's code raised it, ` (at FILE:LINE)`: the innermost line that is neither ours nor installed."""
    frames = traceback.extract_tb(error.__traceback__)
    frame = next((frame for frame in reversed(frames) if not _OURS.search(frame.filename)), None)
    return f" (at {frame.filename}:{frame.lineno})" if frame else ""


def _clash() -> str:
    """Which modules of the user cannot be imported because Stagecoach has packages of that name."""
    for folder in (Path(entry or ".").resolve() for entry in sys.path):
        files = {name: (folder / f"{name}.py", folder / name / "__init__.py") for name in PACKAGES}
        found = [name for name, places in files.items() if any(place.is_file() for place in places)]
        if found and folder != SOURCE:
            return f". Stagecoach has packages of its own called {', '.join(found)}; rename yours in {folder}"
    return ""
