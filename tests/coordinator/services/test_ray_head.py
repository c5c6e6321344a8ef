"""An embedded Ray that dies under its driver, which leaves it, joins another one, and is the same process."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = [pytest.mark.timeout(240), pytest.mark.ray]
DIES = """
import gc, os, shutil, signal, sys, threading, time
from pathlib import Path
from stagecoach.coordinator.services.ray_head import hold_ray
from tests.conftest import minimal_config

head = hold_ray(minimal_config(), Path(sys.argv[1]))
head.wait()
head.connect()
import ray

references = [ray.put(number) for number in range(1000)]
if sys.argv[2] == "killed":
    os.kill(head.parts()["gcs_server"], signal.SIGKILL)
else:
    shutil.rmtree(Path(ray.nodes()[0]["RayletSocketName"]).parents[3])
while not head.lost(0):
    time.sleep(0.1)
fate, joined = head.failure, threading.Event()


def collect():  # as a former fleet is freed: by the collector, in whichever thread it runs
    while references and not joined.wait(0.05):
        cycle = [references.pop()]
        cycle.append(cycle)
        del cycle
        kept = [[] for _ in range(5000)]


threading.Thread(target=collect, daemon=True).start()
head.start_again(0)
joined.set()
print(fate, file=sys.stderr)
print("joined", ray.get(ray.put("another one")), gc.isenabled(), flush=True)
head.release()
"""


@pytest.mark.parametrize(("how", "fate"), [("killed", "Ray has died"), ("folder", "Ray's folder was removed")])
def test_driver_survives_dead_ray_despite_collector(tmp_path: Path, how: str, fate: str) -> None:
    environ = {**os.environ, "RAY_enable_metrics_collection": "1"}  # leaving takes ten seconds then
    done = subprocess.run([sys.executable, "-c", DIES, tmp_path, how], capture_output=True, text=True, env=environ)
    assert (done.returncode, done.stdout.splitlines()[-1:]) == (0, ["joined another one True"]), done
    assert fate in done.stderr


NO_AGENT = """
import os, signal, sys, time
from pathlib import Path
from stagecoach.coordinator.services.ray_head import hold_ray
from tests.conftest import minimal_config

head = hold_ray(minimal_config(), Path(sys.argv[1]))
head.wait()
raylet = head.parts()["raylet"]
threads = Path(f"/proc/{raylet}/task").iterdir()
children = [child for thread in threads for child in (thread / "children").read_text().split()]
names = {child: Path(f"/proc/{child}/cmdline").read_text() for child in children}
(waits,) = [child for child, name in names.items() if name.startswith("cat")]
print(any("ashboard" in name for name in names.values()), flush=True)
os.kill(raylet, signal.SIGKILL)
until = time.monotonic() + 30
while Path(f"/proc/{waits}").exists() and time.monotonic() < until:
    time.sleep(0.05)
print(Path(f"/proc/{waits}").exists(), flush=True)
head.release()
"""


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="reads /proc")
def test_script_in_place_of_dashboard_agent_ends_with_raylet(tmp_path: Path) -> None:
    done = subprocess.run([sys.executable, "-c", NO_AGENT, tmp_path], capture_output=True, text=True)
    assert (done.returncode, done.stdout.split()) == (0, ["False", "False"]), done


START = """
import os, signal, sys, threading
from stagecoach.coordinator.run_access.run import Run
from stagecoach.coordinator.services import ray_head
from tests.conftest import minimal_config
from tests.support.processes.command_line import until

def start(name, updates=10**6):
    rollout = {"workers": 1, "fragment_steps": 8, "fragments_per_update": 1}
    stop_at, evaluation = {"updates": updates}, {"episodes": 1}
    config = minimal_config(runs_dir=sys.argv[1], rollout=rollout, stop_at=stop_at, evaluation=evaluation)
    return Run.start(config, name)

def learns(run, versions):
    before = run.status().version
    until(run, lambda status: status.version > before + versions)
"""
TWO_RUNS = (
    START
    + """
runs, began = [], threading.Event()

def one():
    runs.append(start("first"))
    began.set()
    runs[0].wait()

thread = threading.Thread(target=one)
thread.start()
began.wait(120)
first, second = *runs, start("second")
learns(first, 3)
learns(second, 3)
if sys.argv[2] == "dies":
    os.kill(ray_head._head.parts()["gcs_server"], signal.SIGKILL)
    learns(first, 50)
    learns(second, 50)
first.stop()
thread.join()  # the thread that has launched Ray ends
learns(second, 30)
second.stop()
third = second.wait(60), start("third", 3)
print(first.wait(60).reason, third[0].reason, third[1].wait(60).reason)
"""
)


@pytest.mark.timeout(300)
@pytest.mark.parametrize("ray", ["lives", "dies"])
def test_runs_of_one_process_share_its_ray(tmp_path: Path, ray: str) -> None:
    """Two that overlap, of which the first to start ends first, then a third after both. A Ray that they could join
    by its address is left alone, and named."""
    environ = {**os.environ, "RAY_ADDRESS": "192.0.2.1:6379"}
    done = subprocess.run([sys.executable, "-c", TWO_RUNS, tmp_path, ray], capture_output=True, text=True, env=environ)
    assert (done.returncode, done.stdout.splitlines()[-1:]) == (0, ["stopped stopped exhausted"]), done
    assert "RAY_ADDRESS=192.0.2.1:6379 is not used: the run starts a Ray of its own" in done.stderr


NO_GCS = (
    START
    + """
run = start("first")
until(run, lambda status: status.version >= 0)
head = ray_head._head._service.process.pid
os.kill(head, signal.SIGSTOP)  # it does not notice
os.kill(ray_head._head.parts()["gcs_server"], signal.SIGKILL)
learns(run, 1)
os.kill(head, signal.SIGCONT)
learns(run, 30)
run.stop()
print(run.wait(60).reason)
"""
)


@pytest.mark.timeout(300)
def test_evaluator_that_starts_without_gcs_does_not_hang_its_run(tmp_path: Path) -> None:
    done = subprocess.run([sys.executable, "-c", NO_GCS, tmp_path], capture_output=True, text=True)
    assert (done.returncode, done.stdout.splitlines()[-1:]) == (0, ["stopped"]), done
