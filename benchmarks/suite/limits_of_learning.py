"""How fast gradient steps are, bare and in our learner; and how fast our learner learns."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import cast

import torch
from torch import Tensor, nn

from benchmarks.suite.learning_alone import again_and_again, recorded
from benchmarks.suite.limits_of_acting import Work, cartpole
from coordinator.preparation import check
from shared.config import Config
from shared.policies.actor_critic import ActorCritic
from shared.policies.registry import build_policies
from shared.steps import Phase
from trainer_node.learner import make_learner

_MINIBATCH = 512
_CLIP = 0.2


def works(quick: bool) -> list[Work]:
    """All of them, ready."""
    bare, gradients = "gradient step of PPO in bare PyTorch, 512 rows", "gradient steps/s"
    learner, transitions = _learner(cartpole(quick))
    return [
        Work(bare, gradients, _bare_steps()),
        Work("our learner, gradient steps of PPO, 512 rows", gradients, lambda: learner()[0], bare),
        Work("our learner, PPO with 4 epochs", "env steps/s", lambda: (learner(), transitions)[1]),
    ]


def _bare_steps() -> Callable[[], int]:
    """What nobody can leave out: minibatch, both networks, clipped loss, backward, clipped norm, fused Adam."""
    config = cartpole()
    built = build_policies(check(config).policies, config.policies, config.algorithm, seed=1)
    policy = cast(ActorCritic, built["default"])
    optimiser = torch.optim.Adam(policy.parameters(), 1e-12, fused=True)
    rows = 8 * _MINIBATCH
    observations, actions = torch.randn(rows, 4), torch.randint(0, 2, (rows,))
    log_prob, advantage, target = torch.full((rows,), -0.7), torch.randn(rows), torch.randn(rows)

    def step(chosen: Tensor) -> None:
        params, value = policy.action_parameters_and_value({"obs": observations[chosen]})
        log = torch.log_softmax(params, dim=1)
        taken = log.gather(1, actions[chosen].unsqueeze(1)).squeeze(1)
        ratio, gain = (taken - log_prob[chosen]).exp(), advantage[chosen]
        gain = (gain - gain.mean()) / (gain.std() + 1e-8)
        objective = torch.min(gain * ratio, gain * ratio.clamp(1 - _CLIP, 1 + _CLIP)).mean()
        errors = (value - target[chosen]).square().mean()
        optimiser.zero_grad()
        (0.5 * errors - objective).backward()  # type: ignore[no-untyped-call]
        nn.utils.clip_grad_norm_(policy.parameters(), 0.5)
        optimiser.step()

    def call() -> int:
        for chosen in torch.randperm(rows).tensor_split(rows // _MINIBATCH):
            step(chosen)
        return rows // _MINIBATCH

    return call


def _learner(config: Config) -> tuple[Callable[[], tuple[int, int]], int]:
    """Updates of the real learner: gradient steps of each; and the transitions that one learns from."""
    learner, needed = make_learner(config, check(config)), config.rollout.fragments_per_update
    endless = again_and_again(recorded(config, 2 * needed))

    def update() -> tuple[int, int]:
        taken = list(itertools.islice(endless, needed))
        learner.emulate_acting(taken, Phase.TRAIN)
        return int(learner.learn(taken, Phase.TRAIN)["train/gradient_steps"]), needed

    return update, config.transitions_per_update
