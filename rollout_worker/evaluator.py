"""The evaluator: plays each new checkpoint from the store, reports the score, and sees when the run is solved.

Where checkpoints come faster than they can be played, it plays the newest. What may be the best is played once more,
from other starts, before it counts as such. The scores choose the best checkpoint and may end the run; they never
change what is learnt.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Mapping
from typing import Any

import torch

from rollout_worker.evaluation import CONFIRMING, SCORING, evaluate_policies, evaluation_seed
from rollout_worker.watchdog import Watchdog
from shared.checkpoint import checkpoint_version
from shared.connection import hurry
from shared.departure import LEFT
from shared.errors import CheckpointError, EnvironmentFailure, StoreError, StoreUnavailable, headline
from shared.events import confirmed_return, emit, reaches, read_evaluations, read_events, record_evaluation
from shared.failure import Failure
from shared.heartbeat import Heartbeat, insist
from shared.policies.codec import decode_policy
from shared.policies.policy import Policy
from shared.printable import counted
from shared.profile import Profile
from shared.restarts import RestartBound
from shared.role import Role

_LOGGER = logging.getLogger("stagecoach.evaluator")
_PASSING = (CheckpointError, StoreError, StoreUnavailable)
_POLL_SECONDS = 1.0
_DEADLINE_SECONDS = 86_400.0
"""A day without a checkpoint: something is wrong, and a restart looks again."""


class Evaluator:
    """One evaluator. `run` is its whole life; `step` is one turn of it, for the one-process mode."""

    def __init__(self, role: Role) -> None:
        self._role = role
        self._heartbeat = Heartbeat(role.redis, role.run_id, "evaluator", "evaluator")
        self._profile = Profile(role.checkpoints.store, "evaluator", role.config.signals.profile)
        self._stages = self._profile.add("evaluating", self._heartbeat.stages)
        self._outage_seconds = role.config.store.retry_seconds
        self._after = "0-0"
        self._failures = RestartBound(role.config.environment.failures_allowed)
        self._failures.saw((0,))
        self._watchdog = Watchdog("evaluator", role.config, self._heartbeat, self._last_orders)

    def run(self) -> str:
        """Evaluates until the run has finished."""
        torch.set_num_threads(1)
        self._watchdog.start()
        reason = "failed"
        try:
            self.start()
            while self._role.flow.read().state != "finished":
                self.step(_POLL_SECONDS)
            reason = "finished"
        except KeyboardInterrupt:
            reason = LEFT
        finally:
            self.stop(reason)
        return reason

    def start(self) -> None:
        """Announces itself, and learns of the run's spaces from the store."""
        self._role.check_config()
        self._heartbeat.progress = {"evaluations": 0}
        self._heartbeat.start()
        with self._heartbeat.waiting("the store", self._outage_seconds, outage=True) as wait:
            self._description = insist(wait, self._role.description)
        self._check_solved()  # where the evaluator before this one died between its last score and this

    def ask_to_leave(self) -> None:
        """From a signal handler: it ends at once, since another can play the checkpoint as well."""
        hurry(self._role.redis)
        raise KeyboardInterrupt

    def _last_orders(self, failure: Failure) -> None:
        emit(self._role.redis, self._role.run_id, "evaluation", f"{failure.detail}; its process is replaced")
        self._heartbeat.stop(failure.detail, failure=failure.kind)

    def stop(self, reason: str) -> None:
        """Says good-bye."""
        self._watchdog.stop()
        self._heartbeat.stop(reason)
        self._profile.write()

    def step(self, wait_seconds: float) -> str:
        """One turn: `evaluated` the newest checkpoint, or `waited` for one."""
        name = self._newest(wait_seconds) or self._wait_for_checkpoint(wait_seconds)
        if name is None:
            return "waited"
        self._evaluate(name)
        return "evaluated"

    def _newest(self, wait_seconds: float) -> str | None:
        """The newest checkpoint, unless it has been played already; a store that is away is waited for by name."""
        ask = self._role.checkpoints.pointer
        try:
            pointer = self._heartbeat.outlast(ask, self._outage_seconds) if wait_seconds > 0 else ask()
        except _PASSING as error:
            _LOGGER.warning("cannot look for a new checkpoint: %s", error)
            return None
        done = read_evaluations(self._role.redis, self._role.run_id)
        return None if pointer is None or pointer.latest in done else pointer.latest

    def _wait_for_checkpoint(self, wait_seconds: float) -> str | None:
        if wait_seconds <= 0:
            return None
        with self._heartbeat.waiting("a new checkpoint", _DEADLINE_SECONDS) as wait:
            while (name := self._newest(wait_seconds)) is None and self._role.flow.read().state != "finished":
                wait.check()
                for event in read_events(self._role.redis, self._role.run_id, self._after, wait_seconds):
                    self._after = event.id
        return name

    def _evaluate(self, name: str) -> None:
        role = self._role
        started = time.monotonic()
        self._heartbeat.progress = self._heartbeat.progress | {"evaluating": name}
        try:
            checkpoint = role.checkpoints.load(name, only="policy.safetensors")
            policies = {key.partition("/")[0]: decode_policy(data)[0] for key, data in checkpoint.objects.items()}
            scores = self._play(name, policies, SCORING)
            if self._may_be_best(scores["mean_return"]):
                scores["confirmation"] = self._play(name, policies, CONFIRMING)
        except _PASSING as error:
            _LOGGER.warning("cannot evaluate %s: %s", name, error)  # pruned meanwhile, or damaged: the next one counts
            time.sleep(_POLL_SECONDS)
            return
        except EnvironmentFailure as error:
            _LOGGER.error("evaluation of %s failed: %s", name, error)
            emit(role.redis, role.run_id, "environment", f"evaluator: {headline(error)}")
            if self._failures.ended():
                raise
            time.sleep(_POLL_SECONDS)
            return
        self._failures.saw((self._heartbeat.progress["evaluations"] + 1,))
        scores |= {"version": checkpoint_version(name), "checkpoint": name}
        scores |= {"env_steps": checkpoint.manifest.provenance["counters"]["train"]["env_steps"]}
        record_evaluation(role.redis, role.run_id, name, scores)
        text = f"{name} scores {_spread(scores)} over {counted(scores['episodes'], 'episode')}"
        if confirmation := scores.get("confirmation"):
            text += f", and {_spread(confirmation)} from as many other starts"
        emit(role.redis, role.run_id, "evaluation", text, **scores)
        progress = {"evaluations": self._heartbeat.progress["evaluations"] + 1, "checkpoint": name}
        self._heartbeat.progress = progress | {"seconds": round(time.monotonic() - started, 3)}
        self._check_solved()

    def _play(self, name: str, policies: Mapping[str, Policy], evaluation_round: int) -> dict[str, Any]:
        """One evaluation of a checkpoint."""
        config = self._role.config
        seed = evaluation_seed(config, name, evaluation_round)
        with self._stages.during("evaluate"):
            scores = evaluate_policies(config, self._description, policies, seed, watchdog=self._watchdog)
        return scores.as_dict()

    def _may_be_best(self, mean_return: float) -> bool:
        """Whether a checkpoint with this score would be among the best that are kept; of equals the newest is."""
        config, kept = self._role.config.checkpoint, self._role.checkpoints.names()
        known = read_evaluations(self._role.redis, self._role.run_id)
        confirmed = [confirmed_return(known[name]) for name in kept if name in known]
        best = sorted((value for value in confirmed if value is not None), reverse=True)[: config.keep_best]
        return len(best) < config.keep_best or mean_return >= best[-1]

    def _check_solved(self) -> None:
        """Ends the run once each of the last evaluations reaches the target."""
        stop = self._role.config.stop_at
        if stop.mean_return is None:
            return
        last = list(read_evaluations(self._role.redis, self._role.run_id).values())[-stop.evaluations :]
        if len(last) == stop.evaluations and all(reaches(scores, stop.mean_return) for scores in last):
            self._role.flow.set_state("stopping", "solved", expected="running")


def _spread(scores: Mapping[str, Any]) -> str:
    return f"{scores['mean_return']:.1f} ± {scores['std_return']:.1f}"
