"""The clock of one machine jumps by a day and back by an hour, while the others keep the right time."""

from __future__ import annotations

import shutil
import struct
import subprocess
import time
from pathlib import Path

import pytest

from tests.support.runs.network import Network

JUMPS = 86_400, -3_600, 0
LASTS_SECONDS = 3.0
ROLES = {"trainer": ("stagecoach.trainer_node",), "worker": ("stagecoach.rollout_worker", "--index", "0")}
COMPILER = shutil.which("g++")
CLOCK = r"""
#include <fcntl.h>
#include <stdlib.h>
#include <sys/mman.h>
#include <sys/syscall.h>
#include <sys/time.h>
#include <time.h>
#include <unistd.h>

static const volatile long *offset;

__attribute__((constructor)) static void open_offset() {
    int file = open(getenv("CLOCK_OFFSET"), O_RDONLY);
    offset = (const volatile long *)mmap(0, sizeof(long), PROT_READ, MAP_SHARED, file, 0);
    close(file);
}

extern "C" int clock_gettime(clockid_t which, struct timespec *found) noexcept {
    int failed = syscall(SYS_clock_gettime, which, found);
    if (!failed && offset && (which == CLOCK_REALTIME || which == CLOCK_REALTIME_COARSE)) found->tv_sec += *offset;
    return failed;
}

extern "C" int gettimeofday(struct timeval *found, void *) noexcept {
    struct timespec now;
    clock_gettime(CLOCK_REALTIME, &now);
    *found = {now.tv_sec, now.tv_nsec / 1000};
    return 0;
}

extern "C" time_t time(time_t *found) noexcept {
    struct timespec now;
    clock_gettime(CLOCK_REALTIME, &now);
    return found ? *found = now.tv_sec : now.tv_sec;
}
"""
"""Moves the time of day of a process, and leaves its monotonic clock alone, as a kernel does whose time is set.
libfaketime 0.9.10 does not allow the latter: CPython's sleep fails under it."""


@pytest.mark.timeout(400)
@pytest.mark.skipif(COMPILER is None, reason="needs g++")
@pytest.mark.parametrize("role", list(ROLES))
def test_clock_jumps_of_one_role_leave_weights_equal(role: str, network: Network, tmp_path: Path) -> None:
    (tmp_path / "clock.cpp").write_text(CLOCK)
    library, offset = tmp_path / "clock.so", tmp_path / "offset"
    command = [str(COMPILER), "-shared", "-fPIC", "-o", str(library), str(tmp_path / "clock.cpp")]
    subprocess.run(command, check=True)
    offset.write_bytes(struct.pack("q", 0))
    wrong = {"LD_PRELOAD": str(library), "CLOCK_OFFSET": str(offset)}
    processes = [
        network.start(name, *arguments, direct=True, environ=wrong if name == role else None)
        for name, arguments in ROLES.items()
    ]
    network.until_after(3)
    for jump in JUMPS:
        with offset.open("r+b") as file:
            file.write(struct.pack("q", jump))
        time.sleep(LASTS_SECONDS)
        network.until_after(network.role.flow.read().version + 3)
    network.end(*processes)
