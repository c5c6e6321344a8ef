"""Going on from a checkpoint that is not the newest, or not this run's: its weights as a version nobody has published.

Versions never go back. So the older learner becomes a new checkpoint, newer than all others, at the position up to
which the books are settled; a trainer that starts then finds it as it finds any other.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from shared import tensor_blob
from shared.checkpoint import Checkpoint, checkpoint_version
from shared.config import Config
from shared.errors import CheckpointDamaged, CheckpointError, ConfigError
from shared.ledger import Ledger, read_ledger
from shared.policies.codec import decode_policy, load_state_arrays, state_arrays
from shared.policies.policy import Policy
from shared.role import Role
from shared.spaces import Columns
from trainer_node import snapshot
from trainer_node.algorithms.off_policy import OffPolicy
from trainer_node.intake import Committed
from trainer_node.learner import Learner, make_learner
from trainer_node.schedule import RunSchedule
from trainer_node.snapshot import Line, Progress, Snapshot

_NETWORK = ("hidden_sizes", "activation", "cnn", "share_encoder", "core", "core_size", "normalise_observations")
"""Fields of `policies.<id>` that say what weights there are and what they compute."""


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
    """Version 0 of a new run with what another run's checkpoint has learnt; its provenance says what that is.

    Policies (weights, observation statistics) are taken, and target networks begin as they are. Of a run of the same
    algorithm so is what it learns beside the policy, and reward statistics; counters and optimizers begin anew.
    Raises `ConfigError` where the policies do not fit.
    """
    description = role.description()

    def begin(policies: Mapping[str, Policy]) -> None:
        for policy_id, policy in policies.items():
            _take_over(policy_id, policy, source)

    learner = make_learner(role.config, description, begin)
    said = {policy_id: _take_over_rest(policy_id, learner, role.config, source) for policy_id in learner.policies}
    phase = RunSchedule(role.config).phase(learner.counters)
    progress = Progress(0, phase, 0, None, "0-0", 0, Line())
    taken = snapshot.take(
        learner, description, role.config, role.run_id, progress, Committed("0-0", Ledger().as_json(), {})
    )
    origin = {
        "run_id": source.manifest.run_id, "checkpoint": source.manifest.name, "created": source.manifest.created,
        "summary": "; ".join(f"{name}: {text}" if len(said) > 1 else text for name, text in said.items()),
    }  # fmt: skip
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
        if found.config.activation != policy.config.activation:
            raise CheckpointDamaged("the same weights would compute something else")
        load_state_arrays(policy, state_arrays(found))
    except CheckpointDamaged as error:
        its, ours = (item.config.model_dump(mode="json") for item in (found, policy))
        other = [field for field in _NETWORK if its[field] != ours[field]]
        if found.kind != policy.kind:
            why = f"its kind is {found.kind}, and {policy.kind} is learned here; take a run of such an algorithm"
        elif other:
            why = f"{_fields(its, other)} there, {_fields(ours, other)} here; set it as there"
        else:
            why = f"its algorithm asked for {found.network} there, for {policy.network} here; set that as there"
        raise ConfigError(
            f"initialize_from: {policy_id!r} of {name} is another network than policies.{policy_id} asks for: {why}, "
            f"or choose another checkpoint ({error})"
        ) from None


def _fields(config: Mapping[str, Any], names: list[str]) -> str:
    return ", ".join(f"{name}={config[name]}" for name in names)


def _take_over_rest(policy_id: str, learner: Learner, config: Config, source: Checkpoint) -> str:
    """What is learnt beside the policy, where the same algorithm learnt it; returns what is taken and what is not."""
    algorithm, policy = learner.algorithms[policy_id], learner.policies[policy_id]
    taken = ["policy"] if policy.normaliser is None else ["policy", "observation statistics"]
    anew = ["optimizers", "counters"]
    if isinstance(algorithm, OffPolicy):
        anew.append("replay buffer")
        beside, here = list(algorithm.beside_policy), config.algorithm.name
        there = source.manifest.provenance.get("algorithm", "an unknown algorithm")
        try:
            if there != here:
                raise ValueError(f"learnt by {there} there, by {here} here")
            algorithm.begin_with(_arrays(source, snapshot.ALGORITHM.format(policy_id)))
            taken += beside
        except (KeyError, ValueError) as error:
            anew = [f"{' and '.join(beside)} ({error})", *anew] if beside else anew
    if getattr(config.algorithm, "reward_signals", None) is not None:
        anew.append("reward signals")
    if policy_id in learner.rewards:
        try:
            learner.rewards[policy_id].begin_with(_arrays(source, snapshot.REWARDS.format(policy_id)))
            taken.append("reward statistics")
        except KeyError:
            anew.append("reward statistics")
    return f"taken: {', '.join(taken)}; begins anew: {', '.join(anew)}"


def _arrays(source: Checkpoint, name: str) -> Columns:
    return tensor_blob.decode(source.objects[name])[0]


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
    return version, Committed(state.settled_id, read_ledger(role.redis, role.run_id).as_json(), {})
