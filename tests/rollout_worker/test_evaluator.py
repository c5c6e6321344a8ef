"""Evaluation: exact numbers of episodes, own seeds for each checkpoint, confirmation of the best."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator, Mapping
from types import MappingProxyType
from typing import Any, cast

import gymnasium as gym
import numpy as np
import pytest
import torch

from stagecoach.rollout_worker.environments.description import describe_environment
from stagecoach.rollout_worker.environments.factory import evaluation_environment
from stagecoach.rollout_worker.environments.seeding import episode_seed
from stagecoach.rollout_worker.evaluator import CONFIRMING, SCORING, Evaluator, evaluation_seed, scores_of
from stagecoach.rollout_worker.league.opponents import Opponents
from stagecoach.rollout_worker.matches import play_sides
from stagecoach.rollout_worker.playing import evaluate_policies
from stagecoach.rollout_worker.watchdog import Watchdog
from stagecoach.shared.base.errors import ConfigError, EnvironmentFailure
from stagecoach.shared.config.run_config import Config
from stagecoach.shared.config.sections import CheckpointConfig
from stagecoach.shared.deployment.deployed_policy import DeployedPolicy
from stagecoach.shared.experience.checkpoint_name import checkpoint_name
from stagecoach.shared.experience.fragment import EpisodeRecord
from stagecoach.shared.league.table import PlayerRef
from stagecoach.shared.policies.actor_critic import RecurrentActorCritic
from stagecoach.shared.policies.policy import Policy
from stagecoach.shared.policies.registry import build_policies
from stagecoach.shared.policies.serialization import encode_policy
from stagecoach.shared.protocol.events import (
    confirmed_return,
    ranking,
    read_evaluations,
    read_events,
    record_evaluation,
    solves,
)
from stagecoach.shared.protocol.heartbeat import Heartbeat
from stagecoach.shared.protocol.keys import RunKeys
from stagecoach.shared.runtime.run_context import RunContext
from stagecoach.shared.storage.checkpoint_store import Checkpoint, Manifest, Pointer, describe_objects
from stagecoach.shared.storage.due_evaluations import write_due_evaluation
from tests.conftest import MakeRole, minimal_config
from tests.support.environments.games import NIM, Nim
from tests.support.environments.small import CHASE, CHASE_POLICIES, MODULE
from tests.support.runs.checkpoints import manifest_of


def config_of(environment: dict[str, Any], **evaluation: Any) -> Config:
    return minimal_config(environment={"num_envs": 8} | environment, evaluation=evaluation)


def policies_of(config: Config) -> dict[str, Policy]:
    return build_policies(describe_environment(config).policies, config.policies, config.algorithm, seed=0)


def played(
    config: Config, episodes: int | None = None, policies: dict[str, Policy] | None = None, seed: int = 10_000
) -> tuple[EpisodeRecord, ...]:
    return evaluate_policies(config, describe_environment(config), policies or policies_of(config), seed, episodes)


@pytest.mark.parametrize(("episodes", "copies"), [(1, 4), (5, 4), (8, 4), (7, 3)])
def test_evaluation_plays_exact_number_of_episodes(episodes: int, copies: int) -> None:
    config = config_of({"id": f"{MODULE}:Counting", "kwargs": {"length": 3}}, episodes=episodes, num_envs=copies)
    scores = played(config)
    assert [record.length for record in scores] == [3] * episodes
    assert scores_of(config, played(config, episodes=2))["episodes"] == 2


def test_evaluation_gives_each_environment_its_share() -> None:
    config = config_of({"id": f"{MODULE}:LengthOfSeed"}, episodes=7, num_envs=3)
    assert [record.length for record in played(config, seed=0)] == [2, 2, 3, 3, 4, 4, 4]


def test_evaluation_fails_on_nan_observation() -> None:
    with pytest.raises(EnvironmentFailure, match=r"an observation \(default/obs\) that cannot be learned from"):
        played(config_of({"id": f"{MODULE}:Spoils", "kwargs": {"what": "observation"}}, episodes=3, num_envs=1))


def test_evaluation_depends_on_seed_only() -> None:
    config = config_of({"id": "CartPole-v1"}, episodes=6, greedy=False)
    policies, found = policies_of(config), []
    for state, seed in ((1, 10_000), (2, 10_000), (1, 5)):
        torch.manual_seed(state)
        np.random.seed(state)
        found.append(played(config, policies=policies, seed=seed))
    assert found[0] == found[1] != found[2]


def test_evaluation_seed_depends_on_checkpoint_and_round() -> None:
    names = [checkpoint_name(version, 64 * version) for version in range(3)]

    def seeds(**sections: Any) -> list[int]:
        config = minimal_config(**sections)
        found = [evaluation_seed(config, name, turn) for name in names for turn in (SCORING, CONFIRMING)]
        assert found == [evaluation_seed(config, name, turn) for name in names for turn in (SCORING, CONFIRMING)]
        return found

    assert len({*seeds(seed=1), *seeds(seed=2)}) == 12
    fixed = seeds(evaluation={"seed": 7})
    assert fixed[:2] * 3 == fixed and fixed[0] != fixed[1], "the same for all checkpoints, others to confirm"


def test_evaluation_is_greedy_unless_configured() -> None:
    environment = {"id": f"{MODULE}:Target"}
    greedy, sampled = config_of(environment, episodes=50), config_of(environment, episodes=50, greedy=False)
    policies = policies_of(greedy)
    with torch.no_grad():
        policies["default"].get_parameter("head.weight").zero_()
        policies["default"].get_parameter("head.bias").fill_(0.5)
    best, spread = (scores_of(one, played(one, policies=policies)) for one in (greedy, sampled))
    assert best["mean_return"] == best["min_return"] == 0.0
    assert spread["std_return"] > 0.1 and spread["mean_return"] < -0.3


@pytest.mark.parametrize(
    ("fields", "returned"),
    [
        ({}, 9.0), ({"wrappers": []}, 6.0), ({"kwargs": {"length": 2}}, 5.0),
        ({"wrappers": [{"path": f"{MODULE}:AddOne", "kwargs": {"amount": 10.0}}]}, 36.0),
    ],
)  # fmt: skip
def test_evaluation_environment_applies_its_overrides(fields: dict[str, Any], returned: float) -> None:
    kwargs = {"length": 3, "message": "kept"}
    trained_in = {"id": f"{MODULE}:Counting", "kwargs": kwargs, "wrappers": [f"{MODULE}:AddOne"]}
    config = config_of(trained_in, episodes=2, num_envs=5, **fields)
    made = evaluation_environment(config)
    assert made.kwargs == kwargs | fields.get("kwargs", {}) and (made.num_envs, made.vectorization) == (2, "sync")
    assert [record.episode_return for record in played(config)] == [returned] * 2


def test_scores_summarize_episodes() -> None:
    records = (
        EpisodeRecord(1.0, 10, success=True, metrics={"depth": 2.0}),
        EpisodeRecord(4.0, 20, success=False, metrics={"depth": 4.0, "speed": 7.0}),
        EpisodeRecord(7.0, 30, success=None),
    )
    config, strict = minimal_config(), minimal_config(evaluation={"success_threshold": 5.0})
    assert scores_of(config, records) == {
        "episodes": 3, "mean_return": 4.0, "std_return": pytest.approx(6**0.5), "min_return": 1.0, "max_return": 7.0,
        "mean_length": 20.0, "success_rate": 0.5, "metrics": {"depth": 3.0, "speed": 7.0}, "env_steps_played": 60,
        "agents": {}, "policies": {},
    }  # fmt: skip
    assert scores_of(config, records[2:])["success_rate"] is None
    assert scores_of(config, (EpisodeRecord(0.99, 14),) * 20)["std_return"] == 0, "no rounding shows as spread"
    assert scores_of(strict, records)["success_rate"] == pytest.approx(2 / 3), "where the environment does not tell"


def test_evaluation_scores_agents_and_policies() -> None:
    config = minimal_config(environment=CHASE, **CHASE_POLICIES, evaluation={"episodes": 3, "num_envs": 2})
    scores = played(config)
    assert [(record.length, set(record.agent_returns)) for record in scores] == [(4, {"cat", "mouse"})] * 3
    found, cats = scores_of(config, scores), [record.agent_returns["cat"] for record in scores]
    assert found["agents"] == {"cat": pytest.approx(np.mean(cats)), "mouse": found["policies"]["prey"]}
    assert found["policies"]["hunter"] == found["agents"]["cat"]
    by_prey = config.model_copy(update={"checkpoint": CheckpointConfig(best_by="prey")})
    ranked = scores_of(by_prey, scores)
    assert ranking(ranked) == ranked["agents"]["mouse"] != ranking(found) == found["mean_return"]


@pytest.mark.parametrize(
    ("asked", "solved"),
    [
        (5.0, True), (5.1, False), ({"a": 3.0}, True), ({"a": 3.0, "b": 2.0}, True), ({"a": 3.1, "b": 2.0}, False),
        ({"b": 2.1}, False), ({"only": 5.0}, True),
    ],
)  # fmt: skip
def test_solved_requires_each_policy_return(asked: Any, solved: bool) -> None:
    good: dict[str, Any] = {"mean_return": 5.0, "policies": {"a": 3.0, "b": 2.0}}
    worse = good | {"confirmation": {"mean_return": 4.0, "policies": {"a": 2.9, "b": 1.0}}}
    assert solves(good, asked, None) is solved and not solves(worse, asked, None)
    assert not solves(good, asked, 0.5), "the success rate is asked as well"


def test_evaluation_resets_recurrent_state_per_episode() -> None:
    policy = {"core": "lstm", "core_size": 6, "share_encoder": True}
    config = minimal_config(
        environment={"id": "Pendulum-v1", "max_episode_steps": 30}, policies={"default": policy},
        evaluation={"episodes": 7, "num_envs": 3},
    )  # fmt: skip
    policies = policies_of(config)
    with torch.no_grad():
        cast(RecurrentActorCritic, policies["default"]).head.weight.mul_(100)
    found = played(config, policies=policies)
    returns = []
    for copy, share in enumerate((2, 2, 3)):
        env = gym.make("Pendulum-v1", max_episode_steps=30)
        acting, first = DeployedPolicy(policies["default"], 0), 10_000 + copy
        for episode in range(share):
            acting.reset()
            observation, _ = env.reset(seed=episode_seed(first, episode))
            over, total = False, 0.0
            while not over:
                observation, reward, terminated, truncated, _ = env.step(acting.act(observation))
                over, total = terminated or truncated, total + float(reward)
            returns.append(total)
    assert [record.episode_return for record in found] == pytest.approx(returns, rel=1e-4)


@pytest.mark.parametrize("seed", [2**31 - 1, 2**32 - 1])
def test_evaluation_seeds_fit_older_generators(seed: int) -> None:
    config = minimal_config(
        environment={"id": f"{MODULE}:OlderGenerator"}, evaluation={"episodes": 9, "num_envs": 3}
    )  # fmt: skip
    assert len({record.episode_return for record in played(config, seed=seed)}) == 9


LUCK = {"id": f"{MODULE}:Noise", "num_envs": 4}
"""Returns depend only on seeds: all policies are equal, and scores differ by luck."""

NewEvaluator = Callable[..., Evaluator]


@pytest.fixture
def new_evaluator(make_role: MakeRole) -> Iterator[NewEvaluator]:
    started: list[Evaluator] = []

    def make(config: Config) -> Evaluator:
        started.append(Evaluator(make_role(config)))
        started[-1].start()
        return started[-1]

    yield make
    for evaluator in started:
        evaluator.stop("end of test")


def store_checkpoint(role: RunContext, version: int, lineage: int = 0) -> str:
    """Stores an untrained policy as the run's newest checkpoint."""
    policies = build_policies(role.description().policies, role.config.policies, role.config.algorithm, seed=0)
    objects = {f"{name}/policy.safetensors": encode_policy(policy, version) for name, policy in policies.items()}
    manifest = Manifest(
        run_id=role.run_id, name=checkpoint_name(version, 64 * version), version=version, epoch=1, created=1.0,
        log_position="0-0", parent=None, objects=describe_objects(objects),
        provenance={
            "counters": {"train": {"env_steps": 64 * version, "episodes": 0, "updates": version}}, "lineage": lineage,
        },
    )  # fmt: skip
    digest = hashlib.sha256(role.checkpoints.write(manifest, objects)).hexdigest()
    role.checkpoints.write_pointer(Pointer(latest=manifest.name, epoch=1, manifest_sha256=digest))
    return manifest.name


def scored(evaluator: Evaluator, role: RunContext, versions: range) -> dict[str, dict[str, Any]]:
    """The scores of these checkpoints, stored and played one after the other."""
    for version in versions:
        store_checkpoint(role, version)
        assert evaluator.step(0) == "evaluated"
    return read_evaluations(role.redis, role.run_id)


def test_evaluator_scores_are_reproducible(make_role: MakeRole, new_evaluator: NewEvaluator) -> None:
    config = minimal_config(environment=LUCK, evaluation={"episodes": 2})
    role = make_role(config)
    first = scored(new_evaluator(config), role, range(4))
    assert len({scores["mean_return"] for scores in first.values()}) == 4
    told = [event.text for event in read_events(role.redis, role.run_id) if event.kind == "evaluation"]
    assert "over 2 episodes, and " in told[0] and "from as many other starts" in told[0]
    again = new_evaluator(config)
    role.redis.delete(RunKeys(role.run_id).evaluations)
    assert scored(again, role, range(4)) == first


def test_evaluator_confirms_only_best_candidates(make_role: MakeRole, new_evaluator: NewEvaluator) -> None:
    config = minimal_config(environment=LUCK, evaluation={"episodes": 1}, checkpoint={"keep_best": 1})
    found = scored(new_evaluator(config), make_role(config), range(12))
    best = float("-inf")
    for scores in found.values():
        expected = scores["mean_return"] >= best
        assert ("confirmation" in scores) == expected
        if expected:
            assert scores["confirmation"]["episodes"] == 1
            assert scores["confirmation"]["mean_return"] != scores["mean_return"]
            best = max(best, confirmed_return(scores) or 0.0)
    luckiest = max(found.values(), key=lambda scores: scores["mean_return"])
    assert (confirmed_return(luckiest) or 0.0) < luckiest["mean_return"], "luck does not come twice"
    assert 1 < sum("confirmation" in scores for scores in found.values()) < 12


def test_pruned_checkpoint_does_not_block_best(make_role: MakeRole, new_evaluator: NewEvaluator) -> None:
    config = minimal_config(environment=LUCK, evaluation={"episodes": 1})
    role, evaluator = make_role(config), new_evaluator(config)
    gone = {"version": 0, "mean_return": 1e6, "confirmation": {"mean_return": 1e6}}
    record_evaluation(role.redis, role.run_id, checkpoint_name(0, 0), gone)
    found = scored(evaluator, role, range(1, 2))
    assert "confirmation" in found[checkpoint_name(1, 64)]


def store_due(role: RunContext, version: int, ratings: Mapping[str, Any] = MappingProxyType({})) -> str:
    """Stores an untrained policy as a due evaluation."""
    policies = build_policies(role.description().policies, role.config.policies, role.config.algorithm, seed=0)
    name = checkpoint_name(version, 64 * version)
    objects = {f"{id_}/policy.safetensors": encode_policy(policy, version) for id_, policy in policies.items()}
    manifest = manifest_of(version, objects, run_id=role.run_id, provenance={"fold_metrics": dict(ratings)})
    write_due_evaluation(role.checkpoints.store, Checkpoint(manifest, objects))
    return name


EVERY = {"episodes": 2, "every": "1 updates"}


def test_evaluator_plays_due_in_order_then_newest(make_role: MakeRole, new_evaluator: NewEvaluator) -> None:
    config = minimal_config(environment=LUCK, evaluation=EVERY)
    role, evaluator = make_role(config), new_evaluator(config)
    last = store_checkpoint(role, 12)
    due = [store_due(role, version) for version in (10, 2, 9, 11)]
    order = [due[1], due[2], due[0], due[3], last]
    for turn in range(1, 6):
        assert evaluator.step(0) == "evaluated"
        assert list(read_evaluations(role.redis, role.run_id)) == order[:turn]
        if turn == 2:  # another takes its place: nothing is played twice
            evaluator.stop("end of test")
            evaluator = new_evaluator(config)
    assert evaluator.step(0) == "waited"
    found = read_evaluations(role.redis, role.run_id)
    assert [scores["env_steps"] for scores in found.values()] == [128, 576, 640, 704, 768]


def test_league_evaluation_is_ranked_by_rating(make_role: MakeRole, new_evaluator: NewEvaluator) -> None:
    config = minimal_config(environment=NIM, evaluation=EVERY, league={"fixed": {"dice": "random"}})
    role, evaluator = make_role(config), new_evaluator(config)
    name = store_due(role, 3, {"league/rating/default": 7.25})
    assert evaluator.step(0) == "evaluated"
    assert read_evaluations(role.redis, role.run_id)[name]["ranking"] == 7.25


def test_match_sides_have_own_random_streams() -> None:
    game = {"id": "benchmarks.learning.games:RockPaperScissors", "api": "pettingzoo"}
    config = minimal_config(environment=game, league={})
    dice, fits = PlayerRef("random", "", "random", ("default",)), (("default",), ("default",))
    players, policies = {"a": dice, "b": dice}, policies_of(config)
    description, opponents = describe_environment(config), Opponents(lambda sha256: b"")
    acting: dict[str, Any] = {"opponents": opponents, "policies": policies, "games": 20, "seed": 5}
    one, again = (play_sides(config, description, players, fits, **acting) for _ in range(2))
    results = {side: [its.match.result(side) for its in played] for side, played in one.items()}
    assert one == again and results[0] != results[1]


def test_match_players_are_watched(monkeypatch: pytest.MonkeyPatch) -> None:
    config, seen = minimal_config(environment=NIM, league={}), set[str | None]()
    description = describe_environment(config)
    watchdog = Watchdog("evaluator", config, cast(Heartbeat, None), lambda failure: None, lambda text: None)
    step = Nim.step

    def stepped(self: Nim, action: Any) -> None:
        seen.add(watchdog.doing)
        step(self, action)

    def played(observation: Any, random: Any) -> int:
        seen.add(watchdog.doing)
        return 0

    monkeypatch.setattr(Nim, "step", stepped)
    monkeypatch.setattr("tests.support.environments.games.takes_one", played)
    one, fits = (
        PlayerRef("function", "", "tests.support.environments.games:takes_one", ("default",)),
        (("default",), ("default",)),
    )
    opponents, policies = Opponents(lambda sha256: b"", {one.source}), policies_of(config)
    acting: dict[str, Any] = {"opponents": opponents, "policies": policies, "games": 2, "seed": 0}
    play_sides(config, description, {"a": one, "b": one}, fits, **acting, watchdog=watchdog)
    assert seen == {"the players of a match", "step of its environments"}


def test_unreadable_due_evaluation_blocks_no_other(
    make_role: MakeRole, new_evaluator: NewEvaluator, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("stagecoach.rollout_worker.evaluator._POLL_SECONDS", 0.01)
    monkeypatch.setattr("stagecoach.rollout_worker.evaluator._POSTPONED_SECONDS", 1.0)
    config = minimal_config(environment=LUCK, evaluation=EVERY)
    role, evaluator = make_role(config), new_evaluator(config)
    bad, torn, good = store_due(role, 1), checkpoint_name(2, 128), store_due(role, 3)
    store = role.checkpoints.store
    store.put(f"evaluations/{bad}/checkpoint.safetensors", b"altered")
    store.put(f"evaluations/{torn}/.partial-checkpoint.safetensors", b"ha")
    while good not in read_evaluations(role.redis, role.run_id):
        assert evaluator.step(0) == "evaluated"
    told = [event.text for event in read_events(role.redis, role.run_id) if "cannot be evaluated" in event.text]
    assert [text.split()[0] for text in told] == [bad, torn], "each is told once"
    store_due(role, 2)
    while torn not in read_evaluations(role.redis, role.run_id):
        evaluator.step(0)
    assert evaluator.postpones, "the other one"


def test_evaluation_event_has_success_rate(make_role: MakeRole, new_evaluator: NewEvaluator) -> None:
    config = minimal_config(environment=LUCK, evaluation={"episodes": 2, "success_threshold": -1e6})
    role = make_role(config)
    scored(new_evaluator(config), role, range(1))
    [event] = [event for event in read_events(role.redis, role.run_id) if event.kind == "evaluation"]
    assert event.text.count("(100 % successful)") == 2 and event.data["success_rate"] == 1.0


BOTH = {"evaluations": 2, "success_rate": 0.9}


@pytest.mark.parametrize(
    ("stop", "returns", "solved"),
    [
        ({}, [480.0, 480.0, 480.0], True),
        ({}, [496.0], False),  # the luckiest alone
        ({}, [500.0, 500.0], False),
        ({}, [430.0, 500.0, 500.0], False),  # their mean reaches it, not each of them
        ({}, [500.0, 500.0, 500.0, 100.0], False),  # not any three: the last ones
        ({}, [100.0, 480.0, (480.0, 476.0), 480.0], True),
        ({}, [480.0, (500.0, 420.0), 480.0], False),  # the second evaluation did not reach it
        ({"evaluations": 1}, [100.0, 480.0], True),
        ({"evaluations": 4}, [480.0, 480.0, 480.0], False),
        (BOTH | {"mean_return": None}, [(480.0, None, 0.9), (480.0, None, 1.0)], True),
        (BOTH | {"mean_return": None}, [(480.0, None, 0.9), (480.0, None, 0.8)], False),
        (BOTH | {"mean_return": None}, [(480.0, None, 1.0), (480.0, None, None)], False),
        (BOTH | {"mean_return": 480.0}, [(480.0, None, 0.9), (480.0, None, 1.0)], True),
        (BOTH | {"mean_return": 481.0}, [(480.0, None, 0.9), (480.0, None, 1.0)], False),
    ],
)
def test_run_is_solved_by_last_evaluations(
    make_role: MakeRole, new_evaluator: NewEvaluator, stop: dict[str, Any], returns: list[Any], solved: bool
) -> None:
    config = minimal_config(stop_at={"updates": 4, "mean_return": 475.0} | stop)
    role = make_role(config)
    for version, value in enumerate(returns):
        first, second, rate = (*value, None)[:3] if isinstance(value, tuple) else (value, None, None)
        scores = {"version": version, "mean_return": first, "success_rate": rate}
        scores |= {"confirmation": {"mean_return": second}} if second else {}
        record_evaluation(role.redis, role.run_id, checkpoint_name(version, version), scores)
    new_evaluator(config)
    assert (role.flow.read().state, role.flow.read().reason) == (("stopping", "solved") if solved else ("running", ""))


def test_abandoned_lineage_does_not_solve_run(make_role: MakeRole, new_evaluator: NewEvaluator) -> None:
    config = minimal_config(stop_at={"mean_return": 475.0, "evaluations": 2})
    role = make_role(config)

    def reach(version: int) -> None:
        scores = {"version": version, "mean_return": 500.0}
        record_evaluation(role.redis, role.run_id, checkpoint_name(version, 64), scores)

    reach(7)
    reach(8)
    store_checkpoint(role, 10, lineage=10)  # what `resume --from` an older one makes the newest
    evaluator = new_evaluator(config)
    for version, solved in ((10, False), (11, True)):
        reach(version)
        evaluator.check_solved()
        assert (role.flow.read().reason == "solved") == solved


def test_evaluation_in_steps_finishes_episodes() -> None:
    config = config_of({"id": f"{MODULE}:LengthOfSeed"}, env_steps=20, num_envs=3)
    assert [record.length for record in played(config, seed=0)] == [2, 2, 2, 3, 3, 3, 4, 4], "shares of 6, 7 and 7"
    assert len(played(config, episodes=5, seed=0)) == 5, "asked for by number, it is by number"
    with pytest.raises(ConfigError, match=r"evaluation.episodes=0 evaluates nothing, and evaluation.env_steps"):
        config_of({"id": "CartPole-v1"}, episodes=0, env_steps=5)
