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
from coordinator.services.ray_head import RayHead
from tests.conftest import minimal_config

head = RayHead(minimal_config(), Path(sys.argv[1]))
head.wait()
head.connect()
import ray

references = [ray.put(number) for number in range(1000)]
if sys.argv[2] == "killed":
    os.kill(head._parts()["gcs_server"], signal.SIGKILL)
else:
    shutil.rmtree(Path(ray.nodes()[0]["RayletSocketName"]).parents[3])
while not head.lost():
    time.sleep(0.1)
fate, joined = head.fate, threading.Event()


def collect():  # as a former fleet is freed: by the collector, in whichever thread it runs
    while references and not joined.wait(0.05):
        cycle = [references.pop()]
        cycle.append(cycle)
        del cycle
        kept = [[] for _ in range(5000)]


threading.Thread(target=collect, daemon=True).start()
head.start_again()
joined.set()
print(fate, file=sys.stderr)
print("joined", ray.get(ray.put("another one")), gc.isenabled(), flush=True)
head.stop()
"""


@pytest.mark.parametrize(("how", "fate"), [("killed", "Ray has died"), ("folder", "Ray's folder was removed")])
def test_a_driver_outlives_its_dead_ray_although_the_collector_finds_references_of_it(
    tmp_path: Path, how: str, fate: str
) -> None:
    environ = {**os.environ, "RAY_enable_metrics_collection": "1"}  # leaving takes ten seconds then
    done = subprocess.run([sys.executable, "-c", DIES, tmp_path, how], capture_output=True, text=True, env=environ)
    assert (done.returncode, done.stdout.splitlines()[-1:]) == (0, ["joined another one True"]), done
    assert fate in done.stderr
