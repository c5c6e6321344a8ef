"""Virtual time, and the processes and threads of a simulated run, under one seeded scheduler.

A thread is a greenlet: it runs until it sleeps, waits or calls a server, and the scheduler resumes it when that is over
in virtual time. `installed` puts the simulation in the place of the clock, the threads and the random names of
`stagecoach.shared.base.world`, so that the product's own loops run here unchanged.
"""

from __future__ import annotations

import heapq
import itertools
import queue
import random
import threading
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from functools import partial
from typing import Any

import greenlet
import pytest
import torch

from stagecoach.shared.base import world

BEGAN = 1_700_000_000.0
"""Seconds since 1970 at which each simulation begins."""
LONG_SECONDS = 30.0
_MOST_POLLS = 10_000
"""Times that a thread may ask without waiting at all."""
_UNWINDING = 100
"""Calls that a killed thread may try while it unwinds."""


class Killed(BaseException):
    """Raised in each thread of a killed process; whatever it calls on its way out has no effect."""


class Stuck(Exception):
    """Nothing is due any more, though something waits."""


class Process:
    """A simulated process: its threads, its clock, and how it ended."""

    def __init__(self, scheduler: Scheduler, name: str) -> None:
        self.scheduler, self.name, self.alive = scheduler, name, True
        self.tasks: list[Task] = []
        self.clock_offset = 0.0
        self.paused_until = 0.0
        self.late = 0.0
        """Seconds by which all that it sends now arrives later than usual, even after its end."""
        self.breaks = 0.0
        """Probability that a connection of it breaks before an answer arrives."""
        self.names_wait: Callable[[], bool] = lambda: True
        """Whether its main thread says what it waits for."""
        self.terminate: Callable[[], None] = lambda: None
        """The handler of SIGTERM."""
        self.signalled = False
        """Whether that is to run in its main thread."""
        self.result: Any = None
        self.error: BaseException | None = None
        self.on_exit: Callable[[Process], None] = lambda process: None
        self.connections: list[Callable[[], None]] = []
        """What the kernel closes when it has ended."""

    def start(self, main: Callable[[], Any]) -> None:
        def run() -> None:
            try:
                self.result = main()
            except Killed:
                raise
            except BaseException as error:
                self.error = error
            self._end_soon()

        self.scheduler.spawn(self, run, "main")

    def signal(self) -> None:
        """Sends SIGTERM: its main thread handles it when it runs next, or within what it waits for."""
        self.signalled = True
        for task in self.tasks:
            if task.name == "main":
                self.scheduler.wake(task)

    def kill(self) -> None:
        """Ends all its threads at once."""
        if not self.alive:
            return
        self.error = Killed()
        if self.scheduler.current is None:
            self._end()
        else:
            self._end_soon()

    def _end_soon(self) -> None:
        """Leaves the end to the scheduler: a greenlet that ends returns to it, not to the thread that ended it."""
        self.alive = False
        self.scheduler.after(0.0, self._end)

    def _end(self) -> None:
        self.alive = False
        for task in list(self.tasks):
            task.unwind()
        self.tasks.clear()
        for close in self.connections:
            close()
        self.on_exit(self)


class Task:
    """One thread of a process."""

    def __init__(self, process: Process, target: Callable[[], Any], name: str) -> None:
        self.process, self.name, self.ticket = process, name, 0
        self.greenlet = greenlet.greenlet(partial(self._run, target), parent=process.scheduler.hub)
        self.done = False
        self.inference, self.grad = False, True
        """PyTorch's modes in it: of the real thread, they are every task's."""
        self.ended: list[Task] = []
        """Tasks that wait for its end."""

    def _run(self, target: Callable[[], Any]) -> None:
        try:
            target()
        except Killed:
            pass
        finally:
            self.done = True
            if self in self.process.tasks:
                self.process.tasks.remove(self)
            for task in self.ended:
                self.process.scheduler.wake(task)

    def unwind(self) -> None:
        for _ in range(_UNWINDING):
            if self.greenlet.dead:
                return
            before, self.process.scheduler.current = self.process.scheduler.current, self
            try:
                with torch.inference_mode(self.inference), suppress(Killed):  # which it raises if it has not begun
                    self.greenlet.throw(Killed())
            finally:
                self.process.scheduler.current = before
        raise AssertionError(f"{self.process.name}: its thread {self.name} does not end")


class Scheduler:
    """Virtual time and what is due in it. `random` decides all that is left open."""

    def __init__(self, seed: int) -> None:
        self.random, self.now, self.steps = random.Random(seed), 0.0, 0
        self.hub = greenlet.getcurrent()
        self.current: Task | None = None
        self._polls = 0
        self._due: list[tuple[float, int, Callable[[], object]]] = []
        self._numbers = itertools.count()
        self.after_step: Callable[[], None] = lambda: None
        self.long_wait: Callable[[Task, float], None] = lambda task, seconds: None
        """Called after a main thread has waited for longer than `LONG_SECONDS`, and has not said for what."""

    # What happens when

    def at(self, when: float, call: Callable[[], object]) -> None:
        heapq.heappush(self._due, (max(when, self.now), next(self._numbers), call))

    def after(self, seconds: float, call: Callable[[], object]) -> None:
        self.at(self.now + seconds, call)

    def step(self) -> None:
        if not self._due:
            raise Stuck("nothing is due any more")
        when, _, call = heapq.heappop(self._due)
        self.now = max(self.now, when)
        self.steps += 1
        self._polls = 0
        call()
        self.after_step()

    def run_until(self, when: float, done: Callable[[], bool] = lambda: False) -> bool:
        """Returns whether it was `done` before then."""
        while self._due and self._due[0][0] <= when:
            if done():
                return True
            self.step()
        if done():
            return True
        self.now = max(self.now, when)
        return False

    # Threads

    def spawn(self, process: Process, target: Callable[[], Any], name: str) -> Task:
        task = Task(process, target, name)
        process.tasks.append(task)
        self.after(0.0, partial(self._resume, task, task.ticket))
        return task

    def wake(self, task: Task) -> None:
        """Lets a waiting thread go on, soon."""
        self.after(0.0, partial(self._resume, task, task.ticket))

    def block(self, seconds: float | None = None) -> None:
        """Suspends this thread until it is woken, or so many seconds have passed."""
        task = self.current
        if task is None:
            raise AssertionError("only a simulated thread waits")
        if not task.process.alive:
            raise Killed
        task.ticket += 1
        if seconds is not None:
            self.after(max(0.0, seconds), partial(self._resume, task, task.ticket))
        task.inference, task.grad = torch.is_inference_mode_enabled(), torch.is_grad_enabled()
        self.hub.switch()
        if not task.process.alive:
            raise Killed
        if task.process.signalled and task.name == "main":
            task.process.signalled = False
            task.process.terminate()

    def _waited(self, task: Task, began: float, unnamed: bool) -> None:
        seconds = self.now - max(began, task.process.paused_until)
        if unnamed and seconds > LONG_SECONDS:
            self.long_wait(task, seconds)

    def wait_until(self, waiters: deque[Task] | list[Task], done: Callable[[], bool], seconds: float | None) -> bool:
        """Waits until `done()`, which is looked at whenever one of `waiters` is woken; returns whether it is."""
        task = self.current
        if task is None:  # the simulation's own code, outside of all processes
            return self.run_until(self.now + (seconds if seconds is not None else 1e9), done)
        began, until = self.now, None if seconds is None else self.now + seconds
        unnamed = task.name == "main" and not task.process.names_wait()
        while not done():
            if until is not None and self.now >= until:
                self._polls += 1
                assert self._polls < _MOST_POLLS, f"{task.process.name} waits for nothing, again and again"
                self._waited(task, began, unnamed)
                return False
            waiters.append(task)
            try:
                self.block(None if until is None else until - self.now)
            finally:
                waiters.remove(task)
        self._waited(task, began, unnamed)
        return True

    def _resume(self, task: Task, ticket: int) -> None:
        if task.ticket != ticket or task.greenlet.dead or not task.process.alive:
            return
        if task.process.paused_until > self.now:
            self.at(task.process.paused_until, partial(self._resume, task, ticket))
            return
        task.ticket += 1
        self.current = task
        try:
            with torch.inference_mode(task.inference):
                torch.set_grad_enabled(task.grad)
                task.greenlet.switch()
        finally:
            self.current = None

    # What the product sees

    def monotonic(self) -> float:
        return self.now + 1000.0  # a clock that is not at its zero, as on a machine

    def unix_time(self) -> float:
        offset = self.current.process.clock_offset if self.current is not None else 0.0
        return BEGAN + self.now + offset

    def sleep(self, seconds: float) -> None:
        if self.current is None:
            self.run_until(self.now + seconds)
        else:
            task, began = self.current, self.now
            unnamed = task.name == "main" and not task.process.names_wait()
            self.block(seconds)
            self._waited(task, began, unnamed)

    def token_hex(self, size: int = 8) -> str:
        return self.random.randbytes(size).hex()


class Thread:
    def __init__(
        self, group: None = None, target: Callable[..., Any] | None = None, name: str = "", args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None, daemon: bool | None = None,
    ) -> None:  # fmt: skip
        self.name, self.daemon = name, daemon
        self._task: Task | None = None
        self._target = partial(target, *args, **(kwargs or {})) if target else lambda: None

    def start(self) -> None:
        scheduler = _scheduler()
        assert scheduler.current is not None, "only a simulated process starts threads"
        self._task = scheduler.spawn(scheduler.current.process, self._target, self.name)

    def is_alive(self) -> bool:
        return self._task is not None and not self._task.done

    def join(self, timeout: float | None = None) -> None:
        if (task := self._task) is not None:
            _scheduler().wait_until(task.ended, lambda: task.done, timeout)

    @property
    def ident(self) -> int | None:
        return None if self._task is None else id(self._task)


class Lock:
    def __init__(self) -> None:
        self._holder: object = None
        self._depth = 0
        self._waiters: deque[Task] = deque()

    def acquire(self, blocking: bool = True, timeout: float = -1) -> bool:
        scheduler = _scheduler()
        me: object = scheduler.current or scheduler
        if self._holder is not None and not self._again(me):
            if not blocking:
                return False
            free = scheduler.wait_until(self._waiters, lambda: self._holder is None, None if timeout < 0 else timeout)
            if not free:
                return False
        self._holder, self._depth = me, self._depth + 1
        return True

    def _again(self, me: object) -> bool:
        return False

    def release(self) -> None:
        self._depth -= 1
        if not self._depth:
            self._holder = None
            if self._waiters:
                _scheduler().wake(self._waiters[0])

    def locked(self) -> bool:
        return self._holder is not None

    def __enter__(self) -> bool:
        return self.acquire()

    def __exit__(self, *_: object) -> None:
        self.release()


class RLock(Lock):
    def _again(self, me: object) -> bool:
        return self._holder is me


class Condition:
    def __init__(self, lock: Lock | None = None) -> None:
        self._lock = lock or RLock()
        self._waiters: list[Task] = []
        self._number = 0
        self.acquire, self.release = self._lock.acquire, self._lock.release

    def __enter__(self) -> bool:
        return self._lock.acquire()

    def __exit__(self, *_: object) -> None:
        self._lock.release()

    def wait(self, timeout: float | None = None) -> bool:
        before = self._number
        self._lock.release()
        try:
            return _scheduler().wait_until(self._waiters, lambda: self._number != before, timeout)
        finally:
            if _alive():
                self._lock.acquire()
            else:  # it unwinds, and releases what it does not hold
                self._lock._depth += 1

    def wait_for(self, predicate: Callable[[], Any], timeout: float | None = None) -> Any:
        scheduler = _scheduler()
        until = None if timeout is None else scheduler.now + timeout
        while not (found := predicate()):
            left = None if until is None else until - scheduler.now
            if left is not None and left <= 0:
                break
            self.wait(left)
        return found

    def notify(self, n: int = 1) -> None:
        self.notify_all()

    def notify_all(self) -> None:
        self._number += 1
        for task in self._waiters:
            _scheduler().wake(task)


class Event:
    def __init__(self) -> None:
        self._set = False
        self._waiters: list[Task] = []

    def is_set(self) -> bool:
        return self._set

    def set(self) -> None:
        self._set = True
        for task in self._waiters:
            _scheduler().wake(task)

    def clear(self) -> None:
        self._set = False

    def wait(self, timeout: float | None = None) -> bool:
        return _scheduler().wait_until(self._waiters, lambda: self._set, timeout)


class Queue:
    def __init__(self, maxsize: int = 0) -> None:
        self.maxsize = maxsize
        self._items: deque[Any] = deque()
        self._waiters: list[Task] = []

    def put_nowait(self, item: Any) -> None:
        if 0 < self.maxsize <= len(self._items):
            raise queue.Full
        self._items.append(item)
        for task in self._waiters:
            _scheduler().wake(task)

    def get(self) -> Any:
        _scheduler().wait_until(self._waiters, lambda: bool(self._items), None)
        return self._items.popleft()

    def qsize(self) -> int:
        return len(self._items)


_installed: list[Scheduler] = []


def _scheduler() -> Scheduler:
    return _installed[-1]


def _alive() -> bool:
    task = _scheduler().current
    return task is None or task.process.alive


def _in_this_thread(simulated: Callable[..., Any], real: Callable[..., Any]) -> Callable[..., Any]:
    """Returns a function that calls the first one in this thread, and the second one in all others."""
    ours = threading.get_ident()

    def call(*arguments: Any, **options: Any) -> Any:
        return (simulated if threading.get_ident() == ours else real)(*arguments, **options)

    return call


@contextmanager
def installed(scheduler: Scheduler) -> Iterator[Scheduler]:
    """Puts the simulation in the place of the real clock, threads and random names while it lasts, in this thread."""
    names: dict[str, Any] = {
        "monotonic": scheduler.monotonic, "nanoseconds": lambda: int(scheduler.monotonic() * 1e9),
        "unix_time": scheduler.unix_time, "thread_time": lambda: 0.0,
        "sleep": scheduler.sleep, "Thread": Thread, "Event": Event, "Lock": Lock,
        "RLock": RLock, "Condition": Condition, "Queue": Queue,
        "get_ident": lambda: id(scheduler.current), "token_hex": scheduler.token_hex,
        "uniform": scheduler.random.uniform,
    }  # fmt: skip
    state = random.getstate()
    random.seed(scheduler.random.random())  # redis-py draws the jitter of its pauses from there
    _installed.append(scheduler)
    try:
        with pytest.MonkeyPatch.context() as patch:
            for name, value in names.items():
                patch.setattr(world, name, _in_this_thread(value, getattr(world, name)))
            yield scheduler
    finally:
        _installed.pop()
        random.setstate(state)
