"""Collecting tests imports neither Ray nor, where that can be, torch: both take seconds in each process.

Imports are read from the source, without those in functions and for type checking.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
WITHOUT = {
    "ray": ("benchmarks", "chaos", "cluster", "deploy", "end_to_end", "learning", "rollout_worker", "shared"),
    "torch": ("cluster", "end_to_end"),
}  # fmt: skip


def at_import(body: list[ast.stmt]) -> Iterator[str]:
    """Dotted names that a module imports when it is imported."""
    for node in body:
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module is not None:
            yield node.module
            yield from (f"{node.module}.{alias.name}" for alias in node.names)
        elif isinstance(node, ast.If | ast.Try | ast.With):
            skipped = isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test)
            yield from at_import([] if skipped else node.body)


@cache
def imports(module: str) -> frozenset[str]:
    """Names imported by a module of this checkout; none for any other module."""
    root = ROOT / "src" if module.startswith("stagecoach.") else ROOT
    path = root / f"{module.replace('.', '/')}.py"
    return frozenset(at_import(ast.parse(path.read_text()).body)) if path.exists() else frozenset()


def way_to(package: str, start: str) -> list[str]:
    """Modules through which `start` imports `package`, if it does."""
    ways = {start: [start]}
    queue = [start]
    for module in queue:
        for name in imports(module):
            if name.partition(".")[0] == package:
                return [*ways[module], name]
            if name not in ways:
                ways[name] = [*ways[module], name]
                queue.append(name)
    return []


@pytest.mark.parametrize(
    ("package", "folder"), [(package, folder) for package, folders in WITHOUT.items() for folder in folders]
)
def test_collection_imports_neither_ray_nor_torch(package: str, folder: str) -> None:
    files = [*(ROOT / "tests" / folder).rglob("*.py"), ROOT / "tests" / "conftest.py"]
    assert len(files) > 2
    modules = [".".join(path.relative_to(ROOT).with_suffix("").parts) for path in files]
    assert [way for module in modules if (way := way_to(package, module))] == []
    assert way_to("torch", "stagecoach.shared.policies.policy")
