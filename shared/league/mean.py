"""A league's mean strategy: one of a policy's snapshots is drawn for each episode and plays it to the end.

In games such as poker the mean over time converges where the current weights may cycle. It is a mixture at the start of
an episode: mixing the snapshots' probabilities anew at each decision would be another strategy. Each snapshot weighs as
much as its learner had played when it was taken: averaging linear in time, as in CFR+ (Tammelin 2014), forgets the
first, hardly trained ones, which a uniform mean would hold on to.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence

import numpy as np

from stagecoach.shared.base.errors import CheckpointDamaged, CheckpointNotFound, FragmentError
from stagecoach.shared.experience import tensor_blob

MEAN = "mean"
_WEIGHTS = "mixture"


def is_mean(name: str) -> bool:
    """Whether a policy id may name a mean strategy."""
    return name == MEAN or name.endswith(f"-{MEAN}")


def mean_of(name: str, league: bytes, read: Callable[[str], bytes]) -> bytes | None:
    """The mean strategy `POLICY-mean` of a checkpoint's league, or `mean` where one policy has snapshots, as one blob;
    None for another name. `read` gives a snapshot's bytes by SHA-256. Raises `CheckpointNotFound` for `mean` in a
    league of several.
    """
    taken = json.loads(league)["snapshots"]
    policies = sorted({its["policy"] for its in taken})
    if name == MEAN and len(policies) > 1:
        raise CheckpointNotFound(f"several policies have snapshots; choose one: {f'-{MEAN}, '.join(policies)}-{MEAN}")
    own = [its for its in taken if name in (MEAN, f"{its['policy']}-{MEAN}")]
    played = [float(its["env_steps"]) for its in own]
    members = [(read(its["sha256"]), weight if any(played) else 1.0) for its, weight in zip(own, played, strict=True)]
    return encode_mixture(members) if members else None


def encode_mixture(members: Sequence[tuple[bytes, float]]) -> bytes:
    """Policies as `encode_policy` gives them, with their weights, as one blob."""
    arrays = {f"{index:06}": np.frombuffer(data, np.uint8) for index, (data, _) in enumerate(members)}
    return tensor_blob.encode(arrays, {_WEIGHTS: [weight for _, weight in members]})


def decode_mixture(blob: bytes) -> list[tuple[bytes, float]]:
    """The inverse of `encode_mixture`; raises `CheckpointDamaged`."""
    try:
        arrays, header = tensor_blob.decode(blob)
        members = zip(sorted(arrays.items()), header[_WEIGHTS], strict=True)
        return [(array.tobytes(), float(weight)) for (_, array), weight in members]
    except (FragmentError, KeyError, TypeError, ValueError) as error:
        raise CheckpointDamaged(f"a mean strategy is damaged ({type(error).__name__}: {error})") from None


def is_mixture(blob: bytes) -> bool:
    """Whether the bytes claim to be a mixture; a policy's do not."""
    try:
        return _WEIGHTS in tensor_blob.header(blob)
    except FragmentError:
        return False


def member(weights: Sequence[float], number: float) -> int:
    """Index of the member that a uniform draw from [0, 1) selects."""
    totals = np.cumsum(weights)
    return min(int(np.searchsorted(totals, number * totals[-1], side="right")), len(totals) - 1)
