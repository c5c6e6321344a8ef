"""TD3 and DDPG: their losses against a slow NumPy computation, the delay, the noise and the targets."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from shared.policies.codec import state_arrays
from shared.steps import Counters
from tests.trainer_node.continuous import (
    BOXES,
    in_unit_box,
    made,
    minibatch,
    moved_apart,
    slow_actor,
    slow_critic,
)


@pytest.mark.parametrize(("name", "critics"), [("td3", (0, 1)), ("ddpg", (0,))])
def test_the_losses_are_those_of_a_slow_computation(name: str, critics: tuple[int, ...]) -> None:
    algorithm, batch = made(name), minibatch(BOXES)
    moved_apart(algorithm.policy, algorithm.critics, algorithm.targets, algorithm.target_policy)
    noise = 3 * torch.randn(len(batch), 2, generator=torch.Generator().manual_seed(5))
    critic, actor, clipped = 0.0, 0.0, 0
    for row in range(len(batch)):
        sight, after = (
            seen["obs"][row].numpy().astype(np.float64) for seen in (batch.observations, batch.next_observations)
        )
        best = np.tanh(slow_actor(algorithm.target_policy, after))
        if name == "td3":
            disturbance = np.clip(0.2 * noise[row].numpy().astype(np.float64), -0.5, 0.5)
            clipped += int((np.abs(disturbance) == 0.5).sum())
            best = np.clip(best + disturbance, -1, 1)
        then = min(slow_critic(algorithm.targets, c, np.concatenate([after, best]))[0] for c in critics)
        wanted = float(batch.reward[row]) + float(batch.discount[row]) * then
        taken = np.concatenate([sight, in_unit_box(batch.actions["action"][row].numpy())])
        weight = float(batch.weight[row]) / len(batch)
        critic += weight * sum((slow_critic(algorithm.critics, c, taken)[0] - wanted) ** 2 for c in critics)
        now = np.concatenate([sight, np.tanh(slow_actor(algorithm.policy, sight))])
        actor -= weight * slow_critic(algorithm.critics, 0, now)[0]
    assert clipped > 0 or name == "ddpg"
    assert float(algorithm.critic_loss(batch, noise)[0].detach()) == pytest.approx(critic, rel=1e-4)
    assert float(algorithm.actor_loss(batch).detach()) == pytest.approx(actor, rel=1e-4)


def test_the_policy_and_the_targets_move_at_every_third_step() -> None:
    td3, drawing = made("td3", policy_delay=3, tau=0.25), torch.Generator().manual_seed(1)
    for done in range(6):
        before, policy = td3.networks(), state_arrays(td3.policy)
        td3.done = done
        metrics = td3.learn(minibatch(BOXES, seed=done), Counters(), drawing).metrics
        after = td3.networks()
        moves = done % 3 == 2
        assert any((state_arrays(td3.policy)[name] != array).any() for name, array in policy.items()) == moves
        assert ("train/actor_loss" in metrics) == moves
        assert any((before[name] != after[name]).any() for name in before if name.startswith("critics/"))
        slow = [name for name in before if name.startswith(("targets/", "target_policy/"))]
        assert any((before[name] != after[name]).any() for name in slow) == moves
        if moves:
            for name in before:
                if name.startswith("critics/"):
                    target = name.replace("critics/", "targets/")
                    np.testing.assert_allclose(after[target], 0.75 * before[target] + 0.25 * after[name], atol=1e-6)
