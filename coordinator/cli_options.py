"""What the modules of the command line share: common arguments, the console, and printing JSON."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console

RunArgument = Annotated[str, typer.Argument(metavar="RUN", help="The run's id; `stagecoach runs` lists them.")]
PlaceArgument = Annotated[
    str, typer.Argument(metavar="RUN", help="The run's id; or, of one that lives elsewhere, s3://bucket/prefix/RUN.")
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
RUNS = Path("runs")
console = Console(markup=False)  # names, reasons and paths may hold brackets


def example(text: str) -> str:
    """The last line of a command's help."""
    return f"Example: `{text}`"


def print_json(data: Any) -> None:
    """For scripts; what JSON does not know becomes text."""
    print(json.dumps(data, indent=1, default=str))
