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
        for method, value in vars(found).items():
            function = getattr(value, "__func__", value.fget if isinstance(value, property) else value)
            if not method.startswith("_") and inspect.isfunction(function) and function.__doc__:
                shown = method if isinstance(value, property) else _signature(method, function)
                yield from ("", f"#### `{name}.{method}`", "", "```python", shown, "```", "", _plain(function.__doc__))


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
