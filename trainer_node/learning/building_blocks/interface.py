"""Interface of all learning algorithms, and their inputs: tensors, arrays and config only."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import KW_ONLY, dataclass
from typing import Any, Protocol, Self, runtime_checkable

import numpy as np
import torch
from torch import Tensor

from stagecoach.shared.experience.counters import Counters
from stagecoach.shared.experience.spaces import Array, Columns
from stagecoach.shared.policies.policy import Policy
from stagecoach.trainer_node.learning.building_blocks.demonstrations import Demonstrations
from stagecoach.trainer_node.learning.building_blocks.optimization import Part, load_state_of, state_of, to_device
from stagecoach.trainer_node.learning.building_blocks.reward_normalization import RewardFilter


@dataclass(frozen=True)
class Experience:
    """One fragment's part for one policy."""

    source: str
    """Worker and seed lineage: experience of one source continues where its last fragment ended."""
    columns: Columns
    """Columns `[T, S, …]` as in shared/experience/fragment.py."""


def side_by_side(experience: Sequence[Experience]) -> Columns:
    """Joins K fragments of equal T into one: slots next to each other, `final_index` shifted."""
    fragments = [item.columns for item in experience]
    if len(fragments) == 1:
        return fragments[0]
    columns: Columns = {}
    for name in fragments[0]:
        parts = [fragment[name] for fragment in fragments]
        if name == "final_index":
            offsets = np.cumsum([0, *(fragment["reward"].shape[1] for fragment in fragments[:-1])])
            parts = [part + np.array([0, offset], np.int32) for part, offset in zip(parts, offsets, strict=True)]
        along_slots = name.startswith(("bootstrap_", "final_", "state_"))
        columns[name] = np.concatenate(parts, axis=0 if along_slots else 1)
    return columns


def update_seed(seed: int, update: int) -> int:
    """Derives 63 bits from the run's seed and the update's number, so that no random state has to be carried."""
    return int(np.random.SeedSequence([seed, update]).generate_state(1, np.uint64)[0] >> 1)


@dataclass(frozen=True)
class Setting:
    """Arguments of an algorithm besides its policy and its section."""

    device: torch.device
    seed: int
    """All its randomness follows from this and the number of the update."""
    fragment_steps: int
    slots: int
    """T and S of each fragment."""
    _: KW_ONLY
    rewards: RewardFilter | None = None
    """Normalizes rewards, if configured: with a replay buffer as they are drawn, otherwise before the update."""
    demonstrations: Demonstrations | None = None
    """Demonstrations to imitate, if the run has any."""
    precision: str = "float32"
    """Precision of the networks (`trainer.precision`)."""
    compile: bool = False
    """True if networks are compiled (`trainer.compile`)."""
    fragments: int = 1
    """K, the fragments of an update."""
    agents: int = 1
    """Agents of the policy in each environment; slot = agent's number × environments + environment."""
    among_others: bool = False
    """True if the environment has several agents, so that a slot may have steps in which no agent acts."""

    @property
    def transitions(self) -> int:
        return self.fragments * self.fragment_steps * self.slots


Terms = tuple[Tensor, dict[str, Tensor]]
"""A loss and its parts."""


def mean_terms(
    history: Sequence[Mapping[str, Tensor]], total: Callable[[Tensor], Tensor] = lambda part: part
) -> dict[str, float]:
    """Returns the mean of each term over the gradient steps that had it, summed over the ranks by `total`."""
    names = dict.fromkeys(name for terms in history for name in terms)  # not all move at every step
    means = [torch.stack([terms[name] for terms in history if name in terms]).mean() for name in names]
    return dict(zip(names, total(torch.stack(means)).tolist(), strict=True)) if means else {}


class Shard:
    """Share of each minibatch that this process learns from: all of it, if it learns alone.

    With several ranks it is a `trainer_node/distributed/process_group.py: RankShard`.
    """

    def rows(self, count: int) -> slice:
        """Returns our rows of a minibatch of `count`."""
        return slice(0, count)

    def mean(self, values: Tensor, count: int) -> Tensor:
        """Returns what our rows' `values` add to the mean over all `count` rows."""
        return values.mean()

    def total(self, part: Tensor) -> Tensor:
        """Returns the sum of all ranks' parts, added in rank order: the same bits on each rank."""
        return part


class PolicyLearner:
    """Base of the algorithms: a policy, and all else that is learned."""

    policy: Policy
    _config: Any

    def __new__(cls, *arguments: Any, **named: Any) -> Self:
        if arguments and isinstance(arguments[0], str):  # Stable-Baselines3's PPO("MlpPolicy", env)
            raise TypeError(
                f"{cls.__name__} is the class of a loss, to derive from; to train, call "
                f"stagecoach.train('CartPole-v1', algorithm='ppo', env_steps=20_000)"
            )
        return super().__new__(cls)

    def __init__(self, policy: Policy, config: Any, setting: Setting) -> None:
        self.policy = policy.to(setting.device)
        self._config, self._setting = config, setting
        self.shard = Shard()
        self.watch: Callable[..., None] | None = None
        """Called in each update with what is learned from, for explanations (`trainer_node/replay/explanation.py`):
        with the batch and further arguments of `loss` before the first gradient step; with a replay buffer, after each
        step with the rows drawn and their TD errors."""
        self.parts: dict[str, Part] = {}
        """Prefix of array names → optimizer, critic or target."""

    def _tensors(self, experience: Sequence[Experience]) -> dict[str, Tensor]:
        """The fragments' columns side by side, on the device."""
        return {name: to_device(array, self._setting.device) for name, array in side_by_side(experience).items()}

    def _update_normalizer(self, tensors: Mapping[str, Tensor]) -> None:
        """Takes the observations of columns `[T, S, …]` into the policy's statistics, where it has any."""
        if self.policy.normalizer is not None:
            names = self.policy.spaces.observation.column_names("obs")
            self.policy.normalizer.update({name: tensors[name][tensors["mask"]] for name in names})

    def state(self) -> Columns:
        return state_of(self.parts)

    def load_state(self, arrays: Columns) -> None:
        load_state_of(self.parts, arrays)


class Algorithm(Protocol):
    """Learns one policy. Its constructor takes `(policy, config, setting)`.

    With a replay buffer it is a `ReplayingAlgorithm` too.
    """

    policy: Policy
    shard: Shard

    def update(self, experience: Sequence[Experience], counters: Counters) -> dict[str, float]:
        """Updates from K fragments of equal T; returns the metrics. `counters` include these fragments."""

    def observe(self, experience: Sequence[Experience]) -> None:
        """Adds experience of warm-up, which is not learned from, to normalizers and replay buffer."""

    def state(self) -> Columns:
        """Returns all that the next update depends on, except the policy and the contents of the replay buffer."""

    def load_state(self, arrays: Columns) -> None:
        """The inverse of `state`; raises `KeyError`, `IndexError` or `ValueError` where it is another network's."""


@runtime_checkable
class ReplayingAlgorithm(Protocol):
    """An algorithm with a replay buffer, whose contents are no part of its state: they are read again from the log."""

    replay_fragments: int
    """The most fragments that the replay buffer holds."""

    def remember(self, experience: Sequence[Experience]) -> None:
        """Puts back fragments that the replay buffer held, oldest first, after `load_state`."""

    def forget(self) -> None:
        """Empties the replay buffer, some of whose contents are lost; what is remembered next is new to it."""


@runtime_checkable
class EstimatingAlgorithm(Protocol):
    """An algorithm that estimates the advantage of each step, by which levels are scored."""

    @property
    def advantages(self) -> Array | None:
        """Advantages of the last update; None if it had none."""


def replay_fragments(algorithm: Algorithm) -> int:
    """Returns the most fragments that its replay buffer holds; 0 if it has none."""
    return algorithm.replay_fragments if isinstance(algorithm, ReplayingAlgorithm) else 0
