"""Names of checkpoints: `12_Step-24576.ckpt`."""

import re
from typing import Annotated

from pydantic import Field

_NAME = re.compile(r"(\d+)_Step-(\d+)\.ckpt")
CheckpointName = Annotated[str, Field(pattern=rf"^{_NAME.pattern}$")]


def checkpoint_name(version: int, env_steps: int) -> str:
    """Returns `12_Step-24576.ckpt`: policy version and env steps trained on."""
    return f"{version}_Step-{env_steps}.ckpt"


def checkpoint_version(name: str) -> int | None:
    """Returns the policy version in a checkpoint's name; None for any other folder."""
    match = _NAME.fullmatch(name)
    return int(match[1]) if match else None


def checkpoint_env_steps(name: str) -> int:
    """Returns the env steps in a checkpoint's name; 0 for any other folder."""
    match = _NAME.fullmatch(name)
    return int(match[2]) if match else 0
