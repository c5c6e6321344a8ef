"""Every format is read as the same episodes, and fragments cut from them are what a run's log takes."""

from __future__ import annotations

import csv
import dataclasses
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from stagecoach.shared.base.errors import DatasetError, UserError
from stagecoach.shared.config.recorded import DatasetConfig
from stagecoach.shared.datasets.read import read_dataset
from stagecoach.shared.datasets.recording import Episode, Recording
from stagecoach.shared.experience import fragment
from stagecoach.shared.experience.fragment import EpisodeRecord
from stagecoach.shared.experience.spaces import Columns, EnvironmentDescription, Leaf, PolicySpaces, SpaceSpec
from tests.support.experience.datasets import (
    BOX,
    CHOICE,
    NESTED,
    TORQUE,
    described,
    episodes,
    fragment_of,
    write_archive,
    write_csv,
    write_d4rl,
    write_minari,
)

WRITERS: dict[str, tuple[Callable[..., None], str]] = {
    "csv": (write_csv, "data.csv"), "d4rl": (write_d4rl, "data.hdf5"), "minari": (write_minari, "sample-v0")
}  # fmt: skip
ROWS = 17
"""Steps of the episodes that are written, by default."""
MINARI = Path(__file__).parent / "minari_cartpole"
"""Two episodes of CartPole-v1, written by minari 0.5.4: one falls, one is truncated after 12 steps."""


DESCRIPTION = described()
SPACES = DESCRIPTION.policies["default"]


@pytest.fixture
def needs_h5py() -> None:
    """The optional dependency that two of the formats are read with."""
    pytest.importorskip("h5py")


def read(path: Path, description: EnvironmentDescription, **fields: Any) -> Recording:
    (found,) = read_dataset(DatasetConfig(path=str(path), **fields), description).values()
    return found


def spaces_of(description: EnvironmentDescription) -> PolicySpaces:
    return description.policies["default"]


def assert_same(found: Recording, listed: Sequence[Episode]) -> None:
    for mine, theirs in zip(found.episodes(), listed, strict=True):
        for part in ("observations", "actions"):
            assert getattr(mine, part).keys() == getattr(theirs, part).keys()
            for name, array in getattr(mine, part).items():
                np.testing.assert_array_equal(array, getattr(theirs, part)[name])
                assert array.dtype == getattr(theirs, part)[name].dtype
        np.testing.assert_array_equal(mine.reward, theirs.reward)
        np.testing.assert_array_equal(mine.log_prob, theirs.log_prob)
        assert (mine.terminated, mine.record, mine.last_known) == (theirs.terminated, theirs.record, theirs.last_known)


@pytest.mark.parametrize(
    ("observation", "action"), [(BOX, CHOICE), (BOX, TORQUE), (NESTED, CHOICE)], ids=["choice", "torque", "nested"]
)
@pytest.mark.parametrize("layout", WRITERS)
def test_formats_round_trip(tmp_path: Path, layout: str, observation: SpaceSpec, action: SpaceSpec) -> None:
    if layout != "csv":
        pytest.importorskip("h5py")
    write, name = WRITERS[layout]
    description = described(observation, action)
    listed = episodes(spaces_of(description), log_prob=layout != "minari")
    write(tmp_path / name, spaces_of(description), listed)
    found = read(tmp_path / name, description)
    assert_same(found, listed)
    assert len(found) == ROWS
    if layout == "minari":
        assert_same(read(tmp_path / name / "data" / "main_data.hdf5", description), listed)


@pytest.mark.usefixtures("needs_h5py")
def test_minari_dataset_is_read() -> None:
    box = SpaceSpec((Leaf("", "box", (4,), "float32", low=(-9.0,), high=(9.0,)),), 0)
    choice = SpaceSpec((Leaf("", "discrete", (), "int64", (2,), (0,)),), 0)
    fell, stopped = read(MINARI, described(box, choice)).episodes()
    assert sorted([fell.terminated, stopped.terminated]) == [False, True]
    for episode in (fell, stopped):
        assert episode.record == EpisodeRecord(float(len(episode)), len(episode))
        before, after = episode.observations["obs"][:-1], episode.observations["obs"][1:]
        pushed = np.sign(after[:, 1] - before[:, 1])
        np.testing.assert_array_equal(pushed, 2 * episode.actions["action"] - 1)
        np.testing.assert_allclose(after[:, 0] - before[:, 0], 0.02 * before[:, 1], atol=1e-6)


def test_archive_returns_acted_episodes(tmp_path: Path) -> None:
    description = described(NESTED, CHOICE)
    listed = episodes(spaces_of(description), (5, 1, 7, 4, 6, 1), "tTtTtt")
    recording = Recording(spaces_of(description), listed, "memory")
    pieces = [recording.cut([piece, piece + 3], 4)[0] for piece in range(3)]
    write_archive(tmp_path, [fragment_of(columns, seq) for seq, columns in enumerate(pieces)])
    found = list(read(tmp_path / "a-run", description).episodes())
    assert [len(episode) for episode in found] == [5, 1, 6, 1, 4, 6, 1], "slot 0 ends within the third episode"
    assert [episode.record is not None for episode in found] == [True, True, False, True, True, True, True]
    assert_same(Recording(spaces_of(description), found[:2] + found[4:], ""), listed[:2] + listed[3:])
    np.testing.assert_array_equal(found[2].observations["obs.cam"], listed[2].observations["obs.cam"][:7])


def test_archive_of_turns_drops_turns_at_fragment_ends(tmp_path: Path) -> None:
    recording = Recording(SPACES, episodes(SPACES, (5, 7), "tT"), "memory")
    write_archive(tmp_path, [fragment_of(recording.cut([piece], 4)[0], piece) for piece in range(3)])
    for in_turns, lengths in ((False, [5, 7]), (True, [4, 1, 3, 4])):
        description = dataclasses.replace(DESCRIPTION, in_turns=in_turns)
        found = list(read(tmp_path / "a-run", description).episodes())
        assert [len(episode) for episode in found] == lengths
        assert [episode.record is not None for episode in found] == [not in_turns] * len(lengths)


def test_archive_with_gaps_and_masks_is_read(tmp_path: Path) -> None:
    listed = episodes(SPACES, (12, 3, 9), "ttt")
    recording = Recording(SPACES, listed, "memory")
    pieces = [recording.cut([piece], 4)[0] for piece in range(6)]
    wide = {name: np.insert(array, 1, array[1], axis=0) for name, array in pieces[5].items() if len(array) == 4}
    resets = pieces[5] | wide
    resets["mask"] = np.array([[True], [False], [True], [True], [True]])
    resets["final_index"] = resets["final_index"] + np.array([1, 0], np.int32)
    sent = [(0, pieces[0]), (1, pieces[1]), (1, pieces[1]), (3, pieces[3]), (4, pieces[4]), (5, resets)]
    write_archive(tmp_path, [fragment_of(columns, seq) for seq, columns in sent])
    found = list(read(tmp_path / "a-run", DESCRIPTION).episodes())
    assert [len(episode) for episode in found] == [8, 3, 9]
    assert [episode.record for episode in found] == [None, None, listed[2].record], "the gap hides a beginning"
    np.testing.assert_array_equal(found[2].observations["obs"], listed[2].observations["obs"])


def without(path: Path, name: str) -> None:
    """Takes away the columns of a CSV file whose names begin so."""
    rows = [row.split(",") for row in path.read_text().splitlines()]
    keep = [place for place, column in enumerate(rows[0]) if not column.startswith(name)]
    path.write_text("\n".join(",".join(row[place] for place in keep) for row in rows))


@pytest.mark.usefixtures("needs_h5py")
def test_log_probs_may_be_unknown(tmp_path: Path) -> None:
    listed = episodes(SPACES)
    listed[1].log_prob[0] = np.nan
    write_csv(tmp_path / "data.csv", SPACES, listed)
    write_d4rl(tmp_path / "data.h5", SPACES, listed)
    for name in ("data.csv", "data.h5"):
        assert_same(read(tmp_path / name, DESCRIPTION), listed)
    without(tmp_path / "data.csv", "log_prob")
    assert np.isnan(read(tmp_path / "data.csv", DESCRIPTION).columns["log_prob"]).all()


@pytest.mark.usefixtures("needs_h5py")
def test_formats_carry_info_columns(tmp_path: Path) -> None:
    import h5py

    listed = episodes(SPACES, (5, 1, 7, 4), "tTtT", log_prob=False)
    parts = [np.arange(len(episode), dtype=np.float32) + number for number, episode in enumerate(listed)]
    told = [dataclasses.replace(episode, info={"info/cost": part}) for episode, part in zip(listed, parts, strict=True)]
    cost = np.concatenate(parts)
    write_csv(tmp_path / "data.csv", SPACES, listed, **{"info/cost": cost.tolist()})
    write_d4rl(tmp_path / "data.h5", SPACES, listed)
    write_minari(tmp_path / "minari", SPACES, listed)
    with h5py.File(tmp_path / "data.h5", "a") as file:
        file["infos/cost"] = cost
    with h5py.File(tmp_path / "minari" / "data" / "main_data.hdf5", "a") as file:
        for number, part in enumerate(parts):
            file[f"episode_{number}/infos/cost"] = np.concatenate([[99.0], part])  # the first is of the reset
    recording = Recording(SPACES, told, "memory")
    pieces = [recording.cut([piece], 4)[0] for piece in range(recording.pieces(4))]
    assert np.isnan(pieces[-1]["info/cost"][~pieces[-1]["mask"]]).all()
    write_archive(tmp_path, [fragment_of(columns, seq) for seq, columns in enumerate(pieces)])
    wanted = dataclasses.replace(DESCRIPTION, info_columns=("cost", "speed"))
    for name in ("data.csv", "data.h5", "minari", "a-run"):
        found = read(tmp_path / name, wanted)
        assert_same(found, listed)
        np.testing.assert_array_equal(found.columns["info/cost"], cost)
        assert np.isnan(found.columns["info/speed"]).all(), "nothing told it"
        assert all(list(episode.info) == ["info/cost", "info/speed"] for episode in found.episodes())
        fragment.check(fragment_of(found.cut([0, 1], 4)[0], 0), "a-run", wanted)
    plain = {read(tmp_path / name, DESCRIPTION).sha256 for name in ("data.h5", "minari", "a-run")}
    assert plain == {Recording(SPACES, listed, "memory").sha256}


SEVERAL = EnvironmentDescription({"ann": "a", "bob": "b", "cy": "b"}, {"a": SPACES, "b": PolicySpaces(NESTED, TORQUE)})


def test_csv_rows_of_policies_may_alternate(tmp_path: Path) -> None:
    """Agent by agent each policy's episodes, in columns that another policy may not have."""
    listed = {agent: episodes(SEVERAL.policies[its], (5, 4), "tc") for agent, its in SEVERAL.agents.items()}
    parts = []
    for agent, policy_id in SEVERAL.agents.items():
        write_csv(tmp_path / "part.csv", SEVERAL.policies[policy_id], listed[agent])
        with (tmp_path / "part.csv").open(newline="") as file:
            parts.append([row | {"agent": agent, "policy": policy_id} for row in csv.DictReader(file)])
    write_rows(tmp_path / "data.csv", [row for step in zip(*reversed(parts), strict=True) for row in step])
    without(tmp_path / "data.csv", "episode")  # so that only the agent tells where bob's data end
    found = read_dataset(DatasetConfig(path=str(tmp_path / "data.csv")), SEVERAL)
    assert_same(found["a"], listed["ann"])
    assert_same(found["b"], listed["bob"] + listed["cy"])
    assert found.sha256 not in (found["a"].sha256, found["b"].sha256)
    assert_same(read(tmp_path / "data.csv", SEVERAL.of(["a"])), listed["ann"])
    write_rows(tmp_path / "data.csv", parts[0])
    with pytest.raises(DatasetError, match=r"data.csv has no row of policy b; name it in the column policy"):
        read_dataset(DatasetConfig(path=str(tmp_path / "data.csv")), SEVERAL)
    without(tmp_path / "data.csv", "policy")
    with pytest.raises(DatasetError, match=r"data.csv has no column policy; expected in each row .* such as a, b"):
        read_dataset(DatasetConfig(path=str(tmp_path / "data.csv")), SEVERAL)


def write_rows(path: Path, rows: Sequence[dict[str, Any]]) -> None:
    with path.open("w", newline="") as file:
        writer = csv.DictWriter(file, list(dict.fromkeys(name for row in rows for name in row)), restval="")
        writer.writeheader()
        writer.writerows(rows)


@pytest.mark.usefixtures("needs_h5py")
def test_hdf5_has_a_group_per_policy(tmp_path: Path) -> None:
    import h5py

    listed = {policy_id: episodes(spaces) for policy_id, spaces in SEVERAL.policies.items()}
    for policy_id, its in listed.items():
        write_d4rl(tmp_path / f"{policy_id}.h5", SEVERAL.policies[policy_id], its)
        with h5py.File(tmp_path / f"{policy_id}.h5") as part, h5py.File(tmp_path / "data.h5", "a") as file:
            part.copy(part, file, policy_id)
    for policy_id, recording in read_dataset(DatasetConfig(path=str(tmp_path / "data.h5")), SEVERAL).items():
        assert_same(recording, listed[policy_id])
    with pytest.raises(DatasetError, match=r"a.h5 has no group a; expected one of each policy, found actions"):
        read_dataset(DatasetConfig(path=str(tmp_path / "a.h5")), SEVERAL)


def test_missing_next_observations_stay_unknown(tmp_path: Path) -> None:
    listed = episodes(SPACES)
    path = tmp_path / "data.csv"
    write_csv(path, SPACES, listed)
    without(path, "next_obs")
    found = list(read(path, DESCRIPTION).episodes())
    assert [len(episode) for episode in found] == [5, 7, 3], "a truncated last step has nothing to bootstrap from"
    assert [episode.terminated for episode in found] == [True, True, False]
    np.testing.assert_array_equal(found[2].observations["obs"], listed[3].observations["obs"][:4])
    np.testing.assert_array_equal(found[0].observations["obs"][:-1], listed[0].observations["obs"][:-1])
    assert [episode.last_known for episode in found] == [False, False, True]
    recording = Recording(SPACES, found, "memory")
    assert recording.cut([0], 20)[0]["final_index"].tolist() == [[14, 0]], "only the one that was stopped"


def test_cut_fragments_are_valid() -> None:
    description = described(NESTED, CHOICE)
    recording = Recording(spaces_of(description), episodes(spaces_of(description)), "memory")
    assert recording.pieces(4) == 5
    columns, records = recording.cut([1, 4, 0], 4)
    fragment.check(fragment_of(columns, 0), "a-run", description)
    assert columns["mask"].all(axis=0).tolist() == [True, False, True] and columns["mask"][:, 1].sum() == 1
    assert records == [recording.records[0], recording.records[1]], "in the order of steps"
    assert not columns["reward"][1:, 1].any() and not (columns["terminated"] | columns["truncated"])[1:, 1].any()
    assert columns["truncated"][0, 1], "an episode that is cut off ends like a truncated one"


def test_cut_agrees_with_a_walk_through_the_episodes() -> None:
    listed = episodes(SPACES, (5, 1, 7, 4, 3), "tTtcT")
    recording = Recording(SPACES, listed, "memory")
    walk = [
        (episode.observations["obs"][step], episode.observations["obs"][step + 1], episode.actions["action"][step],
         episode.reward[step], step == len(episode) - 1, episode.terminated)
        for episode in listed for step in range(len(episode))
    ]  # fmt: skip
    for steps in (1, 3, 8, 32):
        for piece in range(recording.pieces(steps)):
            columns, _ = recording.cut([piece], steps)
            expected = walk[piece * steps : (piece + 1) * steps]
            assert columns["mask"].sum() == len(expected)
            for row, (before, _, action, reward, last, terminated) in enumerate(expected):
                np.testing.assert_array_equal(columns["obs"][row, 0], before)
                assert columns["action"][row, 0] == action and columns["reward"][row, 0] == reward
                assert (columns["terminated"][row, 0], columns["truncated"][row, 0]) == (
                    last and terminated, last and not terminated
                )  # fmt: skip
            after = [item[1] for item in expected if item[4]]
            np.testing.assert_array_equal(columns["final_obs"], np.array(after, np.float32).reshape(-1, 3))
            if columns["mask"].all():
                np.testing.assert_array_equal(columns["bootstrap_obs"][0], expected[-1][1])


@pytest.mark.usefixtures("needs_h5py")
def test_hash_is_equal_in_all_formats(tmp_path: Path) -> None:
    listed = episodes(SPACES, ends="tTtT", log_prob=False)
    write_csv(tmp_path / "data.csv", SPACES, listed)
    write_d4rl(tmp_path / "data.h5", SPACES, listed)
    write_minari(tmp_path / "minari", SPACES, listed)
    found = {read(tmp_path / name, DESCRIPTION).sha256 for name in ("data.csv", "data.h5", "minari")}
    assert len(found) == 1
    changes: list[Callable[[Columns], object]] = [
        lambda columns: columns["obs"].__setitem__((3, 1), 7.0),
        lambda columns: columns["action"].__setitem__(2, 3 - columns["action"][2]),
        lambda columns: columns["reward"].__setitem__(-1, 0.5),
        lambda columns: columns["log_prob"].__setitem__(0, -0.5),
    ]
    for change in changes:
        other = Recording(SPACES, listed, "")
        change(other.columns)
        found.add(other.sha256)
    found.add(Recording(SPACES, episodes(SPACES, (6, 7, 4), "ttT"), "").sha256)
    assert len(found) == 6
    with pytest.raises(DatasetError, match=r"has the SHA-256 .*, the run expects 0000"):
        read(tmp_path / "data.csv", DESCRIPTION, sha256="0" * 64)


HEADER = b"obs.0,obs.1,obs.2,action,reward,terminated\n"
PROBLEMS: list[tuple[dict[str, Any] | bytes, str]] = [
    ({"obs.1": [0.0, float("nan"), *[0.0] * (ROWS - 2)]}, r"data.csv: obs.… holds NaN or .*, first in row 1"),
    ({"reward": ["inf"] * ROWS}, "data.csv: reward holds NaN or infinite"),
    ({"reward": [*["1"] * 3, "one", *["1"] * 13]}, "data.csv: reward is 'one' in line 5, expected a number"),
    ({"action": [*[1] * 16, 5]}, r"data.csv: action holds 5.0 in row 16, expected one of \(4,\) choices"),
    ({"action": [1.5] * ROWS}, "data.csv: action holds 1.5 in row 0, expected whole numbers"),
    ({"terminated": [2] * ROWS}, "data.csv: terminated is float64.*expected 17 times true or false"),
    ({"step": [0, 1, 3, *[0] * 14]}, "data.csv: step is 3 in line 4, expected 2"),
    ({"obs.9": [0] * ROWS}, "data.csv has the columns obs.9, which mean nothing here"),
    ({"log_prob": ["inf"] * ROWS}, "log_prob holds NaN or infinite"),
    (HEADER.replace(b"obs.2,", b""), r"has no column obs.2, which the run's spaces need, only obs.0, obs.1"),
    (HEADER + b"0,0,0,1,0,0\n0,0\n", "line 3 has 2 cells, expected 6"),
    (HEADER, r"data.csv holds no transition"),
    (b"\xff\xfe\x00", "cannot be read as CSV"),
]  # fmt: skip


@pytest.mark.parametrize(("content", "message"), PROBLEMS, ids=[message[10:30] for _, message in PROBLEMS])
def test_unfit_csv_is_rejected(tmp_path: Path, content: dict[str, Any] | bytes, message: str) -> None:
    if isinstance(content, bytes):
        (tmp_path / "data.csv").write_bytes(content)
    else:
        write_csv(tmp_path / "data.csv", SPACES, episodes(SPACES), **content)
    with pytest.raises(DatasetError, match=message) as caught:
        read(tmp_path / "data.csv", DESCRIPTION)
    assert "\n" not in str(caught.value) and isinstance(caught.value, UserError)


HDF5_PROBLEMS: list[tuple[str, Any, str]] = [
    ("terminals", None, "terminals is missing, expected an array.*found actions"),
    ("observations", None, r"holds actions, .*expected observations, actions"),
    ("rewards", np.zeros(3), "observations has 17 rows, expected 3 for its rewards"),
    ("observations", np.zeros((17, 5)), r"observations has the shape \(5,\)"),
    ("actions", np.full(17, 9), "actions holds 9 in row 0, expected one of"),
    ("rewards", np.full(17, np.nan), "rewards holds NaN"),
    ("observations", np.array([b"x"] * 17), "is of type .*expected numbers"),
]


@pytest.mark.usefixtures("needs_h5py")
def test_unfit_hdf5_is_rejected(tmp_path: Path) -> None:
    import h5py

    for number, (name, array, message) in enumerate(HDF5_PROBLEMS):
        path = tmp_path / f"{number}.hdf5"
        write_d4rl(path, SPACES, episodes(SPACES))
        with h5py.File(path, "a") as file:
            del file[name]
            if array is not None:
                file[name] = array
        with pytest.raises(DatasetError, match=message):
            read(path, DESCRIPTION)
    path.write_bytes(b"no HDF5")
    with pytest.raises(DatasetError, match="cannot be read as HDF5"):
        read(path, DESCRIPTION)


def test_action_forbidden_by_its_mask_is_rejected() -> None:
    mask = Leaf("action_mask", "box", (4,), "int8", low=(0.0,), high=(1.0,), mask=True)
    spaces = PolicySpaces(SpaceSpec((*BOX.leaves, mask), {"tuple": [0, 1]}), CHOICE)
    recorded = episodes(spaces, (5, 3), "tt")
    for episode in recorded:
        episode.observations["obs.action_mask"][:] = 1
        episode.observations["obs.action_mask"][-1] = 0  # after the end nothing is legal
    assert len(Recording(spaces, recorded, "data")) == 8
    recorded[1].observations["obs.action_mask"][1:, recorded[1].actions["action"][1]] = 0
    chosen = recorded[1].actions["action"][1] + 1
    with pytest.raises(DatasetError, match=rf"action is {chosen} in step 1 of episode 1 .*, which the action mask"):
        Recording(spaces, recorded, "data")


def test_unknown_or_unfit_dataset_is_rejected(tmp_path: Path) -> None:
    (tmp_path / "notes.txt").write_text("hello")
    for name, message in (
        ("notes.txt", "is of no known format"),
        ("nowhere", "is of no known format .it does not exist."),
        ("", r"is of no known format .it holds notes.txt.; expected a run's folder with experience/"),
    ):
        with pytest.raises(DatasetError, match=message):
            read(tmp_path / name, DESCRIPTION)
    with pytest.raises(DatasetError, match="does not exist; expected a csv dataset"):
        read(tmp_path / "none.csv", DESCRIPTION)
    two = EnvironmentDescription({"a": "default", "b": "default"}, described().policies)
    recording = Recording(SPACES, episodes(SPACES), "memory")
    write_archive(tmp_path, [fragment_of(recording.cut([0], 8)[0], 0)])
    with pytest.raises(DatasetError, match=r"is bool\(8, 1\), expected bool\(8, 2\); name .* with the same agents"):
        read(tmp_path / "a-run", two)
    others = EnvironmentDescription({"a": "hunter"}, {"hunter": SPACES})
    with pytest.raises(DatasetError, match=r"it has rows of the policies \['default'\], expected \['hunter'\]; name"):
        read(tmp_path / "a-run", others)
    with pytest.raises(DatasetError, match="does not fit the run's environment: default/obs is"):
        read(tmp_path / "a-run", described(SpaceSpec((TORQUE.leaves[0],), 0)))


def test_min_return_selects_episodes(tmp_path: Path) -> None:
    listed = episodes(SPACES, (5, 6, 7, 4), "tTtc")
    write_csv(tmp_path / "data.csv", SPACES, listed)
    returns = sorted(episode.record.episode_return for episode in listed if episode.record is not None)
    found = read(tmp_path / "data.csv", DESCRIPTION, min_return=returns[1])
    kept = [item for item in listed if item.record is not None and item.record.episode_return >= returns[1]]
    assert len(kept) == 2
    assert_same(found, kept)
    assert found.sha256 != read(tmp_path / "data.csv", DESCRIPTION).sha256
    with pytest.raises(DatasetError, match=f"the best whole episode of .* returned {returns[-1]:g}"):
        read(tmp_path / "data.csv", DESCRIPTION, min_return=returns[-1] + 1)


def test_numbers_are_cast_to_space_types(tmp_path: Path) -> None:
    description = described(NESTED, TORQUE)
    listed = episodes(spaces_of(description))
    write_csv(tmp_path / "data.csv", spaces_of(description), listed, **{"obs.cam.3": [256.0] * ROWS})
    with pytest.raises(DatasetError, match=r"obs.cam.… holds 256.0 in row 0, expected whole numbers that fit uint8"):
        read(tmp_path / "data.csv", description)
