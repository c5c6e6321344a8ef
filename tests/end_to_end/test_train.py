"""`stagecoach.train` in programs of a user's: environments as objects, several runs, and the end of the program."""

from __future__ import annotations

import hashlib
import os
import signal

import pytest

from tests.support.processes.command_line import CommandLine

pytestmark = pytest.mark.timeout(400)
MARK = "a-marker-of-this-environment"
ENVIRONMENT = """
import os, sys, threading, time
import gymnasium as gym, numpy as np
import stagecoach as sc

with open("started", "a") as file:
    file.write("once\\n")
MARK = "MARKER"
SIZE = 6

class Mine(gym.Env):
    observation_space = gym.spaces.Box(-10, 10, (2,), np.float32)
    action_space = gym.spaces.Discrete(2)

    def __init__(self, size=SIZE):
        self.size, self.mark = size, MARK

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.seen = self.np_random.normal(size=2).astype(np.float32)
        self.left = self.size
        return self.seen, {}

    def step(self, action):
        self.left -= 1
        reward = float((self.seen[0] > 0) == action)
        self.seen = self.np_random.normal(size=2).astype(np.float32)
        return self.seen, reward, self.left == 0, False, {}

small = {"environment.num_envs": 2, "rollout.fragment_steps": 8, "evaluation.episodes": 2, "algorithm": {
    "name": "ppo", "minibatch_size": 16, "epochs": 1}}
"""


def script(text: str) -> str:
    return ENVIRONMENT.replace("MARKER", MARK) + text


KINDS = """
from stagecoach.rollout_worker.environments.objects import pack

print(MARK.encode() in pack(Mine))
gym.register("Mine-v0", Mine, max_episode_steps=4)
one = sc.train(Mine, env_steps=320, workers=2, env_kwargs={"size": 5}, run_id="class", **small)
two = sc.train("Mine-v0", env_steps=320, run_id="id", **small)  # at the same time
print(one.wait(200).reason, two.wait(200).reason)
few = sc.train(
    lambda: Mine(3), env_steps=320, run_id="lambda", **small, **{"environment.vectorization": "async"}
)  # after them
print(few.wait(200).reason)
print(one.evaluate(episodes=2).checkpoint, sc.make_environment(few.config).size)
"""


def test_objects_reach_workers_and_nothing_else(terminal: CommandLine) -> None:
    """A class, a registered id and a lambda of `__main__`, two at once; a script without a guard runs once."""
    done = terminal.ended(terminal.program(script(KINDS)))
    assert done.code == 0, done
    packed, both, third, last = done.out.splitlines()
    assert (packed, both, third) == ("True", "exhausted exhausted", "exhausted"), done
    assert last.endswith(".ckpt 3")
    assert (terminal.folder / "started").read_text() == "once\n"
    for run_id, name in (("class", "Mine"), ("id", "Mine-v0"), ("lambda", "lambda")):
        config = terminal.handle(run_id).config
        assert config.environment.id == f"object:{name}"
        assert terminal.handle(run_id).status().env_steps >= 320
    files = [path for path in (terminal.folder / "runs").rglob("*") if path.is_file()]
    assert any("appendonly" in path.name for path in files), "what was in Redis"
    for path in files:
        data = path.read_bytes()
        assert MARK.encode() not in data, path
        assert b"cloudpickle" not in data, path
    terminal.check_nothing_left()


EXACT = """
exact = small | {"rollout.max_policy_lag": 0, "checkpoint.every": "2 updates"}
how, run_id = sys.argv[1:]
if how == "start":
    run = sc.train(Mine, env_steps=64 * 60, workers=1, seed=3, run_id=run_id, **exact)
else:
    run = sc.Run.resume(run_id, environment=Mine)
print(run.wait(200).reason)
"""


def weights(terminal: CommandLine, run_id: str) -> str:
    store = terminal.handle(run_id).checkpoint_store()
    return hashlib.sha256(store.load(store.resolve("final")).objects["default/policy.safetensors"]).hexdigest()


def test_object_run_resumes_exactly_and_warns_of_new_code(terminal: CommandLine) -> None:
    """Killed with -9 in between; the last program behaves the same by other code."""
    assert terminal.ended(terminal.program(script(EXACT), "start", "whole")).ok() == "exhausted\n"
    killed = terminal.program(script(EXACT), "start", "cut")
    terminal.until_checkpoint("cut", 8)
    os.kill(killed.pid, signal.SIGKILL)
    killed.wait()
    terminal.wait_until("nothing is left", lambda: not terminal.left())

    same = terminal.program(script(EXACT), "resume", "cut")
    terminal.until_checkpoint("cut", 20)
    os.kill(same.pid, signal.SIGKILL)
    same.wait()
    assert "UserWarning" not in terminal.output(same, "err")

    changed = terminal.ended(
        terminal.program(script(EXACT).replace("self.left -= 1", "self.left = self.left - 1"), "resume", "cut")
    )
    assert changed.ok() == "exhausted\n"
    assert "the code of environment object:Mine is not the one that the run was started with" in changed.err
    rows = [text for rows in terminal.handle("cut").metrics("events") for text in rows.labels]
    assert any("the code of environment object:Mine" in text for text in rows)
    assert weights(terminal, "cut") == weights(terminal, "whole")


SEVERAL = """
def begin(run_id, **more):
    runs[run_id] = sc.train(Mine, env_steps=10**8, run_id=run_id, **small | more)

def learns(run_id):
    before = runs[run_id].status().version
    while runs[run_id].status().version <= before + 3:
        time.sleep(0.05)

runs = {}
for run_id, more in (("first", {}), ("inline", {"inline": True}), ("second", {})):
    thread = threading.Thread(target=begin, args=(run_id,), kwargs=more)
    thread.start()
    thread.join()  # the thread that has started its services ends
for run_id in runs:
    learns(run_id)
for run_id in list(runs):
    runs[run_id].stop()
    print(runs.pop(run_id).wait(100).reason)
    for other in runs:
        learns(other)
begin("last")
learns("last")
print("the end")
"""


def test_runs_share_a_program_that_ends_before_its_last(terminal: CommandLine) -> None:
    """With Ray and inline, from threads that end at once; the first to end takes nothing from the others."""
    done = terminal.ended(terminal.program(script(SEVERAL)))
    assert (done.code, done.out.splitlines()) == (0, ["stopped", "stopped", "stopped", "the end"]), done
    (line,) = done.err.splitlines()
    assert "the program ended while run last was live" in line
    assert "Run.resume('last', environment=…)" in line
    terminal.check_nothing_left()
    terminal.check_ended("last")


@pytest.mark.parametrize("inline", [False, True], ids=["ray", "inline"])
def test_interrupt_of_wait_ends_run_in_order(terminal: CommandLine, inline: bool) -> None:
    text = f"run = sc.train(Mine, env_steps=10**8, run_id='live', inline={inline}, **small)\nrun.wait()\n"
    program = terminal.program(script(text))
    terminal.until("live", "it learns", lambda status: status.version > 2)
    program.send_signal(signal.SIGINT)
    done = terminal.ended(program)
    assert done.err.splitlines()[-2] == "KeyboardInterrupt", done
    assert done.err.splitlines()[-1].startswith("stagecoach: the program ended while run live was live")
    terminal.check_nothing_left()
    terminal.check_ended("live")


REPLACED = """
import signal
from stagecoach.coordinator.services import ray_head

def learns():
    before = run.status().version
    while run.status().version <= before + 3:
        time.sleep(0.05)

def pid_of(name):
    while not (found := [beat.pid for beat in run.status().roles if beat.id == name and beat.alive]):
        time.sleep(0.05)
    return found[0]

run = sc.train(Mine, env_steps=10**8, run_id="live", **small | {"checkpoint.every": "5 updates"})
learns()
for name in ("worker-0", "evaluator"):
    former = pid_of(name)
    os.kill(former, signal.SIGKILL)
    while pid_of(name) == former:
        time.sleep(0.05)
    learns()
run.scale(2)
former = pid_of("worker-1")
os.kill(ray_head._head.parts()["gcs_server"], signal.SIGKILL)
while pid_of("worker-1") == former:
    time.sleep(0.05)
learns()
run.stop()
print(run.wait(100).reason)
"""


def test_replaced_roles_and_ray_get_the_object(terminal: CommandLine) -> None:
    done = terminal.ended(terminal.program(script(REPLACED)))
    assert (done.code, done.out) == (0, "stopped\n"), done
    evaluations = [name for rows in terminal.handle("live").metrics("evaluations") for name in rows.labels]
    assert evaluations, "scores of the evaluators"
    terminal.check_ended("live")


INTERRUPTED = """
import signal

def interrupt():
    while "ray" not in sys.modules:
        time.sleep(0.001)
    os.kill(os.getpid(), signal.SIGINT)

threading.Thread(target=interrupt).start()
try:
    sc.train(Mine, env_steps=10**8, run_id="one", **small)
except KeyboardInterrupt:
    print(os.listdir("runs"))
print(sc.train(Mine, env_steps=64, run_id="one", **small).wait(100).reason)
"""


def test_interrupted_start_leaves_nothing_and_ray_whole(terminal: CommandLine) -> None:
    """The interrupt comes while Ray is being imported, which Python would not do again."""
    done = terminal.ended(terminal.program(script(INTERRUPTED)))
    assert (done.code, done.out.splitlines()) == (0, ["[]", "exhausted"]), done
    terminal.check_nothing_left()
