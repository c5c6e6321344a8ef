"""`stagecoach checkpoints export --onnx` and what the other commands say of exports; docs/EXPORT.md's example runs."""

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

from stagecoach.coordinator.run import Run
from stagecoach.coordinator.services.embedded import BUCKET
from tests.conftest import minimal_config
from tests.support.checkpoints import upload_in
from tests.support.command_line import CONFIG, Stagecoach, check_refused

pytestmark = [pytest.mark.timeout(300), pytest.mark.exhaustive]
PAGE = (Path(__file__).parent.parent.parent / "docs" / "EXPORT.md").read_text()
LATEST = "2_Step-64.ckpt"


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of an ended run `a` whose newest and best checkpoints have exports, and others perhaps not."""
    runs = tmp_path_factory.mktemp("trained") / "runs"
    checkpoint, transport = {"every": "1 updates", "export": "onnx"}, {"transport": "object_store"}
    config = minimal_config(
        **CONFIG, runs_dir=str(runs), checkpoint=checkpoint, policy_versions=transport, archive="all"
    )
    assert Run.start(config, "a", inline=True).wait(280).reason == "exhausted"
    return runs


@pytest.fixture
def run(stagecoach: Stagecoach, trained: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """That run in the test's own folder; answers its checkpoints' folder."""
    monkeypatch.setenv("COLUMNS", "200")
    shutil.copytree(trained, tmp_path / "runs")
    return tmp_path / "runs" / "a" / "s3" / BUCKET / "a" / "checkpoints"


def record(path: Path) -> dict[str, Any]:
    compared: dict[str, Any] = json.loads((path / "export.json").read_text())["policies"]["default"]["compared"]
    return compared


def test_what_the_trainer_has_exported_is_shown_and_copied(stagecoach: Stagecoach, run: Path, tmp_path: Path) -> None:
    upload = upload_in(run / LATEST)
    assert set(record(upload)) == {"random", "recorded"}
    told = stagecoach("checkpoints", "export", "a", "latest", "out", "--onnx").ok()
    assert told.startswith("out/default.onnx  differs from torch by at most ")
    assert " on 256 random observations, " in told and " on 16 recorded observations" in told
    assert sorted(path.name for path in (tmp_path / "out").iterdir()) == ["default.onnx", "export.json"]
    for here, there in (("default.onnx", "default/policy.onnx"), ("export.json", "export.json")):
        assert (tmp_path / "out" / here).read_text("latin-1") == (upload / there).read_text("latin-1")
    check_refused(stagecoach("checkpoints", "export", "a", "latest", "out", "--onnx"), "nothing is overwritten")
    stagecoach("checkpoints", "export", "a", "latest", "copied").ok()
    copy = upload_in(tmp_path / "copied" / "a" / "checkpoints" / LATEST)
    for name in ("default/policy.onnx", "export.json"):
        assert (copy / name).read_bytes() == (upload / name).read_bytes()
    assert "differs from torch by at most" in stagecoach("checkpoints", "show", "a").out
    shown = stagecoach("checkpoints", "show", "a", "--json").json()
    assert shown["export"]["policies"]["default"]["compared"] == record(upload)
    (line,) = [line for line in stagecoach("checkpoints", "a").out.splitlines() if LATEST in line]
    assert re.search(r"latest, .*, ONNX ±\de-\d\d ", line)
    listed = stagecoach("checkpoints", "a", "--json").json()
    largest = max(one["max_difference"] for one in record(upload).values())
    told = next(entry["export"] for entry in listed if entry["name"] == LATEST)
    assert told == {"state": "ok", "max_difference": largest, "problem": None}


def test_one_that_has_none_is_exported_on_the_spot(stagecoach: Stagecoach, run: Path, tmp_path: Path) -> None:
    (upload_in(run / LATEST) / "export.json").unlink()
    stagecoach("checkpoints", "export", "a", "latest", "out", "--onnx").ok()
    assert {name: one["rows"] for name, one in record(tmp_path / "out").items()} == {"random": 256, "recorded": 16}
    assert onnxruntime.InferenceSession(tmp_path / "out" / "default.onnx").get_inputs()[0].name == "obs"
    assert not (upload_in(run / LATEST) / "export.json").exists()  # only the trainer writes there
    assert stagecoach("checkpoints", "list", "a").code == stagecoach("checkpoints", "show", "a").code == 0


def test_a_damaged_export_is_found_and_made_anew(stagecoach: Stagecoach, run: Path, tmp_path: Path) -> None:
    assert stagecoach("checkpoints", "verify", "a").code == 0
    told = upload_in(run / LATEST) / "export.json"
    file = told.parent / "default" / "policy.onnx"
    file.write_bytes(file.read_bytes()[:-1] + b"?")
    done = stagecoach("checkpoints", "verify", "a")
    assert done.code == 1
    (line,) = [line for line in done.out.splitlines() if line.startswith("damaged")]
    assert f"{LATEST}/export.json" in line and "policy.onnx was altered" in line
    content = json.loads(told.read_text())
    content["policies"]["default"] = {"file": None, "failure": "no such operator", "compared": {}}
    told.write_text(json.dumps(content))
    assert "ONNX failed" in stagecoach("checkpoints", "a").out
    assert "no such operator" in stagecoach("checkpoints", "show", "a").out
    assert stagecoach("checkpoints", "verify", "a", LATEST).code == 0  # what a resume goes on from is whole
    assert stagecoach("checkpoints", "export", "a", "latest", "out", "--onnx").code == 0
    assert record(tmp_path / "out")["random"]["max_difference"] < 1e-4


def test_without_the_extra_it_says_what_to_install(
    stagecoach: Stagecoach, run: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("stagecoach.trainer_node.export.onnx_translation._PACKAGES", ("onnx", "no-such-package"))
    assert stagecoach("checkpoints", "export", "a", "latest", "copied", "--onnx").code == 0  # it is there already
    (upload_in(run / LATEST) / "export.json").unlink()
    words = ("needs no-such-package: pip install", "stagecoach-rl[onnx]")
    check_refused(stagecoach("checkpoints", "export", "a", "latest", "out", "--onnx"), *words)
    check_refused(stagecoach("train", "config.yaml", "--inline", "--set", "checkpoint.export=onnx"), *words)


def test_the_example_on_the_page_acts(stagecoach: Stagecoach, run: Path, tmp_path: Path) -> None:
    """With ONNX Runtime alone: neither torch nor anything of Stagecoach may be imported."""
    (block,) = re.findall(r"```yaml\n(.*?)```", PAGE, re.DOTALL)
    assert yaml.safe_load(block) == {"checkpoint": {"export": "onnx"}}
    (example,) = re.findall(r"```python\n(.*?)```", PAGE, re.DOTALL)
    assert len(example.strip().splitlines()) <= 15
    assert stagecoach("checkpoints", "export", "a", "latest", "exported", "--onnx").code == 0
    alone = "\nimport sys\nassert not {'torch', 'stagecoach', 'onnx'} & set(sys.modules)\n"
    done = subprocess.run(
        [sys.executable, "-c", example + alone], cwd=tmp_path, capture_output=True, text=True, timeout=120
    )
    assert done.returncode == 0, done.stderr
    assert re.fullmatch(r"return \d+\n", done.stdout)
