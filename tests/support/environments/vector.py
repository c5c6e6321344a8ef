"""Vector environments as a worker makes them, stepped by their choices."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np

from stagecoach.rollout_worker.environments.description import describe_environment
from stagecoach.rollout_worker.environments.factory import make_vector
from stagecoach.rollout_worker.environments.vector_env import Step, VectorEnvironment
from stagecoach.shared.config.run_config import Config
from tests.conftest import minimal_config


def config_of(environment: dict[str, Any], **sections: Any) -> Config:
    return minimal_config(environment={"num_envs": 2} | environment, algorithm={"minibatch_size": 1}, **sections)


@contextmanager
def started(environment: dict[str, Any], **sections: Any) -> Iterator[VectorEnvironment]:
    config = config_of(environment, **sections)
    with contextlib.closing(make_vector(config.environment, describe_environment(config))) as vector:
        yield vector


def act(vector: VectorEnvironment, *choices: int) -> Step:
    actions = np.array(choices if len(choices) > 1 else choices * vector.num_envs)
    return vector.step({"default": {"action": actions}})
