"""Sampler: environments to columns that the trainer accepts; successors continue exactly."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, cast

import numpy as np
import pytest
import torch
from gymnasium.vector import SyncVectorEnv
from torch import Tensor

from stagecoach.rollout_worker.environments import factory
from stagecoach.rollout_worker.exploration.base import Exploration, RandomActing, Sampling
from stagecoach.shared.base.errors import EnvironmentFailure
from stagecoach.shared.experience.counters import Phase
from stagecoach.shared.experience.spaces import Columns
from stagecoach.shared.policies.actor_critic import Heads, RecurrentActorCritic
from tests.support.environments import small as environments
from tests.support.environments.small import ACTIONS, CHASE, CHASE_POLICIES, MODULE, OBSERVATIONS
from tests.support.environments.stage import Stage, same

TWO_POLICIES = CHASE_POLICIES | {"policies": {"hunter": {"normalize_observations": True}, "prey": {}}}


COUNTING = {"id": f"{MODULE}:Counting"}


def line(environment: dict[str, Any], sections: Mapping[str, Any] = {}, left: Sequence[bytes] = ()) -> Stage:
    """Returns a worker's stage with three environments."""
    return Stage({"num_envs": 3} | environment, left=left, **sections)


def spaces(observation: str, action: str, length: int = 14) -> dict[str, Any]:
    """Returns an environment with these spaces; episodes end in mid-fragment, at its end, and later."""
    kwargs = {"observation": observation, "action": action, "length": length}
    return {"id": f"{MODULE}:AnySpaces", "kwargs": kwargs}


@pytest.mark.parametrize("exploration", [Sampling(), RandomActing()], ids=["sampling", "random"])
@pytest.mark.parametrize(
    ("observation", "action"), [*(("box", name) for name in ACTIONS), *((name, "dict") for name in OBSERVATIONS)]
)
def test_sampler_supports_every_space(observation: str, action: str, exploration: Exploration) -> None:
    sample = Stage(spaces(observation, action, length=4)).sample(6, exploration)
    assert len(sample.episodes) == len(sample.columns["default"]["final_index"]) == 2


def test_nested_spaces_pass_between_processes() -> None:
    there, here = (Stage(spaces("dict", "tuple", length=4) | {"vectorization": kind}) for kind in ("async", "sync"))
    assert same(there.sample(6), here.sample(6))
    there.sampler.close()


@pytest.mark.parametrize("exploration", [Sampling(), RandomActing()], ids=["sampling", "random"])
@pytest.mark.parametrize(
    "environment",
    [
        *({"id": name} for name in ("CartPole-v1", "Pendulum-v1", "MountainCarContinuous-v0", "FrozenLake-v1")),
        {"id": "Acrobot-v1", "max_episode_steps": 9},
        {"id": "Taxi-v4", "max_episode_steps": 5, "info_columns": ["prob"]},
        {"id": "Blackjack-v1"},
        *(spaces(observation, "dict", length=5) for observation in ("tuple", "scalar", "matrix")),
        COUNTING | {"info_columns": ["begun", "depth"], "wrappers": [f"{MODULE}:PauseWrapper"]},
    ],
    ids=lambda environment: "-".join(map(str, (environment["id"], *environment.get("kwargs", {}).values()))),
)
def test_copies_equal_sync_vector_env(
    environment: dict[str, Any], exploration: Exploration, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Compares fragments bit for bit: observations, rewards, ends, last observations, infos and episodes."""
    ours = line(environment)
    monkeypatch.setattr(factory, "Copies", SyncVectorEnv)
    theirs = line(environment)
    for steps in (1, 20, 60):
        assert same(ours.sample(steps, exploration), theirs.sample(steps, exploration))


def test_rows_align_observation_action_and_reward() -> None:
    columns = Stage(COUNTING | {"kwargs": {"ends": "truncated"}}).sample(5).columns["default"]
    assert columns["obs"][:, 0].tolist() == [[0, 0], [1, 0], [2, 0], [0, 1], [1, 1]]
    assert columns["reward"][:, 0].tolist() == [1, 2, 3, 1, 2]
    assert columns["truncated"][:, 0].tolist() == [False, False, True, False, False]
    assert columns["bootstrap_obs"].tolist() == [[2, 1], [2, 1]]
    assert columns["final_index"].tolist() == [[2, 0], [2, 1]]
    assert columns["final_obs"].tolist() == [[3, 0], [3, 0]]


def test_episodes_continue_in_next_fragment() -> None:
    stage = Stage(COUNTING)
    first, second = stage.sample(2), stage.sample(2)
    assert not first.episodes and [record.length for record in second.episodes] == [3, 3]
    assert second.episodes[0].episode_return == 6.0
    assert np.array_equal(first.columns["default"]["bootstrap_obs"], second.columns["default"]["obs"][0])
    assert first.columns["default"]["obs"][0].tolist() == [[0, 0], [0, 0]], "a finished fragment is left alone"


@pytest.mark.parametrize("vectorization", ["sync", "async"])
def test_set_paused_does_not_change_fragments(vectorization: str) -> None:
    environment = COUNTING | {"vectorization": vectorization, "info_columns": ["begun"]}
    plain, told = Stage(environment), Stage(environment | {"wrappers": [f"{MODULE}:PauseWrapper"]})
    for fragment in (1, 2, 3):
        expected, columns = (stage.sample(4).columns["default"] for stage in (plain, told))
        assert columns.pop("info/begun").tolist() == [[fragment] * 2] * 4
        assert np.isnan(expected.pop("info/begun")).all()
        assert columns.keys() == expected.keys() and all(np.array_equal(columns[key], expected[key]) for key in columns)
    for stage in (plain, told):
        stage.sampler.close()


def test_set_paused_reaches_games_and_native(monkeypatch: pytest.MonkeyPatch) -> None:
    told: list[tuple[str, bool]] = []
    for kind in (environments.Chase, environments.TellsPhase, SyncVectorEnv):
        monkeypatch.setattr(kind, "set_paused", lambda self, paused: told.append((type(self).__name__, paused)), False)
    game = Stage(CHASE, **CHASE_POLICIES)
    game.sample(2)
    assert told == [("Chase", paused) for paused in (True, True, False, False, True, True)], "of both copies"
    told.clear()
    native = Stage({"id": f"{MODULE}:phase_vector", "vectorization": "native"})
    native.sampler.set_phase(Phase.TRAIN)
    native.sample(2)
    assert told == [("_PhaseVector", paused) for paused in (True, False, True)]


def test_log_prob_matches_acting_policy() -> None:
    stage = Stage({"id": f"{MODULE}:Noise"})
    columns = stage.sample(7).columns["default"]
    policy = stage.policies["default"]
    with torch.no_grad():
        params = policy.action_parameters({"obs": torch.from_numpy(columns["obs"]).flatten(0, 1)})
        log_prob = policy.distribution.log_prob(params, {"action": torch.from_numpy(columns["action"]).flatten(0, 1)})
    np.testing.assert_allclose(columns["log_prob"].flatten(), log_prob.numpy(), rtol=1e-4, atol=1e-5)
    assert np.abs(columns["action"]).max() > 1, "the action as sampled; only the environment sees it clipped"


@pytest.mark.parametrize(
    ("environment", "sections"),
    [
        ({"id": f"{MODULE}:Noise"}, {}),
        ({"id": "CartPole-v1"}, {}),
        ({"id": "CartPole-v1", "vectorization": "native"}, {}),
        (CHASE, TWO_POLICIES),
    ],
    ids=["continuous", "sync", "native", "two agents"],
)
def test_seed_determines_trajectory(environment: dict[str, Any], sections: dict[str, Any]) -> None:
    one, again, other = (Stage(environment, seed, **sections).sample(8) for seed in (1, 1, 2))
    assert same(one, again) and not same(one, other)


@pytest.mark.parametrize("choices", [False, True], ids=["NaN", "one choice too many"])
def test_unusable_last_observation_is_omitted(choices: bool) -> None:
    columns = Stage({"id": f"{MODULE}:Overshoots", "kwargs": {"choices": choices}}).sample(6).columns["default"]
    assert columns["terminated"][:, 0].tolist() == [False, True] * 3 and not len(columns["final_index"])


@pytest.mark.parametrize(
    ("what", "words"),
    [
        ("observation", r"an observation \(default/obs\) that cannot be learned from: it holds NaN"),
        ("reward", "a reward for policy default that cannot be learned from: it holds NaN"),
        ("choice", " to 7, expected -1 to 3; correct the space"),
        ("shape", "raised ValueError in step"),
        ("exit", "environment 0 raised SystemExit in step: the license is over"),
        ("None", "a reward for policy default that cannot be learned from: it holds NaN"),
        ("chase: None", "raised TypeError in step"),
        ("chase: shape", "raised ValueError in step"),
    ],
)
@pytest.mark.parametrize("exploration", [Sampling(), RandomActing()], ids=["sampling", "random"])
def test_unusable_values_are_environment_failures(what: str, words: str, exploration: Exploration) -> None:
    chase, kwargs = what.startswith("chase: "), {"what": what.removeprefix("chase: ")}
    game: dict[str, Any] = {"id": f"{MODULE}:{'SpoilsTheChase' if chase else 'Spoils'}", "kwargs": kwargs}
    stage = Stage(game | {"api": "pettingzoo"}, **TWO_POLICIES) if chase else Stage(game)
    stage.sample(1, exploration)
    with pytest.raises(EnvironmentFailure, match=words):
        stage.sample(4, exploration)


@pytest.mark.parametrize("vectorization", ["sync", "async"])
def test_info_metrics_are_numbers_only(vectorization: str) -> None:
    stage = Stage({"id": f"{MODULE}:OddInfo", "vectorization": vectorization})
    told = [record.metrics for record in stage.sample(3).episodes]
    stage.sampler.close()
    assert [line["depth"] for line in told] == [30.0, 30.0]
    expected = [1.0, 0.25] if vectorization == "sync" else [1.0, 1.0]
    assert [line["mixed"] for line in told] in (expected, expected[::-1])
    assert all(line.keys() <= {"depth", "mixed", "note"} for line in told)


LSTM: dict[str, Any] = {"core": "lstm", "core_size": 5, "share_encoder": True, "hidden_sizes": [8]}


def recomputed(stage: Stage, policy_id: str, columns: Columns) -> tuple[Tensor, Tensor]:
    """Returns log-probabilities `[T, S]` and final state, computed only from a fragment's columns."""
    policy = cast(RecurrentActorCritic, stage.policies[policy_id])
    tensors = {name: torch.from_numpy(array) for name, array in columns.items()}
    over = tensors["terminated"] | tensors["truncated"] | ~tensors["mask"]
    with torch.no_grad():
        params, _, states = policy.sequence({"obs": tensors["obs"]}, tensors["state_in"], over)
        log_prob = policy.distribution.log_prob(params.flatten(0, 1), {"action": tensors["action"].flatten(0, 1)})
    return log_prob.reshape(over.shape), states[-1].masked_fill(over[-1].unsqueeze(1), 0.0)


@pytest.mark.parametrize(
    ("environment", "sections"),
    [
        ({"id": f"{MODULE}:Noise"}, {"policies": {"default": LSTM}}),
        ({"id": "CartPole-v1", "max_episode_steps": 9}, {"policies": {"default": LSTM}}),
        ({"id": "CartPole-v1", "max_episode_steps": 9}, {"policies": {"default": LSTM | {"core": "gru"}}}),
        ({"id": "CartPole-v1", "vectorization": "native", "max_episode_steps": 9}, {"policies": {"default": LSTM}}),
        (CHASE, CHASE_POLICIES | {"policies": {"hunter": LSTM, "prey": {}}}),
        ({"id": f"{MODULE}:Twins", "api": "pettingzoo"}, {"policies": {"default": LSTM}}),
    ],
    ids=["continuous", "sync", "gru", "native", "two agents", "twins"],
)
def test_recurrent_state_follows_from_state_in(environment: dict[str, Any], sections: dict[str, Any]) -> None:
    stage = Stage(environment, **sections)
    for policy in stage.policies.values():
        with torch.no_grad():
            cast(Heads, policy).head.weight.mul_(100)
    policy_id, state, ended = next(iter(stage.policies)), torch.zeros(1), 0
    for number in range(3):
        columns = stage.sample(8).columns[policy_id]
        if number:
            np.testing.assert_allclose(columns["state_in"], state.numpy(), rtol=1e-5, atol=1e-6)
        else:
            assert not columns["state_in"].any()
        log_prob, state = recomputed(stage, policy_id, columns)
        np.testing.assert_allclose(columns["log_prob"], log_prob.numpy(), rtol=1e-4, atol=1e-5)
        ended += int((columns["terminated"] | columns["truncated"]).sum())
        assert state.any() or (~columns["mask"][-1] | columns["terminated"][-1] | columns["truncated"][-1]).all()
    assert ended or "Noise" in environment["id"]


def test_random_acting_keeps_no_recurrent_state() -> None:
    stage = Stage({"id": f"{MODULE}:Noise"}, policies={"default": LSTM})
    stage.sample(4, RandomActing())
    assert not stage.sample(4).columns["default"]["state_in"].any()
    assert stage.sample(4).columns["default"]["state_in"].any()


STACKED = {"path": "gymnasium.wrappers:FrameStackObservation", "kwargs": {"stack_size": 3}}


LONG_CHASE = CHASE | {"kwargs": {"cat_steps": 12, "mouse_steps": 100}}


WANDERING = {"name": "td3", "exploration": {"kind": "ou", "sigma": 0.05, "theta": 0.15}}


DISTURBED = {"name": "td3", "exploration": {"kind": "parameter_noise", "sigma": 0.3}}


ENSEMBLE = {"name": "dqn", "heads": 5, "prior_scale": 3, "exploration": {"kind": "bootstrapped"}}


@pytest.mark.parametrize(
    ("environment", "sections"),
    [
        ({"id": "CartPole-v1"}, {}),
        pytest.param({"id": "CartPole-v1", "vectorization": "async"}, {}, marks=pytest.mark.exhaustive),
        ({"id": "CartPole-v1", "vectorization": "native", "info_columns": ["x"]}, {}),
        ({"id": "CartPole-v1", "vectorization": "native", "max_episode_steps": 5}, {"policies": {"default": LSTM}}),
        ({"id": "Pendulum-v1", "max_episode_steps": 20}, {}),
        ({"id": "Pendulum-v1", "max_episode_steps": 20}, {"policies": {"default": LSTM | {"core": "gru"}}}),
        ({"id": "CartPole-v1"}, {"policies": {"default": LSTM}}),
        (LONG_CHASE, CHASE_POLICIES | {"policies": {"hunter": LSTM, "prey": {}}}),
        ({"id": "CartPole-v1"}, {"algorithm": ENSEMBLE}),
        ({"id": "Pendulum-v1", "max_episode_steps": 20}, {"algorithm": WANDERING}),
        ({"id": "Pendulum-v1", "max_episode_steps": 20}, {"algorithm": DISTURBED}),
        ({"id": f"{MODULE}:Twins", "api": "pettingzoo"}, {"algorithm": DISTURBED | {"name": "dqn"}}),
        ({"id": "Acrobot-v1", "max_episode_steps": 9}, {}),
        (LONG_CHASE, CHASE_POLICIES),
        (CHASE | {"kwargs": {"cat_steps": 21, "mouse_steps": 42, "counts": False}}, CHASE_POLICIES),
        (CHASE | {"kwargs": {"cat_steps": 3, "mouse_steps": 8, "counts": False}}, CHASE_POLICIES),
        (spaces("dict", "dict"), {}),
        (spaces("tuple", "tuple"), {}),
        (spaces("image", "multi_discrete_matrix") | {"wrappers": [STACKED]}, {}),
        (spaces("matrix", "box64"), {}),
        (spaces("multi_discrete", "multi_binary"), {}),
    ],
    ids=lambda value: str(value.get("id", "")).removeprefix(MODULE) + value.get("vectorization", ""),
)
def test_successor_equals_undisturbed_worker(environment: dict[str, Any], sections: dict[str, Any]) -> None:
    worker = line(environment, sections)
    for _ in range(5):
        worker.sample()
        successor = line(environment, sections, worker.left)
        assert successor.past is not None and successor.sampler.position_digest == successor.past.digest
        assert same(worker.sample(), successor.sample())
        successor.sampler.close()
    worker.sampler.close()


def test_bootstrapped_head_lasts_for_episode() -> None:
    """Each head always takes another of Acrobot's three actions; episodes of 9 steps, fragments of 7."""
    worker = line(
        {"id": "Acrobot-v1", "max_episode_steps": 9}, {"algorithm": ENSEMBLE | {"prior_scale": 0, "heads": 3}}
    )
    policy = worker.policies["default"]
    for name, tensor in policy.named_parameters():
        tensor.data.zero_()
        if name == "advantage.layers.1.bias":
            tensor.data.add_(torch.eye(3).unsqueeze(1))
    columns = [worker.sample().columns["default"] for _ in range(9)]
    actions = np.concatenate([part["action"] for part in columns])
    by_episode = actions.reshape(7, 9, 3)
    assert (by_episode == by_episode[:, :1]).all()
    assert (np.bincount(by_episode[:, 0].flatten(), minlength=3) > 0).all()


@pytest.mark.parametrize("left", [True, False])
def test_ou_noise_lasts_for_episode(left: bool) -> None:
    """Fragments have 8 steps, episodes 20; the policy outputs 0. With `left`, a successor acts each fragment."""
    environment = {"id": "Pendulum-v1", "max_episode_steps": 20, "num_envs": 32}
    worker, columns = line(environment, {"algorithm": WANDERING}), []
    for _ in range(15):
        for parameter in worker.policies["default"].parameters():
            parameter.data.zero_()
        columns.append(worker.sample(8).columns["default"]["action"][..., 0])
        if left:
            worker.sampler.close()
            worker = line(environment, {"algorithm": WANDERING}, worker.left)
    worker.sampler.close()
    noise = np.concatenate(columns).reshape(6, 20, 32).swapaxes(0, 1)
    for lag in (1, 5, 9):
        found = np.corrcoef(noise[:-lag].flatten(), noise[lag:].flatten())[0, 1]
        assert found == pytest.approx(0.85**lag, abs=0.07), f"after {lag} steps"
    assert abs(np.corrcoef(noise[-1, :-1].flatten(), noise[0, 1:].flatten())[0, 1]) < 0.25, "of the next episode"
