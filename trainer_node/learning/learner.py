"""The learner: policies, algorithms and counters of all policy ids, moved by fragments and by nothing else."""

from collections import deque
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import numpy as np
import torch

from stagecoach.shared.base.errors import ConfigError, DatasetError, WeightsNotFinite, headline, place
from stagecoach.shared.base.user_code import import_object
from stagecoach.shared.config.algorithms.base import AlgorithmConfig
from stagecoach.shared.config.recorded import RecordedConfig
from stagecoach.shared.config.run_config import Config
from stagecoach.shared.config.sections import PolicyConfig, TrainerConfig
from stagecoach.shared.datasets.recording import DatasetReader, Recordings
from stagecoach.shared.experience.counters import Counters, Phase, PhaseCounters
from stagecoach.shared.experience.fragment import EpisodeRecord, Fragment, holdable
from stagecoach.shared.experience.spaces import Columns, EnvironmentDescription
from stagecoach.shared.policies.policy import Policy
from stagecoach.shared.policies.registry import build_policies, torch_device
from stagecoach.shared.policies.serialization import finite_weights, load_state_arrays, state_arrays
from stagecoach.trainer_node.learning.building_blocks.compilation import check_compiling
from stagecoach.trainer_node.learning.building_blocks.demonstrations import Demonstrations
from stagecoach.trainer_node.learning.building_blocks.interface import (
    Algorithm,
    EstimatingAlgorithm,
    Experience,
    ReplayingAlgorithm,
    Setting,
    replay_fragments,
)
from stagecoach.trainer_node.learning.building_blocks.optimization import part
from stagecoach.trainer_node.learning.building_blocks.reward_normalization import (
    RewardAverage,
    RewardFilter,
    RewardScaling,
    ShapedReturns,
)
from stagecoach.trainer_node.learning.fold import Fold
from stagecoach.trainer_node.learning.folds import make_folds

Transform = Callable[[Columns], Columns]


class ExperienceFilter:
    """Filters one policy's experience before learning: scales and clips rewards, applies a user's function. It depends
    on one fragment alone, so that a replay buffer can be filled again from the log."""

    def __init__(self, config: PolicyConfig, field: str) -> None:
        self._scale, self._clip = config.reward_scale, config.reward_clip
        self._where = f"{field}.transform={config.transform}"
        self._transform: Transform | None = None
        if config.transform is not None:
            self._transform = import_object(config.transform, f"{field}.transform", kind="function")

    def __call__(self, columns: Columns) -> Columns:
        """Returns the filtered columns of a fragment, and leaves these as they are. Raises `ConfigError` if the user's
        function raises, or returns what a fragment cannot hold."""
        reward = columns["reward"]
        if self._scale != 1.0:
            reward = reward * np.float32(self._scale)
        if self._clip is not None:
            reward = np.clip(reward, *np.asarray(self._clip, np.float32))
        columns = columns | {"reward": reward}
        if self._transform is None:
            return columns
        try:
            found = self._transform({name: array.copy() for name, array in columns.items()})
            wrong = [
                name
                for name, array in columns.items()
                if (found[name].shape, found[name].dtype) != (array.shape, array.dtype)
                or not holdable(name, found[name])
            ]
        except Exception as error:
            raise ConfigError(f"{self._where} failed: {headline(error)}{place(error)}") from error
        if wrong or set(found) != set(columns):
            odd = ", ".join(wrong or sorted(set(found) ^ set(columns)))
            expected = "the same columns with the same shapes and dtypes, all finite"
            raise ConfigError(f"{self._where} must return {expected}; not so: {odd}")
        return found


@dataclass(kw_only=True)
class Learner:
    """The parts that learn, per policy id, and what they have counted."""

    policies: dict[str, Policy]
    """All policies; only trainable policies have the other parts."""
    algorithms: dict[str, Algorithm]
    rewards: dict[str, RewardFilter]
    filters: dict[str, ExperienceFilter]
    counters: PhaseCounters
    episodes: deque[EpisodeRecord]
    remembered: deque[str]
    """Log positions of the fragments that replay buffers hold, oldest first."""
    demonstrations: dict[str, Demonstrations] = field(default_factory=dict)
    shaped: dict[str, ShapedReturns] = field(default_factory=dict)
    """Returns of the policies that learn from other rewards than the environment gave."""
    tallies: dict[str, Counters] = field(default_factory=dict)
    """Transitions (`env_steps`) and episodes in training by policy; empty with one policy."""
    count_steps: Callable[[Fragment], int]
    """Counts the environment steps of a fragment."""
    folds: Sequence[Fold] = ()
    initial: dict[str, Columns] = field(default_factory=dict)
    """Weights and state of the algorithm of each policy that a fold may reset, to begin again with."""

    def read_demonstrations(self) -> None:
        """Reads demonstrations before updates need them; raises `DatasetError` or errors of an archive's store."""
        for its in self.demonstrations.values():
            len(its)

    def tables(self) -> dict[str, dict[str, Any]]:
        return {fold.name: fold.table(self.counters.train).as_dict() for fold in self.folds}

    def mean_return(self) -> float | None:
        """Returns the mean over the last training episodes; None before the first has ended."""
        returns = [record.episode_return for record in self.episodes]
        return sum(returns) / len(returns) if returns else None

    def count(self, item: Fragment, phase: Phase) -> None:
        """Counts a fragment's steps and episodes."""
        counters = self.counters.of(phase)
        counters.env_steps += self.count_steps(item)
        counters.episodes += len(item.header.episodes)

    def emulate_acting(self, fragments: Sequence[Fragment], phase: Phase) -> None:
        """Moves counters, episode statistics and reward scaling as if the agent had acted here."""
        counters = self.counters.of(phase)
        for item in fragments:
            self.count(item, phase)
            if phase is Phase.TRAIN:
                self.episodes.extend(item.header.episodes)
                for fold in self.folds:
                    fold.observe_fragment(item.header, counters)
                for policy_id, tally in self.tallies.items():
                    columns = item.columns[policy_id]
                    tally.env_steps += int(columns["mask"].sum())
                    tally.episodes += int((columns["mask"] & (columns["terminated"] | columns["truncated"])).sum())
            self.remembered.append(item.position)
            self._filter(item)
            for policy_id, scaling in self.rewards.items():
                if replay_fragments(self.algorithms[policy_id]):  # a replay buffer holds rewards as they were
                    scaling.take_in(_source(item), item.columns[policy_id])
                else:
                    item.columns[policy_id] = scaling.scale(_source(item), item.columns[policy_id])
            for policy_id, shaped in self.shaped.items():
                shaped.take(_source(item), _begins(item), item.columns[policy_id])

    def recall(self, fragments: Iterable[Fragment], first: int = 0) -> None:
        """Fills the replay buffers with what they held again: the fragments at `remembered` from number `first` on."""
        for number, item in enumerate(fragments, first):
            self._filter(item)
            for policy_id, algorithm in self.algorithms.items():
                first_held = len(self.remembered) - replay_fragments(algorithm)
                if isinstance(algorithm, ReplayingAlgorithm) and number >= first_held:
                    algorithm.remember([Experience(_source(item), item.columns[policy_id])])

    def remember_only(self, positions: Collection[str]) -> bool:
        """Forgets other log positions in replay buffers; returns whether there were any (then `recall_anew`)."""
        kept = [position for position in self.remembered if position in positions]
        fewer = len(kept) < len(self.remembered)
        if fewer:
            self.remembered.clear()
            self.remembered.extend(kept)
        return fewer

    def recall_anew(self, fragments: Iterable[Fragment]) -> None:
        """Empties the replay buffers and fills them with the fragments at `remembered`; may be called again."""
        for algorithm in self.algorithms.values():
            if isinstance(algorithm, ReplayingAlgorithm):
                algorithm.forget()
        self.recall(fragments)

    def _filter(self, item: Fragment) -> None:
        for policy_id, filtered in self.filters.items():
            item.columns[policy_id] = filtered(item.columns[policy_id])

    def learn(self, fragments: Sequence[Fragment], phase: Phase) -> dict[str, float]:
        """Updates every policy (in warm-up, only normalizers and replay buffers); returns the metrics. With several
        policies, each one's metrics end in `/<policy id>`. Raises `WeightsNotFinite`."""
        metrics: dict[str, float] = {}
        gradient_steps = 0
        for policy_id, algorithm in self.algorithms.items():
            experience = [Experience(_source(item), item.columns[policy_id]) for item in fragments]
            if phase is Phase.HEATUP:
                algorithm.observe(experience)
                continue
            found = algorithm.update(experience, self.counters.train)
            gradient_steps += int(found.get("train/gradient_steps", 0))
            suffix = "" if len(self.policies) == 1 else f"/{policy_id}"
            metrics |= {name + suffix: value for name, value in found.items()}
        if phase is Phase.TRAIN:
            self.counters.train.updates += 1
            self.counters.train.gradient_steps += gradient_steps
        broken = [policy_id for policy_id, policy in self.policies.items() if not finite_weights(policy)]
        if broken:
            raise WeightsNotFinite(
                f"update {self.counters.train.updates} left infinite or NaN weights in {', '.join(broken)}; its "
                f"terms: {metrics}. Try a smaller algorithm.learning_rate or normalize_observations; the checkpoints "
                f"before it are intact"
            )
        if phase is Phase.TRAIN:
            self._update_folds(fragments)
        return metrics

    def _update_folds(self, fragments: Sequence[Fragment]) -> None:
        if not self.folds:
            return
        advantages = None
        if len(self.algorithms) == 1 and isinstance(made := next(iter(self.algorithms.values())), EstimatingAlgorithm):
            advantages = made.advantages
        for fold in self.folds:
            fold.observe_update(fragments, advantages)
        for fold in self.folds:
            for policy_id in fold.after_update(self.policies, self.counters.train.updates):
                load_state_arrays(self.policies[policy_id], part(self.initial[policy_id], _WEIGHTS))
                self.algorithms[policy_id].load_state(part(self.initial[policy_id], _STATE))


_WEIGHTS, _STATE = "weights/", "state/"
_MUCH = 0.1
"""Share of all turns."""


def _initial(policy: Policy, algorithm: Algorithm) -> Columns:
    weights = {_WEIGHTS + name: array for name, array in state_arrays(policy).items()}
    return weights | {_STATE + name: np.array(array) for name, array in algorithm.state().items()}


def algorithm_class(config: AlgorithmConfig) -> Any:
    """Returns the section's algorithm; raises `ConfigError` if it cannot be imported."""
    return import_object(config.name if ":" in config.name else config.learner, "algorithm.name", kind="Class")


def make_algorithm(policy: Policy, config: AlgorithmConfig, setting: Setting) -> Algorithm:
    """Makes the algorithm that learns `policy`; raises `ConfigError` if its class cannot be imported."""
    algorithm: Algorithm = algorithm_class(config)(policy, config.resolved(), setting)
    return algorithm


def set_up_torch(config: TrainerConfig) -> None:
    """Applies the settings of PyTorch that results depend on; raises `ConfigError`."""
    torch.set_num_threads(config.torch_threads)
    torch.set_float32_matmul_precision(config.matmul_precision)
    if config.compile:
        check_compiling()


def _no_reader(config: RecordedConfig, description: EnvironmentDescription) -> Recordings:
    raise DatasetError(f"demonstrations.path={config.path} cannot be read: this learner has no reader")


def make_learner(
    config: Config, description: EnvironmentDescription,
    begin: Callable[[Mapping[str, Policy]], None] = lambda _: None, read_dataset: DatasetReader = _no_reader,
) -> Learner:  # fmt: skip
    """Returns an untrained learner, decided by the config and its seed alone. `begin` may give the policies other
    weights, before target networks copy them; without `read_dataset` a run that has demonstrations cannot learn."""
    device = torch_device(config.trainer.device)
    sections = {policy_id: config.algorithm_of(policy_id) for policy_id in config.trainable}
    policies = build_policies(description.policies, config.policies, config.algorithm, config.seed, description.slots)
    begin(policies)
    rewards: dict[str, RewardFilter] = {}
    for policy_id in sections:
        policy = config.policies[policy_id]
        if policy.reward_ewma is not None:
            rewards[policy_id] = RewardAverage(policy.reward_ewma)
        elif policy.normalize_rewards:
            rewards[policy_id] = RewardScaling(sections[policy_id].gamma, description.in_turns)
    filters = {name: ExperienceFilter(config.policies[name], f"policies.{name}") for name in sections}
    demonstrations, steps = dict[str, Demonstrations](), config.fragment_rows
    if config.demonstrations is not None:
        imitating = config.recorded("demonstrations")
        read = partial(read_dataset, config.demonstrations, description.of(imitating))
        demonstrations = {name: Demonstrations(read, name, filters[name], steps) for name in imitating}
    algorithms = {}
    for index, policy_id in enumerate(sorted(policies)):
        if policy_id not in sections:
            policies[policy_id].to(device)
            continue
        setting = Setting(
            device, config.seed + index, steps, config.environment.num_envs * description.slots(policy_id),
            rewards=rewards.get(policy_id), demonstrations=demonstrations.get(policy_id),
            precision=config.trainer.precision, compile=config.trainer.compile,
            fragments=config.rollout.fragments_per_update, agents=description.slots(policy_id),
            among_others=len(description.agents) > 1,
        )  # fmt: skip
        algorithms[policy_id] = make_algorithm(policies[policy_id], sections[policy_id], setting)
    episodes: deque[EpisodeRecord] = deque(maxlen=config.metrics.window_episodes)
    remembered: deque[str] = deque(maxlen=max(replay_fragments(made) for made in algorithms.values()))
    changed = [name for name in sections if name in rewards or config.policies[name].changes_rewards]
    shaped = {name: ShapedReturns(config.metrics.window_episodes, description.in_turns) for name in changed}
    tallies = {name: Counters() for name in sorted(policies)} if len(policies) > 1 else {}
    count_steps = _env_steps
    if config.environment.api == "external":
        count_steps = _turns
    elif description.in_turns or description.seats:  # an agent acts in every step, and rows do not show it
        count_steps = _all_steps
    folds = make_folds(config, description, policies)
    initial = {name: _initial(policies[name], algorithms[name]) for fold in folds for name in fold.resettable}
    return Learner(
        policies=policies, algorithms=algorithms, rewards=rewards, filters=filters, counters=PhaseCounters(),
        episodes=episodes, remembered=remembered, demonstrations=demonstrations, shaped=shaped, tallies=tallies,
        count_steps=count_steps, folds=folds, initial=initial,
    )  # fmt: skip


def turns_lost(config: Config, description: EnvironmentDescription) -> str:
    """Returns a warning if agents act in turns and fragments' ends cut off more than a tenth of them, else ""."""
    steps, agents = config.rollout.fragment_steps, len(description.agents)
    uncut = config.environment.api == "external" or config.environment.hierarchy or config.dataset
    if not description.in_turns or uncut or agents / steps <= _MUCH:
        return ""
    return (
        f"up to {agents / steps:.0%} of all turns are not learned from, since their outcome comes after a fragment's "
        f"end: one of each of {agents} agents in rollout.fragment_steps={steps}, which counts the turns of all; with "
        f"{10 * agents} a tenth would be lost"
    )


def _begins(item: Fragment) -> bool:
    """Returns whether episodes begin with it: a successor's first fragment continues episodes."""
    return item.header.seq == 0 and item.header.life.partition(".")[0] == str(item.header.incarnation)


def _source(item: Fragment) -> str:
    return f"{item.header.worker_id}:{item.header.life}"


def _turns(item: Fragment) -> int:
    """Counts the turns of clients' agents, each at its own pace."""
    return sum(int(columns["mask"].sum()) for columns in item.columns.values())


def _all_steps(item: Fragment) -> int:
    return item.header.transitions


def _env_steps(item: Fragment) -> int:
    """Counts steps of environments in which at least one agent acted, unlike in a native reset step."""
    header = item.header
    masks = [columns["mask"].reshape(header.steps, -1, header.num_envs) for columns in item.columns.values()]
    return int(np.logical_or.reduce([mask.any(axis=1) for mask in masks]).sum())
