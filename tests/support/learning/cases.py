"""Configs of every algorithm with all that it may have at once, for what is promised of them all."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np

from stagecoach.shared.config.run_config import Config
from tests.support.experience.cartpole_data import played, write_played
from tests.support.experience.datasets import swung, write_recorded
from tests.support.runs.game import small

ON_POLICY_FIELDS: dict[str, dict[str, Any]] = {
    "ppo": {"minibatch_size": 20, "epochs": 2},
    "a2c": {"entropy_coefficient": 0.01},
    "impala": {"normalize_advantages": True, "vtrace_lambda": 0.9},
    "appo": {
        "minibatch_size": 20, "epochs": 2, "target_updates": 3, "clip_against": "target", "kl_coefficient": 0.1,
    },
}  # fmt: skip
"""Settings that fit into an update of 64 transitions."""


def changing(start: float, end: float, kind: str = "linear") -> dict[str, Any]:
    """Schedule over the run of 256 env steps."""
    return {"kind": kind, "start": start, "end": end, "over": "256 env_steps"}


PENDULUM = {"environment": {"id": "Pendulum-v1", "num_envs": 4, "max_episode_steps": 10}}
"""Episodes that are cut off within the run."""
PRIORITIZED = {"kind": "prioritized", "capacity": 5 * 32, "alpha": 0.7, "beta": changing(0.4, 1.0)}
"""Buffer of an odd number of fragments, which wraps in the middle of an update of two."""
UNIFORM = {"kind": "uniform", "capacity": 5 * 64}
DRAWING: dict[str, Any] = {"minibatch_size": 16, "gradient_steps_per_env_step": 0.1, "replay_buffer": PRIORITIZED}
CLONING = {"behavioral_cloning": {"strength": changing(0.5, 0.0), "minibatch_size": 24}}
SIGNAL: dict[str, Any] = {"learning_rate": 1e-2, "hidden_sizes": [6]}
SIGNALS = {"extrinsic": {"strength": 0.5}, "rnd": SIGNAL | {"strength": 0.3}, "icm": SIGNAL | {"strength": 0.2}}
IMITATING: dict[str, Any] = {**CLONING, "reward_signals": SIGNALS | {"gail": SIGNAL}}


def with_core(core: str) -> dict[str, Any]:
    """Sections for a policy with a core, whose episodes are longer than fragments."""
    policy = {"hidden_sizes": [8], "core": core, "core_size": 6, "share_encoder": True}
    return {"policies": {"default": policy | {"normalize_observations": True, "normalize_rewards": True}}}


def averaging() -> dict[str, Any]:
    """Sections for rewards that are learned from as they stand above their moving average."""
    return {"policies": {"default": {"hidden_sizes": [8], "normalize_observations": True, "reward_ewma": 0.1}}}


def team(**policy: Any) -> dict[str, Any]:
    """Sections for two agents of one policy, of which one is out before the other."""
    twins = {"id": "tests.support.environments.small:Twins", "api": "pettingzoo", "num_envs": 4}
    whole = {"hidden_sizes": [8], "normalize_observations": True, "normalize_rewards": True}
    return {"environment": twins, "policies": {"default": whole | policy}}


CASES: dict[str, tuple[str, dict[str, Any], dict[str, Any]]] = {
    "ppo": ("ppo", {"minibatch_size": 20, "epochs": 2, "clip_range": changing(0.3, 0.1)}, {}),
    "ppo, a magnet": (
        "ppo", {"minibatch_size": 20, "epochs": 2, "magnet_coefficient": changing(0.5, 0.1), "magnet_rate": 0.2}, {},
    ),
    "ppo, imitating": ("ppo", ON_POLICY_FIELDS["ppo"] | IMITATING, {}),
    "ppo with a core": ("ppo", {"minibatch_size": 20, "epochs": 2, "target_kl": 0.05}, with_core("lstm")),
    "a2c": ("a2c", {}, averaging()),
    "a2c, imitating": ("a2c", IMITATING, {}),
    "impala": ("impala", {"vtrace_lambda": 0.9}, {}),
    "impala, imitating": ("impala", IMITATING, {}),
    "impala with a core": ("impala", {"vtrace_lambda": 0.9}, with_core("gru")),
    "appo": ("appo", ON_POLICY_FIELDS["appo"], {}),
    "appo, imitating": ("appo", ON_POLICY_FIELDS["appo"] | IMITATING, {}),
    "appo with a core": ("appo", {"minibatch_size": 20, "epochs": 2}, with_core("lstm")),
    "ppo, a team": (
        "ppo", {"minibatch_size": 20, "epochs": 2, "normalize_values": True}, team(critic_observes="team"),
    ),
    "appo, a team": (
        "appo", {"minibatch_size": 20, "epochs": 2, "target_updates": 3, "normalize_values": True},
        team(critic_observes="team"),
    ),
    "vdn": ("vdn", {**DRAWING, "replay_buffer": UNIFORM, "target_update_steps": 5, "team_reward": "sum"}, team()),
    "qmix": ("qmix", {**DRAWING, "replay_buffer": UNIFORM, "target_update_steps": 5, "mixing_units": 4}, team()),
    "dqn": (
        "dqn",
        {**DRAWING, "n_step": 3, "target_update_steps": 5,
         "exploration": {"kind": "epsilon_greedy", "epsilon": changing(0.9, 0.1, "exponential")}},
        {},
    ),
    "dqn, imitating": ("dqn", {**DRAWING, **IMITATING}, {}),
    "dqn, balanced": (
        "dqn", {**DRAWING, "n_step": 3, "replay_buffer": {"kind": "balanced", "capacity": 5 * 32}, "tau": 0.1},
        averaging(),
    ),
    "dqn, an ensemble": (
        "dqn",
        {**DRAWING, "heads": 3, "prior_scale": 2.0, "bootstrap_share": 0.4,
         "exploration": {"kind": "ucb", "coefficient": changing(3.0, 0.1), "epsilon": 0.1}},
        {},
    ),
    "dqn, boltzmann": (
        "dqn", {**DRAWING, "exploration": {"kind": "boltzmann", "temperature": changing(2.0, 0.1)}}, {},
    ),
    "dqn, quantiles": (
        "dqn", {**DRAWING, "n_step": 3, "head": "qr", "quantiles": 7,
                "replay_buffer": {"kind": "uniform", "capacity": 3 * 32}}, {},
    ),
    "dqn, classes": ("dqn", {**DRAWING, "head": "hl_gauss", "atoms": 11, "v_max": 100.0}, {}),
    "dqn, hindsight": (
        "dqn", {**DRAWING, "target_update_steps": 5,
                "replay_buffer": {"kind": "hindsight", "capacity": 5 * 32, "threshold": 0.5, "terminates": True}},
        {"environment": {"id": "benchmarks.learning.environments:BitFlip", "kwargs": {"bits": 4}, "num_envs": 4}},
    ),
    "rainbow": ("rainbow", {**DRAWING, "atoms": 11, "v_max": 100.0, "target_update_steps": 5}, {}),
    "pqn": (
        "pqn", {"minibatch_size": 20, "exploration": {"kind": "epsilon_greedy", "epsilon": changing(0.9, 0.1)}}, {},
    ),
    "r2d2": (
        "r2d2", {**DRAWING, "n_step": 3, "target_update_steps": 5,
                 "exploration": {"kind": "boltzmann", "temperature": 0.5}},
        with_core("lstm"),
    ),
    "r2d2, uniform": (
        "r2d2", {**DRAWING, "replay_buffer": {"kind": "uniform", "capacity": 5 * 32}, "burn_in_fragments": 2},
        with_core("gru"),
    ),
    "sac": ("sac", {**DRAWING, "exploration": {"kind": "gaussian", "sigma": changing(0.5, 0.1)}}, PENDULUM),
    "discrete sac": ("sac", {**DRAWING, **CLONING, "critic_learning_rate": changing(1e-2, 1e-3)}, {}),
    "sac, imitating": ("sac", {**DRAWING, **IMITATING}, PENDULUM),
    "tqc": ("tqc", {**DRAWING, "critics": 3, "quantiles": 5}, PENDULUM),
    "td3": ("td3", {**DRAWING, "exploration": {"kind": "parameter_noise", "sigma": changing(0.3, 0.1)}}, PENDULUM),
    "ddpg": ("ddpg", {**DRAWING, "n_step": 2, "exploration": {"kind": "ou", "sigma": changing(0.3, 0.1)}}, PENDULUM),
    "ddpg, truncated": ("ddpg", {**DRAWING, "exploration": {"kind": "truncated_gaussian", "sigma": 0.4}}, PENDULUM),
    "bc": ("bc", {"minibatch_size": 16, "epochs": 2}, {}),
    "cql": ("cql", {**DRAWING, "largest_gap": 1.0, "cloning_steps": 5, "considered_actions": 2}, PENDULUM),
    "discrete cql": ("cql", {**DRAWING, "largest_gap": 1.0, "cloning_steps": 5}, {}),
    "iql": ("iql", DRAWING, {}),
    "td3_bc": ("td3_bc", DRAWING, PENDULUM),
}  # fmt: skip
"""Name → algorithm, its section, and other sections."""


def config_of(case: str, folder: Path, **more: Any) -> Config:
    """The config of a case, with further sections; `folder` is for what it learns from or imitates."""
    name, fields, others = CASES[case]
    rate = {"learning_rate": changing(3e-3, 1e-4, "cosine")}
    sections = {"algorithm": {"name": name, **rate, **fields}, "stop_at": {"updates": 7}, "heatup": "40 env_steps"}
    data = folder / "data.csv"
    if name in ("bc", "cql", "iql", "td3_bc"):
        sections["dataset"] = {"path": str(data), "evaluation": {"every_updates": 0}}
    elif "behavioral_cloning" in fields:
        sections["demonstrations"] = {"path": str(data)}
    if others is PENDULUM:
        generator, density = np.random.default_rng(0), float(-np.log(4.0))
        shown = swung(4, lambda _: (generator.uniform(-2, 2, 1).astype(np.float32), density))
        write_recorded(data, "Pendulum-v1", shown)
    else:
        write_played(data, played(6, greed=0.5, steps=50))
    return small(**{**sections, **others, **more})
