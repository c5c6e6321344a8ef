"""A snapshot is everything the trainer is, at one published version, as the objects of a checkpoint.

`<policy id>/policy.safetensors` is what acts; `trainer/…` is what only learning needs. Both directions stand here.
"""

import hashlib
import json
import platform
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass

import numpy as np
import torch
from pydantic import TypeAdapter

from stagecoach.shared.base import world
from stagecoach.shared.base.code_version import code_version, compiler_version
from stagecoach.shared.base.errors import CheckpointDamaged, FragmentError
from stagecoach.shared.config.run_config import Config
from stagecoach.shared.config.sections import TrainerConfig
from stagecoach.shared.experience import tensor_blob
from stagecoach.shared.experience.checkpoint_name import checkpoint_name
from stagecoach.shared.experience.counters import Counters, Phase, PhaseCounters
from stagecoach.shared.experience.fragment import EpisodeRecord
from stagecoach.shared.experience.log_entry import START, id_order
from stagecoach.shared.experience.spaces import Columns
from stagecoach.shared.policies.policy import Policy
from stagecoach.shared.policies.serialization import decode_policy, encode_policy, load_state_arrays, state_arrays
from stagecoach.shared.protocol.ledger import Ledger
from stagecoach.shared.storage.checkpoint_store import Checkpoint, Manifest, describe_objects
from stagecoach.trainer_node.learning import fold
from stagecoach.trainer_node.learning.building_blocks.compilation import compiler
from stagecoach.trainer_node.learning.learner import Learner
from stagecoach.trainer_node.state.log_consumer import Committed

STATE, _REPLAY_BUFFER = "trainer/state.json", "trainer/memory.safetensors"
POLICY, ALGORITHM = "{}/policy.safetensors", "trainer/{}.algorithm.safetensors"
REWARDS = "trainer/{}.rewards.safetensors"
_EPISODES = TypeAdapter(list[EpisodeRecord])
INITIAL = "trainer/{}.initial.safetensors"
FOLD = "trainer/{}.json"


def phase_at(config: Config, counters: PhaseCounters) -> Phase:
    """HEATUP until its duration has passed, then TRAIN."""
    duration = config.heatup.duration
    return Phase.TRAIN if duration.amount == 0 or duration.reached(counters.heatup) else Phase.HEATUP


class Snapshot:
    """Checkpoint before it is stored. What it holds was copied when it was taken; the checkpoint writer encodes and
    hashes it at the first look at `checkpoint`, unless a newer one takes its place before."""

    def __init__(self, name: str, version: int, log_position: str, encode: Callable[[], Checkpoint]) -> None:
        self.name, self.version, self.log_position = name, version, log_position
        self._encode: Callable[[], Checkpoint] | None = encode
        self._lock = world.Lock()

    @property
    def checkpoint(self) -> Checkpoint:
        """Manifest, with the hashes of the objects, and objects by name, as they are stored."""
        with self._lock:  # trainer and checkpoint writer may ask at once
            if self._encode is not None:
                self._checkpoint, self._encode = self._encode(), None  # the copies are not needed any more
            return self._checkpoint


@dataclass(frozen=True)
class Lineage:
    """Start of the lineage of a version: since then nothing but the log was learned from, so that a replay arrives at
    the same weights. Rolling back begins another, and so does a Redis that lost what was learned."""

    version: int = 0
    position: str = START


@dataclass(frozen=True)
class Parent:
    """The checkpoint that a state was trained from; its position and version begin the range that the next one adds."""

    name: str | None = None
    position: str = START
    version: int = 0


@dataclass(frozen=True)
class Progress:
    version: int
    epoch: int
    parent: Parent = Parent()
    lineage: Lineage = Lineage()


def take(
    learner: Learner, config: Config, run_id: str, progress: Progress, committed: Committed,
    left: Collection[str] = (),
) -> Snapshot:  # fmt: skip
    """Copies the learner at `progress`, so that training may continue. `left` are shared objects that its folds do not
    name any more and no durable checkpoint lists: they are removed along with it."""
    version, counters = progress.version, learner.counters.as_dict()
    phase = phase_at(config, learner.counters)
    policies = {id_: (policy, state_arrays(policy)) for id_, policy in learner.policies.items()}
    states = {ALGORITHM.format(id_): algorithm.state() for id_, algorithm in learner.algorithms.items()}
    # a user's own algorithm may return the arrays in which it keeps learning
    arrays = {key: {name: np.array(array) for name, array in state.items()} for key, state in states.items()}
    arrays |= {REWARDS.format(id_): rewards.state() for id_, rewards in learner.rewards.items()}
    remembered = list(learner.remembered) if learner.remembered.maxlen else None
    episodes, mean_return = list(learner.episodes), learner.mean_return()
    arrays |= {INITIAL.format(id_): initial for id_, initial in learner.initial.items()}
    folds = {FOLD.format(its.name): fold.encode(its) for its in learner.folds}
    told = {"folds": learner.tables(), "fold_metrics": fold.all_metrics(learner.folds)}
    shared_objects = sorted({*left, *(sha256 for its in learner.folds for sha256 in its.objects())})
    tallies = {id_: dict(vars(tally)) for id_, tally in learner.tallies.items()}
    computed = computed_with(learner, config.trainer)
    name, created = checkpoint_name(version, counters["train"]["env_steps"]), round(world.unix_time(), 3)

    def encode() -> Checkpoint:
        """Uses the copies alone, and of a policy what never changes: kind, spaces, config and network."""
        if remembered is not None:
            positions = np.array([id_order(position) for position in remembered], np.int64).reshape(-1, 2)
            arrays[_REPLAY_BUFFER] = {"positions": positions}
        objects = {POLICY.format(id_): encode_policy(policy, version, own) for id_, (policy, own) in policies.items()}
        objects |= {key: tensor_blob.encode(columns, {}) for key, columns in arrays.items()} | folds
        ledger = json.loads(committed.ledger)
        lags = {str(lag): count for lag, count in sorted(committed.lags.items())}
        histories = {str(known): name for known, name in sorted(committed.histories.items())}
        state = {
            "version": version, "counters": counters, "episodes": [record.plain() for record in episodes],
            "ledger": ledger, "lags": lags, "log_position": committed.position, "line": asdict(progress.lineage),
            "seed": config.seed, "histories": histories, **({"tallies": tallies} if tallies else {}),
        }  # fmt: skip
        objects[STATE] = json.dumps(state, sort_keys=True, separators=(",", ":")).encode()
        provenance = {
            "code_version": code_version(), "computed_with": computed, "algorithm": config.algorithm.name,
            "algorithms": {id_: its.algorithm.name for id_, its in config.policies.items() if its.algorithm},
            "config_hash": config.hash(), "seed": config.seed, "phase": phase.value, "counters": counters,
            "log_range": [progress.parent.position, committed.position],
            "policy_versions": [progress.parent.version, version], "lineage": progress.lineage.version,
            "lag_histogram": lags, "ledger": ledger,
            "history": committed.histories.get(version, ""), "mean_return": mean_return,
            "replay_from": remembered[0] if remembered else None, **told, "shared_objects": shared_objects,
            "log_marks": committed.marks,
        }  # fmt: skip
        manifest = Manifest(
            run_id=run_id, name=name, version=version, epoch=progress.epoch, created=created,
            log_position=committed.position, parent=progress.parent.name, objects=describe_objects(objects),
            provenance=provenance,
        )  # fmt: skip
        return Checkpoint(manifest, objects)

    return Snapshot(name, version, committed.position, encode)


def computed_with(learner: Learner, config: TrainerConfig) -> dict[str, str]:
    devices = {parameter.device.type for policy in learner.policies.values() for parameter in policy.parameters()}
    found = libraries() | {"device": ", ".join(sorted(devices))}
    found |= {"threads": str(torch.get_num_threads()), "ranks": str(config.ranks)}
    if config.compile:
        found["compiled"] = f"{compiler_version(compiler())} for {torch.backends.cpu.get_cpu_capability()}"
    return found


def libraries() -> dict[str, str]:
    """Returns the versions that are installed here of what decides a checkpoint's bits."""
    return {"torch": torch.__version__, "numpy": np.__version__, "python": platform.python_version()}


def written_with(manifest: Manifest) -> dict[str, str]:
    """Returns what a checkpoint's bits depend on besides the log: code, libraries, device, threads and so on."""
    return {"code": manifest.provenance.get("code_version", ""), **manifest.provenance.get("computed_with", {})}


def unlike(manifest: Manifest, now: Mapping[str, str]) -> list[str]:
    """Returns what differed from `now` when a checkpoint was written, in words."""
    then = written_with(manifest)
    return [f"{name} {then.get(name)} then, {value} now" for name, value in now.items() if then.get(name) != value]


def other_versions(manifest: Manifest) -> str:
    """One line where other code or libraries than those here wrote a checkpoint, and what that means; else nothing."""
    found = "; ".join(unlike(manifest, {"code": code_version()} | libraries()))
    promise = (
        "training from here on may differ bit by bit from what those versions would have learned, and from a replay"
    )
    return f"{manifest.name} was written by other versions ({found}): {promise}" if found else ""


@dataclass(frozen=True)
class Restored:
    version: int
    lineage: Lineage
    committed: Committed


def learned_sha256(manifest: Manifest) -> str:
    """Hash of what was learned: of all objects but the state, which has log positions, so times."""
    learned = {name: item.sha256 for name, item in manifest.objects.items() if name != STATE}
    return hashlib.sha256(json.dumps(learned, sort_keys=True).encode()).hexdigest()


def read_state(checkpoint: Checkpoint) -> Restored:
    """Version, lineage, offset and accounting of a checkpoint; raises `CheckpointDamaged`."""
    provenance = checkpoint.manifest.provenance
    with _named(checkpoint):
        state = json.loads(checkpoint.objects[STATE])
        ledger = Ledger.from_json(json.dumps(state["ledger"])).as_json()
        lags = {int(lag): int(count) for lag, count in state["lags"].items()}
        histories = {int(version): str(name) for version, name in state["histories"].items()}
        marks = tuple((str(position), str(digest)) for position, digest in provenance.get("log_marks", ()))
        committed = Committed(str(state["log_position"]), ledger, lags, histories, marks)
        return Restored(int(state["version"]), Lineage(**state["line"]), committed)


def restore(learner: Learner, checkpoint: Checkpoint) -> Restored:
    """Puts the checkpoint's state into the learner, once all of it is decoded; raises `CheckpointDamaged` where it does
    not fit. `restore_learner` (recovery/recovery.py) fills replay buffers as well."""
    objects, restored = checkpoint.objects, read_state(checkpoint)
    with _named(checkpoint):
        state = json.loads(objects[STATE])
        weights = {id_: _fitting(objects[POLICY.format(id_)], policy) for id_, policy in learner.policies.items()}
        algorithms = {id_: tensor_blob.decode(objects[ALGORITHM.format(id_)])[0] for id_ in learner.algorithms}
        rewards = {id_: tensor_blob.decode(objects[REWARDS.format(id_)])[0] for id_ in learner.rewards}
        counters = PhaseCounters.from_dict(state["counters"])
        tallies = {id_: Counters(**state.get("tallies", {}).get(id_, {})) for id_ in learner.tallies}
        episodes = _EPISODES.validate_python(state["episodes"])
        stored = tensor_blob.decode(objects[_REPLAY_BUFFER])[0] if learner.remembered.maxlen else {}
        initial = {id_: tensor_blob.decode(objects[INITIAL.format(id_)])[0] for id_ in learner.initial}
        remembered = [f"{milliseconds}-{seq}" for milliseconds, seq in stored["positions"]] if stored else []
        for its in learner.folds:
            its.load_state(json.loads(objects[FOLD.format(its.name)]))
    learner.initial = initial
    for name, policy in learner.policies.items():
        load_state_arrays(policy, weights[name])
        if name in algorithms:
            learner.algorithms[name].load_state(algorithms[name])
        if name in rewards:
            learner.rewards[name].load_state(rewards[name])
    learner.counters, learner.tallies = counters, tallies
    learner.episodes.clear()
    learner.episodes.extend(episodes)
    learner.remembered.clear()
    learner.remembered.extend(remembered)
    return restored


@contextmanager
def _named(checkpoint: Checkpoint) -> Iterator[None]:
    """Raises `CheckpointDamaged` for any failure caused by a checkpoint's contents."""
    try:
        yield
    except (KeyError, TypeError, ValueError, AttributeError, CheckpointDamaged, FragmentError) as error:
        what = f"{type(error).__name__}: {error}"
        raise CheckpointDamaged(f"{checkpoint.manifest.name} cannot be restored: {what}") from None


def _fitting(blob: bytes, policy: Policy) -> Columns:
    found, _ = decode_policy(blob)
    if (found.kind, found.spaces, found.config, found.network) != (
        policy.kind, policy.spaces, policy.config, policy.network
    ):  # fmt: skip
        raise CheckpointDamaged("its policy has other spaces or another network than this run's config")
    return state_arrays(found)
