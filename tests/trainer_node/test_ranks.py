"""Ranks that learn together, in real processes over gloo: the same on all of them, and the same as one alone.

That all ranks have the same weights after each update is looked at by the product itself (`ranks._compare`); a test
shows that it can tell.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from rollout_worker.environments import make_vector
from rollout_worker.exploration import Sampling
from rollout_worker.making import describe_environment
from rollout_worker.sampler import Sampler
from rollout_worker.trail import Life
from shared.checkpoint import Checkpoint
from shared.config import Config
from shared.errors import WeightsNotFinite
from shared.fragment import Fragment, FragmentHeader
from shared.ledger import Ledger
from shared.policies.codec import state_arrays
from shared.spaces import Columns
from shared.steps import Phase
from tests.environments_for_tests import MODULE
from tests.support.groups import some_quick
from tests.trainer_node.game import small
from trainer_node import local_ranks as local
from trainer_node import snapshot
from trainer_node.group import GroupBroken, RanksDiffer
from trainer_node.intake import Committed
from trainer_node.learner import Learner, make_learner
from trainer_node.local_ranks import local_ranks
from trainer_node.snapshot import Line, Progress

pytestmark = pytest.mark.timeout(180)


def ranked(ranks: int, algorithm: dict[str, Any] | None = None, **sections: Any) -> Config:
    """The small run (64 transitions an update), by so many ranks."""
    settings = {"minibatch_size": 32, "epochs": 2} | (algorithm or {})
    return small(algorithm=settings, trainer={"ranks": ranks}, **sections)


class Side:
    """A learner, and a worker of its own that acts with what it has learnt."""

    def __init__(self, config: Config) -> None:
        self.config = config
        self.description = describe_environment(config)
        self.learner = make_learner(config, self.description)

    def taken(self) -> snapshot.Snapshot:
        progress = Progress(0, Phase.TRAIN, 0, None, "0-0", 0, Line())
        books = Committed("0-0", Ledger().as_json(), {})
        return snapshot.take(self.learner, self.description, self.config, "r", progress, books)

    def weights(self) -> dict[str, bytes]:
        found: dict[str, bytes] = {}
        for policy_id, policy in self.learner.policies.items():
            found |= {f"{policy_id}/{name}": array.tobytes() for name, array in state_arrays(policy).items()}
        return found


def experience(config: Config, updates: int) -> list[list[Fragment]]:
    """What a worker acts with the untrained policy: the fragments of each update."""
    description = describe_environment(config)
    policies = make_learner(config, description).policies
    sampler = Sampler(make_vector(config.environment, description), description, Life(1, 0, 0, 0))
    steps, versions = config.rollout.fragment_steps, dict.fromkeys(policies, 0)
    found = []
    for _ in range(updates):
        taken = []
        for _ in range(config.rollout.fragments_per_update):
            sample = sampler.sample(policies, Sampling(), steps)
            header = FragmentHeader(
                "r", "worker-0", 0, 0, Phase.TRAIN, versions, steps, config.environment.num_envs,
                tuple(sample.episodes),
            )  # fmt: skip
            taken.append(Fragment(header, sample.columns))
        found.append(taken)
    sampler.close()
    return found


def copies(fragments: list[Fragment]) -> list[Fragment]:
    """Emulating acting changes a fragment."""
    return [
        Fragment(item.header, {name: dict(columns) for name, columns in item.columns.items()}) for item in fragments
    ]


def learn(learner: Learner, fragments: list[Fragment], phase: Phase = Phase.TRAIN) -> dict[str, float]:
    taken = copies(fragments)
    learner.emulate_acting(taken, phase)
    return learner.learn(taken, phase)


def gradients(learner: Learner) -> Columns:
    """Of the last gradient step."""
    return {
        f"{policy_id}/{name}": parameter.grad.numpy().copy()
        for policy_id, policy in learner.policies.items()
        for name, parameter in policy.named_parameters()
        if parameter.grad is not None
    }


def have_the_same_gradients(together: Side, alone: Side) -> None:
    """But for rounding."""
    one, several = gradients(alone.learner), gradients(together.learner)
    assert set(one) == set(several)
    assert any(abs(array).max() > 1e-3 for array in one.values())
    for name, array in one.items():
        assert several[name] == pytest.approx(array, rel=1e-3, abs=1e-5), name


CASES: dict[str, tuple[int, dict[str, Any]]] = {
    "uneven slices, terms of every kind": (
        3, {"algorithm": {"minibatch_size": 64, "clip_range_value": 0.1, "entropy_coefficient": 0.01}},
    ),
    "minibatches of one row": (3, {"algorithm": {"minibatch_size": 1}}),
    "cloning, which leaves the critic alone": (
        3, {"algorithm": {"name": "bc", "minibatch_size": 4}, "dataset": {"path": "never-read.csv"}},
    ),
    "demonstrations beside rewards, fewer of them than ranks": (
        3, {
            "algorithm": {
                "behavioural_cloning": {"strength": 0.5, "minibatch_size": 2},
                "reward_signals": {"gail": {"learning_rate": 1e-2}},
            },
            "demonstrations": {"path": str(Path(__file__).parent.parent / "shared" / "minari_cartpole")},
        },
    ),
    "a policy with a core, minibatches of one slot": (
        2, {
            "policies": {"default": {"core": "lstm", "core_size": 6, "share_encoder": True, "hidden_sizes": [8]}},
            "algorithm": {"minibatch_size": 8},
        },
    ),
    "reward signals, which every rank learns whole": (
        2, {"algorithm": {"reward_signals": {"rnd": {"strength": 2.0, "learning_rate": 1e-2}}}},
    ),
    "two policies, one with gaussian actions and one encoder": (
        2, {
            "environment": {"id": f"{MODULE}:Chase", "api": "pettingzoo", "num_envs": 4, "kwargs": {"cat_steps": 2}},
            "policies": {"hunter": {"hidden_sizes": [8]}, "prey": {"hidden_sizes": [8], "share_encoder": True}},
            "agents": {"cat": "hunter", "mouse": "prey"}, "algorithm": {"minibatch_size": 60},
        },
    ),
}  # fmt: skip


@pytest.mark.parametrize("case", some_quick(CASES, "uneven slices, terms of every kind"))
def test_the_gradients_of_several_ranks_are_those_of_one(case: str) -> None:
    ranks, sections = CASES[case]
    sections = dict(sections)
    algorithm = {"epochs": 1, "learning_rate": 0.0, "max_grad_norm": 1e6} | sections.pop("algorithm", {})
    together, alone = Side(ranked(ranks, algorithm, **sections)), Side(ranked(1, algorithm, **sections))
    with local_ranks(together.config, together.learner, together.taken(), together.description) as group:
        for fragments in experience(alone.config, 2):
            with group.turn(fragments, Phase.TRAIN):
                found = learn(together.learner, fragments)
            expected = learn(alone.learner, fragments)
            assert set(found) == set(expected)
            assert found == pytest.approx(expected, rel=1e-3, abs=1e-5, nan_ok=True)
            have_the_same_gradients(together, alone)


@pytest.mark.processes
def test_three_ranks_come_to_the_same_bits_in_every_life_wherever_it_begins() -> None:
    config = ranked(
        3, heatup="64 env_steps", algorithm={"minibatch_size": 20, "target_kl": 0.003, "learning_rate": 1e-2}
    )
    log = experience(config, 7)
    phases = [Phase.HEATUP] + [Phase.TRAIN] * 6

    def life(side: Side, first: int, last: int) -> list[float]:
        steps = []
        with local_ranks(config, side.learner, side.taken(), side.description) as group:
            for fragments, phase in zip(log[first:last], phases[first:last], strict=True):
                with group.turn(fragments, phase):
                    steps.append(learn(side.learner, fragments, phase).get("train/gradient_steps", 0.0))
        return steps

    whole, cut = Side(config), Side(config)
    steps = life(whole, 0, 7)
    assert steps[0] == 0 and 1 <= min(steps[1:]) < max(steps[1:]) <= 8, f"target_kl stops some updates early: {steps}"
    stored = cut.taken()
    for first, last in ((0, 3), (3, 7)):
        cut = Side(config)
        snapshot.restore(cut.learner, Checkpoint(stored.manifest, stored.objects))
        life(cut, first, last)
        stored = cut.taken()
    assert cut.weights() == whole.weights()
    assert cut.taken().objects == whole.taken().objects
    assert whole.taken().manifest.provenance["computed_with"]["ranks"] == "3"


@pytest.mark.processes
def test_a_rank_with_other_weights_is_noticed_and_weights_that_break_are_told_as_ever() -> None:
    side = Side(ranked(2))
    fragments, *_ = experience(side.config, 1)
    with local_ranks(side.config, side.learner, side.taken(), side.description) as group:
        with group.turn(fragments, Phase.TRAIN):
            learn(side.learner, fragments)
        with torch.no_grad():
            side.learner.policies["default"].get_parameter("head.weight").mul_(1.001)
        with (
            pytest.raises(RanksDiffer, match=r"after update 2 rank 1 of 2 has other weights than rank 0"),
            group.turn(fragments, Phase.TRAIN),
        ):
            learn(side.learner, fragments)
    broken = Side(ranked(2, {"learning_rate": 1e30, "max_grad_norm": 1e30}))
    with (
        local_ranks(broken.config, broken.learner, broken.taken(), broken.description) as group,
        pytest.raises(WeightsNotFinite),
        group.turn(fragments, Phase.TRAIN),
    ):
        learn(broken.learner, fragments)


def test_a_process_that_is_gone_breaks_the_group(monkeypatch: pytest.MonkeyPatch) -> None:
    side = Side(ranked(3))
    fragments, *_ = experience(side.config, 1)
    started: list[Any] = []
    start = local._started

    def noting(*arguments: Any) -> Any:
        started.append(start(*arguments))
        return started[-1]

    def life() -> None:
        with local_ranks(side.config, side.learner, side.taken(), side.description) as group:
            with group.turn(fragments, Phase.TRAIN):
                learn(side.learner, fragments)
            started[1].kill()
            started[1].wait()
            with group.turn(fragments, Phase.TRAIN):
                learn(side.learner, fragments)

    monkeypatch.setattr(local, "_started", noting)
    with pytest.raises(GroupBroken, match=r"^gloo: [A-Z]"):
        life()
    assert all(process.poll() is not None for process in started)
    assert side.learner.counters.train.updates == 1
