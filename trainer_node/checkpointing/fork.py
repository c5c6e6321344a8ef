"""Continuing from a checkpoint that is not the newest (roll back), or not this run's (fork).

Versions never go back. So the older learner becomes a new checkpoint, newer than all others, at the committed offset; a
trainer that starts then finds it as it finds any other.
"""

import contextlib
from collections.abc import Mapping
from dataclasses import replace

from shared.config.run_config import Config
from shared.datasets.read import read_dataset
from shared.errors import CheckpointDamaged, CheckpointError, ConfigError
from shared.experience import tensor_blob
from shared.experience.log_entry import START
from shared.policies.policy import Policy
from shared.policies.serialization import decode_policy, load_state_arrays, state_arrays
from shared.protocol.ledger import Ledger, read_ledger
from shared.runtime.run_context import RunContext
from shared.storage.checkpoint_store import Checkpoint, checkpoint_version
from trainer_node.checkpointing import snapshot
from trainer_node.checkpointing.snapshot import Lineage, Parent, Progress, Snapshot
from trainer_node.learning.algorithms.off_policy import OffPolicy
from trainer_node.learning.learner import Learner, make_learner
from trainer_node.log_consumer import Committed

_NETWORK = ("hidden_sizes", "activation", "cnn", "share_encoder", "core", "core_size", "normalize_observations")
"""Fields of `policies.<id>` that say what weights there are and what they compute."""


def rolled_back(role: RunContext, checkpoint: Checkpoint, epoch: int) -> Snapshot:
    """The learner of `checkpoint` (of this run) as the newest version, behind everything that is committed."""
    learner = make_learner(role.config, role.description())
    restored, state = snapshot.restore(learner, checkpoint), role.flow.read()
    committed = Committed(state.committed_id, read_ledger(role.redis, role.run_id).as_json(), {})
    newest = max([state.version, *(checkpoint_version(name) or 0 for name in role.checkpoints.names())])
    with contextlib.suppress(CheckpointError):
        stored = snapshot.read_state(role.checkpoints.newest_good()[0])
        if stored.version > state.version:  # Redis is new, or has lost this run's past
            committed = stored.committed
    version = newest + 1 + role.config.rollout.max_policy_lag  # what the abandoned policy acted is out of bounds
    parent = Parent(checkpoint.manifest.name, restored.committed.position, restored.version)
    progress = Progress(version, epoch, parent, Lineage(version, committed.position))
    committed = replace(committed, lags=restored.committed.lags)
    return snapshot.take(learner, role.config, role.run_id, progress, committed)


def forked(role: RunContext, source: Checkpoint) -> Checkpoint:
    """Version 0 of a new run with what another run's checkpoint has learned; its provenance says what that is.

    Policies (weights, observation statistics) are taken, and target networks begin as they are. Of a run of the same
    algorithm so is what it learns beside the policy, and reward statistics; counters and optimizers begin anew.
    Raises `ConfigError` where the policies do not fit.
    """

    def begin(policies: Mapping[str, Policy]) -> None:
        for policy_id, policy in policies.items():
            _take_over(policy_id, policy, source)

    learner = make_learner(role.config, role.description(), begin, read_dataset)
    said = {policy_id: _take_over_rest(policy_id, learner, role.config, source) for policy_id in learner.policies}
    nothing = Committed(START, Ledger().as_json(), {})
    taken = snapshot.take(learner, role.config, role.run_id, Progress(0, epoch=0), nothing).checkpoint
    origin = {
        "run_id": source.manifest.run_id, "checkpoint": source.manifest.name, "created": source.manifest.created,
        "summary": "; ".join(f"{name}: {text}" if len(said) > 1 else text for name, text in said.items()),
    }  # fmt: skip
    provenance = taken.manifest.provenance | {"initialized_from": origin}
    return Checkpoint(taken.manifest.model_copy(update={"provenance": provenance}), taken.objects)


def _take_over(policy_id: str, policy: Policy, source: Checkpoint) -> None:
    name = f"{source.manifest.name} of run {source.manifest.run_id}"
    data = source.objects.get(snapshot.POLICY.format(policy_id))
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
        there, here = (", ".join(f"{field}={config[field]}" for field in other) for config in (its, ours))
        if found.kind != policy.kind:
            why = f"its kind is {found.kind}, and {policy.kind} is learned here; take a run of such an algorithm"
        elif other:
            why = f"{there} there, {here} here; set it as there"
        else:
            why = f"its algorithm asked for {found.network} there, for {policy.network} here; set that as there"
        raise ConfigError(
            f"initialize_from: {policy_id!r} of {name} is another network than policies.{policy_id} asks for: {why}, "
            f"or choose another checkpoint ({error})"
        ) from None


def _take_over_rest(policy_id: str, learner: Learner, config: Config, source: Checkpoint) -> str:
    """What is learned beside the policy, where the same algorithm learned it; returns what is taken and what is not."""
    algorithm, policy = learner.algorithms[policy_id], learner.policies[policy_id]
    taken = ["policy"] if policy.normalizer is None else ["policy", "observation statistics"]
    anew = ["optimizers", "counters"]
    if isinstance(algorithm, OffPolicy):
        anew.append("replay buffer")
        beside, here = list(algorithm.beside_policy), config.algorithm.name
        there = source.manifest.provenance.get("algorithm", "an unknown algorithm")
        try:
            if there != here:
                raise ValueError(f"learned by {there} there, by {here} here")
            algorithm.begin_with(tensor_blob.decode(source.objects[snapshot.ALGORITHM.format(policy_id)])[0])
            taken += beside
        except (KeyError, ValueError) as error:
            anew = [f"{' and '.join(beside)} ({error})", *anew] if beside else anew
    if getattr(config.algorithm, "reward_signals", None) is not None:
        anew.append("reward signals")
    if policy_id in learner.rewards:
        try:
            arrays, _ = tensor_blob.decode(source.objects[snapshot.REWARDS.format(policy_id)])
            learner.rewards[policy_id].begin_with(arrays)
            taken.append("reward statistics")
        except KeyError:
            anew.append("reward statistics")
    return f"taken: {', '.join(taken)}; begins anew: {', '.join(anew)}"
