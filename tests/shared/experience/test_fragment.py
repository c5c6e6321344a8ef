"""Fragments: fixed bytes, lossless round trips over all spaces, and a named reason for everything that is malformed."""

from __future__ import annotations

import dataclasses
import itertools
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from gymnasium import spaces
from hypothesis import given, settings
from hypothesis import strategies as st

from stagecoach.shared.base.errors import DropReason, FragmentError
from stagecoach.shared.experience import fragment, tensor_blob
from stagecoach.shared.experience.column_codec import Compression
from stagecoach.shared.experience.counters import Phase
from stagecoach.shared.experience.fragment import EpisodeRecord, Fragment
from stagecoach.shared.experience.spaces import EnvironmentDescription
from tests.support.experience.fragments import (
    COLUMNS,
    HEADERS,
    MIXED,
    RECORD,
    SEED,
    SIMPLE,
    describe,
    random_fragment,
    with_header,
)
from tests.support.experience.strategies import JSON_VALUES, TEXTS, gymnasium_spaces

GOLDEN = Path(__file__).parent / "golden" / "fragment-1.bin"
GOLDEN_INFO = GOLDEN.with_name("fragment-1-info.bin")
GOLDEN_STATE = GOLDEN.with_name("fragment-1-state.bin")
RUN = "run-1"
FUZZ = settings(derandomize=True, max_examples=60)


def assert_same(found: Fragment, expected: Fragment) -> None:
    assert found.header == expected.header
    assert found.columns.keys() == expected.columns.keys()
    for policy_id, columns in expected.columns.items():
        assert found.columns[policy_id].keys() == columns.keys()
        for name, array in columns.items():
            assert found.columns[policy_id][name].dtype == array.dtype, name
            np.testing.assert_array_equal(found.columns[policy_id][name], array, err_msg=name)


def read(blob: bytes, description: EnvironmentDescription) -> Fragment:
    """What the trainer does with an entry of the log."""
    parsed = fragment.decode(blob)
    fragment.check(parsed, RUN, description)
    return parsed


def reason_of(blob: bytes, description: EnvironmentDescription) -> str:
    with pytest.raises(FragmentError) as caught:
        read(blob, description)
    assert caught.value.reason in DropReason
    return caught.value.reason


def golden_fragment() -> Fragment:
    """Numbers written out by rule, so that no library's random generator decides the golden bytes."""
    counting = itertools.count()
    made = random_fragment(SIMPLE, steps=2, num_envs=2, episodes=(RECORD, EpisodeRecord(-1.0, 2)))
    part = made.columns["default"]
    del part["final_obs"]
    for name, column in sorted(part.items()):
        if column.dtype == np.float32:
            numbers = [next(counting) / 4 for _ in range(column.size)]
            part[name] = np.array(numbers, np.float32).reshape(column.shape)
    flags = np.array([[False, True], [False, False]])
    part |= {"terminated": flags[::-1], "truncated": flags, "mask": ~flags, "action": np.array([[0, 1], [1, 0]])}
    part["final_index"] = np.array([[0, 1], [1, 1]], np.int32)
    part["final_obs"] = np.array([[1, 2, 3], [4, 5, 6]], np.float32)
    return made


def with_state() -> Fragment:
    """As a policy with a core acts it: two slots, three numbers each."""
    made = golden_fragment()
    made.columns["default"]["state_in"] = np.arange(6, dtype=np.float32).reshape(2, 3) / 8
    return made


def with_info() -> Fragment:
    """As an environment tells a cost in three of four steps."""
    made = golden_fragment()
    made.columns["default"]["info/cost"] = np.array([[0.5, np.nan], [-2.0, 1e12]], np.float32)
    return made


TELLING = dataclasses.replace(SIMPLE, info_columns=("cost",))


def test_fragment_bytes_equal_golden_files() -> None:
    # After a change of the format: raise WIRE_VERSION, write encode(golden_fragment()) to golden/fragment-<version>.bin
    # and point GOLDEN to it. A change here without a new version breaks runs that are going on.
    assert fragment.WIRE_VERSION == 1
    assert fragment.encode(golden_fragment()) == GOLDEN.read_bytes()
    assert fragment.encode(with_state()) == GOLDEN_STATE.read_bytes()
    assert fragment.encode(with_info()) == GOLDEN_INFO.read_bytes()
    assert_same(read(GOLDEN_INFO.read_bytes(), TELLING), with_info())
    assert_same(read(GOLDEN.read_bytes(), SIMPLE), golden_fragment())
    found = fragment.decode(GOLDEN_STATE.read_bytes())
    fragment.check(found, RUN, SIMPLE, {"default": 3})
    assert_same(found, with_state())


@pytest.mark.parametrize("sizes", [None, {}, {"default": 0}, {"default": 2}, {"default": 4}])
def test_check_rejects_state_of_wrong_size_or_not_finite(sizes: dict[str, int] | None) -> None:
    with pytest.raises(FragmentError) as caught:
        fragment.check(with_state(), RUN, SIMPLE, sizes)
    assert caught.value.reason == "schema" and "state_in" in caught.value.detail
    with pytest.raises(FragmentError, match="state_in"):
        fragment.check(golden_fragment(), RUN, SIMPLE, {"default": 3})
    made = with_state()
    made.columns["default"]["state_in"][1, 2] = np.nan
    with pytest.raises(FragmentError) as caught:
        fragment.check(made, RUN, SIMPLE, {"default": 3})
    assert caught.value.reason == "not_finite"


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"info/cost": None}, "schema"), ({"info/speed": np.zeros((2, 2), np.float32)}, "schema"),
        ({"info/cost": np.zeros((2, 3), np.float32)}, "schema"), ({"info/cost": np.zeros((2, 2))}, "schema"),
        ({"info/cost": np.full((2, 2), np.inf, np.float32)}, "not_finite"),
        ({"info/cost": np.full((2, 2), -1e13, np.float32)}, "magnitude"),
    ],
)  # fmt: skip
def test_check_rejects_unexpected_info_columns(change: dict[str, Any], reason: str) -> None:
    made = with_info()
    made.columns["default"] = {
        name: array for name, array in (made.columns["default"] | change).items() if array is not None
    }
    assert reason_of(fragment.encode(made), TELLING) == reason
    assert reason_of(fragment.encode(with_info()), SIMPLE) == "schema", "a run that asked for none"


policy_spaces = st.tuples(gymnasium_spaces(), gymnasium_spaces(images=False))


@settings(FUZZ, max_examples=120)
@given(
    policies=st.dictionaries(st.sampled_from(["default", "red", "blue"]), policy_spaces, min_size=1, max_size=2),
    agents=st.integers(1, 2), steps=st.integers(1, 4), num_envs=st.integers(1, 3), seed=st.integers(0, 2**32),
    compression=st.sampled_from(["none", "lz4", "zstd"]),
)  # fmt: skip
def test_fragment_round_trips(
    policies: dict[str, Any], agents: int, steps: int, num_envs: int, seed: int, compression: Compression
) -> None:
    description = describe(policies, agents)
    made = random_fragment(description, seed, steps=steps, num_envs=num_envs, episodes=(RECORD,), phase=Phase.HEATUP)
    blob = fragment.encode(made, compression)
    assert_same(read(blob, description), made)
    assert fragment.encode(made, compression) == blob


numbers = st.floats(-fragment.LARGEST_SHOWN, fragment.LARGEST_SHOWN)
records = st.builds(
    EpisodeRecord, numbers, st.integers(1, 2**40), st.sampled_from([None, True, False]),
    st.dictionaries(TEXTS, numbers, max_size=2), st.dictionaries(TEXTS, numbers, max_size=2),
)  # fmt: skip


@FUZZ
@given(
    worker_id=TEXTS, incarnation=st.integers(0, 2**53), seq=st.integers(0, 2**53), phase=st.sampled_from(Phase),
    episodes=st.lists(records, max_size=3).map(tuple), acting_seconds=st.floats(0, 1e9),
    policy_versions=st.integers(0, 2**53).map(lambda version: {"default": version}),
)  # fmt: skip
def test_header_round_trips(**header: Any) -> None:
    made = random_fragment(SIMPLE, **header)
    assert read(fragment.encode(made), SIMPLE).header == made.header


def test_truncated_fragment_is_undecodable() -> None:
    blob = fragment.encode(random_fragment(SIMPLE, steps=1, num_envs=1))
    prefixed = [length.to_bytes(8, "little") + blob[8:] for length in (0, 1, 2**31, 2**63, 2**64 - 1)]
    noise = [b"\xff" * 8, b"\xff" * 100, b"{}", bytes(64)]
    cut = [blob[:end] for end in range(len(blob))]
    assert {reason_of(altered, SIMPLE) for altered in (*cut, *prefixed, *noise)} == {"undecodable"}


@pytest.mark.parametrize("compression", ["none", "lz4", "zstd"])
@pytest.mark.parametrize("flip", [0x01, 0x10, 0x80, 0xFF])
def test_any_altered_byte_is_detected(compression: Compression, flip: int) -> None:
    blob = fragment.encode(random_fragment(MIXED, steps=2, num_envs=1), compression)
    reasons = set()
    for place in range(len(blob)):
        altered = bytearray(blob)
        altered[place] ^= flip
        with pytest.raises(FragmentError) as caught:
            fragment.decode(bytes(altered))
        reasons.add(caught.value.reason)
    assert reasons == {"undecodable", "corrupt"}


def test_altered_padding_is_corrupt() -> None:
    blobs = (fragment.encode(random_fragment(SIMPLE, worker_id="w" * length)) for length in range(1, 9))
    padded = next(blob for blob in blobs if b"} " in blob)
    assert reason_of(padded.replace(b"} ", b"}\n"), SIMPLE) == "corrupt"


@FUZZ
@given(data=st.data())
def test_mutated_bytes_raise_only_fragment_error(data: st.DataObject) -> None:
    intact = fragment.encode(random_fragment(MIXED, steps=1, num_envs=1), "lz4")
    blob = bytearray(intact)
    for _ in range(data.draw(st.integers(1, 4))):
        at = data.draw(st.integers(0, len(blob)))
        upto = data.draw(st.integers(at, min(len(blob), at + 12)))
        known = st.sampled_from([b"[", b"{}", b"null", b"-1", b"1e999", b'"'])
        blob[at:upto] = data.draw(st.binary(max_size=12) | known)
    if blob != intact:
        reason_of(bytes(blob), MIXED)


@settings(FUZZ, max_examples=300)
@given(data=st.data())
def test_malformed_header_raises_only_fragment_error(data: st.DataObject) -> None:
    packed, header = tensor_blob.decode(fragment.encode(random_fragment(MIXED, episodes=(RECORD,)), "zstd"))
    here: Any = header
    while isinstance(here, dict | list) and here:
        key = data.draw(st.sampled_from(sorted(here))) if isinstance(here, dict) else len(here) - 1
        if not isinstance(here[key], dict | list) or data.draw(st.booleans()):
            here[key] = data.draw(JSON_VALUES)
            break
        here = here[key]
    blob = tensor_blob.encode(packed, header)
    try:
        accepted = read(blob, MIXED)
    except FragmentError:
        reason_of(blob, MIXED)
    else:
        assert read(fragment.encode(accepted), MIXED).header == accepted.header


@pytest.mark.parametrize(("changes", "reason"), HEADERS, ids=str)
def test_invalid_header_names_its_reason(changes: dict[str, Any], reason: str) -> None:
    assert reason_of(with_header(random_fragment(SIMPLE), changes), SIMPLE) == reason


@pytest.mark.parametrize("name", COLUMNS)
def test_malformed_columns_name_their_reason(name: str) -> None:
    made, (change, reason) = random_fragment(SIMPLE, SEED), COLUMNS[name]
    part = made.columns["default"]
    ended = part["truncated"] | part["terminated"]
    assert part["truncated"].sum() >= 2 and part["truncated"][tuple(part["final_index"][0])] and not ended.all()
    read(fragment.encode(made), SIMPLE)
    change(part)
    assert reason_of(fragment.encode(made), SIMPLE) == reason


def test_unknown_policies_are_a_schema_error() -> None:
    other = describe({"other": (spaces.Discrete(2), spaces.Discrete(2))})
    assert reason_of(fragment.encode(random_fragment(other)), SIMPLE) == "schema"


@pytest.mark.parametrize("column", ["obs.kind", "final_obs.kind", "bootstrap_obs.kind", "obs.pair.0", "action"])
def test_invalid_choice_is_detected_in_every_column(column: str) -> None:
    made = random_fragment(MIXED, seed=SEED)
    made.columns["default"][column].flat[-1] = 3
    assert reason_of(fragment.encode(made), MIXED) == "schema"


def test_log_prob_may_be_nan_unless_algorithm_needs_it() -> None:
    made = random_fragment(SIMPLE, seed=SEED)
    made.columns["default"]["log_prob"][1, 0] = np.nan
    found = read(fragment.encode(made), SIMPLE)
    assert_same(found, made)
    with pytest.raises(FragmentError, match="default/log_prob is not known, and the algorithm learns by it") as caught:
        fragment.check(found, RUN, SIMPLE, by_log_prob=SIMPLE.policies)
    assert caught.value.reason == "not_finite"


@pytest.mark.parametrize("column", ["obs", "bootstrap_obs", "final_obs", "reward", "log_prob"])
@pytest.mark.parametrize("sign", [1, -1])
def test_largest_magnitude_is_accepted(column: str, sign: int) -> None:
    made = random_fragment(SIMPLE, SEED)
    made.columns["default"][column].flat[-1] = sign * fragment.LARGEST
    read(fragment.encode(made), SIMPLE)


def test_fragment_version_is_the_oldest() -> None:
    header = random_fragment(SIMPLE, policy_versions={"a": 4, "b": 3}).header
    assert (header.version, header.transitions) == (3, 6)
