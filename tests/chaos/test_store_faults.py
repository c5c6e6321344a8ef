"""A run whose store fails, with real S3 servers behind a fault proxy: it trains on, says what is wrong, and ends with
the weights that it would have had; no reader ever sees half of a checkpoint.
"""

from __future__ import annotations

import re
import time
from collections.abc import Callable

import pytest

from stagecoach.coordinator.lifecycle.preparation import prepare_resume
from stagecoach.rollout_worker.evaluator import Evaluator
from stagecoach.rollout_worker.worker import Worker
from stagecoach.shared.base.errors import CheckpointDamaged, Fenced, RunNotFound, WaitTimeout
from stagecoach.shared.storage.checkpoint_store import CHECKPOINTS, ENVIRONMENT, MANIFEST
from stagecoach.trainer_node.recovery.incarnation import Incarnation
from stagecoach.trainer_node.trainer import Trainer
from tests.conftest import RedisServer
from tests.support.processes.command_line import check_ledger
from tests.support.processes.waiting import Background, eventually
from tests.support.runs.game import Game, asks, balanced, make_game
from tests.support.runs.store_fault_run import PATIENCE_SECONDS, VERSIONS, MakeSite, StoreFaultRun, short_run
from tests.support.services import store_faults as faults
from tests.support.services.store_faults import Fault

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
    "no bucket": (
        "rclone",
        faults.NO_BUCKET,
        [NEW_MANIFEST, PRUNING],
        "the bucket 'stagecoach' does not exist; create it",
    ),
    "foreign page": ("moto", faults.WEB_PAGE, [READ_BACK, STATUS_FILE], "S3 server"),
}
"""Server, fault, the requests of a checkpoint that meet it one after the other, and what `status` shall say."""


Final = Callable[[int], str]


@pytest.fixture(scope="module")
def undisturbed(redis_server: RedisServer, tmp_path_factory: pytest.TempPathFactory) -> Final:
    """`undisturbed(updates)` → the final weights' hash of a run to which nothing happens."""
    known: dict[int, str] = {}

    def final(updates: int) -> str:
        if updates not in known:
            game = make_game(redis_server, tmp_path_factory.mktemp("undisturbed"), short_run(updates))
            known[updates] = game.finish()
            game.end()
        return known[updates]

    return final


# In the middle of a run


def prunes_later(here: StoreFaultRun, game: Game, fault: Fault, words: str, version: int) -> None:
    """Objects that cannot be deleted delay nothing, and are removed once they can be."""
    here.proxy.fail(fault, *PRUNING)
    game.play_to(version, durable=True)
    assert here.status().latest == f"{version}_Step-{64 * version}.ckpt"
    if fault != faults.LOSE_ANSWER:  # there it was done
        assert re.search(words, here.status().store["undeleted"]["error"])
    here.proxy.heal()


@pytest.mark.parametrize("kind", KINDS)
def test_training_survives_faults_at_each_checkpoint_stage(site: MakeSite, undisturbed: Final, kind: str) -> None:
    server, fault, stages, words = KINDS[kind]
    silent = fault in (faults.HANG, faults.LOSE_ANSWER)
    here = site(server, short_run(store={"retries": 0, "timeout_seconds": 4 if silent else 20}))
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
        if (method, key) == PRUNING:
            prunes_later(here, game, fault, words, 2 * turn + 2)
            continue
        durable, told = here.status().latest, len(game.events("store"))
        here.proxy.fail(fault, method, key)
        game.play_to(2 * turn + 1)
        eventually(lambda told=told: re.search(words, game.events("store")[told:]))  # type: ignore[misc]
        game.play_to(2 * turn + 2)  # goes on although nothing can be stored
        here.nothing_is_half_visible()
        if fault != faults.LOSE_ANSWER:
            store = here.status().store
            assert (store["waiting_for"], store["durable"]) == ("the store", durable)
            assert store["attempts"] >= 1 and abs(time.time() - store["since"]) < PATIENCE_SECONDS
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
    assert "the store fails, training continues: " in said and "the store is back: it failed " in said


def test_log_grows_until_claims_wait_while_store_is_away(site: MakeSite, undisturbed: Final) -> None:
    here = site()
    game = here.game()
    game.role.flow.set_bounds(60.0, 20_000)
    here.proxy.fail(faults.SLOW_DOWN, "PUT")
    game.play(lambda: asks(game) == "wait_log")
    assert 0 < game.trainer.version < VERSIONS
    full = here.status().log
    assert full["bytes"] >= full["max_bytes"] == 20_000
    here.proxy.heal()
    game.durable()
    assert asks(game) == "granted"
    game.role.flow.set_bounds(60.0, 2**20)
    assert here.finish(game) == undisturbed(VERSIONS)
    balanced(game)


def test_fenced_publisher_stops_while_its_store_is_away(site: MakeSite) -> None:
    here = site()
    game = here.game()
    here.proxy.fail(faults.SLOW_DOWN, "PUT")
    game.play_to(1)
    eventually(lambda: here.status().store.get("attempts", 0) > 1)
    here.open().flow.take_over()
    with pytest.raises(Fenced):
        game.trainer.state.writer.wait_idle(PATIENCE_SECONDS)


def test_truncated_manifest_blocks_nothing(site: MakeSite, undisturbed: Final) -> None:
    here = site()
    game = here.game()
    for version, content in ((2, b'{"format": 1, "run_id": "'), (4, b'{"format": 99}')):
        key = f"{CHECKPOINTS}{version}_Step-{64 * version}.ckpt/0123456789abcdef/{MANIFEST}"
        here.reader.store.put(key, content)
        game.play_to(version, durable=True)
        assert here.reader.load(f"{version}_Step-{64 * version}.ckpt").manifest.version == version
        assert here.reader.store.get(key) == content
    assert here.finish(game) == undisturbed(VERSIONS)


# At the beginning


def start_trainer(here: StoreFaultRun) -> None:
    """Another trainer, which says good-bye where it cannot start."""
    incarnation = Incarnation(here.open())
    try:
        Trainer.start(incarnation)
    except Exception as error:
        incarnation.fail(error)
        raise


def test_roles_that_start_without_a_store_wait_by_name(site: MakeSite, undisturbed: Final) -> None:
    here = site("moto")
    game = here.game()
    game.play_to(3, durable=True)
    game.crash()
    here.proxy.fail(faults.EXPIRED)
    worker, evaluator = Worker(here.open(), 1), Evaluator(here.open())
    starts = [Background(call) for call in (game.restart, worker.start, evaluator.start)]

    def waiting() -> list[str]:
        beats = [beat for beat in here.status().roles if beat.alive and "have expired" in (beat.last_error or "")]
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


def test_wait_for_the_store_ends_with_its_error(site: MakeSite, monkeypatch: pytest.MonkeyPatch) -> None:
    here = site()
    here.game().crash()
    monkeypatch.setattr(here, "config", short_run(store={"retries": 0, "timeout_seconds": 20, "retry_seconds": 0.5}))
    here.proxy.fail(faults.SLOW_DOWN)
    worker, evaluator = Worker(here.open(), 1), Evaluator(here.open())
    starts: list[Callable[[], object]] = [lambda: start_trainer(here), worker.run, evaluator.run]
    for start in starts:
        with pytest.raises(
            WaitTimeout, match=r"waited \d s for the store; the deadline is 0\.5 s: get_object .*SlowDown"
        ):
            start()
    assert {beat.id for beat in here.status().roles if beat.ended == "failed"} == {"worker-1", "evaluator"}


def test_missing_or_damaged_run_fails_at_once(site: MakeSite) -> None:
    here = site()
    game = here.game()
    game.play_to(1, durable=True)
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


def test_end_of_run_waits_for_the_store(site: MakeSite, undisturbed: Final) -> None:
    here = site(config=short_run(4))
    game = here.game()
    game.play()
    game.durable()
    here.proxy.fail(faults.SLOW_DOWN, "PUT", "/.finished")
    ending = Background(lambda: here.finish(game))

    def end() -> str:
        (trainer,) = [beat for beat in here.status().roles if beat.role == "trainer"]
        return f"{trainer.waiting_for}: {trainer.last_error}"

    eventually(lambda: re.match(r"the store to take the end of the run: put_object \.finished .*SlowDown", end()))
    assert here.status().bottleneck.startswith("the store: put_object .finished")
    here.proxy.heal()
    assert ending.result() == undisturbed(4)


def test_resume_ends_a_run_whose_store_stayed_away(
    site: MakeSite, undisturbed: Final, monkeypatch: pytest.MonkeyPatch
) -> None:
    here = site(config=short_run(4, checkpoint={"every": "9 updates"}))
    game = here.game()
    game.play()
    monkeypatch.setattr(game.trainer.incarnation, "outage_seconds", 5.0)
    here.proxy.fail(faults.INTERNAL_ERROR)
    with pytest.raises(WaitTimeout, match=r"not durable after 5 s; .*InternalError.*`stagecoach resume`") as caught:
        game.trainer.finish("exhausted")
    game.trainer.incarnation.fail(caught.value)
    assert game.role.flow.read().reason.startswith("failed: the checkpoint was not durable after 5 s; ")
    here.proxy.heal()
    prepare_resume(here.open())
    game.restart()
    assert here.finish(game) == undisturbed(4)
    check_ledger(here.reader.marker(".finished") or {})
