"""What limits a run, each thing alone: environments and policies, gradient steps, Redis, the store and memory."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any, cast

import boto3
import gymnasium as gym
import numpy as np
import redis
import torch
from torch import Tensor, nn

from benchmarks.suite.learning_alone import again_and_again, recorded
from benchmarks.suite.lone_run import LoneRun
from stagecoach.coordinator.lifecycle.validation import check
from stagecoach.coordinator.services.embedded import BUCKET
from stagecoach.rollout_worker.environments.factory import make_vector
from stagecoach.rollout_worker.environments.seeding import SeedLineage
from stagecoach.rollout_worker.exploration.base import Sampling
from stagecoach.rollout_worker.sampling.sampler import Sampler
from stagecoach.shared.base.address import s3_keys
from stagecoach.shared.config.loading import parse_config
from stagecoach.shared.config.run_config import Config
from stagecoach.shared.experience import fragment
from stagecoach.shared.experience.counters import Phase
from stagecoach.shared.policies.actor_critic import ActorCritic
from stagecoach.shared.policies.policy import Policy
from stagecoach.shared.policies.registry import build_policies
from stagecoach.trainer_node.learning.learner import make_learner

_MINIBATCH = 512
_CLIP = 0.2
_MESSAGE_BYTES = 115_000
_OBJECT_BYTES = 1 << 20
_MEMORY_BYTES = 64 << 20
_DEPTH = 16
"""Commands in a pipeline."""


ENVIRONMENTS, STEPS = 64, 64


@dataclass(frozen=True)
class Work:
    """One line: what is done again and again."""

    what: str
    unit: str
    call: Callable[[], int]
    """Does some of it; answers how much."""
    against: str = ""
    """`what` of the line that it is compared with."""
    close: Callable[[], object] = lambda: None


def cartpole(quick: bool = False) -> Config:
    """64 environments × 64 steps to a fragment, PPO with 4 epochs; little of it where it is only tried out."""
    some = 1 if quick else 4
    return parse_config({
        "environment": {"id": "CartPole-v1", "num_envs": ENVIRONMENTS},
        "policies": {"default": {"hidden_sizes": [64, 64]}},
        "algorithm": {"epochs": some, "minibatch_size": 512},
        "rollout": {"fragment_steps": STEPS, "fragments_per_update": some, "max_policy_lag": 1, "workers": 1},
        "stop_at": {"updates": 10**9},
    })  # fmt: skip


def acting() -> list[Work]:
    """All of them, ready."""
    unit, vector = "env steps/s", f"gymnasium SyncVectorEnv of {ENVIRONMENTS}"
    sync = gym.make_vec("CartPole-v1", ENVIRONMENTS, vectorization_mode="sync")
    own = {count: gym.make_vec("CartPole-v1", count, vectorization_mode="vector_entry_point") for count in (64, 1024)}
    single = gym.make("CartPole-v1")
    sampler, policy = _sampler()
    return [
        Work("CartPole-v1, one", unit, _one_by_one(single), close=single.close),
        Work(vector, unit, _vector(sync, ENVIRONMENTS), close=sync.close),
        *(
            Work(f"gymnasium's own vector CartPole of {count}", unit, _vector(env, count), vector, env.close)
            for count, env in own.items()
        ),
        Work("policy: forward and draw, batch 64", "rows/s", _acting(policy)),
        Work(f"our sampler, {ENVIRONMENTS} environments and policy", unit, lambda: _sampled(sampler, policy), vector,
             sampler.close),
    ]  # fmt: skip


def _one_by_one(env: gym.Env[Any, Any]) -> Callable[[], int]:
    """Random actions, with resets, as who steps an environment by hand."""
    actions = np.random.default_rng(1).integers(0, 2, 1000).tolist()
    env.reset(seed=1)

    def call() -> int:
        for action in actions:
            _, _, terminated, truncated, _ = env.step(action)
            if terminated or truncated:
                env.reset()
        return len(actions)

    return call


def _vector(env: gym.vector.VectorEnv[Any, Any, Any], count: int) -> Callable[[], int]:
    """Random actions; it resets by itself, and a step in which a copy resets counts as one."""
    actions = np.random.default_rng(1).integers(0, 2, (50, count))
    env.reset(seed=1)

    def call() -> int:
        for row in actions:
            env.step(row)
        return len(actions) * count

    return call


def _acting(policy: Policy) -> Callable[[], int]:
    observations = {"obs": torch.randn(ENVIRONMENTS, 4)}
    generator = torch.Generator().manual_seed(1)

    def call() -> int:
        with torch.inference_mode():
            for _ in range(50):
                draw(policy, observations, generator)
        return 50 * ENVIRONMENTS

    return call


def draw(policy: Policy, observations: dict[str, Tensor], generator: torch.Generator) -> dict[str, Tensor]:
    """Forward and draw."""
    return policy.distribution.sample(policy.action_parameters(observations), generator)


def _sampler() -> tuple[Sampler, Policy]:
    config = cartpole()
    description = check(config)
    (policy,) = build_policies(description.policies, config.policies, config.algorithm, seed=1).values()
    sampler = Sampler(make_vector(config.environment, description), description, SeedLineage(1, 0, 0, 0))
    return sampler, policy


def _sampled(sampler: Sampler, policy: Policy) -> int:
    sampler.sample({"default": policy}, {"default": Sampling()}, STEPS)
    return ENVIRONMENTS * STEPS


def learning(quick: bool) -> list[Work]:
    """All of them, ready."""
    bare, gradients = "gradient step of PPO in bare PyTorch, 512 rows", "gradient steps/s"
    learner, transitions = _learner(cartpole(quick))
    return [
        Work(bare, gradients, _bare_steps()),
        Work("our learner, gradient steps of PPO, 512 rows", gradients, lambda: learner()[0], bare),
        Work("our learner, PPO with 4 epochs", "env steps/s", lambda: (learner(), transitions)[1]),
    ]


def _bare_steps() -> Callable[[], int]:
    """What no implementation can leave out: minibatch, networks, clipped loss, backward, clipped norm, fused Adam."""
    config = cartpole()
    built = build_policies(check(config).policies, config.policies, config.algorithm, seed=1)
    policy = cast(ActorCritic, built["default"])
    optimizer = torch.optim.Adam(policy.parameters(), 1e-12, fused=True)
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
        optimizer.zero_grad()
        (0.5 * errors - objective).backward()  # type: ignore[no-untyped-call]
        nn.utils.clip_grad_norm_(policy.parameters(), 0.5)
        optimizer.step()

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


@contextmanager
def transport() -> Iterator[list[Work]]:
    """All of them; the servers end with it."""
    with ExitStack() as running:
        run = running.enter_context(LoneRun.open(cartpole()))
        client = run.role.redis
        (item,) = recorded(cartpole(), 1)
        blob = fragment.encode(item)
        yield [
            Work("Redis: PING, one at a time", "commands/s", lambda: _pings(client)),
            Work(f"Redis: SET of {_MESSAGE_BYTES:,} bytes, {_DEPTH} in a pipeline", "bytes/s", _sets(client)),
            *_puts(run),
            Work(f"fragment of {len(blob):,} bytes: encode", "bytes/s", lambda: len(fragment.encode(item))),
            Work(f"fragment of {len(blob):,} bytes: decode", "bytes/s", lambda: _decoded(blob)),
            Work("memory: copy", "bytes/s", _copies()),
        ]


def _pings(client: redis.Redis) -> int:
    for _ in range(100):
        client.ping()
    return 100


def _sets(client: redis.Redis) -> Callable[[], int]:
    message = np.random.default_rng(1).bytes(_MESSAGE_BYTES)

    def call() -> int:
        with client.pipeline(transaction=False) as pipeline:
            for number in range(_DEPTH):
                pipeline.set(f"limits-{number}", message)
            pipeline.execute()
        return _DEPTH * len(message)

    return call


def _puts(run: LoneRun) -> list[Work]:
    address = run.role.address
    key, secret = s3_keys(address)
    client = boto3.client(
        "s3", endpoint_url=address.endpoint_url, aws_access_key_id=key, aws_secret_access_key=secret,
        region_name="us-east-1",
    )  # fmt: skip
    small, large = np.random.default_rng(1).bytes(100), np.random.default_rng(1).bytes(_OBJECT_BYTES)
    numbers = itertools.count()

    def put(body: bytes) -> int:
        client.put_object(Bucket=BUCKET, Key=f"limits/{next(numbers) % 64}", Body=body)
        return len(body)

    return [
        Work("S3 server: PUT of 100 bytes", "objects/s", lambda: put(small) // len(small)),
        Work(f"S3 server: PUT of {_OBJECT_BYTES:,} bytes", "bytes/s", lambda: put(large)),
    ]


def _decoded(blob: bytes) -> int:
    fragment.decode(blob)
    return len(blob)


def _copies() -> Callable[[], int]:
    source = np.random.default_rng(1).integers(0, 256, _MEMORY_BYTES, np.uint8)
    target = np.empty_like(source)

    def call() -> int:
        np.copyto(target, source)
        return len(source)

    return call
