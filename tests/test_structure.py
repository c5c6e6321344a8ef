"""The rules of the house, held by tests: which way imports go, sizes, names, and what must not stand in product code.

Each rule is a function from a folder to the places that break it, so that the same function is shown to find a break.
"""

from __future__ import annotations

import ast
import importlib.metadata
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
PACKAGES = ("coordinator", "rollout_worker", "trainer_node", "shared")
MAY_IMPORT = {
    "shared": {"shared"},
    "rollout_worker": {"shared", "rollout_worker"},
    "trainer_node": {"shared", "trainer_node"},
    "coordinator": set(PACKAGES),
}
MAX_MODULE_LINES = 500
MAX_FUNCTION_LINES = 80
VAGUE_NAMES = {"utils", "util", "helpers", "helper", "misc", "common"}
EXECUTING_FORMATS = {"pickle", "cloudpickle", "dill", "joblib", "marshal", "shelve"}
EXECUTING_CALLS = {"torch.load", "torch.save", "yaml.unsafe_load", "yaml.full_load"}
KEYS_MODULE = Path("shared/redis_keys.py")
MAY_DEEPCOPY = {
    "shared/connection.py",
    "shared/policies/policy.py",
    "rollout_worker/parallel_environments.py",
    "trainer_node/onnx_export.py",
}
"""A client's way to try again; the rule itself; observations; a copy that is only translated. Elsewhere it would be a
network without the policy's statistics: `copy_sharing_buffers` is for those."""

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


def imports_against_the_arrows(root: Path) -> list[str]:
    found = []
    for path, text in modules(root):
        for name, line in imported(ast.parse(text)):
            top = name.partition(".")[0]
            if not top or (top in PACKAGES and top not in MAY_IMPORT[path.parts[0]]):
                found.append(f"{path}:{line} imports {name}")
    return found


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


def formats_that_execute(root: Path) -> list[str]:
    found = []
    for path, text in modules(root):
        tree = ast.parse(text)
        found += [f"{path}:{line} {name}" for name, line in imported(tree) if name.split(".")[0] in EXECUTING_FORMATS]
        found += [f"{path}:{line} {name}" for name, line in imported(tree) if name in EXECUTING_CALLS]
        for node in ast.walk(tree):
            if isinstance(node, ast.Attribute) and ast.unparse(node) in EXECUTING_CALLS:
                found.append(f"{path}:{node.lineno} {ast.unparse(node)}")
            if isinstance(node, ast.keyword) and node.arg == "allow_pickle" and ast.unparse(node.value) != "False":
                found.append(f"{path}:{node.value.lineno} allow_pickle")
    return found


def networks_copied_with_their_statistics(root: Path) -> list[str]:
    return [str(path) for path, text in modules(root) if "deepcopy" in text and path.as_posix() not in MAY_DEEPCOPY]


def init_files_with_code(root: Path) -> list[str]:
    found = []
    for path, text in modules(root):
        body = ast.parse(text).body
        only_docstring = len(body) == 1 and isinstance(body[0], ast.Expr) and isinstance(body[0].value, ast.Constant)
        if path.name == "__init__.py" and not only_docstring:
            found.append(str(path))
    return found


def modules_without_a_docstring(root: Path) -> list[str]:
    return [str(path) for path, text in modules(root) if not ast.get_docstring(ast.parse(text))]


def packages_without_init(root: Path) -> list[str]:
    folders = {path.parent for path, _ in modules(root)}
    return sorted(str(folder) for folder in folders if not (root / folder / "__init__.py").exists())


def owned_by_others(owners: Mapping[str, Sequence[str]]) -> list[str]:
    """`owners`: top-level name → distributions that install it, as `packages_distributions()` answers."""
    return [
        f"{name} belongs to {sorted(set(owners.get(name, [])))}"
        for name in PACKAGES
        if set(owners.get(name, [])) - {"stagecoach"}
    ]


BREAKS: list[tuple[Rule, str, str]] = [
    (imports_against_the_arrows, "shared/a.py", "def f():\n    from coordinator.run import Run\n"),
    (imports_against_the_arrows, "shared/a.py", "import trainer_node.trainer as t\n"),
    (imports_against_the_arrows, "rollout_worker/a.py", "import trainer_node\n"),
    (imports_against_the_arrows, "trainer_node/deep/a.py", "from rollout_worker import sampler\n"),
    (imports_against_the_arrows, "trainer_node/a.py", "from . import trainer\n"),
    (long_modules, "shared/a.py", "x = 1\n" * (MAX_MODULE_LINES + 1)),
    (long_functions, "shared/a.py", "class A:\n  def f(self):\n" + "    x = 1\n" * MAX_FUNCTION_LINES),
    (long_functions, "shared/a.py", "async def f():\n" + "    x = 1\n" * MAX_FUNCTION_LINES),
    (vague_names, "shared/utils.py", ""),
    (vague_names, "coordinator/helpers/parts.py", ""),
    (keys_outside_their_module, "coordinator/a.py", 'key = f"stagecoach:{{{run}}}:flow"\n'),
    (formats_that_execute, "shared/a.py", "import pickle\n"),
    (formats_that_execute, "shared/a.py", "def f():\n    from cloudpickle import loads\n"),
    (formats_that_execute, "trainer_node/a.py", "import torch\nweights = torch.load('x')\n"),
    (formats_that_execute, "trainer_node/a.py", "from torch import load\n"),
    (formats_that_execute, "trainer_node/a.py", "np.load(x, allow_pickle=True)\n"),
    (networks_copied_with_their_statistics, "trainer_node/a.py", "target = copy.deepcopy(policy)\n"),
    (init_files_with_code, "shared/__init__.py", '"""Shared."""\nfrom shared.config import Config\n'),
    (init_files_with_code, "shared/__init__.py", ""),
    (modules_without_a_docstring, "shared/a.py", "x = 1\n"),
    (packages_without_init, "shared/deep/a.py", ""),
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


def test_all_product_modules_are_looked_at() -> None:
    names = {str(path) for path, _ in modules(ROOT)}
    assert {"shared/config.py", "shared/policies/codec.py", "trainer_node/algorithms/ppo.py"} <= names
    assert {name.split("/")[0] for name in names} == set(PACKAGES)


def test_no_other_distribution_owns_a_top_level_name() -> None:
    assert owned_by_others(importlib.metadata.packages_distributions()) == []


def test_another_owner_of_a_top_level_name_is_found() -> None:
    owners = {"shared": ["stagecoach", "somebody-elses"], "coordinator": ["stagecoach"], "yaml": ["PyYAML"]}
    assert owned_by_others(owners) == ["shared belongs to ['somebody-elses', 'stagecoach']"]


@pytest.mark.parametrize("package", PACKAGES)
def test_the_package_is_imported_from_this_checkout(package: str) -> None:
    module = __import__(package)
    assert Path(str(module.__file__)).parent == ROOT / package
