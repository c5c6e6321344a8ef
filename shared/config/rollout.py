"""The config's sections for acting: rollout workers, the flow of fragments, warm-up."""

from typing import Annotated, Literal, Self

from pydantic import Field, model_validator

from stagecoach.shared.config.schema.section import Section, short_for
from stagecoach.shared.experience.counters import Duration, DurationField

MIN_LOG_BYTES = 1 << 20


def window(max_policy_lag: int, fragments_per_update: int) -> int:
    """Returns the most fragments that may be in flight: (L + 1) · K, as in shared/protocol/lua/include/window.lua."""
    return (max_policy_lag + 1) * fragments_per_update


class RolloutConfig(Section):
    """Rollout workers and the flow of fragments (DESIGN: one rule, counted in fragments)."""

    workers: int = Field(2, ge=1, le=10_000)
    """Rollout workers at the start; `stagecoach scale` changes it while the run is live."""
    scaling: Literal["fixed", "auto"] = "fixed"
    """`auto`: more workers while the trainer waits for experience, fewer while they wait for credit. Not `--inline`."""
    min_workers: int = Field(1, ge=1, le=10_000)
    """The fewest that `auto` goes down to."""
    max_workers: int | None = Field(None, ge=1, le=10_000)
    """The most that `auto` goes up to; by default as many as the cluster has room for (one for each core with embedded
    Ray). In any case no more than can hold a claim: (`max_policy_lag` + 1) × `fragments_per_update`."""
    scaling_window_seconds: float = Field(10.0, ge=2)
    """`auto` decides from what was waited for in this time; heartbeats, a second apart, tell."""
    fragment_steps: int = Field(64, ge=1)
    """Steps of each environment in a fragment (T)."""
    complete_episodes: bool = False
    """Fragments end where episodes do (RLlib's `batch_mode: complete_episodes`, Coach's `act_for_full_episodes`): after
    `fragment_steps` steps each environment finishes its current episode, and waits. One policy version acts all of an
    episode. It needs `environment.max_episode_steps`, which bounds a fragment (the registered limit does not count),
    and one agent; not `native`. A replay buffer counts rows that stay empty in its capacity."""
    fragments_per_update: int = Field(4, ge=1)
    """Fragments that one update consumes (K), whatever the number of workers."""
    max_policy_lag: int = Field(0, ge=0)
    """L: 0 is lockstep (on-policy); from 1 on acting and learning overlap, and no consumed fragment is older. At most
    (L + 1) · K fragments are acted or learned at once: with a replay buffer, raise it for more workers."""
    lease_seconds: float = Field(30.0, gt=0)
    """A claim not honored within this time is given to another worker."""
    max_log_bytes: int = Field(256 << 20, ge=MIN_LOG_BYTES)
    """Bound of the experience log in Redis, in bytes; at half of it a checkpoint is due, at all of it claims wait."""
    compression: Literal["none", "lz4", "zstd"] = "none"
    """Compression of image columns; lz4 pays off when the network is slower than the processor."""
    wait_deadline_seconds: float = Field(600.0, gt=0)
    """The longest that a worker waits for credit, or the trainer for experience, before it gives up and says so."""
    num_cpus: float = Field(0.5, ge=0)
    """Ray CPUs reserved for each worker; a fraction lets workers share a core."""
    placement: Literal["spread", "pack"] = "spread"
    """`spread`: over machines; `pack`: on the fullest one that has room, so that an autoscaler can take others away."""
    avoid_trainer_node: bool = False
    """Keep workers off the trainer's machine; where it moves, they make way. Without another one they wait."""
    torch_threads: int = Field(1, ge=1)
    """PyTorch threads in each worker; 1, so that workers don't fight for cores."""
    device: str = Field("cpu", pattern=r"^(cpu|cuda(:\d+)?)$")
    """Where workers act: `cpu`, or `cuda` for large networks (then set `num_gpus` as well)."""
    num_gpus: float = Field(0.0, ge=0)
    """Ray GPUs reserved for each worker."""
    catch_up_seconds: float = Field(5.0, ge=0)
    """A worker that is started again takes up its episodes where its last fragment ended, by doing their actions again,
    unless that would take longer than this; then, and with 0, it begins new episodes."""
    silent_seconds: float = Field(30.0, gt=10)
    """A role whose heartbeat has stopped for this long is ended and started anew, whatever it is."""
    service_silent_seconds: float = Field(60.0, gt=0)
    """An embedded Redis, S3 server or Ray that was asked for this long and has not answered is ended and started again
    (over its data). Time in which it waits for the disk does not count, nor time in which this machine stood still."""
    restarts_allowed: int = Field(4, ge=0)
    """How often in a row a role, an embedded service or embedded Ray may end without progress before the run gives up:
    without a fragment (worker), a score (evaluator), or a log entry learned or dropped (the others). An outage does not
    count. After three deaths within one fragment a worker begins new episodes, which less than four never tries."""
    memory_limit_bytes: int | None = Field(None, ge=1 << 28)
    """A worker whose process and children hold more than this (resident, in bytes) is replaced after its fragment; at
    half as much again it is ended at once. For environments that leak; a worker itself takes 300 MB. Linux only."""

    @model_validator(mode="after")
    def _bounds_of_scaling(self) -> Self:
        least, most = self.min_workers, self.max_workers
        bounds = f"rollout.min_workers={least} and rollout.max_workers={most}"
        if most is not None and least > most:
            raise ValueError(f"nothing is between {bounds}; lower the first")
        if self.scaling == "auto" and not least <= self.workers <= (most or self.workers):
            raise ValueError(f"rollout.workers={self.workers}, where auto begins, is not between {bounds}")
        return self


class HeatupConfig(Section):
    """Warm-up: the normalizers and the replay buffer take experience in before anything is learned from it."""

    duration: DurationField = Duration(0, "env_steps")
    """How much is acted. It counts neither in `stop_at` nor in schedules. Algorithms that learn from a replay buffer
    while they act have 1000 env_steps by default (Stable-Baselines3 has 100; 5,000 to 25,000 are usual for MuJoCo and
    for Atari)."""
    acting: Literal["random", "policy"] = "random"
    """`random`: uniformly random actions. `policy`: the untrained (or loaded) network with the algorithm's exploration,
    as at its start."""


HeatupField = Annotated[HeatupConfig, short_for("duration", str, Duration)]
"""The section, or its duration alone."""
