"""`evaluation.every`: what is due is played and recorded once, whatever dies, and nothing learned depends on it."""

from __future__ import annotations

import csv
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from stagecoach.coordinator.lifecycle.preparation import prepare_resume
from stagecoach.rollout_worker.evaluator import Evaluator
from stagecoach.shared.base.errors import StoreUnavailable
from stagecoach.shared.config.run_config import Config
from stagecoach.shared.experience.checkpoint_name import checkpoint_version
from stagecoach.shared.protocol.events import record_evaluation
from stagecoach.shared.protocol.heartbeat import Heartbeat
from stagecoach.shared.storage.checkpoint_store import Checkpoint
from stagecoach.shared.storage.due_evaluations import due_evaluations
from stagecoach.shared.storage.metric_log import EVALUATIONS, TEST_ENV_STEPS, TEST_EPISODES
from stagecoach.shared.storage.object_store import FileStore
from stagecoach.trainer_node.metrics.tensorboard_writer import SCORE, TensorBoardWriter
from stagecoach.trainer_node.metrics.writers import WrittenRun
from tests.support.processes.waiting import eventually
from tests.support.runs import metric_rows
from tests.support.runs.game import KEEP, Game, NewGame, evaluate_due, small


def due(every: str | None = "2 updates", updates: int = 6, **sections: Any) -> Config:
    evaluation = {"episodes": 1, "every": every, "final_wait_seconds": 30}
    checkpoint = {"every": "3 updates", "keep_last": 1, "keep_best": 1}
    common = {"evaluation": evaluation, "checkpoint": checkpoint, "stop_at": {"updates": updates}}
    return small(**common | sections)


def recorded(game: Game, stream: str) -> list[tuple[str, dict[str, float]]]:
    return metric_rows.recorded(game.role.checkpoints.store, stream)


def versions(names: Any) -> list[int | None]:
    return [checkpoint_version(name) for name in names]


def test_due_policies_are_recorded_once_then_deleted(new_game: NewGame) -> None:
    game = new_game(due())
    game.play()
    game.trainer.save_last("exhausted")
    assert versions(due_evaluations(game.role.checkpoints.store)) == [2, 4, 6]
    evaluate_due(game)
    game.trainer.finish("exhausted")
    rows = recorded(game, EVALUATIONS)
    assert versions(label for label, _ in rows) == [2, 4, 6], "of versions 2 and 4 no checkpoint is kept"
    assert [row["time/env_steps"] for _, row in rows] == [128, 256, 384]
    assert due_evaluations(game.role.checkpoints.store) == []
    lengths = [row["eval/ep_len_mean"] for _, row in rows]
    played = [sum(lengths[: turn + 1]) for turn in range(3)]
    assert all(row[TEST_ENV_STEPS] >= steps for (_, row), steps in zip(rows, played, strict=True))
    episodes = [row[TEST_EPISODES] for _, row in rows]
    further = [now - before for before, now in zip([0, *episodes], episodes, strict=False)]
    assert further[0] == 2 and {*further} <= {1, 2}, "twice, if it may be the best of those that are kept by then"
    assert game.trainer.recorder.tested == {
        "test_env_steps": rows[-1][1][TEST_ENV_STEPS], "test_episodes": episodes[-1],
    }  # fmt: skip


def test_trainer_waits_when_too_many_due_policies_are_unstored(
    new_game: NewGame, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("stagecoach.trainer_node.recovery.trainer_state._MOST_DUE", 3)
    game = new_game(due("1 updates", checkpoint={"every": "100 updates"}))
    put, away = FileStore.put, [True]
    waits: list[Any] = []

    def failing(store: FileStore, key: str, data: bytes) -> None:
        if away[0]:
            raise StoreUnavailable("the store is away")
        put(store, key, data)

    monkeypatch.setattr(FileStore, "put", failing)
    waiting = Heartbeat.waiting

    def seen(heartbeat: Heartbeat, name: str, *arguments: Any, **options: Any) -> Any:
        if "due to be evaluated" in name and game.trainer.state.writer.due.submitted == 3:
            waits.append(game.trainer.version)
            away[0] = False
        return waiting(heartbeat, name, *arguments, **options)

    monkeypatch.setattr(Heartbeat, "waiting", seen)
    game.play()
    assert waits == [4], "the fourth waits until the store has one of three"
    game.trainer.save_last("exhausted")
    assert versions(due_evaluations(game.role.checkpoints.store)) == [1, 2, 3, 4, 5, 6]


def test_unplayed_due_policies_are_reported_and_resumed(new_game: NewGame) -> None:
    game = new_game(due())
    game.finish()
    text = "3 policy versions due by evaluation.every=2 updates had not been played when the run ended"
    assert text in game.events("evaluation")
    assert versions(due_evaluations(game.role.checkpoints.store)) == [2, 4, 6]


@pytest.mark.parametrize(("every", "scored"), [("2 updates", [2, 4, 6]), (None, [6])])
def test_end_of_run_waits_for_replaced_evaluator(
    new_game: NewGame, monkeypatch: pytest.MonkeyPatch, every: str | None, scored: list[int]
) -> None:
    game = new_game(due(every))
    game.play()
    gone = Evaluator(game.open())
    gone.start()
    gone.heartbeat.stop("failed")
    looks: list[int] = []

    def polled(wait: Any, done: Callable[[], bool]) -> None:
        while not done():
            looks.append(1)
            evaluate_due(game)

    monkeypatch.setattr("stagecoach.trainer_node.trainer.poll", polled)
    game.trainer.finish("exhausted")
    assert looks == [1]
    assert versions(label for label, _ in recorded(game, EVALUATIONS)) == scored
    assert "had not been played" not in game.events("evaluation")


@pytest.mark.parametrize("lost", ["in the files only", "in the store only", "in both"])
def test_files_have_each_evaluation_once_after_crash(new_game: NewGame, tmp_path: Path, lost: str) -> None:
    writers = ["csv", "jsonl", "tensorboard"]
    game = new_game(due("1 updates", updates=4, checkpoint={"every": "2 updates"}, metrics={"writers": writers}))
    metrics, game.run_folder = tmp_path / "run" / "metrics", str(tmp_path / "run")
    (tmp_path / "run").mkdir()
    game.replace_trainer()
    game.play_to(3, durable=True)
    store = game.role.checkpoints.store
    eventually(lambda: versions(due_evaluations(store)) == [1, 2, 3])
    evaluate_due(game)
    if lost != "in the store only":
        eventually(lambda: len(recorded(game, EVALUATIONS)) >= 3)
    table = metrics / "evaluations.csv"
    if lost == "in the files only":
        eventually(lambda: table.exists() and table.read_text().count(".ckpt") >= 3)
    game.crash()
    if lost == "in the files only":
        table.write_bytes(b"".join(table.read_bytes().splitlines(keepends=True)[:2]) + b"2_Step-12")
    game.restart()
    game.play()
    game.trainer.save_last("exhausted")
    evaluate_due(game)
    game.trainer.finish("exhausted")
    game.trainer.recorder.close()
    names = [label for label, _ in recorded(game, EVALUATIONS)]
    assert sorted(versions(names)) == [1, 2, 3, 4]  # type: ignore[type-var]
    with (metrics / "evaluations.csv").open(newline="") as file:
        assert sorted(row["checkpoint"] for row in csv.DictReader(file)) == sorted(names)
    lines = (metrics / "evaluations.jsonl").read_text().splitlines()
    assert len(lines) == 4
    shown = TensorBoardWriter(WrittenRun("any", metrics, {}, 1 << 40)).shown()
    assert sorted(version for _, version in shown) == [1, 2, 3, 4]
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    reader = EventAccumulator(str(metrics / "tensorboard"))
    reader.Reload()
    assert sorted(event.step for event in reader.Scalars(SCORE)) == [64, 128, 192, 256], "as TensorBoard shows it"


def test_weights_do_not_depend_on_evaluations_and_writers(new_game: NewGame, tmp_path: Path) -> None:
    plain = new_game(small(stop_at={"updates": 6}))
    expected = plain.finish()
    metrics = {"every": "3 updates", "episodes": True, "writers": ["csv", "jsonl", "tensorboard"]}
    (tmp_path / "run").mkdir()
    each: tuple[dict[str, Any], ...] = ({"metrics": metrics}, {}, {"metrics": {"writers": []}})
    for sections in each:
        evaluation = {"episodes": 1, "every": "1 updates", "final_wait_seconds": 0}
        game = new_game(due(evaluation=evaluation, **sections))
        game.trainer.incarnation.run_folder = str(tmp_path / "run")
        for version in range(1, 6):
            game.play_to(version)
            evaluate_due(game)
        assert game.finish() == expected


def without_position(checkpoint: Checkpoint) -> dict[str, Any]:
    """Its objects, without the log position, which is a time, and the histories, which follow from positions."""
    (state,) = [key for key in checkpoint.objects if key.endswith("state.json")]
    content = json.loads(checkpoint.objects[state]) | {"log_position": "", "histories": {}}
    return dict(checkpoint.objects) | {state: content}


@pytest.mark.parametrize("dies", [False, True])
def test_best_evaluated_policy_is_kept_without_a_due_checkpoint(new_game: NewGame, dies: bool) -> None:
    """Its checkpoint is the one that a run with a checkpoint of each version has, and a resume begins from it."""
    each = new_game(due("1 updates", checkpoint=KEEP | {"every": "1 updates"}))
    for version in range(1, 6):
        each.play_to(version)
        each.durable()  # a snapshot that still waits for the store is replaced by the next one
    each.finish()
    game = new_game(due("1 updates", checkpoint={"every": "100 updates", "keep_last": 1, "keep_best": 1}))
    checkpoints = game.role.checkpoints

    def score() -> None:
        """Scores all that is due, as an evaluator would; the third version is the best."""
        for name in due_evaluations(checkpoints.store):
            version = checkpoint_version(name) or 0
            scores = {"mean_return": 10.0 - abs(version - 3), "episodes": 1, "version": version}
            record_evaluation(game.role.redis, game.role.run_id, name, scores | {"confirmation": scores})

    game.play_to(5)
    eventually(lambda: versions(due_evaluations(checkpoints.store)) == [1, 2, 3, 4, 5])
    if dies:
        game.crash()
    score()
    if dies:
        game.restart()
    game.play()
    game.trainer.save_last("exhausted")
    score()
    game.trainer.finish("exhausted")
    assert versions(checkpoints.names()) == [3, 6], "the best and the last"
    assert checkpoint_version(checkpoints.resolve("best")) == 3
    best = checkpoints.load("3_Step-192.ckpt")
    assert without_position(best) == without_position(each.role.checkpoints.load("3_Step-192.ckpt"))
    assert due_evaluations(checkpoints.store) == []
    assert game.policy_hash() == each.policy_hash()
    prepare_resume(game.open(), "best")
    assert checkpoints.newest_good()[0].manifest.parent == "3_Step-192.ckpt"
