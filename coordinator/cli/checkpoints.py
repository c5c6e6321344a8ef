"""`stagecoach checkpoints …`: list, save, verify, show, prune, promote and export the checkpoints of a run."""

import json
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.table import Column, Table

from stagecoach.coordinator.catalog.checkpoint_lookup import named_code
from stagecoach.coordinator.cli.terminal.console import NARROW, console, progress
from stagecoach.coordinator.cli.terminal.live_view import dropped_in_words, ledger_line
from stagecoach.coordinator.cli.terminal.options import Exit, Json, TrustConfig, example, on_run
from stagecoach.coordinator.run_access.run import Run
from stagecoach.shared.base.errors import UserError
from stagecoach.shared.base.printable import counted, figure, score_in_words
from stagecoach.shared.config.run_config import Config
from stagecoach.shared.protocol.events import confirmed_return
from stagecoach.shared.protocol.ledger import Ledger, LedgerLine
from stagecoach.shared.storage.checkpoint_store import MARKS, Manifest
from stagecoach.trainer_node.checkpointing.verification import State
from stagecoach.trainer_node.export import ExportedPolicy
from stagecoach.trainer_node.state.snapshot import learned_sha256

_COLUMNS = ("checkpoint", "steps", "training", "evaluated")
_MARKS = ", ".join(MARKS)
Name = Annotated[str | None, typer.Argument(metavar="[NAME]", help=f"A checkpoint's name, or {_MARKS}.")]
app = typer.Typer(rich_markup_mode="markdown")


@app.command("list", epilog=example("stagecoach checkpoints my-run --json"))
@on_run
def list_(run: Run, as_json: Json = False) -> None:
    """List the kept checkpoints of a run; `list` may be left out."""
    entries = run.checkpoints()
    if as_json:
        console.json(entries)
        return
    ranked = [entry["evaluation"] for entry in entries if "ranking" in (entry["evaluation"] or {})]
    by = ranked[-1].get("ranked_by") or "ranked by" if ranked else "confirmed"  # a league's rating, or best_by
    titles = *_COLUMNS, by, "KiB"
    columns = [*(Column(title, no_wrap=title != by) for title in titles), Column("marks", overflow="fold")]
    table = Table(*columns, **NARROW)
    for entry in entries:
        scores = entry["evaluation"] or {}
        rank = scores.get("ranking") if by.startswith("rating") else confirmed_return(scores)  # of a whole league's log
        returns = map(figure, (entry["mean_return"], scores.get("mean_return"), rank))
        size = _kib(entry["bytes"], "")
        table.add_row(entry["name"], f"{entry['env_steps']:,}", *returns, size, ", ".join(entry["marks"]))
    console.print(table)
    console.text(
        "training, evaluated: mean returns; the best has the highest second evaluation (confirmed), or rating",
        f"in {run.store_location}",
    )


@app.command(epilog=example("stagecoach checkpoints save my-run"))
@on_run
def save(run: Run) -> None:
    """Request a checkpoint of a live run after its current update; `list` then shows it."""
    run.checkpoint()
    console.print(f"{run.run_id}: a checkpoint is written after the current update")


@app.command(epilog=example("stagecoach checkpoints verify my-run"))
@on_run
def verify(run: Run, name: Name = None, as_json: Json = False) -> None:
    """Read every byte of all checkpoints (or of one) and check it; exit code 1 if any is damaged."""
    progress(f"reading every byte of {name or 'all checkpoints'}", as_json)
    verdicts = run.verify(name)
    if as_json:
        console.json(verdicts)
    else:
        for verdict in verdicts:
            style = {State.OK: "green", State.DAMAGED: "red"}.get(verdict.state, "yellow")
            console.print(f"{verdict.state:<8}", style=style, end="")
            found = "; ".join(verdict.problems) or f"{verdict.objects} objects, {_kib(verdict.bytes)}"
            if verdict.state is State.CUT_OFF:
                found = "an upload that was never completed; nothing takes it for a checkpoint"
            console.text(f" {verdict.name}  {found}")
        if not verdicts:
            console.print(f"{run.run_id} has no checkpoint yet")
    if any(verdict.state is State.DAMAGED for verdict in verdicts):
        raise typer.Exit(Exit.FAILED)


@app.command(epilog=example("stagecoach checkpoints show my-run best"))
@on_run
def show(run: Run, name: Name = None, as_json: Json = False) -> None:
    """Show where a checkpoint (by default the latest) comes from: parent, config, log range, ledger, objects."""
    store = run.checkpoint_store()
    manifest = store.manifest(store.resolve(name or "latest"))
    entry = next((entry for entry in run.checkpoints() if entry["name"] == manifest.name), {})
    evaluation, marks = entry.get("evaluation"), entry.get("marks", [])
    if as_json:
        console.json({**manifest.model_dump(mode="json"), "marks": marks, "evaluation": evaluation})
        return
    table = Table.grid(Column(no_wrap=True), Column(overflow="fold"), padding=(0, 2))
    for row in _provenance(manifest, run.config, marks, evaluation):
        table.add_row(*row)
    console.print(table, highlight=False)
    objects = Table(Column("object", overflow="fold"), "KiB", Column("SHA-256", overflow="fold"))
    for key, item in manifest.objects.items():
        objects.add_row(key, _kib(item.bytes, ""), item.sha256)
    console.print(objects, highlight=False)


def _provenance(
    manifest: Manifest, config: Config, marks: list[str], evaluation: dict[str, Any] | None
) -> list[tuple[str, str]]:
    said = manifest.provenance
    same = "this run's config" if said["config_hash"] == config.hash() else "NOT this run's config"
    told, origin = said.get("evaluation"), said.get("initialized_from")
    first = "none: it is the first"
    if origin:
        first = f"none: it began with {origin['checkpoint']} of run {origin['run_id']}; {origin.get('summary', '')}"
    if other := said.get("what_if"):
        changes = [f"without {text}" for text in other["without"]] + [f"with {text}" for text in other["set"]]
        first = f"none: the log of run {other['run_id']} from {other['from']} on, {', '.join(changes)}"
    return [
        ("checkpoint", manifest.name + (f" ({', '.join(marks)})" if marks else "")),
        ("run", f"{manifest.run_id}, written by its trainer of epoch {manifest.epoch}"),
        ("objects in", manifest.folder),
        ("created", time.strftime("%Y-%m-%d %H:%M:%S %z", time.localtime(manifest.created))),
        ("parent", manifest.parent or first),
        ("code version", str(said["code_version"])),
        ("computed with", ", ".join(f"{name} {value}" for name, value in said.get("computed_with", {}).items())),
        ("learned hash", learned_sha256(manifest)),
        ("config hash", f"{said['config_hash']} ({same})"),
        ("seed", str(said["seed"])),
        ("phase", str(said["phase"])),
        ("log range", " to ".join(said["log_range"])),
        ("policy versions", " to ".join(map(str, said["policy_versions"]))),
        ("policy lag", ", ".join(f"{k}: {v:,}" for k, v in said["lag_histogram"].items()) or "no fragment yet"),
        *(
            (f"counters, {phase}", ", ".join(f"{count:,} {name.replace('_', ' ')}" for name, count in counts.items()))
            for phase, counts in said["counters"].items()
        ),
        ("training return", figure(said["mean_return"])),
        ("evaluation", score_in_words(evaluation) if evaluation else "not evaluated"),
        ("newest evaluation when written", f"{told['checkpoint']} {score_in_words(told)}" if told else "none"),
        *_ledger(said["ledger"]),
        *((f"ledger when written, {name}", ledger_line(line)) for name, line in said.get("accounting", {}).items()),
    ]


def _ledger(said: dict[str, Any]) -> Iterator[tuple[str, str]]:
    accounts = Ledger.from_json(json.dumps(said)).accounts
    lines = {name: LedgerLine(consumed=its.consumed, dropped=its.dropped) for name, its in accounts.items()}
    for name, line in (*lines.items(), ("all workers", sum(lines.values(), LedgerLine()))):
        committed = sum(line.dropped.values(), line.consumed)
        lost = dropped_in_words({reason: count.transitions for reason, count in line.dropped.items()})
        yield (
            f"ledger, {name}",
            f"{committed.transitions:,} committed = {line.consumed.transitions:,} consumed + {lost}, "
            f"in {counted(committed.fragments, 'fragment')}",
        )


def _kib(size: int, unit: str = " KiB") -> str:
    return f"{size / 1024:,.0f}{unit}"


@app.command(epilog=example("stagecoach checkpoints prune my-run --keep-last 1 --dry-run"))
@on_run
def prune(
    run: Run,
    keep_last: Annotated[int | None, typer.Option(min=1, help="Keep the newest K.")] = None,
    keep_best: Annotated[int | None, typer.Option(min=1, help="Keep the best B by evaluation.")] = None,
    keep_every: Annotated[int | None, typer.Option(min=1, help="Keep every M-th by policy version.")] = None,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Only say what would go.")] = False,
    as_json: Json = False,
) -> None:
    """Apply the retention rule to a run that is not live; the latest, best, final and promoted always stay.

    What is not given is as in the run's config. A live run's trainer prunes by itself.
    """
    progress("choosing the checkpoints to remove" if dry_run else "removing checkpoints", as_json)
    removed = run.prune(keep_last, keep_best, keep_every, dry_run=dry_run)
    if as_json:
        console.json(removed)
        return
    verb = "would remove" if dry_run else "removed"
    for item in removed:
        size = "an upload that was cut off, or damaged" if item.bytes is None else _kib(item.bytes)
        console.text(f"{verb} {item.name} ({size})")
    total = sum(item.bytes or 0 for item in removed)
    kept = len(run.checkpoints()) - (sum(item.bytes is not None for item in removed) if dry_run else 0)
    console.text(f"{verb} {counted(len(removed), 'checkpoint')}, {_kib(total)}; {kept} left")


@app.command(epilog=example("stagecoach checkpoints promote my-run best"))
@on_run
def promote(
    run: Run, name: Name = None, clear: Annotated[bool, typer.Option("--clear", help="Take the mark away.")] = False
) -> None:
    """Mark a checkpoint for deployment, if it is whole and its weights are finite.

    It is never pruned then, and `evaluate RUN`, `export RUN` and `load_policy` take it first.
    """
    if (name is None) != clear:
        raise UserError(f"give the name of a checkpoint (or {_MARKS}), or --clear")
    found = run.promote(name)
    text = f"{found} is {'no longer ' if clear else ''}promoted" if found else "nothing was promoted"
    console.text(f"{run.run_id}: {text}")


@app.command(epilog=example("stagecoach checkpoints export my-run best exported"))
@on_run
def export(
    run: Run,
    rest: Annotated[list[str], typer.Argument(metavar="[NAME] DIR", help=f"NAME may be {_MARKS}.")],
    onnx: Annotated[bool, typer.Option("--onnx", help="DIR/POLICY.onnx instead: to act without Stagecoach.")] = False,
    trust_config: TrustConfig = False,
) -> None:
    """Copy a checkpoint (by default the promoted, best or latest one) to DIR/RUN, for use on any machine."""
    if len(rest) > 2:
        raise UserError(f"export: expected [NAME] DIR, found {' '.join(rest)}")
    *name, directory = rest
    progress("writing ONNX files and comparing them with torch" if onnx else f"copying to {directory}")
    if onnx:
        made, files = run.export_onnx(Path(directory), *name, trust_config=trust_config)
        for policy_id, path in files.items():
            console.text(f"{path}  {_compared(made.policies[policy_id])}; from {made.checkpoint}")
        return
    folder = run.export(Path(directory), *name, trust_config=trust_config)
    trust = " --trust-config" if named_code(run.config) else ""
    console.text(folder)
    if run.config.environment.api != "external":  # whose clients alone can play
        console.text(f"  stagecoach evaluate {folder}{trust}")


def _compared(policy: ExportedPolicy) -> str:
    parts = [
        f"{one.max_difference:.1e} on {one.rows} {name} observations"
        f"{f' ({one.other_choices} choices differ)' if one.other_choices else ''}"
        for name, one in policy.compared.items()
    ]
    return f"differs from torch by at most {', '.join(parts)}"
