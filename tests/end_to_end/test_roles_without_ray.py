"""The roles as plain processes, as one starts them in a debugger, over SSH or with SLURM: a worker that joins a live
run, and a whole run without Ray over a Redis and a store that were there before.
"""

from __future__ import annotations

import itertools
from functools import partial
from pathlib import Path

import pytest

from coordinator.lifecycle.preparation import prepare_new
from coordinator.lifecycle.validation import check
from shared.config.loading import load_config
from shared.protocol.events import read_evaluations
from shared.protocol.heartbeat import read_heartbeats
from shared.runtime.run_context import open_run_context
from shared.storage.checkpoint_store import FINISHED, READY
from tests.support.command_line import CommandLine, check_ledger, check_refused, own_servers

RUN = "no-ray"
pytestmark = pytest.mark.timeout(300)


def test_a_worker_joins_a_live_run_and_ends_with_it(terminal: CommandLine) -> None:
    config = terminal.write_config(
        rollout={"workers": 1, "fragment_steps": 32, "fragments_per_update": 4},
        stop_at={"updates": 10**6},
        evaluation={"episodes": 200},  # of the last checkpoint: its Redis is there until worker-7 has seen the end
    )
    run = terminal.start("train", config, "--run-id", RUN, "--inline")
    terminal.until(RUN, "training", lambda status: status.live and status.version > 0)

    joined = terminal.module("rollout_worker", RUN, "--index", "7")
    status = terminal.until(
        RUN, "fragments of worker-7 learned from",
        lambda now: "worker-7" in now.ledger and now.ledger["worker-7"]["consumed"]["fragments"] > 2,
    )  # fmt: skip
    beat = next(beat for beat in status.roles if beat.id == "worker-7")
    assert (beat.role, beat.alive, beat.pid) == ("worker", True, joined.pid)

    terminal.run("stop", RUN).ok()
    ended = terminal.ended(joined)
    assert ended.ok().strip() in {"stopping", "finished"} and ended.err == ""
    terminal.ended(run).ok()
    finished = terminal.marker(RUN, ".finished")
    check_ledger(finished)
    assert set(finished["ledger"]) == {"worker-0", "worker-7", "total"}
    assert "worker-7 joined" in terminal.output(run)


def test_a_whole_run_without_ray_and_without_a_coordinator(terminal: CommandLine, tmp_path: Path) -> None:
    rollout = {"fragment_steps": 32, "fragments_per_update": 2, "max_policy_lag": 1}
    with own_servers(tmp_path / "servers") as servers:
        path = terminal.write_config(**servers.config, stop_at={"updates": 12}, rollout=rollout)
        config, address = load_config(path, environ={}), servers.address(RUN)
        role = open_run_context(config, address)
        prepare_new(role, check(config))
        places = {"--redis": address.redis_url, "--store": address.store_url, "--config": str(path)}
        places["--endpoint-url"] = servers.config["store"]["endpoint_url"]
        arguments = (RUN, *itertools.chain(*places.items()))
        begin = partial(terminal.module, environ=servers.environ)
        acting = (("--index", "0"), ("--index", "1"), ("--evaluator",))
        roles = [begin("rollout_worker", *arguments, *which) for which in acting]
        terminal.wait_until(  # else the run may be over before it has begun
            "the evaluator", lambda: any(beat.role == "evaluator" for beat in read_heartbeats(role.redis, RUN))
        )
        roles.append(begin("trainer_node", *arguments))
        assert [terminal.ended(process).ok().strip() for process in roles][-1] == "exhausted"
        assert role.checkpoints.marker(READY)
        finished = role.checkpoints.marker(FINISHED)
        assert finished is not None
        assert (finished["reason"], finished["version"]) == ("exhausted", 12)
        check_ledger(finished)
        checkpoint, problems = role.checkpoints.newest_good()
        assert (checkpoint.manifest.name, problems) == (finished["final"], [])
        assert finished["final"] in read_evaluations(role.redis, RUN)
        role.redis.close()


def test_what_a_role_lacks_is_named(terminal: CommandLine) -> None:
    cases = {
        ("nobody",): "no live run 'nobody'",
        ("nobody", "--redis", "redis://127.0.0.1:1"): "--redis also needs --store and --config",
        ("no body",): "run id 'no body'",
    }
    started = [terminal.module("rollout_worker", *arguments, "--index", "7") for arguments in cases]
    for process, text in zip(started, cases.values(), strict=True):
        check_refused(terminal.ended(process), text)
