"""Fragments: fixed bytes, lossless round trips over all spaces, and a named reason for everything that is malformed."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from gymnasium import spaces
from hypothesis import given, settings
from hypothesis import strategies as st

from rollout_worker.making import describe_space
from shared import fragment, tensor_blob
from shared.column_codec import Compression
from shared.errors import FragmentError
from shared.fragment import EpisodeRecord, Fragment, FragmentHeader
from shared.spaces import Columns, EnvironmentDescription, PolicySpaces
from shared.steps import Phase

GOLDEN = Path(__file__).parent / "golden" / "fragment-3.bin"
GOLDEN_STATE = GOLDEN.with_name("fragment-3-state.bin")
GOLDEN_BEFORE = GOLDEN.with_name("fragment-2.bin")
RUN = "run-1"
FUZZ = settings(deadline=None, derandomize=True, max_examples=60)


def describe(
    policies: dict[str, tuple[spaces.Space[Any], spaces.Space[Any]]], agents: int = 1
) -> EnvironmentDescription:
    """An environment whose policies have these observation and action spaces, `agents` agents each."""
    return EnvironmentDescription(
        {f"{policy}-{number}": policy for policy in policies for number in range(agents)},
        {policy: PolicySpaces(describe_space(seen), describe_space(done)) for policy, (seen, done) in policies.items()},
    )


def make_fragment(
    description: EnvironmentDescription, steps: int = 3, num_envs: int = 2, seed: int = 0, **header: Any
) -> Fragment:
    """A valid fragment with random contents: some rows truncated, of those terminated some with a last observation."""
    random = np.random.default_rng(seed)
    columns: dict[str, Columns] = {}
    for policy_id, its in description.policies.items():
        slots = num_envs * description.slots(policy_id)
        part: Columns = {}
        truncated, terminated, known = random.random((3, steps, slots)) < np.array([0.3, 0.3, 0.6])[:, None, None]
        final = np.argwhere(truncated | (terminated & known)).astype(np.int32)
        rows = len(final)
        choices = {
            leaf.column(prefix): np.asarray(leaf.nvec, np.int64).reshape(leaf.shape)
            for spec, prefixes in ((its.observation, ("obs", "bootstrap_obs", "final_obs")), (its.action, ("action",)))
            for leaf in spec.leaves
            for prefix in prefixes
            if leaf.kind != "box"
        }
        for name, (shape, dtype) in fragment.expected_columns(its, steps, slots).items():
            size = tuple(rows if length == -1 else length for length in shape)
            numbers = random.integers(0, 2**20, size)
            if name in choices:
                part[name] = (numbers % choices[name]).astype(np.int64)
            elif dtype.kind == "f":
                part[name] = random.standard_normal(size).astype(dtype)
            else:
                part[name] = (numbers % 2 if dtype.kind == "b" else numbers % 100).astype(dtype)
        part |= {"truncated": truncated, "terminated": terminated, "final_index": final}
        columns[policy_id] = part
    fields: dict[str, Any] = {
        "run_id": RUN, "worker_id": "w0", "incarnation": 1, "seq": 7, "phase": Phase.TRAIN,
        "policy_versions": dict.fromkeys(description.policies, 5), "steps": steps, "num_envs": num_envs,
        "acting_seconds": 0.25,
    }  # fmt: skip
    return Fragment(FragmentHeader(**fields | header), columns)


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
    assert caught.value.reason in fragment.REASONS
    return caught.value.reason


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
RECORD = EpisodeRecord(12.5, 30, True, {"a": 10.0, "b": 2.5}, {"height": 1.5})


def golden_fragment() -> Fragment:
    """Numbers written out by rule, so that no library's random generator decides the golden bytes."""
    counting = itertools.count()
    made = make_fragment(SIMPLE, steps=2, num_envs=2, episodes=(RECORD, EpisodeRecord(-1.0, 2)))
    part = made.columns["default"]
    del part["final_obs"]
    for name in sorted(part):
        if part[name].dtype == np.float32:
            part[name] = np.array([next(counting) / 4 for _ in range(part[name].size)], np.float32).reshape(
                part[name].shape
            )
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


def test_the_bytes_on_the_wire_are_the_golden_ones() -> None:
    # After a change of the format: raise WIRE_VERSION, write encode(golden_fragment()) to golden/fragment-<version>.bin
    # and point GOLDEN to it. A change here without a new version breaks runs that are going on.
    assert fragment.WIRE_VERSION == 3
    assert fragment.encode(golden_fragment()) == GOLDEN.read_bytes()
    assert fragment.encode(with_state()) == GOLDEN_STATE.read_bytes()


def test_the_bytes_of_the_version_before_are_read_without_what_they_do_not_hold() -> None:
    expected = golden_fragment()
    part = expected.columns["default"]
    part |= {name: part[name][:1] for name in ("final_index", "final_obs")}
    header = dataclasses.replace(expected.header, wire_version=2)
    assert_same(read(GOLDEN_BEFORE.read_bytes(), SIMPLE), Fragment(header, expected.columns))


def test_the_golden_bytes_are_read() -> None:
    assert_same(read(GOLDEN.read_bytes(), SIMPLE), golden_fragment())
    found = fragment.decode(GOLDEN_STATE.read_bytes())
    fragment.check(found, RUN, SIMPLE, {"default": 3})
    assert_same(found, with_state())


@pytest.mark.parametrize("sizes", [None, {}, {"default": 0}, {"default": 2}, {"default": 4}])
def test_a_state_of_another_size_is_no_fragment_of_this_run(sizes: dict[str, int] | None) -> None:
    with pytest.raises(FragmentError) as caught:
        fragment.check(with_state(), RUN, SIMPLE, sizes)
    assert caught.value.reason == "schema" and "state_in" in caught.value.detail
    with pytest.raises(FragmentError, match="state_in"):
        fragment.check(golden_fragment(), RUN, SIMPLE, {"default": 3})


def test_a_state_that_is_not_finite_is_dropped_as_such() -> None:
    made = with_state()
    made.columns["default"]["state_in"][1, 2] = np.nan
    with pytest.raises(FragmentError) as caught:
        fragment.check(made, RUN, SIMPLE, {"default": 3})
    assert caught.value.reason == "not_finite"


def leaf_spaces(in_actions: bool) -> st.SearchStrategy[spaces.Space[Any]]:
    """Gymnasium spaces that are one array."""
    shapes = st.lists(st.integers(1, 3), max_size=2).map(tuple)
    dtypes = st.sampled_from([np.float32, np.float64])
    kinds = [
        st.builds(lambda shape, dtype: spaces.Box(-1, 1, shape, dtype), shapes, dtypes),
        st.builds(lambda n, start: spaces.Discrete(n, start=start), st.integers(1, 5), st.integers(-3, 3)),
        st.builds(spaces.MultiDiscrete, st.lists(st.integers(1, 4), min_size=1, max_size=3)),
        st.builds(spaces.MultiBinary, st.integers(1, 4)),
    ]
    if not in_actions:
        images = st.sampled_from([(1, 5, 5), (4, 4, 4), (5, 5, 3), (2, 4, 4, 3), (3, 3)])
        kinds.append(st.builds(lambda shape: spaces.Box(0, 255, shape, np.uint8), images))
        kinds.append(st.builds(lambda shape: spaces.Box(0, 1, shape, np.bool_), shapes))  # type: ignore[arg-type]
    return st.one_of(kinds)


def nested_spaces(in_actions: bool) -> st.SearchStrategy[spaces.Space[Any]]:
    """Spaces of one leaf or nested in dicts and tuples."""
    keys = st.sampled_from(["a", "camera", "x/y", "ä"])
    return st.recursive(
        leaf_spaces(in_actions),
        lambda below: st.one_of(
            st.dictionaries(keys, below, min_size=1, max_size=3).map(spaces.Dict),
            st.lists(below, min_size=1, max_size=2).map(spaces.Tuple),
        ),
        max_leaves=3,
    )


policy_spaces = st.tuples(nested_spaces(False), nested_spaces(True))


@settings(FUZZ, max_examples=120)
@given(
    policies=st.dictionaries(st.sampled_from(["default", "red", "blue"]), policy_spaces, min_size=1, max_size=2),
    agents=st.integers(1, 2), steps=st.integers(1, 4), num_envs=st.integers(1, 3), seed=st.integers(0, 2**32),
    compression=st.sampled_from(["none", "lz4", "zstd"]),
)  # fmt: skip
def test_every_fragment_comes_back_as_it_was(
    policies: dict[str, Any], agents: int, steps: int, num_envs: int, seed: int, compression: Compression
) -> None:
    description = describe(policies, agents)
    made = make_fragment(description, steps, num_envs, seed, episodes=(RECORD,), phase=Phase.HEATUP)
    blob = fragment.encode(made, compression)
    assert_same(read(blob, description), made)
    assert fragment.encode(made, compression) == blob


texts = st.text(max_size=20)
numbers = st.floats(-fragment.LARGEST_SHOWN, fragment.LARGEST_SHOWN)
records = st.builds(
    EpisodeRecord, numbers, st.integers(1, 2**40), st.sampled_from([None, True, False]),
    st.dictionaries(texts, numbers, max_size=2), st.dictionaries(texts, numbers, max_size=2),
)  # fmt: skip


@FUZZ
@given(
    worker_id=texts, incarnation=st.integers(0, 2**60), seq=st.integers(0, 2**60), phase=st.sampled_from(Phase),
    episodes=st.lists(records, max_size=3).map(tuple), acting_seconds=st.floats(0, 1e9),
    policy_versions=st.integers(0, 2**60).map(lambda version: {"default": version}),
)  # fmt: skip
def test_every_header_comes_back_as_it_was(**header: Any) -> None:
    made = make_fragment(SIMPLE, **header)
    assert read(fragment.encode(made), SIMPLE).header == made.header


@pytest.mark.parametrize("blob", [b"", b"\0", b"\xff" * 8, b"\xff" * 100, b"{}", bytes(64)])
def test_bytes_of_no_format_are_undecodable(blob: bytes) -> None:
    assert reason_of(blob, SIMPLE) == "undecodable"


@pytest.mark.parametrize("length", [0, 1, 2**31, 2**63, 2**64 - 1])
def test_a_wrong_length_prefix_is_undecodable(length: int) -> None:
    blob = fragment.encode(make_fragment(SIMPLE))
    assert reason_of(length.to_bytes(8, "little") + blob[8:], SIMPLE) == "undecodable"


def test_a_fragment_cut_off_anywhere_is_undecodable() -> None:
    blob = fragment.encode(make_fragment(SIMPLE, steps=1, num_envs=1))
    assert {reason_of(blob[:end], SIMPLE) for end in range(len(blob))} == {"undecodable"}


@pytest.mark.parametrize("compression", ["none", "lz4", "zstd"])
@pytest.mark.parametrize("flip", [0x01, 0x10, 0x80, 0xFF])
def test_no_altered_byte_goes_unnoticed(compression: Compression, flip: int) -> None:
    blob = fragment.encode(make_fragment(MIXED, steps=2, num_envs=1), compression)
    reasons = set()
    for place in range(len(blob)):
        altered = bytearray(blob)
        altered[place] ^= flip
        with pytest.raises(FragmentError) as caught:
            fragment.decode(bytes(altered))
        reasons.add(caught.value.reason)
    assert reasons == {"undecodable", "corrupt"}


@pytest.mark.parametrize(("old", "new"), [(b"/reward", b"/reborn"), (b'"F32"', b'"I32"'), (b"w0", b"w1")])
def test_altered_names_types_and_header_text_are_corrupt(old: bytes, new: bytes) -> None:
    blob = fragment.encode(make_fragment(SIMPLE))
    assert old in blob
    assert reason_of(blob.replace(old, new, 1), SIMPLE) == "corrupt"


def test_even_altered_padding_is_corrupt() -> None:
    blobs = (fragment.encode(make_fragment(SIMPLE, worker_id="w" * length)) for length in range(1, 9))
    padded = next(blob for blob in blobs if b"} " in blob)
    assert reason_of(padded.replace(b"} ", b"}\n"), SIMPLE) == "corrupt"


@FUZZ
@given(data=st.data())
def test_mutated_bytes_only_ever_raise_a_fragment_error(data: st.DataObject) -> None:
    blob = bytearray(fragment.encode(make_fragment(MIXED, steps=1, num_envs=1), "lz4"))
    for _ in range(data.draw(st.integers(1, 4))):
        at = data.draw(st.integers(0, len(blob)))
        upto = data.draw(st.integers(at, min(len(blob), at + 12)))
        new = data.draw(
            st.one_of(st.binary(max_size=12), st.sampled_from([b"[", b"{}", b"null", b"-1", b"1e999", b'"']))
        )
        blob[at:upto] = new
    if bytes(blob) != fragment.encode(make_fragment(MIXED, steps=1, num_envs=1), "lz4"):
        reason_of(bytes(blob), MIXED)


@FUZZ
@given(blob=st.binary(max_size=200))
def test_random_bytes_only_ever_raise_a_fragment_error(blob: bytes) -> None:
    assert reason_of(blob, SIMPLE) == "undecodable"


json_values = st.recursive(
    st.one_of(st.none(), st.booleans(), st.integers(), st.floats(), texts),
    lambda below: st.one_of(st.lists(below, max_size=3), st.dictionaries(texts, below, max_size=3)),
    max_leaves=4,
)


@settings(FUZZ, max_examples=300)
@given(data=st.data())
def test_a_wrong_header_with_a_right_hash_only_ever_raises_a_fragment_error(data: st.DataObject) -> None:
    packed, header = tensor_blob.decode(fragment.encode(make_fragment(MIXED, episodes=(RECORD,)), "zstd"))
    here: Any = header
    while isinstance(here, dict | list) and here:
        key = data.draw(st.sampled_from(sorted(here))) if isinstance(here, dict) else len(here) - 1
        if not isinstance(here[key], dict | list) or data.draw(st.booleans()):
            here[key] = data.draw(json_values)
            break
        here = here[key]
    blob = tensor_blob.encode(packed, header)
    try:
        accepted = read(blob, MIXED)
    except FragmentError:
        reason_of(blob, MIXED)
    else:
        assert read(fragment.encode(accepted), MIXED).header == accepted.header


def with_header(**changes: Any) -> bytes:
    """A blob with a right hash and these header fields replaced (`...` takes one away)."""
    packed, header = tensor_blob.decode(fragment.encode(make_fragment(SIMPLE)))
    changed = {name: value for name, value in (header | changes).items() if value is not ...}
    return tensor_blob.encode(packed, changed)


EPISODE = dataclasses.asdict(RECORD)


@pytest.mark.parametrize("version", [0, 1, 99, "1", None, ...])
def test_another_wire_version_is_named_so(version: object) -> None:
    assert reason_of(with_header(wire_version=version), SIMPLE) == "wire_version"


def test_a_fragment_of_another_run_is_foreign() -> None:
    assert reason_of(fragment.encode(make_fragment(SIMPLE, run_id="run-2")), SIMPLE) == "foreign_run"


@pytest.mark.parametrize(
    "changes",
    [
        {"seq": "7"}, {"seq": -1}, {"seq": True}, {"seq": 1.0}, {"seq": ...}, {"incarnation": None}, {"unknown": 1},
        {"steps": 0}, {"steps": 4}, {"num_envs": 0}, {"num_envs": 10**30}, {"run_id": 5}, {"worker_id": None},
        {"phase": "sleep"}, {"phase": []}, {"policy_versions": {}}, {"policy_versions": {"default": -1}},
        {"policy_versions": {"other": 1}}, {"policy_versions": [5]}, {"policy_versions": {"default": "5"}},
        {"acting_seconds": "1"}, {"acting_seconds": -1.0}, {"acting_seconds": float("nan")}, {"layout": []},
        {"layout": {"default/obs": {"codec": "rot13", "shape": [1]}}}, {"layout": {"default/none": {"stack": 4}}},
        {"episodes": None}, {"episodes": [3]}, {"episodes": [EPISODE | {"episode_return": "12"}]},
        {"episodes": [EPISODE | {"length": 1.5}]}, {"episodes": [EPISODE | {"length": 0}]},
        {"episodes": [EPISODE | {"success": "yes"}]}, {"episodes": [EPISODE | {"metrics": {"x": "high"}}]},
        {"episodes": [EPISODE | {"agent_returns": [1]}]}, {"episodes": [EPISODE | {"surprise": 1}]},
    ],
    ids=str,
)  # fmt: skip
def test_a_bad_header_field_is_a_schema_error(changes: dict[str, Any]) -> None:
    assert reason_of(with_header(**changes), SIMPLE) == "schema"


@pytest.mark.parametrize("field", ["episode_return", "metrics", "agent_returns"])
@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_an_episode_record_that_is_not_finite_is_named_so(field: str, value: float) -> None:
    changed = EPISODE | {field: value if field == "episode_return" else {"x": value}}
    assert reason_of(with_header(episodes=[changed]), SIMPLE) == "not_finite"


MALFORMED_SEED = 2
Change = Callable[[Columns], object]
MALFORMED: dict[str, Change] = {
    "a missing column": lambda part: part.pop("reward"),
    "an extra column": lambda part: part.update(extra=part["reward"]),
    "a wrong shape": lambda part: part.update(reward=part["reward"][:-1]),
    "too few axes": lambda part: part.update(obs=part["obs"][0]),
    "a wrong dtype": lambda part: part.update(reward=part["reward"].astype(np.float64)),
    "numbers for flags": lambda part: part.update(mask=part["mask"].astype(np.uint8)),
    "no axes at all": lambda part: part.update(final_index=np.array(3, np.int32)),
    "a choice too high": lambda part: part["action"].__setitem__((0, 0), 2),
    "a choice too low": lambda part: part["action"].__setitem__((0, 0), -1),
    "a step out of range": lambda part: part["final_index"].__setitem__((0, 0), 3),
    "a slot out of range": lambda part: part["final_index"].__setitem__((0, 1), 2),
    "a negative step that wraps around": lambda part: part["final_index"].__isub__(np.array([3, 0], np.int32)),
    "one slot twice": lambda part: part["final_index"].__setitem__(1, part["final_index"][0]),
    "a final observation too few": lambda part: part.update(
        final_index=part["final_index"][1:], final_obs=part["final_obs"][1:]
    ),
    "fewer rows than places": lambda part: part.update(final_obs=part["final_obs"][1:]),
    "no truncated slots": lambda part: part["truncated"].fill(False),
    "a last observation of an episode that goes on": lambda part: part.update(
        final_index=np.vstack([part["final_index"], np.argwhere(~(part["truncated"] | part["terminated"]))[:1]]).astype(
            np.int32
        ),
        final_obs=np.vstack([part["final_obs"], part["final_obs"][:1]]),
    ),
}


@pytest.mark.parametrize("name", MALFORMED)
def test_malformed_columns_are_a_schema_error(name: str) -> None:
    made = make_fragment(SIMPLE, seed=MALFORMED_SEED)
    part = made.columns["default"]
    ended = part["truncated"] | part["terminated"]
    assert part["truncated"].sum() >= 2 and part["truncated"][tuple(part["final_index"][0])] and not ended.all()
    read(fragment.encode(made), SIMPLE)
    MALFORMED[name](made.columns["default"])
    assert reason_of(fragment.encode(made), SIMPLE) == "schema"


def test_policies_that_the_run_does_not_have_are_a_schema_error() -> None:
    other = describe({"other": (spaces.Discrete(2), spaces.Discrete(2))})
    assert reason_of(fragment.encode(make_fragment(other)), SIMPLE) == "schema"


@pytest.mark.parametrize("column", ["obs.kind", "final_obs.kind", "bootstrap_obs.kind", "obs.pair.0", "action"])
def test_a_choice_that_does_not_exist_is_found_in_every_column(column: str) -> None:
    made = make_fragment(MIXED, seed=2)
    made.columns["default"][column].flat[-1] = 3
    assert reason_of(fragment.encode(made), MIXED) == "schema"


@pytest.mark.parametrize(
    ("column", "value"),
    [
        *itertools.product(["obs", "bootstrap_obs", "final_obs", "reward"], [np.nan, np.inf, -np.inf]),
        ("log_prob", np.inf), ("log_prob", -np.inf),
    ],
)  # fmt: skip
def test_numbers_that_are_not_finite_are_named_so(column: str, value: float) -> None:
    made = make_fragment(SIMPLE, seed=2)
    made.columns["default"][column].flat[-1] = value
    assert reason_of(fragment.encode(made), SIMPLE) == "not_finite"


def test_a_log_prob_may_be_unknown_but_not_where_it_is_learnt_by() -> None:
    made = make_fragment(SIMPLE, seed=2)
    made.columns["default"]["log_prob"][1, 0] = np.nan
    found = read(fragment.encode(made), SIMPLE)
    assert_same(found, made)
    with pytest.raises(FragmentError, match="default/log_prob is not known, and the algorithm learns by it") as caught:
        fragment.check(found, RUN, SIMPLE, by_log_prob=True)
    assert caught.value.reason == "not_finite"


@pytest.mark.parametrize("column", ["obs", "bootstrap_obs", "final_obs", "reward", "log_prob"])
@pytest.mark.parametrize("value", [3e38, -1.1e12])
def test_numbers_of_a_magnitude_beyond_the_bound_are_named_so(column: str, value: float) -> None:
    made = make_fragment(SIMPLE, seed=2)
    made.columns["default"][column].flat[-1] = np.sign(value) * fragment.LARGEST
    fragment.check(fragment.decode(fragment.encode(made)), made.header.run_id, SIMPLE)
    made.columns["default"][column].flat[-1] = value
    assert reason_of(fragment.encode(made), SIMPLE) == "magnitude"


@pytest.mark.parametrize("field", ["episode_return", "metrics", "agent_returns"])
def test_an_episode_record_of_a_magnitude_beyond_the_bound_is_named_so(field: str) -> None:
    changed = EPISODE | {field: -2e30 if field == "episode_return" else {"x": -2e30}}
    assert reason_of(with_header(episodes=[changed]), SIMPLE) == "magnitude"


def test_the_version_of_a_fragment_is_its_oldest() -> None:
    header = make_fragment(SIMPLE, policy_versions={"a": 4, "b": 3}).header
    assert (header.version, header.transitions) == (3, 6)
