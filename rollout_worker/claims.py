"""Claims of a worker, each the permission to act one fragment (shared/protocol/flow_control.py), and its pushes.

A fragment, its action trace and the claim for the next one travel in one round trip. The log's replies to a push
(shared/protocol/experience_log.py: PushReply):

| reply | meaning | next action of the worker |
|---|---|---|
| `pushed`, `duplicate` | it is in the log, once | acts the next one |
| `stale` | no credit: its claim was returned; counted as dropped | acts another fragment with the same number |
| `superseded` | a newer incarnation is registered | ends |
| `epoch` | Redis was rolled back | registers again, and restarts its numbers |
| `finished` | the run is over | ends |
"""

from functools import partial

from stagecoach.rollout_worker.sampling import action_trace
from stagecoach.rollout_worker.sampling.action_trace import ActionTrace
from stagecoach.rollout_worker.sampling.sampler import Sample
from stagecoach.rollout_worker.watchdog import Watchdog
from stagecoach.shared.base.errors import ShardFull, ShardUnavailable
from stagecoach.shared.config.run_config import Config
from stagecoach.shared.experience import fragment
from stagecoach.shared.experience.fragment import Fragment
from stagecoach.shared.protocol.experience_log import ExperienceLog, PushReply, Settled
from stagecoach.shared.protocol.flow_control import Claim, ClaimReply, Flow, RunState
from stagecoach.shared.protocol.heartbeat import Heartbeat, retry_until_deadline

_WAITS = {
    ClaimReply.WAIT_CREDIT: "credit",
    ClaimReply.WAIT_LOG: "room in the log (a durable checkpoint frees it)",
    ClaimReply.WAIT_MEMORY: "memory in Redis (a durable checkpoint frees some)",
}


class Claims:
    """Claims of one worker, one at a time; a push requests the next one in the same round trip."""

    def __init__(
        self, config: Config, worker: str, flow: Flow, log: ExperienceLog, heartbeat: Heartbeat, watchdog: Watchdog
    ) -> None:
        self._config, self._worker, self._flow, self._log = config, worker, flow, log
        self._heartbeat, self._stages, self._watchdog = heartbeat, heartbeat.stages, watchdog
        self.incarnation = -1
        """−1 until `register`."""
        self.epoch = -1
        """Epoch of the trainer whose policy versions the worker acts with."""
        self.seq = 0
        """Number of the next fragment."""
        self._stale_pushes = 0
        self._ahead: Claim | None = None
        """Claim for the next fragment, if the last push requested it."""

    def register(self) -> None:
        """Begins the next incarnation, also if a rolled-back Redis knows only an older one."""
        self.incarnation, self.epoch = self._flow.register(self._worker, self.incarnation + 1)
        self.seq, self._stale_pushes, self._ahead = 0, 0, None

    def next(self, wait_seconds: float) -> Claim:
        """Requests the next claim; waits for credit, in sleeps of at most `wait_seconds`. Raises `WorkerSuperseded`."""
        claim, self._ahead = self._ahead, None
        if claim is None or not (claim.granted or claim.waiting):
            claim = self._request()
        while wait_seconds > 0 and claim.waiting and self._watchdog.outgrown is None:
            reply = claim.reply
            with self._heartbeat.waiting(_WAITS[reply], self._config.rollout.wait_deadline_seconds) as wait:
                while claim.reply is reply and self._watchdog.outgrown is None:
                    wait.check()
                    self._flow.wait_for_wakeup(claim, wait_seconds)
                    claim = self._request()
        return claim

    def _request(self) -> Claim:
        return self._flow.claim(self._worker, self.incarnation, self.seq)

    def push(
        self, claim: Claim, made: Fragment, sample: Sample, traced: ActionTrace | None, wait_seconds: float,
        clients: Settled | None = None,
    ) -> PushReply:  # fmt: skip
        """Pushes the next fragment; returns the log's reply.

        Waits for a shard that is unavailable or full. With `wait_seconds` 0 (the one-process mode, in which the trainer
        has to take its turn to free memory) a full one raises `ShardFull`.
        """
        with self._stages.during("encode"):
            blob = fragment.encode(made, self._config.rollout.compression)
            trace, length = self._encoded_trace(sample, traced)
        # in the one-process mode the trainer takes its turn first, so that the claim is for its next version
        ahead = self._flow.claiming(self._worker, self.incarnation, self.seq + 1) if wait_seconds > 0 else None
        place = self._worker, self.incarnation, self.seq, claim.epoch, sample.transitions
        push = partial(
            self._log.push, *place, blob, trace, length, ahead, self._stale_pushes, memory=claim.memory,
            clients=clients,
        )  # fmt: skip
        try:
            with self._stages.during("push"):
                reply = push()
        except ShardUnavailable as error:
            if isinstance(error, ShardFull) and wait_seconds <= 0:
                raise
            reply = self._push_when_shard_is_back(push)
        if reply in (PushReply.PUSHED, PushReply.DUPLICATE):
            self.seq += 1
            self._ahead = ahead.reply if ahead is not None else None
        elif reply is PushReply.STALE:  # the next fragment keeps the number: the claim beyond it is returned
            self._stale_pushes += 1
            if ahead is not None:
                self.release()
        return reply

    def _push_when_shard_is_back(self, push: partial[PushReply]) -> PushReply:
        def again() -> PushReply:
            return PushReply.FINISHED if self._flow.read().state is RunState.FINISHED else push()

        with self._heartbeat.waiting("a Redis shard", self._config.redis.retry_seconds, outage=True) as wait:
            return retry_until_deadline(wait, again, (ShardUnavailable,), longest_pause_seconds=1.0)

    def _encoded_trace(self, sample: Sample, traced: ActionTrace | None) -> tuple[bytes, int]:
        """Returns the encoded trace and the number of fragments it spans; empty if too slow to repeat or too large."""
        rollout = self._config.rollout
        if traced is None or not rollout.catch_up_seconds:
            return b"", 0
        blob = action_trace.encode(traced)
        seconds = max(traced.lengths) * sample.environment_seconds / rollout.fragment_steps
        too_much = seconds > rollout.catch_up_seconds or traced.fragments * len(blob) > action_trace.MOST_BYTES
        return (b"", 0) if too_much else (blob, traced.fragments)

    def release(self) -> None:
        """Returns the claims of this incarnation, but none of a successor's."""
        if self.incarnation >= 0:
            self._flow.release(f"{self._worker}:{self.incarnation}")
