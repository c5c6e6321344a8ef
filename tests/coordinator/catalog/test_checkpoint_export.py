"""`stagecoach checkpoints export --onnx`, and the examples of docs/how-to/export.md."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import onnxruntime
import pytest
import yaml

from stagecoach.coordinator.run_access.run import Run
from stagecoach.shared.protocol.heartbeat import Wait, poll
from tests.conftest import minimal_config
from tests.support.processes.command_line import CONFIG, Stagecoach, check_refused
from tests.support.suite.speed import stretched

pytestmark = [pytest.mark.timeout(300), pytest.mark.exhaustive]
ROOT = Path(__file__).parents[3]
PAGE = (ROOT / "docs/how-to/export.md").read_text()
LATEST = "2_Step-64.ckpt"
EXPORT = ("checkpoints", "export", "a", "latest")


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of an ended run `a`, which exported its checkpoints with the page's callback."""
    (block,) = re.findall(r"```yaml\n(.*?)```", PAGE, re.DOTALL)
    runs, code = tmp_path_factory.mktemp("trained") / "runs", tmp_path_factory.mktemp("code")
    shutil.copy(ROOT / "examples" / "export_onnx.py", code)
    checkpoint = {"every": "1 updates"}
    config = minimal_config(**CONFIG | yaml.safe_load(block), runs_dir=str(runs), checkpoint=checkpoint, archive="all")
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(code)
        assert Run.start(config, "a", inline=True).wait(280).reason == "exhausted"
        last = runs / "a" / "onnx" / LATEST / "export.json"
        # the run's end waits 60 s for metric writers; on a busy machine the last export takes longer
        poll(
            Wait("the export of the last checkpoint", stretched(150)), lambda: last.exists() and last.stat().st_size > 0
        )
    return runs


@pytest.fixture
def run(stagecoach: Stagecoach, trained: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The folder of a copy of that run in the test's own folder."""
    monkeypatch.setenv("COLUMNS", "200")
    shutil.copytree(trained, tmp_path / "runs")
    return tmp_path / "runs" / "a"


def record(path: Path) -> dict[str, Any]:
    compared: dict[str, Any] = json.loads((path / "export.json").read_text())["policies"]["default"]["compared"]
    return compared


def test_export_writes_file_and_record(stagecoach: Stagecoach, run: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    told = stagecoach(*EXPORT, "out", "--onnx").ok()
    assert told.startswith("out/default.onnx  differs from torch by at most ")
    assert " on 256 random observations, " in told and " on 16 recorded observations" in told
    assert sorted(path.name for path in out.iterdir()) == ["default.onnx", "export.json"]
    assert {name: one["rows"] for name, one in record(out).items()} == {"random": 256, "recorded": 16}
    assert onnxruntime.InferenceSession(out / "default.onnx").get_inputs()[0].name == "obs"
    check_refused(stagecoach(*EXPORT, "out", "--onnx"), "exists; choose another folder")


def test_export_without_extra_says_what_to_install(
    stagecoach: Stagecoach, run: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("stagecoach.trainer_node.export._PACKAGES", ("onnx", "no-such-package"))
    check_refused(stagecoach(*EXPORT, "out", "--onnx"), "needs no-such-package: pip install", "stagecoach-rl[onnx]")


def test_callback_exports_newest_checkpoint(run: Path) -> None:
    """Earlier ones are exported as far as one export was over before the next checkpoint."""
    exported = run / "onnx" / LATEST
    assert record(exported)["random"]["max_difference"] < 1e-4
    assert (exported / "default.onnx").is_file()


def test_page_example_acts_without_torch(stagecoach: Stagecoach, run: Path, tmp_path: Path) -> None:
    (example,) = re.findall(r"```python\n(.*?)```", PAGE, re.DOTALL)
    assert len(example.strip().splitlines()) <= 15
    assert stagecoach(*EXPORT, "exported", "--onnx").code == 0
    alone = "\nimport sys\nassert not {'torch', 'stagecoach', 'onnx'} & set(sys.modules)\n"
    done = subprocess.run(
        [sys.executable, "-c", example + alone], cwd=tmp_path, capture_output=True, text=True, timeout=120
    )
    assert done.returncode == 0, done.stderr
    assert re.fullmatch(r"return \d+\n", done.stdout)
