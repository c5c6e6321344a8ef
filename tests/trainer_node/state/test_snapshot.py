"""Snapshots: everything the trainer is, there and back, bit for bit."""

from __future__ import annotations

import functools
import hashlib
import json
import subprocess
import sys
from collections import deque
from typing import Any

import pytest
import torch

from stagecoach.shared.base.errors import CheckpointDamaged, DropReason
from stagecoach.shared.config.run_config import Config
from stagecoach.shared.experience.fragment import Fragment
from stagecoach.shared.policies.serialization import encode_policy
from stagecoach.shared.protocol.ledger import Ledger
from stagecoach.shared.storage.checkpoint_store import Checkpoint, describe_objects
from stagecoach.trainer_node.learning.learner import Learner
from stagecoach.trainer_node.state.log_consumer import Committed
from stagecoach.trainer_node.state.snapshot import Parent, Progress, Snapshot, restore, take
from tests.conftest import minimal_config
from tests.support.learning.learners import Side, experience, learn

POLICY, STATE = "default/policy.safetensors", "trainer/state.json"
OPTIMIZER, REWARDS = "trainer/default.algorithm.safetensors", "trainer/default.rewards.safetensors"


def config_with(**policy: Any) -> Config:
    """A small network with everything that is learned beside the weights."""
    defaults = {"hidden_sizes": [8], "normalize_observations": True, "normalize_rewards": True}
    return minimal_config(policies={"default": defaults | policy}, algorithm={"minibatch_size": 8, "epochs": 2})


@functools.cache
def acted() -> list[list[Fragment]]:
    return experience(config_with(), 6)


def learner_after(config: Config, updates: int = 0) -> Learner:
    learner = Side(config).learner
    learner.episodes = deque(maxlen=3)
    train(learner, 0, updates)
    return learner


def train(learner: Learner, first: int, end: int) -> None:
    for fragments in acted()[first:end]:
        learn(learner, fragments)


def accounting() -> Committed:
    ledger = Ledger()
    ledger.consume("worker-0", 32)
    ledger.drop("worker-1", DropReason.STALE, 32)
    ledger.of("worker-0").high_water[0] = 5
    return Committed("1700000000000-3", ledger.as_json(), {0: 5, 1: 2})


def snapshot_of(learner: Learner, config: Config) -> Snapshot:
    progress = Progress(3, 2, Parent("1_Step-32.ckpt", "1600000000000-0", 1))
    return take(learner, config, "the-run", progress, accounting())


def everything(learner: Learner, config: Config) -> dict[str, bytes]:
    return snapshot_of(learner, config).checkpoint.objects


def checkpoint_of(snapshot: Snapshot, **replaced: bytes | None) -> Checkpoint:
    """The snapshot as it is read back, with some objects replaced or (None) left out."""
    named = {POLICY: "policy", STATE: "state", OPTIMIZER: "optimizer", REWARDS: "rewards"}
    objects = {key: replaced.get(named[key], data) for key, data in snapshot.checkpoint.objects.items()}
    return Checkpoint(snapshot.checkpoint.manifest, {key: data for key, data in objects.items() if data is not None})


def trained_digest() -> str:
    """SHA-256 over the objects of a snapshot after two updates; called in a fresh process, too."""
    torch.set_num_threads(1)
    objects = everything(learner_after(config_with(), 2), config_with())
    return hashlib.sha256(b"".join(key.encode() + data for key, data in sorted(objects.items()))).hexdigest()


@pytest.mark.parametrize(
    "policy", [{}, {"share_encoder": True}, {"normalize_observations": False, "normalize_rewards": False}]
)
def test_restored_learner_continues_bit_for_bit(policy: dict[str, Any]) -> None:
    config = config_with(**policy)
    original = learner_after(config, 3)
    checkpoint = checkpoint_of(snapshot_of(original, config))
    seeded, again = learner_after(config.model_copy(update={"seed": 99})), learner_after(config)
    said = restore(seeded, checkpoint)
    assert everything(seeded, config) == everything(original, config)
    restore(again, checkpoint)
    for learner in (original, again, seeded):
        train(learner, 3, 6)
    assert everything(again, config) == everything(original, config)
    assert everything(seeded, config)[POLICY] != everything(original, config)[POLICY], "the run's seed shuffles"
    assert (said.version, said.committed.position, said.committed.lags) == (3, "1700000000000-3", {0: 5, 1: 2})
    assert Ledger.from_json(said.committed.ledger) == Ledger.from_json(accounting().ledger)


def test_fresh_process_writes_equal_bytes() -> None:
    code = "from tests.trainer_node.state.test_snapshot import trained_digest; print(trained_digest())"
    fresh = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=100)
    before = torch.get_num_threads()
    try:
        assert fresh.stdout.strip() == trained_digest()
    finally:
        torch.set_num_threads(before)


def test_manifest_records_origin_of_checkpoint() -> None:
    config = config_with()
    learner = learner_after(config, 2)
    snapshot = snapshot_of(learner, config)
    manifest, counters = snapshot.checkpoint.manifest, learner.counters.as_dict()
    assert manifest.name == "3_Step-128.ckpt" and manifest.run_id == "the-run" and manifest.epoch == 2
    assert manifest.parent == "1_Step-32.ckpt" and manifest.log_position == "1700000000000-3"
    assert manifest.objects == describe_objects(snapshot.checkpoint.objects)
    assert set(snapshot.checkpoint.objects) == {POLICY, OPTIMIZER, REWARDS, STATE}
    provenance = manifest.provenance
    assert provenance["config_hash"] == config.hash() and provenance["seed"] == config.seed
    assert provenance["log_range"] == ["1600000000000-0", "1700000000000-3"]
    assert provenance["policy_versions"] == [1, 3] and provenance["lag_histogram"] == {"0": 5, "1": 2}
    assert provenance["counters"] == counters and counters["train"]["env_steps"] == 128
    assert provenance["phase"] == "train" and provenance["code_version"]
    assert provenance["mean_return"] == learner.mean_return() is not None
    assert provenance["ledger"]["worker-1"]["dropped"] == {"stale": {"fragments": 1, "transitions": 32}}


def other_network() -> bytes:
    """A whole policy file, of another size."""
    return encode_policy(learner_after(config_with(hidden_sizes=[16])).policies["default"], 3)


DAMAGED: dict[str, dict[str, bytes | None]] = {
    "policy missing": {"policy": None},
    "policy garbage": {"policy": b"garbage"},
    "policy of another size": {"policy": other_network()},
    "optimizer missing": {"optimizer": None},
    "optimizer garbage": {"optimizer": b"\x08" + bytes(20)},
    "rewards missing": {"rewards": None},
    "state missing": {"state": None},
    "state not JSON": {"state": b"{"},
    "state not UTF-8": {"state": b"\xff\xfe"},
    "state empty": {"state": b"{}"},
    "state of another shape": {"state": json.dumps({"version": 3, "counters": {}}).encode()},
    "state a list": {"state": b"[]"},
}


@pytest.mark.parametrize("damage", DAMAGED)
def test_failed_restore_leaves_learner_unchanged(damage: str) -> None:
    config = config_with()
    original, learner = learner_after(config, 2), learner_after(config, 1)
    before = everything(learner, config)
    with pytest.raises(CheckpointDamaged, match=r"3_Step-128\.ckpt cannot be restored"):
        restore(learner, checkpoint_of(snapshot_of(original, config), **DAMAGED[damage]))
    assert everything(learner, config) == before
