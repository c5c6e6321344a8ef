"""How a script (scripts.py) is run: by its hash, else with its text; or two of them in one round trip."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

import redis

First = TypeVar("First")
Second = TypeVar("Second")


class Step:
    """One script on one connection."""

    def __init__(self, client: redis.Redis, script: str) -> None:
        self._redis, self._script = client, script
        self._sha = hashlib.sha1(script.encode(), usedforsecurity=False).hexdigest()

    def __call__(self, keys: Sequence[str], args: Sequence[Any]) -> Any:
        """Runs it; a server that does not know it (another one, after a failover) gets it in the same command."""
        try:
            return self._redis.evalsha(self._sha, len(keys), *keys, *args)
        except redis.exceptions.NoScriptError:
            return self._redis.eval(self._script, len(keys), *keys, *args)

    def add_to(self, pipeline: Any, keys: Sequence[str], args: Sequence[Any]) -> None:
        """To the commands of a pipeline, for a server that knows it."""
        pipeline.evalsha(self._sha, len(keys), *keys, *args)


@dataclass
class Call(Generic[First]):
    """One run of a step, made ready: by itself, or in one round trip with another."""

    step: Step
    keys: Sequence[str]
    args: Sequence[Any]
    read: Callable[[Any], First]
    """What Redis answers → what it means."""
    answer: First | None = None
    """Once it was run."""

    def run(self) -> First:
        """By itself."""
        self.answer = self.read(self.step(self.keys, self.args))
        return self.answer


def run_both(client: redis.Redis, first: Call[First], second: Call[Second]) -> tuple[First, Second]:
    """One after the other in one round trip; others may come in between. What fails is sent again, each by itself: so a
    server that does not know a script gets it, and a damaged key is named."""
    pipeline = client.pipeline(transaction=False)
    for call in (first, second):
        call.step.add_to(pipeline, call.keys, call.args)
    try:
        answers = pipeline.execute()
    except redis.ResponseError:
        return first.run(), second.run()
    first.answer, second.answer = first.read(answers[0]), second.read(answers[1])
    return first.answer, second.answer
