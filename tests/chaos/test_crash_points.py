"""A crash between every two writes of a run: of its trainer, of a trainer that restarts, of worker and evaluator."""

from __future__ import annotations

import logging
import re
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from stagecoach.shared.config.run_config import Config
from stagecoach.shared.protocol import payload_shards
from stagecoach.shared.protocol.payload_shards import named_bodies
from stagecoach.shared.storage.shared_objects import SHARED_OBJECTS
from stagecoach.trainer_node.checkpointing import checkpoint_writer
from stagecoach.trainer_node.metrics import recorder
from stagecoach.trainer_node.replay.comparison import replay
from tests.conftest import RedisServer
from tests.support.environments.games import MODULE, NIM
from tests.support.environments.small import CHASE, CHASE_POLICIES
from tests.support.protocol.crash_points import Life, Run
from tests.support.runs.builders import shard_fields
from tests.support.runs.game import small
from tests.support.suite.groups import thinned

NewRun = Callable[..., Run]
LEAGUE_OF_NIM: dict[str, Any] = {
    "environment": NIM | {"num_envs": 3},
    "league": {
        "snapshot": {"every": "12 env_steps"}, "fixed": {"chance": "random", "one": f"{MODULE}:takes_one"},
        "opponents": {"latest": 0.2, "past": 0.4, "fixed": 0.4},
    },
}  # fmt: skip
_VARIES = re.compile(r"/[0-9a-f]{16}/|\d+")
"""Uploads and numbers in the names of writes."""
pytestmark = [pytest.mark.timeout(600), pytest.mark.thinned]


@pytest.fixture
def new_run(redis_server: RedisServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[NewRun]:
    """`new_run(config)` → a new run; the one before it is cleared away."""
    monkeypatch.setattr(
        checkpoint_writer, "_TICK_SECONDS", 3600.0
    )  # it looks for scores when it is told to, not by the clock
    monkeypatch.setattr(recorder, "PAUSE_SECONDS", 3600.0)  # nor does it record what the fleet does meanwhile
    logging.disable(logging.CRITICAL)
    runs: list[Run] = []
    memory = Path("/dev/shm")
    with tempfile.TemporaryDirectory(dir=memory if memory.is_dir() else tmp_path) as folder:

        def make(config: Config, memory: bool = False) -> Run:
            if runs:
                runs[-1].end()
            runs.append(Run(redis_server, Path(folder) / str(len(runs)), config, memory))
            return runs[-1]

        yield make
        if runs:
            runs[-1].end()
    logging.disable(logging.NOTSET)


def crashing(
    transport: str = "redis", updates: int = 4, every: str | None = None, *, sections: Any = None, **stop: float
) -> Config:  # fmt: skip
    """A checkpoint every two updates, of which only the newest and the best stay."""
    return small(
        metrics={"episodes": True, "writers": []},
        evaluation={"episodes": 1, "every": every},
        rollout={"fragment_steps": 8, "fragments_per_update": 2},
        heatup="64 env_steps",
        checkpoint={"every": "2 updates", "keep_last": 1, "keep_best": 1},
        policy_versions={"transport": transport},
        stop_at={"updates": updates, **stop},
        archive="all",
        **(sections or {}),
    )


def undisturbed(new_run: NewRun, config: Config) -> tuple[dict[str, Any], Life]:
    """The run as it goes when nothing happens: what it comes to, and what its trainer wrote."""
    run, life = new_run(config), Life()
    assert run.train(life)
    return run.outcome(), life


def act_alone(run: Run) -> None:
    """The worker goes on while there is no trainer. What is there then is what the crash left."""
    run.look()
    for _ in range(3):
        run.act()


def test_trainer_dies_between_any_two_writes(new_run: NewRun) -> None:
    """And then, for each course that a restart takes, between any two writes of the restart."""
    config = crashing()
    expected, whole = undisturbed(new_run, config)
    courses: dict[tuple[str, ...], int] = {}
    for first in thinned(range(len(whole.done))):
        course = die_and_come_through(new_run(config), expected, first)
        courses.setdefault(course, first)
    points = [(first, second) for course, first in courses.items() for second in range(len(course))]
    for first, second in thinned(points):
        die_and_come_through(new_run(config), expected, first, second)


def test_trainer_dies_while_it_publishes_through_the_store(new_run: NewRun) -> None:
    config = crashing("object_store", updates=2)
    expected, whole = undisturbed(new_run, config)
    for point in thinned(range(len(whole.done))):
        die_and_come_through(new_run(config), expected, point)


@pytest.mark.parametrize("transport", ["redis", "object_store"])
def test_trainer_dies_while_evaluations_are_due(new_run: NewRun, transport: str) -> None:
    """Each takes place, and rows of metrics and evaluations are those of the undisturbed run."""
    config = crashing(transport, updates=3, every="1 updates")
    expected, whole = undisturbed(new_run, config)
    assert [row["policy/version"] for _, row in expected["evaluations"]] == [2, 3, 4], "after one of warm-up"
    for point in thinned(range(len(whole.done))):
        die_and_come_through(new_run(config), expected, point)


def test_league_trainer_dies_between_any_two_writes(new_run: NewRun) -> None:
    """A snapshot joins, is listed, and leaves: ratings, players and what the store keeps of them are the same."""
    league = {"snapshot": {"every": "4 episodes"}, "players": 4, "opponents": {"latest": 0.4, "past": 0.6}}
    kwargs = {"cat_steps": 3, "mouse_steps": 5, "counts": False}
    config = crashing(
        updates=6,
        sections={"environment": CHASE | {"kwargs": kwargs, "num_envs": 4}, "league": league, **CHASE_POLICIES},
    )
    expected, whole = undisturbed(new_run, config)
    assert len({write for write in whole.done if write.startswith(f"put {SHARED_OBJECTS}")}) == 14, (
        "the first, and two at each update"
    )
    for point in thinned(range(len(whole.done))):
        run = new_run(config)
        die_and_come_through(run, expected, point)
        checkpoints = run.role.checkpoints
        listed = {name: {*checkpoints.manifest(name).provenance["shared_objects"]} for name in checkpoints.names()}
        there = {key.removeprefix(SHARED_OBJECTS) for key in checkpoints.store.keys(SHARED_OBJECTS)}
        assert there == set().union(*listed.values()), f"after a crash at the write {point}"
        assert len(there) < 14


def die_and_come_through(run: Run, expected: dict[str, Any], *points: int) -> tuple[str, ...]:
    """Trainers that end before these writes of theirs, and one that comes through; answers how that one started."""
    for point in points:
        assert not run.train(Life(point, glance=run.glance))
        act_alone(run)
    last = Life(glance=run.glance)
    assert run.train(last)
    run.look()
    assert run.outcome() == expected, f"after crashes at the writes {points}"
    return tuple(_VARIES.sub("", write) for write in last.start)


def test_trainer_dies_while_it_rolls_back(new_run: NewRun) -> None:
    """The newest one is altered and the log behind the older one is gone: its weights go on as a newer version."""
    config = crashing()
    _, whole = undisturbed(new_run, config)
    trimmed = [number for number, write in enumerate(whole.done) if write == "trim"][1] + 1

    def go_back(*points: int) -> Life:
        run = new_run(config)
        for number, point in enumerate((trimmed, *points)):
            assert not run.train(Life(point, glance=run.glance))
            if number == 0:
                run.damage_newest()
            act_alone(run)
        last = Life(glance=run.glance)
        assert run.train(last)
        run.look()
        outcome = run.outcome()
        assert outcome["reason"] == "exhausted" and outcome["state"]["counters"]["train"]["updates"] == 4
        return last

    points = len(go_back().start)
    for point in thinned(range(points)):
        go_back(point)


def test_trainer_dies_while_its_publisher_is_behind(new_run: NewRun) -> None:
    """The publisher stands before each of its writes while three more versions are published; then both die."""
    config = crashing()
    expected, whole = undisturbed(new_run, config)
    points = range(whole.behind_at["start"], whole.behind_at["end"])
    tried = 0
    for held in thinned(points):
        run = new_run(config)
        if run.train(Life(hold=held, glance=run.glance), updates_while_held=3):
            assert run.outcome() == expected
            continue  # how often its status is written depends on the clock: this time it made no write of that number
        tried += 1
        act_alone(run)
        assert run.train(Life(glance=run.glance))
        assert run.outcome() == expected, f"after a crash with the publisher at its write {held}"
    assert tried


def test_trainer_returns_after_its_successor_ended_the_run(new_run: NewRun) -> None:
    """Cut off before each of its writes and let go later: it ends that one request, and is refused the next."""
    config = crashing()
    expected, whole = undisturbed(new_run, config)
    for point in thinned(range(1, len(whole.done))):
        run, old = new_run(config), Life(pause=point)
        thread = run.partitioned(old)
        act_alone(run)
        assert run.train(Life(glance=run.glance))
        assert run.outcome() == expected
        redis_before, store_before = run.contents()
        old.go_on.set()
        thread.join()
        redis_after, store_after = run.contents()
        assert redis_after == redis_before, f"let go at its write {point}: {old.done[point:]}"
        touched = {key for key in {*store_before, *store_after} if store_before.get(key) != store_after.get(key)}
        assert touched <= {write.partition(" ")[2] for write in old.done[point : point + 1]}, (
            f"let go at its write {point}: {old.done[point:]}"
        )


@pytest.mark.parametrize("sections", [None, LEAGUE_OF_NIM], ids=["one agent", "in mid-match"])
def test_worker_dies_between_any_two_writes(new_run: NewRun, sections: dict[str, Any] | None) -> None:
    """Its successor acts again what it had not pushed, in a league in the same seats against the same players; where
    nothing was pushed yet, it begins a life of its own."""
    config = crashing(updates=2, sections=sections)
    run = new_run(config)
    assert run.train(Life())
    expected, writes = learned(run), run.worker_life.done
    for point in thinned(range(len(writes))):
        run = new_run(config)
        run.worker_life = Life(point)
        assert run.train(Life(glance=run.glance))
        run.look()
        if point > writes.index("push"):
            assert learned(run) == expected, f"a worker that died before its write {point}: {writes[point]}"
        final = run.outcome()["kept"][-1]
        found = replay(run.role.checkpoints, config, run.role.description(), "start", final)
        assert found.equal, f"a worker that died before its write {point} ({writes[point]}): {found.different}"


@pytest.mark.parametrize("where", ["shards", "shared memory"])
@pytest.mark.parametrize("who", ["worker", "trainer"])
def test_role_dies_between_writes_with_bodies_outside_log(
    new_run: NewRun, redis_server: RedisServer, monkeypatch: pytest.MonkeyPatch, who: str, where: str
) -> None:
    """Shards are other databases of the same server. Bodies and sweeps are writes as well. Nothing is left behind."""
    monkeypatch.setattr(payload_shards, "AT_LEAST", 1)
    config, memory = crashing(updates=2), where == "shared memory"
    if not memory:
        redis = {"url": redis_server.url, "shards": [f"{redis_server.url}/{db}" for db in (1, 2)]}
        config = config.model_copy(update={"redis": type(config.redis)(**redis)})
    run, life = new_run(config, memory), Life()
    assert run.train(life)
    expected, writes = learned(run), (life if who == "trainer" else run.worker_life).done
    assert {"worker": ("HSET", "body"), "trainer": ("HDEL", "free")}[who][memory] in writes
    first = writes.index("push") + 1 if who == "worker" else 0
    for point in thinned(range(first, len(writes))):
        run = new_run(config, memory)
        if who == "worker":
            run.worker_life = Life(point)
        elif not run.train(Life(point, glance=run.glance)):
            act_alone(run)
        assert run.train(Life(glance=run.glance))
        run.look()
        assert learned(run) == expected, f"a {who} that died before its write {point}: {writes[point]}"
        run.role.flow.register("worker-0")  # no push of a former life can come any more
        run.role.bodies.sweep(run.role.redis)
        named = named_bodies(run.role.redis, run.role.run_id)
        there = {name for name in run.role.bodies.memory.names() if name.startswith("worker-0:")}
        there |= {f"worker-0:{field}" for field in shard_fields(run.role, "worker-0")}
        assert {f"{worker}:{place.field}" for worker, place in named if worker == "worker-0"} == there


def learned(run: Run) -> dict[str, Any]:
    """Result of the run, without which incarnation of the worker pushed what."""
    outcome = run.outcome()
    for account in outcome["state"]["ledger"].values():
        del account["high_water"]
    return outcome


@pytest.mark.parametrize("every", [None, "1 updates"])
def test_evaluator_dies_between_any_two_writes(new_run: NewRun, every: str | None) -> None:
    """The scores choose the best checkpoint and end the run: each counts, and none counts twice."""
    config = crashing(mean_return=1.0, evaluations=2, every=every)
    expected, _ = undisturbed(new_run, config)
    assert expected["reason"] == "solved"
    run = new_run(config)
    assert run.train(Life())
    writes = run.evaluator_life.done
    for point in thinned(range(len(writes))):
        run = new_run(config)
        run.evaluator_life = Life(point)
        assert run.train(Life(glance=run.glance))
        run.look()
        assert run.outcome() == expected, f"an evaluator that died before its write {point}: {writes[point]}"
