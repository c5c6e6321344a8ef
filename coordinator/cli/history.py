"""`stagecoach replay`, `explain`, `bisect` and `what-if`: what a run's recorded log is good for (archive: all)."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from stagecoach.coordinator.cli.terminal.console import NARROW, console, progress
from stagecoach.coordinator.cli.terminal.options import Exit, Json, TrustConfig, example, on_run
from stagecoach.shared.base.errors import UserError
from stagecoach.shared.base.printable import counted, figure

if TYPE_CHECKING:
    from stagecoach.coordinator.run_access.run import Run
    from stagecoach.trainer_node.replay.explanation import Explanation

_SHOWN = 20
"""Rows in a table; `--json` has all."""
app = typer.Typer()


class Unit(StrEnum):
    FRAGMENT, EPISODE = "fragment", "episode"


Start = Annotated[str, typer.Option("--from", metavar="CHECKPOINT|start", help="Where to begin.")]
Goal = Annotated[str, typer.Option("--to", metavar="CHECKPOINT", help="How far to go.")]


@contextmanager
def _learning_again(silent: bool) -> Iterator[Callable[[int, int], None]]:
    """Shows a bar; yields what moves it."""
    from rich.progress import Progress

    with Progress(console=console, transient=True, disable=silent or not console.is_terminal) as bar:
        task = bar.add_task("training again", total=None)
        yield lambda version, last: bar.update(task, completed=version, total=last)


@app.command(epilog=example("stagecoach replay my-run --from start --to best"))
@on_run
def replay(
    run: "Run",
    start: Start = "start",
    goal: Annotated[str, typer.Option("--to", metavar="CHECKPOINT", help="What must come out.")] = "latest",
    trust_config: TrustConfig = False,
    as_json: Json = False,
) -> None:
    """Train again over the archived log (archive=all), and compare every object with a checkpoint of the run."""
    with _learning_again(as_json) as shown:
        found = run.replay(start, goal, shown, trust_config=trust_config)
    if as_json:
        console.json({**vars(found), "equal": found.equal})
    else:
        counts = ((found.versions, "version"), (found.fragments, "fragment"), (found.env_steps, "env step"))
        what = f"from {found.start}: {', '.join(counted(*count) for count in counts)}"
        equal = f"equal, all {len(found.sha256)} objects"
        verdict = equal if found.equal else f"different: {', '.join(found.different)}"
        console.text(f"{found.goal}: {verdict} ({what})", *(f"  {line}" for line in found.unlike))
        console.text(*(f"  {digest}  {name}" for name, digest in found.sha256.items()))
    if not found.equal:
        raise typer.Exit(Exit.FAILED)


@app.command(epilog=example("stagecoach explain my-run --version 120"))
@on_run
def explain(
    run: "Run",
    version: Annotated[int, typer.Option("--version", metavar="N", min=1, help="The policy version in question.")],
    last: Annotated[int, typer.Option("--last", metavar="K", min=1, help="Explain the K updates up to it.")] = 1,
    by: Annotated[Unit, typer.Option("--by", help="Rows of the table; --json has both.")] = Unit.FRAGMENT,
    video: Annotated[
        Path | None,
        typer.Option(metavar="FILE", help="Play the episode with the largest share again, and record it as MP4."),
    ] = None,
    trust_config: TrustConfig = False,
    as_json: Json = False,
) -> None:
    """Rank what moved the policy to a version, by worker, fragment and episode (archive=all)."""
    from stagecoach.coordinator.catalog.checkpoint_lookup import require_recorder

    if video is not None:
        require_recorder()
    with _learning_again(as_json) as shown:
        found = run.explain(version, last, shown, trust_config=trust_config)
    if not as_json and not found.influences:
        console.text("nothing was learned in these updates: warm-up, or no agent has acted")
    elif not as_json:
        _show_explanation(found, by)
    if video is not None and not found.episodes:
        raise UserError(
            "--video: no episode is explained; a recurrent policy learns fragments, and warm-up learns nothing"
        )
    played = None if video is None else run.play_again(found.episodes[0], video, trust_config=trust_config)
    if as_json:
        console.json(found.as_dict() | {"video": None if played is None else vars(played)})
    elif played is not None:
        what = f"environment {played.environment} of {played.worker}, episode {played.episode} (seed {played.seed})"
        paid = f"; step {played.other_reward_at} pays another reward here" if played.other_reward_at else ""
        upto = "" if played.ended else ", as far as it is in the archive"
        console.text(f"video: {played.path}: {what}, {counted(played.steps, 'step')}{upto}, as recorded{paid}")


def _show_explanation(found: "Explanation", by: Unit) -> None:
    from rich.table import Column, Table

    each_is, ranked = by.value, found.influences if by is Unit.FRAGMENT else found.episodes
    if not ranked:
        raise UserError("--by episode: a recurrent policy learns whole fragments, whatever episode a step is of")
    replaying = ranked[0].gradient_norm is None
    measured = ("rows", "TD error") if replaying else ("gradient", "cosine", "advantage", "KL")
    of_episode = () if by is Unit.FRAGMENT else ("slot", "end")
    titles = "version", "worker", "position", *of_episode, "share", *measured, "return"
    table = Table(*(Column(title, overflow="fold") for title in titles), **NARROW)
    for each in ranked[:_SHOWN]:
        if replaying:
            numbers = [f"{each.transitions}", f"{each.td_error:.3g}"]
        else:
            named = (each.gradient_norm, ".3g"), (each.cosine, ".2f"), (each.advantage, ".3g"), (each.kl, ".4f")
            numbers = ["" if value is None else format(value, form) for value, form in named]
        where = () if by is Unit.FRAGMENT else (str(each.slot), "" if each.last_step is None else str(each.last_step))
        first = str(each.version), each.worker, each.position, *where, f"{each.share:.0%}"
        table.add_row(*first, *numbers, figure(each.mean_return))
    console.print(table)
    whole, shown_of = len(ranked), min(len(ranked), _SHOWN)
    parts = ", ".join(f"{worker or 'older fragments'} {share:.0%}" for worker, share in found.by_worker.items())
    console.text(
        f"by worker: {parts}",
        f"{shown_of} of {counted(whole, each_is)}, learned again from {found.start}; share: of the "
        + ("TD errors of the rows drawn" if replaying else "gradient norms of the update"),
    )


@app.command(epilog=example('stagecoach bisect my-run --when "return of 20 games < 100"'))
@on_run
def bisect(
    run: "Run",
    when: Annotated[str, typer.Option("--when", metavar="CONDITION", help="'METRIC > N' or 'return of 20 games < N'.")],
    goal: Goal = "latest",
    trust_config: TrustConfig = False,
    as_json: Json = False,
) -> None:
    """Find the first version for which a condition holds: in the recorded metrics, or by halving (archive=all)."""
    found = run.bisect(when, goal, lambda text: progress(text, as_json), trust_config=trust_config)
    if as_json:
        console.json(vars(found))
        return
    former = "no row before it" if found.before is None else f"{found.before:g} at version {found.after_version}"
    console.text(
        f"version {found.version}: {found.value:g} ({former}; {counted(found.replays, 'replay')})",
        f"what moved it: stagecoach explain {run.run_id} --version {found.version}",
    )


@app.command("what-if", epilog=example("stagecoach what-if my-run --from start --without worker-3"))
@on_run
def what_if(
    run: "Run",
    start: Start = "start",
    goal: Goal = "latest",
    without: Annotated[
        list[str] | None,
        typer.Option(
            "--without", metavar="WORKER|FIRST..LAST", help="Leave out a worker, or log positions; may be repeated."
        ),
    ] = None,
    sets: Annotated[
        list[str] | None,
        typer.Option("--set", metavar="a.b=c", help="Change a field of what is learned; may be repeated."),
    ] = None,
    run_id: Annotated[str | None, typer.Option("--run-id", metavar="NAME", help="Name of the new run.")] = None,
    trust_config: TrustConfig = False,
    as_json: Json = False,
) -> None:
    """Learn the recorded log again with something changed, as a run of its own (archive=all)."""
    changes = {"without": tuple(without or ()), "overrides": tuple(sets or ())}
    with _learning_again(as_json) as shown:
        found = run.what_if(start, goal, **changes, run_id=run_id, progress=shown, trust_config=trust_config)
    if as_json:
        console.json(vars(found))
        return
    left = ", ".join(f"{worker} {count:,}" for worker, count in found.left_out.items()) or "none"
    how_much = f"{counted(found.updates, 'update')}, {counted(found.env_steps, 'env step')}"
    console.text(
        f"{found.run_id}: {how_much} from {found.start}",
        f"transitions left out: {left}; too few for an update at the end: {found.not_learned:,}",
    )
    if found.ratios_outside is not None:
        console.text(
            f"rows whose likelihood ratio was outside [0.5, 2]: {found.ratios_outside:.1%}; the more, the less this "
            f"says about a run that had acted so itself"
        )
    console.text(*(f"  {digest}  {name}" for name, digest in found.sha256.items()))
    console.text(
        f"how it plays: stagecoach evaluate {found.run_id}",
        f"compared with the run: stagecoach study {run.run_id} {found.run_id}",
    )
