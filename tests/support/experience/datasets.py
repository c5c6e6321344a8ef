"""Episodes of known content, and the same written in each format, for tests of the readers."""

from __future__ import annotations

import csv
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import gymnasium as gym
import numpy as np

from stagecoach.rollout_worker.environments.description import describe_environment
from stagecoach.shared.datasets.recording import Episode
from stagecoach.shared.experience.counters import Phase
from stagecoach.shared.experience.fragment import EpisodeRecord, Fragment, FragmentHeader, encode
from stagecoach.shared.experience.log_entry import LogEntry
from stagecoach.shared.experience.spaces import Array, Columns, EnvironmentDescription, Leaf, PolicySpaces, SpaceSpec
from stagecoach.shared.storage.log_archive import Archive
from stagecoach.shared.storage.object_store import FileStore
from tests.conftest import minimal_config

BOX = SpaceSpec((Leaf("", "box", (3,), "float32", low=(-9.0,), high=(9.0,)),), 0)
CHOICE = SpaceSpec((Leaf("", "discrete", (), "int64", (4,), (1,)),), 0)
TORQUE = SpaceSpec((Leaf("", "box", (2,), "float32", low=(-1.0,), high=(1.0,)),), 0)
NESTED = SpaceSpec(
    (
        Leaf("cam", "box", (2, 2), "uint8", low=(0.0,), high=(255.0,)),
        Leaf("pair.0", "discrete", (), "int64", (3,), (0,)),
        Leaf("pair.1", "box", (1,), "float32", low=(-9.0,), high=(9.0,)),
    ),
    {"dict": {"cam": 0, "pair": {"tuple": [1, 2]}}},
)


def described(observation: SpaceSpec = BOX, action: SpaceSpec = CHOICE) -> EnvironmentDescription:
    return EnvironmentDescription({"agent": "default"}, {"default": PolicySpaces(observation, action)})


def values(spec: SpaceSpec, prefix: str, rows: int, generator: np.random.Generator) -> Columns:
    columns = {}
    for leaf in spec.leaves:
        if leaf.kind == "box":
            drawn: Array = generator.uniform(*((0, 255) if leaf.dtype == "uint8" else (-1, 1)), (rows, *leaf.shape))
        else:
            drawn = generator.integers(0, leaf.nvec[0], (rows, *leaf.shape))
        columns[leaf.column(prefix)] = drawn.astype(leaf.column_dtype)
    return columns


def episodes(
    spaces: PolicySpaces, lengths: Sequence[int] = (5, 1, 7, 4), ends: str = "tTtc", log_prob: bool = True
) -> list[Episode]:
    """`ends`, a letter each: t terminated, T truncated, c the data end there."""
    generator, found = np.random.default_rng(0), []
    for length, end in zip(lengths, ends, strict=True):
        reward = generator.integers(-8, 8, length).astype(np.float32) / 4
        chosen = -generator.random(length, np.float32) if log_prob else np.full(length, np.nan, np.float32)
        record = None if end == "c" else EpisodeRecord(float(reward.sum()), length)
        observations = values(spaces.observation, "obs", length + 1, generator)
        actions = values(spaces.action, "action", length, generator)
        found.append(Episode(observations, actions, reward, chosen, end == "t", record))
    return found


def recorded(
    environment: gym.Env[Any, Any], choose: Callable[[Array], tuple[Any, float]], episodes: int, seed: int = 0
) -> list[Episode]:
    """Whole episodes; `choose` makes of an observation an action, and the log density that it was chosen with."""
    found = []
    for number in range(episodes):
        observation, _ = environment.reset(seed=seed + number)
        observed, steps, over, terminated = [observation], [], False, False
        while not over:
            action, log_prob = choose(observation)
            observation, reward, terminated, truncated, _ = environment.step(action)
            observed.append(observation)
            steps.append((action, float(reward), log_prob))
            over = terminated or truncated
        actions, rewards, chosen = zip(*steps, strict=True)
        numbers = np.array(rewards, np.float32), np.array(chosen, np.float32)
        columns: tuple[Columns, Columns] = {"obs": np.array(observed, np.float32)}, {"action": np.array(actions)}
        found.append(Episode(*columns, *numbers, terminated, EpisodeRecord(sum(rewards), len(rewards))))
    environment.close()
    return found


def swung(episodes: int, choose: Callable[[Array], tuple[Array, float]]) -> list[Episode]:
    """Pendulum-v1, cut off after 30 steps: experience with continuous actions."""
    return recorded(gym.make("Pendulum-v1", max_episode_steps=30), choose, episodes)


def write_recorded(path: Path, environment: str, listed: Sequence[Episode]) -> None:
    write_csv(path, describe_environment(minimal_config(environment={"id": environment})).policies["default"], listed)


def flags_of(listed: Sequence[Episode]) -> tuple[list[bool], list[bool]]:
    terminated, truncated = [], []
    for episode in listed:
        last, known = len(episode) - 1, episode.record is not None
        terminated += [step == last and episode.terminated for step in range(len(episode))]
        truncated += [step == last and known and not episode.terminated for step in range(len(episode))]
    return terminated, truncated


def write_csv(path: Path, spaces: PolicySpaces, listed: Sequence[Episode], **columns: Sequence[Any]) -> None:
    """Writes columns as shared/datasets/read.py expects them; `columns` replace or add some."""
    terminated, truncated = flags_of(listed)
    table: dict[str, Sequence[Any]] = {
        "episode": [f"e{number}" for number, episode in enumerate(listed) for _ in range(len(episode))],
        "step": [step for episode in listed for step in range(len(episode))],
        "reward": np.concatenate([episode.reward for episode in listed]).tolist(),
        "log_prob": np.concatenate([episode.log_prob for episode in listed]).tolist(),
        "terminated": terminated,
        "truncated": [int(flag) for flag in truncated],
    }
    for spec, prefix, rows in (
        (spaces.observation, "obs", [{n: a[:-1] for n, a in episode.observations.items()} for episode in listed]),
        (spaces.observation, "next_obs", [{n: a[1:] for n, a in episode.observations.items()} for episode in listed]),
        (spaces.action, "action", [episode.actions for episode in listed]),
    ):
        for leaf in spec.leaves:
            array = np.concatenate([row[leaf.column(prefix.removeprefix("next_"))] for row in rows])
            array = array + np.array(leaf.start or 0, array.dtype)
            flat = array.reshape(len(array), -1)
            for index in range(leaf.size):
                table[leaf.column(prefix) + (f".{index}" if leaf.shape else "")] = flat[:, index].tolist()
    table |= columns
    with path.open("w", newline="") as file:
        writer = csv.writer(file)
        writer.writerow(table)
        writer.writerows(zip(*table.values(), strict=True))


def put(node: Any, name: str, spec: SpaceSpec, prefix: str, columns: Columns) -> None:
    """Nested as the space is, in the environment's own terms."""

    def write(place: str, value: Any) -> None:
        if isinstance(value, dict | tuple):
            for key, below in value.items() if isinstance(value, dict) else enumerate(value):
                write(f"{place}/{key if isinstance(key, str) else f'_index_{key}'}", below)
        else:
            node[place] = value

    write(name, spec.nest(prefix, columns))


def write_minari(folder: Path, spaces: PolicySpaces, listed: Sequence[Episode]) -> None:
    import h5py

    (folder / "data").mkdir(parents=True)
    with h5py.File(folder / "data" / "main_data.hdf5", "w") as file:
        for number, episode in enumerate(listed):
            group = file.create_group(f"episode_{number}")
            put(group, "observations", spaces.observation, "obs", episode.observations)
            put(group, "actions", spaces.action, "action", episode.actions)
            terminated, truncated = flags_of([episode])
            group["rewards"], group["terminations"], group["truncations"] = episode.reward, terminated, truncated


def write_d4rl(path: Path, spaces: PolicySpaces, listed: Sequence[Episode]) -> None:
    import h5py

    def joined(part: str, rows: slice) -> Columns:
        names = getattr(listed[0], part)
        return {name: np.concatenate([getattr(episode, part)[name][rows] for episode in listed]) for name in names}

    terminated, truncated = flags_of(listed)
    with h5py.File(path, "w") as file:
        put(file, "observations", spaces.observation, "obs", joined("observations", slice(-1)))
        put(file, "actions", spaces.action, "action", joined("actions", slice(None)))
        file["rewards"] = np.concatenate([episode.reward for episode in listed])
        file["infos/action_log_probs"] = np.concatenate([episode.log_prob for episode in listed])
        file["terminals"], file["timeouts"] = terminated, truncated
        put(file, "next_observations", spaces.observation, "obs", joined("observations", slice(1, None)))


def write_archive(folder: Path, fragments: Sequence[Fragment]) -> None:
    """A run's folder with these in its archive."""
    entries = [
        LogEntry(f"{number + 1}-0", item.header.worker_id, item.header.incarnation, item.header.seq,
                 item.header.transitions, encode(item), True)
        for number, item in enumerate(fragments)
    ]  # fmt: skip
    folder.mkdir(parents=True, exist_ok=True)
    Archive(FileStore(folder, "a-run"), "a-run").write("0-0", f"{len(entries)}-0", entries)


def fragment_of(columns: Columns, seq: int) -> Fragment:
    """These columns as a worker pushes them."""
    steps, slots = columns["reward"].shape
    header = FragmentHeader("a-run", "worker-0", 0, seq, Phase.TRAIN, {"default": 0}, steps, slots, life="0.0")
    return Fragment(header, {"default": columns})
