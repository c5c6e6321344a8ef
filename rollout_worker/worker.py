"""The rollout worker: claim a fragment, act it with the newest policy version, push it; again and again.

In: credit and policy versions (Redis), the first policy (newest checkpoint). Out: fragments, heartbeats. A fragment
that is cut off in the middle was never produced. In a run with a dataset, fragments are cut from that,
perhaps in heat-up only; nothing acts.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from functools import partial

import torch

from rollout_worker import trail
from rollout_worker.dataset_sampler import DatasetSampler
from rollout_worker.environments import make_vector
from rollout_worker.exploration import Exploration, RandomActing
from rollout_worker.exploring import make_exploration
from rollout_worker.sampler import Sample, Sampler
from rollout_worker.trail import Life, Trail
from rollout_worker.watchdog import OUTGROWN, OWN_WORK, Watchdog, WatchedEnvironment
from shared import fragment
from shared.checkpoint import READY
from shared.connection import hurry
from shared.datasets.reading import read_dataset
from shared.datasets.recording import Recording
from shared.departure import LEFT
from shared.errors import CheckpointError, EnvironmentFailure, ShardFull, ShardUnavailable, WorkerSuperseded, headline
from shared.events import emit
from shared.failure import Failure, reason_in_words
from shared.flow import Claim
from shared.heartbeat import Heartbeat, insist, poll
from shared.policies.codec import load_state_arrays
from shared.policies.registry import build_policies, torch_device
from shared.policy_board import PolicyBoard, PolicyVersion, version_of
from shared.printable import counted
from shared.profile import Profile
from shared.restarts import RestartBound
from shared.role import Role
from shared.steps import Phase

_LOGGER = logging.getLogger("stagecoach.worker")
_WAKEUP_SECONDS = 1.0
"""The longest sleep between two claims: nobody announces that a lease has run out."""
_WAITS = {
    "wait_credit": "credit",
    "wait_log": "room in the log (a durable checkpoint frees it)",
    "wait_memory": "memory in Redis (a durable checkpoint frees some)",
}


class Worker:
    """One rollout worker. `run` is its whole life; `step` is one turn of it, for the one-process mode."""

    def __init__(self, role: Role, index: int) -> None:
        self._role = role
        self._config = role.config
        self._index = index
        self._outage_seconds = role.config.store.retry_seconds
        self.id = f"worker-{index}"
        self._log = role.log()
        self._board = PolicyBoard(role.redis, role.run_id)
        self._heartbeat = Heartbeat(role.redis, role.run_id, "worker", self.id)
        self._profile = Profile(role.checkpoints.store, self.id, role.config.signals.profile)
        self._stages = self._profile.add("acting", self._heartbeat.stages)
        self._failures = RestartBound(role.config.environment.failures_allowed)
        self._failures.saw((0,))
        self._held: tuple[Claim, Sample] | None = None
        """What was acted, and waits for memory on a shard where nobody may block for it (the one-process mode)."""
        self._ahead: Claim | None = None
        """The claim for the next fragment, where it was asked for with the last push."""
        self._acting = False
        """Whether this incarnation has begun to act."""
        self._superseded = False
        self.incarnation = -1
        self._seq = 0
        self._refusals = 0
        """How often this incarnation has heard that its push came too late."""
        self._watchdog = Watchdog(self.id, self._config, self._heartbeat, self._last_orders)
        self._leaving: str | None = None
        self._recording: Recording | None = None

    def run(self) -> str:
        """Claims, acts and pushes until the run ends or the worker is drained; answers which."""
        torch.set_num_threads(self._config.rollout.torch_threads)
        self._watchdog.start()
        reason = "failed"
        try:
            self.start()
            while not (word := self.step(_WAKEUP_SECONDS)).startswith("end:"):
                pass
            reason = word.removeprefix("end:")
        except KeyboardInterrupt:
            reason = self._leaving or "terminated"
        except WorkerSuperseded as error:
            reason, self._superseded = str(error), True
        finally:
            self.stop(reason)
        return reason

    def ask_to_leave(self) -> None:
        """From a signal handler: it ends after the fragment in hand, or at once where it only waits."""
        self._leaving = LEFT
        hurry(self._role.redis)
        if self._heartbeat.waits:
            raise KeyboardInterrupt

    def start(self) -> None:
        """Registers as a new incarnation, loads the first policy, and starts the environments."""
        self._role.check_config()
        self.incarnation, self._epoch = self._role.flow.register(self.id)
        self._heartbeat.progress = {"incarnation": self.incarnation, "fragments": 0, "transitions": 0}
        self._heartbeat.start()
        with self._stages.during("start"):
            self._build()
            self._bootstrap()
            self._sampler = self._start_environment()
        emit(self._role.redis, self._role.run_id, "worker", f"{self.id} joined (incarnation {self.incarnation})")
        _LOGGER.info("%s joined run %s as incarnation %d", self.id, self._role.run_id, self.incarnation)

    def step(self, wait_seconds: float) -> str:
        """One turn: `pushed`, `waited`, `failed` (the environment; it was started again) or `end:` and a reason."""
        if self._leaving is not None or self._watchdog.outgrown is not None:
            return f"end:{self._leaving or OUTGROWN}"
        with self._watchdog.during(OWN_WORK):
            return self._turn(wait_seconds)

    def _turn(self, wait_seconds: float) -> str:
        if self._held is not None:
            return self._push(*self._held, wait_seconds)
        with self._stages.during("claim"):
            claim = self._claim(wait_seconds)
        if claim.waiting:
            return "waited"
        if claim.word == "taken":
            return self._register_again()
        if not claim.granted:
            return "end:drained" if claim.word == "drain" else f"end:{claim.word}"
        self._update_policy(claim)
        self._change_source()
        try:
            sample = self._act()
        except EnvironmentFailure as error:
            self._restart_environment(error)
            return "failed"
        return self._push(claim, sample, wait_seconds)

    def stop(self, reason: str) -> None:
        """Gives back what it holds and says good-bye, as far as it came and as far as it can."""
        self._watchdog.stop()
        try:
            if hasattr(self, "_sampler"):
                self._sampler.close()
            if self.incarnation >= 0:
                # its own claims, not those of a successor
                self._role.flow.release(f"{self.id}:{self.incarnation}")
                if reason == "drained":  # it may never come back, and its trail would stay
                    self._log.forget_trail(self.id)
                emit(self._role.redis, self._role.run_id, "worker", f"{self.id} ended: {reason_in_words(reason)}")
        except Exception:
            _LOGGER.exception("%s could not end in order", self.id)
        finally:
            self._heartbeat.stop(reason, last_beat=not self._superseded and self.incarnation >= 0)
            self._profile.write()
        _LOGGER.info("%s ended: %s", self.id, reason)

    def _last_orders(self, failure: Failure) -> None:
        """What the watchdog does before it ends the process: another may act the claim at once."""
        if self.incarnation >= 0:
            self._role.flow.release(f"{self.id}:{self.incarnation}")
        emit(self._role.redis, self._role.run_id, "worker", f"{failure.detail}; its process is replaced")
        self._heartbeat.stop(failure.detail, failure=failure.kind)

    def _claim(self, wait_seconds: float) -> Claim:
        claim, self._ahead = self._ahead, None
        if claim is None or not (claim.granted or claim.waiting):
            claim = self._role.flow.claim(self.id, self.incarnation, self._seq)
        if not claim.waiting or wait_seconds <= 0:
            return claim
        while claim.waiting and self._watchdog.outgrown is None:
            word = claim.word
            with self._heartbeat.waiting(_WAITS[word], self._config.rollout.wait_deadline_seconds) as wait:
                while claim.word == word and self._watchdog.outgrown is None:
                    wait.check()
                    self._role.flow.wait_for_wakeup(claim, wait_seconds)
                    claim = self._role.flow.claim(self.id, self.incarnation, self._seq)
        return claim

    def _update_policy(self, claim: Claim) -> None:
        """Acts with at least the version of the claim: weights, normaliser and counters move together.

        Another trainer may give the same numbers to other weights, where those in between were in no checkpoint and
        their experience is lost: so its first version is fetched whatever its number.
        """
        if self._header.version >= claim.version and self._epoch == claim.epoch:
            return
        with self._heartbeat.waiting("the policy board", self._config.rollout.wait_deadline_seconds) as wait:
            poll(wait, lambda: self._heartbeat.outlast(lambda: self._fetch(claim.version), self._outage_seconds))
        self._epoch = claim.epoch

    def _fetch(self, at_least: int) -> bool:
        try:
            version = self._board.fetch(self._role.checkpoints)
        except CheckpointError:
            return False  # object_store: replaced while it was read
        if version is None or version.header.version < at_least:
            return False
        self._take(version)
        return True

    def _take(self, version: PolicyVersion) -> None:
        self._header = version.header
        for policy_id, state in version.states.items():
            load_state_arrays(self._policies[policy_id], state)

    def _change_source(self) -> None:
        """Where recorded experience is for heat-up only, and that is over: a new life begins, in environments."""
        if isinstance(self._sampler, DatasetSampler) != self._from_data():
            self._sampler.close()
            self._sampler = self._begin_anew(self._sampler.life.next())

    def _from_data(self) -> bool:
        """Whether fragments are cut from recorded experience now."""
        dataset = self._config.dataset
        return dataset is not None and (not dataset.only_heatup or self._header.phase is Phase.HEATUP)

    def _act(self) -> Sample:
        if not self._acting:
            self._log.trying(self.id, 1)  # where it dies before its first push, the next ones shall not die for ever
            self._acting = True
        return self._sampler.sample(self._policies, self._exploration(), self._config.rollout.fragment_steps)

    def _exploration(self) -> Exploration:
        if self._header.phase is Phase.HEATUP:
            return RandomActing()
        return make_exploration(self._acting_config, self._header.counters.train)

    def _push(self, claim: Claim, sample: Sample, wait_seconds: float) -> str:
        header = fragment.FragmentHeader(
            run_id=self._role.run_id, worker_id=self.id, incarnation=self.incarnation, seq=self._seq,
            phase=self._header.phase, policy_versions=dict.fromkeys(self._policies, self._header.version),
            steps=self._config.rollout.fragment_steps, num_envs=self._config.environment.num_envs,
            episodes=sample.episodes, acting_seconds=round(sample.acting_seconds, 6), life=str(self._sampler.life),
        )  # fmt: skip
        with self._stages.during("encode"):
            blob = fragment.encode(fragment.Fragment(header, sample.columns), self._config.rollout.compression)
            left, length = self._trail(sample)
        place = self.id, self.incarnation, self._seq, claim.epoch
        # in the one-process mode the trainer has its turn before, so that the claim is for what it publishes then
        claiming = self._role.flow.claiming(self.id, self.incarnation, self._seq + 1) if wait_seconds > 0 else None
        push = partial(self._log.push, *place, header.transitions, blob, left, length, claiming, self._refusals)
        try:
            with self._stages.during("push"):
                word = push()
        except ShardUnavailable as error:
            if isinstance(error, ShardFull) and wait_seconds <= 0:
                self._held = claim, sample
                return "waited"
            word = self._push_to_a_shard_again(push)
        self._held = None
        if word == "finished":
            return "end:finished"
        if word == "superseded":
            raise WorkerSuperseded(f"{self.id}: a newer incarnation than {self.incarnation} acts in its place")
        if word == "epoch":
            return self._register_again()
        if word != "stale":
            self._seq += 1
            self._ahead = claiming.answer if claiming is not None else None
        else:  # its number stays the next one's
            self._refusals += 1
            if claiming is not None:
                self._role.flow.release(f"{self.id}:{self.incarnation}")
        progress = self._heartbeat.progress
        self._failures.saw((progress["fragments"] + 1,))
        self._heartbeat.progress = progress | {
            "fragments": progress["fragments"] + 1,
            "transitions": progress["transitions"] + header.transitions,
            "version": self._header.version,
            "incarnation": self.incarnation,
        }
        return "pushed"

    def _push_to_a_shard_again(self, push: Callable[[], str]) -> str:
        """Until the shard is back, or has memory again; the run may end meanwhile."""

        def again() -> str:
            return "finished" if self._role.flow.read().state == "finished" else push()

        with self._heartbeat.waiting("a Redis shard", self._config.redis.retry_seconds, outage=True) as wait:
            return insist(wait, again, (ShardUnavailable,), longest_pause_seconds=1.0)

    def _build(self) -> None:
        """Policies for the run's spaces, which the store knows."""
        with self._heartbeat.waiting("the store", self._outage_seconds, outage=True) as wait:
            self._description = insist(wait, self._role.description)
            dataset = self._config.dataset
            if dataset is not None:
                self._recording = insist(wait, lambda: read_dataset(dataset, self._description))
        device = torch_device(self._config.rollout.device)
        algorithm = self._config.algorithm.resolved()
        self._acting_config = algorithm.acting
        policies = build_policies(self._description.policies, self._config.policies, algorithm, seed=0)
        self._policies = {policy_id: policy.to(device) for policy_id, policy in policies.items()}

    def _register_again(self) -> str:
        """Redis was set back in time: what it knows of this worker may be wrong."""
        self.incarnation, self._epoch = self._role.flow.register(self.id, self.incarnation + 1)
        self._seq, self._refusals, self._ahead = 0, 0, None
        return "waited"

    def _bootstrap(self) -> None:
        """The first policy comes from the newest checkpoint, once `.ready` says that there is one."""
        with self._heartbeat.waiting(
            "the first checkpoint (.ready)", self._config.rollout.wait_deadline_seconds
        ) as wait:
            if self._leaving is not None:  # asked before this wait began
                raise KeyboardInterrupt
            poll(wait, lambda: self._heartbeat.outlast(self._load_newest, self._outage_seconds))

    def _load_newest(self) -> bool:
        checkpoints = self._role.checkpoints
        try:
            ready = checkpoints.marker(READY) is not None
            checkpoint = checkpoints.load_latest(only="policy.safetensors") if ready else None
        except CheckpointError as error:
            _LOGGER.warning("%s: cannot start from the newest checkpoint (%s); trying again", self.id, error)
            return False
        if checkpoint is not None:
            self._take(version_of(checkpoint))
        return checkpoint is not None

    def _trail(self, sample: Sample) -> tuple[bytes, int]:
        """What a successor needs to go on from here, and how many fragments it reaches back; nothing if too much."""
        step, rollout = self._sampler.trace(sample), self._config.rollout
        if step is None or not rollout.catch_up_seconds:
            return b"", 0
        blob = trail.encode(step)
        seconds = max(step.lengths) * sample.environment_seconds / rollout.fragment_steps
        if seconds > rollout.catch_up_seconds or step.fragments * len(blob) > trail.MOST_BYTES:
            return b"", 0
        return blob, step.fragments

    def _make_sampler(self, life: Life, past: Trail | None = None) -> Sampler | DatasetSampler:
        """Begins a life, or takes it up where `past` ends."""
        if self._recording is not None and (past.digest == self._recording.sha256 if past else self._from_data()):
            (policy_id,) = self._policies
            return DatasetSampler(self._recording, policy_id, self._config.environment.num_envs, life, past)
        environment = WatchedEnvironment(
            lambda: make_vector(self._config.environment, self._description), self._watchdog
        )
        try:
            return Sampler(environment, self._description, life, self._config.rollout.device, past, self._stages)
        except EnvironmentFailure:
            environment.close()
            raise

    def _start_environment(self) -> Sampler | DatasetSampler:
        """Where the predecessor's last fragment ended, if the environments come there again; else new episodes."""
        left, num_envs = self._log.left(self.id), self._config.environment.num_envs
        if left.tries >= trail.MOST_TRIES:
            why = f"{left.tries} of its predecessors died in the old ones"
        elif not left.pushed:  # nobody has seen the beginning yet
            return self._begin_anew(Life(self._config.seed, self._index, 0, 0))
        elif (past := trail.read(left.trail)) is None or not past.fits(self._description, num_envs):
            why = "no trail to the old ones is left (drained, a native environment, or rollout.catch_up_seconds)"
        elif (sampler := self._take_up(past)) is None:
            why = "its environment did not come back to where it was"
        else:
            return sampler
        emit(self._role.redis, self._role.run_id, "environment", f"{self.id} begins new episodes: {why}")
        return self._begin_anew(Life(self._config.seed, self._index, self.incarnation, 0))

    def _take_up(self, past: Trail) -> Sampler | DatasetSampler | None:
        """The predecessor's episodes; None where the environments do not come to where it stood."""
        self._log.trying(self.id, 1)
        try:
            sampler = self._make_sampler(past.life, past)
        except EnvironmentFailure as error:
            self._count_failure(error)
            return None
        self._log.trying(self.id, -1)
        if sampler.stands == past.digest:
            return sampler
        sampler.close()
        return None

    def _begin_anew(self, life: Life) -> Sampler | DatasetSampler:
        """Also an environment that raises in its first reset is started again, as often as is configured."""
        while True:
            try:
                return self._make_sampler(life)
            except EnvironmentFailure as error:
                self._count_failure(error)
                life = life.next()

    def _restart_environment(self, error: EnvironmentFailure) -> None:
        """Starts the environments again; raises what the environment raised where that happens too often."""
        self._count_failure(error)
        self._sampler.close()
        self._sampler = self._begin_anew(self._sampler.life.next())

    def _count_failure(self, error: EnvironmentFailure) -> None:
        """Tells what the environment raised; raises it where that happens too often without a fragment between."""
        _LOGGER.error("%s: %s", self.id, error)
        what = f"{self.id}: {headline(error)}"
        if self._failures.ended():
            raise EnvironmentFailure(
                f"{what}; {counted(self._failures.ends, 'failure')} in a row without a fragment between them, "
                f"environment.failures_allowed is {self._config.environment.failures_allowed}\n{error}"
            )
        emit(self._role.redis, self._role.run_id, "environment", f"{what}; starting it again")
