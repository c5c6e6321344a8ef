"""What the flow hash holds, read back: it lies where others can write, so each field is checked."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated, Literal

from pydantic import BeforeValidator, Field, TypeAdapter, ValidationError

from shared.failure import FailureKind

_MOST = 2**53
"""Lua counts in doubles."""
_Number = Annotated[int, Field(ge=-1, le=_MOST)]
_Position = Annotated[str, Field(pattern=r"^[0-9]{1,20}-[0-9]{1,20}$")]


@dataclass(frozen=True)
class FlowState:
    """One look at the flow hash."""

    state: Literal["running", "stopping", "finished"]
    epoch: _Number
    version: _Number
    consumed: _Number
    claimed: Annotated[int, Field(ge=-_MOST, le=_MOST)]
    fragments_per_update: Annotated[int, Field(ge=1, le=_MOST)]
    max_policy_lag: _Number
    settled_id: _Position
    trimmed_id: _Position
    """What is not in the log any more."""
    pushed_bytes: _Number
    trimmed_bytes: _Number
    lease_ms: _Number
    max_log_bytes: _Number
    desired_workers: _Number
    config_hash: str
    reason: str = ""
    failure: Annotated[FailureKind | None, BeforeValidator(lambda text: text or None)] = None
    """Whose failure ends it, where it is one."""
    published_id: _Position = "0-0"
    scaling: Literal["fixed", "auto"] = "fixed"
    """`auto`: the coordinator moves `desired_workers` between the next two."""
    min_workers: _Number = 1
    max_workers: Annotated[_Number | None, BeforeValidator(lambda text: text or None)] = None
    """None: as many as there is room for."""
    memory_full: bool = False
    """Whether Redis refused the last new claim, or a shard a body, for want of memory."""
    shards: Annotated[tuple[str, ...], BeforeValidator(str.split)] = ()
    """Where the run's fragments have their bodies, as `host:port/db`; empty where the log holds them."""

    @property
    def log_bytes(self) -> int:
        """Of the fragments in the log."""
        return self.pushed_bytes - self.trimmed_bytes

    @property
    def in_flight(self) -> int:
        """Claims granted and not yet behind a published version."""
        return self.claimed - self.consumed

    @property
    def window(self) -> int:
        """The most that may be in flight: (L + 1) · K."""
        return (self.max_policy_lag + 1) * self.fragments_per_update


_STATE = TypeAdapter(FlowState)


def parse_flow(raw: Mapping[bytes, bytes]) -> FlowState:
    """The hash as Redis gives it; raises `ValueError`, which names the field and what it holds."""
    flow = {name.decode(errors="replace"): value.decode(errors="replace") for name, value in raw.items()}
    try:
        return _STATE.validate_python(flow)
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        name = str(first["loc"][0])
        found = repr(flow[name][:40]) if name in flow else "nothing"
        raise ValueError(f"its field {name} is {found} ({first['msg']})") from None
