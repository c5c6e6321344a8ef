"""Reward signals in an update: advantages against slow NumPy, what they leave alone, their way through a run."""

from __future__ import annotations

from typing import Any, cast

import numpy as np
import pytest
import torch

from shared.algorithm_configs.registry import ALGORITHMS
from shared.config import PolicyConfig
from shared.errors import ConfigError
from shared.policies.registry import build_policies
from shared.spaces import Array, Columns
from shared.steps import Counters
from tests.trainer_node.game import NewGame, balanced, small
from tests.trainer_node.reward_signals import slow
from tests.trainer_node.test_ppo import CPU, DISCRETE, make_ppo, of, random_columns, weights
from tests.trainer_node.test_replay import archived, replayed
from tests.trainer_node.test_sequences import make_ppo as make_remembering
from tests.trainer_node.test_sequences import random_columns as remembering_columns
from trainer_node.algorithms.algorithm import Setting
from trainer_node.algorithms.on_policy import OnPolicy
from trainer_node.algorithms.ppo import PPO
from trainer_node.algorithms.registry import make_algorithm

SIGNAL = {"strength": 0.5, "gamma": 0.8, "learning_rate": 1e-3, "hidden_sizes": [6], "embedding_size": 3}
SIGNALS: dict[str, Any] = {"extrinsic": {"strength": 2.0}, "rnd": SIGNAL}
NETWORK = {"normalise_observations": True}


def with_rnd(seed: int = 3, **changes: Any) -> PPO:
    """PPO and RND, with γ = 0.9 and λ = 0.7 in all."""
    signals = {"extrinsic": {"strength": 2.0}, "rnd": SIGNAL | changes}
    return make_ppo(seed=seed, policy=NETWORK, reward_signals=signals, gamma=0.9, gae_lambda=0.7)


def advantages_of(algorithm: OnPolicy, columns: Columns) -> tuple[Array, Array]:
    """Of a batch, as it is to be learnt from: advantages and targets, those that count."""
    tensors = {name: torch.from_numpy(array) for name, array in columns.items()}
    if algorithm._signals is not None:
        algorithm._signals.look(of(columns), tensors)
    with torch.no_grad():
        batch = algorithm._batch(tensors).flat()
    return batch.advantage.numpy(), batch.target.numpy()


def led_to_what_is_known(columns: Columns) -> Array:
    """`[T, S]`: all steps but those that terminated without a last observation."""
    known: Array = ~columns["terminated"]
    known[tuple(columns["final_index"].T)] = True
    return known


def slow_rnd(algorithm: OnPolicy, columns: Columns, episodic: bool, ratio: Array | None = None) -> tuple[Array, Array]:
    """Advantages and targets `[T, S]` of RND alone."""
    state = {name.removeprefix("signals/rnd/"): array for name, array in algorithm.state().items()}
    reward = np.zeros(columns["reward"].shape)
    for step, slot in np.argwhere(columns["mask"] & led_to_what_is_known(columns)):
        seen = slow.normalised(state, "signal/", slow.next_observation(columns, step, slot))
        predicted, wanted = (slow.mlp(state, f"signal/{net}.", seen, "relu") for net in ("predictor", "target"))
        reward[step, slot] = np.mean((predicted - wanted) ** 2)
    reward = slow.scaled(columns, reward, 0.8, episodic)

    def value(observation: Array) -> float:
        normaliser = algorithm.policy.normaliser
        with torch.no_grad():
            seen = observation if normaliser is None else normaliser("obs", torch.from_numpy(observation)).numpy()
        return float(slow.mlp(state, "value/", seen, "tanh")[0])

    return slow.advantages(columns, reward, value, gamma=0.8, decay=0.7, episodic=episodic, ratio=ratio)


@pytest.mark.parametrize("episodic", [False, True], ids=["goes on", "episodic"])
@pytest.mark.parametrize("absent", [False, True], ids=["all act", "some are absent"])
def test_the_advantages_of_two_streams_are_those_of_a_walk_through_each_slot(episodic: bool, absent: bool) -> None:
    both, alone = with_rnd(episodic=episodic), make_ppo(policy=NETWORK, gamma=0.9, gae_lambda=0.7)
    columns = random_columns(both.policy, 5, absent=absent)
    assert len(columns["final_index"]) > 1 and columns["terminated"].any() and columns["mask"].all() != absent
    for algorithm in (both, alone):
        algorithm.observe(of(random_columns(both.policy, 6)))
    found, targets = advantages_of(both, columns)
    extrinsic, expected_targets = advantages_of(alone, columns)
    intrinsic, _ = slow_rnd(both, columns, episodic)
    mask = columns["mask"]
    np.testing.assert_allclose(found, 2 * extrinsic + 0.5 * intrinsic[mask], rtol=1e-4, atol=1e-5)
    assert abs(intrinsic[mask]).mean() > 0.1
    assert targets.tobytes() == expected_targets.tobytes(), "what the policy's own value learns is left alone"


@pytest.mark.parametrize("name", ["impala", "appo"])
def test_v_trace_weighs_a_signal_by_the_same_ratios(name: str) -> None:
    section: dict[str, Any] = {"name": name, "gamma": 0.9, "vtrace_lambda": 0.7}
    made = [of_config(section | extra) for extra in ({"reward_signals": SIGNALS}, {})]
    columns = random_columns(cast(PPO, made[0]).policy, 5)
    noise = np.random.default_rng(1).normal(size=columns["log_prob"].shape).astype(np.float32)
    columns["log_prob"] += 0.5 * noise
    ratio = np.exp(-0.5 * noise)
    found, extrinsic = (advantages_of(algorithm, columns)[0] for algorithm in made)
    intrinsic, _ = slow_rnd(made[0], columns, episodic=False, ratio=ratio)
    weight = np.minimum(ratio, 1.0) if name == "impala" else 1.0
    expected = 2 * extrinsic + 0.5 * (weight * intrinsic).flatten()
    np.testing.assert_allclose(found, expected, rtol=1e-4, atol=1e-5)


def of_config(section: dict[str, Any]) -> OnPolicy:
    """An algorithm of the family, with the policy of test_ppo.py."""
    config = ALGORITHMS[section["name"]].model_validate(section)
    policy = build_policies({"p": DISCRETE}, {"p": PolicyConfig(hidden_sizes=(16,))}, config, 3)["p"]
    return cast(OnPolicy, make_algorithm(policy, config, Setting(CPU, 3, 8, 4)))


def test_a_policy_with_a_core_learns_from_signals_whose_values_have_none() -> None:
    both, alone = make_remembering(reward_signals=SIGNALS, gae_lambda=0.7), make_remembering(gae_lambda=0.7)
    columns = remembering_columns(both, 4)
    (found, _), (extrinsic, _) = advantages_of(both, columns), advantages_of(alone, columns)
    intrinsic, _ = slow_rnd(both, columns, episodic=False)
    expected = 2 * extrinsic + 0.5 * intrinsic.T[columns["mask"].T]
    np.testing.assert_allclose(found, expected, rtol=1e-4, atol=1e-5)
    assert both.update(of(columns), Counters())["train/rnd_value_loss"] > 0


def test_the_deviation_is_that_of_all_returns_so_far_whichever_fragment_they_are_in() -> None:
    """Two fragments of one source go on with each other; and the same update by update."""
    algorithm = with_rnd(episodic=True)
    first, second = (random_columns(algorithm.policy, seed) for seed in (1, 2))
    together: Columns = {name: np.concatenate([first[name], second[name]]) for name in first if name != "bootstrap_obs"}
    assert algorithm._signals is not None
    stream = algorithm._signals._streams["rnd"]
    raw = []
    for columns in (first, second):
        algorithm._signals.look(of(columns), {name: torch.from_numpy(array) for name, array in columns.items()})
        assert stream._scaling is not None
        count, _, squares = stream._scaling._moments
        raw.append(stream._reward.numpy() * np.sqrt(squares / count + 1e-8))
    expected = slow.scaled(together, np.concatenate(raw), 0.8, episodic=True)
    np.testing.assert_allclose(stream._reward, expected[len(raw[0]) :], rtol=1e-4)


def test_steps_that_terminate_are_rewarded_where_what_they_led_to_is_known_and_absent_ones_never() -> None:
    """What comes after the end is the next episode's, whatever it looks like."""
    results = []
    for garbage in (0, 1):
        algorithm = with_rnd()
        columns = random_columns(algorithm.policy, 6, absent=True)
        absent, random = ~columns["mask"], np.random.default_rng(garbage)
        for name in ("obs", "reward", "log_prob"):
            columns[name][absent] = random.normal(size=columns[name][absent].shape) * 1e6
        metrics = algorithm.update(of(columns), Counters())
        results.append((weights(algorithm), metrics, {k: v.tobytes() for k, v in algorithm.state().items()}))
    assert results[0] == results[1]
    assert algorithm._signals is not None
    stream = algorithm._signals._streams["rnd"]
    rewarded = led_to_what_is_known(columns) & ~absent
    assert (columns["terminated"] & rewarded).any() and (columns["terminated"] & ~rewarded).any()
    assert ((stream._reward.numpy() > 0) == rewarded).all() and stream._known.tolist() == rewarded.tolist()


def test_the_value_of_a_signal_learns_its_own_targets() -> None:
    algorithm = with_rnd()
    columns = random_columns(algorithm.policy, 5)
    _, target = slow_rnd_after_look(algorithm, columns)
    state = {name.removeprefix("signals/rnd/"): array for name, array in algorithm.state().items()}
    flat = columns["obs"].reshape(-1, 3)
    expected = np.mean([(slow.mlp(state, "value/", row, "tanh")[0] - t) ** 2 for row, t in zip(flat, target.flatten())])
    one_step = make_ppo(
        policy=NETWORK, reward_signals={"rnd": SIGNAL}, gae_lambda=0.7, epochs=1, minibatch_size=32, max_grad_norm=1e6
    )
    assert one_step.update(of(columns), Counters())["train/rnd_value_loss"] == pytest.approx(expected, rel=1e-4)


def slow_rnd_after_look(algorithm: OnPolicy, columns: Columns) -> tuple[Array, Array]:
    """Once the statistics have taken the observations in."""
    assert algorithm._signals is not None
    algorithm._signals.observe({name: torch.from_numpy(array) for name, array in columns.items()})
    return slow_rnd(algorithm, columns, episodic=False)


def test_in_heat_up_only_statistics_move() -> None:
    algorithm = with_rnd()
    before = {name: array.tobytes() for name, array in algorithm.state().items()}
    algorithm.observe(of(random_columns(algorithm.policy, 1)))
    moved = {name for name, array in algorithm.state().items() if array.tobytes() != before[name]}
    assert moved and all("normaliser" in name for name in moved)


def test_a_state_is_gone_on_from_with_the_same_bits_and_that_of_other_networks_is_refused() -> None:
    whole, resumed, other = with_rnd(), with_rnd(seed=4), with_rnd(embedding_size=4)
    batches = [random_columns(whole.policy, seed) for seed in range(4)]
    for update, columns in enumerate(batches[:2]):
        whole.update(of(columns), Counters(updates=update))
    resumed = with_rnd()
    resumed.policy.load_state_dict(whole.policy.state_dict())
    resumed.load_state(whole.state())
    for algorithm in (whole, resumed):
        for update, columns in enumerate(batches[2:], start=2):
            algorithm.update(of(columns), Counters(updates=update))
    assert weights(whole) == weights(resumed)
    assert {k: v.tobytes() for k, v in whole.state().items()} == {k: v.tobytes() for k, v in resumed.state().items()}
    with pytest.raises(Exception, match="do not fit"):
        other.load_state(whole.state())


@pytest.mark.parametrize("name", ["ppo", "impala"])
def test_a_run_that_dies_goes_on_exactly_and_is_replayed_with_all_that_signals_have_learnt(
    new_game: NewGame, name: str
) -> None:
    clipped = {"minibatch_size": 20, "epochs": 2} if name == "ppo" else {}
    config = archived(
        algorithm={"name": name, "reward_signals": SIGNALS | {"icm": SIGNAL}, **clipped}, heatup="48 env_steps"
    )
    whole = new_game(config).finish()
    game = new_game(config)
    game.lose_at((1, 2, 4, 5))
    assert game.finish() == whole
    found = replayed(game, "start", game.finished()["final"])
    assert found.equal, found.different
    assert new_game(archived(algorithm={"name": name, **clipped}, heatup="48 env_steps")).finish() != whole
    balanced(game)


@pytest.mark.parametrize(
    ("algorithm", "said"),
    [
        ({"reward_signals": {}}, r"algorithm.reward_signals: there is none beside extrinsic.*give one of rnd"),
        ({"reward_signals": {"extrinsic": {"strength": 2}}}, "there is none beside extrinsic"),
        ({"reward_signals": {"rnd": {"strength": 0}}}, r"reward_signals.rnd.strength: expected a number above"),
        ({"reward_signals": {"rnd": {"gama": 0.9}}}, "unknown key algorithm.reward_signals.rnd.gama; did.*gamma"),
        ({"name": "sac", "reward_signals": {"rnd": {}}}, "sac has no such field, but a2c, appo, impala, ppo"),
    ],
)  # fmt: skip
def test_what_cannot_be_is_refused_with_what_to_do(algorithm: dict[str, Any], said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        small(algorithm=algorithm)
