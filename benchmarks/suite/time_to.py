"""Time to X, the whole process: from the start of the command until what a person waits for is there.

The same definition for all: seconds from the start of the process (imports, servers, compilation included) to the first
instant at which the mean return of the last training episodes is reached, of 100 for CartPole-v1 and 20 for Pendulum-v1
(where an episode is 200 steps long, and SAC has learned before 100 have ended). Each library takes its own published
settings; where it has several, all are run in the first round and the fastest in the others.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from benchmarks.contest.contestants import OURS, RLLIB, SETTINGS_AS_OURS, STABLE_BASELINES3, TORCHRL, Contestant
from benchmarks.contest.virtual_environments import NotInstalled
from benchmarks.contest.watching import Program, ProgramFailed, seconds_to
from benchmarks.kit.measure import Measure, Result
from benchmarks.kit.options import Options
from benchmarks.suite.peers import prepared, versions_of

_MOST_SECONDS = 90.0
_AIM = 0.75
"""Ours ÷ Stable-Baselines3's."""
_OF_200_K = {"kind": "linear", "end": 0, "over": "200000 env_steps"}
_CHECKPOINTS = {
    "trainer": {"device": "cpu"}, "evaluation": {"episodes": 1, "num_envs": 1},
    "checkpoint": {"every": "100000 updates"},
}  # fmt: skip
_CARTPOLE_OURS: dict[str, Any] = {
    "environment": {"id": "CartPole-v1", "num_envs": 8},
    "algorithm": {
        "name": "ppo", "learning_rate": {**_OF_200_K, "start": 1e-3}, "clip_range": {**_OF_200_K, "start": 0.2},
        "gamma": 0.98, "gae_lambda": 0.8, "epochs": 10, "minibatch_size": 128,
    },
    "rollout": {"workers": 2, "fragment_steps": 32, "fragments_per_update": 2},
    "stop_at": {"env_steps": 400_000}, **_CHECKPOINTS,
}  # fmt: skip
_CARTPOLE_OVERLAPPED: dict[str, Any] = {
    **_CARTPOLE_OURS,
    "environment": {"id": "CartPole-v1", "num_envs": 16},
    "algorithm": {
        **_CARTPOLE_OURS["algorithm"], "learning_rate": {**_OF_200_K, "start": 1.5e-3}, "epochs": 6,
        "minibatch_size": 256,
    },
    "rollout": {**_CARTPOLE_OURS["rollout"], "max_policy_lag": 1},
}  # fmt: skip
_PENDULUM_OURS = {
    "environment": {"id": "Pendulum-v1", "num_envs": 4},
    "policies": {"default": {"hidden_sizes": [64, 64], "activation": "relu"}},
    "algorithm": {"name": "sac", "learning_rate": 1e-3, "replay_buffer": {"kind": "uniform", "capacity": 20_000}},
    "heatup": "512 env_steps", "rollout": {"workers": 2}, "stop_at": {"env_steps": 40_000}, **_CHECKPOINTS,
}  # fmt: skip
_PENDULUM_PPO_OURS = {
    "environment": {"id": "Pendulum-v1", "num_envs": 8},
    "policies": {"default": {"normalize_observations": True, "normalize_rewards": True}},
    "algorithm": {
        "name": "ppo", "learning_rate": 1e-3, "gamma": 0.9, "gae_lambda": 0.95, "epochs": 10, "minibatch_size": 256,
    },
    "rollout": {"workers": 2, "fragment_steps": 128, "fragments_per_update": 2, "max_policy_lag": 1},
    "stop_at": {"env_steps": 400_000}, **_CHECKPOINTS,
}  # fmt: skip
_SB3_PPO = {
    "algorithm": "ppo", "policy": "MlpPolicy", "vector": "dummy", "threads": 1,
    "policy_kwargs": {"net_arch": {"pi": [64, 64], "vf": [64, 64]}, "activation_fn": "Tanh"},
}  # fmt: skip
_SB3_CARTPOLE: dict[str, Any] = {
    **_SB3_PPO, "environment": "CartPole-v1", "num_envs": 8, "total_env_steps": 200_000,
    "arguments": {
        "n_steps": 32, "batch_size": 256, "gae_lambda": 0.8, "gamma": 0.98, "n_epochs": 20, "ent_coef": 0.0,
        "learning_rate": ["linear", 0.001], "clip_range": ["linear", 0.2],
    },
}  # fmt: skip
_SB3_CARTPOLE_AS_OURS = {
    **_SB3_CARTPOLE, "num_envs": 16,
    "arguments": {
        **_SB3_CARTPOLE["arguments"], "n_steps": 64, "n_epochs": 6, "learning_rate": ["linear", 0.0015],
    },
}  # fmt: skip
_SB3_PENDULUM_PPO = {
    **_SB3_PPO, "environment": "Pendulum-v1", "num_envs": 4, "total_env_steps": 100_000,
    "arguments": {
        "n_steps": 1024, "gae_lambda": 0.95, "gamma": 0.9, "n_epochs": 10, "ent_coef": 0.0, "learning_rate": 1e-3,
        "clip_range": 0.2, "use_sde": True, "sde_sample_freq": 4,
    },
}  # fmt: skip
_SB3_PENDULUM_SAC = {
    "algorithm": "sac", "environment": "Pendulum-v1", "policy": "MlpPolicy", "vector": "dummy", "threads": 1,
    "num_envs": 1, "total_env_steps": 20_000, "policy_kwargs": {}, "arguments": {"learning_rate": 1e-3},
}  # fmt: skip
_TORCHRL = {"threads": 1, "collectors": 1, "compile": False, "layers": [64, 64], "total_env_steps": 400_000}
_TORCHRL_CARTPOLE = {
    **_TORCHRL, "algorithm": "ppo", "environment": "CartPole-v1", "num_envs": 8, "steps": 32, "minibatch": 256,
    "epochs": 20, "arguments": {"lr": 1e-3, "gamma": 0.98, "lmbda": 0.8, "anneal_over": 200_000},
}  # fmt: skip
_TORCHRL_PENDULUM = {
    **_TORCHRL, "algorithm": "sac", "environment": "Pendulum-v1", "num_envs": 4, "steps": 8, "minibatch": 256,
    "epochs": 1, "heatup": 512, "capacity": 20_000, "gradient_steps_per_env_step": 1.0, "arguments": {"lr": 1e-3},
}  # fmt: skip
_RLLIB_CARTPOLE = {
    "environment": "CartPole-v1",
    "processes": 3,
    "env_runners": {"num_env_runners": 2, "num_envs_per_env_runner": 16},
    "training": {"lr": 0.0003, "num_epochs": 6, "vf_loss_coeff": 0.01},
    "model": {"fcnet_hiddens": [32], "fcnet_activation": "linear", "vf_share_layers": True},
}
_ZOO, _SAME = "RL Zoo's tuned settings", "the settings of the RL Zoo, in the loop of TorchRL's examples"


@dataclass(frozen=True)
class Goal:
    """What is waited for."""

    name: str
    mean_return: float
    window: int
    """Of so many training episodes."""
    entered: tuple[Contestant, ...]


GOALS = (
    Goal("CartPole-v1 to 475", 475.0, 100, (
        Contestant(OURS, speed={"PPO": {"config": _CARTPOLE_OURS}, "PPO, lag 1": {"config": _CARTPOLE_OVERLAPPED}},
                   source="examples/cartpole.yaml, over 200 k, and with 16 environments, 6 epochs, lag 1"),
        Contestant(f"{OURS} --inline", speed={"PPO": {"config": _CARTPOLE_OURS, "inline": True}}, source="the same"),
        Contestant(STABLE_BASELINES3, STABLE_BASELINES3, {"PPO": _SB3_CARTPOLE}, source=f"{_ZOO} over 200 k env steps"),
        Contestant(SETTINGS_AS_OURS, STABLE_BASELINES3, {"PPO": _SB3_CARTPOLE_AS_OURS},
                   source="16 environments, 6 epochs and the learning rate of Stagecoach's second settings"),
        Contestant(TORCHRL, TORCHRL, {"PPO": _TORCHRL_CARTPOLE}, source=_SAME),
        Contestant(RLLIB, RLLIB, {"PPO": _RLLIB_CARTPOLE}, source="its examples/algorithms/ppo/cartpole_ppo.py"),
    )),
    Goal("Pendulum-v1 to -200", -200.0, 20, (
        Contestant(OURS, speed={"PPO": {"config": _PENDULUM_PPO_OURS}, "SAC": {"config": _PENDULUM_OURS}},
                   source="examples/pendulum.yaml with lag 1, examples/pendulum_sac.yaml"),
        Contestant(f"{OURS} --inline", speed={"SAC": {"config": _PENDULUM_OURS, "inline": True}},
                   source="examples/pendulum_sac.yaml"),
        Contestant(STABLE_BASELINES3, STABLE_BASELINES3, {"PPO": _SB3_PENDULUM_PPO, "SAC": _SB3_PENDULUM_SAC},
                   source=_ZOO),
        Contestant(TORCHRL, TORCHRL, {"SAC": _TORCHRL_PENDULUM}, source="the settings of examples/pendulum_sac.yaml"),
    )),
)  # fmt: skip


@dataclass
class Entry:
    """One contestant on its way to one goal."""

    goal: Goal
    one: Contestant
    programs: dict[str, Program]
    samples: list[float] = field(default_factory=list)
    late: int = 0

    @property
    def line(self) -> str:
        """Its name in the table."""
        return f"{self.goal.name}: {self.one.name}"


def measure(options: Options) -> Result:
    """Everybody in turns, with another seed in each round."""
    remarks: list[str] = []
    entries = [entry for goal in GOALS for one in goal.entered if (entry := _entry(goal, one, options, remarks))]
    most = 20.0 if options.quick else _MOST_SECONDS
    for repeat in range(1, options.repeats + 1):
        for entry in list(entries):
            try:
                run_entry(entry, repeat, most, options)
            except ProgramFailed as error:
                remarks.append(f"{entry.line} is not measured, it failed in round {repeat}: {error}")
                entries.remove(entry)
    settings = {entry.line: _settings(entry) for entry in entries}
    return Result("time-to", __doc__ or "", measures_of(entries, most), settings, remarks=remarks,
                  versions=versions_of({entry.one.peer for entry in entries}))  # fmt: skip


def _entry(goal: Goal, one: Contestant, options: Options, remarks: list[str]) -> Entry | None:
    if not options.wants(f"{goal.name}: {one.name}"):
        return None
    window = {"window": goal.window}
    try:
        programs = {name: prepared(one, {**own, **window}, options) for name, own in one.speed.items()}
    except NotInstalled as error:
        remarks.append(f"{goal.name}: {one.name} is not measured: {error}")
        return None
    return Entry(goal, one, programs)


def run_entry(entry: Entry, repeat: int, most: float, options: Options) -> None:
    """All of its settings in the first round, of which the fastest stays."""
    found = {}
    for name, program in entry.programs.items():
        seconds = seconds_to(program.seeded(repeat), entry.goal.mean_return, most)
        found[name] = most if seconds is None else seconds
        options.tell(
            f"round {repeat}: {entry.line}, {name}: {'not reached' if seconds is None else f'{seconds:.1f} s'}"
        )
    best = min(found, key=lambda name: found[name])
    entry.programs = {best: entry.programs[best]}
    entry.samples.append(found[best])
    entry.late += found[best] == most


def measures_of(entries: list[Entry], most: float) -> list[Measure]:
    """A line for each, and ours beside Stable-Baselines3's."""
    lines = []
    for entry in entries:
        late = f"; not reached within {most:.0f} s in {entry.late} rounds, counted as that" if entry.late else ""
        others = f" (faster than {', '.join(set(entry.one.speed) - set(entry.programs))})" * (len(entry.one.speed) > 1)
        note = f"{next(iter(entry.programs))}{others}; {entry.one.source}{late}"
        lines.append(Measure(entry.line, "s", entry.samples, better="less", note=note))
    there = {entry.line for entry in entries}
    for entry in entries:
        for one in (STABLE_BASELINES3, SETTINGS_AS_OURS):
            other = f"{entry.goal.name}: {one}"
            if entry.one.name == OURS and other in there:
                aim = _AIM if one == STABLE_BASELINES3 else None
                what = f"{entry.line}, compared with {one}"
                lines.append(Measure(what, "s", entry.samples, against=other, aim=aim, better="less"))
    return lines


def _settings(entry: Entry) -> Mapping[str, Any]:
    ((name, program),) = entry.programs.items()
    return {"from": entry.one.source, "algorithm": name, **program.settings}
