"""Evaluator: plays each new checkpoint from the store, reports the score, and ends the run when it is solved.

Evaluations due by `evaluation.every` are played in order, else the newest checkpoint. A candidate for the best is
played again from other starts. Scores choose the best checkpoint and may end the run; they never affect learning.
`stagecoach evaluate` uses the same functions.
"""

import logging
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from enum import StrEnum
from functools import partial
from statistics import fmean, pstdev
from typing import Any

import numpy as np
import torch

from stagecoach.rollout_worker.matches import FixedPlayers
from stagecoach.rollout_worker.playing import evaluate_policies
from stagecoach.rollout_worker.watchdog import Watchdog
from stagecoach.shared.base import errors, world
from stagecoach.shared.base.failure import Failure, RoleEnd
from stagecoach.shared.base.printable import score_in_words
from stagecoach.shared.config.run_config import Config
from stagecoach.shared.experience.checkpoint_name import checkpoint_env_steps, checkpoint_version
from stagecoach.shared.experience.fragment import EpisodeRecord
from stagecoach.shared.policies.policy import Policy
from stagecoach.shared.policies.registry import import_policies
from stagecoach.shared.policies.serialization import decode_policy
from stagecoach.shared.protocol import events
from stagecoach.shared.protocol.flow_control import RunState
from stagecoach.shared.protocol.heartbeat import Heartbeat
from stagecoach.shared.protocol.redis_client import retries
from stagecoach.shared.runtime.profile import Profile
from stagecoach.shared.runtime.restarts import RestartBound
from stagecoach.shared.runtime.run_context import RunContext
from stagecoach.shared.storage.checkpoint_store import Checkpoint
from stagecoach.shared.storage.due_evaluations import due_evaluations, read_due_evaluation

_LOGGER = logging.getLogger("stagecoach.evaluator")
_PASSING = (errors.CheckpointError, errors.StoreError, errors.StoreUnavailable)
_POLICY = "/policy.safetensors"
_POLL_SECONDS = 1.0
_POSTPONED_SECONDS = 30.0
"""Pause between tries to read a due evaluation; the second try comes after a poll, since it may still be written."""
_DEADLINE_SECONDS = 86_400.0
"""A day without a checkpoint is an error; the restarted evaluator waits again."""
SCORING, CONFIRMING = 0, 1
"""Rounds of a checkpoint's evaluation: all are scored; candidates for the best are confirmed from other starts."""


def scores_of(config: Config, records: Sequence[EpisodeRecord]) -> dict[str, Any]:
    """Returns the scores of the episodes, for JSON: mean, spread, bounds, lengths, success rate, the environment's
    metrics, and the mean returns of several agents and policies."""
    returns = [record.episode_return for record in records]
    threshold = config.evaluation.success_threshold
    reported = [record.success for record in records]
    if threshold is not None:
        reported = [total >= threshold if one is None else one for one, total in zip(reported, returns, strict=True)]
    successes = [one for one in reported if one is not None]
    names = sorted({name for record in records for name in record.metrics})
    agents = {name: fmean(its.agent_returns[name] for its in records) for name in records[0].agent_returns}
    policies: dict[str, float] = {}
    for agent, its in agents.items() if len(config.policies) > 1 else ():
        policies[config.policy_of(agent)] = policies.get(config.policy_of(agent), 0.0) + its
    scores: dict[str, Any] = {
        "env_steps_played": sum(record.length for record in records),
        "agents": agents,
        "policies": policies,
        "episodes": len(returns),
        "mean_return": fmean(returns),
        "std_return": pstdev(returns),  # exactly 0 if all are equal
        "min_return": min(returns),
        "max_return": max(returns),
        "mean_length": fmean(record.length for record in records),
        "success_rate": fmean(successes) if successes else None,
        "metrics": {name: fmean(its.metrics[name] for its in records if name in its.metrics) for name in names},
    }
    if (best_by := config.checkpoint.best_by) != "all" and (best_by in policies or not policies):
        scores |= {"ranking": events.policy_return(scores, best_by), "ranked_by": f"return of {best_by}"}
    return scores


def evaluation_seed(config: Config, checkpoint: str, evaluation_round: int) -> int:
    """Returns the seed of an evaluation, 32 bits, from the round and (without `evaluation.seed`) the checkpoint; its
    environments' first episodes get consecutive seeds, modulo 2³¹."""
    fixed = config.evaluation.seed
    whose = [config.seed, checkpoint_version(checkpoint) or 0] if fixed is None else [fixed]
    return int(np.random.SeedSequence([*whose, evaluation_round]).generate_state(1)[0])


class StepResult(StrEnum):
    EVALUATED = "evaluated"
    WAITED = "waited"


class Evaluator:
    """Evaluator role. `run` runs it to the end; `step` takes one turn, for the one-process mode."""

    def __init__(self, context: RunContext) -> None:
        self._context = context
        import_policies(context.config.policies, context.config.algorithm)
        self.heartbeat = Heartbeat(context.redis, context.run_id, "evaluator", "evaluator")
        self._profile = Profile(context.checkpoints.store, "evaluator", context.config.metrics.profile)
        self._stages = self._profile.add("evaluating", self.heartbeat.stages)
        self._outage_seconds = context.config.store.retry_seconds
        self._after = "0-0"
        self._postponed: dict[str, tuple[int, float]] = {}
        """Due evaluation that could not be read → number of tries, and time of the next one."""
        self.postpones = False
        self.interrupted: Callable[[], bool] = lambda: False
        """Polled while no episode ends; if it returns True, the evaluation ends."""
        self._told_endless = False
        self._failures = RestartBound(context.config.environment.failures_allowed)
        self._failures.record_progress((0,))
        emit = partial(context.emit_event, "evaluation")
        self._watchdog = Watchdog("evaluator", context.config, self.heartbeat, self._before_exit, emit)
        self._fixed_players = FixedPlayers(context.config, context.checkpoints.store, emit, self._watchdog)

    def run(self) -> str:
        torch.set_num_threads(1)
        self._watchdog.start()
        end = RoleEnd.FAILED
        try:
            self.start()
            while not self._run_has_finished():
                self.step(_POLL_SECONDS)
            end = RoleEnd.FINISHED
        except KeyboardInterrupt:
            end = RoleEnd.PREEMPTED
        finally:
            self.stop(end)
        return end

    def start(self) -> None:
        self._context.check_config()
        self.heartbeat.progress = {"evaluations": 0}
        self.heartbeat.start()
        self._description = self.heartbeat.outlast(self._context.description, self._outage_seconds)
        self.check_solved()  # the previous evaluator may have died between its last score and this check

    def request_shutdown(self) -> None:
        """Ends at once, from a signal handler: another evaluator can play the checkpoint."""
        retries(self._context.redis).hurry()
        raise KeyboardInterrupt

    def _before_exit(self, failure: Failure) -> None:
        self._context.emit_event("evaluation", f"{failure.detail}; its process is replaced")
        self.heartbeat.stop(failure.detail, failure=failure.kind)

    def stop(self, reason: str) -> None:
        self._watchdog.stop()
        self.heartbeat.stop(reason)
        self._profile.write()

    def step(self, wait_seconds: float) -> StepResult:
        """Takes one turn: plays a due evaluation or the newest checkpoint, or waits for one."""
        name = self._next(wait_seconds) or self._wait_for_checkpoint(wait_seconds)
        if name is None:
            return StepResult.WAITED
        try:
            self._evaluate(name)
        finally:  # allows pruning of a checkpoint that could not be played
            self.heartbeat.progress = {key: its for key, its in self.heartbeat.progress.items() if key != "evaluating"}
        return StepResult.EVALUATED

    def _run_has_finished(self) -> bool:
        return self._context.flow.read().state is RunState.FINISHED

    def _next(self, wait_seconds: float) -> str | None:
        """Returns the oldest due evaluation, else the newest checkpoint; None if it was played. Waits for the store."""
        done = events.read_evaluations(self._context.redis, self._context.run_id)

        def ask() -> str | None:
            if self._context.config.evaluation.every is not None:
                due = [name for name in due_evaluations(self._context.checkpoints.store) if name not in done]
                self.postpones = any(name in self._postponed for name in due)
                for name in due:
                    if world.monotonic() >= self._postponed.get(name, (0, 0.0))[1]:
                        return name
            pointer = self._context.checkpoints.pointer()
            return None if pointer is None or pointer.latest in done else pointer.latest

        try:
            return self.heartbeat.outlast(ask, self._outage_seconds) if wait_seconds > 0 else ask()
        except _PASSING as error:
            _LOGGER.warning("cannot look for a new checkpoint: %s", error)
            return None

    def _wait_for_checkpoint(self, wait_seconds: float) -> str | None:
        if wait_seconds <= 0:
            return None
        with self.heartbeat.waiting("a new checkpoint", _DEADLINE_SECONDS) as wait:
            while (name := self._next(wait_seconds)) is None and not self._run_has_finished():
                wait.check()
                for event in events.read_events(self._context.redis, self._context.run_id, self._after, wait_seconds):
                    self._after = event.id
        return name

    def _evaluate(self, name: str) -> None:
        context = self._context
        started = world.monotonic()
        self.heartbeat.progress = self.heartbeat.progress | {"evaluating": name}
        try:
            found = self._stored(name)
            stored = {key.partition("/")[0]: data for key, data in found.objects.items() if key.endswith(_POLICY)}
            policies = {policy_id: decode_policy(data)[0] for policy_id, data in stored.items()}
            scores = self._play(name, policies, SCORING)
            ratings = found.manifest.provenance.get("fold_metrics", {})
            play = partial(self._fixed_players.play, self._description, name, stored, policies)
            against = play(evaluation_seed(context.config, name, SCORING))
            scores |= against | self._fixed_players.ranked(ratings, against)
            if self._may_be_best(events.ranking(scores)):
                if self._fixed_players.rank_by_return:
                    against = play(evaluation_seed(context.config, name, CONFIRMING))
                ranked = self._fixed_players.ranked(ratings, against)
                scores["confirmation"] = self._play(name, policies, CONFIRMING) | ranked
        except _PASSING as error:  # pruned meanwhile, or damaged: the next one is played
            _LOGGER.warning("cannot evaluate %s: %s", name, error)
            if isinstance(error, errors.CheckpointError) and context.config.evaluation.every is not None:
                tries = self._postponed.get(name, (0, 0.0))[0] + 1
                if tries == 2:
                    context.emit_event("evaluation", f"{name} cannot be evaluated: {error}")
                pause = _POLL_SECONDS if tries == 1 else _POSTPONED_SECONDS
                self._postponed[name] = tries, world.monotonic() + pause
            world.sleep(_POLL_SECONDS)
            return
        except errors.EnvironmentFailure as error:
            _LOGGER.error("evaluation of %s failed: %s", name, error)
            context.emit_event("environment", f"evaluator: {errors.headline(error)}")
            if self._failures.ended():
                raise
            world.sleep(_POLL_SECONDS)
            return
        self._failures.record_progress((self.heartbeat.progress["evaluations"] + 1,))
        scores |= {"version": checkpoint_version(name), "checkpoint": name}
        scores |= {"env_steps": checkpoint_env_steps(name)}
        events.record_evaluation(context.redis, context.run_id, name, scores)
        context.emit_event("evaluation", f"{name} scores {score_in_words(scores)}", **scores)
        progress = {"evaluations": self.heartbeat.progress["evaluations"] + 1, "checkpoint": name}
        self.heartbeat.progress = progress | {"seconds": round(world.monotonic() - started, 3)}
        self.check_solved()

    def _stored(self, name: str) -> Checkpoint:
        checkpoints = self._context.checkpoints
        if self._context.config.evaluation.every is not None:
            with suppress(errors.ObjectMissing):
                return read_due_evaluation(checkpoints.store, name)
        return checkpoints.load(name, only=_POLICY)

    def _play(self, name: str, policies: Mapping[str, Policy], evaluation_round: int) -> dict[str, Any]:
        config = self._context.config
        seed = evaluation_seed(config, name, evaluation_round)
        with self._stages.during("evaluate"):
            played = evaluate_policies(
                config, self._description, policies, seed, endless=partial(self._endless, name), watchdog=self._watchdog
            )
            return scores_of(config, played)

    def _endless(self, name: str) -> None:
        if self.interrupted():
            raise errors.EnvironmentFailure(f"the run ends, and no episode of the evaluation of {name} has ended")
        if not self._told_endless:
            self._told_endless = True
            text = f"{name}: no episode has ended yet; if episodes may never end, set environment.max_episode_steps"
            self._context.emit_event("evaluation", text)

    def _may_be_best(self, rank: float) -> bool:
        """Returns whether a checkpoint with this rank would be kept among the best; among equals, the newest is."""
        config, kept = self._context.config.checkpoint, self._context.checkpoints.names()
        known = events.read_evaluations(self._context.redis, self._context.run_id)
        confirmed = [events.confirmed_return(known[name]) for name in kept if name in known]
        best = sorted((value for value in confirmed if value is not None), reverse=True)[: config.keep_best]
        return len(best) < config.keep_best or rank >= best[-1]

    def check_solved(self) -> None:
        """Ends the run once each of the last evaluations reaches the target. Abandoned lineages do not count."""
        stop = self._context.config.stop_at
        if not stop.by_scores:
            return
        known = events.read_evaluations(self._context.redis, self._context.run_id).values()
        try:
            begun = self.heartbeat.outlast(self._lineage, self._outage_seconds) if known else 0
        except errors.CheckpointError:
            return  # damaged, or pruned meanwhile: checked again after the next evaluation
        last = [scores for scores in known if scores["version"] >= begun][-stop.evaluations :]
        solved = all(events.solves(scores, stop.mean_return, stop.success_rate) for scores in last)
        if len(last) == stop.evaluations and solved:
            self._context.flow.set_state(RunState.STOPPING, "solved", expected=RunState.RUNNING)

    def _lineage(self) -> int:
        pointer = self._context.checkpoints.pointer()
        if pointer is None:
            return 0
        return int(self._context.checkpoints.manifest(pointer.latest).provenance.get("lineage", 0))
