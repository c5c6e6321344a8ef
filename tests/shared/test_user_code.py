"""The user's modules are found last, imported in one way, and what Stagecoach's own names hide is said."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from shared.errors import ConfigError
from shared.user_code import SOURCE, extend_imports, import_object


@pytest.fixture(autouse=True)
def _path(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "path", list(sys.path))


def test_the_users_folders_come_last_and_once_wherever_they_stood(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    sys.path.insert(0, "")
    extend_imports([str(tmp_path), "."])
    extend_imports([str(tmp_path)])
    assert sys.path[-1] == str(tmp_path)
    assert [entry for entry in sys.path if Path(entry or ".").resolve() == tmp_path] == [str(tmp_path)]


def test_a_source_checkout_keeps_its_place(monkeypatch: pytest.MonkeyPatch) -> None:
    before = list(sys.path)
    extend_imports([str(SOURCE)])
    assert sys.path == before


def test_what_is_hidden_by_a_package_of_stagecoach_is_named(tmp_path: Path) -> None:
    (tmp_path / "shared").mkdir()
    (tmp_path / "shared" / "__init__.py").write_text("")
    (tmp_path / "shared" / "physics.py").write_text("def make(): ...")
    (tmp_path / "robot.py").write_text("from shared.physics import make")
    extend_imports([str(tmp_path)])
    with pytest.raises(ConfigError, match=r"'shared\.physics'.* own called shared; rename yours in ") as error:
        import_object("robot:make", "environment.id")
    assert "\n" not in str(error.value)
    sys.modules.pop("robot", None)


@pytest.mark.parametrize(
    ("text", "words"),
    [
        (
            "raise ValueError('low is\\nmore than high')",
            r"it raised ValueError: low is more than high \(at .*rover\.py:2\)",
        ),
        ("import no_such_simulator", r"it raised ModuleNotFoundError: No module named 'no_such_simulator' \(at .*:2\)"),
        ("raise SystemExit('no licence')", r"it raised SystemExit: no licence \(at .*:2\)"),
        ("other = 1", "has no attribute 'make'; expected package.module:name"),
    ],
)
def test_where_a_users_module_raises_is_told(text: str, words: str, tmp_path: Path) -> None:
    (tmp_path / "rover.py").write_text(f"\n{text}")
    extend_imports([str(tmp_path)])
    sys.modules.pop("rover", None)
    with pytest.raises(ConfigError, match=words):
        import_object("rover:make", "environment.id")
    sys.modules.pop("rover", None)
