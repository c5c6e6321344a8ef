"""Going on from a checkpoint that is not the newest, or not this run's: its weights as a version nobody has published.

Versions never go back. So the older learner becomes a new checkpoint, newer than all others, at the position up to
which the books are settled; a trainer that starts then finds it as it finds any other.
"""

from __future__ import annotations

from typing import Any

from shared.checkpoint import Checkpoint, checkpoint_version
from shared.errors import CheckpointDamaged, CheckpointError, ConfigError
from shared.ledger import Ledger
from shared.policies.codec import decode_policy, load_state_arrays, state_arrays
from shared.policies.policy import Policy
from shared.redis_keys import RunKeys
from shared.role import Role
from trainer_node import snapshot
from trainer_node.intake import Committed
from trainer_node.learner import make_learner
from trainer_node.schedule import RunSchedule
from trainer_node.snapshot import Line, Progress, Snapshot


def rebased(role: Role, checkpoint: Checkpoint, epoch: int = 0) -> Snapshot:
    """The learner of `checkpoint` (of this run) as the newest version, behind everything that is settled."""
    description = role.description()
    learner = make_learner(role.config, description)
    restored = snapshot.restore(learner, checkpoint)
    newest, books = _newest(role)
    version = newest + 1 + role.config.rollout.max_policy_lag  # what the abandoned policy acted is out of bounds
    progress = Progress(
        version, RunSchedule(role.config).phase(learner.counters), epoch, checkpoint.manifest.name,
        restored.books.position, restored.version, Line(version, books.position),
    )  # fmt: skip
    books = Committed(books.position, books.ledger, restored.books.lags)
    return snapshot.take(learner, description, role.config, role.run_id, progress, books)


def initialised(role: Role, source: Checkpoint) -> Snapshot:
    """Version 0 of a new run with the policies (weights, observation statistics) of another run's checkpoint.

    Counters, optimiser and reward scaling begin anew. Raises `ConfigError` where the policies do not fit.
    """
    description = role.description()
    learner = make_learner(role.config, description)
    for policy_id, policy in learner.policies.items():
        _take_over(policy_id, policy, source)
    phase = RunSchedule(role.config).phase(learner.counters)
    progress = Progress(0, phase, 0, None, "0-0", 0, Line())
    taken = snapshot.take(
        learner, description, role.config, role.run_id, progress, Committed("0-0", Ledger().as_json(), {})
    )
    origin = {"run_id": source.manifest.run_id, "checkpoint": source.manifest.name, "created": source.manifest.created}
    provenance = taken.manifest.provenance | {"initialized_from": origin}
    return Snapshot.of(taken.manifest.model_copy(update={"provenance": provenance}), taken.objects)


def _take_over(policy_id: str, policy: Policy, source: Checkpoint) -> None:
    name = f"{source.manifest.name} of run {source.manifest.run_id}"
    data = source.objects.get(f"{policy_id}/policy.safetensors")
    if data is None:
        there = ", ".join(sorted(key.partition("/")[0] for key in source.objects if key.endswith("policy.safetensors")))
        raise ConfigError(f"initialize_from: {name} has no policy {policy_id!r}; it has {there}")
    found, _ = decode_policy(data)
    if found.spaces != policy.spaces:
        raise ConfigError(f"initialize_from: {policy_id!r} of {name} has other observation or action spaces")
    try:
        load_state_arrays(policy, state_arrays(found))
    except CheckpointDamaged as error:
        raise ConfigError(
            f"initialize_from: {policy_id!r} of {name} is another network than policies.{policy_id} asks for: {error}"
        ) from None


def _newest(role: Role) -> tuple[int, Committed]:
    """The newest version that Redis or the store has heard of, and the newest books."""
    state, names = role.flow.read(), role.checkpoints.names()
    version = max([state.version, *(checkpoint_version(name) or 0 for name in names)])
    try:
        newest, _ = role.checkpoints.newest_good()
        stored = snapshot.read_state(newest)
    except CheckpointError:
        stored = None
    if stored is not None and stored.version > state.version:  # Redis is new, or has lost this run's past
        return version, stored.books
    text: Any = role.redis.get(RunKeys(role.run_id).ledger)
    return version, Committed(state.settled_id, Ledger.from_json((text or b"").decode()).as_json(), {})
