"""What a process of a role runs in tests: each returns, raises or ends in another way."""

import multiprocessing
import os
import random
import signal
import sys
import threading
import time
from pathlib import Path
from typing import Any

import numpy as np

from stagecoach.shared.base.errors import EnvironmentFailure, Fenced


def _file(number: str) -> str:
    try:
        return os.readlink(f"/proc/self/fd/{number}")
    except OSError:  # that of the listing itself
        return ""


def returns(given: bytes, name: str) -> str:
    """Describes this process."""
    drawn = random.random(), float(np.random.random())
    secrets = sorted(key for key in os.environ if "PASSWORD" in key or key.startswith("RAY_AUTH"))
    group = os.getpgid(0) == os.getpid()
    left = [name for name in map(_file, os.listdir("/proc/self/fd")) if name.startswith(("socket", "/tmp/sc-z"))]
    torch, own = "torch" in sys.modules, os.environ.get("OWN")
    return repr((name, drawn, secrets, group, len(given), os.getcwd(), torch, left, own, os.getppid()))


def fails(given: bytes, name: str) -> str:
    long = "x" * int.from_bytes(given, "big")
    raise {"fenced": Fenced, "environment": EnvironmentFailure}.get(name, ValueError)(f"{long}as it was told to")


def ends(given: bytes, name: str) -> str:
    print("its last words", file=sys.stderr, flush=True)
    if name == "exit":
        os._exit(3)
    os.kill(os.getpid(), signal.Signals[name])
    time.sleep(60)
    return ""


def waits(given: bytes, name: str) -> str:
    """Waits for SIGTERM; writes its process id, and that of a process of its own, into the file `name`."""
    child = multiprocessing.get_context("fork").Process(target=time.sleep, args=(600,))
    child.start()
    asked = threading.Event()
    signal.signal(signal.SIGTERM, lambda *_: asked.set())
    Path(f"{name}.part").write_text(f"{os.getpid()} {child.pid}")
    os.rename(f"{name}.part", name)
    while not asked.wait(0.05):
        pass
    child.kill()
    return "told to end"


def lives_as_user_code_does(given: bytes, name: str) -> str:
    """Starts threads, PyTorch's too, and forks by itself."""
    import torch

    torch.set_num_threads(2)
    product: Any = torch.ones(512, 512) @ torch.ones(512, 512)
    threading.Thread(target=time.sleep, args=(60,), daemon=True).start()
    pid = os.fork()
    if pid == 0:
        os._exit(7)
    return f"{product[0, 0]:g} {os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])}"
