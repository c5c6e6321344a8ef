"""Continuing from a checkpoint that is not the newest (roll back), or not this run's (fork, of policies or whole).

Versions never go back. So the older learner becomes a new checkpoint, newer than all others, at the committed offset; a
trainer that starts then finds it as it finds any other.
"""

import contextlib
import hashlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

from stagecoach.shared.base.errors import CheckpointDamaged, CheckpointError, ConfigError
from stagecoach.shared.config.run_config import Config
from stagecoach.shared.datasets.read import read_dataset
from stagecoach.shared.experience import tensor_blob
from stagecoach.shared.experience.checkpoint_name import checkpoint_version
from stagecoach.shared.experience.log_entry import START
from stagecoach.shared.policies.policy import Policy
from stagecoach.shared.policies.serialization import decode_policy, load_state_arrays, state_arrays
from stagecoach.shared.protocol.ledger import Ledger, read_ledger
from stagecoach.shared.runtime.run_context import RunContext
from stagecoach.shared.storage.checkpoint_store import Checkpoint
from stagecoach.shared.storage.shared_objects import SHARED_OBJECTS
from stagecoach.trainer_node.learning.algorithms.off_policy import OffPolicy
from stagecoach.trainer_node.learning.learner import Learner, make_learner
from stagecoach.trainer_node.state import snapshot
from stagecoach.trainer_node.state.log_consumer import Committed
from stagecoach.trainer_node.state.snapshot import Lineage, Parent, Progress, Snapshot

_NETWORK = (
    "hidden_sizes", "activation", "layer_norm", "cnn", "share_encoder", "core", "core_size", "normalize_observations",
)  # fmt: skip
"""Fields of `policies.<id>` that say what weights there are and what they compute."""
_SCALE = "v_min", "v_max", "prior_scale", "rescaled"
"""Settings of a Q network that change its values without changing a weight."""


def rolled_back(
    role: RunContext, checkpoint: Checkpoint, epoch: int, change: Callable[[Learner], None] = lambda learner: None
) -> Snapshot:
    """Returns the learner of this run's `checkpoint`, after `change`, as the newest version, behind all commits."""
    learner = make_learner(role.config, role.description())
    restored, state = snapshot.restore(learner, checkpoint), role.flow.read()
    change(learner)
    committed = Committed(state.committed_id, read_ledger(role.redis, role.run_id).as_json(), {})
    newest = max([state.version, *(checkpoint_version(name) or 0 for name in role.checkpoints.names())])
    with contextlib.suppress(CheckpointError):
        stored = snapshot.read_state(role.checkpoints.newest_good()[0])
        if stored.version > state.version:  # Redis is new, or has lost this run's past
            committed = stored.committed
    version = newest + 1 + role.config.rollout.max_policy_lag  # what the abandoned policy acted is out of bounds
    parent = Parent(checkpoint.manifest.name, restored.committed.position, restored.version)
    progress = Progress(version, epoch, parent, Lineage(version, committed.position))
    history = f"{restored.committed.histories.get(restored.version, '')} {version} {epoch}"
    named = hashlib.blake2b(history.encode(), digest_size=8).hexdigest()
    committed = replace(committed, lags=restored.committed.lags, histories={version: named})
    there = role.checkpoints.store.keys(SHARED_OBJECTS)  # the abandoned line's, too
    left = [key.removeprefix(SHARED_OBJECTS) for key in there]
    return snapshot.take(learner, role.config, role.run_id, progress, committed, left)


@dataclass(frozen=True)
class Source:
    """Source of a policy's first weights."""

    checkpoint: Checkpoint
    policy_id: str
    """Name of the policy in the source."""

    def __str__(self) -> str:
        return f"{self.checkpoint.manifest.name} of run {self.checkpoint.manifest.run_id}"


def beginnings(config: Config) -> dict[str, str]:
    """Policy id → where its first weights come from, as the config has it; of those that do not begin untrained."""
    if config.fork_from is not None:
        return dict.fromkeys(config.policies, config.fork_from)
    found = {policy_id: policy.initialize_from for policy_id, policy in config.policies.items()}
    told = {policy_id: config.initialize_from if its is None else its for policy_id, its in found.items()}
    return {policy_id: source for policy_id, source in told.items() if source is not None}


def forked(role: RunContext, sources: Mapping[str, Source]) -> Checkpoint:
    """Returns version 0 of a new run with what was learned elsewhere, by policy id: weights, observation statistics,
    and of a run of the same algorithm the other networks and reward statistics. Counters and optimizers are reset.
    Raises `ConfigError` where the policies do not fit."""

    def begin(policies: Mapping[str, Policy]) -> None:
        for policy_id, source in sources.items():
            take_over(policy_id, policies[policy_id], source)

    learner = make_learner(role.config, role.description(), begin, read_dataset)
    said = {name: _take_over_rest(name, learner, role.config, source) for name, source in sources.items()}
    manifests = list({str(source): source.checkpoint.manifest for source in sources.values()}.values())
    if len(manifests) > 1 or any(name != source.policy_id for name, source in sources.items()):
        said = {name: f"{sources[name].policy_id} of {sources[name]}: {text}" for name, text in said.items()}
    origin = {
        "run_id": ", ".join(dict.fromkeys(its.run_id for its in manifests)),
        "checkpoint": ", ".join(dict.fromkeys(its.name for its in manifests)), "created": manifests[0].created,
        "summary": "; ".join(f"{name}: {text}" if len(learner.policies) > 1 else text for name, text in said.items()),
    }  # fmt: skip
    return _first(learner, role, origin)


def forked_whole(role: RunContext, source: Checkpoint) -> Checkpoint:
    """Returns version 0 of a new run whose learner is that of `source`, but for what the config has otherwise. Raises
    `ConfigError` where it does not fit."""
    manifest = source.manifest
    learner = make_learner(role.config, role.description(), read_dataset=read_dataset)
    whose = f"fork_from: {manifest.name} of run {manifest.run_id}"
    if learner.remembered.maxlen or any(fold.objects() for fold in learner.folds):
        raise ConfigError(f"{whose}: its replay buffer or players are in that run alone; use initialize_from")
    try:
        snapshot.restore(learner, source)
    except CheckpointDamaged as error:
        raise ConfigError(
            f"{whose} does not fit this config ({error}); networks, spaces and what is learned are the same in a fork"
        ) from None
    return _first(learner, role, {
        "run_id": manifest.run_id, "checkpoint": manifest.name, "created": manifest.created,
        "learned_sha256": snapshot.learned_sha256(manifest), "summary": "taken: everything",
    })  # fmt: skip


def _first(learner: Learner, role: RunContext, origin: dict[str, Any]) -> Checkpoint:
    """The learner as version 0 of the run, with its origin in the provenance."""
    nothing = Committed(START, Ledger().as_json(), {}, {0: ""})
    taken = snapshot.take(learner, role.config, role.run_id, Progress(0, epoch=0), nothing).checkpoint
    provenance = taken.manifest.provenance | {"initialized_from": origin}
    return Checkpoint(taken.manifest.model_copy(update={"provenance": provenance}), taken.objects)


def policies_in(checkpoint: Checkpoint) -> list[str]:
    return sorted(key.partition("/")[0] for key in checkpoint.objects if key.endswith(snapshot.POLICY.format("")))


def take_over(policy_id: str, policy: Policy, source: Source) -> None:
    """Weights and statistics; raises `ConfigError` where the source has no such policy, or one that does not fit."""
    theirs, objects = source.policy_id, source.checkpoint.objects
    data = objects.get(snapshot.POLICY.format(theirs))
    if data is None:
        there = ", ".join(policies_in(source.checkpoint))
        raise ConfigError(
            f"initialize_from: {source} has no policy {theirs!r}; it has {there}: name one for policies.{policy_id} as "
            f"in initialize_from=RUN#POLICY, or a snapshot of a policy as in RUN#PLAYER"
        )
    found, _ = decode_policy(data)
    if found.spaces != policy.spaces and found.spaces.acting == policy.spaces.acting:
        raise ConfigError(
            f"initialize_from: {theirs!r} of {source} has critic_observes={found.config.critic_observes}, and "
            f"policies.{policy_id} {policy.config.critic_observes}: their critics see different things; set it as there"
        )
    if found.spaces != policy.spaces:
        raise ConfigError(
            f"initialize_from: {theirs!r} of {source} has other observation or action spaces than the agents of "
            f"policies.{policy_id}; choose a policy of such an agent"
        )
    try:
        scales = [{name: each.network.get(name) for name in _SCALE} for each in (found, policy)]
        if found.config.activation != policy.config.activation or scales[0] != scales[1]:
            raise CheckpointDamaged("the same weights would compute something else")
        load_state_arrays(policy, state_arrays(found))
    except CheckpointDamaged as error:
        its, ours = (
            {"kind": each.kind, **each.config.model_dump(mode="json", include={*_NETWORK}), "network": each.network}
            for each in (found, policy)
        )
        other = [field for field in its if its[field] != ours[field]]
        there, here = (", ".join(f"{field}={known[field]}" for field in other) for known in (its, ours))
        raise ConfigError(
            f"initialize_from: {theirs!r} of {source} is another network than policies.{policy_id} asks for: "
            f"{there} there, {here} here; set it as there, or choose another checkpoint ({error})"
        ) from None


def _take_over_rest(policy_id: str, learner: Learner, config: Config, source: Source) -> str:
    """Copies the other networks if the same algorithm learned them; returns a summary of what is taken and reset."""
    policy, section = learner.policies[policy_id], config.algorithm_of(policy_id)
    objects, provenance = source.checkpoint.objects, source.checkpoint.manifest.provenance
    taken = ["policy"] if policy.normalizer is None else ["policy", "observation statistics"]
    anew = ["optimizers", "counters"]
    if (algorithm := learner.algorithms.get(policy_id)) is None:
        return f"taken: {', '.join(taken)}; it does not learn"
    if isinstance(algorithm, OffPolicy):
        anew.append("replay buffer")
        beside, here = list(algorithm.beside_policy), section.name
        there = provenance.get("algorithm", "an unknown algorithm")
        learned = source.policy_id
        if snapshot.POLICY.format(learned) not in source.checkpoint.manifest.objects:
            learned = learned.rpartition("-")[0]  # a snapshot is learned as its policy is
        there = provenance.get("algorithms", {}).get(learned, there)
        try:
            if there != here:
                raise ValueError(f"learned by {there} there, by {here} here")
            if (data := objects.get(snapshot.ALGORITHM.format(source.policy_id))) is None:
                raise ValueError("not there")
            algorithm.begin_with(tensor_blob.decode(data)[0])
            taken += beside
        except (KeyError, ValueError) as error:
            anew = [f"{' and '.join(beside)} ({error})", *anew] if beside else anew
    if section.signals is not None:
        anew.append("reward signals")
    if policy_id in learner.rewards:
        try:
            arrays, _ = tensor_blob.decode(objects[snapshot.REWARDS.format(source.policy_id)])
            learner.rewards[policy_id].begin_with(arrays)
            taken.append("reward statistics")
        except KeyError:
            anew.append("reward statistics")
    return f"taken: {', '.join(taken)}; reset: {', '.join(anew)}"
