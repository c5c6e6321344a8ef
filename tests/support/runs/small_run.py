"""A small run in Redis: a worker that acts zeros, and a trainer that publishes without learning."""

from __future__ import annotations

from typing import Any

import numpy as np

from stagecoach.shared.experience import fragment
from stagecoach.shared.experience.counters import Phase, PhaseCounters
from stagecoach.shared.experience.fragment import Fragment
from stagecoach.shared.policies.serialization import VersionHeader
from stagecoach.shared.protocol.flow_control import Claim
from stagecoach.shared.protocol.keys import RunKeys
from stagecoach.shared.protocol.ledger import LedgerLine, read_accounting
from stagecoach.shared.protocol.policy_board import PolicyBoard, Published
from stagecoach.shared.runtime.run_context import RunContext
from stagecoach.trainer_node.state.log_consumer import LogConsumer, RedisAccounting
from tests.conftest import minimal_config
from tests.support.experience.fragments import zero_fragment

STEPS, ENVS = 2, 2
SIZE = STEPS * ENVS
"""Transitions in a fragment."""
BAD = ["undecodable", "corrupt", "wire_version", "schema", "foreign_run", "not_finite", "magnitude", "stale"]
"""Kinds of damage by `damaged`; `duplicate`, `lost` and `lost_body` are the log's faults, not a fragment's."""


def small_config(fragments_per_update: int = 2, max_policy_lag: int = 0, algorithm: str = "ppo", **rollout: Any) -> Any:
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

    def __init__(self, role: RunContext, name: str = "worker-0") -> None:
        self.role, self.name, self.seq, self.refusals = role, name, 0, 0
        self.log = role.log()
        self.incarnation, self.epoch = role.flow.register(name)
        self._memory = ""

    def claim(self) -> Claim:
        claim = self.role.flow.claim(self.name, self.incarnation, self.seq)
        self._memory = claim.memory
        return claim

    def act(self, version: int = 0, **header: Any) -> Fragment:
        """A valid fragment of zeros; `header` replaces fields."""
        fields: dict[str, Any] = {
            "run_id": self.role.run_id, "worker_id": self.name, "incarnation": self.incarnation, "seq": self.seq,
            "policy_versions": dict.fromkeys(self.role.config.policies, version), "steps": STEPS, "num_envs": ENVS,
        }  # fmt: skip
        return zero_fragment(self.role.description(), **fields | header)

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
        return self.log.push(*place, SIZE, blob, refusals=self.refusals, memory=self._memory)

    def work(self, version: int = 0, blob: bytes | None = None) -> None:
        """One turn that must succeed."""
        assert self.claim().granted
        assert self.push(blob, version) == "pushed"


class SmallTrainer:
    """Takes and publishes without learning."""

    def __init__(self, role: RunContext) -> None:
        self.role = role
        self.epoch = role.flow.take_over(memory=role.bodies.memory.token)
        self.board = PolicyBoard(role.redis, role.run_id)
        self.log = role.log()
        accounting = RedisAccounting(role.redis, role.run_id, self.epoch)
        self.consumer = LogConsumer(role.run_id, role.config, role.description(), self.log.read, accounting)
        self.version = 0
        self.taken = 0

    def take(self, phase: Phase = Phase.TRAIN) -> Fragment | None:
        """The next good fragment that is there already."""
        found = self.consumer.take(self.version, phase, 0.0)
        self.taken += found is not None
        return found

    def publish(self, version: int | None = None) -> Published:
        """Commits what was taken as the next version (or as `version`)."""
        self.version = self.version + 1 if version is None else version
        self.consumer.commit()
        header = VersionHeader(self.version, Phase.TRAIN, PhaseCounters())
        taken, self.taken = self.taken, 0
        return self.board.publish(
            epoch=self.epoch, version=self.version, consumed=taken, committed_id=self.consumer.position,
            ledger=self.consumer.ledger, header=header, blob=b"weights",
        )  # fmt: skip


def begin(role: RunContext) -> SmallTrainer:
    """A trainer that has published version 0."""
    trainer = SmallTrainer(role)
    trainer.publish(0)
    return trainer


def in_redis(role: RunContext) -> dict[str, Any]:
    """Everything that the run has in Redis, except the wake-ups."""
    client: Any = role.redis
    found: dict[str, Any] = {}
    for key in sorted(client.scan_iter(match=RunKeys(role.run_id).prefix.replace("[", "\\[") + "*")):
        name = key.decode()
        if name != RunKeys(role.run_id).wakeups:
            found[name] = client.dump(key)
    return found


def ledger_lines(role: RunContext) -> dict[str, LedgerLine]:
    """The ledger, by worker and in total; every line must balance."""
    lines = read_accounting(role.redis, role.run_id)
    assert all(line.balances for line in lines.values()), {name: line.as_dict() for name, line in lines.items()}
    return lines


def damaged(worker: SmallWorker, reason: str) -> bytes:
    """A fragment that has to be dropped for `reason`."""
    if reason == "undecodable":
        return b"not a fragment"
    headers: dict[str, dict[str, Any]] = {
        "wire_version": {"wire_version": fragment.WIRE_VERSION + 1},
        "foreign_run": {"run_id": "another-run"},
        "stale": {"phase": Phase.HEATUP},
    }
    made = worker.act(**headers.get(reason, {}))
    if reason == "schema":
        made.columns["default"].pop("reward")
    if reason in ("not_finite", "magnitude"):
        made.columns["default"]["reward"][0, 0] = np.nan if reason == "not_finite" else 3e38
    blob = bytearray(fragment.encode(made))
    blob[-1] ^= reason == "corrupt"
    return bytes(blob)
