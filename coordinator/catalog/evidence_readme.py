"""The README of a run's evidence: what each file shows and does not show, and the commands that verify it."""

from collections.abc import Iterable, Mapping
from typing import Any

from stagecoach.shared.base.printable import counted, printable

_FILES = {
    "evidence.json": "All facts of this page for programs: hashes, seeds, versions, verdicts, counts.",
    "config.yaml": "The resolved config, with every default. Its `config_hash` covers the fields that decide learning.",
    "environment.json": "The agents and the spaces of observations and actions, as recorded when the run started.",
    "packages.txt": "Code version, libraries, device and threads of the newest checkpoint; then installed packages. "
    "Packages are those of now: only Python, PyTorch and NumPy are compared with what trained. A code version that "
    "ends in `-dirty` had changes that no commit has.",
    "ledger.json": "For each worker: transitions and fragments produced, consumed, dropped by reason, and in flight. "
    "`balances` says that the first is the sum of the others.",
    "drops.csv": "Every fragment that was not learned from: why, how many transitions, and where in the log. Rows "
    "without a position count drops whose place is not known. The sums are those of the ledger.",
    "checkpoints.csv": "Every object of every kept checkpoint: SHA-256, and whether its bytes in the store agree. "
    "Pruned checkpoints are not in it.",
    "curves.png": "Training return over env steps, evaluations as dots. It shows no uncertainty: one run is one seed.",
    "metrics/train.csv": "Metrics of each update.",
    "metrics/evaluations.csv": "Scores of the evaluated checkpoints.",
    "metrics/episodes.csv": "Each training episode.",
    "metrics/events.csv": "What happened to the run: starts, failures, checkpoints, drops, notes.",
    "metrics/fleet.csv": "Workers and machines over time.",
}
_NOT_SHOWN = """\
- Evidence is not compliance: no standard is checked, and the folder is not signed.
- The hashes show that bytes are unchanged since they were recorded. They do not show who recorded them.
- A score says how the policy did in the evaluated episodes, not how it does elsewhere.
- The data of an environment (its code, assets, simulators) are covered only as far as `hashes_in_config` names them.
"""


def readme(summary: Mapping[str, Any], files: Iterable[str]) -> str:
    """Returns the README for the content of evidence.json and the other files of the folder."""
    run_id, replay = summary["run_id"], summary["replay"]
    ended = f": {printable(summary['reason'])}" if summary["reason"] else ""
    damaged, drops = ", ".join(summary["damaged"]) or "nothing", summary["drops"]
    dropped = f"{counted(drops['fragments'], 'fragment')} ({counted(drops['transitions'], 'transition')})"
    facts = [
        f"- State: {summary['state']}{ended}. Last checkpoint: {summary['up_to'] or 'none'}.",
        f"- Config hash: `{summary['config_hash']}`. Seed: {summary['seeds']['config']}.",
        f"- Ledger balances: {_word(summary['ledger']['balances'])}.",
        f"- Dropped: {dropped}, of which {drops['with_position']:,} with their position in the log.",
        f"- Damaged: {damaged}.",
        f"- Replay from {(replay or {}).get('start', 'start')}: {_replay(replay)}.",
    ]
    listed = [f"- `{name}`: {_FILES[name]}" for name in files]
    absent = [f"- {what}: {why}" for what, why in sorted(summary["absent"].items())] or ["- Nothing."]
    commands = [
        "sha256sum -c SHA256SUMS   # in this folder: no file has changed since it was written",
        f"stagecoach checkpoints verify {run_id}   # the store's bytes are those of checkpoints.csv",
    ]
    if begin := summary["replay_from"]:
        commands.append(
            f"stagecoach replay {run_id} --from {begin} --to {summary['up_to']}   # the log gives its weights"
        )
    parts = [
        f"# Evidence of run {run_id}", "\n".join(facts), "## Files", "\n".join(listed),
        "## Not in this folder", "\n".join(absent), "## Verify", "```sh\n" + "\n".join(commands) + "\n```",
        "`stagecoach` reads the run itself, so it needs access to its store. A replay needs the archived log "
        "(`archive: all`), and gives equal objects with the versions in `packages.txt`, on a CPU.",
        "## What this does not show", _NOT_SHOWN,
    ]  # fmt: skip
    return "\n\n".join(parts)


def _word(balances: bool | None) -> str:
    return {True: "yes", False: "NO", None: "unknown"}[balances]


def _replay(replay: Mapping[str, Any] | None) -> str:
    if replay is None:
        return "not requested (`stagecoach evidence RUN --replay`)"
    if replay["equal"]:
        return f"equal, all {len(replay['sha256'])} objects of {replay['goal']}"
    return f"DIFFERENT: {replay.get('error') or ', '.join(replay['different'])}"
