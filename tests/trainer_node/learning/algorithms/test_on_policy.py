"""What holds for all algorithms that train an actor-critic on each update's batch, whatever the batch holds."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from stagecoach.shared.experience.counters import Counters
from stagecoach.shared.experience.spaces import Columns
from tests.support.learning.algorithms import ON_POLICY, make, weights
from tests.support.learning.cases import ON_POLICY_FIELDS
from tests.support.learning.experience import acted, ignores_masked_rows, received
from tests.support.runs.game import NewGame, balanced, small

every = pytest.mark.parametrize("name", ON_POLICY)
with_and_without_core = pytest.mark.parametrize("core", ["none", "gru"])


def normalizing(name: str, core: str = "none", **fields: Any) -> Any:
    """With statistics of observations."""
    policy: dict[str, Any] = {"normalize_observations": True}
    if core != "none":
        policy |= {"core": core, "core_size": 6, "share_encoder": True, "hidden_sizes": (8,)}
    return make(name, policy=policy, **fields)


@every
def test_updates_repeat_and_shuffle_by_seed_and_number(name: str) -> None:
    def after(noise: int, first: int) -> dict[str, bytes]:
        torch.manual_seed(noise)
        algorithm = normalizing(name)
        for update in range(3):
            fragments = received(*(acted(algorithm.policy, seed) for seed in (update, update + 10)))
            algorithm.update(fragments, Counters(updates=first + update))
        return weights(algorithm)

    assert after(1, 0) == after(2, 0)
    assert (after(1, 0) != after(1, 7)) == (name in {"ppo", "appo"}), "the others take each batch whole"


@every
@with_and_without_core
def test_several_fragments_are_one_fragment_with_more_slots(name: str, core: str) -> None:
    of_parts, of_whole = normalizing(name, core), normalizing(name, core)
    parts = [acted(of_parts.policy, seed, slots=slots) for seed, slots in ((1, 4), (2, 3), (3, 5))]
    index, offset = [], 0
    for part in parts:
        index.append(part["final_index"] + np.array([0, offset], np.int32))
        offset += part["mask"].shape[1]
    lengthwise = ("final_obs", "bootstrap_obs", "state_in")
    whole: Columns = {
        key: np.concatenate([part[key] for part in parts], axis=0 if key in lengthwise else 1)
        for key in parts[0]
        if key != "final_index"
    }
    whole["final_index"] = np.concatenate(index)
    assert len(whole["final_index"]) > 3
    assert of_parts.update(received(*parts), Counters()) == of_whole.update(received(whole), Counters())
    assert weights(of_parts) == weights(of_whole)


@every
@with_and_without_core
def test_masked_rows_are_ignored(name: str, core: str) -> None:
    scale = 1e6 if core == "none" else 10.0
    ignores_masked_rows(lambda: normalizing(name, core), lambda policy: acted(policy, 5, absent=True), scale)


@every
@with_and_without_core
def test_update_without_actor_learns_nothing(name: str, core: str) -> None:
    algorithm = normalizing(name, core)
    before, columns = weights(algorithm), acted(algorithm.policy, 6)
    columns["mask"][:] = columns["terminated"][:] = columns["truncated"][:] = False
    columns |= {"final_index": columns["final_index"][:0], "final_obs": columns["final_obs"][:0]}
    metrics = algorithm.update(received(columns), Counters())
    assert metrics["train/gradient_steps"] == 0 and not any("loss" in key for key in metrics)
    assert weights(algorithm) == before


@every
def test_learning_rate_and_clip_range_follow_schedules(name: str) -> None:
    fields: dict[str, Any] = {"learning_rate": {"kind": "linear", "start": 1e-2, "end": 0.0, "over": "10 updates"}}
    clips = name in {"ppo", "appo"}
    if clips:
        fields["clip_range"] = {"kind": "linear", "start": 0.4, "end": 0.1, "over": "100 env_steps"}
    algorithm = normalizing(name, **fields)
    metrics = algorithm.update(received(acted(algorithm.policy, 1)), Counters(updates=5, env_steps=50))
    assert metrics["train/learning_rate"] == pytest.approx(5e-3)
    assert metrics.get("train/clip_range") == (pytest.approx(0.25) if clips else None)
    before = {key: parameter.detach().clone() for key, parameter in algorithm.policy.named_parameters()}
    metrics = algorithm.update(received(acted(algorithm.policy, 2)), Counters(updates=10, env_steps=1000))
    assert metrics["train/learning_rate"] == 0.0
    assert metrics.get("train/clip_range") == (pytest.approx(0.1) if clips else None)
    assert all(torch.equal(before[key], parameter) for key, parameter in algorithm.policy.named_parameters())
    assert algorithm.policy.normalizer.moments["0"].get_buffer("count").item() == 2 * 32


@every
def test_batch_is_learned_with_statistics_it_was_acted_with(name: str) -> None:
    fields: dict[str, Any] = {"epochs": 1, "minibatch_size": 32} if name in {"ppo", "appo"} else {}
    algorithm = normalizing(name, **fields)
    algorithm.observe(received(acted(algorithm.policy, 20) | {"obs": np.full((8, 4, 3), 2.0, np.float32)}))
    metrics = algorithm.update(received(acted(algorithm.policy, 21)), Counters())
    if name in {"ppo", "appo"}:
        assert metrics["train/approx_kl"] == pytest.approx(0.0, abs=1e-6) and metrics["train/clip_fraction"] == 0.0
    if name == "impala":
        assert metrics["train/importance_weight"] == pytest.approx(1.0, abs=1e-5)


@pytest.mark.parametrize("name", [name for name in ON_POLICY if name != "a2c"])  # which refuses older policies
def test_trainer_resumes_exactly_when_workers_act_ahead(new_game: NewGame, name: str) -> None:
    """What is in the log was acted by policies of one and two versions ago; it is learned from again in its order."""
    rollout = {"fragment_steps": 8, "fragments_per_update": 2, "max_policy_lag": 2}
    algorithm = {"name": name, **ON_POLICY_FIELDS[name]}
    config = small(algorithm=algorithm, rollout=rollout, stop_at={"updates": 8}, checkpoint={"every": "3 updates"})

    def ahead(crashes: tuple[int, ...]) -> tuple[str, str]:
        """The worker is ahead as far as it may before each step of the trainer."""
        game = new_game(config)
        while True:
            while game.worker.step(0) == "pushed":
                pass
            if game.trainer.version in crashes:
                crashes = tuple(version for version in crashes if version != game.trainer.version)
                game.durable()
                game.replace_trainer()
            if game.trainer.step(0) == "ended":
                break
        game.trainer.finish("exhausted")
        balanced(game)
        return game.policy_hash(), str(game.latest().manifest.provenance["lag_histogram"])

    whole, lags = ahead(())
    assert "'2'" in lags
    assert ahead((2, 5)) == (whole, lags)
