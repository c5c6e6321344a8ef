"""What a benchmark answers: lines of samples, ratios between them repeat by repeat, curves, and its settings."""

from __future__ import annotations

import dataclasses
import json
import statistics
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from stagecoach.shared.base.local_disk import replacing

FORMAT = 1


@dataclass(frozen=True)
class Measure:
    """One line of the table: what was measured, once for each repeat."""

    what: str
    """Unique within its benchmark."""
    unit: str
    samples: Sequence[float]
    """One for each repeat, in order."""
    against: str = ""
    """`what` of the line that this one is compared with, repeat by repeat; '' for none."""
    aim: float | None = None
    """What the median is to reach: of the ratio where there is one, else of the samples."""
    better: Literal["more", "less"] = "more"
    note: str = ""
    floor: str = ""
    """`what` of the line that is this one's floor, the cost that nobody can avoid; '' for none."""

    @property
    def median(self) -> float:
        """Of the samples."""
        return statistics.median(self.samples)


@dataclass(frozen=True)
class Curve:
    """A line in a picture: what was measured at each size."""

    picture: str
    """Curves of the same picture share its axes; its name is the file's."""
    name: str
    x_unit: str
    y_unit: str
    points: Sequence[tuple[float, float]]
    dashed: bool = False
    """Worked out, not measured."""


@dataclass(frozen=True)
class Result:
    """All that one benchmark answers."""

    benchmark: str
    question: str
    """In a sentence or two: what is measured, and how."""
    measures: Sequence[Measure]
    settings: dict[str, Any] = field(default_factory=dict)
    """How it was measured, for readers who doubt it."""
    curves: Sequence[Curve] = ()
    remarks: Sequence[str] = ()
    """What the figures do not say themselves."""
    command: str = ""
    made: str = ""
    """Date and time, UTC."""
    load: float = 0.0
    """Of the machine when it began: runnable processes, one minute's mean."""
    machine: dict[str, Any] = field(default_factory=dict)
    commit: str = ""
    versions: dict[str, str] = field(default_factory=dict)
    format: int = FORMAT

    def ratios(self, measure: Measure, to: str = "") -> list[float]:
        """Repeat by repeat, to the line it is compared with or another; raises `KeyError` for an unknown one."""
        others = {other.what: other for other in self.measures}
        other = others[to or measure.against]
        return [mine / its for mine, its in zip(measure.samples, other.samples, strict=True)]


def reached(result: Result, measure: Measure) -> bool | None:
    """Whether the aim is met; None where there is none."""
    if measure.aim is None:
        return None
    found = statistics.median(result.ratios(measure)) if measure.against else measure.median
    return found >= measure.aim if measure.better == "more" else found <= measure.aim


def write(result: Result, path: Path) -> None:
    """As a whole or not at all; one measure to a line."""
    fields = dataclasses.asdict(result)
    lines = []
    for name, value in fields.items():
        if name in ("measures", "curves"):
            rows = ",\n  ".join(json.dumps(row) for row in value)
            lines.append(f"{json.dumps(name)}: [\n  {rows}\n]" if value else f"{json.dumps(name)}: []")
        else:
            lines.append(f"{json.dumps(name)}: {json.dumps(value)}")
    path.parent.mkdir(parents=True, exist_ok=True)
    with replacing(path) as file:
        file.write(("{\n" + ",\n".join(lines) + "\n}\n").encode())


def read(path: Path) -> Result:
    """The inverse of `write`; raises `FileNotFoundError`, or `ValueError` for another format."""
    data = json.loads(path.read_text())
    if data["format"] != FORMAT:
        raise ValueError(f"{path} has format {data['format']}, expected {FORMAT}; measure again")
    data["measures"] = [Measure(**row) for row in data["measures"]]
    data["curves"] = [Curve(**row | {"points": [tuple(point) for point in row["points"]]}) for row in data["curves"]]
    data["remarks"] = tuple(data["remarks"])
    return Result(**data)
