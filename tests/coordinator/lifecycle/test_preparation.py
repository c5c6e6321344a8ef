"""Every Redis key of a run's, of another type or full of garbage: whoever meets it goes on, or names it in one line."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from stagecoach.coordinator.catalog.status import is_supervised, live_status
from stagecoach.coordinator.lifecycle.preparation import create_flow, prepare_resume
from stagecoach.coordinator.lifecycle.run_lease import RunLease
from stagecoach.rollout_worker.evaluator import Evaluator
from stagecoach.rollout_worker.worker import Worker
from stagecoach.shared.base.errors import StagecoachError
from stagecoach.shared.experience.log_entry import before
from stagecoach.shared.protocol.flow_control import KeyDamaged
from stagecoach.shared.protocol.keys import TYPES, RunKeys, key_name, key_type
from stagecoach.shared.runtime.run_context import RunContext
from stagecoach.trainer_node.recovery.incarnation import Incarnation
from stagecoach.trainer_node.trainer import Trainer
from tests.conftest import RedisServer
from tests.support.processes.command_line import CommandLine, check_ledger, check_refused, redis_of
from tests.support.runs.game import Game, make_game, small

NAMES = sorted(TYPES.keys() - {"bodies", "action_trace", "heartbeats"})
GARBAGE = b"\xff garbage\x1b"
FIELDS = (
    "worker", "incarnation", "seq", "end", "lost", "transitions", "fragment", "kind", "text", "data", "epoch",
    "invitation", "w",
)  # fmt: skip


def keys_of(run_id: str) -> dict[str, str]:
    keys = RunKeys(run_id)
    more = {"action_trace": keys.action_trace("worker-0"), "heartbeats": keys.heartbeats("worker")}
    return {name: getattr(keys, name) for name in NAMES} | more


def of_another_type(client: Any, key: str) -> None:
    with client.pipeline() as both:  # the publisher writes meanwhile
        both.delete(key)
        both.sadd(key, "x") if key_type(key) != "set" else both.set(key, "x")
        both.execute()


def full_of_garbage(client: Any, key: str) -> None:
    kind = key_type(key)
    if kind == "hash":
        fields = [*client.hkeys(key), b"worker-0", b"worker-0:0", b"worker-0:tries", GARBAGE]
        client.hset(key, mapping=dict.fromkeys(fields, GARBAGE))
    elif kind == "stream":
        client.xadd(key, dict.fromkeys(FIELDS, GARBAGE))
    elif kind == "string":
        client.set(key, GARBAGE)
    elif kind == "zset":
        client.zadd(key, {GARBAGE: 1.0})
    else:
        {"set": client.sadd, "list": client.rpush}[kind or ""](key, GARBAGE)


def everybody(game: Game) -> dict[str, Callable[[], object]]:
    """What roles and commands do, those that are at work and those that begin."""
    role: RunContext = game.role

    def begin(make: Callable[[], Evaluator | Worker]) -> None:
        made = make()
        try:
            made.start()
            made.step(0)
        finally:
            made.stop("end of test")

    def begin_to_train() -> None:
        incarnation = Incarnation(game.open())
        try:
            trainer = Trainer.start(incarnation)
        except StagecoachError as error:
            incarnation.fail(error)
            raise
        trainer.leave()

    return {
        "status": lambda: live_status(role.redis, role.run_id),
        "whether it is live": lambda: is_supervised(role.redis, role.run_id),
        "a worker at work": lambda: [game.worker.step(0) for _ in range(4)],
        "the trainer at work": lambda: [game.trainer.step(0) for _ in range(4)],
        "an evaluator": lambda: begin(lambda: Evaluator(game.open())),
        "a coordinator": RunLease(game.open()).take,
        "resume": lambda: prepare_resume(game.open()),
        "a new worker": lambda: begin(lambda: Worker(game.open(), 0)),
        "a new trainer": begin_to_train,
    }


@pytest.mark.parametrize("spoil", [of_another_type, full_of_garbage])
@pytest.mark.parametrize("name", [*NAMES, "action_trace", "heartbeats"])
def test_damaged_key_is_survived_or_named(
    redis_server: RedisServer, tmp_path: Path, name: str, spoil: Callable[[Any, str], None]
) -> None:
    game = make_game(redis_server, tmp_path, small())
    game.play_to(2)
    key = keys_of(game.role.run_id)[name]
    met: dict[str, str] = {}
    for who, does in everybody(game).items():
        spoil(game.role.redis, key)
        try:
            does()
        except StagecoachError as error:
            met[who] = str(error)
    assert [(who, text) for who, text in met.items() if key not in text or "\n" in text or "\x1b" in text] == []
    with redis_server.client() as client:
        client.delete(key)
    game.end()


def test_each_key_has_its_type_and_what_it_holds_is_named() -> None:
    keys = RunKeys("run")
    there = keys_of("run") | {"bodies": keys.bodies("worker-0")}
    assert {name: key_type(key) for name, key in there.items()} == TYPES
    assert key_name("someone:else") is None


@pytest.mark.parametrize(
    ("field", "value"),
    [("epoch", "x"), ("version", ""), ("state", "resting"), ("committed_id", "here"), ("claimed", "1e400"),
     ("max_workers", "many"), ("fragments_per_update", "0"), ("consumed", None)],
)  # fmt: skip
def test_damaged_flow_field_is_named_with_value(
    make_role: Callable[..., RunContext], field: str, value: str | None
) -> None:
    role = make_role(small())
    create_flow(role)
    flow = RunKeys(role.run_id).flow
    just_before = before("1795422992337-0")
    role.redis.hset(flow, "committed_id", just_before)
    assert role.flow.read().committed_id == just_before
    role.redis.hdel(flow, field) if value is None else role.redis.hset(flow, field, value)
    with pytest.raises(KeyDamaged, match=f"{role.run_id}}}:flow is damaged: its field {field} is ") as caught:
        role.flow.read()
    assert ("nothing" if value is None else repr(value)) in str(caught.value)


@pytest.mark.exhaustive
@pytest.mark.timeout(240)
def test_command_line_names_damaged_key_in_one_line(terminal: CommandLine, tmp_path: Path) -> None:
    """And the way out that it names is one."""
    process = terminal.start("train", terminal.write_config(stop_at={"updates": 10**6}), "--run-id", "run", "--inline")
    terminal.until("run", "something learned", lambda status: status.version > 25)
    with redis_of(terminal.handle("run")) as client:
        client.hset(RunKeys("run").flow, "epoch", "\x1bgarbage")
    failed = terminal.ended(process)
    assert failed.code == 1 and ":flow is damaged: its field epoch is" in failed.err, failed
    for command in (["resume", "run", "--inline"], ["resume", "run", "--inline", "--from", "best"]):
        check_refused(refused := terminal.run(*command), ":flow is damaged: its field epoch is")
        assert "\x1b" not in refused.err
    shutil.rmtree(tmp_path / "runs" / "run" / "redis")
    terminal.run("resume", "run", "--inline", "--set", "stop_at.updates=100").ok()
    check_ledger(terminal.marker("run", ".finished"))
