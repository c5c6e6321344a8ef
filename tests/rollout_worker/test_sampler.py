"""The sampler: environments × policies → columns that the trainer accepts; episodes go on across fragments."""

from __future__ import annotations

from typing import Any, cast

import numpy as np
import pytest
import torch
from torch import Tensor

from rollout_worker.environments import make_vector
from rollout_worker.exploration import Exploration, RandomActing, Sampling
from rollout_worker.making import describe_environment
from rollout_worker.sampler import Sample, Sampler
from rollout_worker.trail import Life
from shared import fragment
from shared.config import Config
from shared.errors import EnvironmentFailure
from shared.fragment import Fragment, FragmentHeader
from shared.policies.actor_critic import Heads
from shared.policies.policy import Policy
from shared.policies.recurrent import RecurrentActorCritic
from shared.policies.registry import build_policies
from shared.spaces import Columns, EnvironmentDescription
from shared.steps import Phase
from tests.conftest import minimal_config
from tests.environments_for_tests import ACTIONS, MODULE, OBSERVATIONS

TWO_POLICIES: dict[str, Any] = {
    "policies": {"hunter": {"normalise_observations": True}, "prey": {}},
    "agents": {"cat": "hunter", "mouse": "prey"},
}


class Stage:
    """A sampler with its policies, checked by `fragment.check` at every sample."""

    def __init__(self, environment: dict[str, Any], seed: int = 1, **sections: Any) -> None:
        sections = {"policies": {"default": {"cnn": "small"}}} | sections
        self.config: Config = minimal_config(
            environment={"num_envs": 2} | environment, algorithm={"minibatch_size": 8}, **sections
        )
        self.description: EnvironmentDescription = describe_environment(self.config)
        self.policies: dict[str, Policy] = build_policies(
            self.description.policies, self.config.policies, self.config.algorithm, 0
        )
        self.sampler = Sampler(
            make_vector(self.config.environment, self.description), self.description, Life(seed, 0, 0, 0)
        )

    def sample(self, steps: int, exploration: Exploration | None = None) -> Sample:
        sample = self.sampler.sample(self.policies, exploration or Sampling(), steps)
        header = FragmentHeader(
            "run", "worker-0", 0, 0, Phase.TRAIN, dict.fromkeys(self.policies, 0), steps,
            self.config.environment.num_envs, sample.episodes,
        )  # fmt: skip
        sent = Fragment(header, sample.columns)
        fragment.check(sent, "run", self.description, self.config.state_sizes)
        received = fragment.decode(fragment.encode(sent))
        fragment.check(received, "run", self.description, self.config.state_sizes)
        for policy_id, columns in received.columns.items():
            assert all(np.array_equal(array, sample.columns[policy_id][name]) for name, array in columns.items())
        return sample


def counting(**kwargs: Any) -> dict[str, Any]:
    return {"id": f"{MODULE}:Counting", "kwargs": kwargs}


@pytest.mark.parametrize("exploration", [Sampling(), RandomActing()], ids=["sampling", "random"])
@pytest.mark.parametrize("action", ACTIONS)
def test_every_action_space_is_acted_in(action: str, exploration: Exploration) -> None:
    stage = Stage({"id": f"{MODULE}:AnySpaces", "kwargs": {"observation": "box", "action": action}})
    assert len(stage.sample(6, exploration).episodes) == 2
    stage.sampler.close()


@pytest.mark.parametrize("observation", OBSERVATIONS)
def test_every_observation_space_is_acted_on(observation: str) -> None:
    stage = Stage({"id": f"{MODULE}:AnySpaces", "kwargs": {"observation": observation, "action": "dict"}})
    sample = stage.sample(6)
    assert len(sample.columns["default"]["final_index"]) == 2
    stage.sampler.close()


def test_nested_spaces_also_pass_between_processes() -> None:
    kwargs = {"observation": "dict", "action": "tuple"}
    stage = Stage({"id": f"{MODULE}:AnySpaces", "kwargs": kwargs, "vectorization": "async"})
    here = Stage({"id": f"{MODULE}:AnySpaces", "kwargs": kwargs})
    one, other = stage.sample(6).columns["default"], here.sample(6).columns["default"]
    assert all(np.array_equal(array, other[name]) for name, array in one.items())
    stage.sampler.close()
    here.sampler.close()


def test_rows_hold_what_was_seen_before_the_action_and_paid_after_it() -> None:
    columns = Stage(counting(length=3, ends="truncated")).sample(5).columns["default"]
    assert columns["obs"][:, 0].tolist() == [[0, 0], [1, 0], [2, 0], [0, 1], [1, 1]]
    assert columns["reward"][:, 0].tolist() == [1, 2, 3, 1, 2]
    assert columns["truncated"][:, 0].tolist() == [False, False, True, False, False]
    assert columns["bootstrap_obs"].tolist() == [[2, 1], [2, 1]]
    assert columns["final_index"].tolist() == [[2, 0], [2, 1]]
    assert columns["final_obs"].tolist() == [[3, 0], [3, 0]]


def test_episodes_go_on_in_the_next_fragment() -> None:
    stage = Stage(counting(length=3))
    first, second = stage.sample(2), stage.sample(2)
    assert not first.episodes and [record.length for record in second.episodes] == [3, 3]
    assert second.episodes[0].episode_return == 6.0
    assert np.array_equal(first.columns["default"]["bootstrap_obs"], second.columns["default"]["obs"][0])
    assert first.columns["default"]["obs"][0].tolist() == [[0, 0], [0, 0]], "a finished fragment is left alone"


def test_log_probabilities_are_those_of_the_acting_policy() -> None:
    stage = Stage({"id": f"{MODULE}:Noise"})
    columns = stage.sample(7).columns["default"]
    policy = stage.policies["default"]
    with torch.no_grad():
        params = policy.action_parameters({"obs": torch.from_numpy(columns["obs"]).flatten(0, 1)})
        log_prob = policy.distribution.log_prob(params, {"action": torch.from_numpy(columns["action"]).flatten(0, 1)})
    np.testing.assert_allclose(columns["log_prob"].flatten(), log_prob.numpy(), rtol=1e-4, atol=1e-5)
    assert np.abs(columns["action"]).max() > 1, "the action as sampled; only the environment sees it clipped"


def test_random_acting_knows_its_density() -> None:
    columns = Stage({"id": f"{MODULE}:Noise"}).sample(3, RandomActing()).columns["default"]
    np.testing.assert_allclose(columns["log_prob"], -np.log(4))


def as_bytes(sample: Sample) -> dict[str, bytes]:
    return {f"{p}/{name}": array.tobytes() for p, columns in sample.columns.items() for name, array in columns.items()}


@pytest.mark.parametrize(
    ("environment", "sections"),
    [
        ({"id": f"{MODULE}:Noise"}, {}),
        ({"id": "CartPole-v1"}, {}),
        ({"id": "CartPole-v1", "vectorization": "native"}, {}),
        ({"id": f"{MODULE}:Chase", "api": "pettingzoo"}, TWO_POLICIES),
    ],
    ids=["continuous", "sync", "native", "two agents"],
)
def test_the_seed_decides_the_trajectory(environment: dict[str, Any], sections: dict[str, Any]) -> None:
    samples = [as_bytes(Stage(environment, seed, **sections).sample(8)) for seed in (1, 1, 2)]
    assert samples[0] == samples[1]
    assert samples[0] != samples[2]


def test_native_rows_of_reset_are_masked_and_no_episode_is_counted_twice() -> None:
    stage = Stage({"id": "CartPole-v1", "vectorization": "native", "num_envs": 4, "max_episode_steps": 9})
    sample = stage.sample(60)
    columns = sample.columns["default"]
    over = columns["terminated"] | columns["truncated"]
    assert np.array_equal(columns["mask"][1:], ~over[:-1]) and columns["mask"][0].all()
    assert not columns["reward"][~columns["mask"]].any() and not over[~columns["mask"]].any()
    assert len(sample.episodes) == over.sum() > 20
    assert sum(record.length for record in sample.episodes) <= columns["mask"].sum()


def test_two_agents_fill_the_columns_of_their_policies() -> None:
    stage = Stage(
        {"id": f"{MODULE}:Chase", "api": "pettingzoo", "kwargs": {"cat_steps": 2, "mouse_steps": 4}}, **TWO_POLICIES
    )
    sample = stage.sample(9)
    hunter, prey = sample.columns["hunter"], sample.columns["prey"]
    assert hunter["obs"].shape == (9, 2, 3) and prey["obs"].shape == (9, 2, 2)
    assert hunter["mask"][:, 0].tolist() == [True, True, False, False] * 2 + [True]
    assert hunter["terminated"][:, 0].tolist() == [False, True, False, False] * 2 + [False]
    assert prey["mask"].all() and prey["truncated"][:, 1].tolist() == [False, False, False, True] * 2 + [False]
    assert prey["final_index"].tolist() == [[3, 0], [3, 1], [7, 0], [7, 1]]
    assert hunter["final_index"].tolist() == [[1, 0], [1, 1], [5, 0], [5, 1]]
    assert hunter["final_obs"][:, :2].tolist() == [[2, 0], [2, 0], [2, 1], [2, 1]], "the cat's terminated"
    assert prey["final_obs"].tolist() == [[4, 0], [4, 0], [4, 1], [4, 1]]
    assert not hunter["obs"][~hunter["mask"]].any()
    assert [record.length for record in sample.episodes] == [4] * 4
    for record in sample.episodes:
        assert record.episode_return == pytest.approx(sum(record.agent_returns.values()))
    total = hunter["reward"][:8].sum() + prey["reward"][:8].sum()
    assert sum(record.episode_return for record in sample.episodes) == pytest.approx(float(total), rel=1e-5)


@pytest.mark.parametrize("choices", [False, True], ids=["NaN", "one choice too many"])
def test_a_last_observation_beyond_its_space_is_unknown_and_costs_nothing_else(choices: bool) -> None:
    columns = Stage({"id": f"{MODULE}:Overshoots", "kwargs": {"choices": choices}}).sample(6).columns["default"]
    assert columns["terminated"][:, 0].tolist() == [False, True] * 3 and not len(columns["final_index"])


@pytest.mark.parametrize(
    ("what", "words"),
    [
        ("observation", r"an observation \(default/obs\) that cannot be learned from: it holds NaN"),
        ("reward", "a reward for policy default that cannot be learned from: it holds NaN"),
        ("choice", " to 7, expected -1 to 3; correct the space"),
        ("shape", "raised ValueError in step"),
        ("exit", "environment 0 raised SystemExit in step: the licence is over"),
        ("None", "a reward for policy default that cannot be learned from: it holds NaN"),
    ],
)
@pytest.mark.parametrize("exploration", [Sampling(), RandomActing()], ids=["sampling", "random"])
def test_what_cannot_be_learned_from_is_a_failure_of_the_environment(
    what: str, words: str, exploration: Exploration
) -> None:
    stage = Stage({"id": f"{MODULE}:Spoils", "kwargs": {"what": what}})
    stage.sample(1, exploration)
    with pytest.raises(EnvironmentFailure, match=words):
        stage.sample(4, exploration)


@pytest.mark.parametrize("vectorization", ["sync", "async"])
def test_of_an_info_only_numbers_count_and_none_of_them_changes(vectorization: str) -> None:
    stage = Stage({"id": f"{MODULE}:OddInfo", "vectorization": vectorization})
    told = [record.metrics for record in stage.sample(3).episodes]
    stage.sampler.close()
    assert [line["depth"] for line in told] == [30.0, 30.0]
    expected = [1.0, 0.25] if vectorization == "sync" else [1.0, 1.0]
    assert [line["mixed"] for line in told] in (expected, expected[::-1])
    assert all(line.keys() <= {"depth", "mixed", "note"} for line in told)


@pytest.mark.parametrize("what", ["None", "shape"])
def test_what_no_column_holds_is_a_failure_of_the_environment(what: str) -> None:
    game = {"id": f"{MODULE}:SpoilsTheChase", "api": "pettingzoo", "kwargs": {"what": what}}
    with pytest.raises(EnvironmentFailure, match=r"raised (TypeError|ValueError) in step"):
        Stage(game, **TWO_POLICIES).sample(4)


def test_agents_of_one_policy_are_slots_beside_each_other() -> None:
    stage = Stage(
        {"id": f"{MODULE}:Twins", "api": "pettingzoo", "num_envs": 3},
        policies={"default": {}},
    )  # fmt: skip
    columns = stage.sample(4).columns["default"]
    assert columns["obs"].shape == (4, 6, 2)
    assert columns["obs"][0, :, 1].tolist() == [0, 0, 0, 1, 1, 1], "agent 0 of all environments, then agent 1"
    assert columns["terminated"][:, 0].tolist() == [False, True, False, False]
    assert columns["mask"][:, 3].tolist() == [True] * 4 and columns["truncated"][:, 5].tolist() == [False] * 2 + [
        True,
        False,
    ]


LSTM: dict[str, Any] = {"core": "lstm", "core_size": 5, "share_encoder": True, "hidden_sizes": [8]}


def retold(stage: Stage, policy_id: str, columns: Columns) -> tuple[Tensor, Tensor]:
    """Log-probabilities `[T, S]` of a fragment, and the state after it, worked out from its columns alone."""
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
        (
            {"id": f"{MODULE}:Chase", "api": "pettingzoo", "kwargs": {"cat_steps": 2, "mouse_steps": 4}},
            TWO_POLICIES | {"policies": {"hunter": LSTM, "prey": {}}},
        ),
        ({"id": f"{MODULE}:Twins", "api": "pettingzoo"}, {"policies": {"default": LSTM}}),
    ],
    ids=["continuous", "sync", "gru", "native", "two agents", "twins"],
)
def test_what_a_policy_remembered_follows_from_the_state_at_the_fragments_start(
    environment: dict[str, Any], sections: dict[str, Any]
) -> None:
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
        log_prob, state = retold(stage, policy_id, columns)
        np.testing.assert_allclose(columns["log_prob"], log_prob.numpy(), rtol=1e-4, atol=1e-5)
        ended += int((columns["terminated"] | columns["truncated"]).sum())
        assert state.any() or (~columns["mask"][-1] | columns["terminated"][-1] | columns["truncated"][-1]).all()
    assert ended or "Noise" in environment["id"]


def test_random_acting_asks_nobody_and_nothing_is_remembered_of_it() -> None:
    stage = Stage({"id": f"{MODULE}:Noise"}, policies={"default": LSTM})
    stage.sample(4, RandomActing())
    assert not stage.sample(4).columns["default"]["state_in"].any()
    assert stage.sample(4).columns["default"]["state_in"].any()
