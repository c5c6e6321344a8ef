"""The reward signals of one policy: their rewards, their part of its advantages, and how they learn.

In each update an algorithm calls `observe_batch`, `join` for the advantages of all signals, and `learn` after its own
gradient steps. Each learner rank evaluates them on the whole batch, so ranks do not communicate about them.
"""

import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from stagecoach.shared.config.algorithms.on_policy import ClippedConfig
from stagecoach.shared.config.algorithms.reward_signals import OwnSignalConfig, RewardSignalsConfig, SignalConfig
from stagecoach.shared.experience.counters import Counters
from stagecoach.shared.experience.spaces import Array, Columns
from stagecoach.shared.policies.policy import Policy
from stagecoach.shared.policies.registry import borrowed_random_state
from stagecoach.shared.policies.serialization import load_state_arrays, state_arrays
from stagecoach.trainer_node.learning.building_blocks import optimization
from stagecoach.trainer_node.learning.building_blocks.advantages import Estimate, Trajectories
from stagecoach.trainer_node.learning.building_blocks.batch import CHUNK, in_chunks
from stagecoach.trainer_node.learning.building_blocks.interface import Experience, Setting, mean_terms, update_seed
from stagecoach.trainer_node.learning.building_blocks.reward_normalization import RewardScaling
from stagecoach.trainer_node.learning.reward_signals.base import Embedding, RewardSignal, Rows
from stagecoach.trainer_node.learning.reward_signals.own_signal import make_own_signal
from stagecoach.trainer_node.learning.reward_signals.signals import GAIL, ICM, RND

ORDER = ("rnd", "icm", "gail")
"""All built-in signals; a signal's index determines its random numbers, so append new signals."""


class Rewarding:
    """One signal's rewards, scaled."""

    _tensors: Mapping[str, Tensor]
    _rows: Rows

    def __init__(
        self, name: str, signal: RewardSignal, config: SignalConfig, policy: Policy, algorithm: Any, setting: Setting
    ) -> None:
        self.signal, self.strength = signal.to(setting.device), config.strength
        self._name, self._config, self._policy, self._algorithm = name, config, policy, algorithm
        self._device, self._among_others = setting.device, setting.among_others
        learned = [item for item in signal.parameters() if item.requires_grad]
        self._adam = optimization.Adam(learned, algorithm.adam_epsilon) if learned else None
        self._optimizers: dict[str, optimization.Part] = {} if self._adam is None else {"signal_adam/": self._adam}
        self._networks: dict[str, nn.Module] = {"signal/": self.signal}
        """Networks with their buffers. Keys of both dicts prefix the names of arrays."""
        self.scaling = RewardScaling(config.gamma) if signal.scaled else None

    def observe_batch(self, experience: Sequence[Experience], tensors: Mapping[str, Tensor], rows: Rows) -> None:
        """Computes the rewards of `rows` `[T × S]`, whose columns are `tensors` `[T, S, …]`."""
        self._tensors, self._rows = tensors, rows
        self._ends = _ends(tensors, self._config.episodic, self._among_others)
        self.known = tensors["mask"]
        if self.signal.needs_next:
            unknown = tensors["terminated"].clone()
            unknown[tuple(tensors["final_index"].to(torch.int64).unbind(dim=1))] = False
            self.known = self.known & ~unknown
        self.reward = self._raw(rows, self.known.flatten()).reshape(self.known.shape)
        if self.scaling is not None:
            over = (self._ends["terminated"] | self._ends["truncated"]).cpu().numpy()
            raw, at = self.reward.cpu().numpy(), 0
            for item in experience:  # the scaling learns fragment by fragment, then divides all rewards
                its = slice(at, at := at + item.columns["reward"].shape[1])
                ends = {"terminated": over[:, its], "truncated": over[:, its]}
                self.scaling.take_in(item.source, {"reward": raw[:, its], "mask": item.columns["mask"], **ends})
            self.reward = torch.from_numpy(self.scaling.scaled(raw)).to(self._device)

    def _raw(self, rows: Rows, known: Tensor) -> Tensor:
        """Returns the signal's raw rewards `[B]`; 0 for steps that are not `known`."""
        reward, there = torch.zeros(len(known), device=self._device), rows.take(known)
        parts = [self.signal.reward(there.take(slice(at, at + CHUNK))) for at in range(0, len(there), CHUNK)]
        if parts:
            reward[known] = torch.cat(parts)
        return reward

    def _train(self, rows: Rows, counters: Counters, generator: torch.Generator) -> dict[str, Tensor]:
        loss, terms = self.signal.loss(rows, generator)
        if loss is not None and self._adam is not None:
            rate = self._config.learning_rate.value(counters)
            optimization.gradient_step(loss, self._adam, rate, self._algorithm.max_grad_norm)
        return terms

    def state(self) -> Columns:
        networks = {prefix: state_arrays(network) for prefix, network in self._networks.items()}
        networks |= {"scaling/": {} if self.scaling is None else self.scaling.state()}
        named = {prefix + name: array for prefix, arrays in networks.items() for name, array in arrays.items()}
        return named | optimization.state_of(self._optimizers)

    def load_state(self, arrays: Columns) -> None:
        for prefix, network in self._networks.items():
            load_state_arrays(network, optimization.part(arrays, prefix))
        optimization.load_state_of(self._optimizers, arrays)
        if self.scaling is not None:
            self.scaling.load_state(optimization.part(arrays, "scaling/"))


class Stream(Rewarding):
    """A signal with a value network of its own, for advantages."""

    def __init__(self, name: str, signal: RewardSignal, config: SignalConfig, policy: Policy, *more: Any) -> None:
        super().__init__(name, signal, config, policy, *more)
        self._value = Embedding(policy.spaces.observation.own, policy.config, 1, gain=1.0).to(self._device)
        """Value of its return: the policy's layers without a core, and the policy's normalization."""
        self._value_adam = optimization.Adam(self._value.parameters(), self._algorithm.adam_epsilon)
        self._optimizers["value_adam/"], self._networks["value/"] = self._value_adam, self._value

    def advantage(self, estimate: Estimate) -> Tensor:
        """Returns advantages `[T, S]` of its rewards and values; keeps the value targets for `learn`."""
        tensors, names = self._tensors, self._policy.spaces.observation.own.column_names("obs")
        index = tensors["final_index"].to(torch.int64)
        kept = self._ends["truncated"][index[:, 0], index[:, 1]]
        its = Trajectories(
            reward=self.reward, mask=tensors["mask"], final_index=index[kept], gamma=self._config.gamma, **self._ends,
            value=self._values(self._rows.observations).reshape(self.reward.shape),
            bootstrap_value=self._values({name: tensors["bootstrap_" + name] for name in names}),
            final_value=self._values({name: tensors["final_" + name][kept] for name in names}),
        )  # fmt: skip
        advantage, self._target = estimate(its)
        return advantage

    def learn(self, counters: Counters, generator: torch.Generator) -> dict[str, float]:
        known, bound = self.known.flatten(), self._algorithm.max_grad_norm
        rows = self._rows.take(known)
        history = [
            self._train(rows.take(chosen), counters, generator) for chosen in self._minibatches(len(rows), generator)
        ]
        there, rate = self._tensors["mask"].flatten(), self._algorithm.learning_rate.value(counters)
        valued, target = self._rows.take(there), self._target.flatten()[there]
        for chosen in self._minibatches(len(target), generator):
            value = self._value(valued.take(chosen).observations, self._policy.normalizer).squeeze(-1)
            loss = (value - target[chosen]).square().mean()
            optimization.gradient_step(loss, self._value_adam, rate, bound)
            history.append({f"train/{self._name}_value_loss": loss.detach()})
        return {f"train/{self._name}_reward": float(self.reward.flatten()[known].mean())} | mean_terms(history)

    def _minibatches(self, count: int, generator: torch.Generator) -> Iterator[Tensor]:
        """Yields row numbers: epochs of minibatches if the algorithm has them, otherwise all rows."""
        clipped = self._algorithm if isinstance(self._algorithm, ClippedConfig) else None
        for _ in range(clipped.epochs if clipped else 1) if count else ():
            order = torch.randperm(count, generator=generator).to(self._device)
            yield from order.tensor_split(-(-count // clipped.minibatch_size) if clipped else 1)

    def _values(self, observations: Mapping[str, Tensor]) -> Tensor:
        return in_chunks(lambda rows: self._value(rows, self._policy.normalizer).squeeze(-1), observations)


class RewardSignals:
    """Signals of a config; empty without a config."""

    stream: type[Rewarding] = Stream

    def __init__(self, policy: Policy, config: RewardSignalsConfig | None, algorithm: Any, setting: Setting) -> None:
        self._policy, self._seed = policy, setting.seed
        self._strength = 1.0 if config is None else config.extrinsic.strength
        self.streams: dict[str, Any] = {}
        kinds: dict[str, Callable[..., RewardSignal]] = {
            "rnd": RND,
            "icm": ICM,
            "gail": partial(GAIL, demonstrations=setting.demonstrations),
        }
        for name in (*ORDER, *config.own) if config is not None else ():
            if (section := getattr(config, name)) is not None:
                with borrowed_random_state(self._seed_of(name, 0)):
                    own = isinstance(section, OwnSignalConfig)
                    signal = make_own_signal(name, section, policy) if own else kinds[name](policy, section)
                    self.streams[name] = self.stream(name, signal, section, policy, algorithm, setting)

    def _seed_of(self, name: str, update: int) -> int:
        number = ORDER.index(name) + 1 if name in ORDER else zlib.crc32(name.encode()) + len(ORDER) + 1
        return update_seed(update_seed(self._seed, update), number)

    def observe(self, tensors: Mapping[str, Tensor]) -> None:
        """Updates statistics by the observations of columns `[T, S, …]`; all there is to do in warm-up."""
        names = self._policy.spaces.observation.own.column_names("obs")
        for stream in self.streams.values():
            stream.signal.observe({name: tensors[name][tensors["mask"]] for name in names})

    @torch.no_grad()
    def observe_batch(self, experience: Sequence[Experience], tensors: Mapping[str, Tensor]) -> None:
        """Computes the rewards of an update's fragments, whose columns side by side are `tensors` `[T, S, …]`."""
        self.observe(tensors)
        if self.streams:
            rows = self._rows(tensors)
            for stream in self.streams.values():
                stream.observe_batch(experience, tensors, rows)

    @torch.no_grad()
    def join(self, advantage: Tensor, estimate: Estimate) -> Tensor:
        """Returns the weighted sum `[T, S]` of the environment's `advantage` and all signals' advantages."""
        joined = self._strength * advantage
        for stream in self.streams.values():
            joined = joined + stream.strength * stream.advantage(estimate)
        return joined

    def learn(self, counters: Counters) -> dict[str, float]:
        metrics: dict[str, float] = {}
        for name, generator in self.generators(counters.updates).items():
            metrics |= self.streams[name].learn(counters, generator)
        return metrics

    def generators(self, update: int) -> dict[str, torch.Generator]:
        return {name: torch.Generator().manual_seed(self._seed_of(name, update)) for name in self.streams}

    def _rows(self, tensors: Mapping[str, Tensor]) -> Rows:
        """Returns all transitions `[T × S, …]`, padding included."""
        spaces = self._policy.spaces
        step, slot = tensors["final_index"].to(torch.int64).unbind(dim=1)
        following = {}
        for name in spaces.observation.own.column_names("obs"):
            after = torch.cat([tensors[name][1:], tensors["bootstrap_" + name].unsqueeze(0)])
            after[step, slot] = tensors["final_" + name]
            following[name] = after.flatten(0, 1)
        here = {name: tensors[name].flatten(0, 1) for name in following}
        actions = {name: tensors[name].flatten(0, 1) for name in spaces.action.column_names("action")}
        return Rows(here, actions, following)

    def state(self) -> Columns:
        return optimization.state_of({f"{name}/": stream for name, stream in self.streams.items()})

    def load_state(self, arrays: Mapping[str, Array]) -> None:
        optimization.load_state_of({f"{name}/": stream for name, stream in self.streams.items()}, arrays)


class ReplayedStream(Rewarding):
    """A signal of an algorithm with a replay buffer, whose critics value the sum of all rewards."""

    def paid(
        self, rows: Rows, known: Tensor, counters: Counters, generator: torch.Generator
    ) -> tuple[Tensor, dict[str, Tensor]]:
        """Returns the current rewards `[B]` of drawn rows and metrics, after training on the rows."""
        with torch.no_grad():
            reward = self._raw(rows, known)
            if self.scaling is not None:
                reward = torch.from_numpy(self.scaling.scaled(reward.cpu().numpy())).to(self._device)
        if not known.any():
            return reward, {}
        terms = self._train(rows.take(known), counters, generator)
        return reward, terms | {f"train/{self._name}_reward": reward[known].mean()}


class ReplayedSignals(RewardSignals):
    """Signals of an algorithm with a replay buffer: rewards are computed when drawn, not stored."""

    stream = ReplayedStream

    @torch.no_grad()
    def observe_batch(self, experience: Sequence[Experience], tensors: Mapping[str, Tensor]) -> None:
        """Updates the reward scaling by an update's fragments, in their order."""
        rows = self._rows(tensors)
        for stream in self.streams.values():
            if stream.scaling is not None:
                stream.observe_batch(experience, tensors, rows)

    def paid(
        self, rows: Rows, reward: Tensor, known: Tensor, counters: Counters, generators: Mapping[str, torch.Generator]
    ) -> tuple[Tensor, dict[str, Tensor]]:
        """Returns the weighted sum `[B]` of the environment's `reward` and all signals', then trains the signals.
        `known` are the rows with a known next observation."""
        total, metrics = self._strength * reward, dict[str, Tensor]()
        for name, stream in self.streams.items():
            known_to_it = known if stream.signal.needs_next else torch.ones_like(known)
            its, terms = stream.paid(rows, known_to_it, counters, generators[name])
            total, metrics = total + stream.strength * its, metrics | terms
        return total, metrics


def _ends(tensors: Mapping[str, Tensor], episodic: bool, among_others: bool) -> dict[str, Tensor]:
    """Returns the ends of returns, `[T, S]`. Returns that are not episodic continue in the slot's next episode, unless
    the next row has no action: after an end in a native environment, for an absent agent, or on an opponent's seat."""
    ended = torch.ones_like(tensors["mask"])
    if not episodic:
        ended[:-1] = ~tensors["mask"][1:]
        after = [array for name, array in tensors.items() if name.startswith("bootstrap_obs")]
        seen = torch.stack([(array != 0).reshape(len(array), -1).any(dim=1) for array in after]).any(dim=0)
        ended[-1] = ~seen & among_others  # a slot without an agent to act has zeros
    return {name: tensors[name] & ended for name in ("terminated", "truncated")}
