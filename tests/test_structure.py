"""The rules of the house that ruff and import-linter do not hold (pyproject.toml): cycles, sizes, names, tests apart.

Each rule is a function from a folder to the places that break it, so that the same function is shown to find a break.
"""

from __future__ import annotations

import ast
import graphlib
import importlib.metadata
import re
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import grimp
import pytest

ROOT = Path(__file__).parent.parent
PACKAGES = ("coordinator", "rollout_worker", "trainer_node", "shared")
MAX_MODULE_LINES = 500
MAX_FUNCTION_LINES = 80
VAGUE_NAMES = {"utils", "util", "helpers", "helper", "misc", "common"}
KEYS_MODULE = Path("shared/protocol/keys.py")
FOLDERS_OF_TESTS = (
    "benchmarks", "chaos", "cluster", "coordinator", "deploy", "end_to_end", "learning", "rollout_worker", "shared",
    "support",
)  # fmt: skip
USE_PUBLIC_NAMES_ONLY = ("chaos", "cluster", "end_to_end", "learning", "shared")
"""Their attributes of others are ruff's SLF001."""

Rule = Callable[[Path], list[str]]


def modules(root: Path) -> Iterator[tuple[Path, str]]:
    """Every product module below `root`: path relative to it, and text."""
    for package in PACKAGES:
        for path in sorted((root / package).rglob("*.py")):
            yield path.relative_to(root), path.read_text()


def imported(tree: ast.AST) -> Iterator[tuple[str, int]]:
    """Dotted names that are imported anywhere in a module, with their lines (imports within functions as well)."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from ((alias.name, node.lineno) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            if node.level:
                yield ".", node.lineno
            for alias in node.names:
                yield f"{node.module}.{alias.name}", node.lineno


def imports_between_tests(root: Path) -> list[str]:
    """Builders that several tests need live in tests/support; a rename must not break what has not changed meaning."""
    return [
        f"{path.relative_to(root)}:{line} imports {name}"
        for folder in FOLDERS_OF_TESTS
        for path in sorted((root / "tests" / folder).rglob("*.py"))
        for name, line in imported(ast.parse(path.read_text()))
        if (name.startswith("tests.") and ".test_" in name)
        or (folder in USE_PUBLIC_NAMES_ONLY and re.search(r"\._[^_.]*$", name))
    ]


def long_modules(root: Path) -> list[str]:
    counted = ((path, len(text.splitlines())) for path, text in modules(root))
    return [f"{path} has {lines} lines" for path, lines in counted if lines > MAX_MODULE_LINES]


def long_functions(root: Path) -> list[str]:
    found = []
    for path, text in modules(root):
        for node in ast.walk(ast.parse(text)):
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                lines = (node.end_lineno or node.lineno) - node.lineno + 1
                if lines > MAX_FUNCTION_LINES:
                    found.append(f"{path}:{node.lineno} {node.name} has {lines} lines")
    return found


def vague_names(root: Path) -> list[str]:
    return [str(path) for path, _ in modules(root) if VAGUE_NAMES & {path.stem, *path.parts[:-1]}]


def keys_outside_their_module(root: Path) -> list[str]:
    return [str(path) for path, text in modules(root) if path != KEYS_MODULE and "stagecoach:{" in text]


def arrays_that_execute(root: Path) -> list[str]:
    return [str(path) for path, text in modules(root) if re.search(r"allow_pickle=(?!False)", text)]


def init_files_with_code(root: Path) -> list[str]:
    found = []
    for path, text in modules(root):
        body = ast.parse(text).body
        only_docstring = len(body) == 1 and isinstance(body[0], ast.Expr) and isinstance(body[0].value, ast.Constant)
        if path.name == "__init__.py" and not only_docstring:
            found.append(str(path))
    return found


BREAKS: list[tuple[Rule, str, str]] = [
    (long_modules, "shared/a.py", "x = 1\n" * (MAX_MODULE_LINES + 1)),
    (long_functions, "shared/a.py", "class A:\n  def f(self):\n" + "    x = 1\n" * MAX_FUNCTION_LINES),
    (long_functions, "shared/a.py", "async def f():\n" + "    x = 1\n" * MAX_FUNCTION_LINES),
    (vague_names, "shared/utils.py", ""),
    (vague_names, "coordinator/helpers/parts.py", ""),
    (keys_outside_their_module, "coordinator/a.py", 'key = f"stagecoach:{{{run}}}:flow"\n'),
    (arrays_that_execute, "trainer_node/a.py", "np.load(x, allow_pickle=True)\n"),
    (init_files_with_code, "shared/__init__.py", '"""Shared."""\nfrom shared.config.run_config import Config\n'),
    (init_files_with_code, "shared/__init__.py", ""),
    (imports_between_tests, "tests/shared/test_a.py", "from tests.shared.test_b import make\n"),
    (imports_between_tests, "tests/chaos/test_a.py", "def f():\n    import tests.chaos.test_b as b\n"),
    (imports_between_tests, "tests/chaos/a.py", "from shared.protocol.events import _KEPT\n"),
]
RULES = list(dict.fromkeys(rule for rule, _, _ in BREAKS))


@pytest.mark.parametrize("rule", RULES, ids=lambda rule: rule.__name__)
def test_the_product_keeps_the_rule(rule: Rule) -> None:
    assert rule(ROOT) == []


@pytest.mark.parametrize(("rule", "name", "text"), BREAKS, ids=lambda value: getattr(value, "__name__", None))
def test_the_rule_finds_a_break(rule: Rule, name: str, text: str, tmp_path: Path) -> None:
    (tmp_path / name).parent.mkdir(parents=True)
    (tmp_path / name).write_text(text)
    assert len(rule(tmp_path)) == 1


def test_imports_keep_the_contracts_of_pyproject(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(ROOT)
    found = subprocess.run(
        [Path(sys.executable).with_name("lint-imports"), "--no-cache"], capture_output=True, text=True, check=False
    )
    assert found.returncode == 0, found.stdout + found.stderr


def test_no_module_imports_itself_by_others() -> None:
    """Imports for type checking and within functions are counted."""
    graph = grimp.build_graph(*PACKAGES, cache_dir=None)
    imports = {name: graph.find_modules_directly_imported_by(name) for name in graph.modules}
    assert {"shared.config.run_config", "trainer_node.learning.algorithms.ppo"} <= imports.keys()
    graphlib.TopologicalSorter(imports).prepare()


@pytest.mark.parametrize("package", ["stagecoach", *PACKAGES])
def test_the_package_is_imported_from_this_checkout_and_no_other_distribution_has_its_name(package: str) -> None:
    assert Path(str(__import__(package).__file__)).is_relative_to(ROOT)
    assert set(importlib.metadata.packages_distributions().get(package, [])) <= {"stagecoach"}
