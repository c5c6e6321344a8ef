"""The curriculum as a fold over the experience log: the lessons of now, and the levels that are worth a replay."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

import numpy as np

from stagecoach.shared.config.environments.parameters import CriterionConfig, LevelReplayConfig, table_at
from stagecoach.shared.config.run_config import Config
from stagecoach.shared.experience.counters import Counters
from stagecoach.shared.experience.fragment import EpisodeRecord, Fragment
from stagecoach.shared.experience.parameters import ParameterTable, Sampler
from stagecoach.shared.experience.spaces import Array, EnvironmentDescription
from stagecoach.trainer_node.learning.fold import Fold

_KEPT = 0.9
"""Weight that an older episode keeps with each new one."""


@dataclass
class Lesson:
    """Progress of one entry with lessons."""

    number: int = 0
    measures: dict[str, list[float]] = field(default_factory=dict)
    """`until` and `back` → the last episodes' numbers."""
    smoothed: dict[str, float] = field(default_factory=dict)
    episodes: int = 0
    success_told: bool = False
    """True once an episode reported success or failure."""


@dataclass
class Levels:
    """Scores of one entry's levels."""

    scores: list[float]
    played: list[int]
    """Episode in which each was played last; −1: never."""
    successes: list[float] = field(default_factory=list)
    """Successes in about the last ten episodes of each level, for `learnability`; `tries` counts these."""
    tries: list[float] = field(default_factory=list)
    episodes: int = 0
    pending: dict[str, tuple[str, int, list[float], list[int]]] = field(default_factory=dict)
    """Worker → its life and last fragment; per environment the sum of its running episode's scores, and their count."""

    def learnability(self, level: int, success: bool) -> float:
        """Counts an episode; returns p (1 − p), p the share of successes with one of each assumed beforehand."""
        for counts, one in ((self.successes, float(success)), (self.tries, 1.0)):
            counts[level] = _KEPT * counts[level] + one
        share = (self.successes[level] + 1.0) / (self.tries[level] + 2.0)
        return share * (1.0 - share)


class Curriculum(Fold):
    """Lessons and levels of one run."""

    name = "curriculum"

    def __init__(
        self, config: Config, description: EnvironmentDescription, rating: Callable[[str], float] | None = None
    ) -> None:
        """`rating` returns the rating of a policy among its opponents, for lessons that are measured by it."""
        self._parameters, self._rating = config.environment.parameters, rating
        self._steps, self._description = config.stop_at.env_steps or 1, description
        self.lessons = {name: Lesson() for name, its in self._parameters.items() if its.lessons}
        self._replayed = {name: its.replay for name, its in self._parameters.items() if its.replay is not None}
        self.levels = {
            name: Levels([0.0] * its.of, [-1] * its.of, [0.0] * its.of, [0.0] * its.of)
            for name, its in self._replayed.items()
        }
        self._events: list[str] = []
        self._told: set[str] = set()

    def table(self, counters: Counters) -> ParameterTable:
        table = table_at(self._parameters, {name: lesson.number for name, lesson in self.lessons.items()})
        weights = {name: Sampler("levels", self._weights(name)) for name in self.levels}
        return ParameterTable(table.samplers | weights, table.lessons)

    def observe_episode(self, record: EpisodeRecord, counters: Counters) -> None:
        """Moves the lessons that the episode was drawn in, where a measure reaches its threshold."""
        env_steps = counters.env_steps
        for name, lesson in self.lessons.items():
            if record.lessons.get(name) != lesson.number:
                continue  # it began in another one
            lesson.episodes += 1
            lessons = self._parameters[name].lessons
            config = lessons[lesson.number]
            for which, criterion, step in (("until", config.until, 1), ("back", config.back, -1)):
                if criterion is None:
                    continue
                value = self._measured(name, lesson, which, criterion, record, env_steps)
                if value is not None and (value - criterion.threshold) * step >= 0:
                    called = lessons[lesson.number + step].name
                    move = f"lesson {lesson.number} → {lesson.number + step}{called and f' ({called})'}"
                    found = f"{criterion.measure} {value:.4g}, {which} {criterion.threshold:g}"
                    self._events.append(f"{name}: {move} at {env_steps:,} env steps ({found})")
                    self.lessons[name] = Lesson(lesson.number + step)
                    break

    def _measured(
        self, name: str, lesson: Lesson, which: str, criterion: CriterionConfig, record: EpisodeRecord, env_steps: int
    ) -> float | None:  # fmt: skip
        match criterion.measure:
            case "progress":
                return env_steps / self._steps if lesson.episodes >= criterion.episodes else None
            case "rating":
                assert self._rating is not None, "the config refuses a rating where nobody has one"
                return self._rating(criterion.policy) if lesson.episodes >= criterion.episodes else None
            case "length":
                number = float(record.length)
            case "success":
                lesson.success_told |= record.success is not None
                if not lesson.success_told and lesson.episodes == criterion.episodes:
                    self._tell_once(
                        f"environment.parameters.{name}: lesson {lesson.number} is measured by success, and the "
                        f"environment reported none in {lesson.episodes:,} episodes; report is_success or success in "
                        f"the last info, or measure by return"
                    )
                number = float(record.success or False)
            case "return":
                number = record.episode_return
                if criterion.policy and record.agent_returns:
                    returns = record.returns_by_player(self._description)
                    if record.match is not None and criterion.policy not in returns:
                        return None  # others had its seats
                    number = returns.get(criterion.policy, 0.0)
        window = lesson.measures.setdefault(which, [])
        window.append(number)
        if len(window) < criterion.episodes:
            return None
        del window[: -criterion.episodes]
        mean = sum(window) / len(window)
        if criterion.smoothing:
            mean = lesson.smoothed[which] = 0.25 * lesson.smoothed.get(which, mean) + 0.75 * mean
        return mean

    def _tell_once(self, text: str) -> None:
        if text not in self._told:
            self._told.add(text)
            self._events.append(text)

    def drain_events(self) -> list[str]:
        found, self._events = self._events, []
        return found

    def observe_update(self, fragments: Sequence[Fragment], advantages: Array | None) -> None:
        """Scores the levels of the episodes that ended in `fragments`: by the mean of `LevelReplayConfig.score` over
        all steps of the last episode, which may span several fragments, without those that were dropped."""
        if not self.levels or advantages is None:
            return
        first = 0
        for item in fragments:
            slots = item.header.num_envs
            for name, levels in self.levels.items():
                config, learnability = self._replayed[name], self._replayed[name].score == "learnability"
                scores = _scored(config, advantages[:, first : first + slots])
                _take_levels(levels, name, item, scores, learnability)
                if learnability and any(its.success is None for its in item.header.episodes):
                    self._tell_once(
                        f"environment.parameters.{name}: levels are scored by success, and an episode reported none; "
                        f"report is_success or success in the last info, or score by value_loss"
                    )
            first += slots

    def _weights(self, name: str) -> tuple[float, ...]:
        """Returns each level's probability: by score and staleness if it was played, equal among the others."""
        config, levels = self._replayed[name], self.levels[name]
        played = np.array(levels.played)
        seen = played >= 0
        count, total = int(seen.sum()), len(played)
        weights = np.zeros(total)
        if count:
            scores = np.array(levels.scores)[seen]
            if config.prioritization == "rank":
                order = np.empty(count)
                order[np.argsort(-scores, kind="stable")] = np.arange(1, count + 1)
                by_score = order ** (-1 / config.temperature)
            else:
                best = max(float(scores.max()), 0.0)
                by_score = (np.clip(scores, 0, None) / best if best else np.ones(count)) ** (1 / config.temperature)
            stale = (levels.episodes - played[seen]).astype(np.float64)
            by_staleness = stale if stale.any() else np.ones(count)
            share = config.staleness
            weights[seen] = (1 - share) * by_score / by_score.sum() + share * by_staleness / by_staleness.sum()
        if count < total:
            new = (1 - count / total if config.new is None else config.new) if count else 1.0
            weights *= 1 - new
            weights[~seen] = new / (total - count)
        return tuple(weights.tolist())

    def metrics(self) -> dict[str, float]:
        found: dict[str, float] = {}
        for name, lesson in self.lessons.items():
            found[f"lesson/{name}"] = lesson.number
            for which, window in lesson.measures.items():
                found[f"{which}/{name}"] = lesson.smoothed.get(which, sum(window) / len(window))
        for name, levels in self.levels.items():
            scores = [score for score, at in zip(levels.scores, levels.played, strict=True) if at >= 0]
            found[f"levels_played/{name}"] = len(scores)
            if scores:
                found[f"level_score/{name}"] = sum(scores) / len(scores)
        return found

    def state(self) -> dict[str, Any]:
        state = {"lessons": {name: asdict(its) for name, its in self.lessons.items()}}
        return state | {"levels": {name: asdict(its) for name, its in self.levels.items()}}

    def load_state(self, state: Mapping[str, Any]) -> None:
        if state["lessons"].keys() != self.lessons.keys() or state["levels"].keys() != self.levels.keys():
            raise ValueError("the curriculum of another config")
        lessons = {name: Lesson(**its) for name, its in state["lessons"].items()}
        levels = {name: Levels(**its) for name, its in state["levels"].items()}
        self.lessons, self.levels, self._events = lessons, levels, []


def _scored(config: LevelReplayConfig, advantages: Array) -> Array:
    match config.score:
        case "value_loss" | "learnability":
            return np.abs(advantages)
        case "positive_value_loss":
            return np.clip(advantages, 0, None)
        case "gae":
            return advantages


def _take_levels(levels: Levels, name: str, item: Fragment, scores: Array, learnability: bool) -> None:
    header, (columns,) = item.header, item.columns.values()
    life, seq, sums, counts = levels.pending.get(header.worker_id, ("", -1, [], []))
    if life != header.life or header.seq not in (0, seq + 1):  # other episodes, or one of its fragments is missing
        sums, counts = [0.0] * header.num_envs, [0] * header.num_envs
    ended = (columns["terminated"] | columns["truncated"]) & columns["mask"]
    records = iter(header.episodes)
    starts = np.zeros(header.num_envs, np.int64)
    total = np.concatenate([np.zeros((1, header.num_envs)), np.cumsum(scores.astype(np.float64), axis=0)])
    for step, slot in zip(*(index.tolist() for index in ended.nonzero()), strict=True):
        record: EpisodeRecord | None = next(records, None)
        begun = int(starts[slot])
        score = sums[slot] + float(total[step + 1, slot] - total[begun, slot])
        count = counts[slot] + step + 1 - begun
        sums[slot], counts[slot], starts[slot] = 0.0, 0, step + 1
        level = record.parameters.get(name) if record is not None else None
        levels.episodes += 1
        if record is not None and isinstance(level, int) and 0 <= level < len(levels.scores):
            found = levels.learnability(level, bool(record.success)) if learnability else score / count
            levels.scores[level], levels.played[level] = found, levels.episodes
    for slot in range(header.num_envs):
        begun = int(starts[slot])
        sums[slot] += float(total[-1, slot] - total[begun, slot])
        counts[slot] += header.steps - begun
    levels.pending[header.worker_id] = header.life, header.seq, sums, counts
