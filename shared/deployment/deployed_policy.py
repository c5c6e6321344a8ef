"""`load_policy(checkpoint).act(observation)`: acting with a trained policy, without Ray, Redis, store or gymnasium."""

import contextlib
import hashlib
import json
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from pydantic import ValidationError
from torch import Tensor

from stagecoach.shared.base.errors import CheckpointDamaged, CheckpointNotFound, PolicyKindUnknown, UserError
from stagecoach.shared.base.foreign_names import missing
from stagecoach.shared.base.printable import printable
from stagecoach.shared.base.user_code import IMPORT_PATH, extend_imports
from stagecoach.shared.config.loading import load_config
from stagecoach.shared.experience.mixture import decode_mixture, is_mixture
from stagecoach.shared.experience.spaces import Array, Columns
from stagecoach.shared.policies.distributions import ActionDistribution
from stagecoach.shared.policies.policy import Policy
from stagecoach.shared.policies.registry import import_policies
from stagecoach.shared.policies.serialization import decode_policy
from stagecoach.shared.storage.checkpoint_store import (
    CHECKPOINTS,
    CLEARED,
    CONFIG,
    MANIFEST,
    POINTER,
    PROMOTED,
    Manifest,
    Pointer,
    Promotion,
)
from stagecoach.shared.storage.players import read_player
from stagecoach.shared.storage.shared_objects import SHARED_OBJECTS

_FILE = "policy.safetensors"
_TAKEN = f"a checkpoint's or a run's folder, a {_FILE}, or the bytes of one"


@dataclass(frozen=True)
class Inspection:
    """A policy's estimates for an observation, or for `[B]` of them; None if unknown."""

    value: Any = None
    """Predicted discounted return `[B]`, in units of the learned rewards; a Q network's is that of its best choice.
    None for policies whose critics stay with the trainer (SAC, TD3) or observe a whole team."""
    action_values: Array | None = None
    """Values of each choice `[B, A]` of a Q network, about −1e9 for illegal choices."""
    probabilities: Array | None = None
    """Probabilities of the options `[B, sum of choices]`, in the order of an action mask."""
    log_prob: Any = None
    """Log-probabilities `[B]` of the given actions (log-densities for boxes)."""


class DeployedPolicy:
    """A trained policy that acts on single observations or batches, in the environment's own terms."""

    def __init__(self, policy: Policy, version: int, seed: int = 0) -> None:
        self._policy = policy.eval()
        self._observation = policy.spaces.observation.own
        self._generator = torch.Generator().manual_seed(seed)
        self.version = version
        self._state: Tensor | None = None

    def __repr__(self) -> str:
        return f"<DeployedPolicy {type(self._policy).__name__}, version {self.version}>"

    @property
    def network(self) -> Policy:
        """The `nn.Module` itself: `policy.network.state_dict()`, or `print(policy.network)`."""
        return self._policy

    if not TYPE_CHECKING:  # a checker reports unknown names by itself

        def __getattr__(self, name: str) -> Any:
            raise missing("a policy", name)

    @property
    def state(self) -> Array | None:
        """Hidden state of the core `[B, state_size]` (an LSTM's outputs, then its cells) in the current episodes; None
        at their start, or without a core. Set it to continue from an earlier state."""
        return None if self._state is None else self._state.numpy().copy()

    @state.setter
    def state(self, value: Any) -> None:
        state = None if value is None else torch.tensor(np.asarray(value, np.float32))
        if state is not None and (state.ndim != 2 or not self._policy.state_size == state.shape[1] > 0):
            raise UserError(f"state: expected [episodes, {self._policy.state_size}], found {list(state.shape)}")
        self._state = state

    def reset(self, over: Any = None) -> None:
        """Begins new episodes, in all rows of the batch or where `over` `[B]` is true; clears a core's hidden state."""
        if over is None:
            self._state = None
        elif self._state is not None:
            where = torch.as_tensor(np.asarray(over, np.bool_))
            if where.shape != self._state.shape[:1]:
                raise UserError(
                    f"reset: `over` has the shape {tuple(where.shape)}, the batch so far has {len(self._state)} rows; "
                    f"give a flag for each of them"
                )
            self._state = self._state.masked_fill(where.unsqueeze(1), 0.0)

    @torch.inference_mode()
    def act(self, observation: Any, *, greedy: bool = True, action_mask: Any = None) -> Any:
        """Returns an action for one observation, nested like the space: the most probable one, or (greedy=False) a
        sample. With a core, pass the observations of one episode in order, and call `reset` before the next one.

        `action_mask` `[choices]` marks legal choices; it replaces the observation's own."""
        one, mask = self._as_batch(observation, action_mask)
        return _in_each(self.act_batch(one, greedy=greedy, action_mask=mask), lambda leaf: leaf[0])

    @torch.inference_mode()
    def act_batch(self, observations: Any, *, greedy: bool = True, action_mask: Any = None) -> Any:
        """Returns actions for a batch: every array of the nested observation, and `action_mask` `[B, choices]`, has the
        batch axis first. With a core, each row is an episode of its own, and keeps its place (`reset`)."""
        tensors, state = self._inputs(observations, action_mask)
        params, after = self._step(tensors, state)
        self._state = after if self._policy.state_size else None
        distribution = self._policy.distribution
        actions = distribution.mode(params) if greedy else distribution.sample(params, self._generator)
        chosen: Columns = {name: tensor.numpy() for name, tensor in actions.items()}
        return self._policy.spaces.action.to_environment(chosen)

    def inspect(self, observation: Any, *, action: Any = None, action_mask: Any = None) -> Inspection:
        """Returns values, probabilities and the log-probability of `action` (in the environment's terms) for one
        observation. Does not act: a core's state stays as it is."""
        one, mask = self._as_batch(observation, action_mask)
        asked = None if action is None else _in_each(action, lambda leaf: np.asarray(leaf)[None])
        found = asdict(self.inspect_batch(one, actions=asked, action_mask=mask))
        return Inspection(**{name: None if array is None else array[0] for name, array in found.items()})

    @torch.inference_mode()
    def inspect_batch(self, observations: Any, *, actions: Any = None, action_mask: Any = None) -> Inspection:
        """Returns what `inspect` does, for a batch like that of `act_batch`."""
        tensors, state = self._inputs(observations, action_mask)
        params, _ = self._step(tensors, state)
        found, distribution = self._estimates(tensors, state), self._policy.distribution
        if isinstance(distribution, ActionDistribution):
            found["probabilities"] = distribution.probabilities(params)
        if actions is not None:
            found["log_prob"] = distribution.log_prob(params, self._taken(actions, len(params)))
        return Inspection(**{name: tensor.numpy() for name, tensor in found.items() if tensor.numel()})

    def _step(self, observations: dict[str, Tensor], state: Tensor) -> tuple[Tensor, Tensor]:
        """Returns the parameters of the action distribution, and the next state."""
        return self._policy.step(observations, state)

    def _estimates(self, observations: dict[str, Tensor], state: Tensor) -> dict[str, Tensor]:
        return self._policy.estimates(observations, state)

    def _taken(self, actions: Any, rows: int) -> dict[str, Tensor]:
        spec = self._policy.spaces.action
        try:
            columns = spec.flatten("action", actions)
            named = [(leaf, columns[leaf.column("action")]) for leaf in spec.leaves]
            fits = all(its.shape == (rows, *leaf.shape) for leaf, its in named)
            fits = fits and not any(leaf.beyond(its).any() for leaf, its in named if leaf.nvec)
        except (TypeError, ValueError, LookupError, OverflowError):
            fits = False
        if not fits:
            raise UserError(f"an action must be {spec}, one per observation, found {printable(actions, 200)}")
        return {name: torch.from_numpy(np.ascontiguousarray(array)) for name, array in columns.items()}

    def _as_batch(self, observation: Any, mask: Any) -> tuple[Any, Any]:
        """One observation and its mask, each with a batch axis."""
        try:
            one = _in_each(observation, lambda leaf: np.asarray(leaf)[None])
            return one, None if mask is None else _in_each(self._joined(mask), lambda it: np.asarray(it)[None])
        except ValueError:  # lists of several lengths
            raise self._no_observation(observation) from None

    def _inputs(self, observations: Any, action_mask: Any) -> tuple[dict[str, Tensor], Tensor]:
        """Columns as tensors, and the state before them."""
        columns = self._columns(self._with_mask(observations, action_mask))
        tensors = {name: torch.from_numpy(np.ascontiguousarray(array)) for name, array in columns.items()}
        rows, *others = {len(tensor) for tensor in tensors.values()}
        if others:
            raise self._no_observation(observations)
        state = self._policy.initial_state(rows) if self._state is None else self._state
        if len(state) != rows:
            raise UserError(
                f"{rows} observations, but the policy holds state for {len(state)} episodes; call reset() first"
            )
        return tensors, state

    def _with_mask(self, observations: Any, action_mask: Any) -> Any:
        """Adds the mask to the observation, as rollout_worker/environments/action_masks.py does."""
        masked = bool(self._observation.mask_columns)
        if action_mask is not None and not masked:
            raise UserError("this policy has no action mask; leave action_mask out")
        inside = observations if isinstance(observations, dict) else {"observation": observations}
        if action_mask is None and masked and "action_mask" not in inside:
            raise UserError("this policy acts by an action mask: give act(observation, action_mask=…), 1 where legal")
        return observations if action_mask is None else {**inside, "action_mask": action_mask}

    def _joined(self, mask: Any) -> Any:
        """A tuple of arrays, one for each choice, as one array, unless the observation's own mask is nested too."""
        leaves = [leaf for leaf in self._observation.leaves if leaf.mask]
        if [leaf.path for leaf in leaves] != ["action_mask"]:
            return mask
        flat = np.concatenate([np.reshape(part, -1) for part in (mask if isinstance(mask, tuple) else (mask,))])
        return flat.reshape(leaves[0].shape) if flat.size == leaves[0].size else flat

    def _columns(self, observations: Any) -> Columns:
        """The arrays of a batch; raises `UserError` for what no observation of this space is."""
        spec = self._observation
        try:
            columns = spec.flatten("obs", observations)
        except (TypeError, ValueError, LookupError, OverflowError):
            raise self._no_observation(observations) from None
        for leaf in spec.leaves:
            array, where = columns[leaf.column("obs")], f"observation {leaf.path}".rstrip()
            if array.shape[1:] != leaf.shape:
                batched = "; act_batch takes a batch" if array.shape[2:] == leaf.shape and len(array) == 1 else ""
                raise UserError(f"{where}: expected the shape {leaf.shape}, found {array.shape[1:]}{batched}")
            if array.dtype.kind == "f" and not np.isfinite(array).all():
                raise UserError(f"{where}: expected finite numbers, found NaN or infinity")
            if leaf.nvec and array.size and leaf.beyond(array).any():
                first = leaf.starts()
                bounds = f"{first.tolist()} to {(first + np.reshape(leaf.nvec, leaf.shape) - 1).tolist()}"
                raise UserError(f"{where}: expected choices from {bounds}, found {(array + first).tolist()}")
        if spec.mask_columns and self._policy.spaces.without_legal(columns).any():
            raise UserError("action_mask: expected at least one legal option (1) of each choice, found none")
        return columns

    def _no_observation(self, found: Any) -> UserError:
        return UserError(
            f"an observation must be {self._observation} (act_batch: batch axis first), found {printable(found, 200)}"
        )


class DeployedMixture(DeployedPolicy):
    """Mean strategy: draws one of its policies for each row of the batch, and another after `reset`. The policy acts
    until the episode ends. `inspect` returns the estimates of the drawn policies."""

    def __init__(self, members: Sequence[tuple[Policy, int]], weights: Sequence[float], seed: int = 0) -> None:
        super().__init__(members[0][0], max(version for _, version in members), seed)
        self.members = [DeployedPolicy(policy, version, seed) for policy, version in members]
        """Each on its own; an episode has one with a probability in proportion to its weight in `weights`."""
        self.weights = tuple(weights)
        self._drawn: Tensor | None = None
        """Index of the member per row; −1 where an episode begins."""

    def reset(self, over: Any = None) -> None:
        """Begins new episodes, as `DeployedPolicy.reset`."""
        super().reset(over)
        if over is None:
            self._drawn = None
        elif self._drawn is not None:
            self._drawn = self._drawn.masked_fill(torch.as_tensor(np.asarray(over, np.bool_)), -1)

    def _by_member(self, rows: int, ask: Callable[[Policy, Tensor], dict[str, Tensor]]) -> dict[str, Tensor]:
        """Returns the answers of each row's member."""
        drawn = torch.full((rows,), -1) if self._drawn is None else self._drawn
        if len(drawn) != rows:
            raise UserError(f"{rows} observations, but {len(drawn)} episodes run; call reset() first")
        weights = torch.tensor(self.weights)
        anew = torch.multinomial(weights, max(rows, 1), replacement=True, generator=self._generator)[:rows]
        self._drawn = drawn = torch.where(drawn < 0, anew, drawn)
        found: dict[str, Tensor] = {}
        for index in sorted(set(drawn.tolist())):
            where = (drawn == index).nonzero().squeeze(1)
            for name, its in ask(self.members[index]._policy, where).items():
                found.setdefault(name, its.new_zeros(rows, *its.shape[1:]))[where] = its
        return found

    def _step(self, observations: dict[str, Tensor], state: Tensor) -> tuple[Tensor, Tensor]:
        def ask(policy: Policy, rows: Tensor) -> dict[str, Tensor]:
            params, after = policy.step({name: its[rows] for name, its in observations.items()}, state[rows])
            return {"params": params, "state": after}

        found = self._by_member(len(state), ask)
        return found["params"], found["state"]

    def _estimates(self, observations: dict[str, Tensor], state: Tensor) -> dict[str, Tensor]:
        def ask(policy: Policy, rows: Tensor) -> dict[str, Tensor]:
            return policy.estimates({name: its[rows] for name, its in observations.items()}, state[rows])

        return self._by_member(len(state), ask)


def _deployed(data: bytes) -> DeployedPolicy:
    if not is_mixture(data):
        return DeployedPolicy(*decode_policy(data))
    blobs, weights = zip(*decode_mixture(data), strict=True)
    return DeployedMixture([decode_policy(blob) for blob in blobs], weights)


def load_policy(
    checkpoint: str | Path | bytes, policy_id: str = "default", *, trust_config: bool = False
) -> DeployedPolicy:  # fmt: skip
    """Loads the policy in a checkpoint's folder, in its `policy.safetensors`, or in the bytes of that file.

    A run's folder in a store of files (or an exported one) stands for its promoted checkpoint, else its best, else its
    newest. There `policy_id` may also be a snapshot of its players (its id, or an unambiguous prefix of it), or `mean`,
    their mean strategy (`POLICY-mean` if several policies have snapshots). FOLDER#ID gives both. Raises
    `CheckpointNotFound`, or `CheckpointDamaged` for altered bytes.

    The class of a custom network is imported from the run's config if this machine started the run, otherwise only
    with `trust_config`.
    """
    if isinstance(checkpoint, bytes):
        return _deployed(checkpoint)
    if not isinstance(checkpoint, str | Path):
        raise UserError(f"load_policy takes {_TAKEN}, not {printable(repr(checkpoint), 100)}")
    path = Path(str(checkpoint).removeprefix("file://")).expanduser()
    if "#" in path.name and not path.exists():
        folder, _, policy_id = str(path).rpartition("#")
        path = Path(folder)
    data = _found(path, policy_id, str(checkpoint))
    with contextlib.suppress(PolicyKindUnknown):
        return _deployed(data)
    _import_classes(path.resolve(), trust_config)
    return _deployed(data)


def _import_classes(path: Path, trusted: bool) -> None:
    """Imports the algorithms and networks that the run's config names, in the folder of this path or above; raises
    `UserError` without trust."""
    folder = next((folder for folder in (path, *path.parents[:5]) if (folder / CONFIG).is_file()), None)
    if folder is None:
        return
    config = load_config(folder / CONFIG, environ={})
    chosen = [config.algorithm, *(its.algorithm for its in config.policies.values() if its.algorithm)]
    networks = [its.network.path for its in config.policies.values() if its.network]
    named = ", ".join(sorted({*networks, *(its.name for its in chosen if ":" in its.name)}))
    if named and not trusted and not any(folder.glob(f"s3/*/{folder.name}")):  # of a run that this machine made
        raise UserError(
            f"{folder / CONFIG} comes from an exported folder or from another machine, and its network needs {named} "
            f"imported and run; pass trust_config=True if you trust it"
        )
    if (own := folder / IMPORT_PATH).is_file():
        extend_imports(json.loads(own.read_text()))
    import_policies(config.policies, config.algorithm)


def _found(path: Path, policy_id: str, asked: str) -> bytes:
    """The file of this policy in a checkpoint's or run's folder, or at the path itself."""
    embedded = next(path.glob(f"s3/*/{path.resolve().name}"), path)  # of a run's folder on the machine that made it
    path = _preferred(embedded) if (embedded / CHECKPOINTS).is_dir() else _upload(path)
    if not (path / policy_id / _FILE).is_file() and (player := read_player(embedded, path, policy_id)) is not None:
        return player
    for candidate in (path, path / _FILE, path / policy_id / _FILE):
        if candidate.is_file():
            return candidate.read_bytes()
    others = ", ".join(sorted(found.parent.name for found in path.glob(f"*/{_FILE}")))
    there = f"it has {others}" if others else f"expected {_TAKEN}{_elsewhere(asked, path)}"
    there += "; give one as policy_id" if others and policy_id == "default" else ""
    there += ", or a snapshot's id (docs/how-to/python.md)" if (embedded / SHARED_OBJECTS).is_dir() else ""
    if not path.exists():
        raise CheckpointNotFound(f"there is no {path}; {there}")
    raise CheckpointNotFound(f"no policy {policy_id!r} at {path}; {there}")


def _elsewhere(asked: str, path: Path) -> str:
    """Returns the remedy if the checkpoints may not be files of this machine."""
    if not path.exists() and "/" not in asked:
        return f"; of a run of this machine give its folder, runs/{asked}"
    if "://" in asked or (path / "config.yaml").is_file():
        return "; of a run in a bucket, `stagecoach checkpoints export RUN` makes such a folder"
    return ""


def _preferred(run: Path) -> Path:
    """Returns the upload of the promoted, best or newest checkpoint, as `CheckpointStore.preferred` does."""
    try:
        if (run / PROMOTED).is_file() and (data := (run / PROMOTED).read_bytes()) != CLEARED:
            promotion = Promotion.model_validate_json(data)
            return _upload(run / CHECKPOINTS / promotion.checkpoint, promotion.manifest_sha256)
        pointer = Pointer.model_validate_json((run / POINTER).read_bytes())
    except FileNotFoundError as error:
        raise CheckpointNotFound(f"{run} has no complete checkpoint: {error.filename} is missing") from None
    except ValidationError as error:
        damaged = f"the {error.title.lower()} in {run} cannot be read"
        raise CheckpointDamaged(f"{damaged}; name one of its checkpoints") from None
    return _upload(run / CHECKPOINTS / (pointer.best or pointer.latest))


def _upload(folder: Path, promoted: str | None = None) -> Path:
    """Returns the folder of the promoted upload of a checkpoint, else of its highest rank (`Manifest.rank`); without
    manifests the folder itself. Raises `CheckpointDamaged` if no upload matches."""
    manifests, ranks = list(folder.glob(f"*/{MANIFEST}")), {}
    for path in manifests:
        data = path.read_bytes()
        with contextlib.suppress(ValidationError):
            if promoted in (None, hashlib.sha256(data).hexdigest()):
                ranks[path.parent] = Manifest.model_validate_json(data).rank
    if manifests and not ranks:
        wrong = "is not the one that was promoted" if promoted else "cannot be read"
        raise CheckpointDamaged(f"the manifest in {folder} {wrong}")
    return max(ranks, key=ranks.__getitem__, default=folder)


def _in_each(nested: Any, change: Callable[[Any], Any]) -> Any:
    if isinstance(nested, dict):
        return {key: _in_each(value, change) for key, value in nested.items()}
    return tuple(_in_each(value, change) for value in nested) if isinstance(nested, tuple) else change(nested)
