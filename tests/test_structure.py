"""Rules of the house that ruff and import-linter cannot check: cycles, sizes, names, separate tests."""

from __future__ import annotations

import ast
import graphlib
import importlib.metadata
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import grimp
import pytest

import stagecoach

ROOT = Path(__file__).parent.parent
PACKAGES = ("coordinator", "rollout_worker", "trainer_node", "shared")
MAX_MODULE_LINES = 500
VAGUE_NAMES = {"utils", "util", "helpers", "helper", "misc", "common"}
KEYS_MODULE = Path("shared/protocol/keys.py")
FOLDERS_OF_TESTS = (
    "benchmarks", "chaos", "clients", "cluster", "coordinator", "deploy", "end_to_end", "learning", "rollout_worker",
    "shared", "support",
)  # fmt: skip
USE_PUBLIC_NAMES_ONLY = ("chaos", "cluster", "end_to_end", "learning", "shared")
"""Folders that use public names only; ruff's SLF001 checks attributes."""

MODULES = {
    path.relative_to(ROOT): path.read_text() for package in PACKAGES for path in sorted((ROOT / package).rglob("*.py"))
}
"""Every product module."""


def imported(tree: ast.AST) -> Iterator[str]:
    """Dotted names that are imported anywhere in a module (within functions as well)."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            yield from (f"{node.module}.{alias.name}" for alias in node.names)


def test_builders_that_several_tests_need_live_in_support() -> None:
    """A rename must not break what has not changed meaning."""
    imports = [
        (folder, path, name)
        for folder in FOLDERS_OF_TESTS
        for path in sorted((ROOT / "tests" / folder).rglob("*.py"))
        for name in imported(ast.parse(path.read_text()))
    ]
    assert len(imports) > 1000, "they are found"
    assert [each for each in imports if each[2].startswith("tests.") and ".test_" in each[2]] == []
    private = [each for each in imports if re.search(r"\._[^_.]*$", each[2])]
    assert [each for each in private if each[0] in USE_PUBLIC_NAMES_ONLY] == []


def test_modules_have_at_most_500_lines() -> None:
    """ruff bounds functions: their complexity, branches, returns, statements and arguments."""
    assert [path for path, text in MODULES.items() if len(text.splitlines()) > MAX_MODULE_LINES] == []


def test_modules_are_named_after_what_they_are() -> None:
    assert [path for path in MODULES if VAGUE_NAMES & {path.stem, *path.parts[:-1]}] == []


def test_redis_keys_are_made_in_one_module() -> None:
    assert [path for path, text in MODULES.items() if "stagecoach:{" in text] == [KEYS_MODULE]


def test_no_array_is_read_that_executes() -> None:
    assert [path for path, text in MODULES.items() if re.search(r"allow_pickle=(?!False)", text)] == []


def test_init_files_hold_a_docstring_alone() -> None:
    inits = {path: ast.parse(text) for path, text in MODULES.items() if path.name == "__init__.py"}
    assert [path for path, tree in inits.items() if len(tree.body) != 1 or ast.get_docstring(tree) is None] == []


def test_imports_keep_the_contracts_of_pyproject(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(ROOT)
    found = subprocess.run(
        [Path(sys.executable).with_name("lint-imports"), "--no-cache"], capture_output=True, text=True, check=False
    )
    assert found.returncode == 0, found.stdout + found.stderr


def test_no_module_imports_itself_by_others() -> None:
    """Imports for type checking and within functions are counted."""
    graph = grimp.build_graph("stagecoach", cache_dir=None)
    imports = {name: graph.find_modules_directly_imported_by(name) for name in graph.modules}
    assert {"stagecoach.shared.config.run_config", "stagecoach.trainer_node.learning.algorithms.ppo"} <= imports.keys()
    graphlib.TopologicalSorter(imports).prepare()


def test_no_folder_imports_itself_by_others() -> None:
    """A folder is its own modules; a subfolder is another folder. Imports for type checking and in functions count."""
    graph = grimp.build_graph("stagecoach", cache_dir=None)
    folder = {name: name if graph.find_children(name) else name.rpartition(".")[0] for name in graph.modules}
    imports = {name: set[str]() for name in folder.values()}
    assert len(imports) > 30
    for name, source in folder.items():
        imports[source] |= {folder[other] for other in graph.find_modules_directly_imported_by(name)} - {source}
    graphlib.TopologicalSorter(imports).prepare()


def test_league_and_curriculum_stay_behind_the_seam() -> None:
    """The rest of the product knows them as folds and directors; text counts, not only imports."""
    own = (
        "trainer_node/learning/league.py", "trainer_node/learning/curriculum.py", "trainer_node/learning/folds.py",
        "rollout_worker/league/", "rollout_worker/directors.py", "rollout_worker/matches.py", "shared/league/",
        "shared/storage/players.py", "shared/config/",
    )  # fmt: skip
    shown = ("coordinator/catalog/", "coordinator/cli/", "coordinator/page/")
    named = {str(path) for path, text in MODULES.items() if re.search("league|curricul", text, re.IGNORECASE)}
    assert [path for path in sorted(named) if not path.startswith((*own, *shown))] == []
    assert [each for each in (*own, *shown) if not any(path.startswith(each) for path in named)] == []


def test_stagecoach_is_this_checkout_and_no_other_distribution() -> None:
    assert Path(str(stagecoach.__file__)).is_relative_to(ROOT)
    assert set(importlib.metadata.packages_distributions().get("stagecoach", [])) <= {"stagecoach-rl"}


def test_no_module_has_a_second_name() -> None:
    """In a checkout's root, `shared.errors` can be imported beside `stagecoach.shared.base.errors`."""
    code = [path for folder in (*PACKAGES, "src", "tests", "benchmarks", "examples", "docs", "deploy")
            for path in (ROOT / folder).rglob("*.py")]  # fmt: skip
    assert len(code) > 400
    short = [(path, name) for path in code for name in imported(ast.parse(path.read_text()))
             if name.split(".")[0] in PACKAGES]  # fmt: skip
    assert short == []
    quoted = re.compile(rf"""["'`]({"|".join(PACKAGES)})\.(?!log|py\b)[a-z_]+\W""")
    assert [path for path in code if path.name != "test_structure.py" and quoted.search(path.read_text())] == []
    loaded = [name for name in sys.modules if name.split(".")[0] in PACKAGES]
    assert loaded == []


def test_user_module_shared_is_imported_beside_stagecoach(tmp_path: Path) -> None:
    """A user's folder `shared` is what `shared` means, in a checkout too."""
    (tmp_path / "shared").mkdir()
    (tmp_path / "shared" / "envs.py").write_text("def make(): ...")
    script = (
        "from stagecoach.shared.base.user_code import extend_imports, import_object\n"
        f"extend_imports([{str(tmp_path)!r}]); print(import_object('shared.envs:make', 'environment.id').__module__)"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, cwd=tmp_path)
    assert done.stdout == "shared.envs\n", done.stderr
