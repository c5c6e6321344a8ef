"""Intake on a real log: what is consumed, what is dropped with which reason, and books that balance in every case."""

from __future__ import annotations

import os
from typing import Any

import numpy as np
import pytest

from shared import fragment, tensor_blob
from shared.algorithm_configs.dqn import DQNConfig
from shared.errors import Fenced
from shared.events import read_events
from shared.experience_log import STRANGERS
from shared.flow import Claim
from shared.fragment import Fragment, FragmentHeader
from shared.ledger import Count, Ledger, LedgerLine, read_books, read_ledger, set_forward
from shared.policies.codec import VersionHeader
from shared.policy_board import PolicyBoard, Published
from shared.redis_keys import RunKeys
from shared.role import Role
from shared.steps import Phase, PhaseCounters
from tests.conftest import MakeRole, minimal_config
from trainer_node.intake import Committed, Intake, RedisSettlement

STEPS, ENVS = 2, 2
SIZE = STEPS * ENVS
"""Transitions in a fragment of these tests."""
BAD = ["undecodable", "corrupt", "wire_version", "schema", "foreign_run", "not_finite", "magnitude", "stale"]
"""What `damaged` can make; `duplicate`, `lost` and `lost_body` are the log's faults, not a fragment's; `poison` is in
test_quarantine.py."""


def small_config(fragments_per_update: int = 2, max_policy_lag: int = 0, algorithm: str = "ppo", **rollout: Any) -> Any:
    """A config with small fragments."""
    return minimal_config(
        environment={"id": "CartPole-v1", "num_envs": ENVS},
        rollout={
            "fragment_steps": STEPS, "fragments_per_update": fragments_per_update, "max_policy_lag": max_policy_lag,
            **rollout,
        },
        algorithm={"name": algorithm, "minibatch_size": SIZE},
    )  # fmt: skip


class SmallWorker:
    """Registers, claims, acts zeros and pushes: a rollout worker without an environment."""

    def __init__(self, role: Role, name: str = "worker-0") -> None:
        self.role, self.name, self.seq, self.refusals = role, name, 0, 0
        self.log = role.log()
        self.incarnation, self.epoch = role.flow.register(name)

    def claim(self) -> Claim:
        """Asks once."""
        return self.role.flow.claim(self.name, self.incarnation, self.seq)

    def act(self, version: int = 0, **header: Any) -> Fragment:
        """A valid fragment of zeros; `header` replaces fields."""
        steps, envs = header.get("steps", STEPS), header.get("num_envs", ENVS)
        description = self.role.description()
        columns = {
            policy_id: {
                name: np.zeros([max(size, 0) for size in shape], dtype)
                for name, (shape, dtype) in fragment.expected_columns(
                    spaces, steps, envs * description.slots(policy_id)
                ).items()
            }
            for policy_id, spaces in description.policies.items()
        }
        for part in columns.values():
            part["mask"][:] = True
        fields: dict[str, Any] = {
            "run_id": self.role.run_id, "worker_id": self.name, "incarnation": self.incarnation, "seq": self.seq,
            "phase": Phase.TRAIN, "policy_versions": dict.fromkeys(columns, version), "steps": steps, "num_envs": envs,
        }  # fmt: skip
        return Fragment(FragmentHeader(**fields | header), columns)

    def push(self, blob: bytes | None = None, version: int = 0) -> str:
        """Pushes `blob` (by default a valid fragment) as the next of this worker."""
        blob = fragment.encode(self.act(version)) if blob is None else blob
        word = self.send(blob)
        self.seq += word == "pushed"
        self.refusals += word == "stale"
        return word

    def send(self, blob: bytes) -> str:
        """Pushes, and does not hear the answer."""
        place = self.name, self.incarnation, self.seq, self.epoch
        return self.log.push(*place, SIZE, blob, refusals=self.refusals)

    def work(self, version: int = 0, blob: bytes | None = None) -> None:
        """One turn that must succeed."""
        assert self.claim().granted
        assert self.push(blob, version) == "pushed"


class SmallTrainer:
    """Takes and publishes without learning."""

    def __init__(self, role: Role) -> None:
        self.role = role
        self.epoch = role.flow.take_over()
        self.board = PolicyBoard(role.redis, role.run_id)
        self.log = role.log()
        settlement = RedisSettlement(role, self.epoch)
        self.intake = Intake(role.run_id, role.config, role.description(), self.log, settlement)
        self.version = 0
        self.taken = 0

    def take(self, phase: Phase = Phase.TRAIN) -> Fragment | None:
        """The next good fragment that is there already."""
        found = self.intake.take(self.version, phase, 0.0)
        self.taken += found is not None
        return found

    def publish(self, version: int | None = None) -> Published:
        """Commits what was taken as the next version (or as `version`)."""
        self.version = self.version + 1 if version is None else version
        self.intake.commit()
        header = VersionHeader(self.version, Phase.TRAIN, PhaseCounters())
        taken, self.taken = self.taken, 0
        return self.board.publish(
            epoch=self.epoch, version=self.version, consumed=taken, settled_id=self.intake.position,
            ledger=self.intake.ledger, header=header, blob=b"weights",
        )  # fmt: skip


def begin(role: Role) -> SmallTrainer:
    """A trainer that has published version 0."""
    trainer = SmallTrainer(role)
    trainer.publish(0)
    return trainer


def in_redis(role: Role) -> dict[str, Any]:
    """Everything that the run has in Redis, except the wake-ups."""
    client: Any = role.redis
    found: dict[str, Any] = {}
    for key in sorted(client.scan_iter(match=RunKeys(role.run_id).prefix.replace("[", "\\[") + "*")):
        name = key.decode()
        if name != RunKeys(role.run_id).wakeups:
            found[name] = client.dump(key)
    return found


def books(role: Role) -> dict[str, LedgerLine]:
    """The books; every line of them must balance."""
    lines = read_books(role.redis, role.run_id)
    assert all(line.balances for line in lines.values()), {name: line.as_dict() for name, line in lines.items()}
    return lines


def damaged(worker: SmallWorker, reason: str) -> bytes:
    """A fragment that has to be dropped for `reason`."""
    good = worker.act()
    if reason == "undecodable":
        return b"not a fragment"
    if reason == "corrupt":
        blob = bytearray(fragment.encode(good))
        blob[-1] ^= 1
        return bytes(blob)
    if reason == "wire_version":
        return fragment.encode(worker.act(wire_version=fragment.WIRE_VERSION + 1))
    if reason == "schema":
        good.columns["default"].pop("reward")
    if reason == "foreign_run":
        return fragment.encode(worker.act(run_id="another-run"))
    if reason == "not_finite":
        good.columns["default"]["reward"][0, 0] = np.nan
    if reason == "magnitude":
        good.columns["default"]["reward"][0, 0] = 3e38
    if reason == "stale":
        return fragment.encode(worker.act(phase=Phase.HEATUP))
    return fragment.encode(good)


def test_takes_fragments_in_the_order_of_the_log(make_role: MakeRole) -> None:
    role = make_role(small_config())
    trainer, first, second = begin(role), SmallWorker(role, "worker-0"), SmallWorker(role, "worker-1")
    second.work()
    first.work()
    found = [trainer.take(), trainer.take()]
    assert [item.header.worker_id for item in found if item] == ["worker-1", "worker-0"]
    assert trainer.take() is None
    trainer.publish()
    total = books(role)["total"]
    assert total.consumed == total.produced == Count(2, 2 * SIZE)
    assert trainer.intake.lags == {0: 2}


@pytest.mark.parametrize("reason", BAD)
def test_drops_a_bad_fragment_counts_it_and_gives_its_credit_again(make_role: MakeRole, reason: str) -> None:
    role = make_role(small_config(fragments_per_update=1))
    trainer, worker = begin(role), SmallWorker(role)
    worker.work(blob=damaged(worker, reason))
    assert worker.claim().word == "wait_credit"
    assert trainer.take() is None
    line = books(role)["worker-0"]
    assert line.dropped == {reason: Count(1, SIZE)} and line.consumed == Count()
    assert role.flow.read().in_flight == 0
    worker.work()
    taken = trainer.take()
    assert taken is not None and taken.header.seq == 1
    trainer.publish()
    line = books(role)["worker-0"]
    assert line.consumed == Count(1, SIZE) and line.dropped == {reason: Count(1, SIZE)}


@pytest.mark.parametrize(("algorithm", "phase", "dropped"), [
    ("ppo", Phase.TRAIN, True), ("ppo", Phase.HEATUP, False), ("dqn", Phase.TRAIN, False),
])  # fmt: skip
def test_an_unknown_log_prob_is_dropped_where_the_algorithm_learns_by_it(
    make_role: MakeRole, algorithm: str, phase: Phase, dropped: bool
) -> None:
    role = make_role(small_config(algorithm=algorithm))
    trainer, worker = begin(role), SmallWorker(role)
    made = worker.act(phase=phase)
    made.columns["default"]["log_prob"][0, 0] = np.nan
    worker.work(blob=fragment.encode(made))
    assert (trainer.intake.take(0, phase, 0.0) is None) == dropped
    assert trainer.intake.ledger.of("worker-0").dropped == ({"not_finite": Count(1, SIZE)} if dropped else {})


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"worker_id": "worker-9"}, "schema"),
        ({"seq": 7}, "schema"),
        ({"incarnation": 3}, "schema"),
        ({"steps": STEPS + 1}, "schema"),
        ({"num_envs": ENVS + 1}, "schema"),
        ({"policy_versions": {"default": 1}}, "schema"),
        ({"policy_versions": {"other": 0}}, "schema"),
    ],
)
def test_drops_a_fragment_that_is_not_what_its_entry_or_the_run_says(
    make_role: MakeRole, change: dict[str, Any], reason: str
) -> None:
    role = make_role(small_config())
    trainer, worker = begin(role), SmallWorker(role)
    worker.work(blob=fragment.encode(worker.act(**change)))
    assert trainer.take() is None
    assert books(role)["worker-0"].dropped == {reason: Count(1, SIZE)}


@pytest.mark.parametrize("max_lag", [0, 1, 3])
def test_consumes_up_to_the_lag_bound_and_drops_what_is_older(make_role: MakeRole, max_lag: int) -> None:
    role = make_role(small_config(fragments_per_update=1, max_policy_lag=max_lag))
    trainer, worker = begin(role), SmallWorker(role)
    for _ in range(max_lag + 1):
        worker.work(trainer.version)
        assert trainer.take() is not None
        trainer.publish()
    worker.work(version=0)
    assert trainer.take() is None
    worker.work(version=1)
    assert trainer.take() is not None
    assert trainer.intake.lags == {0: max_lag + 1, max_lag: 1} if max_lag else {0: 2}
    assert books(role)["total"].dropped == {"stale": Count(1, SIZE)}


def test_a_fragment_of_another_phase_is_stale(make_role: MakeRole) -> None:
    role = make_role(small_config())
    trainer, worker = begin(role), SmallWorker(role)
    worker.work()
    assert trainer.take(Phase.HEATUP) is None
    assert books(role)["total"].dropped == {"stale": Count(1, SIZE)}


def test_a_replay_memory_takes_what_was_acted_at_random_when_heat_up_is_over(make_role: MakeRole) -> None:
    role = make_role(small_config().model_copy(update={"algorithm": DQNConfig()}))
    trainer, worker = begin(role), SmallWorker(role)
    worker.work(blob=fragment.encode(worker.act(phase=Phase.HEATUP)))
    assert trainer.take(Phase.TRAIN) is not None and not books(role)["total"].dropped


def test_a_repeat_in_the_log_is_a_duplicate_with_its_own_credit(make_role: MakeRole) -> None:
    """A Redis that has forgotten what a worker pushed lets it push the same again."""
    role = make_role(small_config(max_policy_lag=1))
    trainer, worker = begin(role), SmallWorker(role)
    worker.work()
    role.redis.delete(RunKeys(role.run_id).pushed)
    worker.seq = 0
    worker.work()
    assert trainer.take() is not None and trainer.take() is None
    assert role.flow.read().in_flight == 1
    line = books(role)["worker-0"]
    assert line.dropped == {"duplicate": Count(1, SIZE)} and line.consumed == Count(1, SIZE)


def test_entries_that_vanished_from_the_log_are_counted_as_lost(make_role: MakeRole) -> None:
    role = make_role(small_config(fragments_per_update=4))
    trainer, worker = begin(role), SmallWorker(role)
    for _ in range(4):
        worker.work()
    entries = worker.log.read("0-0", 10, 0)
    role.redis.xdel(RunKeys(role.run_id).log, entries[1].id, entries[2].id)
    assert not read_books(role.redis, role.run_id)["worker-0"].balances
    taken = [trainer.take(), trainer.take()]
    assert [item.header.seq for item in taken if item] == [0, 3]
    state = role.flow.read()
    assert state.claimed == 2
    worker.work()
    worker.work()
    assert trainer.take() is not None and trainer.take() is not None
    trainer.publish()
    line = books(role)["worker-0"]
    assert line.dropped == {"lost": Count(2, 2 * SIZE)} and line.consumed == Count(4, 4 * SIZE)
    assert role.flow.read().in_flight == 0


def test_a_gap_before_a_bad_fragment_counts_both(make_role: MakeRole) -> None:
    role = make_role(small_config(fragments_per_update=2))
    trainer, worker = begin(role), SmallWorker(role)
    worker.work()
    worker.work(blob=b"bad")
    role.redis.xdel(RunKeys(role.run_id).log, worker.log.read("0-0", 1, 0)[0].id)
    assert trainer.take() is None
    assert role.flow.read().in_flight == 0
    assert books(role)["worker-0"].dropped == {"lost": Count(1, SIZE), "undecodable": Count(1, SIZE)}


def test_a_gap_is_counted_once_by_a_trainer_that_goes_on_from_the_settled_books(make_role: MakeRole) -> None:
    role = make_role(small_config(fragments_per_update=2))
    trainer, worker = begin(role), SmallWorker(role)
    worker.work()
    worker.work()
    role.redis.xdel(RunKeys(role.run_id).log, worker.log.read("0-0", 1, 0)[0].id)
    assert trainer.take() is not None
    second = SmallTrainer(role)
    settled = read_ledger(role.redis, role.run_id).as_json()
    second.intake.restore(Committed(role.flow.read().settled_id, settled, {}))
    assert second.take() is not None
    assert second.intake.ledger.of("worker-0").dropped == {"lost": Count(1, SIZE)}
    assert role.flow.read().claimed == 1


GARBAGE: list[dict[bytes, bytes]] = [
    {b"hello": b"world"},
    {b"worker": b"\xff\xfe", b"incarnation": b"-1", b"seq": b"1.5", b"transitions": b"many", b"fragment": b"\x00"},
    {b"worker": b"worker-0", b"incarnation": b"9" * 5000, b"seq": b"9" * 5000, b"transitions": b"9" * 5000},
    {b"worker": b"worker-0", b"incarnation": "²".encode(), b"transitions": "٣".encode(), b"fragment": b""},
    {},
    {b"end": b"9" * 12},
    {b"seq": b"7", b"end": b"9" * 12, b"lost": b"5"},
    {b"worker": b"worker-7", b"incarnation": b"3"},
]
"""The last four are put upon a copy of what a worker pushed."""


@pytest.mark.parametrize(
    "fields", GARBAGE, ids=["no field", "no number", "huge number", "odd digits", "copy", "far", "gap", "another"]
)
def test_what_is_put_into_the_log_by_hand_is_dropped_and_changes_neither_credit_nor_another_account(
    make_role: MakeRole, fields: dict[bytes, bytes]
) -> None:
    """Nor the bytes that the log is counted to hold, nor the books that a Redis is set forward to."""
    role = make_role(small_config(fragments_per_update=2))
    trainer, worker, keys = begin(role), SmallWorker(role), RunKeys(role.run_id)
    worker.work()
    client: Any = role.redis
    ((_, pushed),) = client.xrange(keys.log)
    for _ in range(3):
        client.xadd(keys.log, pushed | fields if GARBAGE.index(fields) >= 4 else fields)
    assert read_books(role.redis, role.run_id)[STRANGERS].in_flight.fragments == 3
    worker.work()
    set_forward(role.redis, role.run_id, trainer.epoch, "0-0", Ledger())
    assert role.flow.read().in_flight == 2
    assert trainer.take() is not None and trainer.take() is not None
    assert role.flow.read().in_flight == 2
    trainer.publish()
    assert (role.flow.read().in_flight, trainer.intake.ledger.consumed()) == (0, Count(2, 2 * SIZE))
    lines = read_books(role.redis, role.run_id)
    assert all(line.balances for line in lines.values())
    assert lines["worker-0"] == LedgerLine(Count(2, 2 * SIZE), Count(2, 2 * SIZE), {}, Count())
    assert {reason: count.fragments for reason, count in lines[STRANGERS].dropped.items()} == {"foreign": 3}
    client.xadd(keys.log, pushed | fields)
    assert trainer.take() is None
    worker.log.trim(trainer.epoch, trainer.intake.position)
    assert (len(worker.log), client.xlen(keys.pushes), role.flow.read().log_bytes) == (0, 0, 0)


def test_many_entries_put_in_by_hand_do_not_end_the_run(make_role: MakeRole) -> None:
    role = make_role(small_config())
    trainer, worker = begin(role), SmallWorker(role)
    for _ in range(250):
        role.redis.xadd(RunKeys(role.run_id).log, {"worker": "worker-0"})
    worker.work()
    assert trainer.take() is not None


def test_commit_keeps_the_books_of_the_last_published_version(make_role: MakeRole) -> None:
    role = make_role(small_config())
    trainer, worker = begin(role), SmallWorker(role)
    worker.work()
    worker.work()
    assert trainer.take() is not None
    assert trainer.intake.committed.position == "0-0" and trainer.intake.committed.lags == {}
    assert trainer.take() is not None
    trainer.intake.commit()
    committed = trainer.intake.committed
    assert committed.position == trainer.intake.position == worker.log.read("0-0", 10, 0)[1].id
    assert Ledger.from_json(committed.ledger) == trainer.intake.ledger and committed.lags == {0: 2}


def test_restore_goes_on_after_its_position_and_forgets_what_was_read_ahead(make_role: MakeRole) -> None:
    role = make_role(small_config(fragments_per_update=4))
    trainer, worker = begin(role), SmallWorker(role)
    for _ in range(4):
        worker.work()
    assert trainer.take() is not None
    trainer.intake.commit()
    books_then = trainer.intake.committed
    assert trainer.take() is not None
    trainer.intake.restore(books_then)
    again = trainer.take()
    assert again is not None and again.header.seq == 1
    assert trainer.intake.ledger.consumed() == Count(2, 2 * SIZE) and trainer.intake.lags == {0: 2}


def test_reading_the_same_log_again_after_a_crash_ends_in_the_same_books_and_changes_nothing(
    make_role: MakeRole,
) -> None:
    role = make_role(small_config(max_policy_lag=1))
    first, worker, other = begin(role), SmallWorker(role), SmallWorker(role, "worker-1")
    worker.work()
    worker.work(blob=b"bad")
    other.work(blob=damaged(other, "not_finite"))
    other.work()
    assert first.take() is not None and first.take() is not None
    first.publish()
    worker.work(version=1)
    other.work(version=1, blob=b"bad")
    worker.work(version=1)
    role.redis.xdel(RunKeys(role.run_id).log, worker.log.read("0-0", 10, 0)[4].id)
    assert first.take() is not None and first.take() is None
    expected, lags, position = first.intake.ledger, first.intake.lags, first.intake.position

    second = SmallTrainer(role)
    before = in_redis(role)
    assert second.take() is not None and second.take() is not None
    assert second.publish().word == "known"
    assert second.take() is not None and second.take() is None
    assert (second.intake.ledger, second.intake.lags, second.intake.position) == (expected, lags, position)
    assert second.intake.ledger.of("worker-0").dropped["lost"] == Count(1, SIZE)
    assert in_redis(role) == before


def test_a_trainer_that_was_taken_over_may_not_drop(make_role: MakeRole) -> None:
    role = make_role(small_config())
    old, worker = begin(role), SmallWorker(role)
    worker.work(blob=b"bad")
    new = SmallTrainer(role)
    before = in_redis(role)
    with pytest.raises(Fenced, match="newer trainer"):
        old.take()
    assert in_redis(role) == before
    assert new.take() is None
    assert books(role)["worker-0"].dropped == {"undecodable": Count(1, SIZE)}


def test_a_header_that_lies_in_its_metadata_only_is_corrupt(make_role: MakeRole) -> None:
    role = make_role(small_config())
    trainer, worker = begin(role), SmallWorker(role)
    blob = fragment.encode(worker.act())
    changed = blob.replace(b'\\"seq\\":0', b'\\"seq\\":1')
    assert changed != blob and len(tensor_blob.decode(blob)[0]) > 0
    worker.work(blob=changed)
    assert trainer.take() is None
    assert books(role)["worker-0"].dropped == {"corrupt": Count(1, SIZE)}


def test_a_header_whose_text_no_encoder_takes_is_dropped_and_told(make_role: MakeRole) -> None:
    role = make_role(small_config())
    trainer, worker = begin(role), SmallWorker(role)
    arrays, header = tensor_blob.decode(fragment.encode(worker.act()))
    worker.work(blob=tensor_blob.encode(arrays, header | {os.fsdecode(b"caf\xe9\x1b]52;c;"): 1}))
    worker.work()
    assert trainer.take() is not None
    (event,) = read_events(role.redis, role.run_id)
    assert event.kind == "dropped" and "is schema" in event.text and "caf\\udce9\\x1b]52" in event.text
    assert books(role)["total"].balances


def test_every_reason_of_the_ledger_has_a_test_here() -> None:
    assert {*BAD, "duplicate", "lost", "lost_body", "poison", "foreign"} == set(fragment.REASONS)
