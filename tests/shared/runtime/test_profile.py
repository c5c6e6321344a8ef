"""The timeline of a process, written if it is enabled."""

from __future__ import annotations

import json
import time
from pathlib import Path

from stagecoach.shared.base.stage_timer import StageTimer
from stagecoach.shared.runtime.profile import Profile
from stagecoach.shared.storage.object_store import FileStore


def test_profile_writes_a_trace_per_thread_if_enabled(tmp_path: Path) -> None:
    store, acting, publishing = FileStore(tmp_path, "run"), StageTimer(), StageTimer()
    off = Profile(store, "trainer", on=False)
    stages = off.add("training", StageTimer())
    with stages.during("update"):
        pass
    off.write()
    assert store.keys("profile/") == [] and stages.intervals == ()
    profile = Profile(store, "trainer", on=True)
    assert profile.add("training", acting) is acting
    profile.add("publishing", publishing)
    with acting.during("update"), publishing.during("upload"):
        time.sleep(0.01)
    profile.write()
    (key,) = store.keys("profile/")
    data = json.loads(store.get(key))
    spans = {event["name"]: event for event in data["traceEvents"] if event["ph"] == "X"}
    assert spans.keys() == {"update", "upload"} and spans["update"]["tid"] != spans["upload"]["tid"]
    assert spans["update"]["dur"] >= 10_000  # microseconds
    assert abs(spans["update"]["ts"] / 1e6 - time.time()) < 60
    assert data["otherData"]["seconds"]["training"]["update"] >= 0.01
