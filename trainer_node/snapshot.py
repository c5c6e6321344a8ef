"""A snapshot is everything the trainer is, at one published version, as the objects of a checkpoint.

`<policy id>/policy.safetensors` is what acts; `trainer/…` is what only learning needs. Both directions stand here.
"""

from __future__ import annotations

import functools
import importlib.metadata
import json
import os
import platform
import subprocess
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

from shared import tensor_blob
from shared.checkpoint import Checkpoint, Manifest, checkpoint_name, describe_objects
from shared.child import child_environment
from shared.config import Config, TrainerConfig
from shared.errors import CheckpointDamaged
from shared.experience_log import START, id_order
from shared.fragment import EpisodeRecord
from shared.ledger import Ledger
from shared.policies.codec import decode_policy, encode_policy, load_state_arrays, state_arrays
from shared.policies.policy import Policy
from shared.spaces import Columns, EnvironmentDescription
from shared.steps import Phase, PhaseCounters
from trainer_node.algorithms.algorithm import Algorithm
from trainer_node.algorithms.compiling import compiler_version
from trainer_node.intake import Committed
from trainer_node.learner import Learner

CODE_VERSION = "STAGECOACH_CODE_VERSION"
"""The environment variable that tells code without an installation which version it is."""
_STATE, ALGORITHM, REWARDS, _MEMORY = (
    "trainer/state.json",
    "trainer/{}.algorithm.safetensors",
    "trainer/{}.rewards.safetensors",
    "trainer/memory.safetensors",
)
Encoded = tuple[Manifest, dict[str, bytes]]
"""A checkpoint's manifest and objects."""


class Snapshot:
    """A checkpoint before it is stored.

    What it holds was copied when it was taken. Encoding and hashing come with the first look at `manifest` or
    `objects`, which is the publisher's: so a checkpoint costs the trainer the copies, and nothing where a newer one
    takes its place before the store is ready for it.
    """

    def __init__(self, name: str, version: int, log_position: str, make: Callable[[], Encoded]) -> None:
        self.name, self.version, self.log_position = name, version, log_position
        self._make: Callable[[], Encoded] | None = make
        self._encoded: Encoded | None = None
        self._lock = threading.Lock()

    @classmethod
    def of(cls, manifest: Manifest, objects: dict[str, bytes]) -> Snapshot:
        """One that is encoded already."""
        return cls(manifest.name, manifest.version, manifest.log_position, lambda: (manifest, objects))

    @property
    def manifest(self) -> Manifest:
        """With the hashes of the objects."""
        return self._whole()[0]

    @property
    def objects(self) -> dict[str, bytes]:
        """By name, as they are stored."""
        return self._whole()[1]

    def _whole(self) -> Encoded:
        with self._lock:  # trainer and publisher may ask at once
            if self._encoded is None:
                assert self._make is not None
                self._encoded, self._make = self._make(), None  # the copies are not needed any more
            return self._encoded


@dataclass(frozen=True)
class Line:
    """Where the straight line began that ends here: since then nothing but the log was learnt from, without a gap.

    A run begins one at version 0. Going on from an older checkpoint begins another, and so does a Redis that lost what
    was already learnt. Along a line, and only there, a replay arrives at the same weights.
    """

    version: int = 0
    position: str = START


@dataclass(frozen=True)
class Progress:
    """Where the trainer stands."""

    version: int
    phase: Phase
    epoch: int
    parent: str | None
    first_log_id: str
    first_version: int
    """Log position and version of the parent: the range that this checkpoint adds."""
    line: Line


def take(
    learner: Learner,
    description: EnvironmentDescription,
    config: Config,
    run_id: str,
    progress: Progress,
    books: Committed,
) -> Snapshot:
    """The snapshot of the learner at `progress`; copies everything, so that training may go on."""
    copies = _copied(learner, computed_with(learner, config.trainer))
    name, created = checkpoint_name(progress.version, copies.counters["train"]["env_steps"]), round(time.time(), 3)

    def encode() -> Encoded:
        state = _state(copies, config.seed, progress, books)
        objects = _encoded(copies, progress.version)
        objects[_STATE] = json.dumps(state, sort_keys=True, separators=(",", ":")).encode()
        manifest = Manifest(
            run_id=run_id, name=name, version=progress.version, epoch=progress.epoch, created=created,
            log_position=books.position, parent=progress.parent, objects=describe_objects(objects),
            provenance=_provenance(copies, config, progress, books, state),
        )  # fmt: skip
        return manifest, objects

    return Snapshot(name, progress.version, books.position, encode)


@dataclass(frozen=True)
class _Copies:
    """What a learner was at one moment."""

    policies: dict[str, Policy]
    """For what never changes of them: kind, spaces, config and network."""
    weights: dict[str, Columns]
    algorithms: dict[str, Columns]
    rewards: dict[str, Columns]
    remembered: list[str] | None
    """None where there is no replay memory."""
    counters: dict[str, dict[str, int]]
    episodes: list[EpisodeRecord]
    mean_return: float | None
    computed_with: dict[str, str]


def _copied(learner: Learner, computed: dict[str, str]) -> _Copies:
    """The part that training waits for."""
    return _Copies(
        policies=dict(learner.policies),
        weights={policy_id: state_arrays(policy) for policy_id, policy in learner.policies.items()},
        algorithms={policy_id: _state_of(algorithm) for policy_id, algorithm in learner.algorithms.items()},
        rewards={policy_id: rewards.state() for policy_id, rewards in learner.rewards.items()},
        remembered=list(learner.remembered) if learner.remembered.maxlen else None,
        counters=learner.counters.as_dict(),
        episodes=list(learner.episodes),
        mean_return=learner.mean_return(),
        computed_with=computed,
    )


def _state_of(algorithm: Algorithm) -> Columns:
    """Those that come with Stagecoach answer copies; a user's own may answer the arrays that it goes on learning in."""
    state = algorithm.state()
    if type(algorithm).__module__.partition(".")[0] == __package__:
        return state
    return {name: np.array(array) for name, array in state.items()}


def _encoded(copies: _Copies, version: int) -> dict[str, bytes]:
    """All objects but `trainer/state.json`."""
    objects: dict[str, bytes] = {}
    for policy_id, policy in copies.policies.items():
        objects[f"{policy_id}/policy.safetensors"] = encode_policy(policy, version, copies.weights[policy_id])
        objects[ALGORITHM.format(policy_id)] = tensor_blob.encode(copies.algorithms[policy_id], {})
        if policy_id in copies.rewards:
            objects[REWARDS.format(policy_id)] = tensor_blob.encode(copies.rewards[policy_id], {})
    if copies.remembered is not None:
        positions = np.array([id_order(position) for position in copies.remembered], np.int64).reshape(-1, 2)
        objects[_MEMORY] = tensor_blob.encode({"positions": positions}, {})
    return objects


def _state(copies: _Copies, seed: int, progress: Progress, books: Committed) -> dict[str, Any]:
    return {
        "version": progress.version,
        "counters": copies.counters,
        "episodes": [record.as_dict() for record in copies.episodes],
        "ledger": json.loads(books.ledger),
        "lags": {str(lag): count for lag, count in sorted(books.lags.items())},
        "log_position": books.position,
        "line": asdict(progress.line),
        "seed": seed,
    }


def _provenance(
    copies: _Copies, config: Config, progress: Progress, books: Committed, state: dict[str, Any]
) -> dict[str, Any]:
    return {
        "code_version": code_version(),
        "computed_with": copies.computed_with,
        "algorithm": config.algorithm.name,
        "config_hash": config.hash(),
        "seed": config.seed,
        "phase": progress.phase.value,
        "counters": copies.counters,
        "log_range": [progress.first_log_id, books.position],
        "policy_versions": [progress.first_version, progress.version],
        "lag_histogram": state["lags"],
        "ledger": state["ledger"],
        "mean_return": copies.mean_return,
        "memory_from": copies.remembered[0] if copies.remembered else None,
    }


def computed_with(learner: Learner, config: TrainerConfig) -> dict[str, str]:
    """What the bits of sums depend on, beside the log."""
    devices = {parameter.device.type for policy in learner.policies.values() for parameter in policy.parameters()}
    found = _libraries() | {
        "device": ", ".join(sorted(devices)), "threads": str(torch.get_num_threads()), "ranks": str(config.ranks),
    }  # fmt: skip
    if config.compile:
        found["compiled"] = f"{compiler_version()} for {torch.backends.cpu.get_cpu_capability()}"
    return found


def _libraries() -> dict[str, str]:
    return {"torch": torch.__version__, "numpy": np.__version__, "python": platform.python_version()}


def written_with(manifest: Manifest) -> dict[str, str]:
    """What a checkpoint's bits follow from, beside the log: code, libraries, device, threads and so on."""
    return {"code": manifest.provenance.get("code_version", ""), **manifest.provenance.get("computed_with", {})}


def unlike(manifest: Manifest, now: Mapping[str, str]) -> list[str]:
    """What was another when a checkpoint was written than it is `now`, in words."""
    then = written_with(manifest)
    return [f"{name} {then.get(name)} then, {value} now" for name, value in now.items() if then.get(name) != value]


def other_versions(manifest: Manifest) -> str:
    """One line where other code or libraries than those here wrote a checkpoint, and what that means; else nothing."""
    found = unlike(manifest, {"code": code_version()} | _libraries())
    return (
        f"{manifest.name} was written by other versions ({'; '.join(found)}): what follows is not promised to be "
        f"bit-equal to what they would have come to, nor to a replay"
    ) if found else ""  # fmt: skip


@functools.cache
def code_version() -> str:
    """The installed version; in a git checkout with its commit, and `dirty` where changed: `0.1.0+3b58d32`.

    Code that travelled to a cluster is told what it is (`CODE_VERSION`).
    """
    if told := os.environ.get(CODE_VERSION):
        return told
    version, source = importlib.metadata.version("stagecoach"), Path(__file__).parent.parent
    if not (source / ".git").exists():
        return version
    command = ["git", "-C", str(source), "describe", "--always", "--dirty", "--abbrev=12", "--exclude=*"]
    try:
        found = subprocess.run(command, capture_output=True, text=True, timeout=10, check=True, env=child_environment())
    except (OSError, subprocess.SubprocessError):
        return version
    return f"{version}+{found.stdout.strip()}"


@dataclass(frozen=True)
class Restored:
    """What a checkpoint says besides the weights."""

    version: int
    line: Line
    books: Committed


def read_state(checkpoint: Checkpoint) -> Restored:
    """Version, line and books of a checkpoint; raises `CheckpointDamaged`."""
    with _named(checkpoint):
        return _said(json.loads(checkpoint.objects[_STATE]))


def _said(state: dict[str, Any]) -> Restored:
    ledger = Ledger.from_json(json.dumps(state["ledger"])).as_json()
    lags = {int(lag): int(count) for lag, count in state["lags"].items()}
    books = Committed(str(state["log_position"]), ledger, lags)
    return Restored(int(state["version"]), Line(**state["line"]), books)


def restore(learner: Learner, checkpoint: Checkpoint) -> Restored:
    """Puts the checkpoint's state into the learner; raises `CheckpointDamaged` where it does not fit.

    Everything is decoded before anything is changed. What replay memories held is not in a checkpoint: who goes on
    learning fills them as well (`trainer_node/recollection.py: restore_whole`).
    """
    objects = checkpoint.objects
    with _named(checkpoint):
        state: dict[str, Any] = json.loads(objects[_STATE])
        restored = _said(state)
        weights = {
            name: _decode_fitting(objects[f"{name}/policy.safetensors"], learner.policies[name])
            for name in learner.policies
        }
        algorithms = {name: tensor_blob.decode(objects[ALGORITHM.format(name)])[0] for name in learner.policies}
        rewards = {name: tensor_blob.decode(objects[REWARDS.format(name)])[0] for name in learner.rewards}
        counters = PhaseCounters.from_dict(state["counters"])
        episodes = [EpisodeRecord(**record) for record in state["episodes"]]
        remembered = _positions(objects[_MEMORY]) if learner.remembered.maxlen else []
    for name, policy in learner.policies.items():
        load_state_arrays(policy, weights[name])
        learner.algorithms[name].load_state(algorithms[name])
        if name in rewards:
            learner.rewards[name].load_state(rewards[name])
    learner.counters = counters
    learner.episodes.clear()
    learner.episodes.extend(episodes)
    learner.remembered.clear()
    learner.remembered.extend(remembered)
    return restored


def _positions(blob: bytes) -> list[str]:
    return [f"{milliseconds}-{seq}" for milliseconds, seq in tensor_blob.decode(blob)[0]["positions"].tolist()]


@contextmanager
def _named(checkpoint: Checkpoint) -> Iterator[None]:
    """Whatever the contents of a checkpoint make fail is a damage of that checkpoint."""
    try:
        yield
    except (KeyError, TypeError, ValueError, AttributeError, CheckpointDamaged, tensor_blob.BlobError) as error:
        raise CheckpointDamaged(
            f"{checkpoint.manifest.name} cannot be restored: {type(error).__name__}: {error}"
        ) from None


def _decode_fitting(blob: bytes, policy: Policy) -> Columns:
    found, _ = decode_policy(blob)
    if (found.kind, found.spaces, found.config, found.network) != (
        policy.kind, policy.spaces, policy.config, policy.network
    ):  # fmt: skip
        raise CheckpointDamaged("its policy has other spaces or another network than this run's config")
    return state_arrays(found)
