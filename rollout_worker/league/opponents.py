"""Opponents: players that do not change, loaded when first drawn; the recently used stay in memory."""

from collections import OrderedDict
from collections.abc import Callable, Collection, Sequence
from typing import Any

import numpy as np
import torch

from stagecoach.rollout_worker.exploration.base import Exploration, Greedy, RandomActing, Sampling, act_for
from stagecoach.rollout_worker.league.stacked import likeness
from stagecoach.shared.base.errors import ConfigError, SharedObjectUnusable, StagecoachError, headline
from stagecoach.shared.base.user_code import import_object
from stagecoach.shared.experience.mixture import decode_mixture, member
from stagecoach.shared.experience.spaces import Array, Columns, PolicySpaces
from stagecoach.shared.league.table import PlayerRef
from stagecoach.shared.policies.actor_critic import Stateful
from stagecoach.shared.policies.policy import Policy
from stagecoach.shared.policies.serialization import decode_policy

MOST_BYTES = 64 << 20
"""Bytes of players that a worker keeps in memory, whatever the league's size; more only if all are seated."""


class Forfeit(Exception):
    """Raised if a scripted player raises or returns an invalid action; the text says which."""


class Player:
    def act(self, observations: Columns, rows: Array, generator: torch.Generator) -> Columns:
        """Returns actions `[R, …]` for the slots `rows` `[R]` of observations `[S, …]`; raises `Forfeit`."""
        raise NotImplementedError

    one_by_one = False
    """True if `act` takes one slot at a time."""
    likeness = ""
    """Equal for networks that can act as one (stacked.py)."""
    state_size = 0
    state: torch.Tensor | None = None
    """State of a recurrent player, `[S, state size]`; the caller sets and keeps it."""


class Network(Player):
    """Policy that acts by an exploration."""

    def __init__(self, policy: Policy, acting: Exploration) -> None:
        self.acting = acting
        self.policy, self.likeness, self.state_size = policy, likeness(policy), policy.state_size
        self.weights = dict([*policy.named_parameters(), *policy.named_buffers()])

    def act(self, observations: Columns, rows: Array, generator: torch.Generator) -> Columns:
        if self.state is None:
            return act_for(self.acting, self.policy, observations, rows, generator)[0]
        remembering = Stateful(self.policy, self.state)
        actions, _ = act_for(self.acting, remembering, observations, rows, generator)
        self.state = remembering.state
        return actions


class Mixture(Player):
    """Mean strategy: `member` selects the network that plays an episode."""

    def __init__(self, members: Sequence[Network], weights: Sequence[float]) -> None:
        self._members, self._weights = members, weights

    def member(self, number: float) -> Network:
        return self._members[member(self._weights, number)]


class Random(Player):
    """Uniform (legal) actions."""

    def __init__(self, policy: Policy) -> None:
        self._policy = policy
        """Any with these spaces."""

    def act(self, observations: Columns, rows: Array, generator: torch.Generator) -> Columns:
        return act_for(RandomActing(), self._policy, observations, rows, generator)[0]


class Function(Player):
    """Scripted player, `function(observation, random)`, in the environment's terms; `random` is a NumPy generator."""

    one_by_one = True

    def __init__(self, function: Callable[[Any, np.random.Generator], Any], spaces: PolicySpaces) -> None:
        self._function, self._spaces = function, spaces

    def act(self, observations: Columns, rows: Array, generator: torch.Generator) -> Columns:
        (row,) = rows.tolist()
        own = {name: array[row].copy() for name, array in observations.items()}  # it may write into it
        seen = self._spaces.observation.own.nest("obs", own)
        random = np.random.default_rng(int(torch.randint(1 << 62, (), generator=generator, device=generator.device)))
        try:
            acted = self._function(seen, random)
            columns = None if acted is None else self._spaces.action.flatten("action", acted)
        except (Exception, SystemExit) as error:
            raise Forfeit(headline(error)) from error
        if columns is None:
            raise Forfeit("it returned None")
        masks = [observations[name][row].reshape(-1) for name in self._spaces.observation.mask_columns]
        for leaf in self._spaces.action.leaves:
            action = columns[leaf.column("action")]
            if action.shape != leaf.shape or (leaf.nvec and leaf.beyond(action).any()):
                raise Forfeit(f"its action {action.tolist()} is outside its space")
            if not np.isfinite(action).all():  # actions beyond the bounds are clipped, as a policy's are
                raise Forfeit(f"its action {action.tolist()} is not finite")
        if masks and not self._legal(columns, np.concatenate(masks)):
            raise Forfeit(f"its action {[array.tolist() for array in columns.values()]} is illegal")
        return {name: array[None] for name, array in columns.items()}

    def _legal(self, columns: Columns, mask: Array) -> bool:
        first = 0
        for leaf in self._spaces.action.leaves:
            chosen = columns[leaf.column("action")].reshape(-1).tolist() if leaf.nvec else []
            for choices, choice in zip(leaf.nvec, chosen, strict=True):
                if not mask[first + choice] > 0:
                    return False
                first += choices
        return True


class Exported(Player):
    """ONNX file as `stagecoach checkpoints export --onnx` writes it; takes the best action."""

    def __init__(self, data: bytes, spaces: PolicySpaces) -> None:
        try:
            import onnxruntime
        except ImportError:
            raise ConfigError(
                "a player of a league is an ONNX file; install what runs it: pip install 'stagecoach-rl[onnx]'"
            ) from None
        self._spaces = spaces
        options = onnxruntime.SessionOptions()  # its own pool would have a thread for each core, in each worker
        options.intra_op_num_threads = options.inter_op_num_threads = 1
        self._session = onnxruntime.InferenceSession(data, options, providers=["CPUExecutionProvider"])
        told = self._session.get_modelmeta().custom_metadata_map
        self.state_size = int(told.get("stagecoach.state_size", 0))

    def act(self, observations: Columns, rows: Array, generator: torch.Generator) -> Columns:
        observed = {leaf.column("obs"): leaf for leaf in self._spaces.observation.own.leaves}
        asked = {each.name for each in self._session.get_inputs()}
        fed = {name: leaf.own_terms(observations[name][rows]) for name, leaf in observed.items() if name in asked}
        acted = {leaf.column("action"): leaf for leaf in self._spaces.action.leaves}
        if self.state is None:
            made = self._session.run([*acted], fed)
        else:
            there, remembered = torch.from_numpy(rows), self.state.clone()
            fed["state_in"] = remembered[there].cpu().numpy()
            *made, state = self._session.run([*acted, "state_out"], fed)
            remembered[there] = torch.from_numpy(state).to(remembered.device)
            self.state = remembered
        return {name: leaf.counted(array) for (name, leaf), array in zip(acted.items(), made, strict=True)}


class Opponents:
    """Cache of players; the least recently used are removed first."""

    def __init__(self, load: Callable[[str], bytes], functions: Collection[str] = (), *, greedy: bool = False) -> None:
        """`load` returns the bytes of a player's object by SHA-256. `functions` are the scripted players that may be
        imported. If `greedy`, policies take the best action instead of drawing one."""
        self._load, self._functions, self._acting = load, functions, Greedy() if greedy else Sampling()
        self._held: OrderedDict[tuple[str, str, str], tuple[Player, int]] = OrderedDict()
        """Group, kind, and SHA-256 or source → player, and its size in bytes."""

    def allows(self, ref: PlayerRef) -> bool:
        """Returns whether the player may be run: nothing from Redis or the store may name other code."""
        return ref.kind != "function" or ref.source in self._functions

    def get(
        self, ref: PlayerRef, group: str, spaces: PolicySpaces, policy: Policy, seated: Callable[[], set[str]] = set
    ) -> Player:
        """Returns a player for the seats of `group`; `policy` is any with its spaces, `seated` returns the SHA-256 of
        players that stay in memory. Raises `SharedObjectUnusable`, or `ConfigError` for an unusable function."""
        key = group, ref.kind, ref.sha256 or ref.source
        if key not in self._held:
            self._held[key] = self._make(ref, spaces, policy)
            needed = {key[2], *seated()}
            for other in [other for other in self._held if other[2] not in needed]:
                if sum(size for _, size in self._held.values()) > MOST_BYTES:
                    del self._held[other]
        self._held.move_to_end(key)
        return self._held[key][0]

    def _make(self, ref: PlayerRef, spaces: PolicySpaces, policy: Policy) -> tuple[Player, int]:
        if ref.kind == "random":
            return Random(policy), 0
        if ref.kind == "function":
            if not self.allows(ref):
                raise SharedObjectUnusable(
                    f"a match table names the scripted player {ref.source!r:.100}, which this run's league.fixed does "
                    f"not have; it is not run"
                )
            return Function(import_object(ref.source, "league.fixed", kind="function"), spaces), 0
        data = self._load(ref.sha256)
        if ref.kind == "onnx":
            return Exported(data, spaces), len(data)
        device = next(policy.parameters()).device
        try:
            if ref.kind == "policy":
                return Network(decode_policy(data)[0].eval().to(device), self._acting), len(data)
            blobs, weights = zip(*decode_mixture(data), strict=True)
            made = [Network(decode_policy(blob)[0].eval().to(device), self._acting) for blob in blobs]
            return Mixture(made, weights), len(data)
        except StagecoachError:
            raise
        except Exception as error:
            raise ConfigError(f"the player {ref.source} cannot be read: {headline(error)}") from error
