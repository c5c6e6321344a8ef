"""VDN and QMIX: joint transitions as they are drawn, and values, targets and losses beside a slow NumPy form."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from stagecoach.shared.experience.counters import Counters
from stagecoach.shared.experience.spaces import Array
from stagecoach.trainer_node.learning.algorithms.qmix import QMIX
from stagecoach.trainer_node.learning.replay_buffers.uniform import Batch, TeamReplayBuffer
from tests.support.learning.algorithms import make, make_dqn, move_apart, weights
from tests.support.learning.experience import acted, ignores_masked_rows, random_fragment, received
from tests.support.learning.streams import PLAIN
from tests.support.runs.game import NewGame, archived, goes_on_exactly

AGENTS = 3
both = pytest.mark.parametrize("name", ["vdn", "qmix"])


def team_of(name: str, **fields: Any) -> Any:
    algorithm = make(name, agents=AGENTS, shape=(5, 6), **{"minibatch_size": 20, **fields})
    networks = [algorithm.policy, algorithm.target]
    move_apart(*networks, *([algorithm.mixer, algorithm.target_mixer] if name == "qmix" else []))
    return algorithm


def joint(algorithm: Any, seed: int) -> Batch:
    """Drawn from a buffer with fragments of two environments in which agents come and go."""
    for number in range(4):
        columns = acted(make("ppo").policy, seed + number, steps=5, slots=2 * AGENTS, absent=True)
        algorithm.observe(received(columns))
    drawn: Batch = algorithm.replay_buffer.sample(20, np.random.default_rng(seed), gamma=0.9)
    return drawn


def test_mixing_network_initializes_another_run() -> None:
    there, here = team_of("qmix"), make("qmix", agents=AGENTS, shape=(5, 6), minibatch_size=20)
    assert isinstance(here, QMIX)
    here.begin_with(there.state())
    for mine in (here.mixer, here.target_mixer):
        pairs = zip(mine.parameters(), there.mixer.parameters(), strict=True)
        assert all(torch.equal(ours, theirs) for ours, theirs in pairs)
    other = make("qmix", agents=AGENTS + 1, shape=(5, 8), minibatch_size=20)
    with pytest.raises(ValueError, match=r"mixer/.* has the shape"):
        other.begin_with(there.state())


@given(st.integers(0, 100), st.integers(1, 3), st.integers(1, 3))
def test_joint_transitions_share_environment_and_step(seed: int, agents: int, num_envs: int) -> None:
    """Every one in which somebody acts can be drawn, and no other."""
    policy, steps = make("ppo").policy, 4
    buffer = TeamReplayBuffer(policy.spaces, steps, agents * num_envs, 2 * steps * agents * num_envs, agents=agents)
    held = [acted(policy, seed + number, steps, agents * num_envs, absent=True) for number in range(3)]
    for number, columns in enumerate(held):
        columns["obs"][..., 0] = number
        columns["obs"][..., 1] = np.arange(steps)[:, np.newaxis]
        columns["obs"][..., 2] = np.arange(agents * num_envs)
        buffer.add("worker", columns)
    there = [columns["mask"].reshape(steps, agents, num_envs) for columns in held[1:]]
    expected = {(n + 1, t, e) for n, mask in enumerate(there) for t, e in np.argwhere(mask.any(axis=1)).tolist()}
    assert len(buffer) == len(expected)
    drawn = buffer.sample(40 * len(expected), np.random.default_rng(seed), gamma=0.9)
    rows = drawn.observations["obs"].reshape(-1, agents, 3).astype(int)
    weight = drawn.weight.reshape(-1, agents)
    seen = set()
    for row, counts in zip(rows, weight):
        (number, step, environment), slots = (*row[0, :2], row[0, 2] % num_envs), np.arange(agents) * num_envs
        assert (row[:, :2] == row[0, :2]).all() and row[:, 2].tolist() == (slots + environment).tolist()
        assert counts.tolist() == there[number - 1][step, :, environment].tolist()
        seen.add((int(number), int(step), int(environment)))
    assert seen <= expected and len(seen) > 0.9 * len(expected)


def slow_mix(mixer: Any, values: Array, observed: Array) -> float:
    """QMIX's team value of one joint transition; the sum where there is no mixer."""
    if mixer is None:
        return float(values.sum())

    def layer(module: Any, inputs: Array) -> Array:
        found: Array = module.weight.detach().double().numpy() @ inputs + module.bias.detach().double().numpy()
        return found

    state = observed.flatten()
    weights = np.abs(layer(mixer.first, state)).reshape(AGENTS, -1)
    hidden = values @ weights + layer(mixer.first_bias, state)
    hidden = np.where(hidden > 0, hidden, np.expm1(np.minimum(hidden, 0)))
    bias = layer(mixer.second_bias[2], np.maximum(layer(mixer.second_bias[0], state), 0))
    return float(hidden @ np.abs(layer(mixer.second, state)) + bias[0])


def slow_errors(algorithm: Any, drawn: Batch, team_reward: str, double: bool) -> Iterator[tuple[float, float]]:
    """Prediction and target of each joint transition, one after another."""
    mixers = (getattr(algorithm, "mixer", None), getattr(algorithm, "target_mixer", None))

    def values(network: Any, observations: Array) -> Array:
        with torch.no_grad():
            found: Array = network.outputs({"obs": torch.from_numpy(observations)}).squeeze(2).double().numpy()
            return found

    for first in range(0, len(drawn.reward), AGENTS):
        rows = slice(first, first + AGENTS)
        there, ends = drawn.weight[rows] > 0, drawn.discount[rows] == 0
        seen, after = drawn.observations["obs"][rows], drawn.next_observations["obs"][rows]
        chosen = values(algorithm.policy, seen)[np.arange(AGENTS), drawn.actions["action"][rows]]
        predicted = slow_mix(mixers[0], np.where(there, chosen, 0), np.where(there[:, None], seen, 0))
        goes_on, rewards = there & ~ends, drawn.reward[rows][there].astype(np.float64)
        target = float(rewards.sum() if team_reward == "sum" else rewards.mean())
        if goes_on.any():
            by = values(algorithm.policy if double else algorithm.target, after).argmax(axis=1)
            best = np.where(goes_on, values(algorithm.target, after)[np.arange(AGENTS), by], 0)
            target += 0.9 * slow_mix(mixers[1], best, np.where(goes_on[:, None], after, 0))
        yield predicted, target


@both
@pytest.mark.parametrize("double", [False, True])
@pytest.mark.parametrize("team_reward", ["mean", "sum"])
def test_values_and_targets_are_those_of_the_slow_form(name: str, double: bool, team_reward: str) -> None:
    algorithm = team_of(name, double=double, team_reward=team_reward, loss="squared")
    drawn = joint(algorithm, 7)
    assert (drawn.weight == 0).any() and (drawn.discount == 0).any()
    loss, lesson = algorithm.loss(algorithm.on_device(drawn))
    pairs = np.array(list(slow_errors(algorithm, drawn, team_reward, double)))
    np.testing.assert_allclose(lesson.td_error, pairs[:, 1] - pairs[:, 0], rtol=1e-3, atol=1e-4)
    assert loss.item() == pytest.approx(float(((pairs[:, 1] - pairs[:, 0]) ** 2).mean()), rel=1e-3)
    assert lesson.metrics["train/q_value"].item() == pytest.approx(float(pairs[:, 0].mean()), rel=1e-3, abs=1e-4)


@given(st.integers(0, 1000), st.integers(0, AGENTS - 1))
def test_mixing_is_monotonic_in_agent_values(seed: int, agent: int) -> None:
    mixer = team_of("qmix").mixer
    random = torch.Generator().manual_seed(seed)
    values, observations = torch.randn(9, AGENTS, generator=random), torch.randn(9 * AGENTS, 3, generator=random)
    better = values.clone()
    better[:, agent] += 0.5
    there = torch.ones(9, AGENTS)
    mixed, more = (mixer(each, {"obs": observations}, there, None) for each in (values, better))
    assert (more >= mixed - 1e-5).all() and (more > mixed + 1e-4).any()


@both
def test_masked_rows_are_ignored(name: str) -> None:
    _, _, metrics = ignores_masked_rows(
        lambda: team_of(name, policy={"normalize_observations": True}, gradient_steps_per_env_step=1.0),
        lambda _: acted(make("ppo").policy, 5, steps=5, slots=6, absent=True), 1e3,
    )  # fmt: skip
    assert metrics["train/gradient_steps"] == 10


def test_team_of_one_learns_as_dqn() -> None:
    found = []
    for name in ("vdn", "dqn"):
        algorithm = make_dqn(name, target_update_steps=7)
        for update in range(5):
            experience = [random_fragment(algorithm.policy, update)]
            algorithm.update(experience, Counters(updates=update, env_steps=12 * (update + 1)))
        found.append(weights(algorithm))
    assert algorithm.policy.spaces == PLAIN and found[0] == found[1]


def test_target_mixer_updates_in_steps() -> None:
    algorithm = team_of("qmix", target_update_steps=4, gradient_steps_per_env_step=1.0)
    joint(algorithm, 1)
    for steps in range(1, 9):
        algorithm.update([], Counters(updates=steps, env_steps=steps))
        same = all(
            torch.equal(*pair) for pair in zip(algorithm.mixer.parameters(), algorithm.target_mixer.parameters())
        )
        assert same == (steps % 4 == 0)


def test_qmix_mixes_by_the_environments_state(new_game: NewGame) -> None:
    """The state travels with the experience; Q-networks do not read it, the hypernetworks read nothing else."""
    config = archived(
        environment={"api": "pettingzoo", "id": "tests.support.environments.games:Told"}, heatup="64 env_steps",
        policies={"default": {"hidden_sizes": [8], "critic_observes": "state", "normalize_observations": True}},
        algorithm={"name": "qmix", "minibatch_size": 8}, stop_at={"updates": 5},
    )  # fmt: skip
    goes_on_exactly(new_game, config)
    game = new_game(config)
    game.play_to(2)
    algorithm = game.trainer.learner.algorithms["default"]
    assert isinstance(algorithm, QMIX)
    drawn = algorithm.on_device(algorithm.replay_buffer.sample(8, np.random.default_rng(0), gamma=0.9))
    agents, values = algorithm._setting.agents, algorithm.policy.outputs(drawn.observations)
    there, each = drawn.weight.reshape(-1, agents), torch.ones(len(drawn) // agents, agents)
    mixed = algorithm.mixed(each, drawn.observations, there, target=False)
    state = drawn.observations["obs.state().seen"].reshape(*there.shape, -1)
    assert all((rows[here > 0] == rows[here > 0][0]).all() for rows, here in zip(state, there, strict=True))
    own = [name for name in drawn.observations if "state()" not in name]
    other = drawn.observations | {name: torch.zeros_like(drawn.observations[name]) for name in own}
    assert torch.equal(algorithm.mixed(each, other, there, target=False), mixed)
    other = drawn.observations | {"obs.state().seen": drawn.observations["obs.state().seen"] + 1}
    assert torch.equal(algorithm.policy.outputs(other), values)
    assert not torch.allclose(algorithm.mixed(each, other, there, target=False), mixed)
