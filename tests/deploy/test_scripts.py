"""The shell scripts of deploy/: shellcheck finds nothing, and each does its work for real, over real servers."""

from __future__ import annotations

import contextlib
import getpass
import json
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest
import redis
import yaml

from stagecoach.coordinator.services.embedded import free_port, new_secret
from stagecoach.shared.base.address import Address
from stagecoach.shared.config.loading import load_config
from stagecoach.shared.protocol.flow_control import Flow, RunState
from stagecoach.shared.protocol.keys import RunKeys
from stagecoach.shared.storage.checkpoint_store import FINISHED, CheckpointStore
from stagecoach.shared.storage.object_store import open_store
from tests.support.processes.command_line import DEADLINE_SECONDS, check_ledger
from tests.support.processes.waiting import eventually

ROOT = Path(__file__).parent.parent.parent
DEPLOY = ROOT / "deploy"
SSHD = shutil.which("sshd", path=f"{os.environ['PATH']}:/usr/sbin")
RUN = "by-script"


def test_shellcheck_finds_nothing() -> None:
    files = [path for path in DEPLOY.iterdir() if path.is_file()]
    scripts = [str(path) for path in files if path.read_text().startswith("#!/usr/bin/env bash")]
    assert len(scripts) > 3
    command = [str(Path(sys.executable).with_name("shellcheck")), "--shell=bash", *scripts]
    done = subprocess.run(command, capture_output=True, text=True)
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")


@dataclass(frozen=True)
class Head:
    """A machine's services by services.sh, and a shell with the environment that they and the roles need."""

    folder: Path
    environ: dict[str, str]

    def bash(self, script: str, *arguments: str, **environ: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            ["bash", str(DEPLOY / script), *arguments], cwd=self.folder, env={**os.environ, **self.environ, **environ},
            stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=2 * DEADLINE_SECONDS,
        )  # fmt: skip

    def checkpoints(self) -> CheckpointStore:
        keys = {"s3_access_key": "AWS_ACCESS_KEY_ID", "s3_secret_key": "AWS_SECRET_ACCESS_KEY"}
        secrets = self.folder / "keys.json"
        secrets.write_text(json.dumps({name: self.environ[variable] for name, variable in keys.items()}))
        url, endpoint = self.environ["STAGECOACH__STORE__URL"], self.environ["STAGECOACH__STORE__ENDPOINT_URL"]
        config = load_config(self.folder / "code" / "config.yaml", environ={})
        return CheckpointStore(open_store(Address(RUN, "", url, endpoint, str(secrets)), config), RUN)

    def client(self, user: str) -> redis.Redis:
        password = self.environ[f"STAGECOACH_{user.upper()}_REDIS_PASSWORD"]
        return redis.Redis.from_url(self.environ["STAGECOACH__REDIS__URL"], username=user, password=password)

    def write_environment(self, *without: str) -> Path:
        """Settings as cluster.env.example shows them."""
        path = self.folder / "stagecoach.env"
        path.write_text("".join(f"{name}={value}\n" for name, value in self.environ.items() if name not in without))
        return path


@pytest.fixture
def head(tmp_path: Path) -> Iterator[Head]:
    users = ("WORKER", "EVALUATOR", "TRAINER", "COORDINATOR", "VIEWER")
    environ = {f"STAGECOACH_{user}_REDIS_PASSWORD": new_secret() for user in users} | {
        "AWS_ACCESS_KEY_ID": new_secret(), "AWS_SECRET_ACCESS_KEY": new_secret(),
        "STAGECOACH__REDIS__URL": f"redis://127.0.0.1:{free_port()}/0",
        "STAGECOACH__STORE__URL": "s3://stagecoach/experiments",
        "STAGECOACH__STORE__ENDPOINT_URL": f"http://127.0.0.1:{free_port()}",
        "STAGECOACH_SERVICES": str(tmp_path / "services"), "STAGECOACH_PYTHON": sys.executable,
        "PYTHONPATH": str(ROOT / "src"),
    }  # fmt: skip
    config = {
        "environment": {"id": "CartPole-v1", "num_envs": 4},
        "rollout": {"fragment_steps": 32, "fragments_per_update": 2, "max_policy_lag": 1},
        "algorithm": {"minibatch_size": 128, "epochs": 2},
        "checkpoint": {"every": "20 updates"}, "evaluation": {"episodes": 2},
        "stop_at": {"updates": 10**6}, "trainer": {"grace_seconds": 100},
    }  # fmt: skip
    (tmp_path / "code").mkdir()
    (tmp_path / "code" / "config.yaml").write_text(yaml.safe_dump(config))
    head = Head(tmp_path, environ)
    yield head
    head.bash("services.sh", "stop")


def test_head_services_start_once_and_stop(head: Head) -> None:
    began = head.bash("services.sh", "start", "redis", "s3")
    assert began.returncode == 0, began
    services = head.folder / "services"
    pids = [(services / f"{name}.pid").read_text() for name in ("redis", "s3")]
    assert head.bash("services.sh", "start", "redis", "s3").returncode == 0
    assert [(services / f"{name}.pid").read_text() for name in ("redis", "s3")] == pids

    with head.client("worker") as client:
        assert client.ping()
        with pytest.raises(redis.exceptions.NoPermissionError):
            client.config_get("appendonly")
    assert list((services / "redis").glob("appendonlydir/*.aof"))
    assert list(head.checkpoints().store.keys("")) == [], "the bucket is there"

    assert services.stat().st_mode & 0o077 == 0
    secrets = [value for name, value in head.environ.items() if "PASSWORD" in name or "KEY" in name]
    for pid in pids:
        command = Path(f"/proc/{pid.strip()}/cmdline").read_text()
        assert [secret for secret in secrets if secret in command] == []
    logs = "".join(path.read_text() for path in services.glob("*.log")) + began.stdout + began.stderr
    assert [secret for secret in secrets if secret in logs] == []

    assert head.bash("services.sh", "stop").stdout.split("\n")[:2] == ["redis has ended", "s3 has ended"]
    with pytest.raises(redis.ConnectionError), head.client("worker") as client:
        client.ping()


@pytest.mark.parametrize(
    ("changes", "arguments", "said"),
    [
        ({"STAGECOACH__REDIS__URL": "rediss://127.0.0.1:6380/0"}, ("start", "redis"), "is not redis://HOST:PORT/0"),
        ({"STAGECOACH__STORE__URL": "file:///tmp"}, ("start", "s3"), "is not s3://BUCKET/PREFIX"),
        ({"AWS_SECRET_ACCESS_KEY": ""}, ("start", "s3"), "no S3 server without keys"),
        ({}, ("start",), "redis, s3, or both"),
        ({}, ("restart",), "usage"),
    ],
)
def test_missing_tool_of_a_head_is_named(
    head: Head, changes: dict[str, str], arguments: tuple[str, ...], said: str
) -> None:
    done = head.bash("services.sh", *arguments, **changes)
    assert (done.returncode, done.stderr.count("\n")) == (2, 1), done
    assert said in done.stderr


def test_taken_port_is_reported_with_the_servers_message(head: Head) -> None:
    assert head.bash("services.sh", "start", "redis").returncode == 0
    other = head.bash("services.sh", "start", "redis", STAGECOACH_SERVICES=str(head.folder / "others"))
    assert other.returncode == 1
    assert "Address already in use" in other.stderr


@pytest.fixture
def sshd(tmp_path: Path) -> Iterator[str]:
    """An SSH server of our own on loopback; answers the command that reaches it."""
    if SSHD is None:
        pytest.skip("no sshd (Debian: openssh-server)")
    for name in ("host", "user"):
        subprocess.run(["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", str(tmp_path / name)], check=True)
    home, port = tmp_path / "home", free_port()
    home.mkdir()
    lines = [
        f"Port {port}", "ListenAddress 127.0.0.1", f"HostKey {tmp_path}/host", f"AuthorizedKeysFile {tmp_path}/user.pub",  # noqa: E501
        "PidFile none", "UsePAM no", "StrictModes no", "PasswordAuthentication no", "MaxStartups 100",
        f"ForceCommand export HOME={home} && cd && exec bash -c \"$SSH_ORIGINAL_COMMAND\"",
    ]  # fmt: skip
    (tmp_path / "sshd_config").write_text("\n".join(lines) + "\n")
    if os.geteuid() == 0:
        Path("/run/sshd").mkdir(mode=0o755, exist_ok=True)
    process = subprocess.Popen([SSHD, "-D", "-e", "-f", str(tmp_path / "sshd_config")], stderr=subprocess.DEVNULL)
    reach = (
        f"ssh -i {tmp_path}/user -p {port} -l {getpass.getuser()} -o StrictHostKeyChecking=no "
        f"-o UserKnownHostsFile=/dev/null -o LogLevel=ERROR"
    )
    try:
        eventually(lambda: not subprocess.run([*reach.split(), "127.0.0.1", "true"], capture_output=True).returncode)
        yield reach
    finally:
        process.kill()
        process.wait()


@pytest.mark.cluster
@pytest.mark.timeout(600)
def test_ssh_run_trains_detaches_resumes_and_ends(head: Head, sshd: str) -> None:
    assert head.bash("services.sh", "start", "redis", "s3").returncode == 0
    environ = {
        "SSH": sshd, "TRAINER_HOST": "127.0.0.1", "WORKER_HOSTS": "127.0.0.1", "WORKERS_PER_HOST": "2",
        "STAGECOACH_ENV": str(head.write_environment()), "REMOTE_PYTHON": sys.executable,
    }  # fmt: skip
    path, store = str(head.folder / "code" / "config.yaml"), head.checkpoints()
    try:
        began = head.bash("ssh.sh", "start", path, RUN, **environ)
        assert began.returncode == 0, began
        assert began.stdout.count(" runs on ") == 4
        assert (head.folder / "home" / "stagecoach-runs" / RUN / "stagecoach.env").stat().st_mode & 0o077 == 0
        with head.client("coordinator") as client:
            learned = Flow(client, RUN).read
            eventually(lambda: learned().version > 3, 150)
            eventually(lambda: len(client.hkeys(RunKeys(RUN).incarnations)) == 2, 150)
            twice = head.bash("ssh.sh", "start", path, RUN, **environ)
            assert (twice.returncode, "already has a run" in twice.stderr) == (2, True), twice

            assert head.bash("ssh.sh", "leave", RUN, **environ).stdout.count(" leaves") == 4
            eventually(lambda: not roles_left(), 150)
            version = learned().version
            assert store.newest_good()[0].manifest.name.startswith(f"{version}_")
            assert store.marker(FINISHED) is None

            assert head.bash("ssh.sh", "again", path, RUN, **environ).returncode == 0
            eventually(lambda: learned().version > version, 150)
            Flow(client, RUN).set_state(RunState.STOPPING, "stopped", expected=RunState.RUNNING)
            mark = eventually(lambda: store.marker(FINISHED), 150)
            eventually(lambda: not roles_left(), 150)
        assert mark is not None and mark["reason"] == "stopped"
        check_ledger(mark)
        said = head.bash("ssh.sh", "logs", RUN, **environ).stdout.split("== ")
        assert {part.split("\n")[0] for part in said[1:]} == {"trainer", "evaluator", "worker-0", "worker-1"}
        assert any(part.startswith("trainer") and part.endswith("\nstopped\n") for part in said), said
    finally:
        end_roles()


SRUN = """#!/usr/bin/env bash
# As SLURM's: one process for each task, each with its number; a signal goes to all.
shift
for number in $(seq 0 $((SLURM_NTASKS - 1))); do SLURM_PROCID=$number "$@" & done
trap 'kill -TERM $(jobs -p)' TERM
for task in $(jobs -p); do wait "$task" || code=$?; done
exit "${code:-0}"
"""
"""Stands in for SLURM alone; Redis, store and roles are real."""


@pytest.mark.cluster
@pytest.mark.timeout(300)
def test_slurm_job_trains_with_its_own_redis_and_folder(head: Head) -> None:
    path = head.folder / "code" / "config.yaml"
    path.write_text(yaml.safe_dump(yaml.safe_load(path.read_text()) | {"stop_at": {"updates": 8}}))
    own = ("STAGECOACH__REDIS__URL", "STAGECOACH__STORE__URL", "STAGECOACH__STORE__ENDPOINT_URL")
    (head.folder / "bin").mkdir()
    (head.folder / "bin" / "srun").write_text(SRUN)
    (head.folder / "bin" / "srun").chmod(0o755)
    port = next(port for port in iter(free_port, 0) if 20_000 <= port < 30_000)  # 20000 and the job's last four digits
    environ = {**os.environ} | {
        "CONFIG": str(path), "RUN": RUN, "STAGECOACH_ENV": str(head.write_environment(*own)),
        "STAGECOACH_DEPLOY": str(DEPLOY), "STAGECOACH_PYTHON": sys.executable, "PYTHONPATH": str(ROOT / "src"),
        "SLURM_JOB_ID": str(port), "SLURM_NTASKS": "4", "SLURM_SUBMIT_DIR": str(head.folder),
        "PATH": f"{head.folder}/bin:{os.environ['PATH']}",
    }  # fmt: skip
    try:
        done = subprocess.run(
            ["bash", str(DEPLOY / "slurm.sbatch")], cwd=head.folder, env=environ, stdin=subprocess.DEVNULL,
            capture_output=True, text=True, timeout=2 * DEADLINE_SECONDS,
        )  # fmt: skip
        assert done.returncode == 0, done
        assert not roles_left()
    finally:
        end_roles()
    folder = head.folder / "stagecoach-runs" / RUN
    mark = json.loads((folder / "store" / RUN / FINISHED).read_text())
    assert (mark["reason"], mark["version"]) == ("exhausted", 8)
    check_ledger(mark)
    assert not (folder / "services" / "redis.pid").exists()


def roles_left() -> list[int]:
    """Roles of this module's runs, and the shells that start them again."""
    found = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            with contextlib.suppress(OSError):
                words = (entry / "cmdline").read_bytes().split(b"\0")
                if RUN.encode() in words and ({b"rollout_worker", b"trainer_node", b"../role.sh"} & set(words)):
                    found.append(int(entry.name))
    return found


def end_roles() -> None:
    for pid in roles_left():
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)


def make_bucket(url: str, endpoint: str, access: str, secret: str) -> subprocess.CompletedProcess[str]:
    environ = {
        "STAGECOACH__STORE__URL": url, "STAGECOACH__STORE__ENDPOINT_URL": endpoint, "AWS_ACCESS_KEY_ID": access,
        "AWS_SECRET_ACCESS_KEY": secret,
    }  # fmt: skip
    return subprocess.run(
        [sys.executable, str(DEPLOY / "make_bucket.py")], env=os.environ | environ, capture_output=True, text=True
    )


def test_bucket_is_created_once_or_the_obstacle_is_named(s3_servers: dict[str, tuple[str, str, str]]) -> None:
    for server in ("rclone", "rclone", "moto", "moto"):
        made = make_bucket("s3://a-new-bucket/experiments", *s3_servers[server])
        assert (made.returncode, made.stdout) == (0, "bucket a-new-bucket is there\n"), made
    refused = make_bucket("s3://other/x", s3_servers["rclone"][0], "nobody", "nothing")
    assert (refused.returncode, refused.stderr.count("\n")) == (1, 1), refused
    said = make_bucket("file:///tmp", *s3_servers["rclone"]).stderr
    assert said == "Error: STAGECOACH__STORE__URL is not s3://BUCKET/PREFIX\n"
