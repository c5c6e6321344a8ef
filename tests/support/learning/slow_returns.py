"""GAE and V-trace by their definitions, summed forward step by step in NumPy.

GAE (Schulman et al. 2016, eq. 16): A_t = Σ (γλ)^k δ_{t+k} inside an episode. V-trace (Espeholt et al. 2018, eq. 1 and
remark 2): v_s = V_s + Σ_t γ^{t−s} (Π_{i<t} c_i) δ_t, with δ_t = ρ_t (r_t + γ V_{t+1} − V_t), inside one episode.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from stagecoach.shared.experience.spaces import Array, Columns
from stagecoach.trainer_node.learning.building_blocks.advantages import Trajectories, VTrace, gae, vtrace

COLUMNS = ("reward", "value", "bootstrap_value", "terminated", "truncated", "mask")


@dataclass
class Case:
    """Columns `[T, S]`, in float64 so that only real differences show."""

    log_ratio: Array
    reward: Array
    value: Array
    bootstrap_value: Array
    terminated: Array
    truncated: Array
    mask: Array
    final_value: dict[tuple[int, int], float]
    gamma: float = 0.9
    decay: float = 1.0
    """λ."""
    rho_bar: float = 1.0
    c_bar: float = 1.0

    def trajectories(self) -> Trajectories:
        index = np.array(sorted(self.final_value), np.int64).reshape(-1, 2)
        final = [self.final_value[(int(t), int(s))] for t, s in index]
        columns = {name: torch.from_numpy(getattr(self, name)) for name in COLUMNS}
        finals = {"final_index": torch.from_numpy(index), "final_value": torch.tensor(final, dtype=torch.float64)}
        return Trajectories(**columns, **finals, gamma=self.gamma)

    def gae(self) -> Array:
        return np.asarray(gae(self.trajectories(), self.decay)[0].numpy())

    def vtrace(self) -> VTrace:
        bounds = {"vtrace_lambda": self.decay, "rho_bar": self.rho_bar, "c_bar": self.c_bar}
        return vtrace(self.trajectories(), torch.from_numpy(self.log_ratio), **bounds)

    def slow_gae(self) -> Array:
        steps, slots = self.reward.shape
        return np.array([[self._walk(t, s, weighted=False) for s in range(slots)] for t in range(steps)])

    def slow_vtrace(self) -> tuple[Array, Array, Array]:
        """Targets, advantages and weights by the definition."""
        shape = self.reward.shape
        target = self.value + [[self._walk(t, s, weighted=True) for s in range(shape[1])] for t in range(shape[0])]
        advantage, weight = np.zeros(shape), np.zeros(shape)
        for step, slot in zip(*np.nonzero(self.mask), strict=True):
            after = self._value_after(step, slot, target)
            advantage[step, slot] = self.reward[step, slot] + self.gamma * after - self.value[step, slot]
            weight[step, slot] = min(self.rho_bar, math.exp(self.log_ratio[step, slot]))
        return target, advantage, weight

    def _walk(self, start: int, slot: int, weighted: bool) -> float:
        total, product = 0.0, 1.0
        for step in range(start, len(self.reward)):
            if not self.mask[step, slot]:
                break
            ratio = math.exp(self.log_ratio[step, slot]) if weighted else 1.0
            after = self._value_after(step, slot, self.value)
            delta = self.reward[step, slot] + self.gamma * after - self.value[step, slot]
            total += product * (min(self.rho_bar, ratio) if weighted else 1.0) * delta
            if self.terminated[step, slot] or self.truncated[step, slot]:
                break
            product *= self.gamma * self.decay * (min(self.c_bar, ratio) if weighted else 1.0)
        return float(total)

    def _value_after(self, step: int, slot: int, inside: Array) -> float:
        if self.terminated[step, slot]:
            return 0.0
        if self.truncated[step, slot]:
            return self.final_value[(step, slot)]
        return float(self.bootstrap_value[slot] if step + 1 == len(inside) else inside[step + 1, slot])


def random_case(seed: int, steps: int, slots: int, away: float = 1.0) -> Case:
    """`away` is how far the policy is from the one that acted; a fifth of the rows do not count."""
    random = np.random.default_rng(seed)
    mask = random.random((steps, slots)) >= 0.2
    terminated = (random.random((steps, slots)) < 0.2) & mask
    truncated = (random.random((steps, slots)) < 0.2) & mask
    values = random.normal(size=(4, steps, slots)) * 5
    final = {(int(t), int(s)): float(values[2, t, s]) for t, s in np.argwhere(truncated | terminated)}
    drawn = (float(random.choice(choices)) for choices in ([0.0, 0.9, 1.0], [0.0, 0.95, 1.0], [0.5, 1, 3], [0.5, 1, 2]))
    return Case(
        away * values[3] / 5,
        values[0],
        values[1],
        random.normal(size=slots),
        terminated,
        truncated,
        mask,
        final,
        *drawn,
    )


@torch.no_grad()
def case_of(policy: Any, columns: Columns, restored: Any = lambda value: value, **numbers: float) -> Case:
    """A fragment for the slow estimators, valued by `policy`, whose values are `restored` to the rewards' units; its
    ratios are to the policy that acted."""
    shape = columns["reward"].shape

    def values(prefix: str) -> Any:
        value = policy.value({"obs": torch.from_numpy(columns[f"{prefix}obs"]).reshape(-1, 3)})
        return restored(value).double().numpy()

    params = policy.action_parameters({"obs": torch.from_numpy(columns["obs"]).flatten(0, 1)})
    log_prob = policy.distribution.log_prob(params, {"action": torch.from_numpy(columns["action"]).flatten(0, 1)})
    final = {(int(t), int(s)): float(value) for (t, s), value in zip(columns["final_index"], values("final_"))}
    return Case(
        log_prob.double().numpy().reshape(shape) - columns["log_prob"], columns["reward"].astype(np.float64),
        values("").reshape(shape), values("bootstrap_"), columns["terminated"], columns["truncated"], columns["mask"],
        final, **numbers,
    )  # fmt: skip
