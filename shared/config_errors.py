"""What pydantic finds wrong with a config, in plain words: what was expected, what was found, what to do."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Any

from shared.printable import counted, printable

if TYPE_CHECKING:
    from pydantic_core import ErrorDetails

_SHOWN_CHARACTERS = 200
_SCALED = re.compile(r"\s*(\d[\d_,]*(?:\.\d+)?)\s*([kKmMgGbB]?)\s*")
_SCALES = {"": 1, "k": 10**3, "m": 10**6, "g": 10**9, "b": 10**9}

_EXPECTED = {
    **dict.fromkeys(("int_type", "int_parsing", "int_from_float", "int_parsing_size"), "a whole number"),
    **dict.fromkeys(("float_type", "float_parsing"), "a number"),
    "finite_number": "a finite number",
    "greater_than": "a number above {gt}",
    "greater_than_equal": "{ge} or more",
    "less_than": "a number below {lt}",
    "less_than_equal": "{le} or less",
    "multiple_of": "a multiple of {multiple_of}",
    **dict.fromkeys(("bool_type", "bool_parsing"), "true or false"),
    **dict.fromkeys(("string_type", "string_unicode", "string_sub_type"), "text"),
    "string_too_short": "text of {min_length} or more characters",
    "string_too_long": "text of at most {max_length} characters",
    "literal_error": "{expected}",
    "enum": "{expected}",
    "path_type": "a path",
    **dict.fromkeys(("tuple_type", "list_type", "set_type"), "a list, as in [1, 2]"),
    "too_short": "a list of {min_length} or more",
    "too_long": "a list of at most {max_length}",
    **dict.fromkeys(("dict_type", "model_type", "model_attributes_type"), "a section, as in {{name: value}}"),
    "none_required": "nothing",
}
"""Error type of pydantic → what it expected; with the bounds that it names."""

_PATTERNS = {
    r"^[\w.]+:\w+$": "package.module:function",
    r"^(cpu|cuda(:\d+)?)$": "cpu, cuda or cuda:0, cuda:1 …",
    r"^(auto|cpu|cuda(:\d+)?)$": "auto, cpu, cuda or cuda:0, cuda:1 …",
    "^[0-9a-f]{64}$": "a SHA-256, 64 hexadecimal digits",
}
"""What the patterns of config fields mean in words."""


def in_words(item: ErrorDetails, where: str) -> str:
    """One mistake as `field: expected X, found Y; do Z`, where `where` is the field with dots."""
    kind, found = item["type"], item["input"]
    context = {name: f"{bound:g}" if isinstance(bound, float) else bound for name, bound in item.get("ctx", {}).items()}
    if kind == "value_error":  # a validator of ours, in words of its own
        message = item["msg"].removeprefix("Value error, ")
        return f"{where}: {message}" if where else message
    if kind == "missing" and isinstance(item["loc"][-1], int):
        return f"{where.rpartition('.')[0]}: expected {counted(item['loc'][-1] + 1, 'value')}, found {shown(found)}"
    if kind == "missing":
        return f"{where} is missing; add it to the config or give --set {where}=…"
    if kind == "extra_forbidden":
        return f"unknown key {where}"
    if kind == "invalid_key" or item["loc"][-1] == "[key]":
        key = item["loc"][-1] if kind == "invalid_key" else found
        return f"{where.removesuffix('.[key]')}: expected keys that are text, found {shown(key)}; put it in quotes"
    if context.get("class_name") == "Schedule":
        expected = "a number, or a schedule such as {kind: linear, start: 0.001, end: 0, over: 10000 env_steps}"
    elif kind == "string_pattern_mismatch":
        pattern = str(context["pattern"])
        expected = _PATTERNS.get(pattern, f"text that matches {pattern}")
    elif kind in _EXPECTED:
        expected = _EXPECTED[kind].format(**context)
    else:  # of a user's own algorithm, which may constrain its fields as it likes
        expected = re.sub(r"^\w+ should be (an? valid )?", "", item["msg"])
    return f"{where}: expected {expected}, found {shown(found)}{_remedy(kind, found)}"


def _remedy(kind: str, found: Any) -> str:
    if found is None:
        return "; give a value or remove the line"
    if kind == "finite_number":
        return "; give such a number, or leave the field out for its default"
    if kind in ("int_parsing", "float_parsing", "model_type") and isinstance(found, str):
        match = _SCALED.fullmatch(found)
        if match is not None:
            number = float(re.sub("[_,]", "", match[1])) * _SCALES[match[2].lower()]
            return f"; write {number:.0f}" if number.is_integer() else f"; write {number:g}"
        return "; write the number in digits" if kind != "model_type" else ""
    return ""


def shown(value: object) -> str:
    """What was found, for an error text; a URL could hold a password."""
    text = "nothing" if value is None else str(value).lower() if isinstance(value, bool) else repr(value)
    return "a URL" if "://" in text else printable(text, _SHOWN_CHARACTERS)
