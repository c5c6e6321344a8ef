"""Policies that a worker acts with: fetched from the policy board, at first from the newest checkpoint."""

import logging
from collections.abc import Callable
from dataclasses import fields
from typing import Any

from stagecoach.rollout_worker.exploration import base, discrete, noise
from stagecoach.rollout_worker.exploration.base import Exploration
from stagecoach.rollout_worker.exploration.own import make_own_exploration
from stagecoach.shared.base.errors import CheckpointError
from stagecoach.shared.config.algorithms.exploration import ExplorationConfig, OwnExploration
from stagecoach.shared.config.run_config import Config
from stagecoach.shared.config.schema.section import Schedule
from stagecoach.shared.experience.counters import Counters, Phase
from stagecoach.shared.experience.spaces import EnvironmentDescription
from stagecoach.shared.policies.registry import build_policies, torch_device
from stagecoach.shared.policies.serialization import load_state_arrays
from stagecoach.shared.protocol.flow_control import Claim
from stagecoach.shared.protocol.heartbeat import Heartbeat, poll
from stagecoach.shared.protocol.policy_board import PolicyBoard, PolicyVersion, version_of
from stagecoach.shared.storage.checkpoint_store import READY, CheckpointStore

_LOGGER = logging.getLogger("stagecoach.worker")
_EXPLORATIONS: dict[str, Callable[..., Exploration]] = {
    "sampling": base.Sampling,
    "epsilon_greedy": discrete.EpsilonGreedy,
    "boltzmann": discrete.Boltzmann,
    "ucb": discrete.UpperConfidenceBound,
    "bootstrapped": discrete.OneHead,
    "gaussian": noise.GaussianNoise,
    "truncated_gaussian": noise.TruncatedGaussianNoise,
    "ou": noise.OrnsteinUhlenbeckNoise,
    "parameter_noise": noise.ParameterNoise,
}
"""`exploration.kind` → class, which takes the section's other fields, with current values for schedules."""
_AT_THE_END = Counters(*[1 << 62] * len(fields(Counters)))


def make_exploration(config: ExplorationConfig, counters: Counters) -> Exploration:
    """Makes an algorithm's exploration at these counters of the trainer; raises `ConfigError` for a user's class."""
    if isinstance(config, OwnExploration):
        now = {name: schedule.value(counters) for name, schedule in config.schedules.items()}
        return make_own_exploration(config, now)
    now = current_fields(config, counters)
    del now["kind"]
    return _EXPLORATIONS[config.kind](**now)


def current_fields(config: ExplorationConfig, counters: Counters) -> dict[str, Any]:
    """Returns the section's fields, with current values for schedules."""
    return {name: value.value(counters) if isinstance(value, Schedule) else value for name, value in config}


class ActingPolicies:
    """Weights, normalizer and counters of one policy version; they change together."""

    def __init__(
        self, config: Config, description: EnvironmentDescription, board: PolicyBoard, checkpoints: CheckpointStore,
        heartbeat: Heartbeat, epoch: int, shutdown_requested: Callable[[], bool],
    ) -> None:  # fmt: skip
        """Waits for the newest checkpoint; `epoch` is the trainer's. Raises `KeyboardInterrupt` before a shutdown."""
        self._board, self._checkpoints, self._heartbeat, self._epoch = board, checkpoints, heartbeat, epoch
        self._deadline, self._outage_seconds = config.rollout.wait_deadline_seconds, config.store.retry_seconds
        self._config, device = config, torch_device(config.rollout.device)
        policies = build_policies(description.policies, config.policies, config.algorithm, 0, description.slots)
        self._explorations = {policy_id: its.acting for policy_id, its in config.algorithms().items()}
        self.policies = {policy_id: policy.to(device) for policy_id, policy in policies.items()}
        with heartbeat.waiting("the first checkpoint (.ready)", self._deadline) as wait:
            if shutdown_requested():
                raise KeyboardInterrupt
            poll(wait, lambda: heartbeat.outlast(self._load_newest_checkpoint, self._outage_seconds))

    @property
    def version(self) -> int:
        return self.header.version

    @property
    def phase(self) -> Phase:
        """Phase of the trainer when it published this version."""
        return self.header.phase

    def update(self, claim: Claim) -> None:
        """Loads the claim's version or a later one of the same trainer. A new trainer's first version is always
        fetched, since it may reuse version numbers that were in no checkpoint."""
        same = self.version > claim.version or (self.version, self.header.history) == (claim.version, claim.history)
        if same and self._epoch == claim.epoch:
            return
        with self._heartbeat.waiting("the policy board", self._deadline) as wait:
            poll(wait, lambda: self._heartbeat.outlast(lambda: self.fetch(claim.version), self._outage_seconds))
        self._epoch = claim.epoch

    def fetch(self, at_least: int) -> bool:
        """Loads the newest version on the board; returns False if it is older, or was replaced meanwhile."""
        try:
            version = self._board.fetch(self._checkpoints)
        except CheckpointError:
            return False
        return version is not None and version.header.version >= at_least and self._load(version)

    def _load_newest_checkpoint(self) -> bool:
        """Loads the newest checkpoint; returns False until `.ready` exists."""
        try:
            ready = self._checkpoints.marker(READY) is not None
            try:
                checkpoint = self._checkpoints.load_latest(only="policy.safetensors") if ready else None
            except CheckpointError:  # a late pointer may name one that is gone, until the next one, which waits for us
                checkpoint = self._checkpoints.newest_good()[0]
        except CheckpointError as error:
            _LOGGER.warning("cannot start from the newest checkpoint (%s); trying again", error)
            return False
        return checkpoint is not None and self._load(version_of(checkpoint))

    def _load(self, version: PolicyVersion) -> bool:
        self.header = version.header
        for policy_id, state in version.states.items():
            load_state_arrays(self.policies[policy_id], state)
        return True

    def exploration_fields(self, policy_id: str) -> dict[str, Any]:
        """Returns `kind` and current numbers of a policy's exploration, for those who act elsewhere."""
        if self.phase is Phase.HEATUP and self._config.heatup.acting == "random":
            return {"kind": "random"}
        trainable = self._config.policies[policy_id].trainable
        return current_fields(self._explorations[policy_id], self.header.counters.train if trainable else _AT_THE_END)

    def exploration(self) -> dict[str, Exploration]:
        """Returns each policy's exploration: random in warm-up (unless `heatup.acting` differs), else its algorithm's
        at the current counters. A policy that does not learn explores as at the end of all schedules."""
        found: dict[str, Exploration] = {}
        for policy_id, section in self._explorations.items():
            if not self._config.policies[policy_id].trainable:
                found[policy_id] = make_exploration(section, _AT_THE_END)
            elif self.phase is Phase.HEATUP and self._config.heatup.acting == "random":
                found[policy_id] = base.RandomActing()
            else:
                found[policy_id] = make_exploration(section, self.header.counters.train)
        return found
