"""The configs that come with Stagecoach: the examples, which the installed package carries as well."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path

from shared.errors import UserError

_PACKAGED, _CHECKOUT = Path(__file__).parent / "presets", Path(__file__).parent.parent / "examples"
_NEEDS_THE_REPOSITORY = re.compile(r"^[^#]*\bbenchmarks\.", re.MULTILINE)


@dataclass(frozen=True)
class Preset:
    """One config; `about` is the first sentence of its comment."""

    name: str
    about: str
    path: Path


def list_presets() -> list[Preset]:
    """All of them by name, but for those whose environment is only in the repository."""
    folder = _PACKAGED if _PACKAGED.is_dir() else _CHECKOUT
    texts = {path: path.read_text() for path in sorted(folder.glob("*.yaml"))}
    return [
        Preset(path.stem, _about(text), path) for path, text in texts.items() if not _NEEDS_THE_REPOSITORY.search(text)
    ]


def config_file(given: Path) -> Path:
    """The file itself, or that of the preset with this name; raises `UserError` where there is neither."""
    if given.exists() or given.suffix or given.parent != Path():
        return given
    presets = {preset.name: preset.path for preset in list_presets()}
    if given.name not in presets:
        raise UserError(f"no file {given} here, and no preset of that name; presets: {', '.join(presets)}")
    return presets[given.name]


def _about(text: str) -> str:
    comment = " ".join(line[1:].strip() for line in re.match(r"(#.*\n)*", text)[0].splitlines())  # type: ignore[index]
    return re.split(r"(?<=[.;]) ", comment)[0].rstrip(".;")
