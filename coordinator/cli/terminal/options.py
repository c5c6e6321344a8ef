"""Arguments, options and exit codes that the commands share."""

import functools
import inspect
from collections.abc import Callable
from enum import IntEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from stagecoach.coordinator.catalog.run_files import LOCK

if TYPE_CHECKING:
    from stagecoach.coordinator.run_access.run import Run

RUNS = Path("runs")


class Exit(IntEnum):
    """Exit codes other than 0."""

    FAILED = 1
    """The run failed, or a service did."""
    REFUSED = 2
    """The request is invalid, or the environment failed."""
    INTERRUPTED = 130
    """The run ended without a final checkpoint."""


def run_ids(context: typer.Context, incomplete: str) -> list[str]:
    """Completes run ids in a shell."""
    from stagecoach.coordinator.catalog.run_files import run_paths

    found = run_paths(Path(context.params.get("runs_dir") or RUNS))
    return [path.name for path in found if path.name.startswith(incomplete)]


PLACE = "The run's id or folder; or, of one on other machines, s3://bucket/prefix/RUN."
Place = Annotated[str, typer.Argument(metavar="RUN", help=PLACE, autocompletion=run_ids)]
EndpointUrl = Annotated[
    str | None, typer.Option(metavar="URL", help="The S3 endpoint as this machine reaches it, if not as the run does.")
]
RedisUrl = Annotated[
    str | None, typer.Option("--redis", metavar="URL", help="The same for Redis, for example through a tunnel.")
]
Sets = Annotated[
    list[str] | None, typer.Option("--set", metavar="a.b=c", help="Change one field of the config; may be repeated.")
]
RunsDir = Annotated[
    Path, typer.Option("--runs-dir", envvar="STAGECOACH__RUNS_DIR", help="Folder of this machine's runs.")
]
Json = Annotated[bool, typer.Option("--json", help="Print JSON, for scripts.")]
TrustConfig = Annotated[bool, typer.Option("--trust-config", help="Run code that a config from another machine names.")]


def attached(run: str, runs_dir: Path, **reached: str | None) -> "Run":
    """Attaches to a run, also by its folder; imports `Run`, with PyTorch and Ray, no earlier."""
    from stagecoach.coordinator.run_access.run import Run

    if "/" in run and (folder := Path(run).expanduser().resolve()).joinpath(LOCK).is_file():
        run, runs_dir = folder.name, folder.parent
    return Run.attach(run, runs_dir, **reached)


def on_run(command: Callable[..., None]) -> Callable[..., None]:
    """Replaces a command's first parameter, a handle on a run, by RUN and the options that say where the run is."""

    def attach(
        run: Place, *, runs_dir: RunsDir = RUNS, endpoint_url: EndpointUrl = None, redis_url: RedisUrl = None,
        **given: Any,
    ) -> None:  # fmt: skip
        command(attached(run, runs_dir, endpoint_url=endpoint_url, redis_url=redis_url), **given)

    place, *where, _ = inspect.signature(attach).parameters.values()
    own = [each.replace(kind=each.KEYWORD_ONLY) for each in [*inspect.signature(command).parameters.values()][1:]]
    functools.update_wrapper(attach, command)
    signature = inspect.Signature([place, *own, *where])
    attach.__annotations__ = {each.name: each.annotation for each in signature.parameters.values()}
    attach.__signature__ = signature  # type: ignore[attr-defined]
    return attach


def example(text: str) -> str:
    return f"Example: `{text}`"
