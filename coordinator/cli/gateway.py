"""`stagecoach gateway …`: the clients of a run whose environments are in other programs (docs/guides/gateway.md)."""

from typing import TYPE_CHECKING, Annotated

import typer

from stagecoach.coordinator.cli.terminal.console import NARROW, console, progress
from stagecoach.coordinator.cli.terminal.options import Exit, Json, example, on_run
from stagecoach.shared.base.errors import UserError
from stagecoach.shared.base.printable import counted

if TYPE_CHECKING:
    from stagecoach.coordinator.run_access.run import Run
    from stagecoach.shared.storage.object_store import ObjectStore

app = typer.Typer(rich_markup_mode="markdown")
Client = Annotated[str, typer.Argument(help="The client's name.")]
_COLUMNS = ("sessions", "turns", "older", "late", "abandoned")


@app.command("list", epilog=example("stagecoach gateway list my-run"))
@on_run
def list_(run: "Run", as_json: Json = False) -> None:
    """Show the clients of a run, their turns, and round trips."""
    from rich.table import Column, Table

    from stagecoach.rollout_worker.gateway.tokens import read_tokens

    store = _store(run)
    gateways = {beat.id: beat.progress for beat in run.status(accounting=False).roles if "gateway" in beat.progress}
    counted = {name: told.get("clients", {}) for name, told in gateways.items()}
    rows = [
        {"client": name, **{key: sum(its.get(name, {}).get(key, 0) for its in counted.values()) for key in _COLUMNS}}
        for name in sorted({*read_tokens(store), *(its for told in counted.values() for its in told)})
    ]
    if as_json:
        console.json({"gateways": gateways, "clients": rows})
        return
    table = Table(Column("client", overflow="fold"), *_COLUMNS, **NARROW)
    for row in rows:
        table.add_row(str(row["client"]), *(f"{row[key]:,}" for key in _COLUMNS))
    console.print(table)
    for name, told in gateways.items():
        console.text(
            f"{name} at {told['gateway']}: {told['sessions']} sessions, {told['sessions_away']} away; round trip "
            f"{told['round_trip_p50_ms']:.1f} ms (p50), {told['round_trip_p99_ms']:.1f} ms (p99)"
        )


@app.command(epilog=example("stagecoach gateway add my-run robot-1"))
@on_run
def add(run: "Run", client: Client, as_json: Json = False) -> None:
    """Give a client a token. It is shown once; the run keeps its hash."""
    from stagecoach.rollout_worker.gateway.tokens import add_token

    token = add_token(_store(run), client)
    console.print_json(data={"client": client, "token": token}) if as_json else console.text(token)


@app.command(epilog=example("stagecoach gateway revoke my-run robot-1"))
@on_run
def revoke(run: "Run", client: Client) -> None:
    """Take a client's token back; its connections are closed within seconds."""
    from stagecoach.rollout_worker.gateway.tokens import revoke_token

    revoke_token(_store(run), client)
    console.text(f"{client} is revoked; its connections are closed within seconds")


@app.command(epilog=example("stagecoach gateway conformance -- python conformance.py"))
def conformance(
    command: Annotated[
        list[str] | None, typer.Argument(metavar="-- COMMAND…", help="The program, which plays the corridor.")
    ] = None,
    only: Annotated[
        list[str] | None, typer.Option(metavar="SCENARIO", help="Run this scenario; may be repeated.")
    ] = None,
    list_: Annotated[bool, typer.Option("--list", help="Show the scenarios.")] = False,
) -> None:
    """Test a client of the gateway: starts its conformance program for each scenario, and checks what it sends.

    Exit code 1 if any fails. docs/reference/gateway_protocol.md says what the program does.
    """
    from rich.table import Column, Table

    from stagecoach.rollout_worker.gateway.conformance import SCENARIOS, run_suite

    table = Table("scenario", "", "seconds", Column("", overflow="fold"), **NARROW)
    if list_:
        for name, (text, _) in SCENARIOS.items():
            console.text(f"{name:<20} {text}")
        return
    if not command:
        raise UserError("name the program: `stagecoach gateway conformance -- COMMAND…`")
    progress(f"playing {counted(len(only or SCENARIOS), 'scenario')} with {command[0]}")
    results = []
    for result in run_suite(command, only or ()):
        results.append(result)
        table.add_row(result.scenario, "failed" if result.problem else "ok", f"{result.seconds:.1f}", result.problem)
    console.print(table)
    failed = sum(bool(result.problem) for result in results)
    console.text(f"{len(results) - failed} of {len(results)} scenarios passed")
    if failed:
        raise typer.Exit(Exit.FAILED)


def _store(run: "Run") -> "ObjectStore":
    if run.config.environment.api != "external":
        raise UserError(f"run {run.run_id} has its environments itself (environment.api={run.config.environment.api})")
    return run.checkpoint_store().store
