"""A training episode, played again in its environment from its recorded actions, as an MP4 file.

The seed of its reset follows from the run's seed, the worker's lineage and the number of the episode in its environment
(rollout_worker/environments/seeding.py). That number is in no fragment: it is counted in the archived log, which so has
to begin with the lineage.
"""

from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from stagecoach.coordinator.catalog.checkpoint_lookup import not_drawing, require_recorder
from stagecoach.coordinator.catalog.game_video import write_video
from stagecoach.rollout_worker.environments.factory import make_environment, parameterized
from stagecoach.rollout_worker.environments.seeding import SeedLineage, episode_seed
from stagecoach.rollout_worker.environments.vector_env import call_layers, pick
from stagecoach.shared.base.errors import EnvironmentUnusable, FragmentError, UserError, headline
from stagecoach.shared.base.printable import counted
from stagecoach.shared.base.user_code import with_extra
from stagecoach.shared.config.run_config import Config
from stagecoach.shared.experience.counters import Phase
from stagecoach.shared.experience.fragment import Fragment, decode
from stagecoach.shared.experience.spaces import Columns, EnvironmentDescription, PolicySpaces
from stagecoach.shared.storage.log_archive import Archive
from stagecoach.trainer_node.replay.explanation import Influence

_RENDER_MODE = "rgb_array"


@dataclass(frozen=True)
class EpisodeVideo:
    """An episode that was played again with the observations that were recorded."""

    path: Path
    worker: str
    environment: int
    """Index of the environment in the worker."""
    episode: int
    """Number of the episode in that environment since the worker's lineage began."""
    seed: int
    """Seed of its reset."""
    steps: int
    episode_return: float
    ended: bool
    """False if the archive ends before the episode does."""
    other_reward_at: int | None
    """First step, from 1, that paid another reward here than was recorded; None if all are equal."""


@dataclass
class _Recorded:
    """The running episode of one environment, as far as the log was read."""

    life: str = ""
    seq: int = -1
    number: int = 0
    """Episodes that ended since the lineage began, in the fragments that there are."""
    missing: int = 0
    """The most fragments of the lineage that may be in no log."""
    from_its_reset: bool = True
    phase: Phase = Phase.TRAIN
    observations: list[Columns] = field(default_factory=list)
    actions: list[Columns] = field(default_factory=list)
    rewards: list[float] = field(default_factory=list)
    ended: tuple[bool, bool] = False, False
    parameters: Mapping[str, Any] | None = None
    """Drawn values; None before the end, whose record has them."""

    def enter(self, item: Fragment) -> None:
        """Compares a fragment with the one before."""
        header = item.header
        lineage, _, gaps = header.life.partition("+")
        if lineage != self.life.partition("+")[0]:
            complete = header.seq == 0 or bool(self.life)  # else the archive begins later
            self.number, self.missing = 0, 0 if complete else header.seq
            self.begin(complete)
        elif header.life != self.life or header.seq not in (0, self.seq + 1):
            self.missing = max(self.missing + max(0, header.seq - self.seq - 1), int(gaps or 0))
            self.begin(from_its_reset=False)
        self.life, self.seq = header.life, header.seq

    def begin(self, from_its_reset: bool = True) -> None:
        self.observations, self.actions, self.rewards = [], [], []
        self.from_its_reset, self.ended, self.parameters = from_its_reset, (False, False), None


def play_again(
    archive: Archive, config: Config, description: EnvironmentDescription, episode: Influence, path: Path
) -> EpisodeVideo:
    """Plays an explained episode again, to its end or the archive's, and writes it to `path` (.mp4). Raises `UserError`
    if it is not in the archive, `EnvironmentUnusable` if the environment cannot be drawn or does something else."""
    require_recorder()
    if path.suffix != ".mp4":
        raise UserError(f"--video {path}: expected a file name that ends in .mp4")
    _check(config)
    ((_, spaces),) = description.policies.items()
    slot, worker = episode.slot or 0, episode.worker
    found = _find(archive, description, episode)
    incarnation, restarts = found.life.partition("+")[0].split(".")
    lineage = SeedLineage(config.seed, int(worker.removeprefix("worker-")), int(incarnation), int(restarts))
    first = lineage.environments(config.environment.num_envs)[slot]
    numbers = range(found.number, found.number + found.missing * config.fragment_rows + 1)
    player, differs = _Player(config, spaces, found), (-1, "")
    try:
        for number in numbers:
            seed = episode_seed(first, number)
            problem = player.play(seed)
            if problem is None:
                break
            differs = max(differs, problem)
        else:
            step, what = differs
            after = counted(len(numbers) - 1, "episode")
            lost = f", also with the seeds of {after} after it" if len(numbers) > 1 else ""
            raise EnvironmentUnusable(
                f"{config.environment.id} does not play the episode again: {what} at step {step + 1} of "
                f"{len(found.actions)} (seed {episode_seed(first, found.number)}{lost}), so no video was written; an "
                f"environment has to be deterministic under the seed of its reset, and its code that of the run"
            )
        write_video(player.made, player.frames, path)
    finally:
        player.made.close()
    return EpisodeVideo(
        path, worker, slot, number, seed, len(found.actions), float(sum(found.rewards)), any(found.ended),
        player.other_reward_at,
    )  # fmt: skip


def _check(config: Config) -> None:
    environment, dataset = config.environment, config.dataset
    reasons = {
        f"environment.api={environment.api}": environment.api != "gymnasium",
        "environment.hierarchy": environment.hierarchy is not None,
        "environment.vectorization=native, whose episodes have no seed of their own": environment.vectorization
        == "native",
        "a dataset, which has no environment": dataset is not None and not dataset.only_heatup,
    }
    if found := [reason for reason, applies in reasons.items() if applies]:
        raise UserError(f"--video plays episodes of one agent in a Gymnasium environment; this run has {found[0]}")


def _find(archive: Archive, description: EnvironmentDescription, episode: Influence) -> _Recorded:
    """Reads the log from its beginning to the end of the episode."""
    ((policy_id, spaces),) = description.policies.items()
    slot, found, wanted = episode.slot or 0, _Recorded(), False
    observed, acted = spaces.observation.column_names("obs"), spaces.action.column_names("action")
    for item in _fragments(archive, episode.worker):
        found.enter(item)
        columns = item.columns[policy_id]
        ended = columns["terminated"] | columns["truncated"]
        for step in np.flatnonzero(columns["mask"][:, slot]).tolist():
            if not found.actions:
                found.phase = item.header.phase
            found.observations.append({name: columns[name][step, slot] for name in observed})
            found.actions.append({name: columns[name][step : step + 1, slot] for name in acted})
            found.rewards.append(float(columns["reward"][step, slot]))
            if not ended[step, slot]:
                continue
            if wanted or (item.position, step) == (episode.position, episode.last_step):
                record = item.header.episodes[int(ended[:step].sum() + ended[step, :slot].sum())]
                found.ended = bool(columns["terminated"][step, slot]), bool(columns["truncated"][step, slot])
                found.parameters = record.parameters
                return _whole(found, episode)
            found.number += 1
            found.begin()
        wanted = wanted or (item.position == episode.position and episode.last_step is None)
    if not wanted:
        raise UserError(f"--video: the archive has no fragment of {episode.worker} at {episode.position}")
    return _whole(found, episode)


def _whole(found: _Recorded, episode: Influence) -> _Recorded:
    if not found.from_its_reset:
        raise UserError(
            f"--video: the beginning of the episode of {episode.worker} at {episode.position} is not in the log: a "
            f"fragment before it was refused or lost; explain another version"
        )
    return found


def _fragments(archive: Archive, worker: str) -> Iterator[Fragment]:
    for entry in archive.entries():
        if entry.worker == worker and entry.fragment is not None:
            with suppress(FragmentError):
                item = decode(entry.fragment)
                yield Fragment(item.header, item.columns, entry.id)


class _Player:
    """Plays a recorded episode in one environment, from several resets if need be."""

    def __init__(self, config: Config, spaces: PolicySpaces, recorded: _Recorded) -> None:
        self._config, self._spaces, self._recorded = config, spaces, recorded
        self.frames: list[Any] = []
        self.other_reward_at: int | None = None
        drawing = config.environment.model_copy(
            update={"kwargs": {**config.environment.kwargs, "render_mode": _RENDER_MODE}}
        )
        self._giving = parameterized(drawing)
        if recorded.parameters is None and config.environment.parameters:
            raise UserError(
                "--video: the drawn parameters of an episode are recorded at its end, which is not there yet"
            )
        self.made: Any = None
        try:
            self.made = make_environment(drawing)
            problem = not_drawing(self.made, _RENDER_MODE)
        except Exception as error:
            problem = with_extra(headline(error))
        if problem is not None:
            if self.made is not None:
                self.made.close()
            raise EnvironmentUnusable(f"--video needs an environment that draws with render_mode=rgb_array: {problem}")

    def play(self, seed: int) -> tuple[int, str] | None:
        """Plays it from a reset with `seed`; returns the first step that differs, from 0, and what does there."""
        recorded, options = self._recorded, dict[str, Any]()
        if recorded.parameters:
            self.made, options = self._giving.prepare(self.made, recorded.parameters)
        call_layers(self.made, "set_phase", str(recorded.phase))
        observation, _ = self.made.reset(seed=seed, options=options or None)
        self.frames, self.other_reward_at = [self.made.render()], None
        for step, (expected, action) in enumerate(zip(recorded.observations, recorded.actions, strict=True)):
            if not self._equal(observation, expected):
                return step, "another observation than was recorded"
            taken = pick(self._spaces.action.to_environment(action), 0)
            observation, reward, terminated, truncated, _ = self.made.step(taken)
            self.frames.append(self.made.render())
            if np.float32(reward) != recorded.rewards[step] and self.other_reward_at is None:
                self.other_reward_at = step + 1
            last = step == len(recorded.actions) - 1
            if (bool(terminated), bool(truncated)) != (recorded.ended if last else (False, False)):
                return step, "another end than was recorded"
        return None

    def _equal(self, observation: Any, expected: Columns) -> bool:
        found = self._spaces.observation.flatten("obs", observation)
        return all(np.array_equal(found[name].astype(array.dtype).reshape(array.shape), array)
                   for name, array in expected.items())  # fmt: skip
