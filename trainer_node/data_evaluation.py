"""Off-policy evaluation while a run learns from recorded experience: figures of a row, never part of what is learnt.

In: the run's dataset, and the policy as it is. Out: the metrics `ope/…`. It is worked out anew each time, from the
dataset, the weights and the run's seed alone.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from shared.config import Config
from shared.datasets.reading import read_dataset
from shared.datasets.recording import Episode
from shared.errors import StagecoachError
from shared.policies.actor import SquashedGaussian
from shared.policies.distributions import ActionDistribution
from shared.policies.policy import Policy
from shared.spaces import Array, Columns, EnvironmentDescription
from trainer_node.fitted_q import FittedQ, Tensors, Transitions, fit
from trainer_node.off_policy_evaluation import Evidence, estimates

_LOGGER = logging.getLogger("stagecoach.trainer")
_EVERY_UPDATES = 100


class DataEvaluation:
    """Evaluates a policy on some of the dataset's episodes, every so many updates."""

    def __init__(self, config: Config) -> None:
        self._dataset = config.dataset
        every = config.dataset.evaluation.every_updates if config.dataset is not None else 0
        self._every = _EVERY_UPDATES if every is None else every
        self._gamma = config.algorithm.gamma
        self._seed = config.seed
        self._episodes: list[Episode] | None = None

    def figures(self, policy: Policy, updates: int) -> dict[str, float]:
        """The metrics where an evaluation is due after this many updates; none where the dataset cannot be read."""
        if self._dataset is None or not self._every:
            return {}
        if not isinstance(policy.distribution, ActionDistribution | SquashedGaussian):
            return {}  # a greedy or noisy policy has no probabilities to compare
        if updates == 0 or updates % self._every:
            return {}
        if self._episodes is None:
            self._episodes = self._read(policy)
        if not self._episodes:
            return {}
        return evaluate(policy, self._episodes, self._gamma, self._dataset.evaluation.gradient_steps, self._seed)

    def _read(self, policy: Policy) -> list[Episode]:
        assert self._dataset is not None
        try:
            alone = EnvironmentDescription({"agent": "default"}, {"default": policy.spaces})
            recording = read_dataset(self._dataset, alone)
        except StagecoachError as error:
            _LOGGER.warning("no off-policy evaluation: %s", error)
            return []
        listed = list(recording.episodes())
        count = min(self._dataset.evaluation.episodes, len(listed))
        chosen = [listed[number * len(listed) // count] for number in range(count)]
        if unknown := sum(bool(np.isnan(episode.log_prob).any()) for episode in chosen):
            _LOGGER.warning(
                "off-policy evaluation: %d of %d episodes have steps whose log_prob is not known; all estimates but "
                "ope/dm leave them out", unknown, count
            )  # fmt: skip
        return chosen


def evaluate(
    policy: Policy, episodes: Sequence[Episode], gamma: float, gradient_steps: int, seed: int
) -> dict[str, float]:
    """All estimates of what `policy` is worth, from these episodes; see trainer_node/off_policy_evaluation.py."""
    device = next(policy.parameters()).device
    data = _transitions(episodes, gamma, device)
    fitted = fit(policy, data, gamma, gradient_steps, seed)
    return estimates(_evidence(policy, fitted, episodes, data, gamma, seed))


def _transitions(episodes: Sequence[Episode], gamma: float, device: torch.device) -> Transitions:
    def joined(parts: Sequence[Columns]) -> Tensors:
        return {name: _tensor(np.concatenate([part[name] for part in parts]), device) for name in parts[0]}

    def observed(rows: slice) -> Tensors:
        return joined([{name: array[rows] for name, array in item.observations.items()} for item in episodes])

    ends = [np.arange(len(item)) == len(item) - 1 for item in episodes]
    terminated = [last & item.terminated for last, item in zip(ends, episodes, strict=True)]
    return Transitions(
        observed(slice(None, -1)),
        joined([item.actions for item in episodes]),
        _tensor(np.concatenate([item.reward for item in episodes]), device),
        _tensor(np.concatenate(terminated), device),
        observed(slice(1, None)),
        _tensor(np.concatenate([_to_go(item.reward, gamma) for item in episodes]), device),
    )


def _to_go(reward: Array, gamma: float) -> Array:
    found, total = np.zeros(len(reward), np.float32), 0.0
    for step in reversed(range(len(reward))):
        total = float(reward[step]) + gamma * total
        found[step] = total
    return found


@torch.no_grad()
def _evidence(
    policy: Policy, fitted: FittedQ, episodes: Sequence[Episode], data: Transitions, gamma: float, seed: int
) -> Evidence:
    generator = torch.Generator(data.reward.device).manual_seed(seed)
    log_prob = policy.distribution.log_prob(policy.action_parameters(data.observations), data.actions)
    after = fitted.value(policy, data.after, generator)
    lengths = np.array([len(item) for item in episodes])
    mask = np.arange(lengths.max())[None] < lengths[:, None]
    stopped = np.arange(lengths.max())[None] == (lengths - 1)[:, None]
    stopped &= ~np.array([item.terminated for item in episodes])[:, None]

    def padded(values: Tensor | Array) -> Array:
        found = np.zeros(mask.shape)
        found[mask] = values.cpu().numpy() if isinstance(values, Tensor) else values
        return found

    return Evidence(
        padded(log_prob),
        padded(np.concatenate([item.log_prob for item in episodes])),
        padded(data.reward) + gamma * padded(after) * stopped,
        padded(fitted(data.observations, data.actions)),
        padded(fitted.value(policy, data.observations, generator)),
        mask,
        gamma,
    )


def _tensor(array: Array, device: torch.device) -> Tensor:
    return torch.from_numpy(np.array(array)).to(device)
