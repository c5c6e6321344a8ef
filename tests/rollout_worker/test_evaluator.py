"""The evaluator: other starts for each checkpoint, the best one confirmed, and solved only by scores that hold."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from rollout_worker.evaluator import Evaluator
from shared.checkpoint import Manifest, Pointer, checkpoint_name, describe_objects
from shared.config import Config
from shared.events import confirmed_return, read_evaluations, read_events, record_evaluation
from shared.policies.codec import encode_policy
from shared.policies.registry import build_policies
from shared.redis_keys import RunKeys
from shared.role import Role
from tests.conftest import MakeRole, minimal_config
from tests.environments_for_tests import MODULE

LUCK = {"id": f"{MODULE}:Noise", "num_envs": 4}
"""What an episode pays follows from its seed alone: all policies are worth the same, and scores differ by luck."""

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


def store_checkpoint(role: Role, version: int) -> str:
    """An untrained policy as the run's newest checkpoint, as a trainer leaves it."""
    policies = build_policies(role.description().policies, role.config.policies, role.config.algorithm, seed=0)
    objects = {f"{name}/policy.safetensors": encode_policy(policy, version) for name, policy in policies.items()}
    manifest = Manifest(
        run_id=role.run_id, name=checkpoint_name(version, 64 * version), version=version, epoch=1, created=1.0,
        log_position="0-0", parent=None, objects=describe_objects(objects),
        provenance={"counters": {"train": {"env_steps": 64 * version, "episodes": 0, "updates": version}}},
    )  # fmt: skip
    digest = hashlib.sha256(role.checkpoints.write(manifest, objects)).hexdigest()
    role.checkpoints.write_pointer(Pointer(latest=manifest.name, epoch=1, manifest_sha256=digest))
    return manifest.name


def played(evaluator: Evaluator, role: Role, versions: range) -> dict[str, dict[str, Any]]:
    """The scores of these checkpoints, stored and played one after the other."""
    for version in versions:
        store_checkpoint(role, version)
        assert evaluator.step(0) == "evaluated"
    return read_evaluations(role.redis, role.run_id)


def test_each_checkpoint_meets_starts_of_its_own_the_same_whoever_plays_it(
    make_role: MakeRole, new_evaluator: NewEvaluator
) -> None:
    config = minimal_config(environment=LUCK, evaluation={"episodes": 2})
    role = make_role(config)
    first = played(new_evaluator(config), role, range(4))
    assert len({scores["mean_return"] for scores in first.values()}) == 4
    again = new_evaluator(config)
    role.redis.delete(RunKeys(role.run_id).evaluations)
    assert played(again, role, range(4)) == first


def test_with_a_fixed_seed_all_checkpoints_meet_the_same_starts(
    make_role: MakeRole, new_evaluator: NewEvaluator
) -> None:
    config = minimal_config(environment=LUCK, evaluation={"episodes": 2, "seed": 3})
    found = played(new_evaluator(config), make_role(config), range(3)).values()
    assert len({scores["mean_return"] for scores in found}) == 1
    assert len({scores["confirmation"]["mean_return"] for scores in found}) == 1


def test_what_may_be_the_best_is_played_again_from_other_starts_and_nothing_else(
    make_role: MakeRole, new_evaluator: NewEvaluator
) -> None:
    config = minimal_config(environment=LUCK, evaluation={"episodes": 1}, checkpoint={"keep_best": 1})
    found = played(new_evaluator(config), make_role(config), range(12))
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


def test_a_better_one_that_is_gone_keeps_nothing_from_being_the_best(
    make_role: MakeRole, new_evaluator: NewEvaluator
) -> None:
    config = minimal_config(environment=LUCK, evaluation={"episodes": 1})
    role, evaluator = make_role(config), new_evaluator(config)
    gone = {"version": 0, "mean_return": 1e6, "confirmation": {"mean_return": 1e6}}
    record_evaluation(role.redis, role.run_id, checkpoint_name(0, 0), gone)
    found = played(evaluator, role, range(1, 2))
    assert "confirmation" in found[checkpoint_name(1, 64)]


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
    ],
)
def test_a_run_is_solved_when_each_of_the_last_evaluations_reaches_the_threshold(
    make_role: MakeRole,
    new_evaluator: NewEvaluator,
    stop: dict[str, Any],
    returns: list[float | tuple[float, float]],
    solved: bool,
) -> None:
    config = minimal_config(stop_at={"updates": 4, "mean_return": 475.0} | stop)
    role = make_role(config)
    for version, value in enumerate(returns):
        first, *second = value if isinstance(value, tuple) else (value,)
        scores: dict[str, Any] = {"version": version, "mean_return": first}
        if second:
            scores["confirmation"] = {"mean_return": second[0]}
        record_evaluation(role.redis, role.run_id, checkpoint_name(version, version), scores)
    new_evaluator(config)
    assert (role.flow.read().state, role.flow.read().reason) == (("stopping", "solved") if solved else ("running", ""))


def test_the_event_tells_both_scores(make_role: MakeRole, new_evaluator: NewEvaluator) -> None:
    config = minimal_config(environment=LUCK, evaluation={"episodes": 2})
    role = make_role(config)
    played(new_evaluator(config), role, range(1))
    (event,) = [event for event in read_events(role.redis, role.run_id) if event.kind == "evaluation"]
    assert "over 2 episodes, and " in event.text and "from as many other starts" in event.text
