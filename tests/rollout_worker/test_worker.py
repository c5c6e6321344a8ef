"""Rollout worker on a real Redis: its pushes, its end, and failing environments."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from stagecoach.rollout_worker.sampling.sampler import Sample, Sampler
from stagecoach.rollout_worker.worker import Worker
from stagecoach.shared.base.errors import ConfigError, DropReason, EnvironmentFailure, WorkerSuperseded
from stagecoach.shared.config.run_config import Config
from stagecoach.shared.experience import fragment
from stagecoach.shared.experience.counters import Phase
from stagecoach.shared.experience.fragment import Fragment
from stagecoach.shared.experience.log_entry import START
from stagecoach.shared.protocol import heartbeat
from stagecoach.shared.protocol.events import read_events
from stagecoach.shared.protocol.flow_control import RunState
from stagecoach.shared.protocol.heartbeat import Beat, read_heartbeats
from stagecoach.shared.protocol.keys import RunKeys
from stagecoach.shared.protocol.ledger import read_accounting
from stagecoach.shared.runtime.run_context import RunContext
from tests.conftest import MakeRole, minimal_config
from tests.support.environments.small import MODULE
from tests.support.runs.game import published


def flaky(tally: Path, times: int, place: str = "step", **fields: Any) -> Config:
    kwargs = {"tally": str(tally), "times": times, "place": place}
    return minimal_config(environment={"id": f"{MODULE}:FailsAFewTimes", "num_envs": 2, "kwargs": kwargs, **fields})


@contextmanager
def started(role: RunContext, index: int = 0) -> Iterator[Worker]:
    worker = Worker(role, index)
    worker.start()
    try:
        yield worker
    finally:
        worker.stop("the test is over")


def during_the_next_fragment(monkeypatch: pytest.MonkeyPatch, act: Callable[[], object]) -> None:
    """`act` is called once, when the next fragment of any worker begins."""
    sample = Sampler.sample

    def first(sampler: Sampler, *arguments: Any) -> Sample:
        monkeypatch.setattr(Sampler, "sample", sample)
        act()
        return sample(sampler, *arguments)

    monkeypatch.setattr(Sampler, "sample", first)


def fragments_of(role: RunContext) -> list[Fragment]:
    return [fragment.decode(entry.fragment or b"") for entry in role.log().read(START, 100, 0)]


def beat_of(role: RunContext, worker: str) -> Beat:
    return next(beat for beat in read_heartbeats(role.redis, role.run_id) if beat.id == worker)


def test_fragment_header_names_worker_seq_and_version(make_role: MakeRole) -> None:
    config = minimal_config()
    role = make_role(config)
    with published(make_role, config), started(role, 3) as worker:
        assert [worker.step(0) for _ in range(3)] == ["pushed", "pushed", "waited"], "lockstep: K = 2 a version"
        sent = fragments_of(role)
        for seq, item in enumerate(sent):
            header = item.header
            made_by = header.run_id, header.worker_id, header.incarnation, header.seq
            assert made_by == (role.run_id, "worker-3", 0, seq)
            assert (header.phase, header.policy_versions) == (Phase.TRAIN, {"default": 0})
            assert (header.steps, header.num_envs) == (8, 4) and header.acting_seconds > 0
            fragment.check(item, role.run_id, role.description())
        after, then = sent[0].columns["default"]["bootstrap_obs"], sent[1].columns["default"]["obs"][0]
        assert np.array_equal(after, then), "episodes go on"
        line = read_accounting(role.redis, role.run_id)["worker-3"]
        assert line.balances and line.produced.fragments == line.in_flight.fragments == 2
        assert line.produced.transitions == 64


def test_push_requests_next_claim_and_stop_releases_it(make_role: MakeRole, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(heartbeat, "BEAT_SECONDS", 1e6)  # a beat is a call as well
    config = minimal_config(rollout={"fragment_steps": 8, "fragments_per_update": 4})
    role = make_role(config)
    with published(make_role, config), started(role) as worker:
        assert worker.step(1.0) == "pushed"
        assert role.redis.zrange(RunKeys(role.run_id).claims, 0, -1) == [b"worker-0:0:1"]
        calls = role.redis.info("commandstats")["cmdstat_evalsha"]["calls"]
        assert worker.step(1.0) == "pushed"
        assert role.redis.info("commandstats")["cmdstat_evalsha"]["calls"] - calls == 2, "one push, one claim"
        assert role.redis.zrange(RunKeys(role.run_id).claims, 0, -1) == [b"worker-0:0:2"]
    state = role.flow.read()
    assert (state.claimed, role.redis.zcard(RunKeys(role.run_id).claims)) == (2, 0)


def test_stale_push_starts_new_life_and_releases_claim(make_role: MakeRole, monkeypatch: pytest.MonkeyPatch) -> None:
    config = minimal_config(rollout={"fragment_steps": 8, "fragments_per_update": 1})
    role, other = make_role(config), make_role(config)
    with published(make_role, config) as trainer, started(role) as slow, started(other, 1) as quick:

        def overtaken() -> None:
            role.redis.zadd(RunKeys(role.run_id).claims, {"worker-0:0:0": 1})  # its lease runs out
            assert quick.step(0) == "pushed"

        during_the_next_fragment(monkeypatch, overtaken)
        assert slow.step(1.0) == "pushed"
        assert read_accounting(role.redis, role.run_id)["worker-0"].dropped[DropReason.STALE].fragments == 1
        assert trainer.step(0) == "updated"
        assert slow.step(1.0) == "pushed"
        sent = [(item.header.worker_id, item.header.seq, item.header.life) for item in fragments_of(role)]
        assert sent == [("worker-1", 0, "0.0"), ("worker-0", 0, "0.0+1")]
        assert role.redis.zcard(RunKeys(role.run_id).claims) == 0


def test_worker_acts_randomly_in_heatup_then_by_version(make_role: MakeRole) -> None:
    config = minimal_config(heatup="64 env_steps")
    role = make_role(config)
    with published(make_role, config) as trainer, started(role) as worker:
        assert [worker.step(0), worker.step(0), trainer.step(0), worker.step(0)] == [
            *["pushed"] * 2,
            "updated",
            "pushed",
        ]
        sent = fragments_of(role)
        done = [(item.header.phase, item.header.version) for item in sent]
        assert done == [(Phase.HEATUP, 0), (Phase.HEATUP, 0), (Phase.TRAIN, 1)]
        acted = [item.columns["default"]["log_prob"] for item in sent]
        assert np.allclose(acted[0], -np.log(2)), "uniform over two actions"
        assert not np.allclose(acted[2], -np.log(2)) and np.isfinite(acted[2]).all()


@pytest.mark.parametrize("place", ["step", "reset"])
def test_worker_restarts_failing_environment(make_role: MakeRole, tmp_path: Path, place: str) -> None:
    config = flaky(tmp_path / "tally", times=2, place=place, failures_allowed=2)
    role = make_role(config)
    with published(make_role, config), started(role) as worker:
        words = [str(worker.step(0)) for _ in range(4)]
        assert words.count("pushed") == 2 and set(words) <= {"failed", "pushed", "waited"}
        assert len(fragments_of(role)) == 2, "what was cut off was never produced"
        assert [item.header.seq for item in fragments_of(role)] == [0, 1]
        told = [event.text for event in read_events(role.redis, role.run_id) if event.kind == "environment"]
        assert [text.startswith("worker-0: environment 0 raised ValueError in") for text in told] == [True, True]
        assert "failure number 1" in told[0] and "failure number 2" in told[1]
        assert read_accounting(role.redis, role.run_id)["total"].balances


@pytest.mark.parametrize("place", ["step", "reset"])
def test_worker_raises_after_failures_allowed(make_role: MakeRole, tmp_path: Path, place: str) -> None:
    config = flaky(tmp_path / "tally", times=99, place=place, failures_allowed=2)
    role = make_role(config)
    with published(make_role, config):
        with pytest.raises(EnvironmentFailure) as caught:
            Worker(role, 0).run()
        text = str(caught.value)
        assert text.startswith(f"worker-0: environment 0 raised ValueError in {place}: failure number 3")
        assert "support/environments/small.py" in text and "failures_allowed is 2" in text
        beat = beat_of(role, "worker-0")
        assert not beat.alive and beat.ended == "failed", "nobody beats on for a worker that is gone"
        assert role.flow.read().claimed == 0, "its claim is given back"
        assert not fragments_of(role)


def test_drained_worker_ends_after_fragment(make_role: MakeRole, monkeypatch: pytest.MonkeyPatch) -> None:
    config = minimal_config()
    role = make_role(config)
    with published(make_role, config):
        worker = Worker(role, 1)
        during_the_next_fragment(monkeypatch, lambda: role.flow.drain("worker-1"))
        assert worker.run() == "drained"
        assert read_accounting(role.redis, role.run_id)["worker-1"].produced.fragments == 1
        beat = beat_of(role, "worker-1")
        assert beat.ended == "drained" and not beat.alive
        assert [event.text for event in read_events(role.redis, role.run_id)][-1] == "worker-1 ended: drained"


@pytest.mark.parametrize("word", [RunState.STOPPING, RunState.FINISHED])
def test_worker_ends_with_run(make_role: MakeRole, word: RunState) -> None:
    config = minimal_config()
    role = make_role(config)
    with published(make_role, config):
        role.flow.set_state(word, "the test says so")
        assert Worker(role, 0).run() == word


def test_superseded_worker_ends_and_successor_continues(make_role: MakeRole) -> None:
    config = minimal_config()
    role, other = make_role(config), make_role(config)
    with published(make_role, config), started(role) as elder, started(other) as younger:
        assert (elder.incarnation, younger.incarnation) == (0, 1)
        with pytest.raises(WorkerSuperseded, match="worker-0: a newer incarnation than 0 has registered"):
            elder.step(0)
        assert younger.step(0) == "pushed"
        assert [item.header.incarnation for item in fragments_of(role)] == [1]
        assert role.flow.claim("worker-0", younger.incarnation, 1).granted
        elder.stop("superseded")
        assert role.flow.read().claimed == 2, "its successor's claims are left alone"
        younger.stop("the test is over")
        assert role.flow.read().claimed == 1


def test_each_worker_and_incarnation_has_own_seeds(make_role: MakeRole) -> None:
    config = minimal_config(environment={"id": f"{MODULE}:Noise", "num_envs": 2}, rollout={"fragments_per_update": 8})
    config = config.model_copy(update={"algorithm": config.algorithm.model_copy(update={"minibatch_size": 16})})
    role = make_role(config)
    with published(make_role, config):
        for index in (0, 1, 0):
            with started(make_role(config), index) as worker:
                assert worker.step(0) == "pushed"
        seen = [item.columns["default"]["obs"][0].tobytes() for item in fragments_of(role)]
    assert len(set(seen)) == 3


def test_worker_refuses_config_of_another_run(make_role: MakeRole) -> None:
    config = minimal_config()
    with published(make_role, config):
        stranger = make_role(minimal_config(seed=99))
        with pytest.raises(ConfigError, match=r"start the role with the run's own config.yaml"):
            Worker(stranger, 0).run()
        assert all(beat.role == "trainer" for beat in read_heartbeats(stranger.redis, stranger.run_id))
