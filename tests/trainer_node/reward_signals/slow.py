"""What reward signals are to come to, worked out in NumPy a row at a time from their state."""

from __future__ import annotations

from typing import Any

import numpy as np

from shared.spaces import Array, Columns


def mlp(arrays: Columns, prefix: str, inputs: Array, activation: str) -> Array:
    """One row through an encoder of two layers at most and a head, float64."""
    apply: dict[str, Any] = {"tanh": np.tanh, "relu": lambda x: np.maximum(x, 0.0)}
    for layer in (0, 2, 4):
        if f"{prefix}encoder.mlp.{layer}.weight" in arrays:
            weight, bias = (arrays[f"{prefix}encoder.mlp.{layer}.{part}"] for part in ("weight", "bias"))
            inputs = apply[activation](weight.astype(np.float64) @ inputs + bias)
    found: Array = arrays[f"{prefix}head.weight"].astype(np.float64) @ inputs + arrays[f"{prefix}head.bias"]
    return found


def normalised(arrays: Columns, prefix: str, observation: Array) -> Array:
    """As statistics say, within 5 standard deviations."""
    count, mean, m2 = (arrays[f"{prefix}normaliser.moments.0.{name}"] for name in ("count", "mean", "m2"))
    found: Array = np.clip((observation - mean) / np.sqrt(m2 / count + 1e-8), -5.0, 5.0)
    return found


def next_observation(columns: Columns, step: int, slot: int) -> Array:
    """Where the step led."""
    for number, (t, s) in enumerate(columns["final_index"]):
        if (t, s) == (step, slot):
            final: Array = columns["final_obs"][number]
            return final
    after = np.concatenate([columns["obs"], columns["bootstrap_obs"][None]])
    return np.asarray(after[step + 1, slot])


def ends_here(columns: Columns, step: int, slot: int, episodic: bool) -> bool:
    """Whether a signal's return ends with this step."""
    over = columns["terminated"][step, slot] or columns["truncated"][step, slot]
    goes_on = step + 1 == len(columns["mask"]) or columns["mask"][step + 1, slot]
    return bool(over and (episodic or not goes_on))


def scaled(columns: Columns, reward: Array, gamma: float, episodic: bool) -> Array:
    """Divided by the deviation of all discounted returns, within ± 10."""
    returns = []
    for slot in range(reward.shape[1]):
        running = 0.0
        for step in range(len(reward)):
            running = gamma * running + reward[step, slot]
            if columns["mask"][step, slot]:
                returns.append(running)
            if ends_here(columns, step, slot, episodic):
                running = 0.0
    found: Array = np.clip(reward / np.sqrt(np.var(returns) + 1e-8), -10.0, 10.0)
    return found


def advantages(
    columns: Columns,
    reward: Array,
    value: Any,
    *,
    gamma: float,
    decay: float,
    episodic: bool,
    ratio: Array | None = None,
) -> tuple[Array, Array]:
    """Advantages and targets `[T, S]`: GAE (Schulman et al. 2016, eq. 16), or V-trace (Espeholt et al. 2018, eq. 1).

    `value` is a function of one observation.
    """
    advantage, target = np.zeros(reward.shape), np.zeros(reward.shape)
    for slot in range(reward.shape[1]):
        running = 0.0  # GAE's sum, or v − V of the step after
        for step in reversed(range(len(reward))):
            here = value(columns["obs"][step, slot])
            target[step, slot] = here
            if not columns["mask"][step, slot]:
                running = 0.0
                continue
            ends = ends_here(columns, step, slot, episodic)
            if ends:
                running = 0.0
                follows = 0.0 if columns["terminated"][step, slot] else value(next_observation(columns, step, slot))
            elif step + 1 < len(reward):
                follows = value(columns["obs"][step + 1, slot])
            else:
                follows = value(columns["bootstrap_obs"][slot])
            error = reward[step, slot] + gamma * follows - here
            if ratio is None:
                running = advantage[step, slot] = error + gamma * decay * running
            else:
                advantage[step, slot] = error + gamma * running
                bounded = min(1.0, ratio[step, slot])
                running = bounded * error + gamma * decay * bounded * running
            target[step, slot] = here + running
    return advantage, target
