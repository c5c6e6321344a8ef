"""Records of a study in its folder: the study, and an object for each trial; each is written whole or not at all."""

import fcntl
import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Literal

from pydantic import BaseModel, ValidationError

from stagecoach.shared.base.errors import StagecoachError, UserError
from stagecoach.shared.base.local_disk import replacing, unwritten
from stagecoach.shared.config.schema.section import leaves
from stagecoach.shared.config.schema.validation import shown

_STUDY, _TRIALS, _LOCK, BEST = "study.json", "trials", "study.lock", "best.yaml"
TrialState = Literal["complete", "pruned", "failed"]


class Trial(BaseModel, frozen=True, extra="forbid"):
    """Result of a trial."""

    number: int
    state: TrialState
    parameters: dict[str, Any]
    """Dotted field → value."""
    score: float | None = None
    """Score at the end, or where it was pruned."""
    scores: dict[int, float] = {}
    """Env steps → score there: where trials were compared, and at the end."""
    seeds: dict[int, float] = {}
    """Seed → its score, the last in `scores`."""
    error: str | None = None
    parent: int | None = None
    """Number of the trial that it continues, in a population."""
    copied: bool = False
    """True if that is not its predecessor, so that its parameters are changed."""
    checkpoint: str | None = None
    """Last checkpoint in a population, `NAME@sha256:…`."""


class StudyRecord:
    """A study's folder."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    @contextmanager
    def locked(self) -> Iterator[None]:
        """Creates the folder, and keeps other processes out of it; raises `UserError` if one is at work."""
        with _writing(self.folder):
            (self.folder / _TRIALS).mkdir(parents=True, exist_ok=True)
            file = (self.folder / _LOCK).open("w")
        with file:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                raise UserError(f"another process runs the study {self.folder}; wait for its end") from None
            yield

    def check_same(self, study: dict[str, Any]) -> None:
        """Records the study; raises `UserError` that names the difference if another one is recorded."""
        path = self.folder / _STUDY
        if not path.exists():
            self.write(_STUDY, json.dumps(study, indent=1))
            return
        try:
            recorded = leaves(json.loads(path.read_bytes()))
        except ValueError as error:
            raise UserError(f"{path} is damaged ({error}); restore it, or choose another --name") from None
        mine = leaves(json.loads(json.dumps(study)))
        unlike = [name for name in sorted({*recorded, *mine}) if recorded.get(name) != mine.get(name)]
        if unlike:
            told = "; ".join(
                f"{name}: recorded {shown(recorded.get(name))}, found {shown(mine.get(name))}" for name in unlike[:5]
            )
            raise UserError(
                f"the study in {self.folder} is another one: {told}; change it back, or choose another --name"
            )

    def trial(self, number: int) -> Trial:
        return _read(self.folder / _name(number))

    def trials(self) -> list[Trial]:
        """Returns the recorded trials by number."""
        return [_read(path) for path in sorted((self.folder / _TRIALS).glob("[0-9]*.json"))]

    def add(self, trial: Trial) -> None:
        self.write(_name(trial.number), trial.model_dump_json(indent=1))

    def write(self, name: str, text: str) -> Path:
        path = self.folder / name
        with _writing(self.folder), replacing(path) as file:
            file.write(text.encode())
        return path


def _name(number: int) -> str:
    return f"{_TRIALS}/{number:04}.json"


def _read(path: Path) -> Trial:
    try:
        return Trial.model_validate_json(path.read_bytes())
    except ValidationError as error:
        raise UserError(f"{path} is damaged ({error.errors()[0]['msg']}); delete it, and it is trained again") from None


@contextmanager
def _writing(folder: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise StagecoachError(
            f"cannot write the study {folder}: {unwritten(error.strerror or str(error), str(folder))}; then the same "
            f"command continues"
        ) from None
