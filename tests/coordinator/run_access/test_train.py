"""What `stagecoach.train` takes, and refuses in one line before anything exists; digests of environments' code."""

from __future__ import annotations

import logging
import re
import socket
import subprocess
import sys
import threading
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any, ClassVar

import gymnasium as gym
import numpy as np
import pytest
from gymnasium.envs.classic_control import CartPoleEnv
from gymnasium.envs.registration import EnvSpec

import stagecoach as sc
from stagecoach.coordinator.run_access.run import Run
from stagecoach.rollout_worker import playing
from stagecoach.rollout_worker.environments import objects
from stagecoach.shared.base.errors import ConfigError, UserError
from tests.conftest import minimal_config
from tests.support.processes.command_line import Stagecoach

SMALL: dict[str, Any] = {"rollout.fragment_steps": 8, "evaluation.episodes": 1, "stop_at.updates": 1}


class Mine(gym.Env[Any, Any]):
    """Ends after `size` steps."""

    observation_space: ClassVar[Any] = gym.spaces.Box(-1, 1, (2,), np.float32)  # type: ignore[misc]
    action_space: ClassVar[Any] = gym.spaces.Discrete(2)  # type: ignore[misc]

    def __init__(self, size: int = 4) -> None:
        self.size = size

    def reset(self, *, seed: int | None = None, options: Any = None) -> Any:
        super().reset(seed=seed)
        self.left = self.size
        return np.zeros(2, np.float32), {}

    def step(self, action: Any) -> Any:
        self.left -= 1
        return np.zeros(2, np.float32), 1.0, self.left == 0, False, {}


class Needs(Mine):
    def __init__(self, size: int, depth: int) -> None:
        super().__init__(size)


class FromRllib(Mine):
    def __init__(self, config: dict[str, int]) -> None:
        super().__init__(config["size"])


class OldStep(Mine):
    def step(self, action: Any) -> Any:
        return np.zeros(2, np.float32), 1.0, True, {}


class Plain:
    def play(self) -> None: ...


LOCK = threading.Lock()


class Wide(sc.ActorCritic):
    def make_encoder(self, observation: sc.SpaceSpec, config: sc.PolicyConfig) -> sc.Encoder:
        return sc.Encoder(observation, config.model_copy(update={"hidden_sizes": (5,)}))


MISTAKES: list[tuple[Any, dict[str, Any], str]] = [
    ("cartpol", {}, "'cartpol' is not a preset, a config file or a registered environment; did you mean cartpole"),
    ("CartPole", {}, "did you mean CartPole-v"),
    ("my_envs.make", {}, "did you mean my_envs:make"),
    ("CartPole-v7", {}, "CartPole-v7"),
    ("nowhere:make", {}, "nowhere"),
    ("nowhere/run.yaml", {}, "no config file .*nowhere/run.yaml"),
    ({"environment": {"id": "CartPole-v1"}}, {"config": "cartpole"}, "is a config already"),
    (minimal_config(), {"config": {}}, "is a config already"),
    (7, {}, "int is not an environment .*give its class"),
    (Mine(), {}, "Mine is an instance, but each worker makes its own; give its class"),
    (gym.vector.SyncVectorEnv([Mine]), {}, "SyncVectorEnv is an instance"),
    (gym.vector.SyncVectorEnv, {}, "SyncVectorEnv is a vector environment"),
    (Plain, {}, "Plain is not an environment .no reset and step."),
    (lambda: Plain(), {}, "returned a Plain; environment.api=gymnasium expects a gymnasium.Env"),
    (lambda: None, {}, "it returned nothing: return the environment"),
    (lambda size: Mine(size), {}, "lambda cannot be called with .*missing a required argument: 'size'"),
    (Needs, {"env_kwargs": {"size": 3}}, "Needs cannot be called with .*'depth'"),
    (FromRllib, {"env_kwargs": {"size": 3}}, "FromRllib cannot be .*; give env_kwargs={'config': {'size': 3}}"),
    (FromRllib, {}, "missing a required argument: 'config'; give env_kwargs={'config': {…}}"),
    (Mine, {"env_kwargs": {"length": 3}}, "Mine cannot be called with .*'length'"),
    (Mine, {"env_kwargs": {"size": socket.socket}}, "env_kwargs.size: expected plain data.*socket"),
    (Mine, {"env_kwargs": [3]}, "env_kwargs: expected a dict"),
    (Mine, {"env_kwargs": {1: 2}}, "env_kwargs.1: expected keys that are text, found 1"),
    (Mine, {"env_kwargs": {"size": {1: 2}}}, "env_kwargs.size.1: expected keys that are text, found 1"),
    (OldStep, {}, "step.. returned 4 values"),
    (lambda: LOCK.locked() or Mine(), {}, "lambda cannot be sent to workers: .*lock"),
    (
        gym.make("CartPole-v1"),
        {},
        "TimeLimit is an instance, but each worker makes its own; give its id, 'CartPole-v1'",
    ),
    ("PPO", {}, r"'PPO' is an algorithm; give the environment first: train\('CartPole-v1', algorithm='ppo'\)"),
    (Mine, {"callbacks": [sc.Callback.__new__(sc.Callback)]}, "Callback is an instance.*'kwargs'"),
    (Mine, {"callback": 1}, "callbacks=.Class"),
    (Mine, {"vec_normalize": 1, "wrapper_class": 2}, "normalize_observations.*environment.wrappers"),
    (Mine, {"loud": 1, "louder": 2}, "unknown key loud; unknown key louder; known here: agents"),
    (Mine, {"policy_kwargs": {"features_extractor_class": Mine}}, "unknown key policy_kwargs; did you mean policies"),
    (Mine, {"workers": "many"}, "rollout.workers: expected a whole number"),
    (Mine, {"workers": 2, "rollout.workers": 3}, "rollout.workers: given twice"),
    (Mine, {"algorithm": "pppo"}, "did you mean ppo"),
    (Mine, {"algorithm": {"name": "td3"}}, "continuous actions need Boxes"),
    (Mine, {"rollout.fragment_step": 8}, "did you mean rollout.fragment_steps"),
    (Mine, {"learning_rate": 0.1}, r"algorithm.learning_rate\?; write a dotted field as .*128"),
    (Mine, {"hidden_sizes": [8]}, "did you mean policies.default.hidden_sizes"),
    (
        Mine,
        {"policies.default.network": type("Local", (), {})},
        "default.network: Local cannot be imported by the run's",
    ),
    (
        Mine,
        {"policies.default.network": Mine},
        f"network={__name__}:Mine: .*; an nn.Module of yours goes into its make_",
    ),
    (Mine, {"policies.default.network": {"path": Mine}}, f"found type .*; name its class, as text: {__name__}:Mine"),
    (Mine, {"seed": -1}, "seed: expected 0 or more"),
    (Mine, {"run_id": "a/b"}, "a/b"),
    (Mine, {"run_id": 3}, "run id 3: expected 1 to 64 letters"),
    (Mine, {"runs_dir": "a\nb"}, "runs_dir: expected a folder, found 'a.nb'"),
    (Mine, {"runs_dir": "a\0b"}, "runs_dir: expected a folder, found .*cannot be printed"),
    (Mine, {"callbacks": 3}, "callbacks: 3 cannot be imported"),
    (Mine, {"callbacks": "nowhere:Writer"}, "metrics.writers=nowhere:Writer cannot be imported"),
    (Mine, {"runs_dir": "/proc/nowhere"}, "cannot create the run's folder /proc/nowhere"),
    (Mine, {"environment.wrappers": ["nowhere:Wrapper"]}, "nowhere"),
]


@pytest.mark.parametrize(("what", "arguments", "message"), MISTAKES)
def test_train_refuses_in_one_line_and_leaves_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, what: Any, arguments: dict[str, Any], message: str
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("sys.path", list(sys.path))
    before = threading.active_count()
    with pytest.raises(UserError, match=message) as refused:
        sc.train(what, **SMALL | arguments)
    assert "\n" not in str(refused.value)
    assert list(tmp_path.iterdir()) == []
    assert threading.active_count() == before


@pytest.mark.parametrize(
    ("what", "arguments", "id_"),
    [
        (Mine, {"env_kwargs": {"size": 3}}, f"{__name__}:Mine"),
        (partial(Mine, 3), {}, "object:Mine"),
        (lambda: Mine(), {"config": {"environment": {"id": "CartPole-v1", "num_envs": 2}}}, "object:lambda"),
        (CartPoleEnv, {"environment.max_episode_steps": 20}, "gymnasium.envs.classic_control.cartpole:CartPoleEnv"),
        (lambda: LOCK.locked() or Mine(), {}, "object:lambda"),  # which no other process could get
        ("Own-v0", {}, "object:Own-v0"),
        ("CartPole-v1", {"algorithm": "dqn", "workers": 1, "seed": 7}, "CartPole-v1"),
        ("cartpole", {"algorithm": {"name": "a2c"}}, "CartPole-v1"),
        (minimal_config(), {}, "CartPole-v1"),
    ],
)
def test_train_starts_from_whatever_names_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, what: Any, arguments: dict[str, Any], id_: str
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("sys.path", list(sys.path))
    own: Any = Mine
    monkeypatch.setitem(gym.registry, "Own-v0", EnvSpec("Own-v0", own, max_episode_steps=3))
    run = sc.train(what, inline=True, **SMALL | arguments)
    assert run.wait(100).reason == "exhausted"
    assert run.config.environment.id == id_
    assert run.evaluate(episodes=1).scores["episodes"] == 1
    with pytest.MonkeyPatch.context() as patch:
        patch.delitem(gym.registry, "Own-v0")
        sc.make_environment(run.config).close()


def made(size: int = 3, scale: float = 1.0) -> Mine:
    return Mine(helper(size))


def helper(size: int) -> int:
    return size + 1


def test_digest_follows_code_and_what_it_uses(monkeypatch: pytest.MonkeyPatch) -> None:
    before = objects.digest(made)
    assert before == objects.digest(made)
    assert before != objects.digest(partial(made, scale=2.0))
    assert objects.digest(partial(made, scale=2.0)) != objects.digest(partial(made, scale=3.0))
    monkeypatch.setitem(globals(), "helper", lambda size: size + 2)
    assert objects.digest(made) != before
    monkeypatch.undo()
    monkeypatch.setattr(Mine, "size", 7, raising=False)  # of a class that it makes
    assert objects.digest(made) != before


def test_object_is_no_part_of_the_config() -> None:
    config = minimal_config(environment={"id": "object:Mine", "code_sha256": "0" * 64})
    with pytest.raises(ConfigError, match=r"object of the program .* Run.resume\(RUN, environment=…\)"):
        sc.make_environment(config)
    config.environment.hold(Mine)
    assert isinstance(sc.make_environment(config.replace("seed", 2)), Mine)
    assert "Mine" not in str(config.model_dump()).replace("object:Mine", "")
    assert config.hash() == minimal_config(environment={"id": "object:Mine", "code_sha256": "1" * 64}).hash()


def test_commands_refuse_or_work_without_the_object(stagecoach: Stagecoach, tmp_path: Path) -> None:
    run = sc.train(partial(Mine, 3), inline=True, run_id="own", **SMALL)
    assert run.wait(100).reason == "exhausted"
    config = str(run.folder.path / "config.yaml")
    exported = str(run.export(tmp_path / "exported"))
    for command in (
        ["resume", "own", "--set", "stop_at.updates=2"], ["evaluate", "own"], ["evaluate", exported], ["play", "own"],
        ["train", config], ["check", config],
    ):  # fmt: skip
        done = stagecoach(*command)
        assert done.code == 2, (command, done)
        assert "is an object of the program that started the run" in done.out + done.err, (command, done)
        assert "Traceback" not in done.err and done.err.count("\n") <= 1
    for command in (["status", "own"], ["runs"], ["checkpoints", "own"], ["metrics", "own"], ["league", "own"]):
        done = stagecoach(*command)
        assert "object of the program" not in done.out + done.err, (command, done)
    assert Run.attach("own").evaluate(episodes=1, environment=partial(Mine, 3)).scores["mean_length"] == 3
    with pytest.raises(ConfigError, match="Mine is an instance"):
        Run.resume("own", environment=Mine())
    with pytest.raises(ConfigError, match="'Nothing-v0' is not registered with Gymnasium in this process"):
        Run.resume("own", environment="Nothing-v0")
    more: dict[str, Any] = {"overrides": ("stop_at.updates=2",), "inline": True}
    for call in (
        lambda: Run.resume("own", environment=CartPoleEnv, **more),
        lambda: run.evaluate(environment=CartPoleEnv),
    ):
        with pytest.raises(UserError, match=r"other spaces than the run was started with: .*expected"):
            call()
    assert run.status().reason == "exhausted", "the refused resume did not fail the run"
    with pytest.warns(UserWarning, match="run own: the code of environment object:Mine is not the one"):
        again = Run.resume("own", environment=partial(Mine, 2), **more)
    assert again.wait(100).reason == "exhausted"
    assert again.evaluate(episodes=1).scores["mean_length"] == 2


def test_handle_takes_text_for_folders_and_refuses_in_one_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert sc.train(Mine, inline=True, run_id="own", **SMALL).wait(100).reason == "exhausted"
    run = Run.attach("own", "runs")
    assert run.export("exported").is_relative_to("exported")
    assert Run.resume("own", "runs", ("stop_at.updates=2",), inline=True).wait(100).reason == "exhausted"
    cartpole = sc.load_config("cartpole")
    for mistake, message in (
        (lambda: run.evaluate(episodes=0), "episodes=0: expected at least 1"),
        (lambda: Run.attach(tmp_path / "runs" / "own"), "run id PosixPath.*expected 1 to 64 letters"),  # type: ignore[arg-type]
        (lambda: sc.make_environment("CartPole-v1"), "make_environment takes a run's config"),  # type: ignore[arg-type]
        (lambda: sc.load_config(cartpole, 3), "expects section.field=value, found 3"),  # type: ignore[arg-type]
        (lambda: cartpole.replace(3), "expected dotted fields with their values, .*found 3"),  # type: ignore[arg-type]
    ):
        with pytest.raises(UserError, match=message):
            mistake()


def test_fork_of_a_process_with_runs_refuses_to_start_one(tmp_path: Path) -> None:
    code = (
        "import multiprocessing, stagecoach as sc\n"
        "def again():\n"
        "    try: sc.train('cartpole', inline=True)\n"
        "    except sc.StagecoachError as error: print(error, flush=True)\n"
        "run = sc.train('cartpole', inline=True)\n"
        "child = multiprocessing.get_context('fork').Process(target=again)\n"
        "child.start()\n"
        "child.join()\n"
        "run.abandon()\n"
    )
    done = subprocess.run([sys.executable, "-c", code], cwd=tmp_path, capture_output=True, text=True, timeout=120)
    assert "forked from one that has started runs" in done.stdout, done
    assert done.returncode == 0


class Endless(Mine):
    def step(self, action: Any) -> Any:
        return np.zeros(2, np.float32), 1.0, False, False, {}


@pytest.mark.parametrize("end", [Run.stop, Run.abandon])
def test_endless_evaluation_is_reported_and_ends_with_the_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, end: Callable[[Run], None]
) -> None:
    """An inline run plays in the one thread that learns. Once it has ended, no thread of it is left."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(playing, "_ENDLESS_SECONDS", 0.5)
    before = set(threading.enumerate())
    run = sc.train(Endless, inline=True, **SMALL | {"stop_at.updates": 10**6})
    next(event for event in run if "if episodes may never end, set environment.max_episode_steps" in event.text)
    end(run)
    assert run.wait(100).reason == ("stopped" if end is Run.stop else "abandoned")
    left = {thread.name for thread in set(threading.enumerate()) - before}
    assert left <= {"program-end"}


class Stops(sc.Callback):
    """Leaves a file in the run's folder."""

    def __init__(self, run: sc.WrittenRun, word: str = "seen") -> None:
        super().__init__(run)
        self.word = word

    def on_update(self, row: dict[str, float], env_steps: int) -> None:
        (self.run.needed_folder / f"{self.word}-{env_steps}").touch()


def test_network_is_given_as_class_of_a_module(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """`__main__` of another process is another program, so only a run in this process may name it."""
    monkeypatch.chdir(tmp_path)
    script = type("Scripted", (sc.ActorCritic,), {"__module__": "__main__"})
    monkeypatch.setattr(sys.modules["__main__"], "Scripted", script, raising=False)
    with pytest.raises(
        ConfigError, match=r"network.path=__main__:Scripted: workers and trainer cannot import a script"
    ):
        sc.train(Mine, **SMALL | {"policies.default.network": "__main__:Scripted"})
    run = sc.train(Mine, inline=True, **SMALL | {"policies.default.network": Wide})
    assert str(run.wait(100)) == "reached stop_at"
    assert [str(event) for event in run if event.kind == "state"] == ["state       run finished: reached stop_at"]
    policy = run.policy()
    assert repr(policy) == f"<DeployedPolicy Wide, version {policy.version}>"
    assert policy.network.state_dict()["head.weight"].shape == (2, 5)


def test_callbacks_are_added_to_the_writers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    run = sc.train(
        Mine, inline=True, callbacks=[Stops, "tensorboard", {"path": Stops, "kwargs": {"word": "b"}}], **SMALL
    )
    ended = run.wait(100)
    assert ended.reason == "exhausted"
    assert re.fullmatch(r"<Outcome exhausted: <Status \S+: finished: reached stop_at, env steps .*>>", repr(ended))
    paths = [writer.path for writer in run.config.metrics.writers]
    assert paths[-3:] == [f"{__name__}:Stops", "tensorboard", f"{__name__}:Stops"]
    assert list(tmp_path.rglob("seen-*")) and list(tmp_path.rglob("b-*"))
    with pytest.raises(ConfigError, match=r"is a run; Run.resume\('(\S+)'\) continues it, and initialize_from='\1'"):
        sc.train(run.run_id)

    class Local(sc.Callback):
        pass

    with pytest.raises(ConfigError, match=r"callbacks: Local cannot be imported by the run's other processes"):
        sc.train(Mine, callbacks=[Local], **SMALL)


def test_each_live_run_keeps_its_log(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    fields = SMALL | {"stop_at.updates": 10**6}
    first, second = (sc.train(Mine, inline=True, run_id=name, **fields) for name in ("first", "second"))
    logger = logging.getLogger("stagecoach.coordinator")
    logger.info("both are live")
    second.stop()
    second.wait(100)
    logger.info("one is live")
    first.stop()
    first.wait(100)
    third = sc.train(Mine, inline=True, run_id="third", **SMALL)
    third.wait(100)
    logs = {run.run_id: (run.folder.path / "logs" / "coordinator.log").read_text() for run in (first, second, third)}
    assert [name for name, text in logs.items() if "both are live" in text] == ["first", "second"]
    assert "one is live" in logs["first"]
    assert logs["third"].count("the run is prepared") == 1
    assert logs["first"].count("the run is prepared") == 2, "its own and, beside it, the second's"
