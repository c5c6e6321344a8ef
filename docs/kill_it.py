"""docs/kill-it.svg, from two real runs: `python docs/kill_it.py`.

Both runs have one worker and one seed. In the first one `kill -9` ends the worker, later the trainer; nothing disturbs
the second one. The picture shows the first run's returns, the kills, and the SHA-256 of both runs' final weights.
"""

import hashlib
import itertools
import os
import signal
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

from stagecoach import Run, load_config

ENV_STEPS = 98_304
KILLS = (("worker-0", 0.3), ("trainer", 0.6))
"""Role, and the share of the run after which its process is killed."""
WIDTH, HEIGHT, LEFT, TOP, RIGHT, BOTTOM = 820, 430, 62, 62, 24, 118
DRAW_SECONDS, LOOP_SECONDS, PAUSE = 9.0, 15.0, 0.08
"""Duration of the drawing and of a whole loop; share of the drawing that a kill interrupts."""


def train(runs_dir: str, run_id: str, kills: Sequence[tuple[str, float]]) -> tuple[Run, list[tuple[str, int, int]]]:
    """Trains CartPole-v1; returns the ended run, and name, process id and env step of each kill."""
    overrides = [f"runs_dir={runs_dir}", f"stop_at={{env_steps: {ENV_STEPS}}}", "rollout.workers=1", "seed=1"]
    run = Run.start(load_config(Path("examples/cartpole.yaml"), overrides), run_id)
    killed = []
    for name, share in kills:
        while (status := run.status(accounting=False)).env_steps < share * ENV_STEPS:
            time.sleep(0.02)
        pid = next(beat.pid for beat in status.roles if beat.id == name)
        os.kill(pid, signal.SIGKILL)
        killed.append((name, pid, status.env_steps))
    outcome = run.wait(600)
    assert outcome.status.env_steps >= ENV_STEPS, outcome
    return run, killed


def digest(run: Run) -> str:
    """Returns the SHA-256 of the final policy's weights."""
    final = run.status().final
    assert final is not None
    loaded = run.checkpoint_store().load(final, only="policy.safetensors")
    return hashlib.sha256(loaded.objects["default/policy.safetensors"]).hexdigest()


def returns(run: Run) -> list[tuple[float, float]]:
    """Returns env steps and mean return of the recent episodes, for each update that has them."""
    return [
        (row["time/env_steps"], row["rollout/ep_rew_mean"])
        for rows in run.metrics()
        for _, row in rows.named()
        if "rollout/ep_rew_mean" in row
    ]


def picture(curve: Sequence[tuple[float, float]], kills: Sequence[tuple[str, int, int]], sha: Sequence[str]) -> str:
    """Draws the curve as an animated SVG; without animation it shows the end."""

    def x(steps: float) -> float:
        return LEFT + (WIDTH - LEFT - RIGHT) * steps / ENV_STEPS

    def y(value: float) -> float:
        return HEIGHT - BOTTOM - (HEIGHT - TOP - BOTTOM) * value / 500

    # The curve is drawn in parts: each kill interrupts it for a moment.
    ends = [0, *(steps for _, _, steps in kills), ENV_STEPS + 1]
    speed = (1 - PAUSE * len(kills)) * DRAW_SECONDS / ENV_STEPS
    body, style = [], []
    for value in range(0, 501, 100):
        body.append(f'<line class="grid" x1="{LEFT}" x2="{WIDTH - RIGHT}" y1="{y(value):.0f}" y2="{y(value):.0f}"/>')
        body.append(f'<text class="tick" text-anchor="end" x="{LEFT - 8}" y="{y(value) + 4:.0f}">{value}</text>')
    for steps in range(0, ENV_STEPS - 9_999, 20_000):
        where = f'x="{x(steps):.0f}" y="{HEIGHT - BOTTOM + 18}"'
        body.append(f'<text class="tick" text-anchor="middle" {where}>{steps // 1000}k</text>')
    body.append(f'<text class="tick" text-anchor="end" x="{WIDTH - RIGHT}" y="{HEIGHT - BOTTOM + 18}">env steps</text>')

    def appear(name: str, seconds: float) -> None:
        """Adds the animation of an element that appears after `seconds` of each loop."""
        share = f"{100 * seconds / LOOP_SECONDS:.2f}%"
        style.append(f"@keyframes {name}{{0%,{share}{{visibility:hidden}}{share},100%{{visibility:visible}}}}")
        style.append(f".{name}{{animation:{name} {LOOP_SECONDS}s step-end infinite}}")

    clock = 0.0
    for part, (first, last) in enumerate(itertools.pairwise(ends)):
        points = [(steps, value) for steps, value in curve if first <= steps <= last]
        before = [point for point in curve if point[0] < first]
        points = [before[-1], *points] if before else points
        path = " ".join(f"{x(steps):.1f},{y(value):.1f}" for steps, value in points)
        seconds = (last - first) * speed
        begin, end = 100 * clock / LOOP_SECONDS, 100 * (clock + seconds) / LOOP_SECONDS
        style.append(
            f"@keyframes line{part}{{0%,{begin:.2f}%{{stroke-dashoffset:1}}{end:.2f}%,100%{{stroke-dashoffset:0}}}}"
        )
        style.append(f".line{part}{{animation:line{part} {LOOP_SECONDS}s linear infinite}}")
        body.append(f'<polyline class="curve line{part}" pathLength="1" points="{path}"/>')
        clock += seconds
        if part < len(kills):
            name, pid, steps = kills[part]
            high = y(min(points, key=lambda point: abs(point[0] - steps))[1])
            appear(f"kill{part}", clock)
            label = f"kill -9 {pid}  # {name.partition('-')[0]}"
            at = x(steps)
            body.append(
                f'<g class="kill{part}"><line class="kill" x1="{at:.1f}" x2="{at:.1f}" y1="{TOP}" '
                f'y2="{HEIGHT - BOTTOM}"/><path class="cross" d="M{at - 6:.1f} {high - 6:.1f}l12 12m0 -12l-12 12"/>'
                f'<text class="command" text-anchor="middle" x="{at:.1f}" y="{TOP - 9}">{label}</text></g>'
            )
            clock += PAUSE * DRAW_SECONDS
    for row, (what, digits) in enumerate(zip(("killed twice", "undisturbed"), sha, strict=True)):
        appear(f"sha{row}", clock + 0.5 + row)
        line = HEIGHT - 54 + 24 * row
        body.append(
            f'<g class="sha{row}"><text class="label" x="{LEFT}" y="{line}">{what}</text>'
            f'<text class="sha" x="{LEFT + 96}" y="{line}">sha256 {digits}</text></g>'
        )
    return f"""<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT}" role="img"
aria-labelledby="title">
<title id="title">A worker and the trainer are killed; the final weights equal those of an undisturbed run</title>
<style>
svg{{background:#fff}}
text{{font:13px ui-sans-serif,system-ui,sans-serif;fill:#334155}}
.title{{font-size:15px;font-weight:600;fill:#0f172a}}
.tick{{font-size:12px;fill:#64748b}}
.command,.sha{{font:12px ui-monospace,Menlo,Consolas,monospace}}
.command{{fill:#b91c1c}}
.grid{{stroke:#e2e8f0}}
.curve{{fill:none;stroke:#2563eb;stroke-width:2;stroke-linejoin:round;stroke-dasharray:1}}
.kill{{stroke:#b91c1c;stroke-dasharray:3 4}}
.cross{{stroke:#b91c1c;stroke-width:2.5;fill:none}}
@media(prefers-color-scheme:dark){{
svg{{background:#0d1117}}text{{fill:#cbd5e1}}.title{{fill:#f1f5f9}}.tick{{fill:#94a3b8}}.grid{{stroke:#273244}}
.curve{{stroke:#60a5fa}}.command{{fill:#f87171}}.kill,.cross{{stroke:#f87171}}
}}
@media(prefers-reduced-motion:no-preference){{
{chr(10).join(style)}
}}
</style>
<text class="title" x="{LEFT}" y="30">CartPole-v1, mean return while processes are killed</text>
{chr(10).join(body)}
</svg>
"""


def main(target: Path) -> None:
    with tempfile.TemporaryDirectory() as runs_dir:
        killed, kills = train(runs_dir, "killed", KILLS)
        undisturbed, _ = train(runs_dir, "undisturbed", ())
        sha = digest(killed), digest(undisturbed)
        print(*(f"killed {name} (pid {pid}) at {steps:,} env steps" for name, pid, steps in kills), *sha, sep="\n")
        if sha[0] != sha[1]:
            sys.exit("the final weights differ; no picture is written")
        target.write_text(picture(returns(killed), kills, sha))


if __name__ == "__main__":
    main(Path(__file__).with_name("kill-it.svg"))
