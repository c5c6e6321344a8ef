"""An actor-critic's pass over an update's fragments, and the batch of rows or sequences that it learns from."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, fields, replace
from typing import Any, Self, cast

import torch
from torch import Tensor

from stagecoach.shared.experience.fragment import STATE
from stagecoach.shared.policies.actor_critic import ActorCritic, Heads, RecurrentActorCritic

CHUNK = 8192
"""Rows that go through a network at a time, so that a large batch of images fits."""
_AT_ONCE_BYTES = 16 << 20
"""Observations beyond this size are not shuffled as a whole: the copy costs more than it saves."""


@dataclass(frozen=True)
class ForwardPass:
    """A policy's outputs for T steps of S slots, of which M ended with a known last observation."""

    value: Tensor
    """`[T, S]`."""
    bootstrap_value: Tensor
    """`[S]`, after the last step."""
    final_value: Tensor
    """`[M]`, of these last observations; ignored after termination (`Trajectories.following`)."""
    params: Tensor
    """`[T, S, P]`, for the policy's distribution; empty without `with_params`."""


def forward_pass(policy: Heads, tensors: Mapping[str, Tensor], *, with_params: bool) -> ForwardPass:
    """Evaluates the columns of fragments side by side (shared/experience/fragment.py), outside of autograd."""
    if policy.state_size:
        return _recurrent_pass(cast(RecurrentActorCritic, policy), tensors)
    plain, shape = cast(ActorCritic, policy), tensors["reward"].shape
    names = policy.read_columns

    def joined(observations: Mapping[str, Tensor]) -> Tensor:
        params, value = plain.action_parameters_and_value(observations)
        return torch.cat([params, value.unsqueeze(-1)], dim=1)

    flat = {name: tensors[name].flatten(0, 1) for name in names}
    ends = ({name: tensors[prefix + name] for name in names} for prefix in ("bootstrap_", "final_"))
    bootstrap, final = (in_chunks(plain.value, columns) for columns in ends)
    both = in_chunks(joined, flat) if with_params else in_chunks(plain.value, flat).unsqueeze(-1)
    both = both.reshape(*shape, -1)
    return ForwardPass(both[..., -1], bootstrap, final, both[..., :-1])


def _recurrent_pass(policy: RecurrentActorCritic, tensors: Mapping[str, Tensor]) -> ForwardPass:
    """Evaluates last observations with the hidden state that the step left."""
    names = policy.spaces.observation.column_names("obs")
    steps, slots = tensors["mask"].shape
    width, over, parts = max(1, CHUNK // steps), over_after(tensors), []
    for start in range(0, slots, width):
        part = slice(start, start + width)
        observations = {name: tensors[name][:, part] for name in names}
        parts.append(policy.sequence(observations, tensors[STATE][part], over[:, part]))
    params, value, states = (torch.cat(column, dim=1) for column in zip(*parts, strict=True))
    step, slot = tensors["final_index"].to(torch.int64).unbind(dim=1)
    bootstrap = policy.value({name: tensors["bootstrap_" + name] for name in names}, states[-1])
    final = policy.value({name: tensors["final_" + name] for name in names}, states[step, slot])
    return ForwardPass(value, bootstrap, final, params)


def log_probs(policy: Heads, tensors: Mapping[str, Tensor], params: Tensor) -> Tensor:
    """Returns `[T, S]` for the columns' actions, given the policy's outputs `params` `[T, S, P]`."""
    actions = {name: tensors[name].flatten(0, 1) for name in policy.spaces.action.column_names("action")}
    return policy.distribution.log_prob(params.flatten(0, 1), actions).reshape(params.shape[:2])


def in_chunks(computed: Callable[[dict[str, Tensor]], Tensor], columns: Mapping[str, Tensor]) -> Tensor:
    """Applies `computed` to `CHUNK` rows at a time and joins the results."""
    first = next(iter(columns.values()))
    parts = [
        computed({name: tensor[start : start + CHUNK] for name, tensor in columns.items()})
        for start in range(0, len(first), CHUNK)
    ]
    return torch.cat(parts) if parts else torch.zeros(0, device=first.device)


def over_after(tensors: Mapping[str, Tensor]) -> Tensor:
    """Returns `[T, S]`: the steps after which the hidden state is reset."""
    return tensors["terminated"] | tensors["truncated"] | ~tensors["mask"]


@dataclass(frozen=True)
class Batch:
    """One update's transitions, flat: observations and actions by column, the rest `[B]`."""

    observations: dict[str, Tensor]
    actions: dict[str, Tensor]
    log_prob: Tensor
    value: Tensor
    advantage: Tensor
    target: Tensor
    anchor_params: Tensor | None = None
    """`[B, P]`: outputs of a network that the policy should stay close to."""
    start_log_prob: Tensor | None = None
    """`[B]`: of the actions, by the policy at the start of the update; only with `target_kl`."""
    metrics: dict[str, float] = field(default_factory=dict)

    def __len__(self) -> int:
        return len(self.log_prob)

    def take(self, rows: Tensor | slice) -> Self:
        if isinstance(rows, Tensor):
            return self.changed(lambda tensor: tensor.index_select(0, rows))
        return self if rows == slice(0, len(self)) else self.changed(lambda tensor: tensor[rows])

    def shuffled(self, order: Tensor, minibatches: int) -> Iterator[Self]:
        """Yields `minibatches` of equal size; small batches are reordered at once."""
        if sum(tensor.nbytes for tensor in self.observations.values()) > _AT_ONCE_BYTES:
            yield from (self.take(rows) for rows in order.tensor_split(minibatches))
            return
        ordered, at = self.take(order), 0
        for rows in order.tensor_split(minibatches):
            yield ordered.take(slice(at, at := at + len(rows)))

    def changed(self, change: Callable[[Tensor], Tensor]) -> Self:
        """Returns a copy with `change` applied to all tensors, without metrics."""
        names = [item.name for item in fields(self) if item.name != "metrics"]
        return replace(self, **{name: each(getattr(self, name), change) for name in names}, metrics={})

    def rows(self, mask: Tensor) -> Self:
        """Returns the counted transitions of a batch of tensors `[T, S, …]`, flat."""
        keep = mask.flatten()
        return self.changed(lambda tensor: tensor.flatten(0, 1)[keep])

    def counted(self, tensor: Tensor) -> Tensor:
        """Returns the counted transitions of a tensor shaped like `log_prob` (and more axes)."""
        return tensor

    def flat(self) -> Batch:
        return self

    def minibatches(self, size: int) -> int:
        """Returns the number of equal minibatches of at most `size` transitions."""
        return -(-len(self) // size)

    def normalized(self) -> Self:
        """Returns a copy whose advantages have zero mean and unit variance; a single one is kept."""
        known = self.counted(self.advantage)
        if len(known) < 2:
            return self
        deviation, mean = torch.std_mean(known)
        return replace(self, advantage=(self.advantage - mean) / (deviation + 1e-8))

    def outputs(self, policy: Heads) -> tuple[Tensor, Tensor]:
        return cast(ActorCritic, policy).action_parameters_and_value(self.observations)


def each(value: Any, change: Callable[[Any], Tensor]) -> Any:
    """Applies `change` to an array or tensor, or to each of a dict; keeps None."""
    if isinstance(value, dict):
        return {name: change(item) for name, item in value.items()}
    return value if value is None else change(value)


@dataclass(frozen=True, kw_only=True)
class Sequences(Batch):
    """Batch of a policy with a recurrent core, all `[S, T, …]`; `take` selects slots. Each gradient step recomputes the
    hidden states; gradients flow back to the fragment's first step, but not across the ends of episodes."""

    mask: Tensor
    """`[S, T]`: the counted transitions."""
    over: Tensor
    """`[S, T]`: the steps after which the state is reset."""
    state_in: Tensor
    """`[S, state size]`, before the first step."""

    def counted(self, tensor: Tensor) -> Tensor:
        return tensor[self.mask]

    def flat(self) -> Batch:
        return Batch(**{item.name: getattr(self, item.name) for item in fields(Batch)}).changed(self.counted)

    def minibatches(self, size: int) -> int:
        return -(-len(self) // max(1, size // self.mask.shape[1]))

    def outputs(self, policy: Heads) -> tuple[Tensor, Tensor]:
        observations = {name: tensor.transpose(0, 1) for name, tensor in self.observations.items()}
        sequence = cast(RecurrentActorCritic, policy).sequence
        params, value, _ = sequence(observations, self.state_in, self.over.transpose(0, 1))
        return self.counted(params.transpose(0, 1)), self.counted(value.transpose(0, 1))


def sequences(batch: Batch, tensors: Mapping[str, Tensor]) -> Sequences:
    """Builds sequences from a batch of tensors `[T, S, …]` and its columns; drops slots without any step."""
    there = tensors["mask"].any(dim=0)

    def by_slot(tensor: Tensor) -> Tensor:
        return tensor.transpose(0, 1)[there]

    mask, over = by_slot(tensors["mask"]), by_slot(over_after(tensors))
    return Sequences(**vars(batch.changed(by_slot)), mask=mask, over=over, state_in=tensors[STATE][there])
