"""Who takes part, and with which settings: the same task for all, and each one's own knobs, of which the best is taken.

What is common: CartPole-v1, stepped by gymnasium's vector of plain environments or the peer's own; a batch of 64
environments × 64 steps; policy and value function apart, each with two layers of 64 units and tanh; four passes over a
batch in minibatches of 1024; PyTorch on two processor cores. Observations and returns are not normalized.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

ENVIRONMENTS, STEPS, MINIBATCH, EPOCHS = 64, 64, 1024, 4
BATCH = ENVIRONMENTS * STEPS
LAYERS = (64, 64)
OURS = "Stagecoach"
_WITHOUT_END = 10**9
_PROGRAMS = "benchmarks.contest.programs"


@dataclass(frozen=True)
class Contestant:
    """A library with one of its algorithms."""

    name: str
    program: str
    """The module that trains with it."""
    peer: str | None = None
    """Whose virtual environment it needs; None for this one."""
    library: str = OURS
    speed: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    """Knobs → settings, all of the same task; the fastest is taken."""
    solve: Mapping[str, Any] | None = None
    """Its own settings for CartPole, with which it is to come to the mean return soonest."""
    solve_source: str = ""
    """Where those are from."""


def contestants() -> list[Contestant]:
    """All, Stagecoach first."""
    return [
        Contestant(
            "Stagecoach PPO, policy lag 1", f"{_PROGRAMS}.stagecoach_run", speed=_stagecoach(1),
            solve=_SOLVE_STAGECOACH, solve_source="examples/cartpole.yaml, its schedules falling over 200 k env steps",
        ),
        Contestant("Stagecoach PPO, lockstep", f"{_PROGRAMS}.stagecoach_run", speed=_stagecoach(0)),
        Contestant(
            "RLlib PPO", f"{_PROGRAMS}.rllib_algorithms", "rllib", "RLlib", _rllib("ppo"), _SOLVE_RLLIB,
            "its examples/algorithms/ppo/cartpole_ppo.py, with as many env runners as there are cores",
        ),
        Contestant("RLlib APPO", f"{_PROGRAMS}.rllib_algorithms", "rllib", "RLlib", _rllib("appo")),
        Contestant("RLlib IMPALA", f"{_PROGRAMS}.rllib_algorithms", "rllib", "RLlib", _rllib("impala")),
        Contestant(
            "Sample Factory APPO", f"{_PROGRAMS}.sample_factory_appo", "sample_factory", "Sample Factory",
            _sample_factory(), _SOLVE_SAMPLE_FACTORY, "the command line in its sf_examples/train_gym_env.py",
        ),
        Contestant(
            "Stable-Baselines3 PPO", f"{_PROGRAMS}.stable_baselines3_ppo", "stable_baselines3", "Stable-Baselines3",
            _stable_baselines3(), _SOLVE_STABLE_BASELINES3,
            "RL Zoo's tuned PPO for CartPole-v1, its schedules falling over 200 k env steps",
        ),
    ]  # fmt: skip


def _stagecoach(max_policy_lag: int) -> dict[str, dict[str, Any]]:
    """Checkpoints, and the evaluations that come with them, are none of the others' business: the first one only."""
    found = {}
    for workers in (1, 2):
        config = {
            "environment": {"id": "CartPole-v1", "num_envs": ENVIRONMENTS // workers},
            "policies": {"default": {"hidden_sizes": list(LAYERS), "activation": "tanh"}},
            "algorithm": {"name": "ppo", "epochs": EPOCHS, "minibatch_size": MINIBATCH},
            "rollout": {
                "workers": workers, "fragment_steps": STEPS, "fragments_per_update": workers,
                "max_policy_lag": max_policy_lag,
            },
            "trainer": {"device": "cpu"},
            "evaluation": {"episodes": 1, "num_envs": 1},
            "checkpoint": {"every": "100000 updates"}, "stop_at": {"env_steps": _WITHOUT_END},
        }  # fmt: skip
        found[f"{workers} worker{'s' * (workers > 1)}"] = {"config": config}
    return found


def _rllib(algorithm: str) -> dict[str, dict[str, Any]]:
    """Env runners and learner in processes of their own or the driver's, as its docs have them for one machine."""
    splits = [(0, 0), (1, 0), (2, 0)] if algorithm == "ppo" else [(1, 0), (1, 1), (2, 1)]
    found = {}
    for runners, learners in splits:
        training: dict[str, Any] = {
            "train_batch_size_per_learner": BATCH, "minibatch_size": MINIBATCH, "num_epochs": EPOCHS
        }  # fmt: skip
        if algorithm == "appo":
            training["circular_buffer_iterations_per_batch"] = 1  # the passes are those of num_epochs
        settings = {
            "algorithm": algorithm,
            "processes": runners + learners + 1,
            "env_runners": {
                "num_env_runners": runners, "num_envs_per_env_runner": ENVIRONMENTS // max(1, runners),
                "rollout_fragment_length": STEPS,
            },
            "training": training,
            "learners": {"num_learners": learners},
            "model": {"fcnet_hiddens": list(LAYERS), "fcnet_activation": "tanh", "vf_share_layers": False},
            "reporting": {"min_time_s_per_iteration": 0 if algorithm == "ppo" else 1},
        }  # fmt: skip
        found[f"{runners} env runners, {learners} remote learners"] = settings
    return found


def _sample_factory() -> dict[str, dict[str, Any]]:
    """Asynchronous, double-buffered. V-trace is off, as in its example: with it 2.1.1 fails in its own summaries."""
    common = [
        f"--rollout={STEPS}", f"--batch_size={MINIBATCH}", f"--num_batches_per_epoch={BATCH // MINIBATCH}",
        f"--num_epochs={EPOCHS}", "--use_rnn=False", "--recurrence=1", "--with_vtrace=False", "--nonlinearity=tanh",
        "--actor_critic_share_weights=False", "--normalize_input=False", "--normalize_returns=False",
        "--async_rl=True", "--policy_workers_per_policy=1",
        "--encoder_mlp_layers", *map(str, LAYERS),
    ]  # fmt: skip
    found = {}
    for workers, batched in ((1, False), (2, False), (2, True)):
        own = [f"--num_workers={workers}", f"--num_envs_per_worker={ENVIRONMENTS // workers}",
               "--worker_num_splits=2", f"--batched_sampling={batched}"]  # fmt: skip
        name = f"{workers} worker{'s' * (workers > 1)}{', batched sampling' * batched}"
        found[name] = {"arguments": [*own, *common]}
    return found


def _stable_baselines3() -> dict[str, dict[str, Any]]:
    """In one process, as its docs advise for environments this cheap; one thread of PyTorch, or two."""
    ppo = {"n_steps": STEPS, "batch_size": MINIBATCH, "n_epochs": EPOCHS}
    common = {
        "num_envs": ENVIRONMENTS, "hidden_sizes": list(LAYERS), "activation": "tanh", "total_env_steps": _WITHOUT_END,
        "ppo": ppo,
    }  # fmt: skip
    return {f"{threads} thread{'s' * (threads > 1)}": {"threads": threads, **common} for threads in (1, 2)}


_SOLVE_STAGECOACH: dict[str, Any] = {
    "config": {
        "environment": {"id": "CartPole-v1", "num_envs": 8},
        "algorithm": {
            "name": "ppo", "learning_rate": {"kind": "linear", "start": 1e-3, "end": 0, "over": "200000 env_steps"},
            "clip_range": {"kind": "linear", "start": 0.2, "end": 0, "over": "200000 env_steps"},
            "gamma": 0.98, "gae_lambda": 0.8, "epochs": 10, "minibatch_size": 128,
        },
        "rollout": {"workers": 2, "fragment_steps": 32, "fragments_per_update": 2},
        "trainer": {"device": "cpu"},
        "evaluation": {"episodes": 1, "num_envs": 1},
        "checkpoint": {"every": "100000 updates"},
        "stop_at": {"env_steps": 400_000},
    },
}  # fmt: skip
_SOLVE_RLLIB: dict[str, Any] = {
    "algorithm": "ppo",
    "processes": 3,
    "env_runners": {"num_env_runners": 2, "num_envs_per_env_runner": 16},
    "training": {"lr": 0.0003, "num_epochs": 6, "vf_loss_coeff": 0.01},
    "learners": {"num_learners": 0},
    "model": {"fcnet_hiddens": [32], "fcnet_activation": "linear", "vf_share_layers": True},
    "reporting": {"min_time_s_per_iteration": 0},
}
_SOLVE_SAMPLE_FACTORY: dict[str, Any] = {
    "arguments": [
        "--use_rnn=False", "--num_workers=2", "--num_envs_per_worker=20", "--policy_workers_per_policy=2",
        "--recurrence=1", "--with_vtrace=False", "--batch_size=512", "--reward_scale=0.1", "--save_every_sec=10",
        "--experiment_summaries_interval=10",
    ],
}  # fmt: skip
_SOLVE_STABLE_BASELINES3: dict[str, Any] = {
    "threads": 1,
    "num_envs": 8,
    "hidden_sizes": [64, 64],
    "activation": "tanh",
    "total_env_steps": 200_000,
    "ppo": {
        "n_steps": 32, "batch_size": 256, "gae_lambda": 0.8, "gamma": 0.98, "n_epochs": 20, "ent_coef": 0.0,
        "learning_rate": ["linear", 0.001], "clip_range": ["linear", 0.2],
    },
}  # fmt: skip
