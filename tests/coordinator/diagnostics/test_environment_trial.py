"""`stagecoach check`, and what `train` and `doctor` refuse of an environment: all that is wrong is told at once."""

from __future__ import annotations

import json
import re
from contextlib import closing
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import yaml

from stagecoach.coordinator.diagnostics.environment_trial import Trial, try_environment
from stagecoach.rollout_worker.environments.description import describe_environment
from stagecoach.rollout_worker.environments.factory import make_vector
from stagecoach.shared.base.errors import EnvironmentUnusable
from tests.conftest import minimal_config
from tests.support.environments.broken import MODULE
from tests.support.environments.games import MODULE as GAMES
from tests.support.environments.small import MODULE as WORKING
from tests.support.processes.command_line import CONFIG, Stagecoach, check_refused

UNEQUAL = "wrong: two episodes with the seed 0 and equal actions are not the same"
OLD_RESET, OLD_STEP = "fatal: reset() returned an array of shape (2,)", "fatal: step() returned 4 values"
WRONG: dict[str, tuple[dict[str, Any], list[str]]] = {
    "nothing": ({"id": "Good"}, []),
    "info": (
        {"id": f"{WORKING}:Counting", "info_columns": ["depth", "note", "cost"]},
        ["wrong: info never had note, cost in 40 steps; its numbers are: depth, is_success", UNEQUAL],
    ),
    "old Gym": ({"id": "OldGym"}, ["fatal: reset() takes no seed", OLD_RESET, OLD_STEP, "wrong: two episodes with"]),
    "many things": (
        {"id": "ManyThings"},
        ["fatal: reset() returned an observation, an array of shape (3,) and dtype float64",
         "fatal: step() returned nan as reward", "wrong: step() returned int 1 as terminated",
         "fatal: step() returned str 'no' as truncated", "fatal: step() returned None as info"],
    ),
    "NaN": ({"id": "NotANumber"}, ["fatal: reset() returned an observation with NaN or infinity"]),
    "no options": ({"id": "NoOptions"}, ["fatal: reset() takes no options"]),
    "one-element reward": ({"id": "PaysAnArray"}, ["note: step() returned an array of shape (1,) and dtype float64"]),
    "two rewards": ({"id": "PaysTwice"}, ["fatal: step() returned an array of shape (2,) and dtype float64 as reward"]),
    "gray image": ({"id": "Gray"}, ["note: the observation is an array [36, 36] of uint8"]),
    "bounds": (
        {"id": "OutOfBounds"},
        ["note: reset() returned an observation of dtype float64", "wrong: reset() returned an observation from -"],
    ),
    "dtype": ({"id": "Fractions"}, ["fatal: reset() returned an observation of dtype float64"]),
    "choice": ({"id": "Beyond"}, ["fatal: reset() returned an observation, int 3"]),
    "dict": ({"id": "Parts"}, ["fatal: reset() returned an observation with ['here']"]),
    "seed": ({"id": "Unseeded"}, [f"{UNEQUAL}: observations differ from the first"]),
    "lucky reward": ({"id": "Lucky"}, [f"{UNEQUAL}: rewards or ends differ after"]),
    "sys.exit": ({"id": "Quits"}, ["raised: step() raised SystemExit: 3 (at "]),
    "actions": ({"id": "Picks"}, ["wrong: the action space Discrete(2) does not contain its own sample"]),
    "mask": ({"id": "MaskInInfo"}, ["note: info has an action_mask, which nothing acts by"]),
    "close": ({"id": "Parting"}, ["raised: close() raised OSError: no connection (at "]),
    "magnitude": ({"id": "Huge"}, ["fatal: reset() returned an observation from 0 to 1e+300"]),
    "reward": ({"id": "Lavish"}, ["fatal: step() returned 3e+38 as reward"]),
    "no observation": (
        {"id": "Silent"}, ["fatal: reset() returned None", "fatal: reset() returned an observation, None"],
    ),
    "raises": ({"id": "Raises"}, ["raised: step() raised ValueError: the gripper is stuck (at "]),
    "hangs at its start": (
        {"id": "Hangs", "kwargs": {"place": "start"}}, ["fatal: its start (__init__) hangs, at ", "in _wait"],
    ),
    "hangs in reset": ({"id": "Hangs", "kwargs": {"place": "reset"}}, ["fatal: reset() hangs, at ", "in _wait"]),
    "hangs in step": ({"id": "Hangs", "kwargs": {"place": "step"}}, ["fatal: step() hangs, at ", "in _wait"]),
    "exits": (
        {"id": "Dies", "kwargs": {"how": "exit"}},
        ["fatal: step() ended its process with exit code 3; it said last: ", "environments/broken.py"],
    ),
    "exits at its start": (
        {"id": "Dies", "kwargs": {"how": "exit", "at_start": True}},
        ["fatal: its start (__init__) ended its process with exit code 3"],
    ),
    "crashes": (
        {"id": "Dies", "kwargs": {"how": "crash"}},
        ["fatal: step() ended its process with SIGSEGV", "environments/broken.py"],
    ),
    "killed": (
        {"id": "Dies", "kwargs": {"how": "kill"}},
        ["fatal: step() ended its process with SIGKILL", "no license found"],
    ),
    "several agents": ({"id": f"{WORKING}:Twins", "api": "pettingzoo"}, []),
    "an agent's info": (
        {"id": f"{GAMES}:Odd", "api": "pettingzoo", "kwargs": {"kind": "wordy"}},
        ["fatal: step() returned str 'x' as the info of "],
    ),
    "an agent that has ended and stays": (
        {"id": f"{GAMES}:Trap", "api": "pettingzoo", "kwargs": {"listed": True}},
        ["note: env.agents still has ann after terminated or truncated"],
    ),
    "an agent that has ended": ({"id": f"{GAMES}:Trap", "api": "pettingzoo"}, []),
    "an agent": (
        {"id": "SilentMouse", "api": "pettingzoo", "kwargs": {"counts": False}},
        ["fatal: step() returned None as reward for mouse",
         "fatal: step() returned an observation for mouse, an array of shape (5,)"],
    ),
}  # fmt: skip


def told(trial: Trial) -> str:
    assert trial.error is None
    return "\n".join(f"{problem.severity}: {problem.found}" for problem in trial.problems)


@pytest.mark.parametrize("case", WRONG)
def test_everything_that_is_wrong_is_told_and_nothing_else(case: str) -> None:
    environment, words = WRONG[case]
    name = environment["id"]
    environment = environment | {"id": name if ":" in name else f"{MODULE}:{name}"}
    found = try_environment(minimal_config(environment=environment), 40, deadline_seconds=5.0, whole=True, alone=True)
    lines = told(found)
    for word in words:
        assert word in lines
    headed = [word for word in words if word.partition(":")[0] in ("fatal", "wrong", "note", "raised")]
    assert len(found.problems) == len(headed), lines
    assert found.fine == all(word.startswith("note") for word in words)
    assert ("hangs" in case) == bool(found.stack)


def test_check_prints_list_or_json_and_sets_exit_code(stagecoach: Stagecoach) -> None:
    fine = stagecoach("check", "CartPole-v1", "--steps", "20")
    assert (fine.code, fine.err) == (0, "")
    assert "CartPole-v1: nothing is wrong in 20 steps" in fine.out
    wrong = stagecoach("check", f"{MODULE}:ManyThings")
    assert wrong.code == 2
    assert "5 things are wrong" in wrong.out and "expected a dict; return {}" in wrong.out
    given = json.loads(
        stagecoach("check", f"{MODULE}:Hangs", "--kwargs", '{"place": "step"}', "--deadline", "3", "--json").out
    )
    assert not given["fine"] and "in _wait" in given["stack"]
    assert given["problems"][0]["expected"] == "a call that returns within 3 s"
    check_refused(stagecoach("check", f"{MODULE}:Good", "--kwargs", "{"), "is not JSON")
    unusable = stagecoach("check", f"{MODULE}:NoSpaces")
    assert unusable.code == 2 and "has no usable spaces" in unusable.out and "Traceback" not in unusable.out


def test_check_of_external_environment_names_conformance(stagecoach: Stagecoach) -> None:
    spaces = {"observation": {"type": "Box", "low": 0, "high": 1, "shape": [2]}, "action": {"type": "Discrete", "n": 2}}
    config = {"environment": {"id": "mine", "api": "external", "spaces": spaces}, "evaluation": {"episodes": 0}}
    Path("mine.yaml").write_text(yaml.safe_dump(config | {"stop_at": {"updates": 1}}))
    check_refused(stagecoach("check", "mine.yaml"), "test a client with `stagecoach gateway conformance -- COMMAND`")


@pytest.mark.parametrize(
    ("name", "code", "words"),
    [
        (f"{WORKING}:Twins", 0, ["agent first: ", "agent second: ", "expected environment.api: pettingzoo in its "]),
        ("classic/rps_v2", 0, ["agent player_0: ", "expected environment.api: pettingzoo in its config"]),
        ("pettingzoo.classic.rps_v2:parallel_env", 0, ["agent player_0: "]),
        ("pettingzoo.classic.rps_v2:env", 0, ["agent player_0: "]),
        (f"{MODULE}:Unnamed", 2, ["returned a Unnamed", "it has no possible_agents: set it in __init__"]),
    ],
)
def test_environments_of_pettingzoo_are_seen_to_be_such(
    stagecoach: Stagecoach, name: str, code: int, words: list[str]
) -> None:
    done = stagecoach("check", name, "--steps", "20")
    assert (done.code, done.err) == (code, "")
    for word in words:
        assert word in done.out


REFUSED: dict[str, tuple[dict[str, Any], list[str]]] = {
    "no spaces": ({"id": f"{MODULE}:NoSpaces"}, ["has no usable spaces", "observation_space"]),
    "as in RLlib": (
        {"id": f"{MODULE}:AsInRllib", "api": "pettingzoo"}, ["guides/policies.md adapts RLlib's MultiAgentEnv"],
    ),
    "many things": ({"id": f"{MODULE}:ManyThings"}, ["nan as reward", "str 'no' as truncated"]),
    "no space": ({"id": f"{MODULE}:NoSpace"}, ["its action_space is None", "set it in __init__"]),
    "nothing": ({"id": f"{MODULE}:nothing"}, ["it returned nothing: return the environment"]),
    "of no class": ({"id": f"{MODULE}:OfNoClass"}, ["returned a OfNoClass", "derive OfNoClass from gymnasium.Env"]),
    "raises at its start": (
        {"id": f"{MODULE}:NoLevel"}, ["FileNotFoundError", "'level.txt' (at ", "environments/broken.py:"],
    ),
    "a parallel one": ({"id": f"{WORKING}:Chase"}, ["it is a PettingZoo environment: set environment.api="]),
    "a registered one": ({"id": "classic/rps_v2"}, ["it is a PettingZoo environment: set environment.api="]),
    "an unknown one": (
        {"id": "classic/rpss_v2", "api": "pettingzoo"}, ["no environment 'classic/rpss_v2'", "classic/rps-v2"],
    ),
    "numbers for names": (
        {"id": f"{GAMES}:Odd", "api": "pettingzoo", "kwargs": {"kind": "numbered"}},
        ["possible_agents names an agent 1 (int); expected text", "name it such as 'agent_1'"],
    ),
    "not of PettingZoo": ({"id": f"{MODULE}:Good", "api": "pettingzoo"}, ["is a gymnasium.Env: set environment.api="]),
}  # fmt: skip


@pytest.mark.parametrize("case", REFUSED)
def test_train_and_doctor_refuse_it_before_anything_starts(stagecoach: Stagecoach, tmp_path: Path, case: str) -> None:
    environment, words = REFUSED[case]
    settings = [f"--set=environment.{name}={json.dumps(value)}" for name, value in environment.items()]
    check_refused(stagecoach("train", "config.yaml", "--run-id", "a", *settings), *words)
    assert not (tmp_path / "runs").exists()


def test_occasional_failures_may_train_and_doctor_reports_them() -> None:
    raises = minimal_config(environment={"id": f"{MODULE}:Raises", "num_envs": 4})
    found = try_environment(raises)
    assert found.refuse(raises, strict=False).agents == {"default": "default"}
    with pytest.raises(EnvironmentUnusable, match="step\\(\\) raised ValueError: the gripper is stuck"):
        found.refuse(raises, strict=True)


@pytest.mark.parametrize(
    ("kwargs", "found"),
    [
        ({"pays": 0.0}, "in the step after an episode's end its action had an effect"),
        ({"pays": 0.0, "says": "NEXT_STEP"}, "in the step after an episode's end its action had an effect"),
        ({}, "paid or ended an episode in the step after an end"),
        ({"says": "SAME_STEP"}, "gave no info['final_obs']"),
        ({"says": "same-step"}, "expected gymnasium.vector.AutoresetMode"),
        ({"tells": "final_obs"}, None),
    ],
)
def test_native_version_is_stepped_too(stagecoach: Stagecoach, kwargs: dict[str, Any], found: str | None) -> None:
    given = json.dumps(kwargs)
    told = stagecoach(
        "check", f"{WORKING}:starts_again_at_once", "--native", "--kwargs", given, "--steps", "9", "--json"
    )
    assert (found or '"fine": true') in told.out and told.code == (0 if found is None else 2), told
    native = {"id": f"{WORKING}:starts_again_at_once", "kwargs": kwargs, "vectorization": "native"}
    trial = try_environment(minimal_config(environment=native))
    if found is None:
        trial.refuse(minimal_config(environment=native), strict=False)
    else:
        with pytest.raises(EnvironmentUnusable, match=re.escape(found)):
            trial.refuse(minimal_config(environment=native), strict=False)


def test_native_version_of_cartpole_is_fine(stagecoach: Stagecoach) -> None:
    assert stagecoach("check", "CartPole-v1", "--native", "--steps", "50").code == 0


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("WholeForces", "a Box of int64 cannot be sampled"),
        ("ManyStates", "3,000,000 numbers"),
        ("Mission", "mission: Text spaces are not supported.*FilterObservation.*filter_keys.*image"),
    ],
)
def test_check_refuses_what_training_refuses(stagecoach: Stagecoach, name: str, message: str) -> None:
    """Also what only the policies' networks say."""
    told = stagecoach("check", f"{MODULE}:{name}", "--steps", "5")
    assert told.code == 2 and re.search(message, told.out), told
    Path("c.yaml").write_text(yaml.safe_dump(CONFIG | {"environment": {"id": f"{MODULE}:{name}"}}))
    told = stagecoach("check", "c.yaml", "--steps", "5")
    assert told.code == 2 and re.search(message, told.out), told
    check_refused(stagecoach("train", "c.yaml"), re.search(message, told.out)[0])  # type: ignore[index]


@pytest.mark.parametrize("vectorization", ["sync", "async"])
def test_rewards_of_one_element_are_numbers(vectorization: str) -> None:
    environment = {"id": f"{MODULE}:PaysAnArray", "num_envs": 2, "vectorization": vectorization}
    config = minimal_config(environment=environment)
    with closing(make_vector(config.environment, describe_environment(config))) as vector:
        vector.reset([1, 2])
        step = vector.step({"default": {"action": np.zeros(2, np.int64)}})
    assert step.policies["default"].reward.tolist() == [0.5, 0.5]
