"""The config's sections for recorded experience: what is trained from, and what is to be imitated."""

from __future__ import annotations

from typing import ClassVar, Literal

from pydantic import Field

from shared.section import Section

DatasetFormat = Literal["archive", "minari", "hdf5", "csv"]


class DataEvaluationConfig(Section):
    """Off-policy evaluation: what the policy is worth, estimated from the recorded experience (`ope/…`)."""

    every_updates: int | None = Field(None, ge=0)
    """Updates between two evaluations; 0: none. By default 100 for policies that sample their actions; those of DQN,
    Rainbow, TD3 and DDPG have no probabilities to compare. Each takes the trainer some seconds; none changes what is
    learnt."""
    episodes: int = Field(100, ge=1)
    """So many of the dataset's episodes, evenly spaced, are evaluated on."""
    gradient_steps: int = Field(2000, ge=1)
    """With which the model behind `ope/dm`, `ope/dr` and `ope/sequential_dr` is fitted, anew each time."""

    def refuse(self, algorithm: str, policy: str) -> None:
        """Raises `ValueError` where it is asked for and the algorithm's kind of policy has no probabilities."""
        if self.every_updates != 0 and self != DataEvaluationConfig() and policy in ("q_network", "deterministic"):
            raise ValueError(
                f"dataset.evaluation compares probabilities of actions, and the policy of algorithm.name={algorithm} "
                f"has none; leave it out, or use an algorithm whose policy samples (bc, iql, cql, sac)"
            )


class RecordedConfig(Section):
    """Where recorded experience is read."""

    section: ClassVar[str]
    """Its name in the config, for messages."""
    path: str
    """A run's folder in the store (with archived experience; also `s3://…`), a Minari dataset's folder, an HDF5 file in
    D4RL's layout, or a CSV file. The same on each machine that reads it: the coordinator's, and those of the workers
    (of demonstrations: those of the trainer and its ranks)."""
    format: Literal["auto", DatasetFormat] = "auto"
    """What is there; `auto` looks."""
    endpoint_url: str | None = None
    """The S3 endpoint of an archive at `s3://…`; none is AWS."""
    min_return: float | None = None
    """Learn only from whole episodes that returned at least this: what a clone shall do, for example."""
    sha256: str | None = Field(None, pattern="^[0-9a-f]{64}$")
    """Of the transitions themselves, whatever their format. Filled in when the run is made; who reads something else
    refuses to begin. Given by hand, it pins a dataset."""


class DatasetConfig(RecordedConfig):
    """Recorded experience that the rollout workers give to the trainer instead of stepping environments."""

    section: ClassVar[str] = "dataset"
    only_heatup: bool = False
    """Give it only in heat-up, as far as `heatup` goes, and then step environments: so a replay memory begins with what
    is recorded."""
    evaluation: DataEvaluationConfig = DataEvaluationConfig()


class DemonstrationsConfig(RecordedConfig):
    """Recorded experience that the trainer imitates while the run acts in its environment; docs/DEMONSTRATIONS.md."""

    section: ClassVar[str] = "demonstrations"
