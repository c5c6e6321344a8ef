"""Gymnasium spaces as JSON: in the config (`environment.spaces`), and in the gateway's messages.

Each space is an object with its class's name as `type` and that class's arguments: `{"type": "Box", "low": -1, "high":
1, "shape": [4]}`, `{"type": "Discrete", "n": 2}`, `MultiDiscrete` (`nvec`), `MultiBinary` (`n`), and `Dict` and `Tuple`
(`spaces`).
"""

from collections.abc import Mapping
from typing import Any

import numpy as np
from gymnasium import spaces

from stagecoach.shared.base.errors import UnsupportedSpace

_ARGUMENTS = {
    "Box": {"low", "high", "shape", "dtype"}, "Discrete": {"n", "start"}, "MultiDiscrete": {"nvec", "start"},
    "MultiBinary": {"n"}, "Dict": {"spaces"}, "Tuple": {"spaces"},
}  # fmt: skip


def space_of(data: Any, place: str) -> spaces.Space[Any]:
    """Returns the space that `data` describes; raises `UnsupportedSpace`, which names `place`."""
    kind = data.get("type") if isinstance(data, Mapping) else None
    if not isinstance(kind, str) or kind not in _ARGUMENTS:
        raise UnsupportedSpace(
            f"{place} is {data!r:.100}; expected an object with a type of {', '.join(_ARGUMENTS)}, such as "
            f'{{"type": "Box", "low": -1, "high": 1, "shape": [4]}}'
        )
    given = {name: value for name, value in data.items() if name != "type"}
    if odd := sorted(set(map(str, given)) - _ARGUMENTS[kind]):
        raise UnsupportedSpace(f"{place} has {', '.join(odd)}; a {kind} takes {', '.join(sorted(_ARGUMENTS[kind]))}")
    try:
        if kind == "Dict":
            return spaces.Dict({name: space_of(its, f"{place}.{name}") for name, its in given["spaces"].items()})
        if kind == "Tuple":
            return spaces.Tuple([space_of(its, f"{place}.{at}") for at, its in enumerate(given["spaces"])])
        for name in ("low", "high"):
            if name in given:
                given[name] = np.asarray(given[name], np.dtype(given.get("dtype", "float32")))
                given[name] = given[name][()] if not given[name].ndim else given[name]
        if "shape" in given:
            given["shape"] = tuple(given["shape"])
        if "dtype" in given:
            given["dtype"] = np.dtype(given["dtype"]).type
        found: spaces.Space[Any] = getattr(spaces, kind)(**given)
        return found
    except (Exception, OverflowError) as error:
        raise UnsupportedSpace(f"{place} describes no {kind}: {type(error).__name__}: {error}") from None


def data_of(space: spaces.Space[Any]) -> dict[str, Any]:
    """Returns the space as JSON; inverts `space_of`. Raises `UnsupportedSpace`."""
    kind = type(space).__name__
    if isinstance(space, spaces.Box):
        found = {
            "low": _bound(space.low),
            "high": _bound(space.high),
            "shape": [*space.shape],
            "dtype": str(space.dtype),
        }
    elif isinstance(space, spaces.Discrete):
        found = {"n": int(space.n), "start": int(space.start)}
    elif isinstance(space, spaces.MultiDiscrete):
        found = {"nvec": space.nvec.tolist(), "start": space.start.tolist()}
    elif isinstance(space, spaces.MultiBinary):
        found = {"n": space.n if isinstance(space.n, int) else [*space.shape]}
    elif isinstance(space, spaces.Dict):
        found = {"spaces": {str(name): data_of(its) for name, its in space.spaces.items()}}
    elif isinstance(space, spaces.Tuple):
        found = {"spaces": [data_of(its) for its in space.spaces]}
    else:
        raise UnsupportedSpace(f"{kind} spaces are not supported; expected one of {', '.join(_ARGUMENTS)}")
    return {"type": kind, **found}


def _bound(values: Any) -> Any:
    """One number for equal bounds. Infinity, which JSON lacks, is the largest number of the type."""
    limits = np.finfo(values.dtype) if values.dtype.kind == "f" else np.iinfo(values.dtype)
    finite = np.clip(values, limits.min, limits.max)
    return finite.flat[0].item() if finite.size and (finite == finite.flat[0]).all() else finite.tolist()
