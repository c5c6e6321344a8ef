"""What off-policy algorithms have in common: memory, minibatches, and how many gradient steps are due.

A subclass gives `learn` (one gradient step), and `networks` and `load_networks` (its state). Each update puts its
fragments into the memory, and then does the gradient steps that its env steps ask for, each with a minibatch drawn by a
generator that is seeded with the number of the update: no random state is carried.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from shared.algorithm_configs.off_policy import OffPolicyConfig
from shared.policies.policy import Policy
from shared.spaces import Array, Columns
from shared.steps import Counters
from trainer_node.algorithms.algorithm import Setting
from trainer_node.algorithms.cloning import make_cloning
from trainer_node.algorithms.compiling import Answer, compiled
from trainer_node.algorithms.computing import computing, to_device
from trainer_node.algorithms.experience import Experience, side_by_side, update_seed
from trainer_node.algorithms.named_arrays import part
from trainer_node.algorithms.share import Share, Terms, Whole
from trainer_node.memories.batch import Batch
from trainer_node.memories.make import make_memory

_MEMORY = "memory/"


@dataclass(frozen=True)
class Minibatch:
    """trainer_node/memories/batch.py: Batch on the algorithm's device, rewards normalised where they are to be."""

    observations: dict[str, Tensor]
    actions: dict[str, Tensor]
    next_observations: dict[str, Tensor]
    reward: Tensor
    discount: Tensor
    weight: Tensor
    heads: Tensor | None = None
    """`[K, B]`: 1 where a head of an ensemble learns from the transition, else 0; None: all of them do."""

    def __len__(self) -> int:
        return len(self.reward)


@dataclass(frozen=True)
class Lesson:
    """What a gradient step was: its metrics (scalars), and `[B]` how wrong each transition's prediction was."""

    metrics: dict[str, Tensor]
    td_error: Tensor


class OffPolicy:
    """Base of the algorithms with a replay memory."""

    def __init__(self, policy: Policy, config: OffPolicyConfig, setting: Setting) -> None:
        self.policy = policy.to(setting.device)
        self.share: Share = Whole()
        """All of each minibatch: `OffPolicyConfig.refuse` lets no further ranks be."""
        self._section = config
        self._setting = setting
        self.memory = make_memory(config.memory, policy.spaces, setting.fragment_steps, setting.slots)
        self.memory_fragments = self.memory.fragments
        self.cloning = make_cloning(getattr(config, "behavioural_cloning", None), policy, setting)
        """None for algorithms without a policy of their own to clone with."""
        self.done = 0
        """Gradient steps so far."""

    def learn(self, batch: Minibatch, counters: Counters, generator: torch.Generator) -> Lesson:
        """One gradient step (`done` does not count it yet); `generator` (CPU) gives all its random numbers."""
        raise NotImplementedError

    def networks(self) -> Columns:
        """What else is learnt beside the policy, as named arrays: optimisers, critics, targets."""
        raise NotImplementedError

    def load_networks(self, arrays: Columns) -> None:
        """The inverse of `networks`; raises `KeyError`, `IndexError` or `ValueError` where it is another network's."""
        raise NotImplementedError

    @property
    def beside_policy(self) -> dict[str, str]:
        """What is learnt beside the policy and worth keeping in another run: word → names' beginning in `networks`."""
        return {}

    def begin_with(self, arrays: Columns) -> None:
        """Takes `beside_policy` from the `state` of another run of this algorithm; target networks begin as the others.

        Raises `KeyError` or `ValueError` where it is another network's, and then changes nothing.
        """
        if not self.beside_policy:
            return
        own = self.networks()
        for name in own:
            source = name.replace("targets/", "critics/", 1) if name.startswith("targets/") else name
            if source.startswith(tuple(self.beside_policy.values())):
                if arrays[source].shape != own[name].shape:
                    raise ValueError(f"{source} has the shape {arrays[source].shape}, expected {own[name].shape}")
                own[name] = arrays[source]
        self.load_networks(own)

    def update(self, experience: Sequence[Experience], counters: Counters) -> dict[str, float]:
        """Takes the fragments in, then does all gradient steps that are due; answers the metrics' means."""
        self.observe(experience)
        schedules = {} if self.cloning is None else self.cloning.begin(counters)
        history = [lesson.metrics for lesson in self._lessons(counters)]
        metrics: dict[str, float] = {}
        if history:
            names = dict.fromkeys(name for terms in history for name in terms)  # not all move at every step
            means = [torch.stack([terms[name] for terms in history if name in terms]).mean() for name in names]
            metrics = dict(zip(names, torch.stack(means).tolist(), strict=True))
        return (
            metrics
            | schedules
            | {
                "train/learning_rate": self._section.learning_rate.value(counters),
                "train/gradient_steps": len(history),
                "train/memory_transitions": len(self.memory),
            }
        )

    def _lessons(self, counters: Counters) -> Iterable[Lesson]:
        if not len(self.memory):  # nobody has acted yet: what is due is made up for
            return
        config, seed = self._section, update_seed(self._setting.seed, counters.updates)
        drawing, generator = np.random.Generator(np.random.PCG64(seed)), torch.Generator().manual_seed(seed)
        importance, rewards = config.memory.importance(counters), self._setting.rewards
        as_now = None if rewards is None else rewards.scaled
        for _ in range(int(counters.env_steps * config.gradient_steps_per_env_step) - self.done):
            drawn = self.memory.sample(
                config.minibatch_size, drawing, gamma=config.gamma, n_step=config.n_step, beta=importance,
                as_now=as_now,
            )  # fmt: skip
            with computing(self._setting.device, self._setting.precision):
                lesson = self.learn(self._on_device(drawn), counters, generator)
            self.done += 1
            if self.memory.has_priorities:
                self.memory.update_priorities(drawn.row, lesson.td_error.detach().cpu().numpy())
            yield lesson

    def compiled(self, loss: Callable[..., Answer]) -> Callable[..., Answer]:
        """`loss(minibatch, …)`, compiled for whole minibatches where the setting says so."""
        return compiled(loss, self._setting, {self._section.minibatch_size})

    def imitating(self, actor_loss: Tensor) -> Terms:
        """The loss of a step of the policy, with what is cloned beside it, and the metrics of that."""
        return (actor_loss, {}) if self.cloning is None else self.cloning.beside(self.share, (actor_loss, {}))

    def _on_device(self, drawn: Batch) -> Minibatch:
        return Minibatch(
            self._tensors(drawn.observations), self._tensors(drawn.actions), self._tensors(drawn.next_observations),
            self._tensor(drawn.reward), self._tensor(drawn.discount), self._tensor(drawn.weight),
        )  # fmt: skip

    def _tensors(self, columns: Mapping[str, Array]) -> dict[str, Tensor]:
        return {name: self._tensor(array) for name, array in columns.items()}

    def _tensor(self, array: Array) -> Tensor:
        return to_device(array, self._setting.device)

    def observe(self, experience: Sequence[Experience]) -> None:
        """Normaliser and memory take it in: all there is to do in heat-up."""
        normaliser = self.policy.normaliser
        if normaliser is not None:
            columns = side_by_side(experience)
            mask = torch.from_numpy(columns["mask"])
            names = self.policy.spaces.observation.column_names("obs")
            normaliser.update({name: self._tensor(columns[name])[mask] for name in names})
        self.remember(experience)

    def remember(self, experience: Sequence[Experience]) -> None:
        """The memory takes it in, and nothing else happens."""
        for item in experience:
            self.memory.add(item.source, item.columns)

    def state(self) -> Columns:
        """The subclass's networks, the gradient steps so far, and what the memory knows beside its contents."""
        memory = {_MEMORY + name: array for name, array in self.memory.state().items()}
        return {"done": np.array(self.done)} | memory | self.networks()

    def load_state(self, arrays: Columns) -> None:
        """The inverse of `state`; the memory is empty until `remember` has put back what it held."""
        self.load_networks({k: v for k, v in arrays.items() if k != "done" and not k.startswith(_MEMORY)})
        self.memory.load_state(part(arrays, _MEMORY))
        self.done = int(arrays["done"])
