"""A callback that exports checkpoints while a run trains: `metrics: {writers: [csv, export_onnx:ExportOnnx]}`."""

import subprocess
import sys

from stagecoach import Callback, WrittenRun


class ExportOnnx(Callback):
    """Writes `onnx/<checkpoint>/<policy id>.onnx` into the run's folder; training does not wait for it.

    One export at a time: of the checkpoints that become durable meanwhile, only the last one of a run is exported.
    """

    def __init__(self, run: WrittenRun) -> None:
        super().__init__(run)
        self.folder = run.needed_folder.parent
        self.newest = ""
        self.process: subprocess.Popen[bytes] | None = None

    def on_checkpoint(self, name: str, env_steps: int) -> None:
        self.newest = name
        if self.process is None or self.process.poll() is not None:
            self.export()

    def export(self) -> None:
        self.check()
        target = self.folder / "onnx" / self.newest
        arguments = ["checkpoints", "export", self.folder.name, self.newest, str(target), "--onnx"]
        command = ["nice", sys.executable, "-m", "stagecoach", *arguments, "--runs-dir", str(self.folder.parent)]
        self.process, self.newest = subprocess.Popen(command), ""

    def check(self) -> None:
        """Waits for the last export; what is raised here becomes an event of the run."""
        if self.process is not None and (code := self.process.wait()):
            self.process = None
            raise RuntimeError(f"stagecoach checkpoints export ended with exit code {code}; see the trainer's output")

    def close(self) -> None:
        """Exports the last checkpoint too."""
        if self.newest:
            self.export()
        self.check()
