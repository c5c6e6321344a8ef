"""The extras of pyproject.toml, and what of each may turn out to be missing: one wording for all of it."""

from __future__ import annotations

import re

EXTRAS = {
    "cluster": ("ray[default]",),
    "pettingzoo": ("pettingzoo",),
    "box2d": ("Box2D", "box2d"),
    "mujoco": ("mujoco",),
    "robotics": ("gymnasium_robotics",),
    "minatar": ("minatar", "MinAtar"),
    "atari": ("ale_py", "ALE", "cv2", "atari"),
    "envpool": ("envpool",),
    "data": ("h5py",),
    "onnx": ("onnx", "onnxruntime", "onnxscript"),
    "video": ("moviepy", "pygame", "classic_control", "toy_text", "other"),
}
"""Extra → modules, namespaces of environments, and extras of gymnasium that it brings."""
_MISSING = re.compile(r"gymnasium\[([\w-]+)\]|No module named '(\w+)|Namespace (\w+) not found")
_ADVICE = re.compile(r", (you can install it by )?run `pip install.*?gymnasium\[.*?`")


def install(extra: str) -> str:
    """What to type for it."""
    if extra not in EXTRAS:
        raise KeyError(extra)
    return f"pip install 'stagecoach[{extra}]'"


def with_extra(said: str) -> str:
    """An error's text in one line; where it names something missing that an extra brings, with how to install that."""
    said = " ".join(said.split())
    found = _MISSING.search(said)
    name = next(filter(None, found.groups()), "").replace("-", "_") if found else ""
    extra = next((extra for extra, brings in EXTRAS.items() if name in brings), None)
    if extra is None or install(extra) in said:
        return said
    return f"{_ADVICE.sub('', said).rstrip('. ')}; {install(extra)} brings it"
