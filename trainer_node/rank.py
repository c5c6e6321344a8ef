"""A rank beside the trainer: learns what that learns, from its part of each minibatch. Knows no log and no store.

`run` reads: join the group of the newest trainer; learn in it until it ends or breaks; again, until the run is over.
"""

from __future__ import annotations

import logging

from shared.connection import hurry
from shared.departure import LEFT
from shared.errors import WeightsNotFinite
from shared.heartbeat import Heartbeat
from shared.policies.registry import torch_device
from shared.role import Role
from trainer_node.group import Group, GroupBroken, join
from trainer_node.learner import Learner, set_up_torch
from trainer_node.ranks import follow
from trainer_node.rendezvous import Call, Rendezvous, rank_id

_LOGGER = logging.getLogger("stagecoach.rank")
_LOOK_SECONDS = 1.0
_DEADLINE_SECONDS = 86_400.0
"""A day without an update; the trainer's own waits are over long before."""


class Rank:
    """One of the ranks 1, 2 …"""

    def __init__(self, role: Role, rank: int) -> None:
        self._role = role
        self._config = role.config
        self._rank = rank
        self._heartbeat = Heartbeat(role.redis, role.run_id, "rank", rank_id(rank))
        self._rendezvous = Rendezvous(role)
        self._call: Call | None = None
        """The invitation to follow next."""
        self._epoch = 0
        """Of the trainer whose group it is in, or was."""
        self._calls = 0

    def run(self) -> str:
        """Learns along until the run has finished, or its machine is taken away; answers which."""
        self._role.check_config()
        set_up_torch(self._config.trainer)
        reason = "failed"
        try:
            self._heartbeat.start()
            while self._role.flow.read().state != "finished":
                self._learn_in_next_group()
            reason = "finished"
        except KeyboardInterrupt:
            reason = LEFT
        finally:
            self._heartbeat.stop(reason)
        return reason

    def ask_to_leave(self) -> None:
        """From a signal handler: it ends at once. The group breaks, and meets again with another in its place."""
        hurry(self._role.redis)
        raise KeyboardInterrupt

    def _learn_in_next_group(self) -> None:
        group = self._join()
        if group is None:
            return
        try:
            follow(group, self._config, self._wait_for_call)
        except (GroupBroken, WeightsNotFinite) as error:  # of the latter the trainer tells
            _LOGGER.warning("the group of epoch %d has ended: %s", self._epoch, error)
        finally:
            group.leave()

    def _join(self) -> Group | None:
        """The group of the newest trainer, as soon as it opens one; None where it came to nothing."""
        with self._heartbeat.waiting("the trainer's group", self._config.rollout.wait_deadline_seconds) as wait:
            while self._call is None:
                found, state = self._rendezvous.next(_LOOK_SECONDS), self._role.flow.read()
                if state.state == "finished":
                    return None
                if found is not None and found.invitation is not None and found.epoch == state.epoch > self._epoch:
                    self._call = found
                wait.check()
            call, self._call = self._call, None
            assert call.invitation is not None
            self._epoch = call.epoch
            self._tell(None)
            try:
                trainer = self._config.trainer
                device, timeout = torch_device(trainer.device), trainer.rank_timeout_seconds
                return join(call.invitation, self._rank, device, timeout, self._look_for_another)
            except GroupBroken as error:
                _LOGGER.warning("the group of epoch %d came to nothing: %s", self._epoch, error)
                return None

    def _look_for_another(self, seconds: float = 0.0) -> bool:
        """Whether the trainer called us; raises `GroupBroken` where it is not our trainer any more."""
        call = self._rendezvous.next(seconds)
        if call is not None and call.epoch > self._epoch and call.invitation is not None:
            self._call = call
            raise GroupBroken("another trainer has opened a group")
        return call is not None and call.epoch == self._epoch and call.invitation is None

    def _wait_for_call(self, learner: Learner | None) -> None:
        """Until the trainer has something to tell."""
        self._tell(learner)
        with self._heartbeat.waiting("the trainer's next update", _DEADLINE_SECONDS) as wait:
            while not self._look_for_another(_LOOK_SECONDS):
                state = self._role.flow.read()
                if state.epoch > self._epoch or state.state == "finished":
                    raise GroupBroken("its trainer has ended")
                wait.check()

    def _tell(self, learner: Learner | None) -> None:
        updates = learner.counters.train.updates if learner else 0
        self._calls += learner is not None
        consumed = self._calls * self._config.rollout.fragments_per_update
        self._heartbeat.progress = {"epoch": self._epoch, "updates": updates, "fragments": consumed}
