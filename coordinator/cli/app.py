"""The command line: a thin layer over `Run` and its neighbors."""

import contextlib
import json
import os
import signal
import sys
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
import typer.core

from stagecoach.coordinator.catalog.run_files import RunStatus
from stagecoach.coordinator.cli import config as configs
from stagecoach.coordinator.cli import evidence, gateway, history, league, profile_and_bench, runs, tune
from stagecoach.coordinator.cli import page as pages
from stagecoach.coordinator.cli.config import ConfigArgument
from stagecoach.coordinator.cli.curves import metrics, plot, study
from stagecoach.coordinator.cli.terminal.console import console, progress
from stagecoach.coordinator.cli.terminal.options import (
    RUNS,
    EndpointUrl,
    Exit,
    Json,
    Place,
    RunsDir,
    Sets,
    TrustConfig,
    attached,
    example,
    on_run,
    run_ids,
)
from stagecoach.coordinator.services.ray_internals import outlive_ray
from stagecoach.shared.base.errors import EnvironmentFailure, RunLive, StagecoachError, UserError, headline
from stagecoach.shared.base.failure import EndReason, reason_in_words
from stagecoach.shared.base.printable import complain, counted, figure, score_in_words, success_in_words
from stagecoach.shared.base.process import at_rest, handling, interruptible, signals_after
from stagecoach.shared.config.presets import config_file

if TYPE_CHECKING:
    from stagecoach.coordinator.catalog.checkpoint_lookup import Evaluation
    from stagecoach.coordinator.run_access.run import Run

# What a command needs is imported when it is called: PyTorch, Ray and the config's models take seconds, and `--help`,
# `--version` and `runs` need none of them.


class _Commands(typer.core.TyperGroup):
    """Says that it was interrupted, which Typer on its own ends without a word."""

    def invoke(self, context: Any) -> Any:
        try:
            return super().invoke(context)
        except KeyboardInterrupt:
            print("Interrupted.", file=sys.stderr)
            raise typer.Exit(Exit.INTERRUPTED) from None


class _Checkpoints(typer.core.TyperGroup):
    """`stagecoach checkpoints …`; `stagecoach checkpoints RUN` lists, as if `list` stood there."""

    def parse_args(self, context: Any, arguments: list[str]) -> list[str]:
        from stagecoach.coordinator.cli.checkpoints import app

        self.commands = typer.main.get_group(app).commands
        if arguments and arguments[0] not in self.commands and arguments[0] not in context.help_option_names:
            arguments = ["list", *arguments]
        return super().parse_args(context, arguments)


def _version(asked: bool) -> None:
    if asked:
        import importlib.metadata

        print(f"stagecoach {importlib.metadata.version('stagecoach-rl')}")
        raise typer.Exit


app = typer.Typer(
    cls=_Commands, no_args_is_help=True, pretty_exceptions_enable=False, rich_markup_mode="markdown",
    help="Distributed reinforcement learning: rollout workers, an experience log, checkpoints, exact resume.",
)  # fmt: skip
app.add_typer(
    typer.Typer(cls=_Checkpoints, rich_markup_mode="markdown"), name="checkpoints", no_args_is_help=True,
    help="List, save, verify, show, prune, promote or export the checkpoints of a run.",
    epilog=example("stagecoach checkpoints my-run"),
)  # fmt: skip
app.add_typer(
    gateway.app, name="gateway", no_args_is_help=True,
    help="List, add or revoke the clients of a run whose environments are in other programs.",
    epilog=example("stagecoach gateway list my-run"),
)  # fmt: skip
_Version = Annotated[bool, typer.Option("--version", is_eager=True, callback=_version, help="Print the version.")]
Drops = Annotated[
    list[str] | None,
    typer.Option("--drop", metavar="POSITION", help="Drop this log entry, or FIRST..LAST, unread; may be repeated."),
]
_OrResume = Annotated[
    bool, typer.Option("--or-resume", help="Continue the run where it is there already; for job systems that retry.")
]
_Force = Annotated[
    bool, typer.Option("--force", help="Delete a run of this --run-id first, with everything that it has stored.")
]
_ClusterAddress = Annotated[
    str | None,
    typer.Option(metavar="URL|CLUSTER.yaml", help="Run on this Ray cluster: its dashboard, or its cluster file."),
]
_WorkingDir = Annotated[
    Path | None, typer.Option(metavar="DIR", help="With --address: the folder that travels; the config's by default.")
]
_Origin = Annotated[
    str, typer.Option("--from", metavar="CHECKPOINT|best|latest", help="Go back to this one; it becomes a new version.")
]
_Strict = Annotated[
    bool, typer.Option("--strict", help="Refuse a checkpoint of other code, PyTorch, NumPy or Python versions.")
]
Detach = Annotated[bool, typer.Option("--detach", help="Return once it is prepared; it needs no terminal.")]
Inline = Annotated[bool, typer.Option("--inline", help="All roles in one process, for a debugger.")]
Background = Annotated[bool, typer.Option("--background", hidden=True)]
_Target = Annotated[
    str,
    typer.Argument(
        metavar="RUN|CHECKPOINT",
        help="RUN (its best), RUN/NAME, a folder, or s3://bucket/prefix/RUN.",
        autocompletion=run_ids,
    ),
]
_Parallel = Annotated[
    int | None, typer.Option(min=1, metavar="N", help="With --seeds: so many at a time; by default 1.")
]
_InitializeFrom = Annotated[
    str | None,
    typer.Option(metavar="CHECKPOINT", help="Begin with the policies of RUN, RUN/NAME or a checkpoint's folder."),
]
_Stochastic = Annotated[bool, typer.Option("--stochastic", help="Draw actions as in training.")]


@app.callback()
def _main(version: _Version = False) -> None:
    """Options of `stagecoach` itself."""


@app.command(epilog=example("stagecoach train cartpole --set rollout.workers=4"))
def train(
    config: ConfigArgument,
    set_: Sets = None,
    run_id: Annotated[str | None, typer.Option("--run-id", help="Name of the run; generated by default.")] = None,
    runs_dir: Annotated[Path | None, typer.Option(help="Folder of this machine's runs (the config's).")] = None,
    seeds: Annotated[
        str | None,
        typer.Option(metavar="N|A,B,…", help="A run NAME-seed-S for each of N seeds (from the config's on), or these."),
    ] = None,
    parallel: _Parallel = None,
    initialize_from: _InitializeFrom = None,
    or_resume: _OrResume = False,
    origin: _Origin = "latest",
    drop: Drops = None,
    strict: _Strict = False,
    force: _Force = False,
    address: _ClusterAddress = None,
    working_dir: _WorkingDir = None,
    detach: Detach = False,
    inline: Inline = False,
    profile: Annotated[
        bool, typer.Option("--profile", help="Show at the end where each process's time went; keep a timeline.")
    ] = False,
    page: Annotated[
        bool, typer.Option("--page", help="Serve the page of runs for as long as it trains; prints its URL.")
    ] = False,
    background: Background = False,
) -> None:
    """Train: start all that the run needs, show it live, and end it all with a summary."""
    progress("loading PyTorch and Ray", background)
    with interruptible():
        from stagecoach.coordinator.services.ray_head import launched_ahead
        from stagecoach.shared.config.loading import load_config

    if force and or_resume:
        raise UserError("--force replaces a run and --or-resume continues it; give one of them")
    if page and detach:
        raise UserError("--page ends with this command; of a run in the background: stagecoach page RUN")
    if parallel is not None and seeds is None:
        raise UserError("--parallel says how many of --seeds train at a time; give those as well")
    config = config_file(config)
    sets = [*(set_ or ()), *([f"initialize_from={json.dumps(initialize_from)}"] if initialize_from is not None else ())]
    sets += ["metrics.profile=true"] if profile else []
    sets += [f"runs_dir={json.dumps(str(runs_dir))}"] if runs_dir is not None else []
    resolved = load_config(config, [*sets, *(["ray.address=auto"] if address else ())])
    elsewhere = inline or address is not None or detach or seeds is not None
    with contextlib.ExitStack() as running:
        if not elsewhere:
            running.enter_context(handling(signal.default_int_handler, signal.SIGINT, signal.SIGTERM))
            running.enter_context(launched_ahead(resolved))
        with signals_after(), at_rest():
            from stagecoach.coordinator.catalog.run_folder import new_run_id
            from stagecoach.coordinator.cli import foreground
            from stagecoach.coordinator.lifecycle.preparation import Continuation
            from stagecoach.coordinator.lifecycle.ray_job import reachable, submission
            from stagecoach.coordinator.run_access.run import Run

        how = Continuation(origin, tuple(drop or ()), strict)
        if how.arguments and (seeds is not None or not or_resume):
            raise UserError("--from, --drop and --strict say how --or-resume continues one run; give that as well")
        name = new_run_id(resolved) if run_id is None else run_id
        if seeds is not None:
            from stagecoach.coordinator.cli.seeds import parse_seeds, train_seeds
            from stagecoach.coordinator.run_access.run_processes import command_of

            if page or detach:
                raise UserError(
                    f"--seeds and {'--page' if page else '--detach'}: several runs are not detached or served"
                )
            flags = {"--or-resume": or_resume, "--force": force, "--inline": inline}
            command = command_of(config, sets, {**flags, "--address": address, "--working-dir": working_dir})
            train_seeds(name, parse_seeds(seeds, resolved.seed), command, parallel or 1, resolved.runs_dir)
            return
        make_room = runs.former(run_id, resolved) if force else lambda: None
        served = pages.page_of_run(name, resolved.runs_dir)
        with served if page else contextlib.nullcontext() as at:
            if address is not None:
                if resolved.initialize_from is not None:
                    found = reachable(resolved.initialize_from, resolved.runs_dir)
                    sets.append(f"initialize_from={json.dumps(found)}")
                    resolved = resolved.model_copy(update={"initialize_from": found})
                sent = submission(address, config, sets, name, working_dir, or_resume)
                begin = partial(Run.submit, sent, resolved, name, make_room=make_room, how=how)
                foreground.supervise(begin, detach=detach, where=f"submitting to {address}", page=at)
            elif detach:
                foreground.detach([*sys.argv[1:], "--run-id", name], name)
            else:
                folders = (str(config.resolve().parent),)
                given: dict[str, Any] = {"import_path": folders, "make_room": make_room, "how": how}
                start = partial(Run.start, resolved, name, inline=inline, or_resume=or_resume, **given)
                with foreground.in_one_process(inline):
                    foreground.supervise(start, background, page=at)


@app.command(epilog=example("stagecoach prepare config.yaml --run-id my-run"))
def prepare(
    config: Annotated[Path, typer.Argument(help="The config file; with a Redis and a store that are there already.")],
    run_id: Annotated[str, typer.Option("--run-id", help="Name of the run.")],
    set_: Sets = None,
) -> None:
    """Record a new run in Redis and the store without starting roles: SSH or SLURM does (docs/operations/deploy.md)."""
    with interruptible():
        from stagecoach.coordinator.run_access.run import Run
        from stagecoach.shared.config.loading import load_config

    Run.prepare(load_config(config, set_ or ()), run_id, import_path=(str(config.resolve().parent),))
    console.print(f"run {run_id} is prepared; its roles may start")


@app.command(epilog=example("stagecoach resume my-run --set stop_at.env_steps=200000"))
def resume(
    run: Place,
    origin: _Origin = "latest",
    drop: Drops = None,
    strict: _Strict = False,
    set_: Sets = None,
    runs_dir: RunsDir = RUNS,
    detach: Detach = False,
    inline: Inline = False,
    background: Background = False,
) -> None:
    """Continue an ended or interrupted run from its newest good checkpoint and the log behind it."""
    with interruptible():
        from stagecoach.coordinator.cli import foreground
        from stagecoach.coordinator.run_access.run import Run

    folder = attached(run, runs_dir).folder
    if detach and folder.remote is None:
        foreground.detach(sys.argv[1:], run)
    else:
        how: dict[str, Any] = {"origin": origin, "drop": tuple(drop or ()), "strict": strict, "inline": inline}
        start = partial(Run.resume, folder.run_id, folder.path.parent, tuple(set_ or ()), **how)
        where = "" if folder.remote is None else "submitting to its cluster"
        with foreground.in_one_process(inline):
            foreground.supervise(start, background, detach=detach, where=where)


@app.command(epilog=example("stagecoach status my-run --json"))
@on_run
def status(run: "Run", as_json: Json = False) -> None:
    """Show what a run is doing, the ledger, and the party that everyone waits for."""
    from stagecoach.coordinator.cli.terminal.live_view import print_status

    found = run.status()
    console.json(found.as_dict()) if as_json else print_status(run, found, console)


@app.command(epilog=example("stagecoach watch s3://bucket/prefix/my-run"))
@on_run
def watch(run: "Run") -> None:
    """Watch a live run, checkpoints as they land; Ctrl-C ends the watching, not the run."""
    from stagecoach.coordinator.cli import foreground

    foreground.watch(run)


@app.command(epilog=example("stagecoach attach s3://bucket/prefix/my-run"))
@on_run
def attach(run: "Run", detach: Detach = False) -> None:
    """Watch a live run; if its coordinator has died, start another, which continues the run exactly."""
    with interruptible():
        from stagecoach.coordinator.cli import foreground
        from stagecoach.coordinator.cli.terminal.live_view import print_status

    state = run.status(accounting=False).state
    if run.live and not detach:
        foreground.watch(run)
    elif state is RunStatus.INTERRUPTED and run.folder.remote is None and detach:
        foreground.detach(["resume", run.run_id, "--runs-dir", str(run.folder.path.parent)], run.run_id)
    elif state is RunStatus.INTERRUPTED:
        console.print("the coordinator has died; this command replaces it, and Ctrl-C ends the run")
        try:
            foreground.supervise(run.take_up, detach=detach)
        except RunLive:  # another command was faster, and Ctrl-C must not end its run
            signal.signal(signal.SIGINT, signal.default_int_handler)
            foreground.watch(run)
    else:
        print_status(run, found := run.status(), console)
        if state is RunStatus.FINISHED:
            goal = " --set stop_at…" if found.reason in (EndReason.SOLVED, EndReason.EXHAUSTED) else ""
            console.text(f"the run has ended; `{run.folder.continued_by}{goal}` continues it")


@app.command(epilog=example("stagecoach scale my-run 4` or `stagecoach scale my-run auto --min 2 --max 16"))
@on_run
def scale(
    run: "Run",
    workers: Annotated[
        str | None, typer.Argument(metavar="[N|auto]", help="How many; `auto`: as needed, between the bounds.")
    ] = None,
    least: Annotated[int | None, typer.Option("--min", help="The fewest for `auto`; else what it was.")] = None,
    most: Annotated[int | None, typer.Option("--max", help="The most for `auto`; else what it was.")] = None,
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
    console.print(f"{run.run_id}: scaling {run.scale(number, min_workers=least, max_workers=most)}")


@app.command(epilog=example("stagecoach stop my-run"))
@on_run
def stop(run: "Run") -> None:
    """End a live run with a final checkpoint, and wait until it has ended."""
    run.stop()
    progress("ending with a last checkpoint")
    console.print(f"{run.run_id}: {reason_in_words(run.wait().reason)}")


@app.command(epilog=example("stagecoach evaluate my-run --episodes 20 --video videos"))
def evaluate(
    target: _Target,
    episodes: Annotated[
        int | None, typer.Option(min=1, help="How many; by default what the run's config says.")
    ] = None,
    video: Annotated[Path | None, typer.Option(metavar="DIR", help="Record each episode there as MP4.")] = None,
    stochastic: _Stochastic = False,
    trust_config: TrustConfig = False,
    runs_dir: RunsDir = RUNS,
    endpoint_url: EndpointUrl = None,
    as_json: Json = False,
) -> None:
    """Play a checkpoint, greedily by default, and print its score."""
    from stagecoach.coordinator.catalog.checkpoint_lookup import evaluate as score

    progress(f"playing {f'{episodes} episodes' if episodes else 'the episodes of an evaluation'} of {target}", as_json)
    with contextlib.redirect_stdout(sys.stderr if as_json else sys.stdout):  # what the environment prints is no JSON
        given: dict[str, Any] = {"stochastic": stochastic, "trust_config": trust_config, "endpoint_url": endpoint_url}
        found = score(target, runs_dir, episodes, video, **given)
    if as_json:
        console.json({"checkpoint": found.checkpoint, **found.scores, "videos": found.videos})
    else:
        _print_scores(found)


@app.command(epilog=example("stagecoach play my-run --episodes 3` or `stagecoach play config.yaml --record played"))
def play(
    target: _Target,
    episodes: Annotated[int, typer.Option(min=1, help="How many.")] = 1,
    stochastic: _Stochastic = False,
    record: Annotated[
        Path | None, typer.Option(metavar="DIR", help="Play CONFIG yourself (in place of RUN), into DIR/played.csv.")
    ] = None,
    keys: Annotated[str, typer.Option(metavar="left=0,…", help="With --record: key → action; by default 0 to 9.")] = "",
    idle: Annotated[int | None, typer.Option(help="With --record: the action while no key is pressed.")] = None,
    wait: Annotated[bool, typer.Option("--wait", help="With --record: stand still while no key is pressed.")] = False,
    fps: Annotated[int | None, typer.Option(min=1, help="With --record: steps per second.")] = None,
    trust_config: TrustConfig = False,
    runs_dir: RunsDir = RUNS,
    endpoint_url: EndpointUrl = None,
) -> None:
    """Watch a checkpoint play: the environment shows itself (render_mode=human). Or play yourself, for a dataset."""
    if record is not None:
        _record(target, record, episodes, keys, {"idle": idle, "wait": wait, "fps": fps})
        return
    if keys or wait or (idle, fps) != (None, None):
        raise UserError("--keys, --idle, --wait and --fps say how you play; give --record DIR as well")
    from stagecoach.coordinator.catalog.checkpoint_lookup import evaluate as score

    given: dict[str, Any] = {"stochastic": stochastic, "trust_config": trust_config, "endpoint_url": endpoint_url}
    _print_scores(score(target, runs_dir, episodes, show=True, **given))


def _record(target: str, folder: Path, episodes: int, keys: str, more: dict[str, Any]) -> None:
    from stagecoach.rollout_worker.recorded_play import FILE, record_play
    from stagecoach.shared.base.user_code import extend_imports
    from stagecoach.shared.config.loading import load_config

    config = config_file(Path(target))
    extend_imports([str(config.resolve().parent), os.getcwd()])
    try:
        actions = {key: int(action) for key, action in (pair.split("=") for pair in keys.split(",") if pair)}
    except ValueError:
        raise UserError(f"--keys {keys!r}: expected KEY=ACTION, as in left=0,right=1") from None
    played = record_play(load_config(config), folder, episodes, actions, **more)
    console.print(
        f"{counted(played, 'whole episode')} written to {folder / FILE}: demonstrations.path, or dataset.path"
    )


def _print_scores(found: "Evaluation") -> None:
    scores = found.scores
    names = ("mean_return", "min_return", "max_return", "mean_length")
    mean, least, most, length = (figure(scores[name]) for name in names)
    one = f"{mean} in one episode of {counted(round(scores['mean_length']), 'step')}{success_in_words(scores)}"
    many = f"{score_in_words(scores)} (min {least}, max {most}, mean length {length})"
    text = one if scores["episodes"] == 1 else many
    console.text(f"{found.checkpoint}: {text}", *(f"video: {path}" for path in found.videos))


for _more in (history, runs, metrics, plot, study, league, evidence, pages, configs, profile_and_bench, tune):
    app.registered_commands += _more.app.registered_commands


def main() -> None:
    """The entry point: turns named errors into one line and an exit code."""
    outlive_ray()  # before a user's module imports Ray
    try:
        app()
    except StagecoachError as error:
        complain(headline(error) if isinstance(error, EnvironmentFailure) else error)
        sys.exit(Exit.REFUSED if isinstance(error, UserError | EnvironmentFailure) else Exit.FAILED)
    except Exception as error:
        if "redis" not in sys.modules or not isinstance(error, sys.modules["redis"].RedisError):
            raise
        complain(f"Redis: {error}")
        sys.exit(Exit.FAILED)
