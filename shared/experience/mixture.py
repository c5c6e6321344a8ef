"""Mixtures: several policies and their weights in one blob; one is drawn for each episode and plays it to the end.

In games such as poker the mean over time converges where the current weights may cycle. It is a mixture at the start of
an episode: mixing the policies' probabilities at each decision would be another strategy.
"""

from collections.abc import Sequence

import numpy as np

from stagecoach.shared.base.errors import CheckpointDamaged, FragmentError
from stagecoach.shared.experience import tensor_blob

_WEIGHTS = "mixture"


def encode_mixture(members: Sequence[tuple[bytes, float]]) -> bytes:
    """Encodes policies, each as bytes of `encode_policy`, and their weights."""
    arrays = {f"{index:06}": np.frombuffer(data, np.uint8) for index, (data, _) in enumerate(members)}
    return tensor_blob.encode(arrays, {_WEIGHTS: [weight for _, weight in members]})


def decode_mixture(blob: bytes) -> list[tuple[bytes, float]]:
    """Inverse of `encode_mixture`; raises `CheckpointDamaged`."""
    try:
        arrays, header = tensor_blob.decode(blob)
        members = zip(sorted(arrays.items()), header[_WEIGHTS], strict=True)
        return [(array.tobytes(), float(weight)) for (_, array), weight in members]
    except (FragmentError, KeyError, TypeError, ValueError) as error:
        raise CheckpointDamaged(f"a mean strategy is damaged ({type(error).__name__}: {error})") from None


def is_mixture(blob: bytes) -> bool:
    """Returns whether the bytes are marked as a mixture; those of a policy are not."""
    try:
        return _WEIGHTS in tensor_blob.header(blob)
    except FragmentError:
        return False


def member(weights: Sequence[float], number: float) -> int:
    """Index of the member that a uniform draw from [0, 1) selects."""
    totals = np.cumsum(weights)
    return min(int(np.searchsorted(totals, number * totals[-1], side="right")), len(totals) - 1)
