"""A run whose S3 store refuses to delete (append-only, retention, least privilege): everything else works."""

from __future__ import annotations

import re
from collections.abc import Callable
from itertools import pairwise
from typing import Any

import pytest

from stagecoach.coordinator.catalog.checkpoint_operations import prune_checkpoints
from stagecoach.coordinator.lifecycle.preparation import prepare_resume
from stagecoach.rollout_worker.evaluator import Evaluator
from stagecoach.shared.base.errors import DeletionRefused
from stagecoach.shared.config.run_config import Config
from stagecoach.shared.config.sections import CheckpointConfig
from stagecoach.shared.protocol.events import read_evaluations
from stagecoach.shared.storage.checkpoint_store import FINISHED
from stagecoach.shared.storage.due_evaluations import due_evaluations
from stagecoach.trainer_node.checkpointing.verification import promote, withdraw
from tests.support.runs.game import Game, balanced
from tests.support.runs.store_fault_run import MakeSite, StoreFaultRun, short_run
from tests.support.services import store_faults as faults

UPDATES = 12
NO_RIGHT = faults.refusal(403, "AccessDenied", "User: run is not authorized to perform: s3:DeleteObject")
NO_METHOD = faults.refusal(405, "MethodNotAllowed", "The specified method is not allowed against this resource.")
RETENTION = faults.refusal(409, "FileImmutable", "The object you specified is immutable.")
BROKEN = faults.INTERNAL_ERROR

MakeRefusing = Callable[..., StoreFaultRun]


@pytest.fixture
def refusing(site: MakeSite) -> MakeRefusing:
    """`refusing(config, fault)` → a new run behind a proxy that answers each DELETE with the fault."""

    def make(config: Config, fault: faults.Fault = NO_RIGHT) -> StoreFaultRun:
        made = site("rclone", config)
        made.proxy.fail(fault, "DELETE")
        return made

    return make


@pytest.mark.parametrize(
    ("fault", "words"),
    [
        (NO_RIGHT, r"AccessDenied \(HTTP 403\): User: run is not .*does the key have the right s3:DeleteObject"),
        (NO_METHOD, r"MethodNotAllowed \(HTTP 405\)"),
        (RETENTION, r"FileImmutable \(HTTP 409\): The object you specified is immutable"),
        (BROKEN, r"InternalError \(HTTP 500\)"),
    ],
    ids=["no right", "no method", "retention", "broken"],
)
def test_run_ends_in_order_when_delete_is_refused(refusing: MakeRefusing, fault: faults.Fault, words: str) -> None:
    here = refusing(short_run(UPDATES, archive="off" if fault is NO_RIGHT else "all"), fault)
    game = here.game()
    game.play_to(6, durable=True)
    assert game.role.flow.read().trimmed_id == here.reader.manifest(here.reader.names()[-1]).log_position
    store = here.status().store
    assert re.search(words, store["undeleted"]["error"]) and not store.get("error")
    assert store["durable"] == here.reader.names()[-1]
    assert store["undeleted"]["checkpoints"] == len(here.reader.names()) - 1
    game.play()
    game.trainer.finish(game.role.flow.read().reason or "exhausted")
    assert here.final().startswith(f"{UPDATES}_")
    assert len(re.findall("the store does not delete", game.events("store"))) == 1
    assert "the store fails" not in game.events("store")
    listed = [entry["name"] for entry in (here.reader.marker("training_status.json") or {})["checkpoints"]]
    assert listed == here.reader.names(), "what stays is listed"
    balanced(game)


def test_each_checkpoint_costs_one_refused_request(refusing: MakeRefusing) -> None:
    here = refusing(short_run(UPDATES))
    game = here.game()
    asked: list[int] = []
    for version in range(1, UPDATES):
        game.play_to(version, durable=True)
        asked.append(sum(request.startswith("DELETE") for request in here.proxy.seen))
    assert max(after - before for before, after in pairwise(asked)) <= 2
    here.proxy.heal()
    game.play()
    game.durable()
    game.trainer.finish("exhausted")
    assert here.reader.names() == [here.final()], "once it deletes again, what stayed goes"
    assert "undeleted" not in here.status().store


def test_finished_run_resumes_when_delete_is_refused(refusing: MakeRefusing, monkeypatch: pytest.MonkeyPatch) -> None:
    here = refusing(short_run(4))
    game = here.game()
    here.finish(game)
    monkeypatch.setattr(here, "config", short_run(8))
    prepare_resume(here.open())
    assert here.reader.marker(FINISHED) is None
    game.trainer.incarnation.closing.close()
    game.open = here.open
    game.restart()
    here.finish(game)
    assert here.final().startswith("8_")


def test_marks_and_pruning_by_hand_when_delete_is_refused(refusing: MakeRefusing) -> None:
    here = refusing(short_run(4))
    here.finish(here.game())
    checkpoints = here.open().checkpoints
    promote(checkpoints, "latest", live=False)
    assert withdraw(checkpoints) == here.final() and checkpoints.promotion() is None
    assert checkpoints.preferred() == here.final()
    there = checkpoints.names()
    with pytest.raises(DeletionRefused, match="s3:DeleteObject"):
        prune_checkpoints(checkpoints, CheckpointConfig(keep_last=1), dry_run=False)
    assert checkpoints.names() == there
    for name in there:
        here.reader.load(name)


def test_evaluations_are_played_once_when_delete_is_refused(refusing: MakeRefusing) -> None:
    evaluation: dict[str, Any] = {"episodes": 1, "every": "1 updates", "final_wait_seconds": 0}
    here = refusing(short_run(UPDATES, evaluation=evaluation))
    game = here.game()
    evaluator = Evaluator(here.open())
    evaluator.start()
    played = 0

    def play_due(game: Game) -> int:
        count = 0
        while evaluator.step(0) == "evaluated":
            count += 1
        return count

    for version in range(1, UPDATES):
        game.play_to(version, durable=True)
        played += play_due(game)
    game.play()
    game.trainer.save_last("exhausted")
    played += play_due(game)
    game.trainer.finish("exhausted")
    assert play_due(game) == 0
    evaluator.stop("end of test")
    assert played == len(read_evaluations(game.role.redis, game.role.run_id))
    assert len(due_evaluations(here.reader.store)) == UPDATES, "they stay, and nobody plays them again"
