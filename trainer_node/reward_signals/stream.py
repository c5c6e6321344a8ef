"""One signal's stream of rewards: scaled, valued by a network of its own, and made into advantages.

Order of the file: rewards of an update, advantages, learning, state.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

import torch
from torch import Tensor

from shared.algorithm_configs.on_policy import ClippedConfig, OnPolicyConfig
from shared.policies.codec import load_state_arrays, state_arrays
from shared.policies.policy import Policy
from shared.reward_signals_config import SignalConfig
from shared.spaces import Columns
from shared.steps import Counters
from trainer_node.algorithms.adam import Adam
from trainer_node.algorithms.descent import descend
from trainer_node.algorithms.experience import Experience
from trainer_node.algorithms.gae import Estimate
from trainer_node.algorithms.named_arrays import part
from trainer_node.algorithms.outputs import CHUNK, in_chunks
from trainer_node.reward_scaling import RewardScaling
from trainer_node.reward_signals.networks import ValueNetwork
from trainer_node.reward_signals.signal import Rows, Signal

_SIGNAL, _VALUE, _SIGNAL_ADAM, _VALUE_ADAM, _SCALING = "signal/", "value/", "signal_adam/", "value_adam/", "scaling/"


class Stream:
    """A signal, its value network, and their optimisers."""

    def __init__(
        self,
        name: str,
        number: int,
        signal: Signal,
        config: SignalConfig,
        policy: Policy,
        algorithm: OnPolicyConfig,
        device: torch.device,
    ) -> None:
        self.number = number
        self.signal = signal.to(device)
        self.strength = config.strength
        self._name, self._config, self._policy, self._algorithm, self._device = name, config, policy, algorithm, device
        self._value = ValueNetwork(policy).to(device)
        self._learnt = [parameter for parameter in signal.parameters() if parameter.requires_grad]
        self._adam = Adam(self._learnt, algorithm.adam_epsilon)
        self._value_adam = Adam(self._value.parameters(), algorithm.adam_epsilon)
        self._scaling = RewardScaling(config.gamma) if signal.scaled else None

    def look(self, experience: Sequence[Experience], tensors: Mapping[str, Tensor], rows: Rows) -> None:
        """Works out the rewards of `rows` `[T × S]`, whose columns are `tensors` `[T, S, …]`."""
        self._tensors, self._rows = tensors, rows
        self._ends = _ends(tensors, episodic=self._config.episodic)
        self._known = tensors["mask"]
        if self.signal.needs_next:
            unknown = tensors["terminated"].clone()
            unknown[tuple(tensors["final_index"].to(torch.int64).unbind(dim=1))] = False
            self._known = self._known & ~unknown
        reward = torch.zeros_like(tensors["reward"])
        reward[self._known] = self._rewards(rows.take(self._known.flatten()))
        self._reward = reward if self._scaling is None else self._scaled(self._scaling, experience, reward)

    def _rewards(self, rows: Rows) -> Tensor:
        parts = [self.signal.reward(rows.take(slice(at, at + CHUNK))) for at in range(0, len(rows), CHUNK)]
        return torch.cat(parts) if parts else torch.zeros(0, device=self._device)

    def _scaled(self, scaling: RewardScaling, experience: Sequence[Experience], reward: Tensor) -> Tensor:
        """Takes the rewards in, fragment by fragment, then divides all by the deviation so far."""
        raw, over = (tensor.cpu().numpy() for tensor in (reward, self._ends["terminated"] | self._ends["truncated"]))
        at = 0
        for item in experience:
            its = slice(at, at := at + item.columns["reward"].shape[1])
            ends = {"terminated": over[:, its], "truncated": over[:, its]}
            scaling.take_in(item.source, {"reward": raw[:, its], "mask": item.columns["mask"], **ends})
        return torch.from_numpy(scaling.scaled(raw)).to(self._device)

    def advantage(self, estimate: Estimate) -> Tensor:
        """`[T, S]`, of its own rewards and values; the targets are kept until it learns."""
        tensors, names = self._tensors, self._policy.spaces.observation.column_names("obs")
        value = self._values(self._rows.observations).reshape(self._reward.shape)
        bootstrap = self._values({name: tensors["bootstrap_" + name] for name in names})
        index = tensors["final_index"].to(torch.int64)
        kept = self._ends["truncated"][index[:, 0], index[:, 1]]
        final = self._values({name: tensors["final_" + name][kept] for name in names})
        advantage, self._target = estimate(
            value=value, reward=self._reward, bootstrap_value=bootstrap, mask=tensors["mask"],
            terminated=self._ends["terminated"], truncated=self._ends["truncated"],
            final_index=index[kept], final_value=final, gamma=self._config.gamma,
        )  # fmt: skip
        return advantage

    def learn(self, counters: Counters, generator: torch.Generator) -> dict[str, float]:
        """What was looked at: signal and value; answers the metrics."""
        known, bound = self._known.flatten(), self._algorithm.max_grad_norm
        rows, rate = self._rows.take(known), self._config.learning_rate.value(counters)
        history: list[dict[str, Tensor]] = []
        for chosen in self._minibatches(len(rows), generator):
            loss, terms = self.signal.loss(rows.take(chosen), generator)
            descend(loss, self._learnt, self._adam, rate, bound)
            history.append(terms)
        history += self._learn_value(self._algorithm.learning_rate.value(counters), generator)
        names = dict.fromkeys(name for terms in history for name in terms)
        metrics = {name: [terms[name] for terms in history if name in terms] for name in names}
        reward = {f"train/{self._name}_reward": float(self._reward.flatten()[known].mean())}
        return reward | {name: float(torch.stack(values).mean()) for name, values in metrics.items()}

    def _learn_value(self, rate: float, generator: torch.Generator) -> list[dict[str, Tensor]]:
        there, history = self._tensors["mask"].flatten(), []
        observations = {name: tensor[there] for name, tensor in self._rows.observations.items()}
        target = self._target.flatten()[there]
        for chosen in self._minibatches(len(target), generator):
            value = self._value(
                {name: tensor[chosen] for name, tensor in observations.items()}, self._policy.normaliser
            )
            loss = (value - target[chosen]).square().mean()
            descend(loss, list(self._value.parameters()), self._value_adam, rate, self._algorithm.max_grad_norm)
            history.append({f"train/{self._name}_value_loss": loss.detach()})
        return history

    def _minibatches(self, count: int, generator: torch.Generator) -> Iterator[Tensor]:
        """Numbers of rows: in epochs of minibatches where the algorithm has them, else all at once."""
        clipped = self._algorithm if isinstance(self._algorithm, ClippedConfig) else None
        for _ in range(clipped.epochs if clipped else 1) if count else ():
            order = torch.randperm(count, generator=generator).to(self._device)
            yield from order.tensor_split(-(-count // clipped.minibatch_size) if clipped else 1)

    def _values(self, observations: Mapping[str, Tensor]) -> Tensor:
        return in_chunks(lambda rows: self._value(rows, self._policy.normaliser), observations)

    def state(self) -> Columns:
        """Networks, optimisers and statistics as named arrays."""
        arrays: Columns = {}
        for prefix, its in self._parts().items():
            arrays |= {prefix + name: array for name, array in its.items()}
        return arrays

    def _parts(self) -> dict[str, Columns]:
        scaling = {} if self._scaling is None else self._scaling.state()
        return {
            _SIGNAL: state_arrays(self.signal), _VALUE: state_arrays(self._value), _SIGNAL_ADAM: self._adam.state(),
            _VALUE_ADAM: self._value_adam.state(), _SCALING: scaling,
        }  # fmt: skip

    def load_state(self, arrays: Columns) -> None:
        """The inverse of `state`; raises `KeyError`, `IndexError` or `ValueError` where it is another network's."""
        load_state_arrays(self.signal, part(arrays, _SIGNAL))
        load_state_arrays(self._value, part(arrays, _VALUE))
        self._adam.load_state(part(arrays, _SIGNAL_ADAM))
        self._value_adam.load_state(part(arrays, _VALUE_ADAM))
        if self._scaling is not None:
            self._scaling.load_state(part(arrays, _SCALING))


def _ends(tensors: Mapping[str, Tensor], episodic: bool) -> dict[str, Tensor]:
    """`[T, S]`: where returns end. Those that are not episodic go on into the slot's next episode, unless nobody acts
    in the next row (after an end in a native environment, or an agent that is absent from then on).
    """
    ended = torch.ones_like(tensors["mask"])
    if not episodic:
        ended[:-1] = ~tensors["mask"][1:]
        ended[-1] = False
    return {name: tensors[name] & ended for name in ("terminated", "truncated")}
