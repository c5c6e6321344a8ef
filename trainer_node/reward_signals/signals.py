"""The reward signals of one policy: what they add to the policy's advantages, and how they learn.

An algorithm calls in each update: `look` at the experience, `join` the advantages of all signals, and, after its own
gradient steps, `learn`. Signals learn in as many epochs of as large minibatches as the algorithm does. They see all of
the batch on each learner rank, so that ranks need not talk about them.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
import torch
from torch import Tensor

from shared.algorithm_configs.on_policy import OnPolicyConfig
from shared.policies.policy import Policy
from shared.policies.registry import borrowed_random_state
from shared.reward_signals_config import RewardSignalsConfig
from shared.spaces import Array, Columns
from shared.steps import Counters
from trainer_node.algorithms.algorithm import Setting
from trainer_node.algorithms.experience import Experience, update_seed
from trainer_node.algorithms.gae import Estimate
from trainer_node.demonstrations import Demonstrations
from trainer_node.reward_signals.gail import GAIL
from trainer_node.reward_signals.icm import ICM
from trainer_node.reward_signals.rnd import RND
from trainer_node.reward_signals.signal import Rows, Signal
from trainer_node.reward_signals.stream import Stream

ORDER = ("rnd", "icm", "gail")
"""All signals; the place of each decides its random numbers, so new ones come last."""


def make_signal(
    name: str, policy: Policy, config: RewardSignalsConfig, demonstrations: Demonstrations | None
) -> Signal:
    """An untrained one that is configured."""
    if name == "rnd" and config.rnd is not None:
        return RND(policy, config.rnd)
    if name == "icm" and config.icm is not None:
        return ICM(policy, config.icm)
    assert name == "gail" and config.gail is not None
    return GAIL(policy, config.gail, demonstrations)


class RewardSignals:
    """Those that a config asks for."""

    def __init__(
        self, policy: Policy, config: RewardSignalsConfig, algorithm: OnPolicyConfig, setting: Setting
    ) -> None:
        self._policy = policy
        self._strength = config.extrinsic.strength
        self._algorithm = algorithm
        self._seed = setting.seed
        self._streams: dict[str, Stream] = {}
        for number, name in enumerate(ORDER, start=1):
            section = getattr(config, name)
            if section is not None:
                with borrowed_random_state(update_seed(update_seed(setting.seed, 0), number)):
                    signal = make_signal(name, policy, config, setting.demonstrations)
                    self._streams[name] = Stream(name, number, signal, section, policy, algorithm, setting.device)

    def observe(self, tensors: Mapping[str, Tensor]) -> None:
        """Statistics take in the observations of columns `[T, S, …]`; all there is to do in heat-up."""
        names = self._policy.spaces.observation.column_names("obs")
        seen = {name: tensors[name][tensors["mask"]] for name in names}
        for stream in self._streams.values():
            stream.signal.observe(seen)

    @torch.no_grad()
    def look(self, experience: Sequence[Experience], tensors: Mapping[str, Tensor]) -> None:
        """At what an update will learn from: the fragments, and their columns side by side `[T, S, …]`."""
        self.observe(tensors)
        rows = self._rows(tensors)
        for stream in self._streams.values():
            stream.look(experience, tensors, rows)

    @torch.no_grad()
    def join(self, advantage: Tensor, estimate: Estimate) -> Tensor:
        """`[T, S]`: the strengths' sum of all signals' advantages, where `advantage` is that of the environment's."""
        joined = self._strength * advantage
        for stream in self._streams.values():
            joined = joined + stream.strength * stream.advantage(estimate)
        return joined

    def learn(self, counters: Counters) -> dict[str, float]:
        """Learns from what was looked at; answers the metrics."""
        metrics: dict[str, float] = {}
        seed = update_seed(self._seed, counters.updates)
        for stream in self._streams.values():
            generator = torch.Generator().manual_seed(update_seed(seed, stream.number))
            metrics |= stream.learn(counters, generator)
        return metrics

    def _rows(self, tensors: Mapping[str, Tensor]) -> Rows:
        """`[T × S, …]`, those that do not count as well."""
        spaces = self._policy.spaces
        step, slot = tensors["final_index"].to(torch.int64).unbind(dim=1)
        following = {}
        for name in spaces.observation.column_names("obs"):
            after = torch.cat([tensors[name][1:], tensors["bootstrap_" + name].unsqueeze(0)])
            after[step, slot] = tensors["final_" + name]
            following[name] = after.flatten(0, 1)
        here, actions = (
            {name: tensors[name].flatten(0, 1) for name in names}
            for names in (spaces.observation.column_names("obs"), spaces.action.column_names("action"))
        )
        return Rows(here, actions, following)

    def state(self) -> Columns:
        """All that they have learnt, as named arrays."""
        return {
            f"{name}/{key}": array for name, stream in self._streams.items() for key, array in stream.state().items()
        }

    def load_state(self, arrays: Mapping[str, Array]) -> None:
        """The inverse of `state`; raises `KeyError`, `IndexError` or `ValueError` where it is another network's."""
        for name, stream in self._streams.items():
            prefix = name + "/"
            stream.load_state({k.removeprefix(prefix): np.array(v) for k, v in arrays.items() if k.startswith(prefix)})
