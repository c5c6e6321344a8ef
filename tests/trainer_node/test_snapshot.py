"""Snapshots: everything the trainer is, there and back, bit for bit."""

from __future__ import annotations

import dataclasses
import hashlib
import json
import subprocess
import sys
from collections import deque
from typing import Any

import numpy as np
import pytest
import torch

from rollout_worker.making import describe_environment
from shared.checkpoint import Checkpoint, describe_objects
from shared.config import Config
from shared.errors import CheckpointDamaged
from shared.fragment import EpisodeRecord
from shared.ledger import Ledger
from shared.policies.codec import encode_policy, state_arrays
from shared.spaces import Columns
from shared.steps import Phase
from tests.conftest import minimal_config
from trainer_node.algorithms.experience import Experience
from trainer_node.intake import Committed
from trainer_node.learner import Learner, make_learner
from trainer_node.snapshot import Line, Progress, Snapshot, restore, take

STEPS, SLOTS = 8, 4
POLICY, STATE = "default/policy.safetensors", "trainer/state.json"
OPTIMISER, REWARDS = "trainer/default.algorithm.safetensors", "trainer/default.rewards.safetensors"


def config_with(**policy: Any) -> Config:
    """A small network with everything that is learnt beside the weights."""
    defaults = {"hidden_sizes": [8], "normalise_observations": True, "normalise_rewards": True}
    return minimal_config(policies={"default": defaults | policy}, algorithm={"minibatch_size": 8, "epochs": 2})


def new_learner(config: Config) -> Learner:
    """An untrained learner."""
    learner = make_learner(config, describe_environment(config))
    learner.episodes = deque(maxlen=3)
    return learner


def experience(seed: int) -> Columns:
    """One fragment's columns of CartPole, made up, with a truncated slot."""
    random = np.random.default_rng(seed)
    over = random.random((STEPS, SLOTS)) < 0.1
    columns: Columns = {
        "obs": random.normal(size=(STEPS, SLOTS, 4)).astype(np.float32),
        "action": random.integers(0, 2, (STEPS, SLOTS)),
        "reward": random.normal(size=(STEPS, SLOTS)).astype(np.float32),
        "log_prob": np.full((STEPS, SLOTS), -0.69, np.float32),
        "terminated": over,
        "truncated": np.zeros((STEPS, SLOTS), bool),
        "mask": np.ones((STEPS, SLOTS), bool),
        "bootstrap_obs": random.normal(size=(SLOTS, 4)).astype(np.float32),
        "final_obs": random.normal(size=(1, 4)).astype(np.float32),
        "final_index": np.array([[3, 1]], np.int32),
    }
    columns["terminated"][3, 1], columns["truncated"][3, 1] = False, True
    return columns


def train(learner: Learner, updates: range) -> None:
    """These updates, each on experience of its own number."""
    for update in updates:
        columns = experience(update)
        for name, algorithm in learner.algorithms.items():
            scaling = learner.rewards.get(name)
            scaled = scaling.scale("worker-0:0", columns) if scaling else columns
            algorithm.update([Experience("worker-0:0", scaled)], learner.counters.train)
        learner.counters.train.updates += 1
        learner.counters.train.env_steps += STEPS * SLOTS
        learner.counters.train.episodes += 1
        learner.episodes.append(EpisodeRecord(float(update), 7, True, {"a": 1.5}, {"speed": 0.1}))


def books() -> Committed:
    """The intake's side of a snapshot."""
    ledger = Ledger()
    ledger.consume("worker-0", 32)
    ledger.drop("worker-1", "stale", 32)
    ledger.of("worker-0").high_water[0] = 5
    return Committed("1700000000000-3", ledger.as_json(), {0: 5, 1: 2})


def snapshot_of(learner: Learner, config: Config) -> Snapshot:
    """The learner at version 3."""
    progress = Progress(3, Phase.TRAIN, 2, "1_Step-32.ckpt", "1600000000000-0", 1, Line())
    return take(learner, describe_environment(config), config, "the-run", progress, books())


def checkpoint_of(snapshot: Snapshot, **replaced: bytes | None) -> Checkpoint:
    """The snapshot as it is read back, with some objects replaced or (None) left out."""
    named = {POLICY: "policy", STATE: "state", OPTIMISER: "optimiser", REWARDS: "rewards"}
    objects = {key: replaced.get(named[key], data) for key, data in snapshot.objects.items()}
    return Checkpoint(snapshot.manifest, {key: data for key, data in objects.items() if data is not None})


def weights_hash(learner: Learner) -> str:
    """SHA-256 of all weights and normalisers."""
    digest = hashlib.sha256()
    for name, policy in sorted(learner.policies.items()):
        for key, array in sorted(state_arrays(policy).items()):
            digest.update(f"{name}/{key}".encode() + array.tobytes())
    return digest.hexdigest()


def trained_digest() -> str:
    """SHA-256 over the objects of a snapshot after two updates; called in a fresh process, too."""
    torch.set_num_threads(1)
    config = config_with()
    learner = new_learner(config)
    train(learner, range(2))
    objects = snapshot_of(learner, config).objects
    return hashlib.sha256(b"".join(key.encode() + data for key, data in sorted(objects.items()))).hexdigest()


def everything(learner: Learner, config: Config) -> dict[str, bytes]:
    """The whole state, as bytes."""
    return snapshot_of(learner, config).objects


@pytest.mark.parametrize(
    "policy", [{}, {"share_encoder": True}, {"normalise_observations": False, "normalise_rewards": False}]
)
def test_training_goes_on_from_a_restored_learner_bit_for_bit(policy: dict[str, Any]) -> None:
    config = config_with(**policy)
    original = new_learner(config)
    train(original, range(3))
    checkpoint = checkpoint_of(snapshot_of(original, config))
    restored = new_learner(config.model_copy(update={"seed": 99}))
    said = restore(restored, checkpoint)
    assert everything(restored, config) == everything(original, config)
    again = new_learner(config)
    restore(again, checkpoint)
    for learner in (original, again, restored):
        train(learner, range(3, 4))
    assert weights_hash(again) == weights_hash(original)
    assert weights_hash(restored) != weights_hash(original), (
        "the shuffle comes from the run's seed: another one differs"
    )
    train(again, range(4, 6))
    train(original, range(4, 6))
    assert everything(again, config) == everything(original, config)
    assert (said.version, said.books.position, said.books.lags) == (3, "1700000000000-3", {0: 5, 1: 2})
    assert Ledger.from_json(said.books.ledger) == Ledger.from_json(books().ledger)


def test_without_the_optimisers_state_training_would_go_another_way() -> None:
    config = config_with()
    original, forgetful = new_learner(config), new_learner(config)
    train(original, range(2))
    restore(forgetful, checkpoint_of(snapshot_of(original, config)))
    forgetful.algorithms["default"].load_state({})
    assert weights_hash(forgetful) == weights_hash(original)
    train(original, range(2, 3))
    train(forgetful, range(2, 3))
    assert weights_hash(forgetful) != weights_hash(original)


def test_counters_episodes_and_their_mean_come_back() -> None:
    config = config_with()
    original, restored = new_learner(config), new_learner(config)
    train(original, range(5))
    original.counters.heatup.env_steps = 77
    restore(restored, checkpoint_of(snapshot_of(original, config)))
    assert restored.counters == original.counters
    assert restored.episodes == original.episodes and restored.episodes.maxlen == 3
    assert restored.mean_return() == 3.0


def test_the_same_state_gives_the_same_bytes_and_the_learner_is_copied() -> None:
    config = config_with()
    learner = new_learner(config)
    train(learner, range(2))
    first, second, late = (snapshot_of(learner, config) for _ in range(3))
    assert first.objects == second.objects
    kept = {key: hashlib.sha256(data).digest() for key, data in first.objects.items()}
    train(learner, range(2, 3))
    assert kept == {key: hashlib.sha256(data).digest() for key, data in first.objects.items()}
    assert snapshot_of(learner, config).objects != first.objects
    assert late.objects == first.objects  # encoded when training had gone on


def test_a_fresh_process_makes_the_same_bytes() -> None:
    code = "from tests.trainer_node.test_snapshot import trained_digest; print(trained_digest())"
    fresh = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=100)
    before = torch.get_num_threads()
    try:
        assert fresh.stdout.strip() == trained_digest()
    finally:
        torch.set_num_threads(before)


def test_the_manifest_says_where_the_checkpoint_comes_from() -> None:
    config = config_with()
    learner = new_learner(config)
    train(learner, range(2))
    snapshot = snapshot_of(learner, config)
    manifest = snapshot.manifest
    assert manifest.name == "3_Step-64.ckpt" and manifest.run_id == "the-run" and manifest.epoch == 2
    assert manifest.parent == "1_Step-32.ckpt" and manifest.log_position == "1700000000000-3"
    assert manifest.objects == describe_objects(snapshot.objects)
    assert set(snapshot.objects) == {POLICY, OPTIMISER, REWARDS, STATE}
    provenance = manifest.provenance
    assert provenance["config_hash"] == config.hash() and provenance["seed"] == config.seed
    assert provenance["log_range"] == ["1600000000000-0", "1700000000000-3"]
    assert provenance["policy_versions"] == [1, 3] and provenance["lag_histogram"] == {"0": 5, "1": 2}
    assert provenance["counters"]["train"] == {"env_steps": 64, "episodes": 2, "updates": 2}
    assert provenance["phase"] == "train" and provenance["mean_return"] == 0.5 and provenance["code_version"]
    assert provenance["ledger"]["worker-1"]["dropped"] == {"stale": {"fragments": 1, "transitions": 32}}


def other_network() -> bytes:
    """A whole policy file, of another size."""
    config = config_with(hidden_sizes=[16])
    return encode_policy(new_learner(config).policies["default"], 3)


DAMAGED: dict[str, dict[str, bytes | None]] = {
    "policy missing": {"policy": None},
    "policy garbage": {"policy": b"garbage"},
    "policy of another size": {"policy": other_network()},
    "optimiser missing": {"optimiser": None},
    "optimiser garbage": {"optimiser": b"\x08" + bytes(20)},
    "rewards missing": {"rewards": None},
    "state missing": {"state": None},
    "state not JSON": {"state": b"{"},
    "state not UTF-8": {"state": b"\xff\xfe"},
    "state empty": {"state": b"{}"},
    "state of another shape": {"state": json.dumps({"version": 3, "counters": {}}).encode()},
    "state a list": {"state": b"[]"},
}


@pytest.mark.parametrize("damage", DAMAGED)
def test_what_cannot_be_restored_is_named_and_the_learner_stays_as_it_was(damage: str) -> None:
    config = config_with()
    original, learner = new_learner(config), new_learner(config)
    train(original, range(2))
    train(learner, range(5, 6))
    before = everything(learner, config)
    with pytest.raises(CheckpointDamaged, match=r"3_Step-64\.ckpt cannot be restored"):
        restore(learner, checkpoint_of(snapshot_of(original, config), **DAMAGED[damage]))
    assert everything(learner, config) == before


def test_a_snapshot_of_several_policies_has_a_folder_for_each() -> None:
    config = config_with()
    description = describe_environment(config)
    two = dataclasses.replace(
        description, policies={"a": description.policies["default"], "b": description.policies["default"]}
    )
    both = config.model_copy(update={"policies": {"a": config.policies["default"], "b": config.policies["default"]}})
    learner = make_learner(both, two)
    taken = take(learner, two, both, "the-run", Progress(0, Phase.TRAIN, 1, None, "0-0", 0, Line()), books())
    assert {"a/policy.safetensors", "b/policy.safetensors"} < set(taken.objects)
    assert taken.objects["a/policy.safetensors"] != taken.objects["b/policy.safetensors"]
