"""Messages of the gateway's protocol, version 1, checked (docs/reference/gateway_protocol.md).

Messages are JSON objects, one for each WebSocket message. A session's experience is numbered from 0 (`seq`): each
message opens a turn, which the next one closes with its reward, unless the episode has ended.
"""

import json
import struct
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from typing import Annotated, Any, Literal

import numpy as np
import safetensors.numpy
from pydantic import BaseModel, ConfigDict, Field, TypeAdapter, ValidationError
from safetensors import SafetensorError

from stagecoach.rollout_worker.environments.description import SINGLE_AGENT
from stagecoach.shared.base.errors import UserError
from stagecoach.shared.experience.fragment import LARGEST
from stagecoach.shared.experience.spaces import Array, Columns, EnvironmentDescription, Leaf, SpaceSpec, integral

PROTOCOL = 1
_LENGTH = struct.Struct("<Q")
Number = Annotated[int, Field(ge=0, lt=2**53)]


class Refused(UserError):
    """A message that the gateway refuses; `code` is the error's name in the protocol."""

    def __init__(self, code: str, text: str) -> None:
        super().__init__(text)
        self.code = code


class _Message(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True, frozen=True)


class Hello(_Message):
    """The first message of a connection."""

    type: Literal["hello"]
    protocol: int
    session: str = Field(pattern=r"^[A-Za-z0-9_.-]{1,64}$")
    """Name of one environment's life with this client; it may be continued by another connection."""
    journal_from: Number | None = None
    """The first message that the client still has; None for a client that has kept none."""
    spaces: dict[str, Any] | None = None
    """`observation` and `action`, as the client knows them."""
    acting: Literal["remote", "local"] = "remote"
    """`local`: the client fetches the policy, and chooses its actions itself."""


class _Turn(_Message):
    """An environment with one agent has `observation` and `action`, one with several `observations` and `actions`."""

    seq: Number
    observation: Any = None
    observations: dict[str, Any] | None = None
    """Agent → observation, of each agent that acts next, or whose last observation it is."""
    action: Any = None
    """The action that the client was answered, of a message that it sends again."""
    actions: dict[str, Any] | None = None
    version: Number | None = None
    """The policy version that this action came from."""


class Reset(_Turn):
    """Begins an episode, and its first turn."""

    type: Literal["reset"]
    episode: str | None = Field(None, max_length=64)
    """Name of the parameters that the episode has, as the gateway drew them."""


class EnvironmentStep(_Turn):
    """Closes a turn, and opens the next one unless the episode has ended."""

    type: Literal["step"]
    reward: float | int = 0
    rewards: dict[str, float | int] | None = None
    """Agent → reward since its last turn began, or since the last message."""
    terminated: bool | list[str] = False
    """True if the episode has terminated, else the agents that have."""
    truncated: bool | list[str] = False
    info: dict[str, Any] = {}
    infos: dict[str, dict[str, Any]] | None = None


class Bye(_Message):
    """Ends the session; what is not learned yet will be."""

    type: Literal["bye"]


_MESSAGES: TypeAdapter[Hello | Reset | EnvironmentStep | Bye] = TypeAdapter(
    Annotated[Hello | Reset | EnvironmentStep | Bye, Field(discriminator="type")]
)


@dataclass(frozen=True)
class Arrival:
    """A message of experience, by agent; a single agent has the name `default`."""

    seq: int
    begins: bool
    observations: Mapping[str, Columns]
    rewards: Mapping[str, float] = field(default_factory=dict)
    terminated: Collection[str] = ()
    truncated: Collection[str] = ()
    ends: bool = False
    """The episode has ended, for all agents."""
    infos: dict[str, dict[str, Any]] = field(default_factory=dict)
    episode: str | None = None
    """Name of a begun episode's parameters."""
    given: Mapping[str, Columns] | None = None
    """Actions of a message that was answered before."""
    version: int = -1
    acting: Collection[str] = ()
    """Agents that act next."""
    size: int = 0
    """Length of the message."""


def parse(frame: str | bytes) -> Hello | Reset | EnvironmentStep | Bye:
    """Returns the message; raises `Refused`. Bytes are safetensors with the text in their metadata `message`, where
    `{"tensor": NAME}` stands for an array."""
    try:
        if isinstance(frame, str):
            return _MESSAGES.validate_python(json.loads(frame, parse_constant=_no_number))
        arrays = safetensors.numpy.load(frame)
        (length,) = _LENGTH.unpack_from(frame)
        text = json.loads(frame[_LENGTH.size : _LENGTH.size + length])["__metadata__"]["message"]
        return _MESSAGES.validate_python(_with_arrays(json.loads(text, parse_constant=_no_number), arrays))
    except ValidationError as error:
        first = error.errors()[0]
        where = ".".join(map(str, first["loc"])) or "message"
        raise Refused("message", f"{where}: {first['msg']}, found {first.get('input')!r:.80}") from None
    except (ValueError, RecursionError) as error:
        raise Refused("message", f"expected a JSON object: {error!s:.200}") from None
    except (SafetensorError, struct.error, KeyError, TypeError) as error:
        raise Refused("message", f"expected safetensors with a metadata message: {error!r:.200}") from None


def _with_arrays(value: Any, arrays: Mapping[str, Any]) -> Any:
    if isinstance(value, dict):
        if value.keys() == {"tensor"} and isinstance(value["tensor"], str):
            return arrays[value["tensor"]]
        return {name: _with_arrays(its, arrays) for name, its in value.items()}
    return [_with_arrays(its, arrays) for its in value] if isinstance(value, list) else value


def _no_number(text: str) -> float:
    raise ValueError(f"{text} cannot be learned from")


def arrival(message: Reset | EnvironmentStep, description: EnvironmentDescription, size: int = 0) -> Arrival:
    """Returns the message in columns; raises `Refused` where it does not fit the agents and their spaces.

    Args:
        message: What the client sent.
        description: The run's agents and spaces.
        size: Length of the message.
    """
    single = single_agent(description)
    seen = _by_agent(message, "observation", single)
    spaces = {agent: description.policies[policy_id] for agent, policy_id in description.agents.items()}
    terminated, truncated = set[str](), set[str]()
    rewards, infos, ends = dict[str, float](), dict[str, Any](), False
    if isinstance(message, EnvironmentStep):
        if single and "reward" not in message.model_fields_set:
            raise Refused("message", "the step has no reward; expected a number")
        rewards, infos = _by_agent(message, "reward", single), _by_agent(message, "info", single)
        terminated, truncated = _named(message.terminated, single), _named(message.truncated, single)
        ends = message.terminated is True or message.truncated is True
        if ends:  # for all others
            others = spaces.keys() - terminated - truncated
            terminated, truncated = (terminated | others, truncated) if message.terminated is True else (
                terminated, truncated | others
            )  # fmt: skip
    for name in {*seen, *rewards, *infos, *terminated, *truncated} - spaces.keys():
        raise Refused("agent", f"the message names the agent {name!r:.80}; expected {', '.join(spaces)}")
    columns = {agent: _columns(spaces[agent].observation, "obs", its, "observation") for agent, its in seen.items()}
    for reward in rewards.values():
        if not -LARGEST <= reward <= LARGEST:  # also false for NaN
            raise Refused("reward", f"reward {reward!r:.40} cannot be learned from; expected a finite number")
    acting = [] if ends else [agent for agent in columns if agent not in terminated and agent not in truncated]
    if not acting and not ends:
        raise Refused("turn", "no observed agent can act, and the episode has not ended; end it, or observe an agent")
    for agent in acting:
        names = spaces[agent].observation.mask_columns
        if names and spaces[agent].without_legal({name: columns[agent][name][None] for name in names}).any():
            raise Refused("observation", "the action_mask has no legal action; expected one for each choice")
    given = None
    if message.version is not None:
        chosen = _by_agent(message, "action", single)
        if missing := [agent for agent in acting if agent not in chosen]:
            raise Refused("action", f"no action of {', '.join(missing)} with the version {message.version}")
        given = {agent: _columns(spaces[agent].action, "action", chosen[agent], "action") for agent in acting}
    return Arrival(
        message.seq, isinstance(message, Reset), columns, {agent: float(its) for agent, its in rewards.items()},
        terminated, truncated - terminated, ends, infos, message.episode if isinstance(message, Reset) else None, given,
        -1 if message.version is None else message.version, acting, size,
    )  # fmt: skip


def single_agent(description: EnvironmentDescription) -> str | None:
    """Returns the name of an only agent, whose messages name none; else None."""
    return SINGLE_AGENT if [*description.agents] == [SINGLE_AGENT] else None


def _named(ended: bool | list[str], single: str | None) -> set[str]:
    if isinstance(ended, bool):
        return set()
    if single:
        raise Refused("message", f"{ended!r:.80} names agents; expected true or false with a single agent")
    return set(ended)


def _by_agent(message: Reset | EnvironmentStep, name: str, single: str | None) -> dict[str, Any]:
    """Returns agent → value of the field `name`, or of its plural if there are several agents."""
    one, several = getattr(message, name), getattr(message, f"{name}s")
    if single and several is None:
        return {single: one}
    if single or name in message.model_fields_set:
        expected = name if single else f"{name}s, by agent"
        raise Refused("message", f"the message has {name}{'s' if single else ''}; expected {expected}")
    return several or {}


def _columns(spec: SpaceSpec, prefix: str, value: Any, what: str) -> Columns:
    try:
        columns = spec.flatten(prefix, value)
        for leaf, given in spec.parts(value):
            if leaf.kind == "box" and leaf.column_dtype.kind in "iu" and not integral(np.asarray(given)):
                raise ValueError(f"{leaf.dtype} holds no fractions")
    except (ValueError, TypeError, KeyError, OverflowError) as error:
        raise Refused(what, f"the {what} does not fit its space ({spec}): {error!s:.200}") from None
    for leaf in spec.leaves:
        array = columns[leaf.column(prefix)]
        if array.shape != leaf.shape:
            raise Refused(what, f"the {what} {leaf.path or ''} has the shape {array.shape}, expected {leaf.shape}")
        if array.dtype.kind not in "iufb":
            raise Refused(what, f"the {what} {leaf.path or ''} has elements that are no numbers")
        columns[leaf.column(prefix)] = array = array.astype(leaf.column_dtype)
        if array.dtype.kind == "f" and not (abs(array) <= LARGEST).all():
            raise Refused(what, f"the {what} {leaf.path or ''} has NaN, infinity or a number beyond {LARGEST:g}")
        if prefix == "action" and not leaf.nvec and _far(array, leaf):
            raise Refused(what, f"the {what} {leaf.path or ''} is far beyond its bounds: {value!r:.80}")
        if leaf.nvec and leaf.beyond(array).any():
            raise Refused(
                what, f"the {what} {leaf.path or ''} has a choice that the space does not have: {value!r:.80}"
            )
    return columns


def _far(action: Array, leaf: Leaf) -> bool:
    """Returns true for a Box action that no policy draws: 100 times as far from the middle as a bound is."""
    low, high = leaf.bounds(np.float64)
    with np.errstate(all="ignore"):
        return bool((np.abs(action - (low + high) / 2) > 50 * (high - low)).any())  # false where there is no bound


def plain(value: Any) -> Any:
    """Returns an action of a space as JSON data."""
    if isinstance(value, dict):
        return {name: plain(its) for name, its in value.items()}
    if isinstance(value, tuple):
        return [plain(its) for its in value]
    return value.tolist()
