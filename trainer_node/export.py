"""A policy's acting path as an ONNX file, how that compares with torch, and the record of both for a checkpoint.

In: observations as the environment gives them (batch first), one input for each column, and the hidden state. Out: the
greedy actions as the environment takes them, the action parameters, and the next hidden state. So the file needs
nothing of Stagecoach: counted choices, normalization, bounds and dtypes are inside.
"""

import copy
import importlib
import importlib.util
import json
import logging
import warnings
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from typing import Any

import numpy as np
import torch
from pydantic import BaseModel
from torch import Tensor, nn

from stagecoach.shared.base.errors import ArchiveIncomplete, FragmentError, UserError
from stagecoach.shared.base.user_code import install
from stagecoach.shared.experience import fragment
from stagecoach.shared.experience.fragment import Fragment
from stagecoach.shared.experience.log_entry import before
from stagecoach.shared.experience.spaces import Array, Columns, Leaf, SpaceSpec
from stagecoach.shared.policies.policy import Policy
from stagecoach.shared.policies.serialization import decode_policy
from stagecoach.shared.storage.checkpoint_store import CheckpointStore, Manifest, StoredObject, stored
from stagecoach.shared.storage.log_archive import Archive

PARAMETERS, STATE_IN, STATE_OUT = "parameters", "state_in", "state_out"
"""Names of inputs and outputs that are neither observations nor actions."""
_PACKAGES = ("onnx", "onnxruntime", "onnxscript")
_ROWS = 256
_BATCHES = 4
_LEGAL_SHARE = 0.7
_OPEN = 1e6
"""A side of a box further away than this is taken for none: random observations are then standard normal."""
_RELATIVE, _ABSOLUTE = 1e-3, 1e-4
"""Largest difference of an action parameter from torch's; beyond that, the export fails."""
_NOISE = (
    (FutureWarning, r"`isinstance\(treespec, LeafSpec\)` is deprecated"),
    (UserWarning, r"# The axis name: batch will not be used"),
)


class Comparison(BaseModel, frozen=True, extra="forbid"):
    """Differences between the actions of ONNX Runtime and torch for the same observations."""

    rows: int
    max_difference: float
    """The largest absolute difference of any action parameter, continuous action or hidden state."""
    other_choices: int
    """Rows with another discrete action: two that are equally good within that difference."""


class ExportedPolicy(BaseModel, frozen=True, extra="forbid"):
    file: StoredObject | None = None
    failure: str | None = None
    compared: dict[str, Comparison] = {}
    """Comparisons on `random` observations of the space, and on `recorded` observations of the run, if any."""


def require_onnx() -> None:
    """Raises `UserError` where the packages of the extra `onnx` are missing."""
    missing = [name for name in _PACKAGES if importlib.util.find_spec(name) is None]
    if missing:
        raise UserError(f"exporting policies as ONNX needs {', '.join(missing)}: {install('onnx')}")


def made_with() -> dict[str, str]:
    there = [name for name in _PACKAGES if importlib.util.find_spec(name) is not None]
    return {name: str(importlib.import_module(name).__version__) for name in ("torch", *there)}


def exported(blob: bytes, manifest: Manifest, recorded: Sequence[Columns]) -> tuple[bytes, ExportedPolicy]:
    """Returns a policy file as ONNX (empty if that fails), and how it compares with torch; what goes wrong is named.
    `recorded` are observation columns [S, …], step after step."""
    try:
        policy, version = decode_policy(blob)
        data = to_onnx(policy.eval(), described(policy, manifest, version))
        seen = {"random": list(random_observations(policy.spaces.observation.own)), "recorded": recorded}
        compared = {name: compare(policy, data, batches) for name, batches in seen.items() if batches}
    except Exception as error:  # whatever the exporter, or a user's own policy, comes to
        cause: BaseException = error
        while isinstance(cause.__cause__, Exception):
            cause = cause.__cause__
        first = " ".join(str(cause).strip().partition("\n\n")[0].split())[:400]  # the exporter's have pages of advice
        return b"", ExportedPolicy(failure=f"{type(error).__name__}: {first}")
    return data, ExportedPolicy(file=stored(data), compared=compared)


def described(policy: Policy, manifest: Manifest, version: int) -> dict[str, str]:
    spaces = json.dumps(policy.spaces.as_dict(), sort_keys=True)
    said = {"run_id": manifest.run_id, "checkpoint": manifest.name, "version": version, "kind": policy.kind}
    said |= {"spaces": spaces, "state_size": policy.state_size}
    return {f"stagecoach.{name}": str(value) for name, value in said.items()}


class Acting(nn.Module):
    """Greedy acting from arrays in the environment's own terms."""

    def __init__(self, policy: Policy) -> None:
        super().__init__()
        self.policy = policy
        spaces = policy.spaces
        state = bool(policy.state_size)
        self.inputs = [*spaces.observation.own.column_names("obs"), *([STATE_IN] if state else [])]
        self.outputs = [*spaces.action.column_names("action"), PARAMETERS, *([STATE_OUT] if state else [])]
        for index, leaf in enumerate(spaces.action.leaves):
            if leaf.kind == "box":
                for side, bound in zip(("low", "high"), leaf.bounds(leaf.dtype), strict=True):
                    self.register_buffer(f"{side}{index}", torch.from_numpy(bound), persistent=False)

    def forward(self, *arrays: Tensor) -> tuple[Tensor, ...]:
        leaves = self.policy.spaces.observation.own.leaves
        observed = {leaf.column("obs"): _counted(array, leaf) for leaf, array in zip(leaves, arrays)}
        params, state = self.policy.step(observed, arrays[-1])  # without a core the state is not looked at
        actions = self.policy.distribution.mode(params)
        named = enumerate(self.policy.spaces.action.leaves)
        acted = (self._to_environment(index, leaf, actions) for index, leaf in named)
        return (*acted, params, *([state] if self.policy.state_size else []))

    def _to_environment(self, index: int, leaf: Leaf, actions: Mapping[str, Tensor]) -> Tensor:
        action = actions[leaf.column("action")]
        if leaf.kind != "box":
            if any(leaf.start):
                action = action + torch.tensor(leaf.start, dtype=torch.int64).reshape(leaf.shape)
            return action.to(_torch_dtype(leaf.dtype))
        low, high = getattr(self, f"low{index}"), getattr(self, f"high{index}")
        return torch.minimum(torch.maximum(action.to(_torch_dtype(leaf.dtype)), low), high)


def _counted(array: Tensor, leaf: Leaf) -> Tensor:
    if leaf.kind == "box":
        return array
    counted = array.to(torch.int64)
    return counted - torch.tensor(leaf.start, dtype=torch.int64).reshape(leaf.shape) if any(leaf.start) else counted


def _torch_dtype(name: str) -> torch.dtype:
    return torch.from_numpy(np.empty(0, name)).dtype


def to_onnx(policy: Policy, said: Mapping[str, str]) -> bytes:
    """The file; `said` is put into its metadata. Raises whatever the exporter raises."""
    require_onnx()
    acting = Acting(copy.deepcopy(policy).cpu()).eval()
    observed = next(random_observations(policy.spaces.observation.own, rows=3))
    example = [torch.from_numpy(array) for array in _in_environment_terms(policy.spaces.observation.own, observed)]
    if policy.state_size:
        example.append(torch.zeros(3, policy.state_size))
    dynamic = {"arrays": tuple({0: "batch"} for _ in example)}
    with _quiet(), torch.no_grad():
        program = torch.onnx.export(
            acting, tuple(example), input_names=acting.inputs, output_names=acting.outputs, dynamo=True,
            dynamic_shapes=dynamic, verbose=False,
        )  # fmt: skip
    assert program is not None
    model: Any = program.model_proto
    for item in (*model.graph.node, *model.graph.value_info, *(n for f in model.functions for n in f.node)):
        del item.metadata_props[:]  # paths of this machine's files
        item.doc_string = ""
    del model.metadata_props[:]
    for key, value in said.items():
        model.metadata_props.add(key=key, value=value)
    model.producer_name = "stagecoach"
    return bytes(model.SerializeToString())


@contextmanager
def _quiet() -> Iterator[None]:
    logger = logging.getLogger("torch.onnx")
    level, logger.disabled = logger.level, False
    logger.setLevel(logging.ERROR)
    try:
        with warnings.catch_warnings():
            for category, message in _NOISE:
                warnings.filterwarnings("ignore", message, category)
            yield
    finally:
        logger.setLevel(level)


def random_observations(spec: SpaceSpec, rows: int = _ROWS // _BATCHES) -> Iterator[Columns]:
    generator = np.random.Generator(np.random.PCG64(0))
    for _ in range(_BATCHES):
        yield {leaf.column("obs"): _drawn(leaf, (rows, *leaf.shape), generator) for leaf in spec.leaves}


def _drawn(leaf: Leaf, shape: tuple[int, ...], generator: np.random.Generator) -> Array:
    if leaf.mask:
        return (generator.random(shape) < _LEGAL_SHARE).astype(leaf.column_dtype)
    if leaf.kind != "box":
        return generator.integers(0, np.asarray(leaf.nvec, np.int64).reshape(leaf.shape), shape)
    sides = leaf.bounds(np.float64)
    low, high = (np.clip(np.nan_to_num(side, posinf=_OPEN, neginf=-_OPEN), -_OPEN, _OPEN) for side in sides)
    if np.dtype(leaf.dtype).kind != "f":
        return generator.integers(low.astype(np.int64), high.astype(np.int64), shape, endpoint=True).astype(leaf.dtype)
    closed = (low > -_OPEN) & (high < _OPEN)
    drawn = np.where(closed, generator.uniform(low, high, shape), np.clip(generator.standard_normal(shape), low, high))
    return drawn.astype(leaf.dtype)


def recorded_observations(fragment: Fragment, policy_id: str, spec: SpaceSpec) -> list[Columns]:
    """Returns the observations of a fragment's first steps, [S, …] each; empty for another space."""
    columns, names = fragment.columns.get(policy_id, {}), spec.column_names("obs")
    known = all(name in columns for name in names)
    if not known or any(columns[leaf.column("obs")].shape[2:] != leaf.shape for leaf in spec.leaves):
        return []
    steps, slots = columns[names[0]].shape[:2]
    return [{name: columns[name][step] for name in names} for step in range(min(steps, max(1, _ROWS // slots)))]


def _in_environment_terms(spec: SpaceSpec, columns: Columns) -> list[Array]:
    return [np.ascontiguousarray(leaf.own_terms(columns[leaf.column("obs")])) for leaf in spec.leaves]


@torch.inference_mode()
def compare(policy: Policy, data: bytes, batches: Sequence[Columns]) -> Comparison:
    """Acts on the batches, one after the other, with torch as an evaluation does, and with ONNX Runtime; each has its
    own hidden state. Raises `ValueError` where the file acts otherwise."""
    import onnxruntime  # of the extra `onnx`

    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads, options.log_severity_level = 1, 3
    session, spaces = onnxruntime.InferenceSession(data, options, providers=["CPUExecutionProvider"]), policy.spaces
    names = [output.name for output in session.get_outputs()]
    rows, largest, others = 0, 0.0, 0
    slots = len(next(iter(batches[0].values())))
    state, theirs_state = policy.initial_state(slots), policy.initial_state(slots).numpy()
    for columns in batches:
        params, state = policy.step({name: torch.from_numpy(np.array(array)) for name, array in columns.items()}, state)
        chosen = {name: tensor.numpy() for name, tensor in policy.distribution.mode(params).items()}
        ours = spaces.action.flatten("action", spaces.action.to_environment(chosen)) | {PARAMETERS: params.numpy()}
        arrays = _in_environment_terms(spaces.observation.own, columns)
        fed = dict(zip(spaces.observation.own.column_names("obs"), arrays, strict=True))
        fed |= {STATE_IN: theirs_state} if policy.state_size else {}
        found = dict(zip(names, session.run(names, fed), strict=True))
        if policy.state_size:
            ours[STATE_OUT], theirs_state = state.numpy(), found[STATE_OUT]
        other = np.zeros(slots, np.bool_)
        for leaf in spaces.action.leaves:
            name = leaf.column("action")
            if leaf.kind != "box":
                counted = found.pop(name).astype(np.int64) - leaf.starts()
                other |= (counted != ours.pop(name)).reshape(slots, -1).any(axis=1)
        largest = max(largest, *(_difference(name, ours[name], found[name]) for name in ours))
        rows, others = rows + slots, others + int(other.sum())
    return Comparison(rows=rows, max_difference=largest, other_choices=others)


def _difference(name: str, ours: Array, theirs: Array) -> float:
    if ours.shape != theirs.shape or ours.dtype != theirs.dtype:
        raise ValueError(f"{name} is {theirs.dtype}{theirs.shape} of ONNX, {ours.dtype}{ours.shape} of torch")
    difference = float(np.abs(ours.astype(np.float64) - theirs).max(initial=0.0))
    if not np.allclose(theirs, ours, rtol=_RELATIVE, atol=_ABSOLUTE):
        raise ValueError(f"{name} differs from torch by {difference:.3g}: the file acts otherwise")
    return difference


RECORD = "export.json"
_POLICY = "/policy.safetensors"


class Export(BaseModel, frozen=True, extra="forbid"):
    """Contents of `export.json`."""

    checkpoint: str
    made_with: dict[str, str]
    """Versions of the packages that wrote and compared the files."""
    policies: dict[str, ExportedPolicy]

    @property
    def failures(self) -> str:
        """Reasons why policies have no file; empty if all have one."""
        failed = {policy_id: policy.failure for policy_id, policy in self.policies.items() if policy.failure}
        return "; ".join(f"{policy_id}: {failure}" for policy_id, failure in failed.items())


def export_policies(checkpoints: CheckpointStore, name: str) -> tuple[Export, Mapping[str, bytes]]:
    """Translates all policies of a checkpoint; returns the record, and the files by policy id. Raises `UserError`
    without the extra `onnx`, `CheckpointDamaged`, or as the store does."""
    require_onnx()
    manifest = checkpoints.manifest(name)
    recorded = _last_fragment(checkpoints, manifest.log_position)
    files, policies = {}, {}
    for key in manifest.objects:
        if key.endswith(_POLICY):
            policy_id, blob = key.removesuffix(_POLICY), checkpoints.read_object(manifest, key)
            spec = decode_policy(blob)[0].spaces.observation
            seen = recorded_observations(recorded, policy_id, spec) if recorded else []
            data, policies[policy_id] = exported(blob, manifest, seen)
            if data:
                files[policy_id] = data
    return Export(checkpoint=name, made_with=made_with(), policies=policies), files


def _last_fragment(checkpoints: CheckpointStore, position: str) -> Fragment | None:
    with suppress(ArchiveIncomplete, ValueError, StopIteration, FragmentError):  # a dropped one may be unreadable
        entry = next(Archive(checkpoints.store, checkpoints.run_id).entries(before(position), position))
        return fragment.decode(entry.fragment) if entry.fragment else None
    return None
