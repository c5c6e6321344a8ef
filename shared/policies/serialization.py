"""Policies as bytes: the blob of the policy board (all policy ids at once) and a checkpoint's `policy.safetensors`."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from stagecoach.shared.base.errors import CheckpointDamaged, ConfigError, FragmentError, PolicyKindUnknown
from stagecoach.shared.config.sections import PolicyConfig
from stagecoach.shared.experience import tensor_blob
from stagecoach.shared.experience.counters import Phase, PhaseCounters
from stagecoach.shared.experience.spaces import Columns, PlainData, PolicySpaces
from stagecoach.shared.policies.policy import Policy
from stagecoach.shared.policies.registry import borrowed_random_state, is_registered, policy_class

POLICY_FORMAT = 1


@dataclass(frozen=True)
class VersionHeader(PlainData):
    """Header of the weights of one policy version."""

    version: int
    phase: Phase
    counters: PhaseCounters
    """The trainer's counters at publication: exploration schedules are functions of them."""
    folds: dict[str, dict[str, Any]] = field(default_factory=dict)
    """Name of a fold → its table, by which episodes are decided from this version on."""
    history: str = ""
    """Names the experience that the version comes from: after a loss, a number may be given to other weights."""


def state_arrays(policy: nn.Module) -> Columns:
    """Weights and buffers (a normalizer) as NumPy copies on the CPU; what has several names (a shared encoder) once."""
    return {name: tensor.detach().cpu().numpy().copy() for name, tensor in _tensors(policy).items()}


def load_state_arrays(policy: nn.Module, arrays: Mapping[str, Any]) -> None:
    """The inverse of `state_arrays`; raises `CheckpointDamaged` where names or shapes differ."""
    state = {name: torch.from_numpy(np.array(array)) for name, array in arrays.items()}
    first = {id(tensor): name for name, tensor in _tensors(policy).items()}
    here = policy.state_dict(keep_vars=True)
    for name, tensor in here.items():
        if name not in state and first[id(tensor)] in state:
            state[name] = state[first[id(tensor)]]
    wrong = [
        f"{name} has {_shape(state.get(name))}, expected {_shape(here.get(name))}"
        for name in {**here, **state}
        if name not in here or name not in state or state[name].shape != here[name].shape
    ]
    if wrong:
        more = f" (and {len(wrong) - 1} more)" if len(wrong) > 1 else ""
        raise CheckpointDamaged(f"the weights do not fit this policy: {wrong[0]}{more}")
    policy.load_state_dict(state, strict=True)


def encode_board(states: Mapping[str, Columns], header: VersionHeader) -> bytes:
    """All policies of one version in one blob: weights and normalizers, one unit."""
    flat = {f"{policy_id}/{name}": array for policy_id, state in states.items() for name, array in state.items()}
    return tensor_blob.encode(flat, header.as_dict())


def decode_board(blob: bytes) -> tuple[dict[str, Columns], VersionHeader]:
    """The inverse of `encode_board`; raises `FragmentError`, or `ValueError`."""
    flat, header = tensor_blob.decode(blob)
    states: dict[str, Columns] = {}
    for name, array in flat.items():
        policy_id, _, rest = name.partition("/")
        states.setdefault(policy_id, {})[rest] = array
    return states, VersionHeader.from_dict(header)


def encode_policy(policy: Policy, version: int, state: Columns | None = None) -> bytes:
    """The file that people deploy: one policy with all that acting needs, its weights as they are or as in `state`."""
    header = {
        "format": POLICY_FORMAT,
        "kind": policy.kind,
        "version": version,
        "spaces": policy.spaces.as_dict(),
        "config": policy.config.model_dump(mode="json"),
        "network": policy.network,
    }
    return tensor_blob.encode(state_arrays(policy) if state is None else state, header)


def decode_policy(blob: bytes) -> tuple[Policy, int]:
    """The policy and its version; raises `CheckpointDamaged` for damaged bytes and for a newer format, and
    `PolicyKindUnknown` for a class that is not registered."""
    try:
        state, header = tensor_blob.decode(blob)
    except FragmentError as error:
        raise CheckpointDamaged(f"policy.safetensors is {error}") from None
    if header.get("format") != POLICY_FORMAT:
        raise CheckpointDamaged(
            f"policy.safetensors has format {header.get('format')!r}; this version of Stagecoach reads {POLICY_FORMAT}"
        )
    try:
        spaces, config = PolicySpaces.from_dict(header["spaces"]), PolicyConfig.model_validate(header["config"])
        with borrowed_random_state():
            policy = policy_class(header["kind"])(spaces, config, **header["network"])
        policy.network = header["network"]  # a custom class need not keep its own arguments there
        version = int(header["version"])
    except ConfigError as error:
        kind = CheckpointDamaged if is_registered(header["kind"]) else PolicyKindUnknown
        raise kind(f"policy.safetensors cannot be read: {error}") from None
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        text = f"{type(error).__name__}: {' '.join(str(error).split())}"
        raise CheckpointDamaged(f"policy.safetensors has a header that cannot be read: {text}") from None
    load_state_arrays(policy, state)
    return policy, version


def finite_weights(policy: nn.Module) -> bool:
    """Returns whether all weights are finite (a normalizer's bound may be infinite before its first update)."""
    return finite_arrays({name: tensor.detach().cpu().numpy() for name, tensor in _tensors(policy).items()})


def finite_arrays(state: Columns) -> bool:
    """Returns whether the arrays of a policy's file are finite, as `finite_weights` does."""
    return all(np.isfinite(array).all() for name, array in state.items() if not name.endswith(".bound"))


def _tensors(policy: nn.Module) -> dict[str, Tensor]:
    """Weights and buffers by name, each once, under the first of its names."""
    named: dict[int, tuple[str, Tensor]] = {}
    for name, tensor in policy.state_dict(keep_vars=True).items():
        named.setdefault(id(tensor), (name, tensor))
    return dict(named.values())


def _shape(tensor: Tensor | None) -> str:
    return "nothing" if tensor is None else f"the shape {tuple(tensor.shape)}"
