"""The page reference/python.md of the site, from the docstrings of what `stagecoach` exports."""

import ast
import inspect
import re
import textwrap
from collections.abc import Iterator
from typing import Any

import stagecoach

_BEGINNING = """# Python reference

Every name that `stagecoach` exports, generated from docstrings by `make docs`; do not edit by hand. How to use them:
[from Python](../how-to/python.md).
"""
_FIRST = (
    "train",
    "Run",
    "load_config",
    "Config",
    "load_policy",
    "DeployedPolicy",
    "make_environment",
    "read_experience",
)
_INTERNAL = {
    "Run": {
        "abandon", "checkpoint_store", "client", "first_event", "prepare", "recent", "store_location", "submit",
        "take_up",
    },
    "Config": {"changed", "check_stops", "decides_otherwise", "hash", "seating"},
}  # fmt: skip
"""Methods that only the command line and the roles call."""
_SECTION = re.compile(r"^(Args|Returns|Raises|Yields|Attributes):$")


def python_markdown() -> str:
    """Returns the page: first what most programs use, then the parts of algorithms and environments."""
    lines = [_BEGINNING, "## Runs and policies"]
    for name in _FIRST:
        lines += _entry(name)
    lines += ["", "## Parts for classes of your own"]
    for name in sorted(set(stagecoach.__all__) - set(_FIRST), key=str.lower):
        lines += _entry(name)
    return "\n".join(lines) + "\n"


def _entry(name: str) -> Iterator[str]:
    found = getattr(stagecoach, name)
    yield from ("", f"### `{name}`", "")
    if inspect.isroutine(found):
        yield from ("```python", _signature(name, found), "```", "")
    own = getattr(found, "__doc__", "") if inspect.isclass(found) or inspect.isroutine(found) else ""
    yield _plain(own or "")
    if inspect.isclass(found) and name in _FIRST:
        for method, function, is_property in public_methods(name):
            shown = method if is_property else _signature(method, function)
            text = _plain(function.__doc__)
            yield from ("", f"#### `{name}.{method}`", "", "```python", shown, "```", "", text)


def public_methods(name: str) -> Iterator[tuple[str, Any, bool]]:
    """Yields a class's documented methods, those of our base classes too: name, function, and whether a property."""
    seen = set(_INTERNAL.get(name, ()))
    for owner in getattr(stagecoach, name).__mro__:
        for method, value in vars(owner).items() if owner.__module__.startswith("stagecoach.") else ():
            function = getattr(value, "__func__", value.fget if isinstance(value, property) else value)
            if not method.startswith("_") and method not in seen and inspect.isfunction(function) and function.__doc__:
                seen.add(method)
                yield method, function, isinstance(value, property)


def _signature(name: str, function: Any) -> str:
    """Returns a function's signature as its source has it."""
    lines = textwrap.dedent(inspect.getsource(function)).splitlines()
    (node,) = ast.parse("\n".join(lines)).body
    assert isinstance(node, ast.FunctionDef)
    text = "\n".join(lines[node.lineno - 1 : node.body[0].lineno - 1])
    text = re.sub(r"\((\s*)(?:self|cls)(?:,\s*|(?=\)))", r"(\1", text.partition("#")[0] if "\n" not in text else text)
    text = text.rstrip().removesuffix("  # fmt: skip").replace(f"def {function.__name__}(", f"def {name}(")
    return f"{text} ..."


def _plain(docstring: str) -> str:
    """Returns a docstring as Markdown: its sections as lists."""
    lines: list[str] = []
    section = ""
    for line in inspect.cleandoc(docstring).splitlines():
        if found := _SECTION.match(line):
            section = found[1]
            lines += [f"*{section}*", ""]
        elif section and re.match(r"    \S", line):
            argument = re.match(r"    (\*{0,2}\w+): (.*)", line)
            lines.append(f"- `{argument[1]}`: {argument[2]}" if argument else f"- {line.strip()}")
        elif section and line.strip():
            lines.append(f"  {line.strip()}")
        else:
            lines.append(line)
    return "\n".join(lines).strip()
