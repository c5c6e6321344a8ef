"""Retention: what is kept whatever the scores, and that nothing else is."""

from __future__ import annotations

import math

from hypothesis import given, settings
from hypothesis import strategies as st

from stagecoach.shared.config.sections import CheckpointConfig
from stagecoach.shared.experience.checkpoint_name import checkpoint_name, checkpoint_version
from stagecoach.trainer_node.checkpointing.retention import best_checkpoints, select_for_pruning

VERSIONS = st.lists(st.integers(0, 60), unique=True, min_size=1, max_size=20).map(sorted)
CONFIGS = st.builds(
    CheckpointConfig, keep_last=st.integers(1, 5), keep_best=st.integers(1, 4), keep_every=st.none() | st.integers(1, 9)
)


@st.composite
def stores(draw: st.DrawFn) -> tuple[list[str], dict[str, float], CheckpointConfig, set[str]]:
    """Names in a store, scores of some (and of one that is gone), a rule, and protected names."""
    names = [checkpoint_name(version, version * 64) for version in draw(VERSIONS)]
    some = st.sampled_from(names)
    scores = draw(st.dictionaries(some, st.integers(-3, 3).map(float)))
    if draw(st.booleans()):
        scores[checkpoint_name(61, 0)] = 99.0
    return names, scores, draw(CONFIGS), draw(st.sets(some, max_size=3))


@settings(max_examples=200, derandomize=True)
@given(stores())
def test_retention_keeps_last_best_every_mth_and_protected(
    store: tuple[list[str], dict[str, float], CheckpointConfig, set[str]],
) -> None:
    names, scores, config, protected = store
    doomed = select_for_pruning(names, scores, config, protected)
    assert doomed == [name for name in names if name in set(doomed)], "oldest first, all from the store"
    kept = [name for name in names if name not in doomed]
    assert select_for_pruning(kept, scores, config, protected) == [], "again prunes nothing more"
    assert protected <= set(kept)
    assert kept[-config.keep_last :] == names[-config.keep_last :]
    better = {
        name: sum(scores[other] > scores[name] for other in names if other in scores)
        for name in names
        if name in scores
    }
    for name in doomed:
        version = checkpoint_version(name)
        assert version is not None
        assert config.keep_every is None or version % config.keep_every
        if name in scores:
            as_good = sum(scores[other] >= scores[name] for other in kept if other in scores)
            assert as_good >= config.keep_best, "one that goes has at least b as good beside it"
    for name in kept:
        reasons = [
            name in names[-config.keep_last :],
            name in protected,
            better.get(name, config.keep_best) < config.keep_best,
            config.keep_every is not None and (checkpoint_version(name) or 0) % config.keep_every == 0,
        ]
        assert any(reasons), f"{name} stays for no reason"


def test_best_checkpoint_is_highest_finite_score_then_newest() -> None:
    names = [checkpoint_name(version, version) for version in (1, 2, 10, 11, 12, 13)]
    scores = dict(zip(names, (5.0, 7.0, 7.0, math.nan, math.inf))) | {"99_Step-99.ckpt": 100.0}
    assert best_checkpoints(scores, names) == [names[2], names[1], names[0]]
