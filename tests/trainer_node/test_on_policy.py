"""What holds for all algorithms that learn an actor-critic from each update's batch: resume, ranks, limits of time."""

from __future__ import annotations

from dataclasses import replace
from typing import Any, cast

import numpy as np
import pytest
import torch

from rollout_worker.environments import make_vector
from rollout_worker.exploration import Sampling
from rollout_worker.making import describe_environment
from rollout_worker.sampler import Sampler
from rollout_worker.trail import Life
from shared.algorithm_configs.on_policy import OnPolicyConfig
from shared.algorithm_configs.registry import ALGORITHMS
from shared.config import Config
from shared.errors import ConfigError
from shared.fragment import Fragment
from shared.policies.actor_critic import ActorCritic
from shared.policies.registry import build_policies
from shared.steps import Counters, Phase
from tests.environments_for_tests import MODULE
from tests.trainer_node.game import NewGame, balanced, small
from tests.trainer_node.test_ppo import CPU, of
from tests.trainer_node.test_ranks import Side, experience, gradients, learn
from trainer_node.algorithms.algorithm import Setting
from trainer_node.algorithms.registry import make_algorithm
from trainer_node.local_ranks import local_ranks

SMALL: dict[str, dict[str, Any]] = {
    "ppo": {"minibatch_size": 20, "epochs": 2},
    "a2c": {"entropy_coefficient": 0.01},
    "impala": {"normalise_advantages": True, "vtrace_lambda": 0.9},
    "appo": {
        "minibatch_size": 20, "epochs": 2, "target_updates": 3, "clip_against": "target", "kl_coefficient": 0.1,
    },
}  # fmt: skip
"""Settings that fit into an update of 64 transitions."""
every = pytest.mark.parametrize("name", SMALL)


def run(name: str, **sections: Any) -> Config:
    return small(algorithm={"name": name, **SMALL[name]}, **sections)


def test_none_is_left_out() -> None:
    assert set(SMALL) == {name for name, section in ALGORITHMS.items() if issubclass(section, OnPolicyConfig)}


@every
def test_what_another_policy_acted_is_no_data_for_it(name: str) -> None:
    with pytest.raises(ConfigError, match="learns only from what its own policy acts"):
        run(name, dataset={"path": "recorded.csv"})


@every
def test_the_whole_run_dies_at_every_version_and_the_weights_are_the_same(new_game: NewGame, name: str) -> None:
    config = run(name, stop_at={"updates": 6})
    whole = new_game(config).finish()
    game = new_game(config)
    game.lose_at(range(1, 6))
    assert game.finish() == whole
    balanced(game)


@pytest.mark.parametrize("name", [name for name in SMALL if name != "a2c"])  # which refuses older policies
def test_a_trainer_that_dies_goes_on_from_its_checkpoint_though_workers_act_ahead(new_game: NewGame, name: str) -> None:
    """What is in the log was acted by policies of one and two versions ago; it is learnt from again in its order."""
    rollout = {"fragment_steps": 8, "fragments_per_update": 2, "max_policy_lag": 2}
    config = run(name, rollout=rollout, stop_at={"updates": 8}, checkpoint={"every": "3 updates"})

    def ahead(crashes: tuple[int, ...]) -> tuple[str, str]:
        """The worker is ahead as far as it may before each step of the trainer."""
        game = new_game(config)
        while True:
            while game.worker.step(0) == "pushed":
                pass
            if game.trainer.version in crashes:
                crashes = tuple(version for version in crashes if version != game.trainer.version)
                game.durable()
                game.crash()
                game.restart()
            if game.trainer.step(0) == "ended":
                break
        game.trainer.finish("exhausted")
        latest = game.role.checkpoints.load_latest()
        assert latest is not None
        balanced(game)
        return game.policy_hash(), str(latest.manifest.provenance["lag_histogram"])

    whole, lags = ahead(())
    assert "'2'" in lags
    assert ahead((2, 5)) == (whole, lags)


CASES = [(2, name) for name in SMALL if name != "ppo"]


def off_policy(fragments: list[Fragment], seed: int) -> list[Fragment]:
    """As if another policy had acted."""
    random, found = np.random.default_rng(seed), []
    for item in fragments:
        columns = dict(item.columns["default"])
        noise = random.normal(size=columns["log_prob"].shape).astype(np.float32)
        columns["log_prob"] = columns["log_prob"] + 0.5 * noise
        found.append(replace(item, columns={"default": columns}))
    return found


@pytest.mark.timeout(180)
@pytest.mark.processes
@pytest.mark.parametrize(("ranks", "name"), CASES)
def test_the_gradients_of_several_ranks_are_those_of_one(ranks: int, name: str) -> None:
    quiet = {"learning_rate": 0.0, "max_grad_norm": 1e6, **({"epochs": 1} if name == "appo" else {})}

    def ranked(number: int) -> Config:
        return small(algorithm={"name": name, **SMALL[name], **quiet}, trainer={"ranks": number})

    together, alone = Side(ranked(ranks)), Side(ranked(1))
    with local_ranks(together.config, together.learner, together.taken(), together.description) as group:
        for number, acted in enumerate(experience(alone.config, 2)):
            fragments = off_policy(acted, number)
            with group.turn(fragments, Phase.TRAIN):
                found = learn(together.learner, fragments)
            expected = learn(alone.learner, fragments)
            assert found == pytest.approx(expected, rel=1e-3, abs=1e-5, nan_ok=True)
            one, several = gradients(alone.learner), gradients(together.learner)
            assert set(one) == set(several) and any(abs(array).max() > 1e-3 for array in one.values())
            for weight, array in one.items():
                assert several[weight] == pytest.approx(array, rel=1e-3, abs=1e-5), weight


@pytest.mark.processes
@pytest.mark.timeout(180)
def test_ranks_that_learn_come_to_the_same_bits_in_every_life() -> None:
    """That they agree with each other after each update is looked at by the product."""
    name = list(SMALL)[-1]
    config = small(algorithm={"name": name, **SMALL[name]}, trainer={"ranks": 2})
    log, weights = experience(config, 3), []
    for _ in range(2):
        side = Side(config)
        with local_ranks(config, side.learner, side.taken(), side.description) as group:
            for fragments in log:
                with group.turn(fragments, Phase.TRAIN):
                    learn(side.learner, fragments)
        weights.append(side.weights())
    assert weights[0] == weights[1] != Side(config).weights()


@every
@pytest.mark.parametrize(("ends", "doorstep", "inside"), [("truncated", 9.0, 10.0), ("terminated", 0.9, 1.0)])
def test_what_lies_behind_a_truncation_is_valued_and_behind_a_termination_is_not(
    name: str, ends: str, doorstep: float, inside: float
) -> None:
    """Inside pays 1 a step, γ = 0.9: worth 1/(1 − γ) = 10 where the limit is no end."""
    updates = 320 if name in {"a2c", "impala"} else 80
    rate = {"kind": "linear", "start": 0.5, "end": 0.0, "over": f"{updates} updates"}
    settings = {"gamma": 0.9, "max_grad_norm": 100.0, "learning_rate": rate}
    if updates == 80:
        settings |= {"minibatch_size": 8, "epochs": 4}
    environment = {"id": f"{MODULE}:Doorstep", "num_envs": 2, "kwargs": {"ends": ends}}
    config = small(
        environment=environment, algorithm={"name": name, **settings}, policies={"default": {"hidden_sizes": []}},
    )  # fmt: skip
    description = describe_environment(config)
    policies = build_policies(description.policies, config.policies, config.algorithm, seed=1)
    sampler = Sampler(make_vector(config.environment, description), description, Life(1, 0, 0, 0))
    algorithm = make_algorithm(policies["default"], config.algorithm, Setting(CPU, 1, 4, 2))
    for update in range(updates):
        sample = sampler.sample(policies, Sampling(), 4)
        algorithm.update(of(sample.columns["default"]), Counters(updates=update))
    sampler.close()
    with torch.no_grad():
        found = cast(ActorCritic, policies["default"]).value({"obs": torch.tensor([0, 1])}).tolist()
    assert found == pytest.approx([doorstep, inside], abs=0.2)
