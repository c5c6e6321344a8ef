"""The policy board: version, weights, credit and ledger move in one step, forward only, and by one trainer only."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any, cast

import numpy as np
import pytest

from stagecoach.coordinator.services.memory_folder import MemoryFolder
from stagecoach.shared.base.errors import ConfigError, Fenced
from stagecoach.shared.experience.counters import Phase, PhaseCounters
from stagecoach.shared.experience.spaces import Columns
from stagecoach.shared.policies.registry import build_policies
from stagecoach.shared.policies.serialization import VersionHeader, encode_board, state_arrays
from stagecoach.shared.protocol.flow_control import RunState
from stagecoach.shared.protocol.keys import RunKeys
from stagecoach.shared.protocol.ledger import Ledger, read_ledger
from stagecoach.shared.protocol.policy_board import PolicyBoard
from stagecoach.shared.protocol.shared_memory import AT_LEAST, SharedMemory
from stagecoach.shared.runtime.run_context import RunContext
from tests.conftest import MakeRole
from tests.support.runs.small_run import SmallWorker, begin, in_redis, small_config


@pytest.fixture
def role(make_role: MakeRole) -> RunContext:
    """K = 2, L = 0."""
    return make_role(small_config())


def policies(role: RunContext) -> dict[str, Columns]:
    """Weights of this run's policy."""
    built = build_policies(role.description().policies, role.config.policies, role.config.algorithm, seed=3)
    return {policy_id: state_arrays(policy) for policy_id, policy in built.items()}


def publish(role: RunContext, epoch: int, version: int, **changes: Any) -> str:
    """Publishes real weights; answers the word."""
    counters = PhaseCounters()
    counters.train.env_steps = 100 * version
    header = VersionHeader(version, Phase.TRAIN, counters)
    given: dict[str, Any] = {
        "epoch": epoch, "version": version, "consumed": 0, "committed_id": "0-0", "ledger": Ledger(), "header": header,
        "blob": encode_board(policies(role), header),
    }  # fmt: skip
    return PolicyBoard(role.redis, role.run_id).publish(**given | changes).reply


def test_worker_fetches_exactly_what_was_published(role: RunContext) -> None:
    board, epoch = PolicyBoard(role.redis, role.run_id), role.flow.take_over()
    assert board.fetch(role.checkpoints) is None
    assert publish(role, epoch, 7) == "published"
    found = board.fetch(role.checkpoints)
    assert found is not None
    assert (found.header.version, found.header.phase, found.header.counters.train.env_steps) == (7, Phase.TRAIN, 700)
    expected = policies(role)
    assert found.states.keys() == expected.keys()
    for policy_id, state in expected.items():
        assert found.states[policy_id].keys() == state.keys()
        for name, array in state.items():
            np.testing.assert_array_equal(found.states[policy_id][name], array, strict=True)


def test_publication_moves_version_credit_and_ledger_together(role: RunContext) -> None:
    trainer, worker = begin(role), SmallWorker(role)
    worker.work()
    worker.work()
    assert trainer.take() is not None and trainer.take() is not None
    assert role.flow.read().consumed == 0 and read_ledger(role.redis, role.run_id) == Ledger()
    answer = trainer.publish()
    state = role.flow.read()
    assert (answer.reply, answer.state, answer.reason) == ("published", "running", "")
    assert answer.log_bytes == state.log_bytes
    assert (state.version, state.consumed, state.committed_id) == (1, 2, trainer.consumer.position)
    assert read_ledger(role.redis, role.run_id) == trainer.consumer.ledger
    assert role.redis.hget(RunKeys(role.run_id).board, "version") == b"1"
    role.flow.set_state(RunState.STOPPING, "solved")
    answer = trainer.publish()
    assert (answer.state, answer.reason) == ("stopping", "solved"), "so the trainer is told"
    role.redis.delete(RunKeys(role.run_id).flow)
    with pytest.raises(Fenced):
        trainer.publish()


@pytest.mark.parametrize("version", [0, 2, 3])
def test_known_version_moves_neither_credit_nor_ledger(role: RunContext, version: int) -> None:
    """A restarted trainer arrives at the newest version again: only where its weights are may have changed."""
    epoch = role.flow.take_over()
    assert publish(role, epoch, 3, consumed=2, committed_id="5-1") == "published"
    before = in_redis(role)
    changed = Ledger()
    changed.consume("worker-0", 4)
    others: dict[str, Any] = {"committed_id": "9-9", "ledger": changed, "blob": b"others", "checkpoint": "x"}
    word = publish(role, epoch, version, consumed=2, **others)
    after, board = in_redis(role), RunKeys(role.run_id).board
    assert word == "known" and (after == before) is (version < 3)
    assert {**after, board: None} == {**before, board: None}


class LargeBoard:
    """A trainer's board whose versions go to shared memory, and a worker's on the same memory."""

    def __init__(self, role: RunContext, folder: MemoryFolder) -> None:
        self.role, self.folder = role, folder
        self.worker = PolicyBoard(role.redis, role.run_id, SharedMemory(str(folder.path)))
        self.take_over()

    def take_over(self) -> None:
        """Another trainer begins."""
        self.epoch = self.role.flow.take_over(memory=SharedMemory(str(self.folder.path)).token)
        self._trainer = PolicyBoard(self.role.redis, self.role.run_id, SharedMemory(str(self.folder.path)))

    def publish(self, version: int, elements: int = AT_LEAST) -> str:
        """Weights that are all equal to the version."""
        header = VersionHeader(version, Phase.TRAIN, PhaseCounters())
        states = {"default": {"weight": np.full(elements, version, np.float32)}}
        return self._trainer.publish(
            epoch=self.epoch, version=version, consumed=0, committed_id="0-0", ledger=Ledger(), header=header,
            blob=encode_board(states, header),
        ).reply  # fmt: skip

    def fetched(self) -> tuple[int, float] | None:
        """Version and weight that a worker finds."""
        found = self.worker.fetch(self.role.checkpoints)
        return None if found is None else (found.header.version, float(found.states["default"]["weight"][-1]))

    @property
    def lost(self) -> bool:
        return self._trainer.lost

    @property
    def files(self) -> list[Path]:
        return sorted(self.folder.path.glob("policy:*"))

    @property
    def blob(self) -> bytes | None:
        """What Redis itself holds of it."""
        return cast(bytes | None, self.role.redis.hget(RunKeys(self.role.run_id).board, "blob"))


@pytest.fixture
def large(role: RunContext, tmp_path: Path) -> Iterator[LargeBoard]:
    folder = MemoryFolder(tmp_path)
    yield LargeBoard(role, folder)
    folder.close()


def test_large_version_is_in_shared_memory(large: LargeBoard) -> None:
    for version in range(5):
        assert large.publish(version) == "published"
        assert large.fetched() == (version, version) and large.blob == b""
        assert len(large.files) <= 2
    assert large.publish(5, elements=4) == "published"
    assert large.fetched() == (5, 5) and large.blob, "a small one is on the board"
    large.take_over()
    assert large.publish(5) == "known" and large.publish(6) == "published"
    assert large.fetched() == (6, 6) and len(large.files) <= 2, "the former trainer's are gone"


def test_lost_file_is_awaited_until_trainer_publishes_again(large: LargeBoard) -> None:
    """As after a reboot: the trainer learns its log again, up to the version on the board."""
    assert large.publish(1) == "published"
    for path in large.files:
        path.unlink()
    assert large.fetched() is None
    large.take_over()
    assert large.publish(0) == "known" and large.fetched() is None
    assert large.publish(1) == "known" and large.fetched() == (1, 1)


def test_trainer_notices_a_lost_file_and_publishes_again(large: LargeBoard) -> None:
    assert large.publish(1) == "published" and not large.lost
    for path in large.files:
        path.unlink()
    assert large.lost
    assert large.publish(1) == "known"
    assert not large.lost and large.fetched() == (1, 1)


def test_file_of_other_contents_is_not_a_version(large: LargeBoard) -> None:
    """A worker may read while a later version is written over the file."""
    assert large.publish(1) == "published"
    (path,) = large.files
    data = bytearray(path.read_bytes())
    data[-1] ^= 1
    path.write_bytes(data)
    assert large.fetched() is None


def test_process_without_the_memory_says_so(large: LargeBoard) -> None:
    assert large.publish(1) == "published"
    elsewhere = PolicyBoard(large.role.redis, large.role.run_id, SharedMemory(str(large.folder.path / "not-here")))
    with pytest.raises(ConfigError, match=r"in shared memory .* redis\.shared_memory=false"):
        elsewhere.fetch(large.role.checkpoints)
    large.role.flow.set_state(RunState.RUNNING, "")  # a resume without it
    assert elsewhere.fetch(large.role.checkpoints) is None, "until the next trainer publishes"


def test_version_goes_to_redis_when_memory_has_no_room(large: LargeBoard, monkeypatch: pytest.MonkeyPatch) -> None:
    assert large.publish(1) == "published"
    monkeypatch.setattr(SharedMemory, "put", lambda self, name, body: False)
    assert large.publish(2) == "published"
    assert large.fetched() == (2, 2) and large.blob
    monkeypatch.undo()
    assert large.publish(3) == "published" and large.fetched() == (3, 3) and large.blob == b""
