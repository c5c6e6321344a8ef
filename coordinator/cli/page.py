"""`stagecoach page` and `train --page`: runs in a browser."""

import contextlib
import secrets
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated

import typer

from stagecoach.coordinator.cli.terminal.console import console
from stagecoach.coordinator.cli.terminal.options import (
    PLACE,
    RUNS,
    EndpointUrl,
    RedisUrl,
    RunsDir,
    attached,
    example,
    run_ids,
)
from stagecoach.shared.base import world
from stagecoach.shared.base.errors import UserError

PORT = 8420
_SHORTEST_TOKEN = 16
app = typer.Typer()


@app.command(epilog=example("stagecoach page my-run"))
def page(
    run: Annotated[str | None, typer.Argument(metavar="RUN", help=PLACE, autocompletion=run_ids)] = None,
    runs_dir: RunsDir = RUNS,
    host: Annotated[
        str, typer.Option(help="Address to listen on; put TLS in front of any but loopback.")
    ] = "127.0.0.1",
    port: Annotated[int, typer.Option(min=0, max=65535, help="Port to listen on; 0 picks a free one.")] = PORT,
    token_file: Annotated[
        Path | None, typer.Option(metavar="FILE", help="File whose first line is the token (default: a new token).")
    ] = None,
    no_token: Annotated[
        bool, typer.Option("--no-token", help="Serve without a token: on loopback only, and read-only.")
    ] = False,
    read_only: Annotated[bool, typer.Option("--read-only", help="Reject orders, such as stop and scale.")] = False,
    endpoint_url: EndpointUrl = None,
    redis_url: RedisUrl = None,
) -> None:
    """Show the runs of this machine in a browser, live or ended; Ctrl-C ends the page, not the runs."""
    from stagecoach.coordinator.page.access import LOOPBACK
    from stagecoach.coordinator.page.server import serve

    if no_token and (token_file is not None or host not in LOOPBACK):
        other = "--token-file" if token_file is not None else f"--host {host}"
        raise UserError(f"--no-token excludes {other}: without a token, only this machine may open the page")
    token = None if no_token else _token(token_file)
    path = "/"
    if run is not None:
        path = f"/runs/{attached(run, runs_dir, endpoint_url=endpoint_url, redis_url=redis_url).run_id}"
    with serve(runs_dir, token, host, port, read_only=read_only) as url:
        shown = f"?token={token}" if token_file is None and token else ""
        console.text(f"page: {url}{path}{shown}")
        if token_file is not None:
            console.text(f"  append ?token= and the first line of {token_file}")
        if host not in LOOPBACK:
            console.text(
                "  this is plain HTTP; on a shared network, put TLS in front of it (docs/operations/security.md)"
            )
        with contextlib.suppress(KeyboardInterrupt):
            while True:
                world.sleep(1.0)  # not without end: a signal right before the call would be seen only after it
    console.print("the page is closed; its runs continue")


def _token(file: Path | None) -> str:
    if file is None:
        return secrets.token_urlsafe(24)
    try:
        token = file.read_text().partition("\n")[0].strip()
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(f"--token-file {file} cannot be read: {error}") from None
    if len(token) < _SHORTEST_TOKEN:
        raise UserError(f"--token-file {file}: expected at least {_SHORTEST_TOKEN} characters in its first line")
    return token


@contextlib.contextmanager
def page_of_run(run_id: str, runs_dir: Path) -> Iterator[str]:
    """Serves the page, on a free port, while this process supervises a run; yields the line with its URL."""
    from stagecoach.coordinator.page.server import serve

    token = _token(None)
    with serve(runs_dir, token) as url:
        yield f"page: {url}/runs/{run_id}?token={token}"
