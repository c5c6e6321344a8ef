"""Rollout worker: claims a fragment, acts it with the newest policy version, pushes it, and repeats.

In: credit and policy versions (Redis), the first policy (newest checkpoint). Out: fragments, heartbeats. An
interrupted fragment was never produced. In a run with a dataset, fragments are cut from that, perhaps only in warm-up.
"""

import logging
from contextlib import ExitStack
from dataclasses import dataclass
from enum import StrEnum
from functools import partial
from typing import assert_never

import redis
import torch

from stagecoach.rollout_worker.acting_policies import ActingPolicies
from stagecoach.rollout_worker.claims import Claims
from stagecoach.rollout_worker.directors import RunDirectors
from stagecoach.rollout_worker.environments.seeding import SeedLineage
from stagecoach.rollout_worker.episodes import Episodes
from stagecoach.rollout_worker.gateway.environment import NothingArrived
from stagecoach.rollout_worker.gateway.gateway import Gateway
from stagecoach.rollout_worker.sampling.sampler import Sample
from stagecoach.rollout_worker.watchdog import OWN_WORK, Watchdog
from stagecoach.shared.base.errors import EnvironmentFailure, ShardFull, WorkerSuperseded
from stagecoach.shared.base.failure import EndReason, Failure, RoleEnd, reason_in_words
from stagecoach.shared.datasets.read import read_dataset
from stagecoach.shared.datasets.recording import Recordings
from stagecoach.shared.experience.fragment import Fragment, FragmentHeader
from stagecoach.shared.experience.spaces import EnvironmentDescription
from stagecoach.shared.protocol.experience_log import PushReply
from stagecoach.shared.protocol.flow_control import Claim, ClaimReply
from stagecoach.shared.protocol.heartbeat import Heartbeat, retry_until_deadline
from stagecoach.shared.protocol.policy_board import PolicyBoard
from stagecoach.shared.protocol.redis_client import retries
from stagecoach.shared.runtime.profile import Profile
from stagecoach.shared.runtime.run_context import RunContext
from stagecoach.shared.storage.shared_objects import read_shared_object

_LOGGER = logging.getLogger("stagecoach.worker")
_RUN_ENDED = (RoleEnd.STOPPING, RoleEnd.FINISHED, EndReason.SOLVED, EndReason.EXHAUSTED, EndReason.STOPPED)
_WAKEUP_SECONDS = 1.0
"""Longest sleep between two claims: no event reports an expired lease."""


class StepResult(StrEnum):
    PUSHED = "pushed"
    """Produced: it is in the log, or was refused as stale, which the ledger counts."""
    WAITED = "waited"
    FAILED = "failed"
    """The environment raised, and was started again."""


class Worker:
    """Rollout worker role. `run` runs it to the end; `step` takes one turn, for the one-process mode."""

    def __init__(self, context: RunContext, index: int) -> None:
        self.id, self._index = f"worker-{index}", index
        self.context, self._config, self._log = context, context.config, context.log()
        self.heartbeat = Heartbeat(context.redis, context.run_id, "worker", self.id)
        self._profile = Profile(context.checkpoints.store, self.id, self._config.metrics.profile)
        self._stages = self._profile.add("acting", self.heartbeat.stages)
        emit = partial(context.emit_event, "worker")
        self._watchdog = Watchdog(self.id, self._config, self.heartbeat, self._before_exit, emit)
        self.claims = Claims(self._config, self.id, context.flow, self._log, self.heartbeat, self._watchdog)
        self.held: tuple[Claim, Sample] | None = None
        """Fragment that waits for memory on a shard (in the one-process mode, where a push may not block)."""
        self._gaps = 0
        """Fragments that are missing in the log although their episodes continued; each begins another `life`."""
        self._acting: _Acting | None = None
        self._gateway: Gateway | None = None
        """Set by `start`, if the environments are in other programs."""
        self._running = ExitStack()
        """Callbacks that end what `start` has started."""
        self._superseded = self._preempted = False

    @property
    def incarnation(self) -> int:
        """Number of this process of the worker, from 0; −1 until it has registered."""
        return self.claims.incarnation

    def run(self) -> str:
        """Claims, acts and pushes until the run ends or the worker is to end; returns why (`RoleEnd`)."""
        torch.set_num_threads(self._config.rollout.torch_threads)
        self._watchdog.start()
        end = RoleEnd.FAILED
        try:
            self.start()
            while not isinstance(result := self.step(_WAKEUP_SECONDS), RoleEnd):
                pass
            end = result
        except KeyboardInterrupt:
            end = RoleEnd.PREEMPTED if self._preempted else RoleEnd.TERMINATED
        except redis.RedisError as error:
            if not self._preempted:
                raise
            _LOGGER.warning("%s leaves while Redis is away (%s)", self.id, error)
            end = RoleEnd.PREEMPTED
        except WorkerSuperseded as error:
            _LOGGER.info("%s", error)
            end, self._superseded = RoleEnd.SUPERSEDED, True
        finally:
            self.stop(end)
        return end

    def start(self) -> None:
        """Registers as a new incarnation, loads the first policy, and starts the environments."""
        self.context.check_config()
        self.claims.register()
        self._running.callback(self.claims.release)
        self.heartbeat.progress = {"incarnation": self.claims.incarnation, "fragments": 0, "transitions": 0}
        self.heartbeat.start()
        with self._stages.during("start"):
            self._acting = self._open()
            self._running.callback(self.episodes.close)
        self.context.emit_event("worker", f"{self.id} joined (incarnation {self.claims.incarnation})")
        _LOGGER.info("%s joined run %s as incarnation %d", self.id, self.context.run_id, self.claims.incarnation)

    def step(self, wait_seconds: float) -> StepResult | RoleEnd:
        """Takes one turn: claims, fetches a newer policy if the claim needs one, acts one fragment and pushes it."""
        if self._preempted:
            return RoleEnd.PREEMPTED
        if self._watchdog.outgrown is not None:
            return RoleEnd.OUTGROWN
        with self._watchdog.during(OWN_WORK):
            if self.held is not None:
                return self._push(*self.held, wait_seconds)
            claim = self.claim(wait_seconds)
            if not claim.granted:
                if self._gateway is not None:
                    self._gateway.environment.hold()
                return self._not_granted(claim.reply)
            self.policies.update(claim)
            try:
                self.episodes.enter(self.policies.phase)
                sample = self.act()
            except NothingArrived:
                self._settle()
                self.claims.release()
                return StepResult.WAITED
            except EnvironmentFailure as error:
                self.episodes.restart(error)
                return StepResult.FAILED
            return self._push(claim, sample, wait_seconds)

    def stop(self, reason: str) -> None:
        """Releases what it holds and reports why it ends, as far as possible."""
        registered = self.claims.incarnation >= 0
        try:
            if self._gateway is not None:
                self._gateway.run_ended = reason in _RUN_ENDED
            self._running.close()
            if registered:
                if reason == RoleEnd.DRAINED:  # it may never come back, and its action trace would stay
                    self._log.forget_action_trace(self.id)
                self.context.emit_event("worker", f"{self.id} ended: {reason_in_words(reason)}")
        except Exception:
            _LOGGER.exception("%s could not end in order", self.id)
        finally:
            self._watchdog.stop()
            self.heartbeat.stop(reason, last_beat=registered and not self._superseded)
            self._profile.write()
        _LOGGER.info("%s ended: %s", self.id, reason)

    def request_shutdown(self) -> None:
        """Ends after the current fragment, or at once during a wait; called by a signal handler."""
        self._preempted = True
        retries(self.context.redis).hurry()
        if self.heartbeat.waits:
            raise KeyboardInterrupt

    def claim(self, wait_seconds: float) -> Claim:
        with self._stages.during("claim"):
            return self.claims.next(wait_seconds)

    def act(self) -> Sample:
        """Acts one fragment, or cuts it from recorded experience; raises `EnvironmentFailure`."""
        self.episodes.try_acting()
        policies, sampler = self.policies, self.episodes.sampler
        if self._gateway is not None:
            self._gateway.publish(policies.header, policies.policies, policies.exploration_fields)
            self.heartbeat.progress = self.heartbeat.progress | self._gateway.summary()
        self._started.directors.update(sampler.directors, policies.header.folds)
        return sampler.sample(policies.policies, policies.exploration(), self._config.rollout.fragment_steps)

    def _settle(self) -> None:
        """Counts and acknowledges turns that came too late for any fragment, where no fragment follows them."""
        assert self._gateway is not None
        if (environment := self._gateway.environment).unsettled:
            self._log.settle(self.id, self.incarnation, environment.settled)
            environment.pushed()

    def _push(self, claim: Claim, sample: Sample, wait_seconds: float) -> StepResult | RoleEnd:
        sampler, config, policies = self.episodes.sampler, self._config, self.policies
        header = FragmentHeader(
            run_id=self.context.run_id, worker_id=self.id, incarnation=self.claims.incarnation, seq=self.claims.seq,
            phase=policies.phase, policy_versions=dict.fromkeys(policies.policies, policies.version),
            steps=config.fragment_rows, num_envs=config.environment.num_envs, episodes=sample.episodes,
            acting_seconds=round(sample.acting_seconds, 6),
            life=f"{sampler.lineage}+{self._gaps}" if self._gaps else str(sampler.lineage),
            history=policies.header.history,
        )  # fmt: skip
        settled = None if self._gateway is None else self._gateway.environment.settled
        try:
            made = Fragment(header, sample.columns)
            reply = self.claims.push(claim, made, sample, sampler.traced(sample), wait_seconds, settled)
        except ShardFull:
            self.held = claim, sample
            return StepResult.WAITED
        self.held = None
        self._gaps += reply in (PushReply.EPOCH, PushReply.STALE)
        match reply:
            case PushReply.FINISHED:
                return RoleEnd.FINISHED
            case PushReply.SUPERSEDED:
                raise WorkerSuperseded(f"{self.id}: a newer incarnation than {self.claims.incarnation} has registered")
            case PushReply.EPOCH:
                return self._register_again()
            case PushReply.PUSHED | PushReply.DUPLICATE | PushReply.STALE:
                pass
            case _:
                assert_never(reply)
        self.episodes.pushed()
        done = self.heartbeat.progress
        if self._gateway is not None:
            self._gateway.environment.pushed()
            done = done | self._gateway.summary()
        more = {"fragments": done["fragments"] + 1, "transitions": done["transitions"] + sample.transitions}
        self.heartbeat.progress = done | more | {"version": header.version, "incarnation": header.incarnation}
        return StepResult.PUSHED

    def _not_granted(self, reply: ClaimReply) -> StepResult | RoleEnd:
        match reply:
            case ClaimReply.WAIT_CREDIT | ClaimReply.WAIT_LOG | ClaimReply.WAIT_MEMORY:
                return StepResult.WAITED
            case ClaimReply.TAKEN:
                return self._register_again()
            case ClaimReply.DRAIN:
                return RoleEnd.DRAINED
            case ClaimReply.STOPPING:
                return RoleEnd.STOPPING
            case ClaimReply.FINISHED:
                return RoleEnd.FINISHED
            case ClaimReply.GRANTED | ClaimReply.SUPERSEDED:
                raise AssertionError(f"unexpected reply {reply}")
            case _:
                assert_never(reply)

    def _register_again(self) -> StepResult:
        """Registers again after Redis was rolled back, since its record of this worker may be wrong."""
        self.claims.register()
        return StepResult.WAITED

    @property
    def policies(self) -> ActingPolicies:
        return self._started.policies

    @property
    def episodes(self) -> Episodes:
        return self._started.episodes

    @property
    def _started(self) -> "_Acting":
        assert self._acting is not None, "only a worker that has started acts"
        return self._acting

    def _open(self) -> "_Acting":
        config, context, dataset, recordings = self._config, self.context, self._config.dataset, None
        with self.heartbeat.waiting("the store", config.store.retry_seconds, outage=True) as wait:
            description = retry_until_deadline(wait, context.description)
            if dataset is not None:
                wanted = description.of(config.recorded(dataset.section))
                recordings = retry_until_deadline(wait, lambda: read_dataset(dataset, wanted))
        store, seconds = context.checkpoints.store, config.store.retry_seconds
        directors = RunDirectors(
            config, description,
            lambda sha256: self.heartbeat.outlast(lambda: read_shared_object(store, sha256), seconds),
            context.emit_event if self._index == 0 else lambda kind, text: None,  # all would say the same
        )  # fmt: skip
        policies = self.open_policies(description)
        return _Acting(policies, self.open_episodes(description, recordings, policies, directors), directors)

    def open_policies(self, description: EnvironmentDescription) -> ActingPolicies:
        context = self.context
        board = PolicyBoard(context.redis, context.run_id, context.bodies.memory)
        return ActingPolicies(
            self._config, description, board, context.checkpoints, self.heartbeat, self.claims.epoch,
            lambda: self._preempted,
        )  # fmt: skip

    def open_episodes(
        self, description: EnvironmentDescription, recordings: Recordings | None, policies: ActingPolicies,
        directors: RunDirectors,
    ) -> Episodes:  # fmt: skip
        lineage = SeedLineage(self._config.seed, self._index, self.claims.incarnation, 0)
        if self._config.environment.api == "external":
            self._gateway = Gateway(
                self._config, description, self._log, self.heartbeat, self.context.checkpoints.store,
                self.context.run_id, self._index,
            )  # fmt: skip
            self._running.callback(self._gateway.close)
            self.context.emit_event("worker", f"the gateway of {self.id} listens at {self._gateway.url}")
        return Episodes(
            self._config, description, self._log, lineage, phase=policies.phase, recorded=recordings,
            watchdog=self._watchdog, stages=self._stages, emit=partial(self.context.emit_event, "environment"),
            direct=lambda: directors.make(policies.header.folds),
            external=self._gateway.environment if self._gateway is not None else None,
        )  # fmt: skip

    def _before_exit(self, failure: Failure) -> None:
        """Releases the claim before the watchdog ends the process, so that another worker may act it at once."""
        self.claims.release()
        self.context.emit_event("worker", f"{failure.detail}; its process is replaced")
        self.heartbeat.stop(failure.detail, failure=failure.kind)


@dataclass(frozen=True)
class _Acting:
    """Parts of a worker that has started."""

    policies: ActingPolicies
    episodes: Episodes
    directors: RunDirectors
