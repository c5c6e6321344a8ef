"""Roles as processes of their own, for tests that end them or that they end themselves in."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

from stagecoach.shared.base.address import credentials, s3_keys
from stagecoach.shared.config.loading import dump_config
from stagecoach.shared.protocol.events import read_events
from stagecoach.shared.runtime.run_context import RunContext


def start_process(role: RunContext, folder: Path, module: str, *arguments: str) -> subprocess.Popen[str]:
    path = folder / "config.yaml"
    path.write_text(dump_config(role.config))
    address = role.address
    access_key, secret_key = s3_keys(address)
    command = [sys.executable, "-m", module, role.run_id, "--redis", address.redis_url, "--store", address.store_url]
    command += ["--endpoint-url", address.endpoint_url] if address.endpoint_url else []
    secrets = {
        "STAGECOACH_REDIS_PASSWORD": credentials(address).redis_password,
        "AWS_ACCESS_KEY_ID": access_key,
        "AWS_SECRET_ACCESS_KEY": secret_key,
    }
    return subprocess.Popen(
        [*command, "--config", str(path), *arguments], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
        env={**os.environ, **{name: value for name, value in secrets.items() if value}},
    )  # fmt: skip


def ended(process: subprocess.Popen[str], seconds: float = 100.0) -> subprocess.CompletedProcess[str]:
    """Waits for it; ends it where it does not end."""
    try:
        out, err = process.communicate(timeout=seconds)
    except subprocess.TimeoutExpired:
        process.kill()
        raise
    return subprocess.CompletedProcess(process.args, process.returncode, out, err)


def events(role: RunContext) -> str:
    return "\n".join(event.text for event in read_events(role.redis, role.run_id))
