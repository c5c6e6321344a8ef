"""The tasks: which algorithm is to reach what, where, and within how many env steps.

They stand in `table/*.yaml`, a file for each family. To add one: write an entry (`NAME: {…}`, the fields are those
of `Task`), try it with `make learning LEARNING="--only NAME --seeds 1 --mode inline"`, then run all its seeds and
commit what comes into docs/learning/. What is the same for all (seed, workers, 20 greedy episodes for each checkpoint,
env steps at which the run ends) is put in by `Task.settings`; an entry's `config` says the rest and wins. With
`fast: true` it is part of `make nightly` (one seed, inline, ended as soon as it has reached the gate).
"""

from __future__ import annotations

import hashlib
import importlib.util
import json
from pathlib import Path
from typing import Any, Literal

from pydantic import Field

from stagecoach.shared.config.loading import parse_config, parse_yaml
from stagecoach.shared.config.run_config import Config
from stagecoach.shared.config.schema.section import Section

Mode = Literal["inline", "distributed", "sb3"]
MODES: tuple[Mode, ...] = ("inline", "distributed")
PEERS: tuple[Mode, ...] = ("sb3",)
"""Stable-Baselines3, with the same settings."""
TABLE = Path(__file__).parent / "table"


class PeerSettings(Section):
    """What Stable-Baselines3 is given: `benchmarks.learning.peer` trains with it."""

    algorithm: Literal["DQN", "PPO", "SAC", "TD3"]
    num_envs: int = Field(1, ge=1)
    normalize: bool = False
    """Whether VecNormalize is around the environments."""
    arguments: dict[str, Any] = {}
    """Of its class; a value `[linear, start]` falls to 0 at the end."""
    policy_kwargs: dict[str, Any] = {}
    every: int = Field(ge=1)
    """Env steps between two evaluations."""


class Task(Section):
    """One line of the table."""

    name: str
    """What `--only` asks for; it names the folder of its data."""
    family: str = ""
    """The name of its file in the table."""
    algorithm: str
    """As the report shows it."""
    environment: str
    """As the report shows it."""
    reach: float
    """The gate: the mean over the last checkpoint's episodes. Greedy ones, where `config` does not say otherwise."""
    measure: Literal["mean_return", "success_rate"] = "mean_return"
    """What of an evaluation counts."""
    judge: str = ""
    """In place of an evaluation: a function of benchmarks/learning/scores.py of the checkpoint's policy and of the
    snapshots in its league. More is better, so what a best response wins is below 0."""
    policy: str = "default"
    """Whom it judges."""
    within: int = Field(ge=1)
    """Env steps of training after which the run ends; warm-up and the rest of the last update come on top."""
    negative: bool = False
    """A negative control: it must not reach the gate."""
    reference: str
    """What others reach."""
    source: str
    """Who says so."""
    note: str = ""
    """Why it does not reach its gate, as far as that is known."""
    minutes: float = Field(gt=0)
    """What a run takes on two cores, about; short ones come first, and a budget is planned with it."""
    seeds: int = Field(5, ge=1)
    """How many the report asks for; fewer only where a run takes hours."""
    modes: tuple[Mode, ...] = MODES
    """In which modes it runs."""
    fast: bool = False
    """Whether it is part of `make nightly`."""
    needs: tuple[str, ...] = ()
    """Modules of extras; without them the task is left out, and that is said."""
    config: dict[str, Any]
    """The run's config, without what all tasks have in common."""
    teacher: dict[str, Any] | None = None
    """The config of another run, made first (inline, same seed): all that it went through is this run's `taught_by`."""
    taught_by: Literal["dataset", "demonstrations"] = "dataset"
    """The section of the config that names the teacher's experience."""
    sb3: PeerSettings | None = None
    """The same for Stable-Baselines3, which is run as often (`--beside sb3`)."""

    @property
    def missing(self) -> list[str]:
        """What it needs and this machine has not."""
        return [module for module in self.needs if importlib.util.find_spec(module) is None]

    @property
    def settings(self) -> dict[str, Any]:
        """The config as plain data, without seed and folder."""
        taught = {} if self.teacher is None else {self.taught_by: {"path": "of the teacher"}}
        return _merged(
            taught
            | {
                "rollout": {"workers": 2},
                "checkpoint": {"keep_last": 1_000_000},
                "evaluation": {"episodes": 20, "num_envs": 20},
                "metrics": {"writers": ["csv"]},
                "stop_at": {"env_steps": self.within},
            },
            self.config,
        )

    @property
    def last_episodes(self) -> int:
        """In the evaluation of the last checkpoint, on starts of its own: a score is that of the policy alone."""
        return max(100, int(self.settings["evaluation"]["episodes"]))

    def digest(self, mode: Mode, seed: int) -> str:
        """Of all that decides what a run shows, defaults included: a result that was made otherwise does not count."""
        decisive: list[Any] = [self.within, self.measure, self.judge, self.policy]
        decisive += [self.peer_data(seed)] if mode in PEERS else [self.settings, self.parse(seed).hash()]
        if self.teacher is not None:
            decisive += [self.teacher, parse_config(self.teacher_data(seed, Path("runs"))).hash()]
        return hashlib.sha256(json.dumps(decisive, sort_keys=True).encode()).hexdigest()[:16]

    def data(self, seed: int, runs_dir: Path, *, until_reached: bool = False) -> dict[str, Any]:
        """The config of one run as plain data; it raises nothing. `until_reached` ends it at the gate."""
        more: dict[str, Any] = {"stop_at": {"mean_return": self.reach}} if until_reached else {}
        if self.teacher is not None:
            teacher = self.teacher_id(seed)
            more[self.taught_by] = {"path": str(runs_dir / teacher / "s3" / "stagecoach" / teacher)}
        return {"seed": seed, "runs_dir": str(runs_dir)} | _merged(self.settings, more)

    def peer_data(self, seed: int) -> dict[str, Any] | None:
        """All that `benchmarks.learning.peer` is given for one run, as plain data; None without `sb3`."""
        if self.sb3 is None:
            return None
        environment, evaluation = (self.settings[section] for section in ("environment", "evaluation"))
        return self.sb3.model_dump(mode="json") | {
            "environment": environment["id"], "kwargs": environment.get("kwargs", {}), "seed": seed,
            "env_steps": self.within, "episodes": evaluation["episodes"], "at_the_end": self.last_episodes,
        }  # fmt: skip

    def teacher_id(self, seed: int) -> str:
        """Name of the teacher's run in the folder of runs."""
        return f"{self.name}-teacher-{seed}"

    def teacher_data(self, seed: int, runs_dir: Path) -> dict[str, Any]:
        """As `data`, of the teacher's run."""
        return {"seed": seed, "runs_dir": str(runs_dir), "archive": "all", **(self.teacher or {})}

    def parse(self, seed: int = 1, runs_dir: Path = Path("runs")) -> Config:
        """The config of one run; raises `ConfigError`."""
        return parse_config(self.data(seed, runs_dir))


def load_tasks(folder: Path = TABLE) -> dict[str, Task]:
    """All tasks by name, shortest first."""
    found: dict[str, Task] = {}
    for path in sorted(folder.glob("*.yaml")):
        for name, entry in parse_yaml(path.read_text(), str(path)).items():
            if name in found:
                raise ValueError(f"{path}: there is a task {name!r} already")
            found[name] = Task.model_validate({"name": name, "family": path.stem, **entry})
    return dict(sorted(found.items(), key=lambda item: (item[1].minutes, item[0])))


def _merged(below: dict[str, Any], above: dict[str, Any]) -> dict[str, Any]:
    """`above` wins; sections are put together, other values replaced."""
    both = below | above
    for name in below.keys() & above.keys():
        if isinstance(below[name], dict) and isinstance(above[name], dict):
            both[name] = _merged(below[name], above[name])
    return both
