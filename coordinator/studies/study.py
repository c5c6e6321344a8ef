"""`stagecoach.tune`: trains the trials of a study by generations, and resumes it exactly.

A trial is a run (`STUDY-0003`, with several seeds `STUDY-0003-seed-7`) in a process of its own. Everything that decides
what comes next is in the records of the study's folder and in the stores of its runs, so a study that was killed
continues as if it had not been.
"""

import errno
import importlib.metadata
import json
import math
import os
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from stagecoach.coordinator.catalog.run_files import CONFIG, is_locked
from stagecoach.coordinator.run_access.run_processes import command_of, run_processes
from stagecoach.coordinator.studies.population import next_trials
from stagecoach.coordinator.studies.scores import Unscored, last_checkpoint, score_of, why_unfinished
from stagecoach.coordinator.studies.study_config import StudyConfig, check_study, read_study
from stagecoach.coordinator.studies.suggestions import plot_study, require_optuna, suggest
from stagecoach.coordinator.studies.trial_record import BEST, StudyRecord, Trial
from stagecoach.shared.base.errors import ConfigError, StagecoachError, UserError
from stagecoach.shared.base.local_disk import lacks_room
from stagecoach.shared.base.printable import figure
from stagecoach.shared.base.user_code import extend_imports
from stagecoach.shared.config.loading import dump_config
from stagecoach.shared.config.presets import config_file
from stagecoach.shared.config.run_config import Config
from stagecoach.shared.config.schema.plain_data import plain
from stagecoach.shared.config.schema.validation import validated
from stagecoach.shared.protocol.heartbeat import Wait, poll
from stagecoach.shared.protocol.keys import check_run_id

_SIGNALED = 128
"""Exit codes above are signals."""
_KILLS_ALLOWED, _FAILURES_ALLOWED = 5, 1
_NEEDED_BYTES = 1 << 20
_LEFT_SECONDS = 120.0
Report = Callable[[str], None]


class StudyInterrupted(StagecoachError):
    """A signal ended the study before its last trial; the same command continues."""


@dataclass(frozen=True)
class Study:
    """A finished study."""

    name: str
    folder: Path
    config: StudyConfig
    trials: Sequence[Trial]
    """All trials by number: parameters, state (`complete`, `pruned`, `failed`), score."""
    best: Trial
    """The complete trial with the best score, the first of equals."""
    best_config: Config
    """The config with the best trial's parameters, as in `best_path`."""

    @property
    def best_path(self) -> Path:
        """The best config as a file for `stagecoach train`."""
        return self.folder / BEST

    def plot(self, folder: str | Path) -> list[Path]:
        """Draws Optuna's plots with matplotlib: `study.plot("plots")`.

        Args:
            folder: Where to write; it is created.

        Returns:
            The files: history, slices and, if there are enough trials, importances.

        Raises:
            UserError: matplotlib is not installed.
        """
        return plot_study(self.config, self.trials, Path(folder))


def tune(
    study: str | Path | Mapping[str, Any], *, name: str | None = None, runs_dir: str | Path | None = None,
    parallel: int | None = None, report: Report = lambda line: None,
) -> Study:  # fmt: skip
    """Runs a study, or continues it; returns when all trials have ended.

    Args:
        study: A study's file, or its fields as a dict (`config` is then relative to the current folder).
        name: The study's name, by default the file's; its trials are the runs NAME-0000, NAME-0001, …
        runs_dir: Folder of the runs and of the study, by default the config's.
        parallel: Runs that train at a time, instead of the study's `parallel`.
        report: Called with a line when a run begins, ends or is scored.

    Returns:
        The trials, the best of them, and its config.

    Raises:
        ConfigError: The study has mistakes; nothing was started.
        UserError: Optuna is missing, or the folder has another study.
        StudyInterrupted: A signal ended it; call it again to continue.
        StagecoachError: All trials failed, or the disk is full.
    """
    if isinstance(study, Mapping):
        found, folder, name = validated(StudyConfig, plain(study)), Path.cwd(), name or "study"
    else:
        path = Path(study)
        found, folder, name = read_study(path), path.expanduser().resolve().parent, name or path.stem
    require_optuna()
    config_path = found.config_path(folder)
    extend_imports([str(Path.cwd()), str(config_file(config_path).resolve().parent)])
    base = found.base(folder)
    if runs_dir is not None:
        base = base.replace("runs_dir", str(runs_dir))
    check_study(found, base)
    where = base.runs_dir.expanduser().resolve() / check_run_id(name)
    if (where / CONFIG).exists():
        raise UserError(f"{where} is a run; choose another --name")
    record = StudyRecord(where)
    with record.locked():
        record.check_same(_identity(found, base))
        return _Tuning(found, base, config_path, record, parallel or found.parallel, report).run()


def _identity(study: StudyConfig, base: Config) -> dict[str, Any]:
    """Everything that decides the trials and their results; they may become more, unless they share the training."""
    more = {"trials"} if study.population is None else ()
    return {
        "study": study.model_dump(mode="json", exclude={"config", "set", "parallel", *more}),
        "config": base.model_dump(mode="json", exclude={"runs_dir"}),
        "optuna": importlib.metadata.version("optuna"),
    }


class _Tuning:
    """A study at work."""

    def __init__(
        self, study: StudyConfig, base: Config, config_path: Path, record: StudyRecord, parallel: int, report: Report
    ) -> None:
        self._study, self._base, self._config_path, self._record = study, base, config_path, record
        self._parallel, self._report = parallel, report
        self._name, self._runs_dir = record.folder.name, record.folder.parent
        assert base.stop_at.env_steps is not None
        self._steps = base.stop_at.env_steps
        self._every = self._steps // study.evaluations

    def run(self) -> Study:
        trials = {trial.number: trial for trial in self._record.trials()}
        size = self._study.generation
        for generation in range(self._study.generations):
            numbers = range(generation * size, (generation + 1) * size)
            if missing := [number for number in numbers if number not in trials]:
                suggested = self._suggested(generation, [trials[number] for number in range(numbers.start)])
                for trial in self._train_generation(suggested, self._goals(generation)):
                    if trial.number in missing:
                        self._record.add(trial)
                        trials[trial.number] = trial
            said = [trials[number] for number in (numbers if self._study.population else range(numbers.stop))]
            if not any(trial.state == "complete" for trial in said):
                raise StagecoachError(
                    f"all {len(said)} trials failed, the first with: {said[0].error}. Correct that, delete "
                    f"{self._record.folder} and its runs, and start again"
                )
        all_trials = [trials[number] for number in range(self._study.trials)]
        trained = all_trials[-size:] if self._study.population else all_trials
        best = self._ranked(trial for trial in trained if trial.state == "complete")[0]
        config = self._base.replace(best.parameters)
        self._record.write(BEST, dump_config(config))
        return Study(self._name, self._record.folder, self._study, all_trials, best, config)

    def _suggested(self, generation: int, former: Sequence[Trial]) -> list[Trial]:
        """Returns a generation's trials before their training."""
        if self._study.population is None or not former:
            first, found = generation * self._study.generation, suggest(self._study, former, generation)
            return [Trial(number=n, state="complete", parameters=its) for n, its in enumerate(found, first)]
        last = former[-self._study.generation :]
        ranked = self._ranked(trial for trial in last if trial.state == "complete")
        return next_trials(self._study, ranked, [trial for trial in last if trial.state != "complete"])

    def _goals(self, generation: int) -> list[int]:
        """Env steps at which a generation's trials are compared; the last ends them."""
        if self._study.population is not None:
            return [self._steps * (generation + 1) // self._study.generations]
        return [*(self._study.pruning.at if self._study.pruning else ()), self._steps]

    def _ranked(self, trials: Iterable[Trial]) -> list[Trial]:
        """Best first; of equal scores the lower number."""
        sign = -1 if self._study.objective.maximize else 1
        return sorted(trials, key=lambda trial: (sign * (trial.score or 0.0), trial.number))

    def _train_generation(self, suggested: Sequence[Trial], goals: Sequence[int]) -> list[Trial]:
        """Trains a generation's trials as far as they get; returns their results by number."""
        ended: dict[int, Trial] = {}
        alive = {trial.number: trial for trial in suggested}
        for goal in goals:
            found = self._train(alive, goal)
            for number, result in found.items():
                trial = alive[number]
                if isinstance(result, str):
                    del alive[number]
                    ended[number] = trial.model_copy(update={"state": "failed", "error": result})
                    self._report(f"{self._run_id(number)}: failed: {result}")
                    continue
                score = math.fsum(result.values()) / len(result)
                reached = {"score": score, "scores": trial.scores | {goal: score}, "seeds": result}
                if self._study.population is not None:
                    reached["checkpoint"] = last_checkpoint(self._run_id(number), self._runs_dir)
                alive[number] = trial.model_copy(update=reached)
                self._report(f"{self._run_id(number)}: {figure(score)} at {goal:,} env steps")
            if self._study.pruning is not None and goal != goals[-1]:
                kept = math.ceil(self._study.pruning.keep * len(alive))
                for number in [trial.number for trial in self._ranked(alive.values())[kept:]]:
                    ended[number] = alive.pop(number).model_copy(update={"state": "pruned"})
                    self._report(f"{self._run_id(number)}: pruned at {goal:,} env steps")
        return [trial for _, trial in sorted({**ended, **alive}.items())]

    def _train(self, alive: Mapping[int, Trial], goal: int) -> dict[int, dict[int, float] | str]:
        """Trains these trials up to `goal` env steps; returns the score of each seed, or an error, by number."""
        first = self._base.seed
        found: dict[int, dict[int, float] | str] = {}
        runs = dict[str, tuple[int, int]]()
        for number, trial in alive.items():
            try:
                self._base.replace(trial.parameters)
                if self._study.population is not None:  # else a copy would repeat the episodes of its parent
                    runs[self._run_id(number)] = number, first + number
                else:
                    seeds = range(first, first + self._study.seeds)
                    runs |= {self._run_id(number, seed): (number, seed) for seed in seeds}
            except ConfigError as error:
                found[number] = str(error)
        commands = {run_id: self._command(run_id, alive[number], seed, goal) for run_id, (number, seed) in runs.items()}
        errors = self._run_until(commands, goal)
        for run_id, (number, seed) in runs.items():
            scores = found.setdefault(number, {})
            if isinstance(scores, str):
                continue
            try:
                if reason := why_unfinished(run_id, self._runs_dir, goal):
                    raise Unscored(errors.get(run_id) or reason)
                after = goal - self._steps // self._study.generations if self._study.population else 0
                scores[seed] = score_of(run_id, self._runs_dir, self._study.objective, self._every, goal, after)
            except (Unscored, UserError) as error:
                found[number] = str(error) if self._study.seeds == 1 else f"seed {seed}: {error}"
        return found

    def _run_until(self, commands: Mapping[str, Sequence[str]], goal: int) -> dict[str, str]:
        """Trains these runs up to `goal`. One that fails is tried once more, one that is killed a few times more.

        Returns:
            The last error of each run that did not get there.
        """
        failures, kills, errors = Counter[str](), Counter[str](), dict[str, str]()

        def ended(run_id: str, code: int, said: str) -> None:
            if (reason := why_unfinished(run_id, self._runs_dir, goal)) is None:
                return
            failed = 0 < code <= _SIGNALED
            (failures if failed else kills)[run_id] += 1
            errors[run_id] = said.removeprefix("Error: ") if said and failed else reason
            self._report(f"{run_id}: {errors[run_id] if failed else 'was killed or stopped'}")

        while True:
            wanted = {
                run_id: command for run_id, command in commands.items()
                if failures[run_id] <= _FAILURES_ALLOWED and kills[run_id] <= _KILLS_ALLOWED
                and why_unfinished(run_id, self._runs_dir, goal)
            }  # fmt: skip
            if not wanted:
                return errors
            for run_id in wanted:
                left = Wait(f"the run {run_id}, left by an interrupted study, to end", _LEFT_SECONDS)
                poll(left, lambda folder=self._runs_dir / run_id: not is_locked(folder))  # type: ignore[misc]
            begun = lambda run_id, _: self._report(f"{run_id}: trains{' again' if run_id in errors else ''}")  # noqa: E731
            stops = lambda: lacks_room(self._runs_dir, _NEEDED_BYTES) is not None  # noqa: E731 - its runs would wait
            done = run_processes(wanted, self._parallel, begun, ended, quiet=True, stops=stops)
            full = [text for text in errors.values() if os.strerror(errno.ENOSPC) in text]
            if remedy := lacks_room(self._runs_dir, _NEEDED_BYTES) or "".join(full[:1]):
                raise StagecoachError(f"study {self._name} stops: {remedy}; then the same command continues it")
            if done.signaled:
                raise StudyInterrupted(f"study {self._name} is interrupted; the same command continues it")

    def _command(self, run_id: str, trial: Trial, seed: int, goal: int) -> list[str]:
        stops = dict.fromkeys(("mean_return", "success_rate", "updates", "episodes", "hours"))
        fields = {
            **self._study.set, **trial.parameters, "seed": seed, "runs_dir": str(self._runs_dir),
            "evaluation.every": f"{self._every} env_steps",
            **{f"stop_at.{name}": value for name, value in stops.items()}, "stop_at.env_steps": goal,
        }  # fmt: skip
        if trial.parent is not None:
            parent = self._record.trial(trial.parent)
            fields["fork_from"] = f"{self._run_id(trial.parent)}/{parent.checkpoint}"
        sets = [f"{field}={json.dumps(value)}" for field, value in fields.items()]
        return command_of(self._config_path, sets, {"--run-id": run_id, "--or-resume": True, "--inline": True})

    def _run_id(self, number: int, seed: int | None = None) -> str:
        suffix = f"-seed-{seed}" if self._study.seeds > 1 and seed is not None else ""
        return f"{self._name}-{number:04}{suffix}"
