"""The wheel, the source distribution and an editable checkout, each installed where Stagecoach is not."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.support.processes.installation import TRAVELING, Machine, copy
from tests.support.suite.groups import some_quick

BOUNDS = (
    "rollout.workers=1", "rollout.fragment_steps=8", "algorithm.minibatch_size=32", "environment.num_envs=4",
    "stop_at.updates=2", "evaluation.episodes=1",
)  # fmt: skip
TRAIN = "stagecoach train {} --inline --run-id here " + " ".join(f"--set={bound}" for bound in BOUNDS)
_IMPORTS = """
import json, sys
import stagecoach
import shared, coordinator.mine, rollout_worker
for name in stagecoach.__all__:
    getattr(stagecoach, name)
ours = {name.partition(".")[0] for name, module in sys.modules.items()
        if "stagecoach" in (getattr(module, "__file__", None) or "").split("/")}
print(json.dumps([shared.MINE, coordinator.mine.MINE, rollout_worker.MINE, sorted(ours)]))
"""
_ENVIRONMENT = """
import gymnasium
import numpy

class Counting(gymnasium.Env):
    observation_space = gymnasium.spaces.Box(0, 9, (1,))
    action_space = gymnasium.spaces.Discrete(2)

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.steps = 0
        return numpy.zeros(1, numpy.float32), {}

    def step(self, action):
        self.steps += 1
        return numpy.full(1, self.steps, numpy.float32), float(action), self.steps == 9, False, {}
"""
_TOP_LEVEL = """
import importlib.metadata as metadata, json
print(json.dumps(sorted({path.parts[0] for path in metadata.distribution("stagecoach-rl").files})))
"""
pytestmark = pytest.mark.timeout(300)


@pytest.fixture(scope="module", params=some_quick(("wheel", "sdist", "editable"), "wheel"))
def machine(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory, wheels: Path) -> Machine:
    """Stagecoach is installed on it: from the wheel, from the source distribution, or as an editable checkout."""
    folder = tmp_path_factory.mktemp(request.param)
    machine = Machine(folder / "home", wheels)
    checkout = folder / "checkout"
    for name in TRAVELING:
        copy(name, checkout / name)
    source = f"--editable {checkout}"
    if request.param != "editable":
        machine.run("python -m pip install --quiet hatchling")
        machine.run(f"python -m hatchling build -t {request.param} -d {folder}/dist", checkout)
        (built,) = (folder / "dist").glob("*.whl" if request.param == "wheel" else "*.tar.gz")
        source = str(built)
    machine.run(f"python -m pip install --quiet {source}")
    return machine


def write(folder: Path, files: dict[str, str]) -> Path:
    for name, text in files.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(text)
    return folder


def test_package_is_the_only_top_level_name(machine: Machine) -> None:
    top = set(json.loads(machine.run(f"python -c '{_TOP_LEVEL}'")))
    assert {name for name in top if not name.endswith((".dist-info", ".pth"))} - {"..", "stagecoach"} == set()
    found = machine.run("python -c 'import importlib.util as at; print(at.find_spec(\"shared\"))'")
    assert found.strip() == "None"


def test_import_leaves_users_modules_alone(machine: Machine, tmp_path: Path) -> None:
    """Modules of a user's own with the names of our folders, as a file, a namespace and a package."""
    mine = "MINE = True"
    write(tmp_path, {"shared.py": mine, "coordinator/mine.py": mine, "rollout_worker/__init__.py": mine})
    found = json.loads(machine.run(f"python -c '{_IMPORTS}'", tmp_path))
    assert found == [True, True, True, ["stagecoach"]]


def test_preset_trains_inline(machine: Machine, tmp_path: Path) -> None:
    machine.run(TRAIN.format("cartpole"), write(tmp_path, {"shared.py": "raise SystemExit"}))
    status = json.loads(machine.run("stagecoach status here --json", tmp_path))
    assert status["version"] == 2


@pytest.mark.parametrize("package", [True, False], ids=["package", "namespace"])
def test_users_environment_in_shared_trains(machine: Machine, tmp_path: Path, package: bool) -> None:
    config = "environment: {id: shared.envs:Counting}"
    write(
        tmp_path, {"run.yaml": config, "shared/envs.py": _ENVIRONMENT} | ({"shared/__init__.py": ""} if package else {})
    )
    machine.run(TRAIN.format("run.yaml"), tmp_path)
    assert json.loads(machine.run("stagecoach status here --json", tmp_path))["version"] == 2


@pytest.mark.parametrize("role", ["rollout_worker", "trainer_node"])
def test_role_module_prints_its_help(machine: Machine, tmp_path: Path, role: str) -> None:
    write(tmp_path, {"shared.py": "raise SystemExit", f"{role}/__init__.py": "raise SystemExit"})
    assert f"stagecoach.{role}" in machine.run(f"python -m stagecoach.{role} --help", tmp_path)
