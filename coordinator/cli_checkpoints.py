"""`stagecoach checkpoints …`: list, verify, show, prune, promote and export the checkpoints of a run."""

from __future__ import annotations

import dataclasses
import json
import time
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.table import Column, Table

from coordinator.checkpoints import CUT_OFF, DAMAGED, OK, Verdict
from coordinator.cli_options import RUNS, Json, RunArgument, RunsDir, console, example, figure, print_json
from coordinator.console import ledger_line
from coordinator.run import Run
from coordinator.trust import named_code
from shared.checkpoint import MARKS, Manifest
from shared.config import Config
from shared.errors import CheckpointDamaged, CheckpointNotFound, UserError
from shared.events import confirmed_return
from shared.exports import Export, ExportedPolicy, read_export
from shared.ledger import Count, Ledger
from shared.printable import counted

_COLUMNS = ("checkpoint", "env steps", "return", "evaluated", "confirmed", "KiB")
_MARKS = ", ".join(MARKS)
Name = Annotated[str | None, typer.Argument(metavar="[NAME]", help=f"A checkpoint's name, or {_MARKS}.")]


app = typer.Typer(rich_markup_mode="markdown")


@app.command("list", epilog=example("stagecoach checkpoints my-run --json"))
def list_(run: RunArgument, runs_dir: RunsDir = RUNS, as_json: Json = False) -> None:
    """List the kept checkpoints of a run; `list` may be left out."""
    handle = Run.attach(run, runs_dir)
    entries = handle.checkpoints()
    exports = {entry["name"]: _export_of(handle, entry["name"]) for entry in entries}
    if as_json:
        print_json([{**entry, "export": exports[entry["name"]]} for entry in entries])
        return
    columns = [*(Column(title, no_wrap=True) for title in _COLUMNS), Column("marks", overflow="fold")]
    table = Table(*columns, box=None, padding=(0, 2, 0, 0), header_style="dim")  # it fits 80 columns
    for entry in entries:
        training = figure(entry["mean_return"])
        scores = entry["evaluation"] or {}
        evaluated = figure(scores.get("mean_return")), figure(confirmed_return(scores))
        marks = ", ".join([*entry["marks"], *_short(exports[entry["name"]])])
        table.add_row(entry["name"], f"{entry['env_steps']:,}", training, *evaluated, _kib(entry["bytes"], ""), marks)
    console.print(table)
    console.print(f"in {handle.store_location}", soft_wrap=True)


def _export_of(handle: Run, name: str) -> dict[str, Any] | None:
    """How a checkpoint's export compares with torch, or why there is no usable one; None where there is none at all."""
    try:
        export = read_export(handle.checkpoint_store(), name)
    except CheckpointNotFound:
        return None  # pruned meanwhile
    except CheckpointDamaged as error:
        return {"state": DAMAGED, "max_difference": None, "problem": str(error)}
    if export is None:
        return None
    if export.failures:
        return {"state": "failed", "max_difference": None, "problem": str(export)}
    return {"state": OK, "max_difference": export.max_difference, "problem": None}


def _short(export: dict[str, Any] | None) -> list[str]:
    if export is None:
        return []
    return [f"ONNX ±{export['max_difference']:.0e}" if export["state"] == OK else f"ONNX {export['state']}"]


@app.command(epilog=example("stagecoach checkpoints verify my-run"))
def verify(run: RunArgument, name: Name = None, runs_dir: RunsDir = RUNS, as_json: Json = False) -> None:
    """Read every byte of all checkpoints (or of one) and check it; exit code 1 if any is damaged."""
    verdicts = Run.attach(run, runs_dir).verify(name)
    if as_json:
        print_json([dataclasses.asdict(verdict) for verdict in verdicts])
    else:
        for verdict in verdicts:
            style = {OK: "green", DAMAGED: "red"}.get(verdict.state, "yellow")
            console.print(f"{verdict.state:<8}", style=style, end="")
            console.print(f" {verdict.name}  {_found(verdict)}", highlight=False, soft_wrap=True)
        if not verdicts:
            console.print(f"{run} has no checkpoint yet")
    if any(verdict.state == DAMAGED for verdict in verdicts):
        raise typer.Exit(1)


def _found(verdict: Verdict) -> str:
    if verdict.state == CUT_OFF:
        return "an upload that was never completed; nothing takes it for a checkpoint"
    return "; ".join(verdict.problems) or f"{verdict.objects} objects, {_kib(verdict.bytes)}"


@app.command(epilog=example("stagecoach checkpoints show my-run best"))
def show(run: RunArgument, name: Name = None, runs_dir: RunsDir = RUNS, as_json: Json = False) -> None:
    """Show where a checkpoint (by default the latest) comes from: parent, config, log range, ledger, objects."""
    handle = Run.attach(run, runs_dir)
    store = handle.checkpoint_store()
    manifest = store.manifest(store.resolve(name or "latest"))
    entry = next((entry for entry in handle.checkpoints() if entry["name"] == manifest.name), None)
    evaluation, marks = (entry["evaluation"], entry["marks"]) if entry else (None, [])
    export = read_export(store, manifest.name)
    if as_json:
        told = export.model_dump(mode="json") if export else None
        print_json({**manifest.model_dump(mode="json"), "marks": marks, "evaluation": evaluation, "export": told})
        return
    table = Table.grid(padding=(0, 2))
    table.add_column(no_wrap=True)
    table.add_column(overflow="fold")
    for row in _provenance(manifest, handle.config, marks, evaluation, export):
        table.add_row(*row)
    console.print(table, highlight=False)
    objects = Table(Column("object", overflow="fold"), "KiB", Column("SHA-256", overflow="fold"))
    for key, item in manifest.objects.items():
        objects.add_row(key, _kib(item.bytes, ""), item.sha256)
    console.print(objects, highlight=False)


def _provenance(
    manifest: Manifest, config: Config, marks: list[str], evaluation: dict[str, Any] | None, export: Export | None
) -> list[tuple[str, str]]:
    said = manifest.provenance
    same = "this run's config" if said["config_hash"] == config.hash() else "NOT this run's config"
    counters = said["counters"]
    told = said.get("evaluation")
    known = f"{told['checkpoint']} {_score(told)}" if told else "none"
    return [
        ("checkpoint", manifest.name + (f" ({', '.join(marks)})" if marks else "")),
        ("run", f"{manifest.run_id}, written by its trainer of epoch {manifest.epoch}"),
        ("objects in", manifest.folder),
        ("created", time.strftime("%Y-%m-%d %H:%M:%S %z", time.localtime(manifest.created))),
        ("parent", manifest.parent or _origin(said.get("initialized_from"))),
        ("code version", str(said["code_version"])),
        ("computed with", ", ".join(f"{name} {value}" for name, value in said.get("computed_with", {}).items())),
        ("config hash", f"{said['config_hash']} ({same})"),
        ("seed", str(said["seed"])),
        ("phase", str(said["phase"])),
        ("log range", " to ".join(said["log_range"])),
        ("policy versions", " to ".join(map(str, said["policy_versions"]))),
        ("policy lag", _lags(said["lag_histogram"])),
        *((f"counters, {phase}", _counters(counts)) for phase, counts in counters.items()),
        ("training return", figure(said["mean_return"])),
        ("evaluation", _score(evaluation) if evaluation else "not evaluated"),
        ("newest evaluation when written", known),
        *_onnx(export),
        *_ledger(said["ledger"]),
        *((f"books when written, {worker}", ledger_line(line)) for worker, line in said.get("books", {}).items()),
    ]


def _onnx(export: Export | None) -> list[tuple[str, str]]:
    """What lies beside the checkpoint for those who act without Stagecoach."""
    policies = export.policies.items() if export else ()
    return [(f"ONNX, {policy_id}", _compared(policy)) for policy_id, policy in policies]


def _origin(said: dict[str, Any] | None) -> str:
    """Where a run's first checkpoint has its weights from."""
    if not said:
        return "none: it is the first"
    return f"none: it began with {said['checkpoint']} of run {said['run_id']}; {said.get('summary', '')}"


def _ledger(said: dict[str, Any]) -> list[tuple[str, str]]:
    """What the trainer had settled by then, per worker and in sum."""
    ledger = Ledger.from_json(json.dumps(said))
    lines = {worker: (account.consumed, account.dropped) for worker, account in ledger.accounts.items()}
    total: dict[str, Count] = {}
    for _, dropped in lines.values():
        for reason, count in dropped.items():
            total[reason] = total.get(reason, Count()) + count
    lines["all workers"] = (ledger.consumed(), total)
    return [(f"ledger, {worker}", _books(consumed, dropped)) for worker, (consumed, dropped) in lines.items()]


def _books(consumed: Count, dropped: dict[str, Count]) -> str:
    lost = sum(dropped.values(), Count())
    reasons = ", ".join(f"{reason} {count.transitions:,}" for reason, count in dropped.items())
    settled = consumed + lost
    return (
        f"{settled.transitions:,} settled = {consumed.transitions:,} consumed + {lost.transitions:,} dropped"
        f"{f' ({reasons})' if reasons else ''}, in {counted(settled.fragments, 'fragment')}"
    )


def _score(score: dict[str, Any]) -> str:
    confirmation = score.get("confirmation")
    again = f", and {figure(confirmation['mean_return'])} from as many other starts" if confirmation else ""
    return f"{figure(score['mean_return'])} over {counted(score.get('episodes'), 'episode')}{again}"


def _lags(histogram: dict[str, int]) -> str:
    return ", ".join(f"{lag}: {count:,}" for lag, count in histogram.items()) or "no fragment yet"


def _counters(counts: dict[str, int]) -> str:
    return ", ".join(f"{count:,} {name.replace('_', ' ')}" for name, count in counts.items())


def _kib(size: int, unit: str = " KiB") -> str:
    return f"{size / 1024:,.0f}{unit}"


@app.command(epilog=example("stagecoach checkpoints prune my-run --keep-last 1 --dry-run"))
def prune(
    run: RunArgument,
    keep_last: Annotated[int | None, typer.Option(min=1, help="Keep the newest K.")] = None,
    keep_best: Annotated[int | None, typer.Option(min=1, help="Keep the best B by evaluation.")] = None,
    keep_every: Annotated[int | None, typer.Option(min=1, help="Keep every M-th by policy version.")] = None,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Only say what would go.")] = False,
    runs_dir: RunsDir = RUNS,
    as_json: Json = False,
) -> None:
    """Apply the retention rule to a run that is not live; the latest, best, final and promoted always stay.

    What is not given is as in the run's config. A live run's trainer prunes by itself.
    """
    handle = Run.attach(run, runs_dir)
    removed = handle.prune(keep_last, keep_best, keep_every, dry_run=dry_run)
    if as_json:
        print_json([dataclasses.asdict(item) for item in removed])
        return
    for item in removed:
        size = "an upload that was cut off, or damaged" if item.bytes is None else _kib(item.bytes)
        console.print(f"{'would remove' if dry_run else 'removed'} {item.name} ({size})", highlight=False)
    total = sum(item.bytes or 0 for item in removed)
    kept = len(handle.checkpoints()) - (sum(item.bytes is not None for item in removed) if dry_run else 0)
    verb = "would remove" if dry_run else "removed"
    console.print(f"{verb} {counted(len(removed), 'checkpoint')}, {_kib(total)}; {kept} left", highlight=False)


@app.command(epilog=example("stagecoach checkpoints promote my-run best"))
def promote(
    run: RunArgument,
    name: Name = None,
    clear: Annotated[bool, typer.Option("--clear", help="Take the mark away.")] = False,
    runs_dir: RunsDir = RUNS,
) -> None:
    """Mark a checkpoint for deployment, if it is whole and its weights are finite.

    It is never pruned then, and `evaluate RUN`, `export RUN` and `load_policy` take it first.
    """
    if (name is None) != clear:
        raise UserError(f"give the name of a checkpoint (or {_MARKS}), or --clear")
    found = Run.attach(run, runs_dir).promote(name)
    if not clear:
        console.print(f"{run}: {found} is promoted", highlight=False)
    else:
        console.print(f"{run}: {found} is no longer promoted" if found else f"{run}: nothing was promoted")


@app.command(epilog=example("stagecoach checkpoints export my-run best exported"))
def export(
    run: RunArgument,
    rest: Annotated[list[str], typer.Argument(metavar="[NAME] DIR", help=f"NAME may be {_MARKS}.")],
    onnx: Annotated[bool, typer.Option("--onnx", help="DIR/POLICY.onnx instead: to act without Stagecoach.")] = False,
    runs_dir: RunsDir = RUNS,
) -> None:
    """Copy a checkpoint (by default the promoted, best or latest one) to DIR/RUN, for use on any machine."""
    if len(rest) > 2:
        raise UserError(f"export: expected [NAME] DIR, found {' '.join(rest)}")
    name, directory = (rest[0], rest[1]) if len(rest) == 2 else (None, rest[0])
    handle = Run.attach(run, runs_dir)
    if onnx:
        made, files = handle.export_onnx(Path(directory), name)
        for policy_id, path in files.items():
            console.print(f"{path}  {_compared(made.policies[policy_id])}", highlight=False, soft_wrap=True)
        return
    folder = handle.export(Path(directory), name)
    console.print(f"{folder}", highlight=False, soft_wrap=True)
    trust = " --trust-config" if named_code(handle.config) else ""
    console.print(f"  stagecoach evaluate {folder}{trust}", highlight=False, soft_wrap=True)


def _compared(policy: ExportedPolicy) -> str:
    """How an exported policy compares with torch, or why there is none."""
    if policy.failure is not None:
        return policy.failure
    parts = [
        f"{one.max_difference:.1e} on {one.rows} {name} observations"
        f"{f' ({one.other_choices} choices differ)' if one.other_choices else ''}"
        for name, one in policy.compared.items()
    ]
    return f"differs from torch by at most {', '.join(parts)}"
