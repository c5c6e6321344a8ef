"""Sections of recorded experience, which a run learns from or imitates."""

from typing import ClassVar

from pydantic import Field

from stagecoach.shared.config.schema.section import Section


class DataEvaluationConfig(Section):
    """Off-policy evaluation: estimates the policy's value from the recorded experience (`ope/…`)."""

    every_updates: int | None = Field(None, ge=0)
    """Updates between two evaluations; 0: none. By default 100, for policies with action probabilities (not those of
    TD3, DDPG and TD3+BC). Each takes some seconds and does not affect learning."""
    episodes: int = Field(100, ge=1)
    """Number of episodes to evaluate on, evenly spaced in the dataset."""
    gradient_steps: int = Field(2000, ge=1)
    """Gradient steps that fit the model behind `ope/dm`, `ope/dr` and `ope/sequential_dr` in each evaluation."""


class RecordedConfig(Section):
    """Location of recorded experience."""

    section: ClassVar[str]
    """Name of the section in messages."""
    path: str
    """A run's folder in the store (with archived experience; also `s3://…`), a Minari dataset's folder, an HDF5 file in
    D4RL's layout, or a CSV file; the same path on the machines of coordinator and workers (demonstrations: trainer)."""
    endpoint_url: str | None = None
    """S3 endpoint of an archive at `s3://…`; the default is AWS."""
    min_return: float | None = None
    """Minimum return of the whole episodes to learn from, for example to clone the best."""
    sha256: str | None = Field(None, pattern="^[0-9a-f]{64}$")
    """SHA-256 of the transitions in any format, filled in when the run starts; a role that reads other data fails."""


class DatasetConfig(RecordedConfig):
    """Recorded experience that workers send to the trainer instead of stepping environments."""

    section: ClassVar[str] = "dataset"
    only_heatup: bool = False
    """Use the data only in warm-up, to fill a replay buffer, and then step environments."""
    evaluation: DataEvaluationConfig = DataEvaluationConfig()


class DemonstrationsConfig(RecordedConfig):
    """Recorded experience to imitate while the run acts in its environment (docs/guides/demonstrations.md)."""

    section: ClassVar[str] = "demonstrations"
