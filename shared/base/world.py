"""The clock, sleep, threads and random names of a process.

Roles and the coordinator's loops take them from here, as `world.sleep(1.0)`. So a simulation can put all processes of
a run, with their threads, under one seeded scheduler (docs/internals/simulation.md). Outside of one they are the
standard library's own.
"""

import queue
import random
import secrets
import threading
import time

monotonic = time.monotonic
"""Seconds that never go back: for durations and deadlines."""
nanoseconds = time.perf_counter_ns
unix_time = time.time
"""Seconds since 1970, as this machine believes."""
thread_time = time.thread_time
"""Seconds of the processor that this thread has had."""
sleep = time.sleep

Thread = threading.Thread
Event = threading.Event
Lock = threading.Lock
RLock = threading.RLock
Condition = threading.Condition
Queue = queue.Queue
get_ident = threading.get_ident

token_hex = secrets.token_hex
uniform = random.SystemRandom().uniform  # of each process: roles are forked from one
