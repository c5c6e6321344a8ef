"""`load_policy(checkpoint).act(observation)`: for whoever deploys a trained policy. No Ray, Redis, store or gymnasium.

It needs torch and NumPy, and the small packages that a policy file is read with (safetensors, xxhash, pydantic).
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import torch

from shared.errors import CheckpointNotFound, UserError
from shared.policies.actor_critic import ActorCritic
from shared.policies.codec import decode_policy
from shared.spaces import Columns

_FILE = "policy.safetensors"


class DeployedPolicy:
    """A trained policy that acts on single observations or batches, in the environment's own terms."""

    def __init__(self, policy: ActorCritic, version: int, seed: int = 0) -> None:
        self._policy = policy.eval()
        self._generator = torch.Generator().manual_seed(seed)
        self.version = version

    @torch.inference_mode()
    def act(self, observation: Any, *, greedy: bool = True) -> Any:
        """An action for one observation, nested as the space is: the most probable one, or (greedy=False) a draw."""
        return _first(self.act_batch(_batched(observation), greedy=greedy))

    @torch.inference_mode()
    def act_batch(self, observations: Any, *, greedy: bool = True) -> Any:
        """Actions for a batch: every array of the nested observation has the batch axis first."""
        spec = self._policy.spaces.observation
        columns = spec.flatten("obs", observations)
        for leaf in spec.leaves:
            found = columns[leaf.column("obs")].shape[1:]
            if found != leaf.shape:
                raise UserError(f"observation {leaf.path or ''}: expected the shape {leaf.shape}, found {found}")
        tensors = {name: torch.from_numpy(np.ascontiguousarray(array)) for name, array in columns.items()}
        params = self._policy.action_parameters(tensors)
        distribution = self._policy.distribution
        actions = distribution.mode(params) if greedy else distribution.sample(params, self._generator)
        chosen: Columns = {name: tensor.numpy() for name, tensor in actions.items()}
        return self._policy.spaces.action.to_environment(chosen)


def load_policy(checkpoint: str | Path | bytes, policy_id: str = "default") -> DeployedPolicy:
    """The policy in a checkpoint's folder, in its `policy.safetensors`, or in the bytes of that file.

    Raises `CheckpointNotFound` where there is none and `CheckpointDamaged` for bytes that were altered.
    """
    if isinstance(checkpoint, bytes):
        return DeployedPolicy(*decode_policy(checkpoint))
    path = Path(checkpoint)
    for candidate in (path, path / _FILE, path / policy_id / _FILE):
        if candidate.is_file():
            return DeployedPolicy(*decode_policy(candidate.read_bytes()))
    raise CheckpointNotFound(f"no policy {policy_id!r} at {path}; expected a checkpoint folder or a {_FILE}")


def _batched(observation: Any) -> Any:
    if isinstance(observation, dict):
        return {key: _batched(value) for key, value in observation.items()}
    if isinstance(observation, tuple):
        return tuple(_batched(value) for value in observation)
    return np.asarray(observation)[None]


def _first(action: Any) -> Any:
    if isinstance(action, dict):
        return {key: _first(value) for key, value in action.items()}
    if isinstance(action, tuple):
        return tuple(_first(value) for value in action)
    return action[0]
