"""Fragments: of zeros, of random contents, and with one thing wrong."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
from gymnasium import spaces

from stagecoach.rollout_worker.environments.description import describe_space
from stagecoach.shared.experience import fragment, tensor_blob
from stagecoach.shared.experience.counters import Phase
from stagecoach.shared.experience.fragment import EpisodeRecord, Fragment, FragmentHeader
from stagecoach.shared.experience.spaces import Columns, EnvironmentDescription, PolicySpaces

RECORD = EpisodeRecord(12.5, 30, True, {"a": 10.0, "b": 2.5}, {"height": 1.5})
_EPISODE = dataclasses.asdict(RECORD)


def describe(
    policies: Mapping[str, tuple[spaces.Space[Any], spaces.Space[Any]]], agents: int = 1
) -> EnvironmentDescription:
    """An environment whose policies have these observation and action spaces, `agents` agents each."""
    return EnvironmentDescription(
        {f"{policy}-{number}": policy for policy in policies for number in range(agents)},
        {policy: PolicySpaces(describe_space(seen), describe_space(done)) for policy, (seen, done) in policies.items()},
    )


def _header(description: EnvironmentDescription, fields: Mapping[str, Any]) -> FragmentHeader:
    given: dict[str, Any] = {
        "run_id": "run-1", "worker_id": "w0", "incarnation": 1, "seq": 7, "phase": Phase.TRAIN,
        "policy_versions": dict.fromkeys(description.policies, 5), "steps": 3, "num_envs": 2,
    }  # fmt: skip
    return FragmentHeader(**given | dict(fields))


def zero_fragment(description: EnvironmentDescription, **header: Any) -> Fragment:
    """A valid fragment of zeros in which no episode ends; `header` replaces fields."""
    made = _header(description, header)
    columns: dict[str, Columns] = {}
    for policy_id, its in description.policies.items():
        expected = fragment.expected_columns(its, made.steps, made.num_envs * description.slots(policy_id))
        columns[policy_id] = {
            name: np.zeros([max(size, 0) for size in shape], dtype) for name, (shape, dtype) in expected.items()
        }
        columns[policy_id]["mask"][:] = True
    return Fragment(made, columns)


def random_fragment(description: EnvironmentDescription, seed: int = 0, **header: Any) -> Fragment:
    """A valid fragment with random contents: some rows truncated, of those terminated some with a last observation."""
    random, made = np.random.default_rng(seed), _header(description, {"acting_seconds": 0.25} | header)
    columns: dict[str, Columns] = {}
    for policy_id, its in description.policies.items():
        slots = made.num_envs * description.slots(policy_id)
        part: Columns = {}
        chances = np.array([0.3, 0.3, 0.6])[:, None, None]
        truncated, terminated, known = random.random((3, made.steps, slots)) < chances
        final = np.argwhere(truncated | (terminated & known)).astype(np.int32)
        choices = {
            leaf.column(prefix): np.asarray(leaf.nvec, np.int64).reshape(leaf.shape)
            for spec, prefixes in ((its.observation, ("obs", "bootstrap_obs", "final_obs")), (its.action, ("action",)))
            for leaf in spec.leaves
            for prefix in prefixes
            if leaf.kind != "box"
        }
        for name, (shape, dtype) in fragment.expected_columns(its, made.steps, slots).items():
            size = tuple(len(final) if length == -1 else length for length in shape)
            numbers = random.integers(0, 2**20, size)
            if name in choices:
                part[name] = (numbers % choices[name]).astype(np.int64)
            elif dtype.kind == "f":
                part[name] = random.standard_normal(size).astype(dtype)
            else:
                part[name] = (numbers % 2 if dtype.kind == "b" else numbers % 100).astype(dtype)
        columns[policy_id] = part | {"truncated": truncated, "terminated": terminated, "final_index": final}
    return Fragment(made, columns)


SIMPLE = describe({"default": (spaces.Box(-1, 1, (3,), np.float32), spaces.Discrete(2))})
MIXED = describe(
    {
        "default": (
            spaces.Dict(
                {
                    "camera": spaces.Box(0, 255, (2, 4, 4), np.uint8),
                    "kind": spaces.Discrete(3, start=-1),
                    "pair": spaces.Tuple([spaces.MultiBinary(2), spaces.Box(-1, 1, (2,), np.float64)]),
                }
            ),
            spaces.MultiDiscrete([2, 3]),
        )
    }
)


# What is wrong with a malformed one, by the reason that it must be dropped for

_NOT_FINITE = (np.nan, np.inf, -np.inf)
_SCHEMA: list[dict[str, Any]] = [
    {"seq": "7"}, {"seq": -1}, {"seq": True}, {"seq": 1.0}, {"seq": ...}, {"incarnation": None}, {"unknown": 1},
    {"steps": 0}, {"steps": 4}, {"num_envs": 0}, {"num_envs": 10**30}, {"run_id": 5}, {"worker_id": None},
    {"phase": "sleep"}, {"phase": []}, {"policy_versions": {}}, {"policy_versions": {"default": -1}},
    {"policy_versions": {"other": 1}}, {"policy_versions": [5]}, {"policy_versions": {"default": "5"}},
    {"acting_seconds": "1"}, {"acting_seconds": -1.0}, {"acting_seconds": float("nan")}, {"layout": []},
    {"layout": {"default/obs": {"codec": "rot13", "shape": [1]}}}, {"layout": {"default/none": {"stack": 4}}},
    {"episodes": None}, {"episodes": [3]}, {"episodes": [_EPISODE | {"episode_return": "12"}]},
    {"episodes": [_EPISODE | {"length": 1.5}]}, {"episodes": [_EPISODE | {"length": 0}]},
    {"episodes": [_EPISODE | {"success": "yes"}]}, {"episodes": [_EPISODE | {"metrics": {"x": "high"}}]},
    {"episodes": [_EPISODE | {"agent_returns": [1]}]}, {"episodes": [_EPISODE | {"surprise": 1}]},
]  # fmt: skip
HEADERS: list[tuple[dict[str, Any], str]] = [
    *((fields, "schema") for fields in _SCHEMA),
    *(({"wire_version": version}, "wire_version") for version in (0, 2, 99, "1", None, ...)),
    *(({"episodes": [_EPISODE | {"episode_return": number}]}, reason) for number, reason in (
        (np.nan, "not_finite"), (np.inf, "not_finite"), (-2e30, "magnitude"))),
    *(({"episodes": [_EPISODE | {field: {"x": number}}]}, reason)
      for field in ("metrics", "agent_returns")
      for number, reason in ((np.nan, "not_finite"), (np.inf, "not_finite"), (-2e30, "magnitude"))),
    ({"run_id": "run-2"}, "foreign_run"),
]  # fmt: skip
"""Header fields to replace (`...` takes one away), and the reason."""


def with_header(made: Fragment, changes: Mapping[str, Any]) -> bytes:
    """Encodes it with a valid hash and these header fields replaced (`...` removes one)."""
    packed, header = tensor_blob.decode(fragment.encode(made))
    changed = {name: value for name, value in (header | dict(changes)).items() if value is not ...}
    return tensor_blob.encode(packed, changed)


Change = Callable[[Columns], object]


def _ends_that_go_on(part: Columns) -> None:
    goes_on = np.argwhere(~(part["truncated"] | part["terminated"]))[:1]
    part["final_index"] = np.vstack([part["final_index"], goes_on]).astype(np.int32)
    part["final_obs"] = np.vstack([part["final_obs"], part["final_obs"][:1]])


def _number(column: str, value: float) -> Change:
    return lambda part: part[column].flat.__setitem__(-1, value)


COLUMNS: dict[str, tuple[Change, str]] = {
    **{what: (change, "schema") for what, change in {
        "a missing column": lambda part: part.pop("reward"),
        "an extra column": lambda part: part.update(extra=part["reward"]),
        "a wrong shape": lambda part: part.update(reward=part["reward"][:-1]),
        "too few axes": lambda part: part.update(obs=part["obs"][0]),
        "a wrong dtype": lambda part: part.update(reward=part["reward"].astype(np.float64)),
        "numbers for flags": lambda part: part.update(mask=part["mask"].astype(np.uint8)),
        "no axes at all": lambda part: part.update(final_index=np.array(3, np.int32)),
        "a choice too high": lambda part: part["action"].__setitem__((0, 0), 2),
        "a choice too low": lambda part: part["action"].__setitem__((0, 0), -1),
        "a step out of range": lambda part: part["final_index"].__setitem__((0, 0), len(part["reward"])),
        "a slot out of range": lambda part: part["final_index"].__setitem__((0, 1), len(part["reward"][0])),
        "a negative step that wraps around": lambda part: part["final_index"].__isub__(
            np.array([len(part["reward"]), 0], np.int32)),
        "one slot twice": lambda part: part["final_index"].__setitem__(1, part["final_index"][0]),
        "a final observation too few": lambda part: part.update(
            final_index=part["final_index"][1:], final_obs=part["final_obs"][1:]),
        "fewer rows than places": lambda part: part.update(final_obs=part["final_obs"][1:]),
        "no truncated slots": lambda part: part["truncated"].fill(False),
        "a last observation of an episode that goes on": _ends_that_go_on,
    }.items()},
    **{f"{value} in {column}": (_number(column, value), "not_finite") for column, value in [
        *itertools.product(("obs", "bootstrap_obs", "final_obs", "reward"), _NOT_FINITE),
        *itertools.product(("log_prob",), _NOT_FINITE[1:])]},
    **{f"{value} in {column}": (_number(column, value), "magnitude") for column, value in itertools.product(
        ("obs", "bootstrap_obs", "final_obs", "reward", "log_prob"), (3e38, -1.1e12))},
}  # fmt: skip
"""Damage to the columns of a fragment with the spaces of `SIMPLE`, and the reason for its drop."""
SEED = 2
"""A `random_fragment` of this seed has what each of these needs: truncated rows, and an episode that goes on."""
