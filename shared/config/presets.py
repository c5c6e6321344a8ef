"""The configs that come with Stagecoach, and the file that a user means by a name."""

import difflib
import os
import re
from dataclasses import dataclass
from pathlib import Path

from stagecoach.shared.base.errors import PACKAGE, ConfigError
from stagecoach.shared.base.printable import printable

_PRESETS = PACKAGE / "coordinator" / "presets"
_IS_NO_PRESET = re.compile(r"^[^#]*\bbenchmarks\.|^space:", re.MULTILINE)
"""An environment that is only in the repository, or a study (`stagecoach tune`)."""


@dataclass(frozen=True)
class Preset:
    """A config shipped with Stagecoach; `about` is the first sentence of its comment."""

    name: str
    about: str
    path: Path


def list_presets() -> list[Preset]:
    """All presets by name, except those whose environment is only in the repository, and studies."""
    texts = {path: path.read_text() for path in sorted(_PRESETS.glob("*.yaml"))}
    return [Preset(path.stem, _about(text), path) for path, text in texts.items() if not _IS_NO_PRESET.search(text)]


def names_config(given: str | Path) -> bool:
    """Returns True for a preset's name and for a config file's path, existing or not; False for an environment's id."""
    path = Path(given)
    return path.suffix in (".yaml", ".yml") or _is_file(path) or str(given) in {one.name for one in list_presets()}


def config_file(given: str | Path) -> Path:
    """Returns the path of the file or of the preset with this name; raises `ConfigError` if neither exists."""
    path = Path(os.path.expanduser(given))
    if path.suffix in (".yaml", ".yml") or path.parent != Path() or _is_file(path):
        return path
    presets = {preset.name: preset.path for preset in list_presets()}
    if path.name not in presets:
        guesses = difflib.get_close_matches(path.name, presets, n=1)
        hint = f"did you mean {guesses[0]}?" if guesses else f"presets: {', '.join(presets)}"
        raise ConfigError(f"no file {printable(path, 100)} in {Path.cwd()}, and no preset of that name; {hint}")
    return presets[path.name]


def _is_file(path: Path) -> bool:
    try:
        return path.is_file()
    except (OSError, ValueError):  # no file can have this name
        return False


def _about(text: str) -> str:
    comment = " ".join(line[1:].strip() for line in re.match(r"(#.*\n)*", text)[0].splitlines())  # type: ignore[index]
    return re.split(r"(?<=[.;]) ", comment)[0].rstrip(".;")
