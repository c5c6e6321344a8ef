"""A run whose store fails, with real S3 servers behind a fault proxy: it trains on, says what is wrong, and ends with
the weights that it would have had; no reader ever sees half of a checkpoint.
"""

from __future__ import annotations

import hashlib
import json
import re
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from coordinator.run import Run
from coordinator.services import BUCKET, new_secret
from coordinator.status import Status, live_status
from rollout_worker.evaluator import Evaluator
from rollout_worker.making import describe_environment
from rollout_worker.worker import Worker
from shared.checkpoint import CHECKPOINTS, ENVIRONMENT, FINISHED, MANIFEST, CheckpointStore
from shared.config import Config
from shared.connection import Address
from shared.errors import CheckpointDamaged, CheckpointNotFound, Fenced, RunNotFound, WaitTimeout
from shared.object_store import open_store, s3_client
from shared.role import Role, open_role
from tests.chaos import store_faults as faults
from tests.chaos.store_faults import Fault, StoreFaults
from tests.conftest import RedisServer, create_flow, minimal_config
from tests.end_to_end.command_line import check_ledger
from tests.support.speed import stretched
from tests.trainer_node.game import POLICY, Game, balanced, make_game, small
from trainer_node.trainer import Trainer

PATIENCE = stretched(60.0)
OBJECT, READ_BACK = ("PUT", "policy.safetensors"), ("GET", "policy.safetensors")
NEW_MANIFEST, MANIFEST_READ, LISTING = ("PUT", MANIFEST), ("GET", MANIFEST), ("GET", "list-type")
MOVED_POINTER, STATUS_FILE, PRUNING = ("PUT", "/.checkpoint"), ("PUT", "training_status.json"), ("DELETE", MANIFEST)
WRITES = [OBJECT, NEW_MANIFEST, MOVED_POINTER, STATUS_FILE]
KINDS: dict[str, tuple[str, Fault, list[tuple[str, str]], str]] = {
    "slow down": ("rclone", faults.SLOW_DOWN, [*WRITES, READ_BACK, MANIFEST_READ, LISTING, PRUNING], "SlowDown"),
    "lost answer": ("moto", faults.LOSE_ANSWER, [*WRITES, PRUNING], "(?i)timeout|exists already"),
    "cut upload": ("rclone", faults.CUT_UPLOAD, WRITES, "put_object .* failed"),
    "cut download": ("moto", faults.CUT_DOWNLOAD, [READ_BACK, MANIFEST_READ], "broke off|HTTP 404, and not as"),
    "hang": ("rclone", faults.HANG, [OBJECT, READ_BACK], "(?i)timeout"),
    "expired": ("moto", faults.EXPIRED, [LISTING, MOVED_POINTER], "credentials have expired"),
    "no bucket": ("rclone", faults.NO_BUCKET, [NEW_MANIFEST, PRUNING], "there is no bucket 'stagecoach'; create it"),
    "foreign page": ("moto", faults.WEB_PAGE, [READ_BACK, STATUS_FILE], "S3 server"),
}
"""Server, fault, the requests of a checkpoint that meet it one after the other, and what `status` shall say."""
VERSIONS = 16


class Site:
    """A run in an S3 store behind a fault proxy."""

    def __init__(self, redis_server: RedisServer, server: tuple[str, str, str], folder: Path, config: Config) -> None:
        keys = {"redis_password": redis_server.password, "s3_access_key": server[1], "s3_secret_key": server[2]}
        (folder / "keys.json").write_text(json.dumps(keys))
        self.proxy, self._config = StoreFaults(server[0]), config
        run_id = f"t-{new_secret()[:12]}"
        self._address, direct = (
            Address(run_id, redis_server.url, f"s3://{BUCKET}/chaos", endpoint, str(folder / "keys.json"))
            for endpoint in (self.proxy.url, server[0])
        )
        client = s3_client(direct, minimal_config().store)
        if BUCKET not in [bucket["Name"] for bucket in client.list_buckets()["Buckets"]]:
            client.create_bucket(Bucket=BUCKET)
        self.reader = CheckpointStore(open_store(direct, minimal_config()), run_id)
        """Past the proxy."""
        create_flow(self.open())
        self.reader.store.put(ENVIRONMENT, json.dumps(describe_environment(config).as_dict()).encode())
        self.games: list[Game] = []

    def open(self) -> Role:
        """Another role's connections."""
        return open_role(self._config, self._address)

    def game(self) -> Game:
        """Trainer and worker, started."""
        self.games.append(Game(self.open))
        return self.games[-1]

    def status(self) -> Status:
        """What `stagecoach status` shows."""
        client = self.open().redis
        try:
            return live_status(client, self._address.run_id)
        finally:
            client.close()

    def finish(self, game: Game) -> str:
        """Plays to the end; answers the SHA-256 of the final policy, read past the proxy."""
        game.play()
        game.trainer.finish(game.role.flow.read().reason or "exhausted")
        return hashlib.sha256(self.reader.load(self.final()).objects[POLICY]).hexdigest()

    def final(self) -> str:
        """The final checkpoint, by `.finished`."""
        return str((self.reader.marker(FINISHED) or {})["final"])

    def nothing_is_half_visible(self) -> None:
        """What has a manifest is whole, and what the pointer names has one."""
        for name in self.reader.names():
            try:
                self.reader.load(name)
            except CheckpointNotFound:
                continue
        pointer = self.reader.pointer()
        if pointer is not None and any(key.endswith(MANIFEST) for key in self.reader.store.keys(CHECKPOINTS)):
            self.reader.load(pointer.latest)

    def close(self) -> None:
        """Ends the game and the proxy."""
        self.proxy.heal()
        for game in self.games:
            game.end()
        self.proxy.close()


MakeSite = Callable[..., Site]


@pytest.fixture
def site(redis_server: RedisServer, s3_servers: dict[str, tuple[str, str, str]], tmp_path: Path) -> Iterator[MakeSite]:
    """`site(server, config)` → a new run behind a new proxy."""
    made: list[Site] = []

    def make(server: str = "rclone", config: Config | None = None) -> Site:
        made.append(Site(redis_server, s3_servers[server], tmp_path, config or quick()))
        return made[-1]

    yield make
    for one in made:
        one.close()


def quick(updates: int = VERSIONS, **sections: Any) -> Config:
    """A small run that stores each version, prunes the one before, and gives a request up at once."""
    store = {"retries": 0, "timeout_seconds": 20}
    checkpoint = {"every": "1 updates", "keep_last": 1}
    return small(**({"stop_at": {"updates": updates}, "store": store, "checkpoint": checkpoint} | sections))


@pytest.fixture(scope="module")
def undisturbed(redis_server: RedisServer, tmp_path_factory: pytest.TempPathFactory) -> Callable[[int], str]:
    """`undisturbed(updates)` → the final weights' hash of a run to which nothing happens."""
    known: dict[int, str] = {}

    def final(updates: int) -> str:
        if updates not in known:
            game = make_game(redis_server, tmp_path_factory.mktemp("undisturbed"), quick(updates))
            known[updates] = game.finish()
            game.end()
        return known[updates]

    return final


def eventually(done: Callable[[], Any]) -> None:
    """Waits for what a background thread will do."""
    deadline = time.monotonic() + PATIENCE
    while not done():
        assert time.monotonic() < deadline, "it did not happen"
        time.sleep(0.02)


class Background:
    """A call in a thread of its own, as the processes of a run are."""

    def __init__(self, call: Callable[[], Any]) -> None:
        self._call, self.answer, self.error = call, None, None
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def _run(self) -> None:
        try:
            self.answer = self._call()
        except BaseException as error:
            self.error = error  # type: ignore[assignment]

    @property
    def runs(self) -> bool:
        """Whether it is still at it."""
        return self._thread.is_alive()

    def result(self) -> Any:
        """Its answer, once it is there; raises what it raised."""
        self._thread.join(PATIENCE)
        assert not self.runs
        if self.error is not None:
            raise self.error
        return self.answer


# In the middle of a run


@pytest.mark.parametrize("kind", KINDS)
def test_training_goes_on_through_a_fault_at_each_stage_of_a_checkpoint_and_ends_with_the_same_weights(
    site: MakeSite, undisturbed: Callable[[int], str], kind: str
) -> None:
    server, fault, stages, words = KINDS[kind]
    silent = fault in (faults.HANG, faults.LOSE_ANSWER)
    here = site(server, quick(store={"retries": 0, "timeout_seconds": 4 if silent else 20}))
    if fault != faults.CUT_DOWNLOAD:
        here.proxy.fail(fault, "PUT", "/.ready")
    starting = Background(here.game)
    if fault != faults.CUT_DOWNLOAD:
        eventually(lambda: re.search(words, here.status().store.get("error", "")) or not starting.runs)
        if fault != faults.LOSE_ANSWER:  # there the second try finds it done
            assert starting.runs, "nobody acts before the first checkpoint is ready"
            assert here.status().bottleneck.startswith("the store: ") or "starting" in here.status().bottleneck
    here.proxy.heal()
    game: Game = starting.result()

    for turn, (method, key) in enumerate(stages):
        game.durable()
        durable, told = here.status().latest, len(game.events("store"))
        here.proxy.fail(fault, method, key)
        game.play_to(2 * turn + 1)
        eventually(lambda told=told: re.search(words, game.events("store")[told:]))  # type: ignore[misc]
        game.play_to(2 * turn + 2)  # goes on although nothing can be stored
        here.nothing_is_half_visible()
        if fault != faults.LOSE_ANSWER:
            store = here.status().store
            assert (store["waiting_for"], store["durable"]) == ("the store", durable)
            assert store["attempts"] >= 1 and abs(time.time() - store["since"]) < PATIENCE
        here.proxy.heal()
        game.durable()
        assert here.status().store == {"durable": f"{game.trainer.version}_Step-{64 * game.trainer.version}.ckpt"}

    assert here.finish(game) == undisturbed(VERSIONS)
    total = balanced(game)["total"]
    assert (total["consumed"]["fragments"], total["dropped"]) == (2 * VERSIONS, {})
    here.nothing_is_half_visible()
    left = {key.split("/")[1] for key in here.reader.store.keys(CHECKPOINTS)}  # rclone lists empty folders as well
    assert left == {here.final()}
    said = game.events("store")
    assert "the store fails, training goes on: " in said and "the store is back: it failed " in said


def test_what_the_store_does_not_take_stays_in_the_log_until_claims_wait_and_all_goes_on_when_it_is_back(
    site: MakeSite, undisturbed: Callable[[int], str]
) -> None:
    here = site()
    game = here.game()
    game.role.flow.set_bounds(60.0, 20_000)
    here.proxy.fail(faults.SLOW_DOWN, "PUT")
    game.play(lambda: game.worker._claim(0).word == "wait_log")
    assert 0 < game.trainer.version < VERSIONS
    full = here.status().log
    assert full["bytes"] >= full["max_bytes"] == 20_000
    here.proxy.heal()
    game.durable()
    assert game.worker._claim(0).granted
    game.role.flow.set_bounds(60.0, 2**20)
    assert here.finish(game) == undisturbed(VERSIONS)
    balanced(game)


def test_a_fenced_publisher_stops_although_its_store_is_away(site: MakeSite) -> None:
    here = site()
    game = here.game()
    here.proxy.fail(faults.SLOW_DOWN, "PUT")
    game.play_to(1)
    eventually(lambda: here.status().store.get("attempts", 0) > 1)
    here.open().flow.take_over()
    with pytest.raises(Fenced):
        game.trainer._publisher.wait_idle(PATIENCE)


def test_a_manifest_that_was_cut_off_or_is_of_another_version_does_not_stand_in_the_way(
    site: MakeSite, undisturbed: Callable[[int], str]
) -> None:
    here = site()
    game = here.game()
    for version, content in ((2, b'{"format": 2, "run_id": "'), (4, b'{"format": 99}')):
        key = f"{CHECKPOINTS}{version}_Step-{64 * version}.ckpt/0123456789abcdef/{MANIFEST}"
        here.reader.store.put(key, content)
        game.play_to(version)
        game.durable()
        assert here.reader.load(f"{version}_Step-{64 * version}.ckpt").manifest.version == version
        assert here.reader.store.get(key) == content
    assert here.finish(game) == undisturbed(VERSIONS)


# At the beginning


def start_trainer(here: Site) -> None:
    """Another trainer, which says good-bye where it cannot start."""
    trainer = Trainer(here.open(), None)
    try:
        trainer.start()
    except Exception as error:
        trainer.fail(error)
        raise


def test_roles_that_start_while_the_store_is_away_wait_by_name_and_go_on(
    site: MakeSite, undisturbed: Callable[[int], str]
) -> None:
    here = site("moto")
    game = here.game()
    game.play_to(3)
    game.durable()
    game.crash()
    here.proxy.fail(faults.EXPIRED)
    worker, evaluator = Worker(here.open(), 1), Evaluator(here.open())
    starts = [Background(call) for call in (game.restart, worker.start, evaluator.start)]

    def waiting() -> list[str]:
        beats = [beat for beat in here.status().roles if beat.alive and "have expired" in (beat.trouble or "")]
        return [beat.id for beat in beats if beat.waiting_for == "the store"]

    eventually(lambda: waiting() == ["trainer", "evaluator", "worker-1"])
    assert re.match(r"the store: .* have expired .*\(the trainer, for", here.status().bottleneck)
    assert here.open().flow.read().epoch == 1, "who cannot reach the store fences nobody"
    assert all(start.runs for start in starts)
    here.proxy.heal()
    for start in starts:
        start.result()
    assert evaluator.step(0) == "evaluated"
    evaluator.stop("end of test")
    worker.stop("end of test")
    assert here.finish(game) == undisturbed(VERSIONS)
    balanced(game)


def test_a_wait_for_the_store_ends_at_its_deadline_with_what_the_store_said(
    site: MakeSite, monkeypatch: pytest.MonkeyPatch
) -> None:
    here = site()
    here.game().crash()
    monkeypatch.setattr(here, "_config", quick(store={"retries": 0, "timeout_seconds": 20, "retry_seconds": 0.5}))
    here.proxy.fail(faults.SLOW_DOWN)
    worker, evaluator = Worker(here.open(), 1), Evaluator(here.open())
    starts: list[Callable[[], object]] = [lambda: start_trainer(here), worker.run, evaluator.run]
    for start in starts:
        with pytest.raises(
            WaitTimeout, match=r"waited \d s for the store; the deadline is 0\.5 s: get_object .*SlowDown"
        ):
            start()
    assert {beat.id for beat in here.status().roles if beat.ended == "failed"} == {"worker-1", "evaluator"}


def test_a_run_that_is_not_there_or_is_damaged_fails_at_once(site: MakeSite) -> None:
    here = site()
    game = here.game()
    game.play_to(1)
    game.durable()
    game.crash()
    description = here.reader.store.get(ENVIRONMENT)
    for data, error in ((None, RunNotFound), (description[:50], CheckpointDamaged), (b"[]", CheckpointDamaged)):
        here.reader.store.delete(ENVIRONMENT)
        if data is not None:
            here.reader.store.put(ENVIRONMENT, data)
        starts: list[Callable[[], None]] = [
            lambda: start_trainer(here), Worker(here.open(), 1).start, Evaluator(here.open()).start
        ]  # fmt: skip
        for start in starts:
            with pytest.raises(error, match=r"environment\.json"):
                start()


# At the end


def test_a_store_that_is_away_at_the_end_is_waited_for(site: MakeSite, undisturbed: Callable[[int], str]) -> None:
    here = site(config=quick(4))
    game = here.game()
    game.play()
    game.durable()
    here.proxy.fail(faults.SLOW_DOWN, "PUT", "/.finished")
    ending = Background(lambda: here.finish(game))

    def end() -> str:
        (trainer,) = [beat for beat in here.status().roles if beat.role == "trainer"]
        return f"{trainer.waiting_for}: {trainer.trouble}"

    eventually(lambda: re.match(r"the store to take the end of the run: put_object \.finished .*SlowDown", end()))
    assert here.status().bottleneck.startswith("the store: put_object .finished")
    here.proxy.heal()
    assert ending.result() == undisturbed(4)


@pytest.mark.timeout(240)
def test_a_run_whose_store_stays_away_at_its_end_fails_plainly_and_resume_ends_it_with_the_same_weights(
    s3_servers: dict[str, tuple[str, str, str]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    endpoint, access, secret = s3_servers["rclone"]
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", access)
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", secret)
    save_last = Trainer.save_last

    def waiting_one_second(trainer: Trainer, reason: str) -> str:
        """From the first failure on; all before may take as long as the disk needs."""
        publisher = trainer._publisher
        wait_idle = publisher.wait_idle

        def once_it_fails(seconds: float) -> None:
            eventually(lambda: publisher.struggling)
            wait_idle(seconds)

        impatient.setattr(publisher, "wait_idle", once_it_fails)
        impatient.setattr(trainer, "_outage_seconds", 1.0)
        return save_last(trainer, reason)

    ends = {}
    for name in ("undisturbed", "disturbed"):
        with StoreFaults(endpoint) as proxy:
            store = {"url": f"s3://{BUCKET}/inline", "endpoint_url": proxy.url, "retries": 0, "timeout_seconds": 5}
            config = small(
                runs_dir=str(tmp_path / name), store=store, stop_at={"updates": 6}, checkpoint={"every": "9 updates"},
                rollout={"workers": 1, "fragment_steps": 8, "fragments_per_update": 2}, evaluation={"episodes": 1},
            )  # fmt: skip
            run_id = f"{tmp_path.name}-{name}".lower().replace("_", "-")
            if name == "undisturbed":
                run = Run.start(config, run_id, inline=True)
            else:
                with monkeypatch.context() as impatient:
                    impatient.setattr(Trainer, "save_last", waiting_one_second)
                    rule = proxy.fail(faults.INTERNAL_ERROR, "PUT", "6_Step-384.ckpt")
                    run = Run.start(config, run_id, inline=True)
                    eventually(lambda rule=rule: rule.met)  # type: ignore[misc]
                    proxy.fail(faults.INTERNAL_ERROR)
                    outcome = run.wait(PATIENCE)
                assert outcome.failed and not outcome.users_fault
                assert re.match(r"failed: the checkpoint was not durable after 1 s; .*InternalError", outcome.reason)
                assert "`stagecoach resume` reads it again" in outcome.reason
                assert (outcome.status.updates, outcome.status.live) == (6, False), "Redis still knew it"
                proxy.heal()
                run = Run.resume(run_id, tmp_path / name, inline=True)
            outcome = run.wait(PATIENCE)
            assert outcome.reason == "exhausted"
            check_ledger(run.checkpoint_store().marker(".finished") or {})
            final = run.checkpoint_store().load("6_Step-384.ckpt")
            ends[name] = hashlib.sha256(final.objects["default/policy.safetensors"]).hexdigest()
    assert ends["undisturbed"] == ends["disturbed"]
