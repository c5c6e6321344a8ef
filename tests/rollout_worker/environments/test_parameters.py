"""Parameters of episodes: the drawn values reach the environment and the record."""

from __future__ import annotations

from typing import Any

import gymnasium as gym
import numpy as np
import pytest

from stagecoach.rollout_worker.environments.description import describe_environment
from stagecoach.rollout_worker.environments.parameters import EpisodeParameters
from stagecoach.rollout_worker.environments.seeding import SeedLineage, episode_seed
from stagecoach.rollout_worker.playing import evaluate_policies
from stagecoach.rollout_worker.sampling.director import Directors
from stagecoach.shared.base.errors import ConfigError, EnvironmentUnusable
from stagecoach.shared.config.environments.parameters import table_at
from stagecoach.shared.experience.counters import Phase
from stagecoach.shared.experience.fragment import EpisodeRecord
from tests.conftest import minimal_config
from tests.support.environments.lessons import MODULE, Open
from tests.support.environments.levels import THREE, corridor
from tests.support.environments.stage import Stage

CORRIDOR: dict[str, Any] = {"id": f"{MODULE}:Corridor"}
LENGTH: dict[str, Any] = {"parameters": {"length": {"choice": [1, 2, 3]}, "wind": {"uniform": [0, 9]}}}
KINDS: dict[str, dict[str, Any]] = {
    "options": CORRIDOR | LENGTH,
    "attributes": CORRIDOR | LENGTH | {"parameters_by": "attributes"},
    "through wrappers": CORRIDOR | LENGTH | {"parameters_by": "attributes", "max_episode_steps": 50},
    "rebuilt": CORRIDOR | LENGTH | {"parameters_by": "rebuild"},
    "async": CORRIDOR | LENGTH | {"vectorization": "async"},
    "native": {
        "id": f"{MODULE}:poles", "vectorization": "native", "parameters": {"length": {"log_uniform": [0.01, 1]}},
    },
    "parallel": {"api": "pettingzoo", "id": f"{MODULE}:Pair", "parameters": {"length": {"choice": [2, 3, 4]}}},
    **{
        f"levels by {by}": corridor(
            [THREE[0], THREE[2]], id=f"{MODULE}:Maze", parameters={"steps": {"choice": [2, 3, 4]}}, parameters_by=by
        )
        for by in ("options", "rebuild")
    },
    "in turns": {
        "api": "pettingzoo", "id": f"{MODULE}:TurnsWithLuck", "parameters": {"luck_of": {"uniform": [0, 1]}},
        "parameters_by": "attributes",
    },
}  # fmt: skip
KINDS["async in turns"] = KINDS["in turns"] | {"vectorization": "async"}


class Parameterized(Stage):
    """Stage whose sampler draws parameters from the first lessons' table."""

    def __init__(self, environment: dict[str, Any], left: Any = ()) -> None:
        levels = [level["policy"] for level in environment.get("hierarchy", {}).get("levels", ())]
        policies: dict[str, Any] = {"policies": {name: {"hidden_sizes": [8]} for name in levels}} if levels else {}
        super().__init__(environment, left=left, **policies)

    def direct(self) -> Directors:
        table = table_at(self.config.environment.parameters, {})
        assert table is not None
        self.drawn = EpisodeParameters(table, 2)
        return Directors(self.drawn)

    def records(self, samples: int = 4) -> list[EpisodeRecord]:
        return [record for _ in range(samples) for record in self.sample(9).episodes]


@pytest.fixture
def closing() -> Any:
    opened: list[Parameterized] = []
    yield opened.append
    for stage in opened:
        stage.sampler.close()


@pytest.mark.parametrize("kind", KINDS)
def test_parameters_follow_seed_and_are_recorded(kind: str, closing: Any) -> None:
    stage = Parameterized(KINDS[kind])
    closing(stage)
    records = stage.records(20 if kind == "native" else 4)
    assert len(records) > 4 and len({tuple(record.parameters.items()) for record in records}) > 2
    seeds, table = SeedLineage(1, 0, 0, 0).environments(2), table_at(stage.config.environment.parameters, {})
    expected = [table.draw(episode_seed(seed, number)) for seed in seeds for number in range(len(records))]
    for record in records:
        assert record.parameters in expected
        told = {name.rpartition(".")[2]: value for name, value in record.metrics.items()}
        if "in turns" not in kind:
            assert told["given"] in (record.parameters.get("length"), record.parameters.get("steps"))
        if "blown" in told:
            assert told["blown"] == record.parameters["wind"]
    if "in turns" in kind:
        columns = stage.sample(9).columns["default"]
        seen = columns["obs"][columns["mask"]][:, 2].tolist()
        assert set(seen) <= {float(np.float32(its["luck_of"])) for its in expected}


class Phased(gym.Wrapper[Any, Any, Any, Any]):
    """Pays by phase: 1 in warm-up, 2 in training, 3 in a test; half of it while paused."""

    phase, paused = "", True

    def set_phase(self, phase: str) -> None:
        self.phase = phase

    def set_paused(self, paused: bool) -> None:
        self.paused = paused

    def step(self, action: Any) -> Any:
        observation, _, *rest = super().step(action)
        pays = ["", "heatup", "train", "test"].index(self.phase)
        return observation, float(pays) / (1 + self.paused), *rest


@pytest.mark.parametrize("vectorization", ["sync", "async"])
@pytest.mark.parametrize("by", ["options", "attributes", "rebuild"])
def test_phase_survives_each_way_of_parameters(by: str, vectorization: str, closing: Any) -> None:
    wrapped = {"wrappers": [{"path": f"{__name__}:Phased"}], "parameters_by": by, "vectorization": vectorization}
    stage = Parameterized(CORRIDOR | LENGTH | wrapped)
    closing(stage)
    for phase, paid in ((Phase.HEATUP, 1.0), (Phase.TRAIN, 2.0)):
        stage.sampler.set_phase(phase)
        assert set(stage.sample(20).columns["default"]["reward"].reshape(-1).tolist()) == {paid}
    scores = evaluate_policies(stage.config, stage.description, stage.policies, seed=1, episodes=4)
    assert all(record.episode_return == 1.5 * record.length for record in scores), "evaluation never pauses"


def test_parameters_refuse_episodic_life() -> None:
    wrapped = {"wrappers": [{"path": "stagecoach.rollout_worker.environments.wrappers:EpisodicLife"}]}
    with pytest.raises(ConfigError, match=r"environment\.wrappers has EpisodicLife.*leave one of them out"):
        describe_environment(minimal_config(environment=CORRIDOR | LENGTH | wrapped))


@pytest.mark.parametrize("kind", [kind for kind in KINDS if kind not in ("async", "native")])
def test_successor_resumes_episodes_with_parameters(kind: str, closing: Any) -> None:
    """Parameters are in the action trace, since the table may have changed."""
    one, undisturbed = Parameterized(KINDS[kind]), Parameterized(KINDS[kind])
    for stage in (one, undisturbed):
        closing(stage)
        for _ in range(3):
            stage.sample(7)
    other = Parameterized(KINDS[kind], one.left)
    closing(other)
    assert other.past is not None and other.sampler.position_digest == other.past.digest
    assert other.drawn.trace() == one.drawn.trace()
    for _ in range(3):
        assert other.sample(7).episodes == undisturbed.sample(7).episodes


def test_evaluation_uses_last_lesson_or_own_parameters() -> None:
    lessons = [{"value": 1, "until": {"success": 1.0}}, {"choice": [2, 3]}]
    environment = CORRIDOR | {"parameters": {"length": {"lessons": lessons}}, "num_envs": 2}
    for instead, expected in (({}, {2, 3}), ({"length": 5}, {5})):
        config = minimal_config(environment=environment, evaluation={"parameters": instead})
        stage = Stage(environment)
        stage.sampler.close()
        records = evaluate_policies(config, stage.description, stage.policies, 0, 8)
        assert {record.parameters["length"] for record in records} == expected
        assert {record.metrics["given"] for record in records} == expected


@pytest.mark.parametrize(
    ("environment", "said"),
    [
        ({"parameters": {"height": 1}}, "takes no reset option height; it takes length, wind"),
        ({"parameters": {"height": 1}, "parameters_by": "attributes"}, "no attribute height; .* it has length, .*wind"),
        ({"parameters": {"height": 1}, "parameters_by": "rebuild"}, "unexpected .*'height'; it takes length, wind"),
        ({"parameters": {"length": "far"}}, "cannot be reset with environment.parameters .*'far'"),
    ],
)  # fmt: skip
def test_describe_refuses_unknown_parameters(environment: Any, said: str) -> None:
    with pytest.raises(EnvironmentUnusable, match=said):
        describe_environment(minimal_config(environment=CORRIDOR | environment))


def test_rebuilt_environment_is_closed_when_reset_fails() -> None:
    lessons = {"length": {"lessons": [{"value": 1, "until": {"progress": 0.5}}, {"value": 3}]}}
    environment = {"id": f"{MODULE}:Open", "parameters": lessons, "parameters_by": "rebuild"}
    with pytest.raises(EnvironmentUnusable, match="no corridor of 3"):
        describe_environment(minimal_config(environment=environment, stop_at={"env_steps": 100}))
    assert Open.there == 0
