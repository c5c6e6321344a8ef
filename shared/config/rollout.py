"""Sections of acting: rollout workers, the flow of fragments, warm-up."""

from typing import Annotated, Literal, Self

from pydantic import Field, model_validator

from stagecoach.shared.config.schema.section import Section, short_for
from stagecoach.shared.experience.counters import Duration, DurationField

MIN_LOG_BYTES = 1 << 20


def window(max_policy_lag: int, fragments_per_update: int) -> int:
    """Returns the most fragments that may be in flight: (L + 1) · K, as in shared/protocol/lua/include/window.lua."""
    return (max_policy_lag + 1) * fragments_per_update


class RolloutConfig(Section):
    """Rollout workers and the flow of fragments."""

    workers: int = Field(2, ge=1, le=10_000)
    """Initial number of rollout workers; `stagecoach scale` changes it while the run is live."""
    scaling: Literal["fixed", "auto"] = "fixed"
    """`auto`: adds workers while the trainer waits for experience, removes workers while they wait for credit. Not for
    `--inline`."""
    min_workers: int = Field(1, ge=1, le=10_000)
    """Minimum number of workers under `auto`."""
    max_workers: int | None = Field(None, ge=1, le=10_000)
    """Maximum number of workers under `auto`; by default the capacity of the cluster (one per core with embedded Ray).
    At most (`max_policy_lag` + 1) × `fragments_per_update` workers can hold a claim."""
    scaling_window_seconds: float = Field(10.0, ge=2)
    """Time window of the waits that `auto` decides by; heartbeats report them every second."""
    fragment_steps: int = Field(64, ge=1)
    """Steps of each environment in a fragment (T)."""
    complete_episodes: bool = False
    """Ends fragments at ends of episodes (RLlib's `batch_mode: complete_episodes`, Coach's `act_for_full_episodes`):
    after `fragment_steps` steps, each environment finishes its episode and waits. One policy version acts the whole
    episode. Requires `environment.max_episode_steps`, which bounds a fragment (the registered limit does not count),
    and one agent; not for `native`. A replay buffer's capacity includes the rows that stay empty."""
    fragments_per_update: int = Field(4, ge=1)
    """Number of fragments per update (K), for any number of workers."""
    max_policy_lag: int = Field(0, ge=0)
    """Maximum age of a consumed fragment in policy versions (L). 0 is lockstep (on-policy); from 1 on, acting and
    learning overlap. At most (L + 1) · K fragments are in flight: with a replay buffer, raise it for more workers."""
    lease_seconds: float = Field(30.0, gt=0)
    """Lifetime of a claim, after which another worker may take it."""
    max_log_bytes: int = Field(256 << 20, ge=MIN_LOG_BYTES)
    """Maximum size of the experience log in Redis. At half of it a checkpoint is due; at all of it claims wait."""
    compression: Literal["none", "lz4", "zstd"] = "none"
    """Compression of image columns; lz4 pays off when the network is slower than the CPU."""
    wait_deadline_seconds: float = Field(600.0, gt=0)
    """Longest wait of a worker for credit, or of the trainer for experience, before the run fails."""
    num_cpus: float = Field(0.5, ge=0)
    """Ray CPUs reserved for each worker; a fraction lets workers share a core."""
    placement: Literal["spread", "pack"] = "spread"
    """`spread`: distributes workers over machines; `pack`: fills machines one by one, so that an autoscaler can remove
    others."""
    torch_threads: int = Field(1, ge=1)
    """PyTorch threads of each worker; 1, so that workers do not compete for cores."""
    device: str = Field("cpu", pattern=r"^(cpu|cuda(:\d+)?)$")
    """Device of the workers: `cpu`, or `cuda` for large networks (then set `num_gpus` as well)."""
    num_gpus: float = Field(0.0, ge=0)
    """Ray GPUs reserved for each worker."""
    catch_up_seconds: float = Field(5.0, ge=0)
    """Longest time for a restarted worker to resume its episodes, by repeating their actions; beyond it, and with 0, it
    starts new episodes."""
    silent_seconds: float = Field(30.0, gt=10)
    """Time without a heartbeat after which a role is restarted."""
    service_silent_seconds: float = Field(60.0, gt=0)
    """Time without an answer after which an embedded Redis, S3 server or Ray is restarted with its data. Waits for the
    disk, and time in which the whole machine was suspended, do not count."""
    restarts_allowed: int = Field(4, ge=0)
    """Consecutive restarts without progress of a role, an embedded service or embedded Ray, before the run fails.
    Progress is a fragment (worker), a score (evaluator), or a log entry that was learned or dropped (others). Outages
    do not count. After three deaths within a fragment a worker starts new episodes, so allow at least four."""
    memory_limit_bytes: int | None = Field(None, ge=1 << 28)
    """Resident memory of a worker and its children above which it is replaced after its fragment; at 1.5 times the
    limit it is killed at once. For environments that leak; a worker itself takes 300 MB. Linux only."""

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
    """Warm-up: fills the normalizers and the replay buffer before learning starts."""

    duration: DurationField = Duration(0, "env_steps")
    """Length of the warm-up, which counts neither in `stop_at` nor in schedules. Algorithms that learn from a replay
    buffer while they act default to 1000 env_steps (Stable-Baselines3: 100; usual for MuJoCo and Atari: 5,000 to
    25,000)."""
    acting: Literal["random", "policy"] = "random"
    """`random`: uniformly random actions. `policy`: the initial network with the algorithm's initial exploration."""

    @model_validator(mode="after")
    def _counts_acting(self) -> Self:
        if self.duration.unit not in ("env_steps", "episodes") and self.duration.amount:
            raise ValueError(f"duration={str(self.duration)!r}: warm-up has no updates; use env_steps or episodes")
        return self


HeatupField = Annotated[HeatupConfig, short_for("duration", str, Duration)]
"""The section, or its duration alone."""
