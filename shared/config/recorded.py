"""Recorded experience: what a run learns from instead of acting, or imitates beside it."""

from typing import ClassVar

from pydantic import Field

from stagecoach.shared.config.schema.section import Section


class DataEvaluationConfig(Section):
    """Off-policy evaluation: what the policy is worth, estimated from the recorded experience (`ope/…`)."""

    every_updates: int | None = Field(None, ge=0)
    """Updates between two evaluations; 0: none. By default 100 for policies with probabilities: those of TD3, DDPG
    and TD3+BC have none to compare. Each takes some seconds and changes nothing learned."""
    episodes: int = Field(100, ge=1)
    """How many of the dataset's episodes, evenly spaced, it evaluates on."""
    gradient_steps: int = Field(2000, ge=1)
    """With which the model behind `ope/dm`, `ope/dr` and `ope/sequential_dr` is fitted, anew each time."""


class RecordedConfig(Section):
    """Where recorded experience is read."""

    section: ClassVar[str]
    """Its name in the config, for messages."""
    path: str
    """A run's folder in the store (with archived experience; also `s3://…`), a Minari dataset's folder, an HDF5 file in
    D4RL's layout, or a CSV file; the same path on the machines of coordinator and workers (demonstrations: trainer)."""
    endpoint_url: str | None = None
    """The S3 endpoint of an archive at `s3://…`; none is AWS."""
    min_return: float | None = None
    """Learn only from whole episodes that returned at least this, for example to clone the best."""
    sha256: str | None = Field(None, pattern="^[0-9a-f]{64}$")
    """Of the transitions, in whichever format; a role that reads others does not begin. Filled in with a new run."""


class DatasetConfig(RecordedConfig):
    """Recorded experience that the rollout workers give to the trainer instead of stepping environments."""

    section: ClassVar[str] = "dataset"
    only_heatup: bool = False
    """Give it only in warm-up, to fill a replay buffer with what is recorded, and then step environments."""
    evaluation: DataEvaluationConfig = DataEvaluationConfig()


class DemonstrationsConfig(RecordedConfig):
    """Recorded experience that the trainer imitates while the run acts in its environment; docs/DEMONSTRATIONS.md."""

    section: ClassVar[str] = "demonstrations"
