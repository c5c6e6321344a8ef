"""The policy board: version, weights, credit and ledger move in one step, forward only, and by one trainer only."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from stagecoach.shared.base.errors import Fenced
from stagecoach.shared.experience.counters import Phase, PhaseCounters
from stagecoach.shared.experience.spaces import Columns
from stagecoach.shared.policies.registry import build_policies
from stagecoach.shared.policies.serialization import VersionHeader, encode_board, state_arrays
from stagecoach.shared.protocol.flow_control import RunState
from stagecoach.shared.protocol.keys import RunKeys
from stagecoach.shared.protocol.ledger import Ledger, read_ledger
from stagecoach.shared.protocol.policy_board import PolicyBoard
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
def test_known_version_changes_nothing(role: RunContext, version: int) -> None:
    epoch = role.flow.take_over()
    assert publish(role, epoch, 3, consumed=2, committed_id="5-1") == "published"
    before = in_redis(role)
    changed = Ledger()
    changed.consume("worker-0", 4)
    others: dict[str, Any] = {"committed_id": "9-9", "ledger": changed, "blob": b"others", "checkpoint": "x"}
    word = publish(role, epoch, version, consumed=2, **others)
    assert word == "known" and in_redis(role) == before
