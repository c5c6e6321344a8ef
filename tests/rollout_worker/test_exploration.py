"""How actions are chosen: sampled, greedy, at random; by values; with noise on actions and on weights."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
import torch
from gymnasium import spaces
from pydantic import TypeAdapter, ValidationError

from stagecoach.rollout_worker.acting_policies import make_exploration
from stagecoach.rollout_worker.exploration.base import Exploration, Greedy, RandomActing, Sampling
from stagecoach.rollout_worker.exploration.discrete import EpsilonGreedy
from stagecoach.rollout_worker.exploration.noise import ParameterNoise, TruncatedGaussianNoise
from stagecoach.shared.config.algorithms.exploration import ExplorationField, NoiseField
from stagecoach.shared.experience.counters import Counters
from stagecoach.shared.experience.spaces import Array
from stagecoach.shared.policies.policy import Policy
from stagecoach.shared.policies.serialization import state_arrays
from tests.support.environments import ACTIONS
from tests.support.policies import SIGHT, built_policy, generator

LOW, HIGH = np.array([-100.0, 0.0], np.float32), np.array([100.0, 400.0], np.float32)
ROWS, MANY = 4000, 20_000
TORQUE = spaces.Box(LOW, HIGH)


def policy_for(action: spaces.Space[Any] = TORQUE, algorithm: str = "") -> Any:
    """For three observed numbers; by default PPO's actor-critic, or TD3's actor of two torques."""
    return built_policy(SIGHT, action, algorithm or ("td3" if action is TORQUE else "ppo"), 0)


def q_network(**fields: Any) -> Any:
    return built_policy(SIGHT, spaces.Discrete(4), "dqn", 5, fields, hidden_sizes=(8,))


def exploring(counters: Counters | None = None, **section: Any) -> Exploration:
    kind: Any = NoiseField if section["kind"] in NOISES else ExplorationField
    return make_exploration(TypeAdapter(kind).validate_python(section), counters or Counters())


NOISES = ("gaussian", "truncated_gaussian", "ou", "parameter_noise")


def observations(rows: int) -> dict[str, torch.Tensor]:
    """The same ones each time."""
    return {"obs": torch.randn(rows, 3, generator=generator(1))}


def alike(rows: int) -> dict[str, torch.Tensor]:
    return {"obs": observations(1)["obs"].expand(rows, -1)}


@torch.no_grad()
def test_sampling_draws_from_the_policys_distribution_and_tells_its_parameters() -> None:
    policy = policy_for(spaces.Discrete(3))
    policy.get_parameter("head.bias").copy_(torch.tensor([0.0, 2.0, 1.0]))
    actions, params = Sampling().act(policy, observations(MANY), generator())
    assert params is not None and torch.equal(params, policy.action_parameters(observations(MANY)))
    found = torch.bincount(actions["action"], minlength=3) / MANY
    torch.testing.assert_close(found, torch.softmax(params, 1).mean(0), rtol=0, atol=0.02)


@torch.no_grad()
def test_greedy_takes_the_most_probable_action_every_time() -> None:
    policy = policy_for(spaces.Tuple((spaces.Discrete(3), spaces.Box(-1.0, 1.0, (2,)))))
    actions, params = Greedy().act(policy, observations(50), generator(1))
    again, _ = Greedy().act(policy, observations(50), generator(2))
    assert params is not None
    assert torch.equal(actions["action.0"], params[:, :3].argmax(1)) and torch.equal(
        actions["action.1"], params[:, 3:5]
    )
    assert all(torch.equal(actions[name], again[name]) for name in actions)


@pytest.mark.parametrize("name", ACTIONS)
def test_random_acting_stays_in_the_space_and_reaches_all_of_it(name: str) -> None:
    policy = policy_for(ACTIONS[name])
    actions, _ = RandomActing().act(policy, observations(500), generator())
    for leaf in policy.spaces.action.leaves:
        column = actions[leaf.column("action")].numpy()
        assert column.shape == (500, *leaf.shape)
        if leaf.kind == "box":
            low, high = leaf.bounds()
            width = high - low
            assert (column >= low).all() and (column <= high).all()
            assert (column.min(0) < low + 0.05 * width).all() and (column.max(0) > high - 0.05 * width).all()
        else:
            assert column.min() >= 0 and (column.reshape(500, -1).max(0) == np.array(leaf.nvec) - 1).all()
            shares = [np.bincount(part, minlength=n) / 500 for part, n in zip(column.reshape(500, -1).T, leaf.nvec)]
            assert all(np.abs(share - 1 / len(share)).max() < 0.12 for share in shares)


@pytest.mark.parametrize(
    ("action", "volume"),
    [
        (ACTIONS["discrete"], 4), (ACTIONS["multi_discrete_matrix"], 120), (ACTIONS["multi_binary"], 16),
        (ACTIONS["box"], 1.0), (ACTIONS["box64"], 0.04), (ACTIONS["dict"], 0.2**4 * 2), (ACTIONS["tuple"], 12),
    ],
    ids=str,
)  # fmt: skip
def test_random_acting_tells_one_over_the_volume_of_the_space(action: spaces.Space[object], volume: float) -> None:
    policy = policy_for(action)
    actions, params = RandomActing().act(policy, observations(50), generator())
    told = RandomActing().log_prob(policy, params, actions)
    assert told.shape == (50,) and told.tolist() == pytest.approx([-np.log(volume)] * 50, rel=1e-5, abs=1e-5)


def test_where_a_box_has_no_bounds_it_tells_the_normal_density_and_of_a_single_value_nothing() -> None:
    def told(action: spaces.Space[object]) -> tuple[torch.Tensor, torch.Tensor]:
        policy = policy_for(action)
        actions, params = RandomActing().act(policy, observations(ROWS), generator())
        return actions["action"], RandomActing().log_prob(policy, params, actions)

    normal = torch.distributions.Normal(0.0, 1.0)
    drawn, found = told(spaces.Box(-np.inf, np.inf, (2,), np.float32))
    torch.testing.assert_close(drawn.mean(0), torch.zeros(2), rtol=0, atol=0.1)
    torch.testing.assert_close(drawn.std(0), torch.ones(2), rtol=0, atol=0.1)
    torch.testing.assert_close(found, normal.log_prob(drawn).sum(dim=1))  # type: ignore[no-untyped-call]
    drawn, found = told(spaces.Box(np.array([0, -1, -3e38], np.float32), np.array([np.inf, 2, 3e38], np.float32)))
    expected = normal.log_prob(drawn[:, [0, 2]]).sum(dim=1) - np.log(3)  # type: ignore[no-untyped-call]
    torch.testing.assert_close(found, expected)
    assert told(spaces.Box(np.array([0, 2], np.float32), np.array([1, 2], np.float32)))[1].isnan().all()


TWO_PARTS = spaces.Tuple((spaces.Discrete(2), spaces.MultiBinary(2)))


@pytest.mark.parametrize(
    ("kind", "action", "fields"),
    [
        ("epsilon_greedy", spaces.Discrete(3), {}), ("epsilon_greedy", TWO_PARTS, {}),
        ("ucb", None, {"heads": 3}), ("bootstrapped", None, {"heads": 3}),
    ],
)  # fmt: skip
@torch.no_grad()
def test_who_acts_at_random_now_and_then_tells_the_probability_of_what_it_does(
    kind: str, action: spaces.Space[object] | None, fields: dict[str, Any]
) -> None:
    policy = q_network(**fields) if action is None else policy_for(action)
    exploration = EpsilonGreedy(0.4) if kind == "epsilon_greedy" else exploring(kind=kind, epsilon=0.4)
    exploration.begin(0, 3)
    actions, params = exploration.act(policy, alike(MANY), generator())
    assert params is not None
    joint = np.concatenate([column.reshape(MANY, -1).numpy() for column in actions.values()], axis=1)
    _, which, counts = np.unique(joint, axis=0, return_inverse=True, return_counts=True)
    told = exploration.log_prob(policy, params, actions).exp().numpy()
    np.testing.assert_allclose(told, counts[which.reshape(-1)] / MANY, atol=0.015)
    assert counts.max() / MANY == pytest.approx(0.6 + 0.4 / len(counts), abs=0.015)


@pytest.mark.parametrize("temperature", [0.05, 0.3, 5.0])
@torch.no_grad()
def test_boltzmann_draws_by_the_softmax_of_values_and_tells_its_probability(temperature: float) -> None:
    policy = q_network()
    rows = alike(MANY)
    exploration = exploring(kind="boltzmann", temperature=temperature)
    actions, params = exploration.act(policy, rows, generator())
    values = policy.action_parameters(rows)[0].numpy().astype(np.float64)
    powers = [np.exp((value - values.max()) / temperature) for value in values]
    expected = np.array(powers) / sum(powers)
    assert params is not None
    found = np.bincount(actions["action"].numpy(), minlength=4) / MANY
    np.testing.assert_allclose(found, expected, atol=0.015)
    told = exploration.log_prob(policy, params, actions).exp().numpy()
    np.testing.assert_allclose(told, expected[actions["action"].numpy()], rtol=1e-4)


def test_a_temperature_falls_with_the_counters_and_may_not_come_to_nothing() -> None:
    falling = {"kind": "exponential", "start": 10.0, "end": 1e-4, "over": "100 env_steps"}
    policy, rows = q_network(), alike(400)
    late = exploring(Counters(env_steps=100), kind="boltzmann", temperature=falling).act(policy, rows, generator())[0]
    early = exploring(kind="boltzmann", temperature=falling).act(policy, rows, generator())[0]
    assert len(set(late["action"].tolist())) == 1 and len(set(early["action"].tolist())) == 4
    with pytest.raises(ValidationError, match="temperature gets to 0"):
        exploring(kind="boltzmann", temperature={"kind": "linear", "start": 1, "end": 0, "over": "5 updates"})


@torch.no_grad()
def test_of_noise_on_the_weights_no_probability_is_known() -> None:
    policy, sampling = q_network(noisy=True), exploring(kind="sampling")
    actions, params = sampling.act(policy, observations(9), generator())
    assert sampling.log_prob(policy, params, actions).isnan().all()


@pytest.mark.parametrize("fields", [{}, {"head": "qr", "quantiles": 3, "dueling": True}, {"prior_scale": 2.0}], ids=str)
@torch.no_grad()
def test_ucb_takes_the_largest_mean_and_deviations_over_the_heads(fields: dict[str, Any]) -> None:
    policy = q_network(heads=5, **fields)
    sight = observations(200)
    heads = policy.head_values(sight).numpy().astype(np.float64)
    coefficient = {"kind": "linear", "start": 4.0, "end": 0.0, "over": "100 env_steps"}
    taken = {}
    for steps, times in ((0, 4.0), (75, 1.0), (100, 0.0)):
        exploration = exploring(Counters(env_steps=steps), kind="ucb", coefficient=coefficient)
        actions, params = exploration.act(policy, sight, generator())
        for row in range(200):
            bounds = []
            for action in range(4):
                values = [heads[head, row, action] for head in range(5)]
                mean = sum(values) / 5
                bounds.append(mean + times * (sum((value - mean) ** 2 for value in values) / 5) ** 0.5)
            assert int(actions["action"][row]) == int(np.argmax(bounds))
        assert params is not None and (exploration.log_prob(policy, params, actions) == 0).all()
        taken[steps] = actions["action"]
    assert torch.equal(taken[100], policy.action_parameters(sight).argmax(dim=1))
    assert not torch.equal(taken[0], taken[100])


@torch.no_grad()
def test_an_episode_is_acted_by_one_head_that_follows_from_its_seed() -> None:
    policy, sight = q_network(heads=6, prior_scale=3.0), alike(8)
    values = policy.head_values(sight)[:, 0]

    def told(seeds: list[int]) -> tuple[Exploration, list[int]]:
        """An exploration of 8 slots: two agents in each of 4 environments; and the head of each slot."""
        exploration = exploring(kind="bootstrapped")
        for environment, seed in enumerate(seeds):
            exploration.begin(environment, seed)
        _, params = exploration.act(policy, sight, generator())
        assert params is not None
        return exploration, [int((values == row).all(dim=1).nonzero()) for row in params]

    exploration, heads = told([7, 8, 9, 10])
    assert heads[:4] == heads[4:], "agents of one environment explore together"
    assert told([7, 8, 9, 10])[1] == heads
    assert told([7, 8, 1234, 10])[1][:2] == heads[:2]
    actions, _ = exploration.act(policy, sight, generator(9))
    assert actions["action"].tolist() == [int(values[head].argmax()) for head in heads]
    drawn = np.bincount([head for first in range(0, 4000, 4) for head in told(list(range(first, first + 4)))[1][:4]])
    np.testing.assert_allclose(drawn / 4000, 1 / 6, atol=0.03)


@torch.no_grad()
def test_weights_of_a_q_network_may_be_disturbed() -> None:
    policy, sight = q_network(), observations(300)
    actions, _ = ParameterNoise(1.0).act(policy, sight, generator())
    best = policy.action_parameters(sight).argmax(dim=1)
    assert actions["action"].shape == best.shape and not torch.equal(actions["action"], best)


@torch.no_grad()
def acted(exploration: Exploration, acting: Policy, steps: int, seed: int = 0, rows: int = ROWS) -> Array:
    """`[steps, rows, 2]`: how far the actions are from the best one, in halves of the range."""
    draw, sight = generator(seed), {"obs": torch.zeros(rows, 3)}
    best = acting.distribution.mode(acting.action_parameters(sight))["action"].numpy()
    taken = []
    for _ in range(steps):
        actions, params = exploration.act(acting, sight, draw)
        assert params is not None
        assert exploration.log_prob(acting, params, actions).isnan().all() or isinstance(
            exploration, TruncatedGaussianNoise
        )
        taken.append((actions["action"].numpy() - best) / ((HIGH - LOW) / 2))
        assert (actions["action"].numpy() >= LOW).all() and (actions["action"].numpy() <= HIGH).all()
    return np.stack(taken)


def test_gaussian_noise_has_its_deviation_in_halves_of_the_range_and_no_memory() -> None:
    noise = acted(exploring(kind="gaussian", sigma=0.2), policy_for(), 2)
    np.testing.assert_allclose(noise.std(axis=1), 0.2, rtol=0.06)
    assert abs(np.corrcoef(noise[0, :, 0], noise[1, :, 0])[0, 1]) < 0.06
    bounded = acted(exploring(kind="gaussian", sigma=0.2, bound=1.5), policy_for(), 1)
    assert np.abs(bounded).max() == pytest.approx(0.3, abs=1e-5)


@pytest.mark.parametrize(("sigma", "outputs"), [(0.1, 0.0), (0.5, 1.0), (0.5, -9.0), (3.0, 0.4)])
@torch.no_grad()
def test_truncated_noise_is_the_normal_distribution_within_the_bounds_and_tells_its_density(
    sigma: float, outputs: float
) -> None:
    acting = policy_for()
    acting.get_parameter("head.weight").zero_()
    acting.get_parameter("head.bias").fill_(outputs)
    middle, exploration = math.tanh(outputs), exploring(kind="truncated_gaussian", sigma=sigma)
    sight = {"obs": torch.zeros(ROWS, 3)}
    actions, params = exploration.act(acting, sight, generator())
    assert params is not None
    drawn = (actions["action"].numpy() - (HIGH + LOW) / 2) / ((HIGH - LOW) / 2)
    assert drawn.min() >= -1 and drawn.max() <= 1
    assert (np.abs(drawn) == 1).mean() < 0.001, "nothing is heaped up at the bounds"
    places = np.linspace(-1, 1, 20_001)
    density = np.exp(-0.5 * ((places - middle) / sigma) ** 2)
    density /= density.sum() * (places[1] - places[0])
    below = np.cumsum(density) * (places[1] - places[0])
    for mark in np.quantile(places, np.linspace(0.05, 0.95, 10)):
        expected = np.interp(mark, places, below)
        np.testing.assert_allclose((drawn < mark).mean(axis=0), expected, atol=0.03)
    told = exploration.log_prob(acting, params, actions).numpy()
    of_each = np.log(np.interp(drawn, places, density) / ((HIGH - LOW) / 2))
    np.testing.assert_allclose(told, of_each.sum(axis=1), atol=0.01)


@torch.no_grad()
def test_truncated_noise_of_nothing_is_the_best_action_and_what_a_policy_draws_itself_has_no_known_density() -> None:
    acting, sight = policy_for(), observations(50)
    still = exploring(kind="truncated_gaussian", sigma=0.0)
    actions, params = still.act(acting, sight, generator())
    assert params is not None and still.log_prob(acting, params, actions).isnan().all()
    assert torch.equal(actions["action"], acting.distribution.mode(params)["action"])
    drawing = policy_for(algorithm="sac")
    noisy = exploring(kind="truncated_gaussian", sigma=0.3)
    actions, params = noisy.act(drawing, sight, generator())
    assert params is not None and noisy.log_prob(drawing, params, actions).isnan().all()
    assert (actions["action"].numpy() >= LOW).all() and (actions["action"].numpy() <= HIGH).all()


def test_ornstein_uhlenbeck_noise_is_as_spread_at_the_first_step_as_later_and_goes_on() -> None:
    noise = acted(exploring(kind="ou", sigma=0.1, theta=0.2), policy_for(), 12)
    np.testing.assert_allclose(noise.std(axis=1), 0.1 / math.sqrt(1 - 0.8**2), rtol=0.06)
    for lag in (1, 5):
        found = np.corrcoef(noise[0, :, 1], noise[lag, :, 1])[0, 1]
        assert found == pytest.approx(0.8**lag, abs=0.06), f"after {lag} steps"


@pytest.mark.parametrize("kind", [*(kind for kind in NOISES if kind != "parameter_noise"), "sampling", "random"])
def test_a_fragment_follows_from_its_generator_alone_and_the_next_one_begins_anew(kind: str) -> None:
    def actions(seed: int) -> list[Any]:
        torch.manual_seed(99 + seed)
        exploration, draw = RandomActing() if kind == "random" else exploring(kind=kind), generator(seed // 2)
        return [exploration.act(acting, observations(5), draw)[0]["action"].tolist() for _ in range(3)]

    acting = policy_for(algorithm="" if kind in NOISES else "sac")
    assert actions(0) == actions(1) != actions(2)


def test_parameter_noise_is_drawn_once_and_leaves_the_policy_as_it_was() -> None:
    acting = policy_for()
    before, exploration = state_arrays(acting), exploring(kind="parameter_noise", sigma=0.1)
    noise = acted(exploration, acting, 3, rows=6)
    np.testing.assert_allclose(noise, np.broadcast_to(noise[0, 0], noise.shape), atol=1e-6)
    assert (np.abs(noise) > 1e-4).all(), "equal observations, equal actions, other than the best"
    assert all(np.array_equal(array, before[name]) for name, array in state_arrays(acting).items())
    assert (acted(exploring(kind="parameter_noise", sigma=0.0), acting, 1) == 0).all()


@torch.no_grad()
def test_parameter_noise_follows_from_the_episode_seeds() -> None:
    """Slots of environment 0 and 1 take turns; whichever generator acts."""
    acting, sight = policy_for(), alike(4)

    def actions(*seeds: int) -> Array:
        exploration = exploring(kind="parameter_noise", sigma=0.1)
        for environment, seed in enumerate(seeds):
            exploration.begin(environment, seed)
        return exploration.act(acting, sight, generator(sum(seeds)))[0]["action"].numpy()

    one, other = actions(5, 6), actions(5, 7)
    assert np.array_equal(one[0::2], other[0::2]) and not np.array_equal(one[1::2], other[1::2])
    assert np.array_equal(one[0], one[2]) and not np.array_equal(one[0], one[1])


def test_schedules_are_functions_of_the_counters() -> None:
    sigma = {"kind": "linear", "start": 0.3, "end": 0.0, "over": "100 env_steps"}
    ended = Counters(env_steps=100)
    for kind in NOISES:
        assert (acted(exploring(ended, kind=kind, sigma=sigma), policy_for(), 2) == 0).all()
