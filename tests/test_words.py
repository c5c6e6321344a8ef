"""Counts of texts and names that are not plain engineering English; none may rise.

`python -m tests.test_words [FOLDER …]` prints each place below the folders, and the table below with today's counts.
Lower a folder's line when its counts fall.
"""

from __future__ import annotations

import ast
import re
import sys
from collections import Counter
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import NamedTuple

import pytest

ROOT = Path(__file__).parent.parent

KINDS = ("opening", "sign", "name", "test_name", "long_test_name")
"""The columns of `BOUNDS`."""

BOUNDS = {
    "coordinator": (0, 0, 0, 0, 0),
    "rollout_worker": (0, 0, 0, 0, 0),
    "shared": (0, 0, 0, 0, 0),
    "src": (1, 1, 0, 0, 0),
    "trainer_node": (0, 0, 0, 0, 0),
    "tests": (0, 0, 0, 0, 0),
    "tests/benchmarks": (0, 0, 0, 0, 0),
    "tests/chaos": (0, 0, 0, 0, 0),
    "tests/clients": (0, 0, 0, 0, 0),
    "tests/cluster": (0, 0, 0, 0, 0),
    "tests/coordinator": (0, 0, 0, 0, 0),
    "tests/deploy": (0, 0, 0, 0, 0),
    "tests/end_to_end": (0, 0, 0, 0, 0),
    "tests/learning": (0, 0, 0, 0, 0),
    "tests/rollout_worker": (0, 0, 0, 0, 0),
    "tests/shared": (0, 0, 0, 0, 0),
    "tests/simulation": (0, 0, 0, 0, 0),
    "tests/trainer_node": (0, 0, 0, 0, 0),
}

PLAIN_OPENINGS = 0.85
"""Share of the docstrings that begin with a verb or noun; the aim is 0.98."""

OPENINGS = re.compile(
    r"(?:after|are|as|at|before|by|did|do|does|during|for|from|has|have|how|if|in|is|it|its|nothing|of|on|once|otherwise"
    r"|over|per|so|than|that|their|them|there|they|those|to|unless|until|up|what|whatever|when|where|wherever|whether"
    r"|which|while|who|whoever|whom|whose|why|with|within|without)\b",
    re.IGNORECASE,
)
"""First words of docstrings that are neither a verb nor part of a noun."""
SIGNS = re.compile(
    r"(?<!, )(?<!not )\bfound\b|\b(?:told|tells?|made|asked|ones|beside|anew|c[ao]mes? to|t[ao]kes? up|taken up|went on"
    r"|go(?:es)? on|by hand|(?:is|are) none|is no (?!longer|more|less)[a-z]+)\b|\bits\b(?=[.,;:)]|$)",
    re.IGNORECASE,
)
"""Words of docstrings and messages that call for a standard noun or a direct statement."""
NAMES = frozenset({"tell", "to_tell", "look", "whole", "last_words", "room", "WorkerFace"})
TEST_NAMES = re.compile(
    r"test_(?:a|an|and|are|as|by|for|from|how|in|is|it|its|of|on|one|that|the|they|those|to|until|what|whatever|when"
    r"|where|wherever|whether|which|who|whoever|whom|whose|why|with)_"
)
"""A test's name begins with its subject, without an article."""
LONGEST_TEST_NAME = 60


class Finding(NamedTuple):
    folder: str
    kind: str
    place: str
    text: str


def docstrings(tree: ast.AST) -> Iterator[ast.Constant]:
    """Of modules, classes, functions and attributes: each string that is a statement."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) and isinstance(node.value.value, str):
            yield node.value


def names(tree: ast.AST) -> Iterator[tuple[int, str]]:
    """Functions, classes and attributes that are defined anywhere in a module."""
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            yield node.lineno, node.name
        elif isinstance(node, ast.AnnAssign | ast.Assign):
            for target in [node.target] if isinstance(node, ast.AnnAssign) else node.targets:
                if isinstance(target, ast.Name | ast.Attribute):
                    yield node.lineno, target.id if isinstance(target, ast.Name) else target.attr


def in_product(tree: ast.AST) -> Iterator[tuple[str, int, str]]:
    for docstring in docstrings(tree):
        text = " ".join(str(docstring.value).split())
        if OPENINGS.match(text):
            yield "opening", docstring.lineno, text[:80]
    for node in ast.walk(tree):
        if isinstance(node, ast.Constant) and isinstance(node.value, str) and node.value.count(" ") > 1:
            for sign in SIGNS.finditer(node.value):
                around = node.value[max(0, sign.start() - 30) : sign.end() + 30]
                yield "sign", node.lineno + node.value[: sign.start()].count("\n"), " ".join(around.split())
    yield from (("name", line, name) for line, name in names(tree) if name in NAMES)


def in_tests(tree: ast.AST) -> Iterator[tuple[str, int, str]]:
    for line, name in names(tree):
        if name.startswith("test_") and TEST_NAMES.match(name):
            yield "test_name", line, name
        if name.startswith("test_") and len(name) > LONGEST_TEST_NAME:
            yield "long_test_name", line, name


def findings(folder: str) -> Iterator[Finding]:
    path = ROOT / folder
    for module in sorted(path.glob("*.py") if folder == "tests" else path.rglob("*.py")):
        find = in_tests if folder.startswith("tests") else in_product
        for kind, line, text in sorted(find(ast.parse(module.read_text())), key=lambda each: each[1]):
            yield Finding(folder, kind, f"{module.relative_to(ROOT)}:{line}", text)


@cache
def counts(folder: str) -> tuple[int, ...]:
    found = Counter(finding.kind for finding in findings(folder))
    return tuple(found[kind] for kind in KINDS)


def folders() -> list[str]:
    """The product's folders, `tests` for the modules directly in it, and the folders of tests."""
    tests = [f"tests/{path.name}" for path in (ROOT / "tests").iterdir() if any(path.rglob("test_*.py"))]
    return ["coordinator", "rollout_worker", "shared", "src", "trainer_node", "tests", *sorted(tests)]


def test_bounds_name_every_folder() -> None:
    assert [folder for folder in folders() if folder not in BOUNDS] == []


@pytest.mark.parametrize("folder", BOUNDS)
def test_words_stay_within_bounds(folder: str) -> None:
    """`python -m tests.test_words FOLDER` shows the places."""
    above = [kind for kind, now, bound in zip(KINDS, counts(folder), BOUNDS[folder], strict=True) if now > bound]
    assert above == [], counts(folder)


def test_docstrings_begin_with_verb_or_noun() -> None:
    modules = [path for folder in folders() if "tests" not in folder for path in (ROOT / folder).rglob("*.py")]
    total = sum(len(list(docstrings(ast.parse(path.read_text())))) for path in modules)
    assert 1 - sum(counts(folder)[0] for folder in BOUNDS) / total >= PLAIN_OPENINGS


if __name__ == "__main__":
    for chosen in sys.argv[1:]:
        for finding in findings(chosen):
            print(f"{finding.place}: {finding.kind}: {finding.text}")
    print(f"BOUNDS = {{  # {', '.join(KINDS)}")
    for each in folders():
        now = counts(each)
        print(f'    "{each}": {now},' + ("" if now == BOUNDS.get(each) else f"  # was {BOUNDS.get(each)}"))
    print("}")
