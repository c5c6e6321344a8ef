"""Ranks that learn together, in real processes over gloo: the same on all of them, and the same as one alone.

That all ranks have the same weights after each update is looked at by the product itself (`ranks._compare`); a test
shows that it can tell.
"""

from __future__ import annotations

import subprocess
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from stagecoach.shared.base.errors import WeightsNotFinite
from stagecoach.shared.config.run_config import Config
from stagecoach.shared.experience.counters import Phase
from stagecoach.shared.experience.fragment import Fragment
from stagecoach.trainer_node.distributed import local_followers as local
from stagecoach.trainer_node.distributed.leader import RanksDiffer
from stagecoach.trainer_node.distributed.local_followers import local_ranks
from stagecoach.trainer_node.distributed.process_group import Group, GroupBroken, RankShard
from stagecoach.trainer_node.learning.building_blocks.compilation import has_compiler
from stagecoach.trainer_node.state import snapshot
from tests.support.environments.small import MODULE
from tests.support.learning.cases import CASES as ALGORITHMS
from tests.support.learning.cases import ON_POLICY_FIELDS, config_of
from tests.support.learning.learners import Side, copies, experience, have_the_same_gradients, learn
from tests.support.runs.game import small
from tests.support.suite.groups import some_quick

pytestmark = pytest.mark.timeout(180)
COMPILING = [
    pytest.mark.skipif(not has_compiler(), reason="torch.compile needs a C++ compiler"),
    pytest.mark.filterwarnings("ignore:.*script_method:DeprecationWarning"),  # PyTorch's own, as it loads its compiler
]


def ranked(ranks: int, algorithm: dict[str, Any] | None = None, **sections: Any) -> Config:
    """The small run (64 transitions an update), by so many ranks."""
    settings: dict[str, Any] = {"minibatch_size": 32, "epochs": 2} if algorithm is None else algorithm
    return small(algorithm=settings, **{"trainer": {"ranks": ranks}} | sections)


CASES: dict[str, tuple[int, dict[str, Any]]] = {
    "uneven slices, terms of every kind": (
        3, {"algorithm": {"minibatch_size": 64, "clip_range_value": 0.1, "entropy_coefficient": 0.01}},
    ),
    "minibatches of one row": (3, {"algorithm": {"minibatch_size": 1}}),
    **{name: (2, {"algorithm": {"name": name, **ON_POLICY_FIELDS[name]}}) for name in ("a2c", "appo", "impala")},
    "cloning, which leaves the critic alone": (
        3, {"algorithm": {"name": "bc", "minibatch_size": 4}, "dataset": {"path": "never-read.csv"}},
    ),
    "demonstrations beside rewards, fewer of them than ranks": (
        3, {
            "algorithm": {
                "minibatch_size": 32, "behavioral_cloning": {"strength": 0.5, "minibatch_size": 2},
                "reward_signals": {"gail": {"learning_rate": 1e-2}},
            },
            "demonstrations": {"path": str(Path(__file__).parents[2] / "shared" / "datasets" / "minari_cartpole")},
        },
    ),
    "a policy with a core, minibatches of one slot": (
        2, {
            "policies": {"default": {"core": "lstm", "core_size": 6, "share_encoder": True, "hidden_sizes": [8]}},
            "algorithm": {"minibatch_size": 8},
        },
    ),
    "reward signals, which every rank learns whole": (
        2, {"algorithm": {
            "minibatch_size": 32, "reward_signals": {"rnd": {"strength": 2.0, "learning_rate": 1e-2}},
        }},
    ),
    "two policies, one with gaussian actions and one encoder": (
        2, {
            "environment": {"id": f"{MODULE}:Chase", "api": "pettingzoo", "num_envs": 4, "kwargs": {"cat_steps": 2}},
            "policies": {"hunter": {"hidden_sizes": [8]}, "prey": {"hidden_sizes": [8], "share_encoder": True}},
            "agents": {"cat": "hunter", "mouse": "prey"}, "algorithm": {"minibatch_size": 60},
        },
    ),
    "compiled": (2, {"algorithm": {"minibatch_size": 32}, "trainer": {"ranks": 2, "compile": True}}),
}  # fmt: skip


def disturb(fragments: list[Fragment], seed: int) -> None:
    """As if other policies had acted."""
    random = np.random.default_rng(seed)
    for columns in (columns for item in fragments for columns in item.columns.values()):
        columns["log_prob"] = columns["log_prob"] + random.normal(0.0, 0.5, columns["log_prob"].shape).astype(
            np.float32
        )


@pytest.mark.parametrize(
    "case",
    [
        *some_quick(list(CASES)[:-1], "uneven slices, terms of every kind"),
        pytest.param("compiled", marks=[pytest.mark.compile, pytest.mark.timeout(300), *COMPILING]),
    ],
)
def test_gradients_of_several_ranks_equal_those_of_one(case: str) -> None:
    """And the one compiles nothing."""
    ranks, sections = CASES[case]
    algorithm = sections["algorithm"] | {"learning_rate": 0.0, "max_grad_norm": 1e6}
    if "minibatch_size" in algorithm:
        algorithm["epochs"] = 1
    sections = {name: section for name, section in sections.items() if name != "algorithm"}
    together = Side(ranked(ranks, algorithm, **sections))
    alone = Side(ranked(1, algorithm, **sections | {"trainer": {}}))
    with local_ranks(together.config, together.learner, together.taken(), together.description) as group:
        for number, fragments in enumerate(experience(alone.config, 2)):
            disturb(fragments, number)
            with group.turn(fragments, Phase.TRAIN):
                found = learn(together.learner, fragments)
            expected = learn(alone.learner, fragments)
            assert set(found) == set(expected)
            assert found == pytest.approx(expected, rel=1e-3, abs=1e-5, nan_ok=True)
            have_the_same_gradients(together, alone)


REPLAYING = [name for name in ALGORITHMS if "replay_buffer" in ALGORITHMS[name][1]] + ["iql", "td3_bc"]


def replaying(case: str, folder: Path, ranks: int, **algorithm: Any) -> Config:
    """An algorithm with a replay buffer; of its minibatches of 16 rows three ranks have 5, 5 and 6."""
    if case.startswith("r2d2"):  # 3 sequences
        algorithm |= {"minibatch_size": 24}
    found = config_of(case, folder, heatup="64 env_steps")
    settings = found.model_dump(mode="json", exclude_unset=True)
    algorithm = settings["algorithm"] | algorithm
    return Config.model_validate(settings | {"algorithm": algorithm, "trainer": {"ranks": ranks}})


class Threads(Group):
    """A rank that exchanges with others of this process."""

    def __init__(self, rank: int, barrier: threading.Barrier, parts: dict[int, Tensor]) -> None:
        self.rank, self.size, self._barrier, self._parts = rank, barrier.parties, barrier, parts

    def total(self, part: Tensor) -> Tensor:
        self._parts[self.rank] = part.detach().clone()
        self._barrier.wait(60)
        total, *others = (self._parts[rank] for rank in range(self.size))
        for other in others:
            total = total + other
        self._barrier.wait(60)
        return total


@pytest.mark.parametrize("case", some_quick(REPLAYING, "rainbow", "sac"))
def test_ranks_with_same_replay_buffer_learn_as_one(case: str, tmp_path: Path) -> None:
    """From minibatches whose parts differ in rows and weights; with and without rounding between them and one."""
    barrier, parts = threading.Barrier(3), dict[int, Tensor]()
    for rate in (0.0, 1e-3):
        configs = [replaying(case, tmp_path, ranks, learning_rate=rate, max_grad_norm=1e6) for ranks in (1, 3, 3, 3)]
        alone, *together = map(Side, configs)
        for rank, side in enumerate(together):
            for algorithm in side.learner.algorithms.values():
                algorithm.shard = RankShard(Threads(rank, barrier, parts))
        for fragments in experience(alone.config, 3):
            with ThreadPoolExecutor(3) as pool:
                found, *others = pool.map(learn, (side.learner for side in together), [fragments] * 3)
            expected = learn(alone.learner, fragments)
            assert expected["train/gradient_steps"] > 1 and others == [found, found]
            if not rate:
                assert found == pytest.approx(expected, rel=1e-3, abs=1e-5)
                have_the_same_gradients(together[0], alone)
        first, *rest = (side.taken().checkpoint.objects for side in together)
        assert rest == [first, first]


def appo(folder: Path) -> Config:
    """It has a target network beside what PPO has."""
    algorithm = {**ON_POLICY_FIELDS["appo"], "name": "appo", "target_kl": 0.003, "learning_rate": 1e-2}
    return ranked(3, algorithm, heatup="64 env_steps")


@pytest.mark.processes
@pytest.mark.parametrize("case", ["appo", "rainbow", "r2d2"])
def test_three_ranks_resume_exactly_from_anywhere(case: str, tmp_path: Path) -> None:
    """And with a replay buffer, which the others get from rank 0."""
    config = appo(tmp_path) if case == "appo" else replaying(case, tmp_path, 3)
    log = experience(config, 7)
    logged = [item for fragments in log for item in fragments]
    phases = [Phase.HEATUP] + [Phase.TRAIN] * 6

    def life(side: Side, first: int, last: int) -> list[float]:
        steps = []
        held = [item for position in side.learner.remembered for item in logged if item.position == position]
        side.learner.recall(copies(held))
        with local_ranks(config, side.learner, side.taken(), side.description, held) as group:
            for fragments, phase in zip(log[first:last], phases[first:last], strict=True):
                with group.turn(fragments, phase):
                    steps.append(learn(side.learner, fragments, phase).get("train/gradient_steps", 0.0))
        return steps

    whole, cut = Side(config), Side(config)
    steps = life(whole, 0, 7)
    assert steps[0] == 0 and min(steps[1:]) >= 1
    if case == "appo":
        assert min(steps[1:]) < max(steps[1:]) <= 8, f"target_kl stops some updates early: {steps}"
    stored = cut.taken().checkpoint
    for first, last in ((0, 3), (3, 7)):
        cut = Side(config)
        snapshot.restore(cut.learner, stored)
        life(cut, first, last)
        stored = cut.taken().checkpoint
    assert cut.weights() == whole.weights()
    assert cut.taken().checkpoint.objects == whole.taken().checkpoint.objects
    assert whole.taken().checkpoint.manifest.provenance["computed_with"]["ranks"] == "3"


@pytest.mark.processes
def test_leader_detects_rank_with_other_or_broken_weights() -> None:
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
    broken = Side(ranked(2, {"minibatch_size": 32, "learning_rate": 1e30, "max_grad_norm": 1e30}))
    with (
        local_ranks(broken.config, broken.learner, broken.taken(), broken.description) as group,
        pytest.raises(WeightsNotFinite),
        group.turn(fragments, Phase.TRAIN),
    ):
        learn(broken.learner, fragments)


def test_killed_process_breaks_the_group(monkeypatch: pytest.MonkeyPatch) -> None:
    side = Side(ranked(3))
    fragments, *_ = experience(side.config, 1)
    started: list[Any] = []

    class Noted(subprocess.Popen[str]):
        def __init__(self, *arguments: Any, **options: Any) -> None:
            super().__init__(*arguments, **options)
            started.append(self)

    def life() -> None:
        with local_ranks(side.config, side.learner, side.taken(), side.description) as group:
            with group.turn(fragments, Phase.TRAIN):
                learn(side.learner, fragments)
            started[1].kill()
            started[1].wait()
            with group.turn(fragments, Phase.TRAIN):
                learn(side.learner, fragments)

    monkeypatch.setattr(subprocess, "Popen", Noted)
    monkeypatch.setattr(local, "_MESSAGE_SECONDS", 20.0)  # gloo does not always see at once that a member is gone
    with pytest.raises(GroupBroken, match=r"^gloo: [A-Z]"):
        life()
    assert all(process.poll() is not None for process in started)
    assert side.learner.counters.train.updates == 1


def test_stuck_gloo_exchange_breaks_the_group(monkeypatch: pytest.MonkeyPatch) -> None:
    """Seen once when a member was killed: gloo's thread had locked up. That cannot be made to order."""

    class Stuck:
        def wait(self, timeout: Any) -> None:
            assert timeout.total_seconds() > side.config.trainer.rank_timeout_seconds, "gloo's own deadline comes first"
            raise RuntimeError("Operation timed out!")

    side = Side(ranked(2))
    fragments, *_ = experience(side.config, 1)
    with (
        local_ranks(side.config, side.learner, side.taken(), side.description) as group,
        monkeypatch.context() as patch,
    ):
        patch.setattr("torch.distributed.broadcast", lambda *arguments, **named: Stuck())
        with pytest.raises(GroupBroken, match="did not end within"), group.turn(fragments, Phase.TRAIN):
            pass
