"""The roles as plain processes, as one starts them in a debugger: a worker that joins a live run, and what is refused;
tests/deploy/test_acl.py has a whole run without Ray."""

from __future__ import annotations

import pytest

from tests.support.processes.command_line import CommandLine, check_ledger, check_refused

RUN = "no-ray"
pytestmark = pytest.mark.timeout(300)


def test_worker_joins_a_live_run_and_ends_with_it(terminal: CommandLine) -> None:
    config = terminal.write_config(
        rollout={"workers": 1, "fragment_steps": 32, "fragments_per_update": 4}, stop_at={"updates": 10**6},
        evaluation={"episodes": 200},  # of the last checkpoint: its Redis is there until worker-7 has seen the end
    )  # fmt: skip
    run = terminal.start("train", config, "--run-id", RUN, "--inline")
    terminal.until(RUN, "training", lambda status: status.live and status.version > 0)

    joined = terminal.module("stagecoach.rollout_worker", RUN, "--index", "7")
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


def test_missing_input_of_a_role_is_named(terminal: CommandLine) -> None:
    cases = {
        ("nobody",): "no live run 'nobody'",
        ("nobody", "--redis", "redis://127.0.0.1:1"): "--redis also needs --store and --config",
        ("no body",): "run id 'no body'",
    }
    started = [terminal.module("stagecoach.rollout_worker", *arguments, "--index", "7") for arguments in cases]
    for process, text in zip(started, cases.values(), strict=True):
        check_refused(terminal.ended(process), text)
