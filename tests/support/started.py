"""A trainer that has begun a run, for tests of what acts in it."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

from shared.config.run_config import Config
from shared.runtime.run_context import RunContext
from trainer_node.incarnation import Incarnation
from trainer_node.trainer import Trainer


@contextmanager
def published(make_role: Callable[..., RunContext], config: Config) -> Iterator[Trainer]:
    """A run whose trainer has put version 0 on the board."""
    trainer = Trainer.start(Incarnation(make_role(config)))
    try:
        yield trainer
    finally:
        trainer.state.writer.close()
        trainer.incarnation.heartbeat.stop("the test is over")
