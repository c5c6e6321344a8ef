"""What the modules of the command line share: common arguments, the console, and printing JSON."""

from __future__ import annotations

import json
from collections.abc import Iterable
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console, ConsoleOptions, RenderableType
from rich.segment import Segment
from rich.text import Text

from shared.printable import printable

RUNS = Path("runs")


def run_ids(context: typer.Context, incomplete: str) -> list[str]:
    """For the completion of a shell: the runs that this can be the beginning of."""
    from coordinator.run_list import run_paths

    found = run_paths(Path(context.params.get("runs_dir") or RUNS))
    return [path.name for path in found if path.name.startswith(incomplete)]


def configs(incomplete: str) -> list[str]:
    """For the completion of a shell: presets, YAML files, and folders on the way to some."""
    from coordinator.presets import list_presets

    folder, slash, _ = incomplete.rpartition("/")
    beside = sorted(Path(folder or slash or ".").glob("*"))
    there = [path for path in beside if path.is_dir() or path.suffix in (".yaml", ".yml")]
    names = [f"{folder}{slash}{path.name}{'/' if path.is_dir() else ''}" for path in there if path.name[0] != "."]
    names += [preset.name for preset in list_presets()]
    return [name for name in names if name.startswith(incomplete)]


RunArgument = Annotated[
    str,
    typer.Argument(metavar="RUN", help="The run's id; `stagecoach runs` lists them.", autocompletion=run_ids),
]
PlaceArgument = Annotated[
    str,
    typer.Argument(
        metavar="RUN",
        help="The run's id; or, of one that lives elsewhere, s3://bucket/prefix/RUN.",
        autocompletion=run_ids,
    ),
]
ConfigArgument = Annotated[
    Path,
    typer.Argument(
        help="The config file (`stagecoach init` writes one), or a name of `stagecoach presets`.",
        autocompletion=configs,
    ),
]
Sets = Annotated[
    list[str] | None, typer.Option("--set", metavar="a.b=c", help="Change one field of the config; may stand often.")
]
EndpointUrl = Annotated[
    str | None, typer.Option(metavar="URL", help="The S3 endpoint as this machine reaches it, if not as the run does.")
]
RedisUrl = Annotated[
    str | None, typer.Option("--redis", metavar="URL", help="The same for Redis, for example through a tunnel.")
]
RunsDir = Annotated[
    Path, typer.Option("--runs-dir", envvar="STAGECOACH__RUNS_DIR", help="Folder of this machine's runs.")
]
Json = Annotated[bool, typer.Option("--json", help="Print JSON, for scripts.")]
TrustConfig = Annotated[
    bool, typer.Option("--trust-config", help="Run the code that a config names which was not made on this machine.")
]
Drops = Annotated[
    list[str] | None,
    typer.Option("--drop", metavar="POSITION", help="Drop this log entry, or FIRST..LAST, unread; may stand often."),
]


class PrintableConsole(Console):
    """A console on which text from outside stays text: no markup, and nothing that a terminal would obey."""

    def __init__(self, **options: Any) -> None:
        super().__init__(markup=False, **options)  # names, reasons and paths may hold brackets

    def render_str(self, text: str, **options: Any) -> Text:
        """Before it is measured, so that what is escaped finds its place."""
        return super().render_str(printable(text, len(text), lines=True), **options)

    def render(self, renderable: RenderableType, options: ConsoleOptions | None = None) -> Iterable[Segment]:
        """Everything that is printed comes through here, whatever it is made of."""
        for segment in super().render(renderable, options):
            if segment.control or segment.text == "\n" or segment.text.isprintable():
                yield segment
            else:
                yield Segment(printable(segment.text, len(segment.text), lines=True), segment.style)


console = PrintableConsole()


def example(text: str) -> str:
    """The last line of a command's help."""
    return f"Example: `{text}`"


def print_json(data: Any) -> None:
    """For scripts; what JSON does not know becomes text."""
    print(json.dumps(data, indent=1, default=str))


def figure(value: float | None) -> str:
    """A score with four significant digits, small or large."""
    return "–" if value is None else f"{value:,.1f}" if abs(value) >= 1000 else f"{value:.4g}"
