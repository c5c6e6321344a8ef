"""The learner: policies, algorithms and counters of all policy ids, moved by fragments and by nothing else.

`emulate_acting` moves what acting moves (counters, episodes, reward statistics); `learn` is one update. No Redis, store
or clock here: equal fragments in equal order make equal learners.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import cast

import torch

from shared.config import Config, PolicyConfig, TrainerConfig
from shared.errors import WeightsNotFinite
from shared.fragment import EpisodeRecord, Fragment
from shared.policies.codec import finite_weights
from shared.policies.policy import Policy
from shared.policies.registry import build_policies, torch_device
from shared.spaces import EnvironmentDescription
from shared.steps import Phase, PhaseCounters
from trainer_node.algorithms.algorithm import Algorithm, Remembering, Setting
from trainer_node.algorithms.compiling import check_compiling
from trainer_node.algorithms.experience import Experience
from trainer_node.algorithms.registry import make_algorithm
from trainer_node.demonstrations import Demonstrations
from trainer_node.filters import ExperienceFilter
from trainer_node.reward_average import RewardAverage
from trainer_node.reward_scaling import RewardFilter, RewardScaling


@dataclass
class Learner:
    """The parts that learn, per policy id, and what they have counted."""

    policies: dict[str, Policy]
    algorithms: dict[str, Algorithm]
    rewards: dict[str, RewardFilter]
    filters: dict[str, ExperienceFilter]
    counters: PhaseCounters
    episodes: deque[EpisodeRecord]
    """The last ones, for the mean return."""
    remembered: deque[str]
    """Log positions of the fragments that replay memories hold, oldest first."""
    demonstrations: Demonstrations | None = None
    """What is imitated, where the run has any; read at the first look."""

    def read_demonstrations(self) -> None:
        """So that no update waits for them; raises `DatasetError`, or what the store of an archive raises."""
        if self.demonstrations is not None:
            len(self.demonstrations)

    def mean_return(self) -> float | None:
        """Over the last training episodes; None before the first has ended."""
        returns = [record.episode_return for record in self.episodes]
        return sum(returns) / len(returns) if returns else None

    def emulate_acting(self, fragments: Sequence[Fragment], phase: Phase) -> None:
        """Moves counters, episode statistics and reward scaling as if the agent had acted here."""
        counters = self.counters.of(phase)
        for item in fragments:
            counters.env_steps += _env_steps(item)
            counters.episodes += len(item.header.episodes)
            if phase is Phase.TRAIN:
                self.episodes.extend(item.header.episodes)
            self.remembered.append(item.position)
            self._filter(item)
            for policy_id, scaling in self.rewards.items():
                if self.remembered.maxlen:  # a memory holds rewards as they were
                    scaling.take_in(_source(item), item.columns[policy_id])
                else:
                    item.columns[policy_id] = scaling.scale(_source(item), item.columns[policy_id])

    def recall(self, fragments: Iterable[Fragment]) -> None:
        """Fills the replay memories again with what they held: the fragments at `remembered`, in that order."""
        for number, item in enumerate(fragments):
            self._filter(item)
            for policy_id, algorithm in self.algorithms.items():
                if number >= len(self.remembered) - memory_fragments(algorithm):
                    cast(Remembering, algorithm).remember([Experience(_source(item), item.columns[policy_id])])

    def _filter(self, item: Fragment) -> None:
        for policy_id, filtered in self.filters.items():
            item.columns[policy_id] = filtered(item.columns[policy_id])

    def learn(self, fragments: Sequence[Fragment], phase: Phase) -> dict[str, float]:
        """One update of every policy (in heat-up, only of normalisers and memories); answers the metrics.

        With several policies, each one's metrics end in `/<policy id>`. Raises `WeightsNotFinite`.
        """
        metrics: dict[str, float] = {}
        for policy_id, algorithm in self.algorithms.items():
            experience = [Experience(_source(item), item.columns[policy_id]) for item in fragments]
            if phase is Phase.HEATUP:
                algorithm.observe(experience)
                continue
            found = algorithm.update(experience, self.counters.train)
            suffix = "" if len(self.algorithms) == 1 else f"/{policy_id}"
            metrics |= {name + suffix: value for name, value in found.items()}
        if phase is Phase.TRAIN:
            self.counters.train.updates += 1
        broken = [policy_id for policy_id, policy in self.policies.items() if not finite_weights(policy)]
        if broken:
            raise WeightsNotFinite(
                f"update {self.counters.train.updates} made the weights of {', '.join(broken)} infinite or NaN; its "
                f"terms: {metrics}. Try a smaller algorithm.learning_rate or normalise_observations; the checkpoints "
                f"before it are intact"
            )
        return metrics


def set_up_torch(config: TrainerConfig) -> None:
    """What the config says of this process's PyTorch, and results depend on; raises `ConfigError`."""
    torch.set_num_threads(config.torch_threads)
    torch.set_float32_matmul_precision(config.matmul_precision)
    if config.compile:
        check_compiling()


def make_learner(
    config: Config, description: EnvironmentDescription, begin: Callable[[Mapping[str, Policy]], None] = lambda _: None
) -> Learner:
    """An untrained learner, decided by the config and its seed alone.

    `begin` may give the policies other weights, before algorithms make target networks of them.
    """
    device, algorithm = torch_device(config.trainer.device), config.algorithm.resolved()
    policies = build_policies(description.policies, config.policies, algorithm, config.seed)
    begin(policies)
    rewards = {
        policy_id: made
        for policy_id in sorted(policies)
        if (made := _reward_filter(config.policies[policy_id], algorithm.gamma)) is not None
    }
    filters = {name: ExperienceFilter(config.policies[name], f"policies.{name}") for name in sorted(policies)}
    demonstrations, steps = None, config.rollout.fragment_steps
    if config.demonstrations is not None:  # of one agent, and so for one policy
        demonstrations = Demonstrations(config.demonstrations, description, filters[min(policies)], steps)
    algorithms = {}
    for index, (policy_id, policy) in enumerate(sorted(policies.items())):
        slots = config.environment.num_envs * description.slots(policy_id)
        setting = Setting(
            device, config.seed + index, steps, slots, rewards.get(policy_id), demonstrations,
            config.trainer.precision, config.trainer.compile, config.rollout.fragments_per_update,
        )  # fmt: skip
        algorithms[policy_id] = make_algorithm(policy, algorithm, setting)
    episodes: deque[EpisodeRecord] = deque(maxlen=config.signals.window_episodes)
    remembered: deque[str] = deque(maxlen=max(memory_fragments(made) for made in algorithms.values()))
    return Learner(policies, algorithms, rewards, filters, PhaseCounters(), episodes, remembered, demonstrations)


def _reward_filter(config: PolicyConfig, gamma: float) -> RewardFilter | None:
    if config.reward_ewma is not None:
        return RewardAverage(config.reward_ewma)
    return RewardScaling(gamma) if config.normalise_rewards else None


def memory_fragments(algorithm: Algorithm) -> int:
    """How many fragments its replay memory holds; 0 where it has none."""
    return getattr(algorithm, "memory_fragments", 0)


def _source(item: Fragment) -> str:
    return f"{item.header.worker_id}:{item.header.life}"


def _env_steps(item: Fragment) -> int:
    """Steps of environments in which at least one agent acted (a native reset step is none)."""
    header = item.header
    masks = [columns["mask"].reshape(header.steps, -1, header.num_envs) for columns in item.columns.values()]
    acted = masks[0].any(axis=1)
    for mask in masks[1:]:
        acted = acted | mask.any(axis=1)
    return int(acted.sum())
