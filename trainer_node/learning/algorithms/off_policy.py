"""Base of the off-policy algorithms: replay buffer, minibatches, due gradient steps, and state.

A subclass gives `learn` (one gradient step) and names `parts` (its state). Minibatches are drawn by a generator that is
seeded with the number of the update: no random state is carried.
"""

import functools
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, fields, replace
from typing import Any, Self

import numpy as np
import torch
from torch import Tensor

from stagecoach.shared.config.algorithms import replay_buffer as replay_buffer_config
from stagecoach.shared.config.algorithms.off_policy import ActorConfig, OffPolicyConfig
from stagecoach.shared.experience.counters import Counters
from stagecoach.shared.experience.spaces import Columns, PolicySpaces
from stagecoach.shared.policies.policy import Policy, copy_sharing_buffers
from stagecoach.shared.policies.registry import borrowed_random_state
from stagecoach.trainer_node.learning.building_blocks.batch import each
from stagecoach.trainer_node.learning.building_blocks.cloning import Cloning
from stagecoach.trainer_node.learning.building_blocks.compilation import Answer, compiled
from stagecoach.trainer_node.learning.building_blocks.critics import Critics
from stagecoach.trainer_node.learning.building_blocks.interface import (
    Experience,
    PolicyLearner,
    Setting,
    mean_terms,
    update_seed,
)
from stagecoach.trainer_node.learning.building_blocks.optimization import Adam, autocast, gradient_step, part, to_device
from stagecoach.trainer_node.learning.replay_buffers.hindsight import HindsightReplayBuffer, goal_reward
from stagecoach.trainer_node.learning.replay_buffers.own import make_own_replay_buffer
from stagecoach.trainer_node.learning.replay_buffers.prioritized import PrioritizedReplayBuffer
from stagecoach.trainer_node.learning.replay_buffers.uniform import BalancedReplayBuffer, Batch, ReplayBuffer
from stagecoach.trainer_node.learning.reward_signals.base import Rows
from stagecoach.trainer_node.learning.reward_signals.reward_signals import ReplayedSignals


def make_replay_buffer(
    config: replay_buffer_config.ReplayBufferConfig, spaces: PolicySpaces, steps: int, slots: int
) -> ReplayBuffer:
    """An empty buffer for fragments of `steps` × `slots`; raises `ConfigError` for unfit spaces, or a user's class."""
    size = (spaces, steps, slots, config.capacity)
    if isinstance(config, replay_buffer_config.OwnReplay):
        return make_own_replay_buffer(config, *size)
    if isinstance(config, replay_buffer_config.PrioritizedReplay):
        return PrioritizedReplayBuffer(*size, alpha=config.alpha, epsilon=config.epsilon)
    if isinstance(config, replay_buffer_config.HindsightReplay):
        reward, fraction = goal_reward(config), config.relabeled_fraction
        return HindsightReplayBuffer(
            *size, strategy=config.strategy, relabeled_fraction=fraction, reward=reward,
            actions=config.hindsight_actions, missed_penalty=config.missed_penalty,
            bounded=config.reward == "sparse",
        )  # fmt: skip
    if isinstance(config, replay_buffer_config.BalancedReplay):
        return BalancedReplayBuffer(*size, classes=config.classes)
    return ReplayBuffer(*size)


_BUFFER = "replay_buffer/"
_FOLLOWED = {"targets": "critics", "target_mixer": "mixer"}
"""Target networks' parts → those of the networks that they follow."""


@dataclass(frozen=True)
class Minibatch:
    observations: dict[str, Tensor]
    actions: dict[str, Tensor]
    next_observations: dict[str, Tensor]
    reward: Tensor
    discount: Tensor
    weight: Tensor
    heads: Tensor | None = None
    """`[K, B]`: 1 where a head of an ensemble learns from the transition, else 0; None: all of them do."""
    bounds: Tensor | None = None
    """`[2]`: the least and the greatest value that there can be, where that is known."""

    def __len__(self) -> int:
        return len(self.reward)

    def take(self, rows: slice) -> Self:
        names = [item.name for item in fields(self) if item.name not in ("heads", "bounds")]
        taken = {name: each(getattr(self, name), lambda tensor: tensor[rows]) for name in names}
        return replace(self, **taken, heads=None if self.heads is None else self.heads[:, rows])

    def clipped(self, targets: Tensor) -> Tensor:
        return targets if self.bounds is None else targets.clamp(self.bounds[0], self.bounds[1])


@dataclass(frozen=True)
class Lesson:
    """Result of a gradient step: its metrics (scalars), and the TD error `[B]` of each transition."""

    metrics: dict[str, Tensor]
    td_error: Tensor


class OffPolicy(PolicyLearner):
    """Every rank holds all of the replay buffer, and draws the same minibatches."""

    _config: OffPolicyConfig

    def __init__(self, policy: Policy, config: OffPolicyConfig, setting: Setting) -> None:
        super().__init__(policy, config, setting)
        self._share: float | Tensor = 1.0
        """Weight of this rank's rows in a mean over the current minibatch."""
        steps, slots = setting.fragment_steps, setting.slots
        self.replay_buffer = make_replay_buffer(config.replay_buffer, policy.spaces, steps, slots)
        self.replay_fragments = self.replay_buffer.fragments
        self.cloning = Cloning(config.cloning, policy, setting)
        self.signals = ReplayedSignals(policy, config.signals, config, setting)
        self.parts["signals/"] = self.signals
        self.beside_policy: dict[str, str] = {}
        """The `parts` that another run may start from: word → prefix of the names."""
        self.done = 0

    def learn(self, batch: Minibatch, counters: Counters, generator: torch.Generator) -> Lesson:
        """Performs one gradient step, before `done` counts it; all randomness is from `generator` (CPU)."""
        raise NotImplementedError

    def begin_with(self, arrays: Columns) -> None:
        """Takes `beside_policy` from the `state` of another run; target networks start as copies of their networks.
        Raises `KeyError` or `ValueError` for another network's state, and then changes nothing."""
        own = super().state()
        for name in own:
            prefix, _, rest = name.partition("/")
            source = f"{_FOLLOWED[prefix]}/{rest}" if prefix in _FOLLOWED else name
            if source.startswith(tuple(self.beside_policy.values())):
                if arrays[source].shape != own[name].shape:
                    raise ValueError(f"{source} has the shape {arrays[source].shape}, expected {own[name].shape}")
                own[name] = arrays[source]
        super().load_state(own)

    def update(self, experience: Sequence[Experience], counters: Counters) -> dict[str, float]:
        """Stores the fragments, then does all due gradient steps; returns the means of the metrics."""
        self.observe(experience)
        if self.signals.streams:
            self.signals.observe_batch(experience, self._tensors(experience))
        self.cloning.begin(counters)
        due = int(counters.env_steps * self._config.gradient_steps_per_env_step)
        if not len(self.replay_buffer) and not any(item.columns["mask"].any() for item in experience):
            self.done = due  # none of its agents has acted yet, so no steps are owed for that time
        history = [lesson.metrics for lesson in self._lessons(counters, due)]
        of_update = {
            "train/learning_rate": self._config.learning_rate.value(counters),
            "train/gradient_steps": len(history),
            "train/replay_buffer_transitions": len(self.replay_buffer),
        }
        return mean_terms(history, self.shard.total) | self.cloning.metrics | of_update

    def _lessons(self, counters: Counters, due: int) -> Iterable[Lesson]:
        if not len(self.replay_buffer):  # nothing to draw yet; due steps are done later
            return
        config, seed = self._config, update_seed(self._setting.seed, counters.updates)
        drawing, generator = np.random.Generator(np.random.PCG64(seed)), torch.Generator().manual_seed(seed)
        beta, rewards = config.replay_buffer.importance(counters), self._setting.rewards
        wanted: dict[str, Any] = {"gamma": config.gamma, "n_step": config.n_step, "beta": beta}
        as_now, generators = None if rewards is None else rewards.scaled, self.signals.generators(counters.updates)
        for _ in range(due - self.done):
            drawn = self.replay_buffer.sample(config.minibatch_size, drawing, as_now=as_now, **wanted)
            batch, paid = self.on_device(drawn), dict[str, Tensor]()
            if self.signals.streams:
                rows = Rows(batch.observations, batch.actions, batch.next_observations)
                known = to_device(~self.replay_buffer.ring.next_unknown(drawn.row), self._setting.device)
                reward, paid = self.signals.paid(rows, batch.reward, known, counters, generators)
                batch = replace(batch, reward=reward)
            self._share = self.share(batch)
            with autocast(self._setting.device, self._setting.precision):
                lesson = self.learn(batch, counters, generator)
            lesson.metrics.update(paid)
            self.done += 1
            if self.watch is not None:
                self.watch(drawn.row, lesson.td_error.detach())
            if self.replay_buffer.has_priorities:
                errors = self._of_all_ranks(lesson.td_error.detach(), len(drawn.row))
                self.replay_buffer.update_priorities(drawn.row, errors.cpu().numpy())
            yield Lesson({name: self.part(term) for name, term in lesson.metrics.items()}, lesson.td_error)

    @property
    def minibatch_rows(self) -> int:
        """Returns the `len` of each minibatch."""
        return self._config.minibatch_size

    def rows(self, batch: Any) -> slice:
        return self.shard.rows(len(batch))

    def share(self, batch: Any) -> float | Tensor:
        """Returns the factor from a mean over this rank's rows to its part of the mean over the minibatch."""
        rows = self.rows(batch)
        count: int = rows.stop - rows.start
        return count / len(batch)

    def part(self, mean: Tensor) -> Tensor:
        """Scales a mean over this rank's rows to its part of the whole mean, which `shard.total` sums."""
        return mean if isinstance(self._share, float) and self._share == 1.0 else mean * self._share

    def mean_of_all(self, mean: Tensor) -> Tensor:
        """Returns the mean over the minibatch from the mean over this rank's rows."""
        return self.shard.total(self.part(mean))

    def _of_all_ranks(self, values: Tensor, count: int) -> Tensor:
        rows = self.shard.rows(count)
        if rows == slice(0, count):
            return values
        found = values.new_zeros(count)
        found[rows] = values
        return self.shard.total(found)

    def compiled(self, loss: Callable[..., Answer], optimizer: Adam | None = None) -> Callable[..., Answer]:
        """Wraps `loss(minibatch, …)` to see this rank's rows; whole minibatches are compiled if configured."""

        @functools.wraps(loss)
        def ours(batch: Any, *arguments: Any) -> Answer:
            rows = self.rows(batch)
            if rows == slice(0, len(batch)):
                return loss(batch, *arguments)
            own = (item[rows] if isinstance(item, Tensor) and item.dim() else item for item in arguments)
            return loss(batch.take(rows), *own)

        return compiled(ours, self._setting, {self.minibatch_rows}, optimizer)

    def descend(
        self, mean: Tensor, optimizer: Adam, rate: float, *, clones: bool = False, all_inputs: bool = False
    ) -> tuple[Tensor, dict[str, Tensor]]:
        """Performs one gradient step of all ranks on the mean loss of this rank's rows, with cloning if `clones`.
        Returns the gradients' norm and the cloning terms."""
        loss, cloned = self.part(mean), dict[str, Tensor]()
        if clones:
            loss, cloned = self.cloning.beside(self.shard, (loss, {}))
        bound, total = self._config.max_grad_norm, self.shard.total
        norm = gradient_step(loss, optimizer, rate, bound, total, all_inputs=all_inputs)
        return norm, {name: self.shard.total(term) for name, term in cloned.items()}

    def on_device(self, drawn: Batch) -> Minibatch:
        columns = {name: self._moved(value) for name, value in vars(drawn).items() if name != "row"}
        bounds = None
        if self._setting.rewards is None and not self.signals.streams:
            bounds = self.replay_buffer.value_bounds(self._config.gamma)
        return Minibatch(**columns, bounds=None if bounds is None else self._moved(np.array(bounds, np.float32)))

    def _moved(self, value: Any) -> Any:
        return each(value, lambda array: to_device(array, self._setting.device))

    def observe(self, experience: Sequence[Experience]) -> None:
        if self.policy.normalizer is not None or self.signals.streams:
            tensors = self._tensors(experience)
            self._update_normalizer(tensors)
            self.signals.observe(tensors)
        self.remember(experience)

    def remember(self, experience: Sequence[Experience]) -> None:
        for item in experience:
            self.replay_buffer.add(item.source, item.columns)

    def forget(self) -> None:
        self.replay_buffer.forget()

    def state(self) -> Columns:
        """Returns the gradient steps so far, the replay buffer's state without its contents, and all `parts`."""
        replay = {_BUFFER + name: array for name, array in self.replay_buffer.state().items()}
        return {"done": np.array(self.done)} | replay | super().state()

    def load_state(self, arrays: Columns) -> None:
        """Restores `state`; the replay buffer is empty until `remember` refills it."""
        super().load_state(arrays)
        self.replay_buffer.load_state(part(arrays, _BUFFER))
        self.done = int(arrays["done"])


class WithCritics(OffPolicy):
    """Base of algorithms with critics apart from the policy, each with targets and an optimizer."""

    def __init__(self, policy: Policy, config: OffPolicyConfig, setting: Setting, **shape: int) -> None:
        """`shape`: `count`, `action_size` and `outputs` of `Critics`."""
        super().__init__(policy, config, setting)
        with borrowed_random_state(update_seed(setting.seed, 0)):
            made = Critics(policy.spaces.observation, policy.config, **shape)
        self.critics = made.to(setting.device)
        self.targets = copy_sharing_buffers(self.critics)
        self._actor_adam = Adam(policy.parameters(), config.adam_epsilon, config.weight_decay)
        self._critics_adam = Adam(self.critics.parameters(), config.adam_epsilon, config.weight_decay)
        self.parts |= {"critics/": self.critics, "targets/": self.targets}
        self.parts |= {"adam/actor/": self._actor_adam, "adam/critics/": self._critics_adam}
        self.beside_policy["critics"] = "critics/"


class ActorAndCritics(WithCritics):
    """Base of SAC and TD3: an actor that maximizes the critics' values."""

    _config: ActorConfig

    def _step_critics(
        self, loss: Tensor, values: Tensor, errors: Tensor, counters: Counters
    ) -> tuple[dict[str, Tensor], Tensor]:
        """Steps the critics; `values` and `errors` are `[C, B]`. Returns metrics and the mean absolute error `[B]`."""
        config = self._config
        rate = (config.critic_learning_rate or config.learning_rate).value(counters)
        norm, _ = self.descend(loss, self._critics_adam, rate, all_inputs=True)
        wrong = errors.detach().abs()
        terms = {"train/critic_loss": loss.detach(), "train/q_value": values.detach().mean()}
        return terms | {"train/td_error": wrong.mean(), "train/grad_norm": norm}, wrong.mean(dim=0)

    def _step_actor(self, loss: Tensor, counters: Counters) -> dict[str, Tensor]:
        rate = self._config.learning_rate.value(counters)
        _, cloned = self.descend(loss, self._actor_adam, rate, clones=True)
        return cloned | {"train/actor_loss": loss.detach()}
