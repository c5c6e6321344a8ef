"""The command line: a thin layer over `Run` and its neighbours.

Exit codes: 0 done, 1 the run (or the world) failed, 2 what was asked for cannot be done, 130 ended by Ctrl-C
without a last checkpoint.
"""

from __future__ import annotations

import json
import os
import signal
import sys
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Annotated, Any

import typer
import typer.core

from coordinator import cli_check, cli_config, cli_evaluate, cli_measure
from coordinator.cli_options import RUNS as _RUNS
from coordinator.cli_options import (
    ConfigArgument,
    Drops,
    EndpointUrl,
    Json,
    PlaceArgument,
    RedisUrl,
    RunArgument,
    RunsDir,
    Sets,
    TrustConfig,
    figure,
)
from coordinator.cli_options import console as _console
from coordinator.cli_options import example as _example
from coordinator.cli_options import print_json as _print_json
from coordinator.ray_start import outlive_ray
from shared.collector import interruptible
from shared.errors import EnvironmentFailure, RunLive, StagecoachError, UserError, headline
from shared.failure import reason_in_words
from shared.printable import complain, counted

# What a command needs is imported when it is called: PyTorch, Ray and the config's models take seconds, and `--help`,
# `--version` and `runs` need none of them.


class _Commands(typer.core.TyperGroup):
    """Says that it was interrupted, which Typer on its own ends without a word."""

    def invoke(self, context: Any) -> Any:
        try:
            return super().invoke(context)
        except KeyboardInterrupt:
            print("Interrupted.", file=sys.stderr)
            raise typer.Exit(130) from None


class _Checkpoints(typer.core.TyperGroup):
    """`stagecoach checkpoints …`; `stagecoach checkpoints RUN` lists, as if `list` stood there."""

    def parse_args(self, context: Any, arguments: list[str]) -> list[str]:
        from coordinator.cli_checkpoints import app

        self.commands = typer.main.get_group(app).commands
        if arguments and arguments[0] not in self.commands and arguments[0] not in context.help_option_names:
            arguments = ["list", *arguments]
        return super().parse_args(context, arguments)


def _version(asked: bool) -> None:
    if asked:
        import importlib.metadata

        print(f"stagecoach {importlib.metadata.version('stagecoach')}")
        raise typer.Exit


app = typer.Typer(
    cls=_Commands, no_args_is_help=True, pretty_exceptions_enable=False, rich_markup_mode="markdown",
    help="Distributed reinforcement learning: rollout workers, an experience log, checkpoints, exact resume.",
)  # fmt: skip
app.add_typer(
    typer.Typer(cls=_Checkpoints, rich_markup_mode="markdown"), name="checkpoints", no_args_is_help=True,
    help="List, verify, show, prune, promote or export the checkpoints of a run.",
    epilog=_example("stagecoach checkpoints my-run"),
)  # fmt: skip
_Version = Annotated[bool, typer.Option("--version", is_eager=True, callback=_version, help="Print the version.")]
Detach = Annotated[bool, typer.Option("--detach", help="Return once it trains; it goes on without this terminal.")]


@app.callback()
def _main(version: _Version = False) -> None:
    """Options of `stagecoach` itself."""


@app.command(epilog=_example("stagecoach train cartpole --set rollout.workers=4"))
def train(
    config: ConfigArgument,
    set_: Sets = None,
    run_id: Annotated[str | None, typer.Option("--run-id", help="Name of the run; by default one is made up.")] = None,
    initialize_from: Annotated[
        str | None,
        typer.Option(metavar="CHECKPOINT", help="Begin with the policies of RUN, RUN/NAME or a checkpoint's folder."),
    ] = None,
    or_resume: Annotated[
        bool,
        typer.Option("--or-resume", help="Continue the run where it is there already; for job systems that retry."),
    ] = False,
    force: Annotated[
        bool, typer.Option("--force", help="Delete a run of this --run-id first, with everything that it has stored.")
    ] = False,
    address: Annotated[
        str | None,
        typer.Option(metavar="URL|CLUSTER.yaml", help="Run on this Ray cluster: its dashboard, or its cluster file."),
    ] = None,
    working_dir: Annotated[
        Path | None,
        typer.Option(metavar="DIR", help="With --address: the folder that travels; the config's by default."),
    ] = None,
    detach: Detach = False,
    inline: Annotated[bool, typer.Option("--inline", help="All roles in one process, for a debugger.")] = False,
    profile: Annotated[
        bool,
        typer.Option("--profile", help="Show at the end where each process's time went; keep a timeline."),
    ] = False,
    background: Annotated[bool, typer.Option("--background", hidden=True)] = False,
) -> None:
    """Train: start all that the run needs, show it live, and end it all with a summary."""
    with interruptible():
        from coordinator import cli_live
        from coordinator.job import submission
        from coordinator.presets import config_file
        from coordinator.run import Run
        from coordinator.run_folder import new_run_id
        from shared.config_sources import load_config

    config = config_file(config)
    sets = [*(set_ or ()), *([f"initialize_from={json.dumps(initialize_from)}"] if initialize_from else ())]
    sets += ["signals.profile=true"] if profile else []
    resolved = load_config(config, [*sets, *(["ray.address=auto"] if address else ())])
    name = new_run_id(resolved) if run_id is None else run_id
    if force:
        _delete_former(run_id, resolved.runs_dir)
    again = ["--or-resume"] if or_resume else []
    if address is not None:
        sent = submission(address, config, sets, name, working_dir, or_resume)
        cli_live.tend(partial(Run.submit, sent, resolved, name), detach=detach, where=f"submitting to {address}")
    elif detach:
        cli_live.detach(["train", str(config), *(f"--set={item}" for item in sets), "--run-id", name, *again], name)
    else:
        start = partial(Run.start, resolved, name, inline=inline, or_resume=or_resume)
        with cli_live.in_one_process(inline):
            cli_live.tend(partial(start, import_path=(str(config.resolve().parent),)), background)


@app.command(epilog=_example("stagecoach prepare config.yaml --run-id my-run"))
def prepare(
    config: Annotated[Path, typer.Argument(help="The config file; with a Redis and a store that are there already.")],
    run_id: Annotated[str, typer.Option("--run-id", help="Name of the run.")],
    set_: Sets = None,
) -> None:
    """Record a new run in Redis and the store and start nothing: its roles come by SSH or SLURM (docs/DEPLOY.md)."""
    with interruptible():
        from coordinator.run import Run
        from shared.config_sources import load_config

    Run.prepare(load_config(config, set_ or ()), run_id, import_path=(str(config.resolve().parent),))
    _console.print(f"run {run_id} is prepared; its roles may start")


@app.command(epilog=_example("stagecoach resume my-run --set stop_at.env_steps=200000"))
def resume(
    run: RunArgument,
    origin: Annotated[
        str,
        typer.Option("--from", metavar="CHECKPOINT|best|latest", help="Go back to this one; it becomes a new version."),
    ] = "latest",
    drop: Drops = None,
    strict: Annotated[
        bool, typer.Option("--strict", help="Refuse a checkpoint of other code, PyTorch, NumPy or Python versions.")
    ] = False,
    set_: Sets = None,
    runs_dir: RunsDir = _RUNS,
    detach: Detach = False,
    inline: Annotated[bool, typer.Option("--inline", help="All roles in one process, for a debugger.")] = False,
    background: Annotated[bool, typer.Option("--background", hidden=True)] = False,
) -> None:
    """Continue an ended or interrupted run from its newest good checkpoint and the log behind it."""
    with interruptible():
        from coordinator import cli_live
        from coordinator.run import Run

    if detach:
        sets = [*(f"--set={item}" for item in set_ or ()), *(f"--drop={item}" for item in drop or ())]
        strictly = ["--strict"] if strict else []
        cli_live.detach(["resume", run, "--from", origin, *sets, *strictly, "--runs-dir", str(runs_dir)], run)
    else:
        resumed = partial(Run.resume, run, runs_dir, tuple(set_ or ()), origin=origin, drop=tuple(drop or ()))
        with cli_live.in_one_process(inline):
            cli_live.tend(partial(resumed, strict=strict, inline=inline), background)


@app.command(epilog=_example("stagecoach replay my-run --from start --to best"))
def replay(
    run: RunArgument,
    start: Annotated[str, typer.Option("--from", metavar="CHECKPOINT|start", help="Where to begin.")] = "start",
    goal: Annotated[str, typer.Option("--to", metavar="CHECKPOINT", help="What must come out.")] = "latest",
    trust_config: TrustConfig = False,
    runs_dir: RunsDir = _RUNS,
    as_json: Json = False,
) -> None:
    """Train again over the archived log (archive=all), and compare every object with a checkpoint of the run."""
    from rich.progress import Progress

    from coordinator.run import Run
    from shared.user_code import extend_imports

    handle = Run.attach(run, runs_dir)
    extend_imports((os.getcwd(), *handle.folder.import_path()))
    with Progress(console=_console, transient=True, disable=as_json or not _console.is_terminal) as bar:
        task = bar.add_task("training again", total=None)
        found = handle.replay(
            start,
            goal,
            lambda version, last: bar.update(task, completed=version, total=last),
            trust_config=trust_config,
        )
    if as_json:
        _print_json({**asdict(found), "equal": found.equal})
    else:
        what = (
            f"{counted(found.versions, 'version')} from {found.start}, {counted(found.fragments, 'fragment')}, "
            f"{counted(found.env_steps, 'env step')}"
        )
        verdict = (
            f"equal, all {len(found.sha256)} objects" if found.equal else f"different: {', '.join(found.different)}"
        )
        _console.print(f"{found.goal}: {verdict} ({what})", highlight=False, soft_wrap=True)
        for line in found.unlike:
            _console.print(f"  {line}", highlight=False, soft_wrap=True)
        for name, digest in found.sha256.items():
            _console.print(f"  {digest}  {name}", highlight=False, soft_wrap=True)
    if not found.equal:
        raise typer.Exit(1)


@app.command(epilog=_example("stagecoach status my-run --json"))
def status(run: RunArgument, runs_dir: RunsDir = _RUNS, as_json: Json = False) -> None:
    """Show what a run is doing, the ledger, and the party that everyone waits for."""
    from coordinator.console import print_status
    from coordinator.run import Run

    found = Run.attach(run, runs_dir).status()
    if as_json:
        _print_json(found.as_dict())
    else:
        print_status(found, _console)


@app.command(epilog=_example("stagecoach watch s3://bucket/prefix/my-run"))
def watch(
    run: PlaceArgument,
    runs_dir: RunsDir = _RUNS,
    endpoint_url: EndpointUrl = None,
    redis_url: RedisUrl = None,
) -> None:
    """Watch a live run, checkpoints as they land; Ctrl-C ends the watching, not the run."""
    from coordinator import cli_live
    from coordinator.run import Run

    cli_live.watch(Run.attach(run, runs_dir, endpoint_url=endpoint_url, redis_url=redis_url))


@app.command(epilog=_example("stagecoach attach s3://bucket/prefix/my-run"))
def attach(
    run: PlaceArgument,
    runs_dir: RunsDir = _RUNS,
    endpoint_url: EndpointUrl = None,
    redis_url: RedisUrl = None,
    detach: Detach = False,
) -> None:
    """Take up a run again: watch it; where its coordinator has died, start another, which continues it exactly."""
    with interruptible():
        from coordinator import cli_live
        from coordinator.console import print_status
        from coordinator.run import Run

    handle = Run.attach(run, runs_dir, endpoint_url=endpoint_url, redis_url=redis_url)
    state = handle.status(books=False).state
    if handle.live and not detach:
        cli_live.watch(handle)
    elif state == "interrupted" and handle.folder.elsewhere is None and detach:
        cli_live.detach(["resume", handle.run_id, "--runs-dir", str(runs_dir)], handle.run_id)
    elif state == "interrupted":
        _console.print("its coordinator has died; this command takes its place, and Ctrl-C ends the run")
        try:
            cli_live.tend(handle.take_up, detach=detach)
        except RunLive:  # another command was faster, and Ctrl-C is to end no run
            signal.signal(signal.SIGINT, signal.default_int_handler)
            cli_live.watch(handle)
    else:
        print_status(handle.status(), _console)


@app.command(epilog=_example("stagecoach runs --json"))
def runs(runs_dir: RunsDir = _RUNS, as_json: Json = False) -> None:
    """List the runs of this machine."""
    from rich.table import Table

    from coordinator.run_list import list_runs

    rows = list_runs(runs_dir)
    table = Table("run", "state", "env steps", "best", "reason")
    for row in rows:
        table.add_row(
            row.run_id,
            row.state,
            f"{row.env_steps:,}",
            figure(row.best),
            reason_in_words(row.reason.partition("\n")[0]),
        )
    if as_json:
        _print_json([asdict(row) for row in rows])
    elif rows:
        _console.print(table)
    else:
        _console.print(f"no runs in {runs_dir}; start one: stagecoach train cartpole")


@app.command(epilog=_example("stagecoach delete my-run --yes"))
def delete(
    run: RunArgument,
    runs_dir: RunsDir = _RUNS,
    yes: Annotated[bool, typer.Option("--yes", "-y", help="Do not ask.")] = False,
) -> None:
    """Delete a run that is not live: its folder, and what it has in Redis and in the store, checkpoints included."""
    from coordinator.run_deletion import Deletion

    found = Deletion.of(run, runs_dir)
    if not yes and not sys.stdin.isatty():
        raise UserError(f"this would delete {found.what}; there is no terminal to ask at, so say --yes")
    if not yes and not typer.confirm(f"delete {found.what}? This cannot be undone"):
        raise typer.Exit(2)
    found.carry_out()
    _console.print(f"deleted {found.what}", highlight=False, soft_wrap=True)


def _delete_former(run_id: str | None, runs_dir: Path) -> None:
    """For `train --force`."""
    from coordinator.run_deletion import Deletion
    from shared.errors import RunNotFound

    if run_id is None:
        raise UserError("--force deletes the run that --run-id names; give that as well")
    try:
        found = Deletion.of(run_id, runs_dir)
    except RunNotFound:
        return
    found.carry_out()
    _console.print(f"deleted {found.what}", highlight=False, soft_wrap=True)


@app.command(epilog=_example("stagecoach scale my-run 4` or `stagecoach scale my-run auto --min 2 --max 16"))
def scale(
    run: RunArgument,
    workers: Annotated[
        str | None,
        typer.Argument(metavar="[N|auto]", help="So many; or `auto`: as many as are needed, between the bounds."),
    ] = None,
    least: Annotated[int | None, typer.Option("--min", help="The fewest for `auto`; else what it was.")] = None,
    most: Annotated[int | None, typer.Option("--max", help="The most for `auto`; else what it was.")] = None,
    runs_dir: RunsDir = _RUNS,
) -> None:
    """Scale a live run's rollout workers; nothing restarts, nothing is lost.

    `N` is a fixed number. `auto` (or bounds without a number) leaves it to the coordinator: more while the trainer
    waits for experience, fewer while workers wait for credit; `stagecoach watch` shows each decision and why.
    """
    if workers is None and least is None and most is None:
        raise typer.BadParameter("say how many (4), or auto, or bounds (--min 2 --max 16)")
    if workers is not None and workers != "auto" and not workers.lstrip("-").isdecimal():
        raise typer.BadParameter(f"expected a number of workers, or auto, found {workers!r}")
    from coordinator.run import Run

    number = None if workers is None or workers == "auto" else int(workers)
    _console.print(f"{run}: scaling {Run.attach(run, runs_dir).scale(number, min_workers=least, max_workers=most)}")


@app.command(epilog=_example("stagecoach stop my-run"))
def stop(run: RunArgument, runs_dir: RunsDir = _RUNS) -> None:
    """End a live run with a final checkpoint, and wait until it has ended."""
    from coordinator.run import Run

    handle = Run.attach(run, runs_dir)
    handle.stop()
    _console.print(f"{run}: {reason_in_words(handle.wait().reason)}")


for _more in (cli_evaluate, cli_check, cli_config, cli_measure):
    app.registered_commands += _more.app.registered_commands


def main() -> None:
    """The entry point: turns named errors into one line and an exit code."""
    outlive_ray()  # before a user's module imports Ray
    try:
        app()
    except UserError as error:
        complain(error)
        sys.exit(2)
    except EnvironmentFailure as error:
        complain(headline(error))
        sys.exit(2)
    except StagecoachError as error:
        complain(error)
        sys.exit(1)
    except Exception as error:
        if "redis" not in sys.modules or not isinstance(error, sys.modules["redis"].RedisError):
            raise
        complain(f"Redis: {error}")
        sys.exit(1)


if __name__ == "__main__":
    main()
