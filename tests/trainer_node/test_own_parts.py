"""The parts of one's own in examples/: trained for real, lost at each version, resumed and replayed bit by bit."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from stagecoach.coordinator.lifecycle.validation import check_description
from stagecoach.rollout_worker.environments.description import describe_environment
from stagecoach.shared.base.errors import ConfigError, UserCodeError
from stagecoach.shared.experience.counters import Counters
from stagecoach.shared.experience.spaces import Columns
from stagecoach.shared.policies.serialization import decode_policy
from stagecoach.trainer_node.learning.learner import make_learner
from stagecoach.trainer_node.learning.reward_signals.base import RewardSignal
from tests.conftest import minimal_config
from tests.support.learning.algorithms import make
from tests.support.learning.experience import random_fragment
from tests.support.runs.game import KEEP, POLICY, Game, NewGame, goes_on_exactly

EXAMPLES = Path(__file__).resolve().parents[2] / "examples"
DQN: dict[str, Any] = {"name": "dqn", "minibatch_size": 16, "gradient_steps_per_env_step": 0.1}
PPO: dict[str, Any] = {"name": "ppo", "minibatch_size": 32, "epochs": 2}
SAC: dict[str, Any] = {"name": "sac", "minibatch_size": 16, "gradient_steps_per_env_step": 0.1}
PENDULUM = {"id": "Pendulum-v1", "num_envs": 2}
BOUNDS = {"low": [-2.4, -3.0, -0.21, -3.0], "high": [2.4, 3.0, 0.21, 3.0], "cells": 4}
LEARNED = '''
import torch
import stagecoach as sc

class Surprise(sc.RewardSignal):
    """Error of a linear model of the next observation, trained with noise."""

    def __init__(self, policy, noise):
        super().__init__(policy)
        self.model, self.noise = torch.nn.Linear(4, 4), noise

    def reward(self, rows):
        return (self.model(rows.observations["obs"]) - rows.next_observations["obs"]).square().mean(dim=1)

    def loss(self, rows, generator):
        observed = rows.observations["obs"]
        observed = observed + self.noise * torch.randn(observed.shape, generator=generator)
        loss = (self.model(observed) - rows.next_observations["obs"]).square().mean()
        return loss, {"train/surprise_loss": loss}
'''
SIGNALS = {
    "novelty": {"kind": "own_reward_signal:CountNovelty", "kwargs": BOUNDS},
    "surprise": {"kind": "own_surprise:Surprise", "kwargs": {"noise": 0.1}, "learning_rate": 1e-2},
}


def network(name: str) -> dict[str, Any]:
    return {"default": {"hidden_sizes": [8], "network": {"path": f"own_network:{name}", "kwargs": {"blocks": 1}}}}


def state_of(game: Game) -> Columns:
    return game.trainer.state.learner.algorithms["default"].state()


def has_network(game: Game) -> None:
    policy, _ = decode_policy(game.latest().objects[POLICY])
    assert policy.kind.startswith("own_network:Residual") and policy.network["blocks"] == 1
    assert any(".blocks.0." in name for name in policy.state_dict())


def has_priorities(game: Game) -> None:
    errors = state_of(game)["replay_buffer/errors"]
    assert len(set(errors[errors > 0].tolist())) > 20, "each drawn transition has its own"


def has_signals(game: Game) -> None:
    state = state_of(game)
    assert state["signals/novelty/signal/counts"].sum() > 100
    assert "signals/surprise/signal_adam/0/exp_avg" in state, "it learned"


Check = Callable[[Game], object]
CASES: dict[str, tuple[dict[str, Any], Check]] = {
    "network-ppo": ({"algorithm": PPO, "policies": network("ResidualActorCritic")}, has_network),
    "network-dqn": ({"algorithm": DQN, "policies": network("ResidualQNetwork")}, has_network),
    "network-sac": ({"algorithm": SAC, "policies": network("ResidualActor"), "environment": PENDULUM}, has_network),
    "loss-ppo": ({"algorithm": PPO | {"name": "own_loss:SimplePolicyOptimization"}}, Game.latest),
    "loss-dqn": ({"algorithm": DQN | {"name": "own_loss:SoftDQN", "temperature": 0.5}}, Game.latest),
    "loss-sac": ({"algorithm": SAC | {"name": "own_loss:GentleSAC"}, "environment": PENDULUM}, Game.latest),
    "replay-buffer": (
        {"algorithm": DQN | {"replay_buffer": {"kind": "own_replay_buffer:RankBased", "capacity": 200}}},
        has_priorities,
    ),
    "reward-signal-ppo": ({"algorithm": PPO | {"reward_signals": SIGNALS}}, has_signals),
    "reward-signal-dqn": ({"algorithm": DQN | {"reward_signals": SIGNALS}}, has_signals),
    "wrapper": (
        {"algorithm": PPO, "environment": {"id": "CartPole-v1", "wrappers": ["own_wrapper:StickyActions"]}}, Game.latest
    ),
}  # fmt: skip


@pytest.fixture(autouse=True)
def _importable(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (tmp_path / "own_surprise.py").write_text(LEARNED)
    monkeypatch.syspath_prepend(str(EXAMPLES))
    monkeypatch.syspath_prepend(str(tmp_path))


@pytest.mark.parametrize("part", CASES)
def test_own_part_resumes_and_replays_exactly(new_game: NewGame, part: str) -> None:
    case, check = CASES[part]
    check(goes_on_exactly(new_game, minimal_config(**case, checkpoint=KEEP, archive="all", stop_at={"updates": 7})))


BAD = """
import torch
import stagecoach as sc

class Narrow(sc.ActorCritic):
    def __init__(self, spaces, config, **network):
        super().__init__(spaces, config, **network)
        self.head = torch.nn.Linear(3, 2)

class Noisy(sc.Encoder):
    def forward(self, observations, normalizer):
        return super().forward(observations, normalizer) + torch.rand(self.features)

class BatchNorm(sc.Encoder):
    def forward(self, observations, normalizer):
        return torch.nn.functional.batch_norm(super().forward(observations, normalizer) + 1, None, None, training=True)

class Random(sc.ActorCritic):
    def make_encoder(self, observation, config):
        return Noisy(observation, config)

class Normalized(sc.ActorCritic):
    def make_encoder(self, observation, config):
        return BatchNorm(observation, config)

class Undefined(sc.ActorCritic):
    def action_parameters(self, observations):
        return super().action_parameters(observations) * float("nan")

class Bare(sc.ActorCritic):
    def __init__(self, *arguments, **network): pass

class Plain(sc.ActorCritic): pass

class Column(sc.ActorCritic):
    def value(self, observations):
        return super().value(observations).unsqueeze(1)

class Net(torch.nn.Module):
    features = 3

    def forward(self, observations, normalizer):
        return observations["position"] if self.features == 4 else observations["obs"]

class Wide(sc.ActorCritic):
    def make_encoder(self, observation, config):
        return Net()

class Keyed(sc.ActorCritic):
    def make_encoder(self, observation, config):
        net = Net()
        net.features = 4
        return net

class Recurrent(sc.RecurrentActorCritic): pass

class Silent(sc.RewardSignal): pass
"""


@pytest.mark.parametrize(
    ("part", "value", "said"),
    [
        ("network", "bad_parts.Plain", "default.network: expected package.module:name, found 'bad_parts.Plain'"),
        ("network", "bad_parts:Silent", "expected a subclass of stagecoach.ActorCritic, found <class"),
        ("network", "bad_parts:Narrow", "network=bad_parts:Narrow: step raised RuntimeError: mat1 and mat2 shapes"),
        ("network", "bad_parts:Column", "Column: value returned [2, 1] for 2 observations; expected [2]"),
        ("network", "bad_parts:Wide", "its actor returned [2, 4] for 2 observations; expected [2, 3], as its `f"),
        ("network", "bad_parts:Keyed", "KeyError: 'position' (at "),
        ("network", "bad_parts:Keyed", "; the observations were obs [2, 4] torch.float32"),
        ("network", "bad_parts:Recurrent", "a recurrent policy if policies.default.core is lstm or gru"),
        ("network", "bad_parts:Random", "step gives other values for the same observation again"),
        ("network", "bad_parts:Normalized", "step raised ValueError: Expected more than 1 value per channel"),
        ("network", "bad_parts:Undefined", "step gives NaN for observations of zeros"),
        ("network", "bad_parts:Bare", r"call super().__init__(spaces, config, **network) in __init__"),
        ("network", {"path": "bad_parts:Plain", "kwargs": {"depth": 1}}, "with {'depth': 1}: it raised TypeError: "),
        ("network", {"path": "bad_parts:Plain", "kwarg": {}}, "did you mean policies.default.network.kwargs?"),
        ("signal", "bad_parts:Plain", "expected a subclass of stagecoach.RewardSignal, found"),
        ("signal", "bad_parts:Silent", "x.kind=bad_parts:Silent: expected a method reward(rows), and super()"),
        ("signal", {"kind": "bad_parts:Silent", "gama": 1}, "did you mean algorithm.reward_signals.x.gamma?"),
        ("signal", {"gamma": 0.9}, "unknown key x; a signal of your own needs kind: module:Class"),
    ],
    ids=str,
)  # fmt: skip
def test_unusable_own_part_is_refused_in_one_line(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, part: str, value: Any, said: str
) -> None:
    (tmp_path / "bad_parts.py").write_text(BAD)
    monkeypatch.syspath_prepend(str(tmp_path))
    sections: dict[str, dict[str, Any]] = {
        "network": {"policies": {"default": {"network": value}}},
        "signal": {"algorithm": {"name": "ppo", "reward_signals": {"x": value}}},
    }
    description = describe_environment(minimal_config())
    with pytest.raises(ConfigError) as refused:
        check_description(minimal_config(**sections[part]), description)
    assert said in str(refused.value) and "\n" not in str(refused.value), refused.value


@pytest.mark.parametrize(
    ("method", "found", "said"),
    [
        ("observe", KeyError("cell"), r"observe\(\) raised KeyError: 'cell' \(at .*test_own_parts"),
        ("reward", ZeroDivisionError(), r"reward\(\) raised ZeroDivisionError"),
        ("reward", torch.zeros(1), r"reward\(\) returned \[1\] of torch.float32; expected a tensor \[\d+\] of finite"),
        ("reward", None, r"reward\(\) returned None; expected a tensor"),
        ("loss", torch.zeros(()), r"loss\(\) returned .*; expected \(loss, metrics\)"),
        ("loss", (torch.zeros(()), {}), r"loss\(\) returned .*; expected a scalar tensor with a gradient"),
        ("loss", (None, {"train/x": 1.0}), r"loss\(\) returned .*; expected \(loss, metrics\)"),
    ],
    ids=str,
)
@pytest.mark.parametrize("name", ["ppo", "dqn"])
def test_own_signal_errors_name_signal_and_method(
    monkeypatch: pytest.MonkeyPatch, name: str, method: str, found: Any, said: str
) -> None:
    def answer(*_: Any) -> Any:
        if isinstance(found, Exception):
            raise found
        return found

    reward = {"reward": lambda _, rows: torch.ones(len(rows))}
    own = type("Own", (RewardSignal,), reward | {method: answer})
    monkeypatch.setattr("stagecoach.shared.base.user_code.import_object", lambda *_, **__: own)
    more: dict[str, Any] = {"gradient_steps_per_env_step": 0.25} if name == "dqn" else {}
    algorithm = make(name, reward_signals={"x": "m:Own"}, **more)
    with pytest.raises(UserCodeError, match=rf"^algorithm\.reward_signals\.x: {said}"):
        algorithm.update([random_fragment(algorithm.policy, seed) for seed in range(2)], Counters(env_steps=40))


def test_own_signals_do_not_depend_on_their_order() -> None:
    description, states = describe_environment(minimal_config()), []
    for names in (list(SIGNALS), list(reversed(SIGNALS))):
        config = minimal_config(
            algorithm=PPO | {"reward_signals": {"rnd": {}} | {name: SIGNALS[name] for name in names}}
        )
        learner = make_learner(config, description)
        states.append(learner.algorithms["default"].state())
    assert [*states[0]] == [*states[1]]
    assert all(np.array_equal(states[0][name], states[1][name]) for name in states[0])
