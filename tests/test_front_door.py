"""`stagecoach`, the front door: what users import, and nothing before it is used."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

import stagecoach

ROOT = Path(__file__).parent.parent
PRIVATE = re.compile(r"^\s*(?:from|import) (?:coordinator|rollout_worker|trainer_node|shared)\b.*", re.MULTILINE)


def test_import_loads_neither_torch_nor_ray_nor_a_client() -> None:
    code = "import stagecoach, sys; print(sorted({name.partition('.')[0] for name in sys.modules}))"
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True)
    assert "stagecoach" in done.stdout
    for heavy in ("torch", "ray", "redis", "boto3", "numpy", "pydantic", "shared", "coordinator"):
        assert f"'{heavy}'" not in done.stdout


def test_promised_names_exist() -> None:
    missing = [name for name in stagecoach.__all__ if not hasattr(stagecoach, name)]
    assert missing == []
    assert dir(stagecoach) == sorted(stagecoach.__all__)


@pytest.mark.parametrize(
    ("name", "said"),
    {
        "Trainer": "it has .*DQN, .*load_policy",
        "load_polic": r"did you mean load_policy\?",
        "make_vec_env": "name the environment: stagecoach.train",
        "EvalCallback": "evaluation is on by default",
        "evaluate_policy": "run.evaluate",
    }.items(),
)
def test_unknown_name_is_an_error_with_a_hint(name: str, said: str) -> None:
    with pytest.raises(AttributeError, match=f"{name!r}; {said}"):
        getattr(stagecoach, name)


@pytest.mark.parametrize(
    ("thing", "name", "said"),
    [
        (stagecoach, "register_env", "give the class or function itself"),
        (stagecoach.PPOConfig(), "environment", r"PPOConfig is a section of a config; stagecoach\.train\("),
        (stagecoach.PPOConfig(), "nothing", "no attribute 'nothing'"),
        (object.__new__(stagecoach.Run), "train", "a run has no 'train'; a run trains by itself"),
        (object.__new__(stagecoach.Run), "nothing", "a run has no 'nothing'$"),
    ],
)
def test_names_of_rllib_lead_on(thing: object, name: str, said: str) -> None:
    with pytest.raises(AttributeError, match=said):
        getattr(thing, name)


def test_learner_called_as_in_stable_baselines3_names_train() -> None:
    with pytest.raises(TypeError, match=r"PPO is the class of a loss.*stagecoach\.train\("):
        stagecoach.PPO("MlpPolicy", "CartPole-v1", n_steps=128)  # type: ignore[arg-type, call-arg]


@pytest.mark.parametrize("folder", ["examples", "docs", "."])
def test_users_are_shown_no_private_import(folder: str) -> None:
    pages = [*(ROOT / folder).glob("*.py" if folder == "examples" else "*.md")]
    found = [f"{page.name}: {line}" for page in pages for line in PRIVATE.findall(page.read_text())]
    assert pages
    assert found == []
