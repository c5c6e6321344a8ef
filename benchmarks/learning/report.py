"""docs/learning/README.md from the raw data: curves, gates by family, controls, peers, parity, and what fails."""

from __future__ import annotations

import math
import statistics
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np

from benchmarks.learning.curves import draw_grid
from benchmarks.learning.results import Result, current
from benchmarks.learning.tasks import MODES, PEERS, Mode, Task
from benchmarks.provenance import commits_since
from stagecoach.coordinator.run_access.seed_statistics import difference_interval, iqm, iqm_interval
from stagecoach.shared.experience.spaces import Array

SHARE = 0.8
"""Of the seeds that must reach the gate: four of five."""
SEEDS = 5
"""Rows with fewer stand apart."""
Data = Mapping[tuple[str, Mode], Sequence[Result]]

_FAMILIES = {"ppo": "PPO", "dqn": "DQN and Rainbow", "from_data": "Offline learning", "teams": "Teams"}
_INTRODUCTION = """\
# Shown to learn

Does each algorithm learn, and how well? Here is what came out, with the commit that it came out of. Each run is started
from the command line in a process of its own, with a real Redis and S3 server. *Inline* has all roles in that process,
*distributed* two rollout workers, trainer and evaluator as Ray actors.

![Learning curves of all rows](curves.png)

Curves: interquartile mean over the seeds, with its 95 % bootstrap interval (Agarwal et al. 2021); dashed: the gate.

- **Gate**: mean return that the last checkpoint has to reach, after so many env steps of training. It is played at
  least 100 times, greedily unless the row says otherwise, from starts of its own. The luckiest checkpoint counts for
  nothing.
- **Passed**: seeds at the gate, of those that ran. Four of five have to be; of a negative control, none may.
- **At the end**: interquartile mean over the seeds of the last checkpoint [95 % interval].
- **Steps**: env steps to the third of three checkpoints in a row at the gate, or to the end; median over the seeds.
  Warm-up counts. –: not reached by half of them.
- **Commit**: what the runs were made with, and how many commits ago. A result counts while its row and all defaults
  that decide learning are what they were, and its commit is in the log. All runs of a row, in both modes, are of one
  commit. Those of a branch that entered the log as one commit count from that one on.
"""

_HEAD = """\
| task | gate | mode | passed | at the end | steps | reference | commit |
|---|---|---|---|---|---|---|---|
"""
_CONTROLS = "## Negative controls\n\nWhat must not learn must not seem to.\n\n"
_FEW = "## Fewer than five seeds\n\nToo few to say more than that it can be done.\n\n"
_BESIDE = """\
## Compared with Stable-Baselines3

The same settings, as many env steps, evaluated the same way. The mean over all checkpoints says how soon and how well
it learned; the difference is ours less theirs.

| task | at the end: ours | Stable-Baselines3 | mean over checkpoints: ours | Stable-Baselines3 | difference [95 %] |
|---|---|---|---|---|---|
"""
_PARITY = """\
## Distributed and inline

Does it matter where the roles run? Compared is the mean over all checkpoints of a run. Where nothing differs, the
interval of the difference leaves out 0 every ninth time (five seeds each).

| task | at the end: distributed | inline | mean over checkpoints: distributed | inline | difference [95 %] |
|---|---|---|---|---|---|
"""
_REPEAT = """\
## Repeat a row

`make learning LEARNING="--only cartpole-ppo --mode inline"` runs five seeds and writes this page anew. With
`--beside sb3` it runs Stable-Baselines3. The rows are in `benchmarks/learning/table/`, the data of each run in
`docs/learning/data/`.
"""


def write_report(tasks: Sequence[Task], folder: Path) -> None:
    """Writes README.md and curves.png next to the data's folder."""
    data = _rows(tasks, folder)
    ran = [task for task in tasks if any(data[task.name, mode] for mode in MODES)]
    few = [task for task in ran if max(len(data[task.name, mode]) for mode in MODES) < SEEDS]
    full = [task for task in ran if task not in few]
    parts = [_INTRODUCTION]
    for family in sorted({task.family for task in full if not task.negative}):
        title = _FAMILIES.get(family, family.replace("_", " ").capitalize())
        rows = _gates([task for task in full if task.family == family and not task.negative], data)
        parts.append(_table(f"## {title}\n\n{_HEAD}", rows))
    parts += [
        _table(_CONTROLS + _HEAD, _gates([task for task in full if task.negative], data)),
        _table(_FEW + _HEAD, _gates(few, data)),
        _table(_BESIDE, _compared(ran, data, "inline", "sb3")),
        _table(_PARITY, _compared(ran, data, "distributed", "inline")),
        _failures(tasks, ran, data),
        _REPEAT,
        _measured(data),
    ]
    folder.parent.mkdir(parents=True, exist_ok=True)
    curves = [(task, {mode: data[task.name, mode] for mode in (*MODES, *PEERS)}) for task in ran]
    draw_grid(curves, folder.parent / "curves.png")
    (folder.parent / "README.md").write_text("\n".join(part for part in parts if part))


def _rows(tasks: Sequence[Task], folder: Path) -> Data:
    """What counts today. Of a task's own runs, those of the commit that most of them have, and the newest such."""
    data: dict[tuple[str, Mode], list[Result]] = {}
    for task in tasks:
        found = {mode: current(folder, task, mode) for mode in (*MODES, *PEERS)}
        named = Counter(one.commit for mode in MODES for one in found[mode])
        chosen = max(named, key=lambda commit: (named[commit], -(commits_since(commit) or 0)), default="")
        for mode, results in found.items():
            data[task.name, mode] = [one for one in results if mode in PEERS or one.commit == chosen]
    return data


def fails(task: Task, results: Sequence[Result]) -> bool:
    """Returns whether too few seeds reach the gate, or any of a negative control; False until all seeds have run."""
    reached = _reached(task, results)
    return len(results) >= task.seeds and (reached > 0 if task.negative else reached < SHARE * len(results))


def _reached(task: Task, results: Sequence[Result]) -> int:
    return sum(math.isfinite(one.reached_at(task)) for one in results)


def _table(head: str, rows: Sequence[str]) -> str:
    return head + "\n".join(rows) + "\n" if rows else ""


def _gates(tasks: Sequence[Task], data: Data) -> list[str]:
    return [_row(task, mode, data[task.name, mode]) for task in tasks for mode in MODES if data[task.name, mode]]


def _row(task: Task, mode: Mode, results: Sequence[Result]) -> str:
    at = statistics.median(one.reached_at(task) for one in results)
    passed = f"{_reached(task, results)} of {len(results)}"
    cells = [
        f"`{task.name}`: {task.algorithm}, {task.environment}",
        f"{'below ' if task.negative else ''}{task.reach:g} within {task.within:,}", mode,
        f"**{passed}: fails**" if fails(task, results) else passed,
        _at_the_end(results), f"{at:,.0f}" if math.isfinite(at) else "–", f"{task.reference} ({task.source})",
        _age(results[0].commit),
    ]  # fmt: skip
    return f"| {' | '.join(cells)} |"


def _at_the_end(results: Sequence[Result]) -> str:
    scores = np.array([one.score for one in results])
    return f"{iqm(scores):.4g} {_bracket(*iqm_interval(scores))}"


def _age(commit: str) -> str:
    return f"{commit[:8]}, {commits_since(commit)} ago"


def _compared(tasks: Sequence[Task], data: Data, of: Mode, others: Mode) -> list[str]:
    rows = []
    for task in tasks:
        pair = [data[task.name, mode] for mode in (of, others)]
        if min(map(len, pair)) >= SEEDS:
            means = [np.array([one.mean_score for one in found]) for found in pair]
            cells = [f"`{task.name}`", *(f"{_at_the_end(found)} of {len(found)}" for found in pair),
                     *(f"{mean.mean():.4g}" for mean in means), _bracket(*difference_interval(*means))]  # fmt: skip
            rows.append(f"| {' | '.join(cells)} |")
    return rows


def _bracket(low: Array, high: Array) -> str:
    return f"[{low:.4g}, {high:.4g}]"


def _failures(tasks: Sequence[Task], ran: Sequence[Task], data: Data) -> str:
    """Rows that miss their gate, with what is known of the reason, and those that nothing is known of."""
    failed = [
        f"- `{task.name}`, {mode}: {_reached(task, found)} of {len(found)} seeds at {task.reach:g}. {task.note}".strip()
        for task in ran
        for mode in MODES
        if fails(task, found := data[task.name, mode])
    ]
    without = ", ".join(f"`{task.name}`" for task in tasks if task not in ran)
    parts = ["\n".join(failed)] if failed else []
    parts += [f"Not run with the settings of today, so nothing is known of them: {without}."] if without else []
    return "## What does not work\n\n" + "\n\n".join(parts or ["Every row that ran does what it should."]) + "\n"


def _measured(data: Data) -> str:
    results = [one for found in data.values() for one in found]
    if not results:
        return ""
    machines = sorted({f"{one.machine['cpu']}, {one.machine['cores']} cores" for one in results})
    versions = sorted({f"{name} {number}" for one in results for name, number in one.versions.items()})
    hours = sum(one.seconds for one in results) / 3600
    days = sorted({one.day for one in results})
    when = f"{days[0]} to {days[-1]}"
    return (
        f"## How it was measured\n\n{len(results)} runs, {hours:.1f} hours in all, {when}; what each was made with "
        f"is in its file.\n\n- machines: {'; '.join(machines)}\n- {', '.join(versions)}\n"
    )
