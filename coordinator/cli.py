"""The command line: a thin layer over `Run` and its neighbours.

Exit codes: 0 done, 1 the run (or the world) failed, 2 what was asked for cannot be done, 130 ended at once by Ctrl-C.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import threading
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Annotated, Any

import redis
import typer
import typer.core
from rich.progress import Progress
from rich.table import Table

from coordinator import cli_checkpoints, cli_evaluate, cli_measure
from coordinator.cli_options import RUNS as _RUNS
from coordinator.cli_options import EndpointUrl, Json, PlaceArgument, PrintableConsole, RedisUrl, RunArgument, RunsDir
from coordinator.cli_options import console as _console
from coordinator.cli_options import example as _example
from coordinator.cli_options import print_json as _print_json
from coordinator.console import LiveView, figure, print_status, print_summary
from coordinator.job import submission
from coordinator.run import Run, new_run_id
from coordinator.run_folder import list_folders
from shared.config import Config
from shared.config_sources import dump_config, load_config
from shared.errors import EnvironmentFailure, RunExists, StagecoachError, UserError, headline
from shared.events import confirmed_return
from shared.launch import LOGS
from shared.printable import complain, printable
from shared.user_code import extend_imports


class _Commands(typer.core.TyperGroup):
    """Says that it was interrupted, which Typer on its own ends without a word."""

    def invoke(self, context: Any) -> Any:
        try:
            return super().invoke(context)
        except KeyboardInterrupt:
            print("Interrupted.", file=sys.stderr)
            raise typer.Exit(130) from None


app = typer.Typer(
    cls=_Commands, no_args_is_help=True, add_completion=False,
    pretty_exceptions_enable=False, rich_markup_mode="markdown",
    help="Distributed reinforcement learning: rollout workers, an experience log, checkpoints, exact resume.",
)  # fmt: skip
app.add_typer(cli_checkpoints.app, name="checkpoints")
app.registered_commands += cli_measure.app.registered_commands
Sets = Annotated[
    list[str] | None, typer.Option("--set", metavar="a.b=c", help="Change one field of the config; may stand often.")
]
_HISTORY = 10
"""Past events that `watch` begins with."""
_LIVE = "stagecoach: the run is live"
Detach = Annotated[bool, typer.Option("--detach", help="Return once it trains; it goes on without this terminal.")]


@app.command(epilog=_example("stagecoach train examples/cartpole.yaml --set rollout.workers=4"))
def train(
    config: Annotated[Path, typer.Argument(help="The config file; `stagecoach init` writes one.")],
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
    sets = [*(set_ or ()), *([f"initialize_from={json.dumps(initialize_from)}"] if initialize_from else ())]
    sets += ["signals.profile=true"] if profile else []
    resolved = load_config(config, [*sets, *(["ray.address=auto"] if address else ())])
    name = new_run_id(resolved) if run_id is None else run_id
    again = ["--or-resume"] if or_resume else []
    if address is not None:
        sent = submission(address, config, sets, name, working_dir, or_resume)
        _tend(partial(Run.submit, sent, resolved, name), detach=detach, where=f"submitting to {address}")
    elif detach:
        _detach(["train", str(config), *(f"--set={item}" for item in sets), "--run-id", name, *again], name)
    else:
        start = partial(Run.start, resolved, name, inline=inline, or_resume=or_resume)
        _tend(partial(start, import_path=(str(config.resolve().parent),)), background)


@app.command(epilog=_example("stagecoach prepare config.yaml --run-id my-run"))
def prepare(
    config: Annotated[Path, typer.Argument(help="The config file; with a Redis and a store that are there already.")],
    run_id: Annotated[str, typer.Option("--run-id", help="Name of the run.")],
    set_: Sets = None,
) -> None:
    """Record a new run in Redis and the store and start nothing: its roles come by SSH or SLURM (docs/DEPLOY.md)."""
    Run.prepare(load_config(config, set_ or ()), run_id, import_path=(str(config.resolve().parent),))
    _console.print(f"run {run_id} is prepared; its roles may start")


@app.command(epilog=_example("stagecoach resume my-run --set stop_at.env_steps=200000"))
def resume(
    run: RunArgument,
    origin: Annotated[
        str,
        typer.Option("--from", metavar="CHECKPOINT|best|latest", help="Go back to this one; it becomes a new version."),
    ] = "latest",
    set_: Sets = None,
    runs_dir: RunsDir = _RUNS,
    detach: Detach = False,
    inline: Annotated[bool, typer.Option("--inline", help="All roles in one process, for a debugger.")] = False,
    background: Annotated[bool, typer.Option("--background", hidden=True)] = False,
) -> None:
    """Continue an ended or interrupted run from its newest good checkpoint and the log behind it."""
    if detach:
        sets = [f"--set={item}" for item in set_ or ()]
        _detach(["resume", run, "--from", origin, *sets, "--runs-dir", str(runs_dir)], run)
    else:
        _tend(partial(Run.resume, run, runs_dir, tuple(set_ or ()), origin=origin, inline=inline), background)


@app.command(epilog=_example("stagecoach replay my-run --from start --to best"))
def replay(
    run: RunArgument,
    start: Annotated[str, typer.Option("--from", metavar="CHECKPOINT|start", help="Where to begin.")] = "start",
    goal: Annotated[str, typer.Option("--to", metavar="CHECKPOINT", help="What must come out.")] = "latest",
    runs_dir: RunsDir = _RUNS,
    as_json: Json = False,
) -> None:
    """Train again over the archived log (archive=all), and compare every object with a checkpoint of the run."""
    handle = Run.attach(run, runs_dir)
    extend_imports((os.getcwd(), *handle.folder.import_path()))
    with Progress(console=_console, transient=True, disable=as_json or not _console.is_terminal) as bar:
        task = bar.add_task("training again", total=None)
        found = handle.replay(start, goal, lambda version, last: bar.update(task, completed=version, total=last))
    if as_json:
        _print_json({**asdict(found), "equal": found.equal})
    else:
        what = (
            f"{found.versions} versions from {found.start}, {found.fragments} fragments, {found.env_steps:,} env steps"
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
    _watch(Run.attach(run, runs_dir, endpoint_url=endpoint_url, redis_url=redis_url))


@app.command(epilog=_example("stagecoach attach s3://bucket/prefix/my-run"))
def attach(
    run: PlaceArgument,
    runs_dir: RunsDir = _RUNS,
    endpoint_url: EndpointUrl = None,
    redis_url: RedisUrl = None,
    detach: Detach = False,
) -> None:
    """Take up a run again: watch it; where its coordinator has died, start another, which continues it exactly."""
    handle = Run.attach(run, runs_dir, endpoint_url=endpoint_url, redis_url=redis_url)
    state = handle.status(books=False).state
    if handle.live and not detach:
        _watch(handle)
    elif state == "interrupted" and handle.folder.elsewhere is None and detach:
        _detach(["resume", handle.run_id, "--runs-dir", str(runs_dir)], handle.run_id)
    elif state == "interrupted":
        _tend(handle.take_up, detach=detach)
    else:
        print_status(handle.status(), _console)


def _watch(handle: Run) -> None:
    try:
        hint = "Ctrl-C ends the watching, not the run"
        LiveView(handle, _console, handle.recent(_HISTORY), hint).show(lambda: not handle.live)
    except KeyboardInterrupt:
        _console.print("watching ended; the run goes on")
        return
    print_status(handle.status(), _console)


@app.command(epilog=_example("stagecoach runs --json"))
def runs(runs_dir: RunsDir = _RUNS, as_json: Json = False) -> None:
    """List the runs of this machine."""
    table, rows = Table("run", "state", "env steps", "best", "reason"), []
    for folder in list_folders(runs_dir):
        try:
            handle = Run.attach(folder.run_id, runs_dir)
            found = handle.status()
            best = next((entry for entry in handle.checkpoints() if "best" in entry["marks"]), None)
            score = confirmed_return(best["evaluation"]) if best and best["evaluation"] else None
            row = _run_row(folder.run_id, found.state, found.reason, found.env_steps, score)
        except StagecoachError as error:
            row = _run_row(folder.run_id, "unreadable", str(error))
        rows.append(row)
        table.add_row(folder.run_id, row["state"], f"{row['env_steps']:,}", figure(row["best"]), row["reason"])
    if as_json:
        _print_json(rows)
    elif rows:
        _console.print(table)
    else:
        _console.print(f"no runs in {runs_dir}; start one: stagecoach train examples/cartpole.yaml")


def _run_row(run_id: str, state: str, reason: str, env_steps: int = 0, best: float | None = None) -> dict[str, Any]:
    return {"run_id": run_id, "state": state, "env_steps": env_steps, "best": best, "reason": reason}


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
    number = None if workers is None or workers == "auto" else int(workers)
    _console.print(f"{run}: scaling {Run.attach(run, runs_dir).scale(number, min_workers=least, max_workers=most)}")


@app.command(epilog=_example("stagecoach stop my-run"))
def stop(run: RunArgument, runs_dir: RunsDir = _RUNS) -> None:
    """End a live run with a final checkpoint, and wait until it has ended."""
    handle = Run.attach(run, runs_dir)
    handle.stop()
    _console.print(f"{run}: {handle.wait().reason}")


app.registered_commands += cli_evaluate.app.registered_commands


@app.command(epilog=_example("stagecoach init my-run.yaml"))
def init(path: Annotated[Path, typer.Argument(help="The file to write.")] = Path("stagecoach.yaml")) -> None:
    """Write a commented config to start from; an existing file is left as it is."""
    from coordinator.config_docs import commented_config

    try:
        with path.open("x") as file:
            file.write(commented_config())
    except FileExistsError:
        raise RunExists(f"{path} exists; choose another name") from None
    except OSError as error:
        raise UserError(f"cannot write {path}: {error}") from None
    _console.print(f"wrote {path}; start it with: stagecoach train {path}")


@app.command(epilog=_example("stagecoach config examples/cartpole.yaml --set seed=3"))
def config(
    path: Annotated[Path | None, typer.Argument(help="A config file; without one, the schema.")] = None,
    set_: Sets = None,
    schema: Annotated[bool, typer.Option("--schema", help="Print the JSON schema of all fields.")] = False,
) -> None:
    """Print the resolved config (file, environment and --set put together), or the schema."""
    if schema or path is None:
        _print_json(Config.model_json_schema())
    else:
        print(dump_config(load_config(path, set_ or ())), end="")


@app.command(epilog=_example("stagecoach doctor examples/cartpole.yaml"))
def doctor(
    path: Annotated[Path | None, typer.Argument(help="Check what this config needs, too.")] = None,
    set_: Sets = None,
    as_json: Json = False,
) -> None:
    """Check Redis, store, Ray, versions and permissions, say what to do about what fails, and warn of what is open."""
    from coordinator.doctor import examine

    extend_imports([os.getcwd(), *([str(path.resolve().parent)] if path else [])])
    findings = []
    for finding in examine(load_config(path, set_ or ()) if path else None):
        findings.append(finding)
        if not as_json:
            shown, style = {"ok": ("ok  ", "green"), "warn": ("warn", "yellow"), "fail": ("FAIL", "red")}[
                finding.outcome
            ]
            _console.print(shown, style=style, end="")
            _console.print(f" {finding.name}: {finding.text}", highlight=False, soft_wrap=True)
    if as_json:
        _print_json([finding.as_dict() for finding in findings])
    if not all(finding.ok for finding in findings):
        raise typer.Exit(1)


def _tend(begin: Any, background: bool = False, detach: bool = False, where: str = "") -> None:
    """Starts (or resumes) a run, shows it until it ends, and turns signals into a clean end.

    With `detach` it only sees the run begin, which then goes on without this process.
    """

    received: list[int] = []
    roles_start, there = threading.Event(), threading.Event()
    asked = False

    def on_signal(number: int, _: Any) -> None:
        received.append(number)
        if not roles_start.is_set() or len(received) > 2:  # Ray does not survive an exception in the midst of joining
            os.write(2, b"interrupted: what was started is being ended\n")  # print may have been what was interrupted
            raise KeyboardInterrupt
        if not there.is_set():
            os.write(2, b"interrupted: it ends with a last checkpoint once its roles have started\n")

    def listen() -> None:
        for number in (signal.SIGINT, signal.SIGTERM):
            signal.signal(number, on_signal)

    listen()
    if not background:
        _console.print(f"{where or 'checking'}, then starting Redis, the store, Ray and the roles …", style="dim")
    run: Run = begin(begun=roles_start.set)
    there.set()
    if detach:
        _tell_detached(run.run_id, "on the cluster")
        return
    listen()  # again: joining Ray has put a handler of its own for SIGTERM

    def ended() -> bool:
        nonlocal asked
        if received and not asked:
            with contextlib.suppress(StagecoachError, redis.RedisError):  # ending, or Redis is slow: tried again
                run.stop()
                asked = True
                _console.print("ending with a last checkpoint; Ctrl-C again ends at once, and what is durable stays")
        if len(received) > 1:
            run.abandon()
        return run.ended

    if background:
        _announce(run)
        _console.quiet = True
    else:
        where = f"run {run.run_id}; its folder is {run.folder.path}"
        _console.print(where, highlight=False, soft_wrap=True)
    LiveView(run, PrintableConsole(quiet=True) if background else _console, run.first_event).show(ended)
    outcome = run.wait()
    print_summary(run, outcome, _console)
    if run.config.signals.profile:
        with contextlib.suppress(UserError):  # of one that never began
            cli_measure.show_profile(run)
    if outcome.reason == "abandoned":
        raise typer.Exit(130)
    if outcome.failed:
        reason = outcome.reason.splitlines()[0]
        complain(f"run {run.run_id} {reason}; the whole story is in {run.folder.path / LOGS}")
        raise typer.Exit(2 if outcome.users_fault else 1)


def _detach(arguments: list[str], run_id: str) -> None:
    """The same command in a session of its own; returns when it trains, or with its error."""
    command = [sys.executable, "-P", "-m", "coordinator.cli", *arguments, "--background"]
    process = subprocess.Popen(
        command,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        start_new_session=True,
        text=True,
    )
    assert process.stdout is not None and process.stderr is not None
    try:
        live = any(line.strip() == _LIVE for line in process.stdout)  # modules may print while they are imported
    except KeyboardInterrupt:  # its session is its own: it has not heard of it
        process.send_signal(signal.SIGINT)
        process.communicate()
        raise
    if not live:
        print(printable(process.stderr.read().strip(), lines=True), file=sys.stderr)
        raise typer.Exit(process.wait() or 1)
    _tell_detached(run_id, f"in the background (process {process.pid})")


def _tell_detached(run_id: str, where: str) -> None:
    _console.print(f"run {run_id} is live {where}", highlight=False)
    _console.print(
        f"  stagecoach watch {run_id}    stagecoach scale {run_id} N    stagecoach stop {run_id}", highlight=False
    )


def _announce(run: Run) -> None:
    """Tells the process that waits, and takes the output to the run's log from here on."""
    print(f"\n{_LIVE}", flush=True)
    log = os.open(run.folder.path / LOGS / "background.log", os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
    for stream in (1, 2):
        os.dup2(log, stream)
    os.close(log)


def main() -> None:
    """The entry point: turns named errors into one line and an exit code."""
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
    except redis.RedisError as error:
        complain(f"Redis: {error}")
        sys.exit(1)


if __name__ == "__main__":
    main()
