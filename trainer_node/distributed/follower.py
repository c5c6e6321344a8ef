"""A follower: a rank that learns what the trainer learns, from its part of each minibatch.

It reads neither the log nor the store; all it learns from comes from rank 0 (distributed/leader.py).
"""

import logging

from stagecoach.shared.base.errors import WeightsNotFinite
from stagecoach.shared.base.failure import RoleEnd
from stagecoach.shared.policies.registry import torch_device
from stagecoach.shared.protocol.flow_control import RunState
from stagecoach.shared.protocol.heartbeat import Heartbeat
from stagecoach.shared.protocol.redis_client import retries
from stagecoach.shared.runtime.run_context import RunContext
from stagecoach.trainer_node.distributed.leader import Call, Rendezvous, follow, rank_id
from stagecoach.trainer_node.distributed.process_group import Group, GroupBroken, join
from stagecoach.trainer_node.learning.learner import Learner, set_up_torch

_LOGGER = logging.getLogger("stagecoach.rank")
_POLL_SECONDS = 1.0
_DEADLINE_SECONDS = 86_400.0
"""A day without an update; the trainer's own waits are over long before."""


class Follower:
    def __init__(self, role: RunContext, rank: int) -> None:
        self._role, self._config, self._rank = role, role.config, rank
        self._heartbeat = Heartbeat(role.redis, role.run_id, "rank", rank_id(rank))
        self._rendezvous = Rendezvous(role.redis, role.run_id)
        self._call: Call | None = None
        """The invitation to follow next."""
        self._epoch = self._calls = 0
        """The epoch is that of the trainer whose group it is in, or was."""

    def run(self) -> str:
        """Learns along until the run has finished, or its machine is taken away; returns which."""
        self._role.check_config()
        set_up_torch(self._config.trainer)
        reason = "failed"
        try:
            self._heartbeat.start()
            while self._role.flow.read().state is not RunState.FINISHED:
                group = None
                try:
                    group = self._join()
                    if group is not None:
                        follow(group, self._config, self._wait_for_call)
                except (GroupBroken, WeightsNotFinite) as error:  # of the latter the trainer tells
                    _LOGGER.warning("the group of epoch %d has ended: %s", self._epoch, error)
                finally:
                    if group is not None:
                        group.leave()
            reason = "finished"
        except KeyboardInterrupt:
            reason = RoleEnd.PREEMPTED
        finally:
            self._heartbeat.stop(reason)
        return reason

    def request_shutdown(self) -> None:
        """Ends at once, from a signal handler. The group breaks, and meets again with a replacement."""
        retries(self._role.redis).hurry()
        raise KeyboardInterrupt

    def _join(self) -> Group | None:
        """The group of the newest trainer, as soon as it opens one; None where the run has finished."""
        with self._heartbeat.waiting("the trainer's group", self._config.rollout.wait_deadline_seconds) as wait:
            while self._call is None:
                found, state = self._rendezvous.next(_POLL_SECONDS), self._role.flow.read()
                if state.state is RunState.FINISHED:
                    return None
                if found is not None and found.invitation is not None and found.epoch == state.epoch > self._epoch:
                    self._call = found
                wait.check()
            call, self._call = self._call, None
            assert call.invitation is not None
            self._epoch = call.epoch
            self._tell(None)
            trainer = self._config.trainer
            device, timeout = torch_device(trainer.device), trainer.rank_timeout_seconds
            return join(call.invitation, self._rank, device, timeout, self._poll_calls)

    def _poll_calls(self, seconds: float = 0.0) -> bool:
        """Returns whether the trainer called; raises `GroupBroken` if another trainer did."""
        call = self._rendezvous.next(seconds)
        if call is not None and call.epoch > self._epoch and call.invitation is not None:
            self._call = call
            raise GroupBroken("another trainer has opened a group")
        return call is not None and call.epoch == self._epoch and call.invitation is None

    def _wait_for_call(self, learner: Learner | None) -> None:
        self._tell(learner)
        with self._heartbeat.waiting("the trainer's next update", _DEADLINE_SECONDS) as wait:
            while not self._poll_calls(_POLL_SECONDS):
                state = self._role.flow.read()
                if state.epoch > self._epoch or state.state is RunState.FINISHED:
                    raise GroupBroken("its trainer has ended")
                wait.check()

    def _tell(self, learner: Learner | None) -> None:
        updates = learner.counters.train.updates if learner else 0
        self._calls += learner is not None
        consumed = self._calls * self._config.rollout.fragments_per_update
        self._heartbeat.progress = {"epoch": self._epoch, "updates": updates, "fragments": consumed}
