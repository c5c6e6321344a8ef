"""What a policy is worth, estimated from experience that another one acted: pure functions over padded episodes.

The value estimated is the expected discounted return of the target policy from where episodes begin. With the ratio
ρ_t = π(a_t | s_t) / b(a_t | s_t), and ρ_{0:t} for the product of the first t + 1 of them:

| | estimate | source |
|---|---|---|
| `ips` | mean of Σ γ^t ρ_{0:t} r_t | per-decision importance sampling: Precup, Sutton and Singh 2000 |
| `wis` | Σ γ^t Σ_i ρ^i_{0:t} r^i_t / Σ_i ρ^i_{0:t} | weighted, consistent: Thomas 2015, section 3.8 |
| `dm` | mean of v(s_0) | direct method: Dudík, Langford and Li 2011 |
| `dr` | mean of v(s_0) + Σ γ^t ρ_{0:t} r_t − ρ_0 q(s_0, a_0) | doubly robust (the same), an episode as one round |
| `sequential_dr` | mean of V_0, with V_t = v(s_t) + ρ_t (r_t + γ V_{t+1} − q(s_t, a_t)) | Jiang and Li 2016, eq. 10 |

`ips`, `dr` and `sequential_dr` are unbiased where b is right, whatever q is; `dm` is as good as its q. All but `dm`
leave out episodes with a step of which b is not known.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np

from shared.spaces import Array

_LARGEST_LOG_WEIGHT = 60.0
"""Products of ratios are kept finite: e^60 is far beyond where an estimate means anything."""
_FARTHEST = 1e100


@dataclass(frozen=True)
class Evidence:
    """E episodes of up to H steps, float64 `[E, H]`; behind an episode's end `mask` is false, and nothing counts.

    Where an episode was stopped by something else than its end, the last reward has what would have followed.
    """

    target_log_prob: Array
    behaviour_log_prob: Array
    """NaN where it is not known."""
    reward: Array
    q: Array
    """Estimated return of the action taken, and the target policy from there on."""
    v: Array
    """Estimated return of the target policy."""
    mask: Array
    gamma: float

    def of(self, which: Array) -> Evidence:
        """Of these episodes alone; `[E]`, bool."""
        arrays = {name: value[which] for name, value in vars(self).items() if name != "gamma"}
        return replace(self, **arrays)

    @property
    def log_ratio(self) -> Array:
        """log ρ_t; 0 behind the end."""
        return np.where(self.mask, self.target_log_prob - self.behaviour_log_prob, 0.0)

    @property
    def weight(self) -> Array:
        """ρ_{0:t}; behind the end that of the last step."""
        product: Array = np.exp(np.minimum(np.cumsum(self.log_ratio, axis=1), _LARGEST_LOG_WEIGHT))
        return product

    @property
    def discounted(self) -> Array:
        """γ^t r_t; 0 behind the end."""
        counted: Array = np.where(self.mask, self.reward, 0.0) * self.gamma ** np.arange(self.mask.shape[1])
        return counted


def ips(evidence: Evidence) -> float:
    """Importance sampling, per decision."""
    return float((evidence.weight * evidence.discounted).sum(axis=1).mean())


def wis(evidence: Evidence) -> float:
    """Weighted importance sampling, per decision."""
    log_weight = np.cumsum(evidence.log_ratio, axis=1)
    weight = np.exp(log_weight - log_weight.max(axis=0))  # only their proportions count
    return float(((weight / weight.sum(axis=0)) * evidence.discounted).sum())


def dm(evidence: Evidence) -> float:
    """The direct method."""
    return float(evidence.v[:, 0].mean())


def dr(evidence: Evidence) -> float:
    """Doubly robust, an episode as one round."""
    seen = (evidence.weight * evidence.discounted).sum(axis=1)
    expected = evidence.weight[:, 0] * evidence.q[:, 0]
    return float((evidence.v[:, 0] + seen - expected).mean())


def sequential_dr(evidence: Evidence) -> float:
    """Doubly robust, step by step."""
    ratio = np.exp(np.minimum(evidence.log_ratio, _LARGEST_LOG_WEIGHT))
    value = np.zeros(len(evidence.mask))
    for step in reversed(range(evidence.mask.shape[1])):
        surprise = evidence.reward[:, step] + evidence.gamma * value - evidence.q[:, step]
        better = (evidence.v[:, step] + ratio[:, step] * surprise).clip(-_FARTHEST, _FARTHEST)
        value = np.where(evidence.mask[:, step], better, value)
    return float(value.mean())


def effective_episodes(evidence: Evidence) -> float:
    """How many episodes the weights at their ends amount to: (Σ w)² / Σ w² (Kish 1965). Near 1, trust no estimate."""
    log_weight = evidence.log_ratio.sum(axis=1)
    weight = np.exp(log_weight - log_weight.max())
    return float(weight.sum() ** 2 / (weight**2).sum())


def estimates(evidence: Evidence) -> dict[str, float]:
    """All of them as metrics, and how many episodes are left out; where these are all, only what can do without b."""
    known = ~np.asarray((np.isnan(evidence.behaviour_log_prob) & evidence.mask).any(axis=1))
    found = {"ope/dm": dm(evidence), "ope/episodes_left_out": float((~known).sum())}
    if known.any():
        weighed = evidence.of(known)
        found |= {
            "ope/ips": ips(weighed),
            "ope/wis": wis(weighed),
            "ope/dr": dr(weighed),
            "ope/sequential_dr": sequential_dr(weighed),
            "ope/effective_episodes": effective_episodes(weighed),
        }
    return found
