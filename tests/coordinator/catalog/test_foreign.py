"""What others wrote into Redis, of whatever kind: every reader leaves it out, names it, and goes on with the rest."""

from __future__ import annotations

import io
import json
from collections.abc import Callable
from dataclasses import fields
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from stagecoach.coordinator.catalog.run_folder import RunFolder
from stagecoach.coordinator.catalog.status import is_supervised, live_status
from stagecoach.coordinator.cli.terminal.console import PrintableConsole
from stagecoach.coordinator.cli.terminal.live_view import metrics_table, one_line, print_status
from stagecoach.coordinator.fleet.autoscaler import Scaling
from stagecoach.coordinator.lifecycle.preparation import create_flow, prepare_resume
from stagecoach.coordinator.page.totals import Totals
from stagecoach.coordinator.page.view import jsonable
from stagecoach.coordinator.run_access.run import Run
from stagecoach.rollout_worker.evaluator import Evaluator
from stagecoach.rollout_worker.sampling import action_trace
from stagecoach.shared.protocol import events
from stagecoach.shared.protocol.heartbeat import Beat, Heartbeat, read_heartbeats
from stagecoach.shared.protocol.keys import BEATING, RunKeys
from stagecoach.shared.protocol.ledger import read_accounting
from stagecoach.shared.runtime.run_context import RunContext
from stagecoach.trainer_node.checkpointing.write_stages import checkpoint_in_evaluation
from stagecoach.trainer_node.distributed.leader import Rendezvous
from stagecoach.trainer_node.metrics.recorder import FleetMetrics, Recorder, evaluation_row
from tests.conftest import MakeRole, minimal_config

NAMES = sorted({field.name for field in fields(Beat)} | {
    "version", "mean_return", "checkpoint", "std_return", "episodes", "unplaced", "capacity", "evaluating", "fragments",
    "env_steps", "updates", "phase", "durable", "error", "since", "attempts", "time/fps", "consumed",
    "worker-0", "worker-1", "dropped", "high_water", "host", "port", "size", "incarnation", "lags", "env_steps_played",
    "metrics", "agents", "win_rates", "match_returns", "confirmation", "ranking",
})  # fmt: skip
PLAIN = (
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5) | st.sampled_from([10**400, 1e308])
)
JSON = st.recursive(
    PLAIN,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.sampled_from(NAMES) | st.text(), inner, max_size=8),
    max_leaves=12,
)


BEAT: dict[str, Any] = {
    "pid": 7, "process": "7-a", "host": "here", "address": "", "ended": None, "waiting_for": None,
    "waiting_seconds": 0.0, "deadline_seconds": 0.0, "last_error": None, "waited": {}, "stages": {}, "progress": {},
}  # fmt: skip
SPOILT_BEATS = st.dictionaries(st.sampled_from(NAMES), JSON, max_size=10) | JSON.map(lambda some: {"progress": some})
SPOILT_SCORES = st.dictionaries(st.sampled_from(NAMES), JSON, max_size=6).map(
    lambda some: {"version": 1, "mean_return": 1.0} | some
)
TEXTS = (JSON | SPOILT_BEATS.map(lambda some: BEAT | some) | SPOILT_SCORES).map(json.dumps).map(str.encode)
BYTES = st.binary(max_size=40) | TEXTS | st.just(b"[" * 100_000)
STAMPED = st.builds(bytes.__add__, st.sampled_from([b"", b"1234567890.000000 ", b"1e999 "]), BYTES)
ROLES = st.sampled_from([b"coordinator", b"trainer", b"evaluator", b"rank-1", b"worker-0", b"worker-\xff", b"\xff"])


@pytest.fixture
def role(make_role: MakeRole) -> RunContext:
    made = make_role(minimal_config())
    create_flow(made)
    made.flow.take_over()
    return made


def every_reader(role: RunContext) -> None:
    """What roles and commands do with all that others wrote."""
    status = live_status(role.redis, role.run_id)
    assert json.loads(json.dumps(status.as_dict(), default=str))
    console = PrintableConsole(file=io.StringIO(), width=120)
    print_status(Run(RunFolder(role.run_id, role.config.runs_dir), role.config), status, console)
    console.print(one_line(status))
    console.print(metrics_table(status))
    is_supervised(role.redis, role.run_id)
    after = events.recent_events(role.redis, role.run_id, 3)
    for event in events.read_events(role.redis, role.run_id, after):
        console.print(f"{event.kind:<11} {event.text}")
    beats = {beat.id: beat for beat in read_heartbeats(role.redis, role.run_id)}
    Scaling(role, 2).desired(role.flow.read(), beats, ["worker-0"], [], 4)
    evaluator = Evaluator(role)
    evaluator.step(0.0)
    evaluator.check_solved()
    fleet, totals = FleetMetrics(), Totals()
    for _ in range(2):
        fleet.row(read_heartbeats(role.redis, role.run_id), role.flow.read())
        totals.add(jsonable(status.as_dict()))
    for scores in events.read_evaluations(role.redis, role.run_id).values():
        evaluation_row(scores)
    began = (1, 0, 0, -1)
    recorder = Recorder(role.redis, role.run_id, role.config, None, role.checkpoints.store, began)
    recorder.take_evaluations(events.read_evaluations(role.redis, role.run_id))
    recorder.take_events()
    recorder.close()
    assert not recorder.failures
    checkpoint_in_evaluation(role.redis, role.run_id)
    events.prune_evaluations(role.redis, role.run_id, [])
    Rendezvous(role.redis, role.run_id).next(0.001)
    action_trace.read(role.log().left("worker-0").action_trace)
    prepare_resume(role)


def in_heartbeats(role: RunContext, name: bytes, value: bytes) -> None:
    kind = name.partition(b"-")[0].decode(errors="replace")
    role.redis.hset(RunKeys(role.run_id).heartbeats(kind if kind in BEATING else "worker"), mapping={name: value})


def in_events(role: RunContext, name: bytes, value: bytes) -> None:
    client: Any = role.redis
    client.xadd(RunKeys(role.run_id).events, {b"kind": name, b"text": value, b"data": value})
    client.xadd(RunKeys(role.run_id).events, {name: value})


def in_evaluations(role: RunContext, name: bytes, value: bytes) -> None:
    role.redis.hset(RunKeys(role.run_id).evaluations, mapping={name: value, b"3_Step-5.ckpt": value})


def in_figures(role: RunContext, name: bytes, value: bytes) -> None:
    client: Any = role.redis
    client.xadd(RunKeys(role.run_id).metrics, {b"row": value})
    client.xadd(RunKeys(role.run_id).metrics, {name: value})
    role.redis.set(RunKeys(role.run_id).store_status, value)


def in_accounting(role: RunContext, name: bytes, value: bytes) -> None:
    keys = RunKeys(role.run_id)
    role.redis.hset(keys.ledger, mapping={name: value})
    role.redis.hset(keys.produced, mapping={name: value, b"worker-0:fragments": value})
    role.redis.hset(keys.incarnations, mapping={name: b"1"})
    role.redis.hset(keys.pushed, mapping={b"worker-0:tries": value})


def in_calls(role: RunContext, name: bytes, value: bytes) -> None:
    client: Any = role.redis
    client.delete(RunKeys(role.run_id).ranks)
    client.xadd(RunKeys(role.run_id).ranks, {b"epoch": value, b"invitation": value, name: value})
    client.rpush(RunKeys(role.run_id).action_trace("worker-0"), value)


@pytest.mark.parametrize(
    ("write", "values"),
    [(in_heartbeats, STAMPED), (in_events, BYTES), (in_evaluations, BYTES), (in_figures, BYTES), (in_accounting, BYTES),
     (in_calls, BYTES)],
)  # fmt: skip
def test_no_reader_falls_over_what_somebody_wrote(
    role: RunContext, write: Callable[[RunContext, bytes, bytes], None], values: st.SearchStrategy[bytes]
) -> None:
    @settings(max_examples=25, suppress_health_check=list(HealthCheck))
    @given(ROLES, values)
    def check(name: bytes, value: bytes) -> None:
        role.redis.delete(*map(RunKeys(role.run_id).heartbeats, BEATING))
        write(role, name, value)
        every_reader(role)

    check()


HOSTILE = ["x", None, True, [], [1], {}, {"a": "x"}, {"a": None}, {"a": [1]}, -1, 0.5, 10**17, 10**400, 1e308, "NaN"]
SCORES = (
    "env_steps", "env_steps_played", "episodes", "version", "mean_return", "std_return", "min_return", "max_return",
    "mean_length", "success_rate", "agents", "policies", "metrics", "win_rates", "match_returns", "confirmation",
    "ranking", "ranked_by",
)  # fmt: skip


@pytest.mark.parametrize("name", SCORES)
def test_hostile_score_fields_end_no_reader(role: RunContext, name: str) -> None:
    sound = {"version": 3, "mean_return": 1.0, "confirmation": {"mean_return": 1.0}}
    spoiled = [sound | {name: value} for value in HOSTILE]
    spoiled += [sound | {"confirmation": {"mean_return": 1.0, name: value}} for value in HOSTILE]
    for number, scores in enumerate(spoiled):
        in_evaluations(role, f"{number}_Step-5.ckpt".encode(), json.dumps(scores).encode())
    every_reader(role)


BEATS = (
    "incarnation", "transitions", "lags", "capacity", "unplaced", "learn_seconds", "epoch", "version", "evaluating",
)  # fmt: skip


@pytest.mark.parametrize("name", BEATS)
def test_hostile_progress_fields_end_no_reader(role: RunContext, name: str) -> None:
    for value in HOSTILE:
        beat = json.dumps(BEAT | {"progress": {name: value}})
        for who in ("coordinator:coordinator", "trainer:trainer", "evaluator:evaluator", "worker:worker-0"):
            seconds, micros = role.redis.time()
            in_heartbeats(role, who.encode(), f"{seconds}.{micros:06d} {beat}".encode())
        every_reader(role)


def test_readers_keep_sound_data_and_name_malformed_once(
    role: RunContext, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("stagecoach.shared.base.printable._told", set())
    keys = RunKeys(role.run_id)
    Heartbeat(role.redis, role.run_id, "trainer", "trainer").start()
    in_heartbeats(role, b"worker-3", b"1234567890.000000 {}")
    events.emit(role.redis, role.run_id, "state", "before")
    in_events(role, b"worker", b"\xff")
    events.emit(role.redis, role.run_id, "state", "after")
    events.record_evaluation(role.redis, role.run_id, "1_Step-1.ckpt", {"version": 1, "mean_return": 5.0})
    role.redis.hset(keys.evaluations, "2_Step-2.ckpt", '{"version": 2, "mean_return": NaN}')
    for _ in range(2):
        assert [beat.id for beat in read_heartbeats(role.redis, role.run_id)] == ["trainer"]
        kinds = [event.kind for event in events.read_events(role.redis, role.run_id)]
        assert kinds == ["state", "malformed", "malformed", "state"]
        assert list(events.read_evaluations(role.redis, role.run_id)) == ["1_Step-1.ckpt"]
    named = [record.getMessage() for record in caplog.records if "malformed" in record.getMessage()]
    assert len(named) == 4
    assert any("heartbeat of worker:worker-3" in text and "pid" in text for text in named)
    assert any("score of 2_Step-2.ckpt" in text and "NaN is not a finite number" in text for text in named)


def test_accounting_that_somebody_has_spoilt_do_not_balance(role: RunContext) -> None:
    in_accounting(role, b"worker-1:fragments", b"3")
    role.redis.hset(RunKeys(role.run_id).ledger, "worker-0", b"5")
    assert not read_accounting(role.redis, role.run_id)["total"].balances


def test_much_garbage_is_counted_and_only_some_of_it_is_named(
    role: RunContext, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr("stagecoach.shared.base.printable._told", set())
    for number in range(300):
        role.redis.hset(RunKeys(role.run_id).heartbeats("worker"), f"worker-{number}", b"{")
    for _ in range(2):
        status = live_status(role.redis, role.run_id)
    console = PrintableConsole(file=(shown := io.StringIO()), width=200)
    print_status(Run(RunFolder(role.run_id, role.config.runs_dir), role.config), status, console)
    assert sum("is malformed and left out" in text for text in caplog.messages) == 10
    assert len(caplog.messages) < 20 and all(len(text) < 500 for text in caplog.messages)
    assert "malformed in Redis and left out: 290 more than those named above" in shown.getvalue()
