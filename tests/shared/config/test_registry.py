"""What a config says of each of several policies: algorithms, agents by pattern, ranks and goals; and its hash."""

from __future__ import annotations

from typing import Any

import pytest

from stagecoach.coordinator.catalog.checkpoint_lookup import named_code
from stagecoach.shared.base.errors import ConfigError
from stagecoach.shared.config.loading import dump_config, parse_config, parse_yaml
from stagecoach.trainer_node.state.fork import beginnings
from tests.conftest import minimal_config

TWO: dict[str, Any] = {"policies": {"a": {}, "b": {}}, "agents": {"*": "a", "b_*": "b"}}

BUFFER = {"kind": "uniform", "capacity": 999}
IMITATING = {"behavioral_cloning": {"strength": 1.0}}
SLOWING = {"kind": "linear", "start": 1, "over": "9 updates"}


def two(b: Any, **sections: Any) -> Any:
    return minimal_config(**(TWO | {"policies": {"a": {}, "b": b}} | sections))


@pytest.mark.parametrize(
    ("common", "own", "expected"),
    [
        ({"gamma": 0.5, "epochs": 3}, {"epochs": 4}, {"name": "ppo", "gamma": 0.5, "epochs": 4}),
        ({"name": "ppo", "gamma": 0.5}, {"name": "ppo"}, {"name": "ppo", "gamma": 0.5}),
        ({"gamma": 0.5}, "ppo", {"name": "ppo", "gamma": 0.5}),
        ("dqn", {"gamma": 0.9}, {"name": "dqn", "gamma": 0.9, "minibatch_size": 64}),
        ({"gamma": 0.5}, {"name": "a2c"}, {"name": "a2c", "gamma": 0.99, "gae_lambda": 1.0}),
        (
            {"name": "dqn", "exploration": {"kind": "epsilon_greedy", "epsilon": 0.3}, "replay_buffer": BUFFER},
            {"exploration": {"kind": "boltzmann"}, "replay_buffer": {"kind": "uniform"}},
            {"exploration": {"kind": "boltzmann", "temperature": {"start": 1.0}}, "replay_buffer": BUFFER},
        ),
        ({"learning_rate": 1e-2}, {"learning_rate": SLOWING}, {"learning_rate": SLOWING, "gamma": 0.99}),
        ({"learning_rate": {"start": 1e-2}}, {"learning_rate": 0.5}, {"learning_rate": {"start": 0.5}}),
    ],
)  # fmt: skip
def test_policy_algorithm_overrides_run_algorithm(common: Any, own: Any, expected: dict[str, Any]) -> None:
    config = two({"algorithm": own}, algorithm=common, rollout={"max_policy_lag": 0, "fragment_steps": 64})

    def holds(found: Any, wanted: Any) -> bool:
        if isinstance(wanted, dict):
            return all(holds(found[name], value) for name, value in wanted.items())
        return bool(found == wanted)

    found = config.algorithm_of("b").model_dump(mode="json")
    assert holds(found, expected), found
    assert config.algorithm_of("a") == config.algorithm
    again = parse_config(parse_yaml(dump_config(config), "config.yaml"))
    assert again == config and again.hash() == config.hash()


def test_policy_network_follows_its_algorithm() -> None:
    config = two({"algorithm": "sac"})
    assert config.policies["b"].hidden_sizes == (256, 256) != config.policies["a"].hidden_sizes
    assert two({"algorithm": "sac", "hidden_sizes": [5]}).policies["b"].hidden_sizes == (5,)
    assert config.heatup.duration.amount == 0, "sections outside are as the run's algorithm has them"


@pytest.mark.parametrize(
    ("sections", "message"),
    [
        ({"b": {"algorithm": {"epoch": 3}}}, "policies.b.algorithm.epoch; did you mean policies.b.algorithm.epochs"),
        ({"b": {"algorithm": {"gamma": 3}}}, "policies.b.algorithm.gamma: expected 1 or less, found 3"),
        ({"b": {"algorithm": "sca"}}, "policies.b.algorithm.name must be one of .*; did you mean sac"),
        ({"b": {"algorithm": "a2c"}, "rollout": {"max_policy_lag": 1}}, "with policies.b.algorithm.name=a2c: its"),
        ({"b": {"algorithm": "dqn"}, "trainer": {"ranks": 65}}, "policies.b.algorithm.minibatch_size=64.; lower"),
        ({"b": {"algorithm": "bc"}}, "policies.b.algorithm.name=bc needs recorded experience"),
        (
            {"b": {"trainable": False, "algorithm": {"name": "dqn", "exploration": {"kind": "ou"}}}},
            "policies.b.algorithm.exploration.kind=ou is for continuous actions",
        ),
        ({"policies": {"a": {"trainable": False}, "b": {"trainable": False}}}, r"none of \['a', 'b'\] is trainable"),
        ({"dataset": {"path": "x"}, "b": {"algorithm": "bc"}}, "name=ppo learns only from its own policy"),
        ({"dataset": {"path": "x"}, "algorithm": "vdn"}, "path=x with algorithm.name=vdn: .* separate for each policy"),
        (
            {"dataset": {"path": "x"}, "algorithm": "dqn", "league": {},
             "environment": {"id": "X", "api": "pettingzoo"}},
            "dataset.path=x with a league: recorded experience is separate for each policy",
        ),
        ({"demonstrations": {"path": "x"}}, "demonstrations.path=x with algorithm.name=ppo, which does not use them"),
        ({"checkpoint": {"best_by": "c"}}, r"checkpoint.best_by: 'c' names no policy; policies has \['a', 'b'\]"),
        ({"stop_at": {"updates": 1, "mean_return": {"a": 1, "c": 2}}}, "stop_at.mean_return: 'c' names no policy"),
        ({"stop_at": {"updates": 1, "mean_return": {"a": "x"}}}, "stop_at.mean_return: expected a number, or one"),
        ({"stop_at": {"updates": 1, "mean_return": {}}}, "mean_return: expected a number, or one for each of some"),
        ({"b": {"initialize_from": ""}}, "policies.b.initialize_from"),
        ({"initialize_from": ""}, "initialize_from"),
        ({"b": {"reward_clip": [1, -1]}}, r"policies.b: reward_clip=\[1.0, -1.0\] makes all rewards the same number"),
        ({"policies": {"all": {}}, "agents": {}}, "policies: 'all' is not a valid policy id"),
        ({"environment": {"id": "X", "episode_ends": "any"}}, "episode_ends=any with api=gymnasium"),
        ({"environment": {"id": "X", "episode_ends": "some"}}, "episode_ends: expected 'all' or 'any', found 'some'"),
        ({"agents": {"*": "c"}}, r"agents.\*='c' names no policy"),
    ],
)  # fmt: skip
def test_invalid_policies_are_rejected_by_field(sections: dict[str, Any], message: str) -> None:
    sections = dict(sections)
    b = sections.pop("b", {})
    with pytest.raises(ConfigError, match=message) as caught:
        two(b, **sections)
    assert "\n" not in str(caught.value)


def test_frozen_policy_is_not_checked_against_updates() -> None:
    config = two({"trainable": False, "algorithm": {"minibatch_size": 10**6}})
    assert config.trainable == ["a"] and config.algorithms()["b"].name == "ppo"


def test_recorded_experience_belongs_to_imitating_policies() -> None:
    config = two({"algorithm": "sac"}, demonstrations={"path": "x"}, algorithm=IMITATING)
    assert (config.recorded("dataset"), config.recorded("demonstrations")) == (["a", "b"], ["a"])


def test_agents_map_by_name_then_first_pattern() -> None:
    agents = {"wolf_*": "a", "*_7": "b", "wolf_1": "b"}
    config = minimal_config(policies={"a": {}, "b": {}}, agents=agents)
    assert [config.policy_of(agent) for agent in ("wolf_1", "wolf_2", "wolf_7", "sheep_7")] == ["b", "a", "a", "b"]
    with pytest.raises(KeyError):
        config.policy_of("sheep_1")


def test_hash_depends_on_each_policy_and_order_of_agents() -> None:
    plain, hashes = two({}), set()
    for b in ({}, {"algorithm": "ppo"}, {"trainable": False}, {"initialize_from": "other/best#main"}):
        hashes.add(two(b).hash())
    swapped = two({}, agents=dict(reversed(TWO["agents"].items())))
    assert len(hashes | {swapped.hash(), minimal_config().hash()}) == 6 and plain.hash() in hashes
    assert swapped.decides_otherwise(plain) == ["agents"]
    assert two({}, environment={"id": "X", "api": "pettingzoo", "episode_ends": "any"}).decides_otherwise(
        two({}, environment={"id": "X", "api": "pettingzoo"})
    ) == ["environment.episode_ends"]


def test_named_code_includes_policy_algorithms() -> None:
    own = {"algorithm": {"name": "mine.algorithms:Mine", "step": 3}}
    assert named_code(two(own))["policies.b.algorithm.name"] == "mine.algorithms:Mine"
    replay = {"kind": "hindsight", "reward": "mine.goals:reward"}
    named = named_code(two({"algorithm": {"name": "dqn", "replay_buffer": replay}}))
    assert named["policies.b.algorithm.replay_buffer.reward"] == "mine.goals:reward"


def test_policy_beginnings_override_the_runs() -> None:
    config = two({"initialize_from": "x#main"}, initialize_from="y")
    assert beginnings(config) == {"a": "y", "b": "x#main"} and not beginnings(two({}))
