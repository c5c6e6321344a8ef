"""The roles as plain processes, as one starts them in a debugger, over SSH or with SLURM: a worker that joins a live
run, and a whole run without Ray over a Redis and a store that were there before.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from functools import partial
from pathlib import Path

import pytest

from coordinator.lifecycle.preparation import prepare_new
from coordinator.lifecycle.validation import check
from shared.config.loading import dump_config, load_config
from shared.config.run_config import Config
from shared.protocol.events import read_evaluations
from shared.protocol.heartbeat import read_heartbeats
from shared.runtime.run_context import RunContext, open_run_context
from shared.storage.checkpoint_store import FINISHED, READY
from tests.support.command_line import CommandLine, check_ledger, own_servers

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

    assert terminal.run("stop", RUN).code == 0
    ended = terminal.ended(joined)
    assert (ended.code, ended.err) == (0, ""), ended
    assert ended.out.strip() in {"stopping", "finished"}
    assert terminal.ended(run).code == 0
    finished = terminal.marker(RUN, ".finished")
    check_ledger(finished)
    assert set(finished["ledger"]) == {"worker-0", "worker-7", "total"}
    assert "worker-7 joined" in terminal.output(run)


@dataclasses.dataclass(frozen=True)
class Services:
    """A prepared run on servers that are nobody's child but the test's; what a role is told of them."""

    role: RunContext
    arguments: list[str]
    environ: dict[str, str]


@pytest.fixture
def services(tmp_path: Path, terminal: CommandLine) -> Iterator[Services]:
    with own_servers(tmp_path / "servers") as servers:
        path = terminal.write_config(
            **servers.config, stop_at={"updates": 12},
            rollout={"fragment_steps": 32, "fragments_per_update": 2, "max_policy_lag": 1},
        )  # fmt: skip
        config, address = load_config(path, environ={}), servers.address(RUN)
        role = open_run_context(config, address)
        prepare_new(role, check(config))
        places = [
            "--redis",
            address.redis_url,
            "--store",
            address.store_url,
            "--endpoint-url",
            address.endpoint_url or "",
        ]
        yield Services(role, [RUN, *places, "--config", str(path)], servers.environ)
        role.redis.close()


def test_a_whole_run_without_ray_and_without_a_coordinator(terminal: CommandLine, services: Services) -> None:
    begin = partial(terminal.module, environ=services.environ)
    acting = (("--index", "0"), ("--index", "1"), ("--evaluator",))
    roles = [begin("rollout_worker", *services.arguments, *which) for which in acting]
    terminal.wait_until(  # else the run may be over before it has begun
        "the evaluator", lambda: any(b.role == "evaluator" for b in read_heartbeats(services.role.redis, RUN))
    )
    roles.append(begin("trainer_node", *services.arguments))
    ends = [terminal.ended(role) for role in roles]
    assert [end.code for end in ends] == [0, 0, 0, 0], ends
    assert ends[-1].out.strip() == "exhausted"

    store = services.role.checkpoints
    assert store.marker(READY)
    finished = store.marker(FINISHED)
    assert finished is not None
    assert (finished["reason"], finished["version"]) == ("exhausted", 12)
    check_ledger(finished)
    checkpoint, problems = store.newest_good()
    assert (checkpoint.manifest.name, problems) == (finished["final"], [])
    assert finished["final"] in read_evaluations(services.role.redis, RUN)


@pytest.mark.parametrize("name", ["rollout_worker", "trainer_node"])
def test_another_config_is_refused_before_anything_happens(
    terminal: CommandLine, services: Services, tmp_path: Path, name: str
) -> None:
    config = services.role.config
    other = Config.model_validate({**config.model_dump(), "seed": config.seed + 1})
    (tmp_path / "other.yaml").write_text(dump_config(other))
    before = services.role.flow.read()
    arguments = [*services.arguments[:-1], str(tmp_path / "other.yaml")]
    arguments += ["--index", "0"] if name == "rollout_worker" else []
    ended = terminal.ended(terminal.module(name, *arguments, environ=services.environ))
    assert ended.code == 2, ended
    (line,) = [line for line in ended.err.splitlines() if line.startswith("Error: ")]
    assert config.hash()[:12] in line
    assert other.hash()[:12] in line
    assert "Traceback" not in ended.err
    assert services.role.flow.read() == before
    assert services.role.checkpoints.marker(FINISHED) is None


def test_what_a_role_lacks_is_named(terminal: CommandLine) -> None:
    cases = {
        ("nobody",): "no live run 'nobody'",
        ("nobody", "--redis", "redis://127.0.0.1:1"): "--redis also needs --store and --config",
        ("no body",): "run id 'no body'",
    }
    started = [terminal.module("rollout_worker", *arguments, "--index", "7") for arguments in cases]
    for process, text in zip(started, cases.values(), strict=True):
        ended = terminal.ended(process)
        assert (ended.code, ended.err.count("\n")) == (2, 1), ended
        assert text in ended.err
