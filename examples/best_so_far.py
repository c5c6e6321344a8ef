"""A callback that keeps a file with the best evaluation so far: `metrics: {writers: [csv, best_so_far:BestSoFar]}`."""

from pathlib import Path

from stagecoach import Callback, WrittenRun


class BestSoFar(Callback):
    """Writes `best.txt` into `metrics/` in the run's folder, or into `folder`."""

    def __init__(self, run: WrittenRun, folder: str | None = None) -> None:
        super().__init__(run)
        self.file = (Path(folder) if folder else run.needed_folder) / "best.txt"
        self.file.parent.mkdir(parents=True, exist_ok=True)
        self.best = float("-inf")

    def on_evaluation(self, checkpoint: str, row: dict[str, float], env_steps: int) -> None:
        score = row["eval/ep_rew_mean"]
        if score > self.best:
            self.best = score
            self.file.write_text(f"{score:g} at {env_steps} env steps, by {checkpoint}\n")
