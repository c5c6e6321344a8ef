"""Off-policy evaluation (docs/guides/offline.md): a policy's expected discounted return, from another one's episodes.

Learning does not depend on it. ρ_t = π(a_t | s_t) / b(a_t | s_t), and ρ_{0:t} is the product of the first t + 1 ratios:

| | estimate | source |
|---|---|---|
| `ips` | mean of Σ γ^t ρ_{0:t} r_t | per-decision importance sampling: Precup, Sutton and Singh 2000 |
| `wis` | Σ γ^t Σ_i ρ^i_{0:t} r^i_t / Σ_i ρ^i_{0:t} | weighted, consistent: Thomas 2015, section 3.8 |
| `dm` | mean of v(s_0) | direct method: Dudík, Langford and Li 2011 |
| `dr` | mean of v(s_0) + Σ γ^t ρ_{0:t} r_t − ρ_0 q(s_0, a_0) | doubly robust (the same), an episode as one round |
| `sequential_dr` | mean of V_0, with V_t = v(s_t) + ρ_t (r_t + γ V_{t+1} − q(s_t, a_t)) | Jiang and Li 2016, eq. 10 |

`ips`, `dr` and `sequential_dr` are unbiased for any q if b is right; `dm` is as good as its q.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch
from torch import Tensor, nn

from stagecoach.shared.base.errors import StagecoachError
from stagecoach.shared.config.run_config import Config
from stagecoach.shared.config.sections import PolicyConfig
from stagecoach.shared.datasets.recording import DatasetReader, Episode, Recording, Recordings
from stagecoach.shared.experience.spaces import Array, Columns, EnvironmentDescription
from stagecoach.shared.policies.continuous import SquashedGaussian
from stagecoach.shared.policies.distributions import ActionDistribution
from stagecoach.shared.policies.encoders import Encoder, ObservationNormalizer
from stagecoach.shared.policies.policy import Policy
from stagecoach.shared.policies.q_network import BestChoice
from stagecoach.shared.policies.registry import borrowed_random_state
from stagecoach.trainer_node.learning.building_blocks.batch import in_chunks
from stagecoach.trainer_node.learning.building_blocks.optimization import Adam, to_device

_LOGGER = logging.getLogger("stagecoach.trainer")
_EVERY_UPDATES = 100
_LEARNING_RATE = 1e-3
_MINIBATCH = 256
_STEPS_PER_ROUND = 50
_SAMPLES = 16

Tensors = dict[str, Tensor]
_LARGEST_LOG_WEIGHT = 60.0
"""Products of ratios are kept finite: e^60 is far beyond where an estimate means anything."""
_FARTHEST = 1e100


@dataclass(frozen=True)
class Evidence:
    """E episodes of up to H steps, float64 `[E, H]`; `mask` is false after an episode's end. The last reward of a
    truncated episode includes the discounted value of what follows."""

    target_log_prob: Array
    behavior_log_prob: Array
    """NaN if unknown."""
    reward: Array
    q: Array
    """Estimated return of the recorded action, followed by the target policy."""
    v: Array
    mask: Array
    gamma: float

    def of(self, which: Array) -> Evidence:
        arrays = {name: value[which] for name, value in vars(self).items() if name != "gamma"}
        return replace(self, **arrays)

    @property
    def log_ratio(self) -> Array:
        """log ρ_t; 0 after the end."""
        return np.where(self.mask, self.target_log_prob - self.behavior_log_prob, 0.0)

    @property
    def weight(self) -> Array:
        """ρ_{0:t}; after the end that of the last step."""
        product: Array = np.exp(np.minimum(np.cumsum(self.log_ratio, axis=1), _LARGEST_LOG_WEIGHT))
        return product

    @property
    def discounted(self) -> Array:
        """γ^t r_t; 0 after the end."""
        counted: Array = np.where(self.mask, self.reward, 0.0) * self.gamma ** np.arange(self.mask.shape[1])
        return counted


def ips(evidence: Evidence) -> float:
    return float((evidence.weight * evidence.discounted).sum(axis=1).mean())


def wis(evidence: Evidence) -> float:
    log_weight = np.cumsum(evidence.log_ratio, axis=1)
    weight = np.exp(log_weight - log_weight.max(axis=0))  # only their proportions count
    return float(((weight / weight.sum(axis=0)) * evidence.discounted).sum())


def dm(evidence: Evidence) -> float:
    return float(evidence.v[:, 0].mean())


def dr(evidence: Evidence) -> float:
    seen = (evidence.weight * evidence.discounted).sum(axis=1)
    expected = evidence.weight[:, 0] * evidence.q[:, 0]
    return float((evidence.v[:, 0] + seen - expected).mean())


def sequential_dr(evidence: Evidence) -> float:
    ratio = np.exp(np.minimum(evidence.log_ratio, _LARGEST_LOG_WEIGHT))
    value = np.zeros(len(evidence.mask))
    for step in reversed(range(evidence.mask.shape[1])):
        surprise = evidence.reward[:, step] + evidence.gamma * value - evidence.q[:, step]
        better = (evidence.v[:, step] + ratio[:, step] * surprise).clip(-_FARTHEST, _FARTHEST)
        value = np.where(evidence.mask[:, step], better, value)
    return float(value.mean())


def effective_episodes(evidence: Evidence) -> float:
    """Returns the effective sample size of the final weights, (Σ w)² / Σ w² (Kish 1965). Trust no estimate near 1."""
    log_weight = evidence.log_ratio.sum(axis=1)
    weight = np.exp(log_weight - log_weight.max())
    return float(weight.sum() ** 2 / (weight**2).sum())


def estimates(evidence: Evidence) -> dict[str, float]:
    """Returns all estimates as metrics, and the number of excluded episodes; `dm` alone if all are excluded."""
    known = ~np.asarray((np.isnan(evidence.behavior_log_prob) & evidence.mask).any(axis=1))
    found = {"ope/dm": dm(evidence), "ope/episodes_left_out": float((~known).sum())}
    if known.any():
        weighed = evidence.of(known)
        found |= {"ope/ips": ips(weighed), "ope/wis": wis(weighed), "ope/dr": dr(weighed)}
        found["ope/sequential_dr"] = sequential_dr(weighed)
        found["ope/effective_episodes"] = effective_episodes(weighed)
    return found


@dataclass(frozen=True)
class Transitions:
    """M transitions: `obs…` and `action…` columns `[M, …]`, the rest `[M]`."""

    observations: Tensors
    actions: Tensors
    reward: Tensor
    terminated: Tensor
    after: Tensors
    """Observations after each step, as `obs…`."""
    returns: Tensor
    """Recorded discounted return from each step on."""

    def __len__(self) -> int:
        return len(self.reward)


class FittedQ(nn.Module):
    """q(s, a) and, for a policy, v(s): fitted Q evaluation (Le, Voloshin and Yue 2019, algorithm 3), a small network.
    It starts as a regression on the recorded returns, which is close if the policies are."""

    def __init__(self, policy: Policy, observations: Tensors, scale: float) -> None:
        """`observations` determine the scale of the inputs, `scale` is that of the returns."""
        super().__init__()
        spaces, plain = policy.spaces, PolicyConfig(hidden_sizes=(), cnn=policy.config.cnn)
        self._normalizer = ObservationNormalizer(spaces.observation, 10.0)
        self._normalizer.update(observations)
        self._observation, self._action = Encoder(spaces.observation, plain), Encoder(spaces.action, plain)
        width = self._observation.features + self._action.features
        self._mlp = nn.Sequential(nn.Linear(width, 64), nn.ReLU(), nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 1))
        self._scale = scale

    def forward(self, observations: Mapping[str, Tensor], actions: Mapping[str, Tensor]) -> Tensor:
        named = {"obs" + name.removeprefix("action"): tensor for name, tensor in actions.items()}
        parts = self._observation(observations, self._normalizer), self._action(named, None)
        value: Tensor = self._mlp(torch.cat(parts, dim=1)).squeeze(-1) * self._scale
        return value

    @torch.no_grad()
    def value(self, policy: Policy, observations: Tensors, generator: torch.Generator) -> Tensor:
        """Returns `[B]`: the mean over all choices of one discrete action, otherwise over sampled actions."""
        (leaf, *others) = policy.spaces.action.leaves

        def of(chunk: Tensors) -> Tensor:
            params = policy.action_parameters(chunk)
            if leaf.kind == "discrete" and not others:
                name = leaf.column("action")
                choices = [{name: torch.full((len(params),), n, device=params.device)} for n in range(leaf.nvec[0])]
                weights = [policy.distribution.log_prob(params, choice).exp() for choice in choices]
            else:
                choices = [policy.distribution.sample(params, generator) for _ in range(_SAMPLES)]
                weights = [torch.full((len(params),), 1 / _SAMPLES, device=params.device)] * _SAMPLES
            values = [weight * self(chunk, choice) for weight, choice in zip(weights, choices, strict=True)]
            return torch.stack(values).sum(dim=0)

        return in_chunks(of, observations)


def fit(policy: Policy, data: Transitions, gamma: float, gradient_steps: int, seed: int) -> FittedQ:
    device = data.reward.device
    horizon = min(1 / (1 - gamma) if gamma < 1 else float(len(data)), float(len(data)))
    scale = max(float(data.reward.abs().mean()) * horizon, 1e-6)
    with borrowed_random_state(seed):
        fitted = FittedQ(policy, data.observations, scale).to(device)
    optimizer = Adam(fitted.parameters(), 1e-8)
    generator, target = torch.Generator().manual_seed(seed), data.returns
    sampling = torch.Generator(device).manual_seed(seed)
    for step in range(gradient_steps):
        if step % _STEPS_PER_ROUND == 0 and step >= gradient_steps // 4:
            after = fitted.value(policy, data.after, sampling)
            target = data.reward + gamma * after * ~data.terminated
        rows = torch.randint(len(data), (min(_MINIBATCH, len(data)),), generator=generator).to(device)
        observations = {name: tensor[rows] for name, tensor in data.observations.items()}
        actions = {name: tensor[rows] for name, tensor in data.actions.items()}
        error = (fitted(observations, actions) - target[rows]) / scale
        optimizer.zero_grad()
        error.square().mean().backward()
        optimizer.step(_LEARNING_RATE * (1 - step / gradient_steps))
    return fitted


class DataEvaluation:
    """Periodically evaluates the trained policies on some of the dataset's episodes."""

    def __init__(self, config: Config, description: EnvironmentDescription, read_dataset: DatasetReader) -> None:
        self._dataset, self._seed = config.dataset, config.seed
        self._wanted = description.of(config.trainable)
        self._gamma = {name: (config.policies[name].algorithm or config.algorithm).gamma for name in config.trainable}
        every = config.dataset.evaluation.every_updates if config.dataset is not None else 0
        self._every = _EVERY_UPDATES if every is None else every
        self._read_dataset = read_dataset
        self.episodes: dict[str, list[Episode]] | None = None

    def figures(self, policy_id: str, policy: Policy, updates: int) -> dict[str, float]:
        """Returns a policy's metrics if an evaluation is due; none if the dataset cannot be read."""
        due = self._every and updates and updates % self._every == 0
        if self._dataset is None or not due or policy_id not in self._gamma:
            return {}
        if not isinstance(policy.distribution, ActionDistribution | SquashedGaussian | BestChoice):
            return {}  # one action of a continuum has no density to compare
        if self.episodes is None:
            try:
                recordings = self._read_dataset(self._dataset, self._wanted)
            except StagecoachError as error:
                _LOGGER.warning("no off-policy evaluation: %s", error)
                recordings = Recordings()
            most = self._dataset.evaluation.episodes
            self.episodes = {name: _chosen(its, most) for name, its in recordings.items()}
        if not (chosen := self.episodes.get(policy_id)):
            return {}
        return evaluate(policy, chosen, self._gamma[policy_id], self._dataset.evaluation.gradient_steps, self._seed)


def _chosen(recording: Recording, most: int) -> list[Episode]:
    """Selects `most` episodes evenly from all with a known first step."""
    listed = [episode for episode in recording.episodes() if episode.begun]
    if not listed:
        _LOGGER.warning("no off-policy evaluation: the dataset has no episode from its beginning")
        return []
    count = min(most, len(listed))
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
    data = _transitions(episodes, gamma, next(policy.parameters()).device)
    return estimates(_evidence(policy, fit(policy, data, gamma, gradient_steps, seed), episodes, data, gamma, seed))


def _transitions(episodes: Sequence[Episode], gamma: float, device: torch.device) -> Transitions:
    def joined(parts: Sequence[Columns]) -> Tensors:
        return {name: to_device(np.concatenate([part[name] for part in parts]), device) for name in parts[0]}

    def observed(rows: slice) -> Tensors:
        return joined([{name: array[rows] for name, array in item.observations.items()} for item in episodes])

    ends = [np.arange(len(item)) == len(item) - 1 for item in episodes]
    terminated = [last & item.terminated for last, item in zip(ends, episodes, strict=True)]
    return Transitions(
        observed(slice(None, -1)),
        joined([item.actions for item in episodes]),
        to_device(np.concatenate([item.reward for item in episodes]), device),
        to_device(np.concatenate(terminated), device),
        observed(slice(1, None)),
        to_device(np.concatenate([_to_go(item.reward, gamma) for item in episodes]), device),
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
