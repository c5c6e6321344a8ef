"""Messages of clients: whatever does not fit is refused, by name."""

from __future__ import annotations

import json
from typing import Any

import numpy as np
import pytest
import safetensors.numpy
from gymnasium import spaces

from stagecoach.rollout_worker.environments.action_masks import marked
from stagecoach.rollout_worker.environments.description import describe_space
from stagecoach.rollout_worker.gateway.messages import (
    Arrival,
    EnvironmentStep,
    Refused,
    Reset,
    arrival,
    parse,
)
from stagecoach.shared.experience.spaces import EnvironmentDescription, PolicySpaces

OBSERVATION = describe_space(
    spaces.Dict({"at": spaces.Box(-5, 5, (2,)), "door": spaces.Discrete(3), "level": spaces.Box(0, 9, (), np.int8)})
)
ACTION = describe_space(spaces.Discrete(2, start=1))
SINGLE = EnvironmentDescription({"default": "default"}, {"default": PolicySpaces(OBSERVATION, ACTION)})
SEVERAL = EnvironmentDescription({"x": "p", "o": "p"}, {"p": PolicySpaces(OBSERVATION, ACTION)})
SEEN = {"at": [0.5, -1], "door": 2, "level": 3}


def step(**fields: Any) -> str:
    return json.dumps({"type": "step", "seq": 1, "reward": 1, "observation": SEEN} | fields)


def taken(text: str | bytes) -> Any:
    message = parse(text)
    assert isinstance(message, Reset | EnvironmentStep)
    return arrival(message, SINGLE)


def test_message_becomes_columns() -> None:
    found = taken(step(info={"is_success": True}, action=2, version=7))
    assert (found.seq, found.rewards, found.ends, found.version) == (1, {"default": 1.0}, False, 7)
    seen = found.observations["default"]
    assert seen["obs.at"].dtype == np.float32 and seen["obs.at"].tolist() == [0.5, -1.0]
    assert seen["obs.door"] == 2 and found.given["default"]["action"] == 1, "choices count from 0"
    assert found.acting == ["default"] and taken(step(truncated=True)).truncated == {"default"}


def packed(arrays: dict[str, Any], **fields: Any) -> bytes:
    return safetensors.numpy.save(arrays, metadata={"message": step(**fields)})


def test_arrays_of_binary_messages_stand_in_their_places() -> None:
    frame = packed({"0": np.array([0.5, -1])}, observation={"at": {"tensor": "0"}, "door": 2, "level": 3})
    seen = taken(frame).observations["default"]
    assert seen["obs.at"].dtype == np.float32 and seen["obs.at"].tolist() == [0.5, -1.0] and seen["obs.door"] == 2


@pytest.mark.parametrize(
    "frame",
    [
        b"", b"\x00", b"\xff" * 40, packed({}, observation={"at": {"tensor": "0"}, "door": 2, "level": 3}),
        safetensors.numpy.save({"0": np.zeros(2)}), packed({"0": np.zeros(2)})[:-1],
        safetensors.numpy.save({"0": np.zeros(2)}, metadata={"message": "[" * 100_000}),
    ],
)  # fmt: skip
def test_unusable_binary_message_is_refused(frame: bytes) -> None:
    with pytest.raises(Refused) as refused:
        taken(frame)
    assert refused.value.code == "message"


def several(**fields: Any) -> Arrival:
    message = parse(json.dumps({"type": "step", "seq": 1} | fields))
    assert isinstance(message, EnvironmentStep)
    return arrival(message, SEVERAL)


def test_agents_end_by_name_or_all_at_once() -> None:
    found = several(rewards={"x": 1}, observations={"x": SEEN, "o": SEEN}, terminated=["o"])
    assert (found.acting, found.ends, found.terminated) == (["x"], False, {"o"})
    found = several(observations={"x": SEEN}, terminated=["o"], truncated=True)
    assert (found.acting, found.ends, found.terminated, found.truncated) == ([], True, {"o"}, {"x"})
    assert several(terminated=True).terminated == {"x", "o"}


@pytest.mark.parametrize(
    ("fields", "code"),
    [
        ({"observation": SEEN}, "message"), ({"observations": {"z": SEEN}}, "agent"),
        ({"observations": {}}, "turn"),
        ({"observations": {"x": [1]}}, "observation"), ({"rewards": {"z": 1}, "terminated": True}, "agent"),
        ({"rewards": {"x": 1e30}, "terminated": True}, "reward"),
        ({"observations": {"x": SEEN}, "reward": 1}, "message"),
        ({"observations": {"x": SEEN}, "version": 1, "actions": {"o": 1}}, "action"),
        ({"observations": {"x": SEEN}, "truncated": ["x"]}, "turn"), ({"truncated": ["z"]}, "agent"),
    ],
)  # fmt: skip
def test_unusable_message_of_several_agents_is_refused(fields: dict[str, Any], code: str) -> None:
    with pytest.raises(Refused) as refused:
        several(**fields)
    assert refused.value.code == code


@pytest.mark.parametrize(
    ("text", "code"),
    [
        ("", "message"), ("[]", "message"), ("7", "message"), ("{", "message"), ("[" * 100_000, "message"),
        ('{"type": "step"}', "message"), ('{"type": "exec", "code": "1"}', "message"), (step(extra=1), "message"),
        (step(seq=-1), "message"), (step(seq=2**53), "message"), (step(seq="1"), "message"), (step(seq=1.5), "message"),
        (step(reward="1"), "message"), (step(reward=None), "message"), (step(terminated="yes"), "message"),
        (step().replace('"reward": 1', '"reward": NaN'), "message"),
        (step().replace('"reward": 1', '"reward": 1e999'), "reward"), (step(reward=1e13), "reward"),
        (step(reward=10**400), "reward"), (step().replace('"reward": 1, ', ""), "message"),
        (step(observation=None), "observation"), (step(observation=[1, 2]), "observation"),
        (step(observation={"at": [1, 2]}), "observation"), (step(observation=SEEN | {"at": [1]}), "observation"),
        (step(observation=SEEN | {"at": [[1], [2, 3]]}), "observation"),
        (step(observation=SEEN | {"at": ["a", "b"]}), "observation"),
        (step(observation=SEEN | {"at": [1e30, 0]}), "observation"),
        (step(observation=SEEN | {"at": [{}, 0]}), "observation"),
        (step(observation=SEEN | {"door": 3}), "observation"), (step(observation=SEEN | {"door": 1.5}), "observation"),
        (step(observation=SEEN | {"door": -1}), "observation"),
        (step(observation=SEEN | {"door": 10**30}), "observation"),
        (step(observation=SEEN | {"at": [0.5, 1.5], "level": 0.5}), "observation"),
        (step(info=[1]), "message"), (step(observations={}), "message"), (step(terminated=["default"]), "message"),
        (step(version=1, action=0), "action"), (step(version=1, action=[1]), "action"), (step(version=1), "action"),
        (step(version="1", action=1), "message"), ('{"type": "hello", "protocol": 1, "session": "../x"}', "message"),
        ('{"type": "hello", "protocol": 1, "session": ""}', "message"),
        ('{"type": "hello", "protocol": 1, "session": "ä"}', "message"),
    ],
)  # fmt: skip
def test_unusable_message_is_refused_by_name(text: str, code: str) -> None:
    with pytest.raises(Refused) as refused:
        taken(text)
    assert refused.value.code == code
    assert len(str(refused.value)) < 700


def test_masks_and_actions_that_no_policy_could_have_are_refused() -> None:
    """They would cost the fragment of all clients."""
    seen = describe_space(spaces.Dict({"at": spaces.Box(-1, 1, (1,)), "action_mask": spaces.MultiBinary(2)}))
    spaces_of = PolicySpaces(marked(seen, ACTION, "auto", "default"), ACTION)
    masked = EnvironmentDescription({"default": "default"}, {"default": spaces_of})
    box = describe_space(spaces.Box(-1, 1, (1,)))
    boxed = EnvironmentDescription({"default": "default"}, {"default": PolicySpaces(box, box)})
    for description, fields, code in (
        (masked, {"observation": {"at": [0], "action_mask": [0, 0]}}, "observation"),
        (boxed, {"observation": [0], "action": [1e12], "version": 1}, "action"),
    ):
        message = parse(json.dumps({"type": "reset", "seq": 0} | fields))
        assert isinstance(message, Reset)
        with pytest.raises(Refused) as refused:
            arrival(message, description)
        assert refused.value.code == code
