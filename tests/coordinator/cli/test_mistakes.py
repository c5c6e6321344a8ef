"""Mistakes in configs, in one's own words and in those of other libraries: one line that names the value and what is
expected, from `load_config`, `stagecoach.train` and the command line, and nothing is left behind."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from stagecoach.coordinator.run_access.train import train
from stagecoach.shared.base.errors import ConfigError
from stagecoach.shared.config.loading import load_config
from stagecoach.shared.config.run_config import Config
from stagecoach.shared.config.schema.foreign_words import HINTS
from stagecoach.shared.config.schema.validation import field_paths
from stagecoach.shared.config.sections import RunPolicyConfig
from tests.support.processes.command_line import CONFIG, Stagecoach, check_refused, contents

FIELDS: dict[str, tuple[Any, str]] = {
    # Stable-Baselines3
    "n_steps": (2048, "did you mean rollout.fragment_steps? It counts the steps of each environment"),
    "rollout.n_steps": (2048, "rollout.n_steps; did you mean rollout.fragment_steps?"),
    "lr": (3e-4, "did you mean algorithm.learning_rate?"),
    "algorithm.lr": (3e-4, "unknown key algorithm.lr; did you mean algorithm.learning_rate?"),
    "total_timesteps": (100_000, "did you mean stop_at.env_steps?"),
    "stop_at.total_timesteps": (100_000, "did you mean stop_at.env_steps?"),
    "n_envs": (8, "rollout.workers × environment.num_envs in all"),
    "batch_size": (64, "did you mean algorithm.minibatch_size?"),
    "ent_coef": (0.01, "did you mean algorithm.entropy_coefficient? SAC's is algorithm.initial_temperature"),
    "vf_coef": (0.5, "did you mean algorithm.value_coefficient?"),
    "clip_range": (0.2, "did you mean algorithm.clip_range?"),
    "gae_lambda": (0.95, "did you mean algorithm.gae_lambda?"),
    "buffer_size": (10_000, "did you mean algorithm.replay_buffer? Its size is algorithm.replay_buffer.capacity"),
    "learning_starts": (1000, "did you mean heatup? Give it a unit: heatup: 1000 env_steps"),
    "tau": (0.005, "did you mean algorithm.tau? It is a field of algorithms with a target network"),
    "algorithm.tau": (0.005, "ppo has no such field, but cql, ddpg, dqn"),
    "target_update_interval": (500, "counts gradient steps: the interval × algorithm.gradient_steps_per_env_step (or"),
    "exploration_fraction": (0.1, "where `over` is exploration_fraction × stop_at.env_steps"),
    "n_epochs": (10, "did you mean algorithm.epochs?"),
    "net_arch": ([64, 64], "did you mean policies.default.hidden_sizes?"),
    "policies.default.net_arch": ([64, 64], "did you mean policies.default.hidden_sizes?"),
    "policy": ("MlpPolicy", "MlpPolicy or CnnPolicy follows from the spaces"),
    "verbose": (1, "leave it out: `stagecoach train` shows the run live"),
    "tensorboard_log": ("logs", "did you mean metrics.writers?"),
    "device": ("cuda", "did you mean trainer.device? That of the workers is rollout.device"),
    "eval_freq": (10_000, "did you mean evaluation.every? Give it a unit: 10000 env_steps"),
    "save_freq": (10_000, "did you mean checkpoint.every?"),
    # RLlib
    "num_env_runners": (4, "did you mean rollout.workers?"),
    "num_workers": (4, "did you mean rollout.workers?"),
    "train_batch_size": (4000, "Set it to the batch / (rollout.fragment_steps × environment.num_envs)"),
    "lambda_": (0.95, "V-trace's (impala, appo) is algorithm.vtrace_lambda"),
    "num_sgd_iter": (30, "did you mean algorithm.epochs?"),
    "rollout_fragment_length": (200, "did you mean rollout.fragment_steps?"),
    "framework": ("torch", "leave it out: PyTorch is the only one"),
    "env": ("CartPole-v1", "did you mean environment.id?"),
    "env_config": ({"size": 8}, "RLlib's env_config is one argument of the environment: {config: {…}}"),
    "model.fcnet_hiddens": ([64, 64], "fcnet_hiddens and net_arch are policies.default.hidden_sizes"),
    "policies_to_train": (["a"], "did you mean policies.default.trainable?"),
    "env_runners": ({"num_env_runners": 2}, "did you mean rollout?"),
    "algorithm.kl_coeff": (0.2, "leave it out: PPO has no KL penalty"),
    # CleanRL, Sample Factory, ML-Agents
    "num_steps": (128, "did you mean rollout.fragment_steps?"),
    "update_epochs": (4, "did you mean algorithm.epochs?"),
    "total_frames": (100_000, "did you mean stop_at.env_steps?"),
    "environment.env_frameskip": (4, "did you mean environment.wrappers?"),
    "self_play": ({"window": 10}, "docs/coming-from/ml-agents.md"),
    "policies": (["a", "b"], "found ['a', 'b']; write policies: {a: {}, b: {}}"),
    "policies.second": (None, "policies.second: expected a section, as in {name: value}, found nothing; write "
        "policies.second: {} for its defaults"),
    # one's own
    "rollout.wokers": (4, "did you mean rollout.workers?"),
    "rollout.workers": (2.5, "rollout.workers: expected a whole number, found 2.5"),
    "stop_at.updates": ("ten", "stop_at.updates: expected a whole number, found 'ten'; write the number in digits"),
    "checkpoint.every": (1000, "such as '10 updates', found 1000"),
    "heatup": (1000, "found 1000; write heatup: 1000 env_steps"),
    "environment": ("CartPole-v1", "found 'CartPole-v1'; write environment: {id: CartPole-v1}"),
    "algorithm": ("PPO", "algorithm.name must be one of a2c, appo, bc, cql, ddpg, dqn, impala"),
    "algorithm.name": ("PPOTrainer", "found 'PPOTrainer'; did you mean ppo?"),
    "policies.default.algorithm": ("A3C", "found 'A3C'; nearest here: a2c, which is A3C in lockstep"),
    "policies.default.activation": ("ReLU", "'tanh', 'relu', 'elu' or 'silu', found 'ReLU'; did you mean relu?"),
    "policies.default.transform": ("my_code.double", "found 'my_code.double'; did you mean my_code:double?"),
    "metrics.writers": (["wandb.x:y.z"], "expected csv, jsonl, tensorboard, wandb, mlflow, trackio or package.module"),
    "trainer.device": ("gpu", "trainer.device: expected auto, cpu, cuda or cuda:0, cuda:1 …, found 'gpu'"),
}  # fmt: skip
"""Field → a wrong value, and a part of the message."""


def children() -> str:
    return "".join(path.read_text() for path in Path("/proc/self/task").glob("*/children"))


@pytest.mark.parametrize("field", FIELDS)
def test_mistake_is_refused_in_one_line(field: str, stagecoach: Stagecoach, tmp_path: Path) -> None:
    (value, said), base = FIELDS[field], {**CONFIG, "seed": 1}
    with pytest.raises(ConfigError) as caught:
        load_config(base, {field: value}, {})
    text = str(caught.value)
    assert said in text and "\n" not in text and field.split(".")[0] in text
    with pytest.raises(ConfigError) as caught:
        train(base, **{field: value})
    assert str(caught.value).startswith(text)
    (tmp_path / "config.yaml").write_text(json.dumps(base))
    before = contents(tmp_path), children()
    done = stagecoach("train", "config.yaml", "--run-id", "a", f"--set={field}={json.dumps(value)}")
    check_refused(done, said)
    assert (contents(tmp_path), children()) == before


@pytest.mark.parametrize(
    ("source", "overrides", "said"),
    [
        ("cartpol", (), "no file cartpol in /"),
        ("cartpol", (), "no preset of that name; did you mean cartpole?"),
        ("nowhere/config.yaml", (), "/nowhere/config.yaml; `stagecoach init` writes one"),
        ("x" * 5000, (), "no preset of that name"),
        (Path("/tmp"), (), "cannot read /tmp"),
        (7, (), "a config is a file's path, a preset's name, a dict or a Config, found int 7"),
        ("cartpole", {7: 1}, "expected a field such as 'rollout.workers', found 7"),
        ("cartpole", "seed", "--set expects section.field=value, found 'seed'"),
        ("cartpole", {"environment.kwargs": {"make": open}}, "environment.kwargs.make: expected plain data"),
        ("cartpole", {"environment.kwargs.at": {1, 2}}, "environment.kwargs.at: expected plain data"),
        ({"environment": {"id": "A-v0", "kwargs": {"f": open}}}, (), "environment.kwargs.f: expected plain data"),
        ("cartpole", {"policies": {"a"}}, "map each to its section: {'main': {}}"),
        ("cartpole", {"agents": len}, "map names or patterns to policies: {'player_*': 'main'}"),
        ({"env": "A-v0"}, (), "unknown key env; did you mean environment.id?"),
    ],
    ids=str,
)  # fmt: skip
def test_mistake_in_python_is_refused(source: Any, overrides: Any, said: str) -> None:
    with pytest.raises(ConfigError) as caught:
        load_config(source, overrides, {})
    assert said in str(caught.value) and "\n" not in str(caught.value) and len(str(caught.value)) < 900


def test_hints_name_fields_that_exist() -> None:
    policy = [f"policies.default.{name}" for name in RunPolicyConfig.model_fields]
    known = {*field_paths(Config), *policy, "policies.default", "agents and policies"}
    meant = {word: hint.split("?")[0].removeprefix("did you mean ") for word, hint in HINTS.items() if "?" in hint}
    assert len(meant) > 120 and {word: field for word, field in meant.items() if field not in known} == {}
    assert HINTS.keys() & Config.model_fields.keys() == set()
