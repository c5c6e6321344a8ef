"""Translates pydantic's errors in a config into plain words: expected, found, remedy."""

import difflib
import inspect
import re
from collections.abc import Sequence
from typing import Any, NamedTuple, TypeVar, get_args, get_origin

from pydantic import BaseModel, ValidationError
from pydantic_core import ErrorDetails

from stagecoach.shared.base.errors import ConfigError
from stagecoach.shared.base.printable import counted, printable
from stagecoach.shared.base.user_code import meant_path
from stagecoach.shared.config.schema.foreign_words import ALGORITHMS, HINTS

Model = TypeVar("Model", bound=BaseModel)

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
    **dict.fromkeys(("literal_error", "enum"), "{expected}"),
    "path_type": "a path",
    **dict.fromkeys(("tuple_type", "list_type", "set_type"), "a list, as in [1, 2]"),
    "too_short": "a list of {min_length} or more",
    "too_long": "a list of at most {max_length}",
    **dict.fromkeys(("dict_type", "model_type", "model_attributes_type"), "a section, as in {{name: value}}"),
    "none_required": "nothing",
}
"""Pydantic's error type → the expectation, with the bounds in it."""

_PATTERNS = {
    r"^[\w.]+:\w+$": "package.module:name",
    r"^(cpu|cuda(:\d+)?)$": "cpu, cuda or cuda:0, cuda:1 …",
    r"^(auto|cpu|cuda(:\d+)?)$": "auto, cpu, cuda or cuda:0, cuda:1 …",
    r"^[A-Za-z][\w-]*$": "a name of letters, digits, - and _ that begins with a letter",
    r"^(\w+|[\w.]+:\w+)$": "csv, jsonl, tensorboard, wandb, mlflow, trackio or package.module:Class",
    "^[0-9a-f]{64}$": "a SHA-256, 64 hexadecimal digits",
}
"""Pattern of a config field → its meaning in words."""
_WRITTEN = {
    "environment": "{{id: {}}}",
    "heatup": "{} env_steps",
    "rollout": "{{fragment_steps: {}}}",
    "stop_at": "{{env_steps: {}}}",
}
"""Section → how a single value of it is written."""


def validated(model: type[Model], data: Any, within: str = "") -> Model:
    """Validates `data` as a `model`; raises `ConfigError` with all mistakes, their fields prefixed by `within`
    (`algorithm.`)."""
    try:
        return model.model_validate(data)
    except ValidationError as error:
        lines = [
            _told(item, _place(model, item["loc"], data), model, within)
            for item in error.errors()  # pydantic counts only a list's right items: a wrong one is told anyway
            if item["type"] != "too_short" or len(item["input"]) < item["ctx"]["min_length"]
        ]
        raise ConfigError("; ".join(_hinted_once(lines))) from None
    except UnicodeEncodeError as error:
        raise ConfigError(f"found {error.object[error.start]!r}, which no text can hold; remove it") from None


def _hinted_once(lines: list[str]) -> list[str]:
    """Leaves a hint that several unknown keys share to the last of them."""
    hints = [line.partition("; ")[2] if line.startswith("unknown key ") else "" for line in lines]
    return [
        line.removesuffix(f"; {hint}") if hint and hint in hints[index + 1 :] else line
        for index, (line, hint) in enumerate(zip(lines, hints, strict=True))
    ]


class _Place(NamedTuple):
    """Location of a mistake."""

    path: list[str]
    owner: type[BaseModel]
    """Section that holds the last key of `path`."""
    rivals: list[type[BaseModel]]
    """Sections that could replace the owner, by their name or kind."""
    choices: list[type[BaseModel]]
    """Sections that are valid at the location itself."""


def _place(model: type[BaseModel], loc: tuple[int | str, ...], data: Any) -> _Place:
    """Locates a mistake; pydantic's `loc` also names the chosen section of a union, and the field behind a plain
    number."""
    path: list[str] = []
    owner, rivals, others, choices, in_container = model, [], [], [model], False
    for part in loc:
        if len(choices) > 1:
            others, choices = choices, [one for one in choices if section_tag(one)[1] == part] or choices[-1:]
        elif isinstance(data, dict) or (isinstance(data, list | tuple) and isinstance(part, int)):  # else a type's name
            path.append(str(part))
            data = (data if isinstance(data, dict) else dict(enumerate(data))).get(part, {})
            if in_container or not choices:
                in_container = False
            else:
                owner, rivals, others = choices[0], others, []
                field = owner.model_fields.get(str(part))
                in_container = field is not None and get_origin(field.annotation) in (dict, tuple)
                named = inspect.get_annotations(owner).get("__pydantic_extra__")  # under names of the user's choice
                choices = sections_in(field.annotation if field else named)
    return _Place(path, owner, rivals, choices)


def sections_in(annotation: Any) -> list[type[BaseModel]]:
    """Returns the sections that a field of this type may hold."""
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return [annotation]
    return [section for inner in get_args(annotation) for section in sections_in(inner)]


def section_tag(section: type[BaseModel]) -> tuple[str, str]:
    """Returns the field that distinguishes a section in a union, and its value, which a custom algorithm chooses."""
    field = "kind" if "kind" in section.model_fields else "name"
    value = section.model_fields[field].default if field in section.model_fields else ""
    return field, value if isinstance(value, str) else "package.module:Class (your own)"


def field_paths(model: type[BaseModel], prefix: str = "") -> list[str]:
    """Returns all dotted paths of fields below `model`, with those of sections that are always present."""
    paths: dict[str, None] = {}
    for name, field in model.model_fields.items():
        paths[f"{prefix}{name}"] = None
        if not {dict, tuple} & {get_origin(field.annotation)} and type(None) not in get_args(field.annotation):
            for section in sections_in(field.annotation):
                paths |= dict.fromkeys(field_paths(section, f"{prefix}{name}."))
    return list(paths)


def _told(item: ErrorDetails, place: _Place, model: type[BaseModel], within: str) -> str:
    """Formats one mistake as `field: expected X, found Y; do Z`."""
    where, kind, found = within + ".".join(place.path), item["type"], item["input"]
    context = {name: f"{bound:g}" if isinstance(bound, float) else bound for name, bound in item.get("ctx", {}).items()}
    if kind == "value_error":  # a validator of ours, in words of its own
        message = item["msg"].removeprefix("Value error, ")
        return f"{where}: {message}" if where else message
    if kind == "extra_forbidden":
        return _misspelled(place, model, within)
    if len(place.choices) > 1:
        field, values = section_tag(place.choices[0])[0], [section_tag(one)[1] for one in place.choices]
        found = found.get(field) if isinstance(found, dict) else found
        return f"{where}.{field} must be one of {', '.join(values)}, found {shown(found)}{_meant(found, values)}"
    if kind == "missing" and isinstance(item["loc"][-1], int):
        return f"{where.rpartition('.')[0]}: expected {counted(item['loc'][-1] + 1, 'value')}, found {shown(found)}"
    if kind == "missing":
        return f"{where} is missing; add it to the config or give --set {where}=…"
    where = where.removesuffix(".[key]")
    if kind == "invalid_key" or (item["loc"][-1] == "[key]" and not isinstance(found, str)):
        key = item["loc"][-1] if kind == "invalid_key" else found
        return f"{where}: expected keys that are text, found {shown(key)}; put it in quotes"
    if context.get("class_name") == "Schedule":
        expected = "a number, or a schedule such as {kind: linear, start: 0.001, end: 0, over: 10000 env_steps}"
    elif kind == "string_pattern_mismatch":
        pattern = str(context["pattern"])
        expected = _PATTERNS.get(pattern, f"text that matches {pattern}")
    elif kind in _EXPECTED:
        expected = _EXPECTED[kind].format(**context)
    else:  # of a user's own algorithm, which may constrain its fields as it likes
        expected = re.sub(r"^\w+ should be (an? valid )?", "", item["msg"])
    remedy = _remedy(kind, found)
    if kind == "literal_error":
        remedy = remedy or _meant(found, re.findall("'(.*?)'", expected))
    elif kind == "string_pattern_mismatch" and ":" in expected:
        remedy = meant_path(found)
    elif kind == "model_type" and where in _WRITTEN and isinstance(found, str | int):
        remedy = f"; write {where}: {_WRITTEN[where].format(printable(found, 60))}"
    elif kind == "model_type" and where.startswith("policies.") and found is None:
        remedy = f"; write {where}: {{}} for its defaults"
    elif kind == "dict_type" and where == "policies" and isinstance(found, list):
        remedy = f"; write policies: {{{', '.join(f'{name}: {{}}' for name in found[:3])}}}"
    return f"{where}: expected {expected}, found {shown(found)}{remedy}"


def _misspelled(place: _Place, model: type[BaseModel], within: str) -> str:
    *above, name = place.path
    parent = within + "".join(f"{key}." for key in above)
    beside = list(place.owner.model_fields)
    field, value = section_tag(place.owner)
    having = [section_tag(section)[1] for section in place.rivals if name in section.model_fields]
    elsewhere = [path for path in field_paths(model) if path.rpartition(".")[2] == name]
    if having:
        hint = f"{value} has no such field, but {', '.join(having)}: is {parent}{field} right?"
    elif (word := name.lower()) in HINTS:
        hint = HINTS[word]
    elif guesses := difflib.get_close_matches(name, beside, n=1, cutoff=0.6):
        hint = f"did you mean {parent}{guesses[0]}?"
    else:
        hint = f"did you mean {within}{elsewhere[0]}?" if elsewhere else f"known here: {', '.join(sorted(beside))}"
    return f"unknown key {parent}{name}; {hint}"


def _meant(found: Any, values: Sequence[str]) -> str:
    """Returns a hint at what is probably meant by a value: one of `values`, or an import path."""
    text = str(found or "")
    word = re.sub(r"trainer$|config$|policy$", "", text.lower())
    if "ppo" in values and (other := re.sub("[-_]", "", word)) in ALGORITHMS:
        return f"; nearest here: {ALGORITHMS[other]}"
    if guesses := difflib.get_close_matches(word, [value.lower() for value in values], n=1):
        return f"; did you mean {guesses[0]}?"
    return meant_path(text)


def _remedy(kind: str, found: Any) -> str:
    if found is None:
        return "; give a value or remove the line"
    if kind == "finite_number":
        return "; give such a number, or leave the field out for its default"
    if kind not in ("int_parsing", "float_parsing", "model_type") or not isinstance(found, str):
        return ""
    match = _SCALED.fullmatch(found)
    if match is None:
        return "; write the number in digits" if kind != "model_type" else ""
    number = float(re.sub("[_,]", "", match[1])) * _SCALES[match[2].lower()]
    return f"; write {number:.0f}" if number.is_integer() else f"; write {number:g}"


def shown(value: object) -> str:
    """Formats a value for an error message; a URL could hold a password."""
    text = "nothing" if value is None else str(value).lower() if isinstance(value, bool) else repr(value)
    return "a URL" if "://" in text else printable(text, _SHOWN_CHARACTERS)
