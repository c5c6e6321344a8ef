"""Runs on a cluster, started from another machine: the coordinator is the driver of a Ray job.

What travels: the folder of the config (the user's own environment with it), Stagecoach's code as it is here, and the
command line. What does not: secrets; the cluster's machines have their own in their environment. A job whose machine
has died is submitted again, with `--or-resume`.
"""

from __future__ import annotations

import atexit
import contextlib
import logging
import os
import shlex
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from coordinator.coordinator import Outcome
from coordinator.elsewhere import Elsewhere, Submission
from coordinator.run_folder import RunFolder
from coordinator.services import free_port
from coordinator.status import Status, ended_status
from shared.checkpoint import CheckpointStore
from shared.child import child_environment, end_with_parent
from shared.config import Config
from shared.config_sources import ENV_PREFIX
from shared.errors import StagecoachError, UserError, WaitTimeout
from shared.extras import install
from shared.failure import Failure, FailureKind, RunEnd
from shared.heartbeat import Wait, poll
from shared.object_store import open_store
from trainer_node.snapshot import CODE_VERSION, code_version

OR_RESUME = "--or-resume"
PACKAGES = ("coordinator", "rollout_worker", "trainer_node", "shared")
"""All of Stagecoach's code."""
_EXCLUDES = [".?*", "*.env", "__pycache__", "*.pyc", "runs"]
"""Stays here: what is hidden (keys, tokens, .git, .venv; for `.*` alone Ray would leave out all), files of secrets,
caches, and the runs of this machine."""
_MOST_BYTES = 90 << 20
"""Ray's job server takes 100 MiB, compressed."""
_RUNS_DIR = "~/stagecoach-runs"
"""On the cluster: the folder that a job works in is gone some time after it."""
_CONNECT_SECONDS = 5.0
_TUNNEL_SECONDS = 60.0
_LIVE_SECONDS = 600.0
"""The cluster may have to install the job's packages, and Ray to find a place for its driver."""
_STARTING_SECONDS = 180.0
"""After so long a job that runs while nobody beats for its run is taken for dead."""
_STOP_SECONDS = 60
_LOOK_SECONDS = 0.5
_GONE_LOOKS = 20
_ENDED = {"SUCCEEDED", "FAILED", "STOPPED"}


def submission(
    cluster: str,
    config: Path,
    sets: Sequence[str],
    run_id: str,
    working_dir: Path | None = None,
    or_resume: bool = False,
) -> Submission:
    """The job for `stagecoach train CONFIG`; raises `UserError` where the config is not in the folder that travels."""
    folder = (working_dir or config.parent).resolve()
    try:
        name = config.resolve().relative_to(folder)
    except ValueError:
        raise UserError(f"{config} is not in --working-dir {folder}, so it would not travel with the run") from None
    _refuse_large(folder)
    cluster = str(Path(cluster).resolve()) if Path(cluster).is_file() else cluster
    given = [f"runs_dir={_RUNS_DIR}", *_from_environment(), *sets, "ray.address=auto"]
    command = ["train", str(name), *(f"--set={item}" for item in given), "--run-id", run_id]
    command += [OR_RESUME] if or_resume else []
    return Submission(cluster, str(folder), tuple(command))


def _refuse_large(folder: Path) -> None:
    """A config that lies in somebody's home would take all of it along."""
    size = 0
    for path, folders, files in os.walk(folder):
        folders[:] = [name for name in folders if not name.startswith(".") and name not in _EXCLUDES]
        names = [Path(path, name) for name in files if not name.startswith(".")]
        size += sum(name.stat().st_size for name in names if name.is_file())
        if size > _MOST_BYTES:
            raise UserError(
                f"the folder {folder} would travel to the cluster, and holds more than {_MOST_BYTES >> 20} MiB; put "
                f"the config (and the modules it needs) into a folder of its own, or name one with --working-dir"
            )


def _from_environment() -> Iterator[str]:
    """This machine's STAGECOACH__… variables, which no machine of the cluster has."""
    for name, value in sorted(os.environ.items()):
        if name.startswith(ENV_PREFIX) and name != f"{ENV_PREFIX}RUNS_DIR":
            yield f"{name.removeprefix(ENV_PREFIX).replace('__', '.').lower()}={value}"


class JobServer:
    """Ray's job server, by its address or through the cluster file that leads to it."""

    def __init__(self, cluster: str) -> None:
        self._open = ExitStack()
        atexit.register(self.close)  # who detaches leaves it open; `ray dashboard` does not end its own ssh
        try:
            self.url = self._tunnel(Path(cluster)) if Path(cluster).is_file() else cluster
            self._client: Any = _client(self.url)
        except BaseException:
            self._open.close()
            raise

    def close(self) -> None:
        """Lets go of the tunnel."""
        self._open.close()

    def submit(self, sent: Submission, name: str) -> str:
        """Starts the job; answers its id. Raises `UserError` where the folder is too large, or the cluster refuses."""
        environment = {
            CODE_VERSION: code_version(),
            "RAY_JOB_STOP_WAIT_TIME_S": str(_STOP_SECONDS),  # a last checkpoint takes longer than Ray's three seconds
        }
        source = Path(__file__).parent.parent
        logging.disable(logging.INFO)  # Ray tells of each package that it uploads
        try:
            return str(
                self._client.submit_job(
                    entrypoint=shlex.join(["python", "-P", "-m", "coordinator.cli", *sent.command]),
                    submission_id=f"{name}-{os.urandom(2).hex()}",
                    runtime_env={
                        "working_dir": sent.working_dir,
                        "py_modules": [str(source / package) for package in PACKAGES],
                        "excludes": _EXCLUDES,
                        "env_vars": environment,
                    },
                    metadata={"stagecoach_run": name},
                )
            )
        except Exception as error:  # Ray raises whatever its parts raise
            raise UserError(f"{self.url} does not take the job: {_line(error)}") from None
        finally:
            logging.disable(logging.NOTSET)

    def state(self, job: str) -> tuple[str, int | None]:
        """PENDING, RUNNING, SUCCEEDED, FAILED or STOPPED; and the driver's exit code. Raises `StagecoachError`."""
        found = self._about(job)
        return found.status.value, found.driver_exit_code

    def _about(self, job: str) -> Any:
        try:
            return self._client.get_job_info(job)
        except (RuntimeError, OSError) as error:  # what requests raises is an OSError
            raise StagecoachError(f"{self.url} does not tell of job {job}: {_line(error)}") from None

    def starts(self, job: str) -> bool:
        """Whether it may still be about to begin its run.

        A cluster that was made anew does not know it; and one whose head was restarted calls a job RUNNING for ever
        whose driver has died with the former head.
        """
        try:
            found = self._about(job)
        except StagecoachError:
            return False
        age = time.time() - (found.start_time or 0) / 1000
        return found.status.value not in _ENDED and age < _STARTING_SECONDS

    def said(self, job: str) -> str:
        """All that the job has printed, as far as its machine still has it."""
        try:
            return str(self._client.get_job_logs(job))
        except (RuntimeError, OSError):
            return ""

    def stop(self, job: str) -> None:
        """Asks it to end (SIGTERM), and ends it a minute later; raises `StagecoachError`."""
        try:
            self._client.stop_job(job)
        except (RuntimeError, OSError) as error:
            raise StagecoachError(f"{self.url} does not stop job {job}: {_line(error)}") from None

    def _tunnel(self, cluster: Path) -> str:
        """Forwards a port of this machine to the head's, as `ray dashboard` does; raises `UserError`."""
        port = free_port()
        ray = str(Path(sys.executable).with_name("ray"))
        process = subprocess.Popen(
            [ray, "dashboard", str(cluster), "--port", str(port)], stdin=subprocess.DEVNULL, stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT, text=True, start_new_session=True, preexec_fn=end_with_parent(signal.SIGTERM),
            env=child_environment("store", "ray"),  # Ray's launcher asks the cloud where the head is
        )  # fmt: skip
        self._open.callback(_end, process)
        said: list[str] = []
        assert process.stdout is not None
        threading.Thread(target=said.extend, args=(process.stdout,), name="tunnel", daemon=True).start()

        def through() -> bool:
            if process.poll() is not None:
                raise UserError(f"no way to the head of {cluster} (ray dashboard): {_line(' '.join(said[-5:]))}")
            return _answers("127.0.0.1", port)

        try:
            poll(Wait(f"a tunnel to the head of {cluster}", _TUNNEL_SECONDS), through)
        except WaitTimeout as error:
            raise UserError(f"{error}; is the cluster up? `ray up {cluster}` starts it") from None
        return f"http://127.0.0.1:{port}"


class JobCoordinator:
    """A run's coordinator that is a job: followed here, at work there."""

    def __init__(self, jobs: JobServer, job: str, folder: RunFolder, config: Config) -> None:
        self._jobs, self._job, self._folder, self._config = jobs, job, folder, config
        self._started = time.monotonic()
        self.outcome: Outcome | None = None
        self.first_event = "0-0"
        self._thread = threading.Thread(target=self._follow, name=f"job-{job}", daemon=True)

    def until_live(self) -> None:
        """Waits until the run trains; raises `UserError` or `StagecoachError` with what a job said that has ended."""
        marker, missed = f"run {self._folder.run_id}; its folder is", 0

        def live() -> bool:
            nonlocal missed
            try:
                (state, code), said = self._jobs.state(self._job), self._jobs.said(self._job)
                missed = 0
            except StagecoachError:  # a job server that is away for a while, as in `_follow`
                missed += 1
                if missed == _GONE_LOOKS:
                    raise
                return False
            if marker in said:
                return True
            if state in _ENDED:
                kind = UserError if code == 2 else StagecoachError
                raise kind(f"on the cluster: {self._last_words(state)}")
            return False

        poll(Wait("the job to start the run", _LIVE_SECONDS), live, _LOOK_SECONDS)
        self._thread.start()

    def abandon(self) -> None:
        """Ends the job, and with it the run, at once or within a minute; what is durable stays."""
        self._jobs.stop(self._job)

    def wait(self, timeout_seconds: float) -> Outcome:
        """Until the job has ended."""
        poll(Wait(f"run {self._folder.run_id} to end", timeout_seconds), lambda: self.outcome is not None, 0.05)
        assert self.outcome is not None
        return self.outcome

    def _follow(self) -> None:
        """Looks until the job has ended. A job server that is away for a while, or a laptop asleep, ends nothing."""
        state, missed = "RUNNING", 0
        while state not in _ENDED and missed < _GONE_LOOKS:
            time.sleep(_LOOK_SECONDS if not missed else 2.0)
            try:
                state, _ = self._jobs.state(self._job)
                missed = 0
            except StagecoachError:
                missed += 1
        self.outcome = self._ended(state)

    def _ended(self, state: str) -> Outcome:
        run_id = self._folder.run_id
        status = Status(run_id, "interrupted", "", False, -1, 0, 0, 0, None, "")
        try:
            address = self._folder.offline_address(self._config)
            status = ended_status(CheckpointStore(open_store(address, self._config), run_id))
            end = status.end
            if status.state != "finished":
                end = RunEnd.failed(Failure(FailureKind.OTHER, self._last_words(state)))
        except StagecoachError as error:
            end = RunEnd.failed(Failure(FailureKind.OTHER, f"{self._last_words(state)} ({error})"))
        return Outcome(end, status, time.monotonic() - self._started)

    def _last_words(self, state: str) -> str:
        """Its error, else the end of what it has printed."""
        if state not in _ENDED:
            return f"the job server does not answer any more; `stagecoach attach {self._folder.run_id}` looks again"
        said = self._jobs.said(self._job).strip().splitlines()
        errors = [line.removeprefix("Error: ") for line in said if line.startswith("Error: ")]
        tail = " | ".join(line.strip() for line in said[-3:])
        return errors[-1] if errors else f"job {self._job} ended as {state}; it says last: {tail}"


def submit_and_follow(folder: RunFolder, config: Config, sent: Submission) -> JobCoordinator:
    """Submits the run's job and waits until it trains; where its last job is just about to, follows that one.

    Raises `UserError` or `StagecoachError` with what the job said; a job that was begun is ended then.
    """
    known, jobs = folder.elsewhere, JobServer(sent.cluster)
    try:
        job = None if known is None else known.job
        if known is None or job is None or not jobs.starts(job):
            if known is not None and OR_RESUME not in sent.command:
                sent = replace(sent, command=(*sent.command, OR_RESUME))
            job = jobs.submit(sent, folder.run_id)
            before = known or Elsewhere()
            replace(before, submission=before.submission or sent, job=job).write(folder.path)
        coordinator = JobCoordinator(jobs, job, folder, config)
        try:
            coordinator.until_live()
        except BaseException:
            with contextlib.suppress(StagecoachError):  # it has ended, or cannot be reached
                coordinator.abandon()
            raise
    except BaseException:
        jobs.close()
        raise
    return coordinator


def _client(url: str) -> Any:
    """Connected, with the right token, and of the same Ray; raises `UserError`."""
    import ray

    try:
        import requests
        from ray.job_submission import JobSubmissionClient
    except ImportError as error:
        raise UserError(f"submitting to a cluster needs more of Ray: {install('cluster')} ({error})") from None
    parts = urlsplit(url)
    if parts.scheme not in {"http", "https"} or not parts.hostname:
        raise UserError(
            f"--address {url}: expected Ray's dashboard (http://HEAD:8265; `ray dashboard CLUSTER.yaml` forwards its "
            f"port) or a cluster file"
        )
    if not _answers(parts.hostname, parts.port or (443 if parts.scheme == "https" else 80)):
        raise UserError(
            f"nobody answers at {url}: is the cluster up, and is its dashboard's port open from here? "
            f"`ray dashboard CLUSTER.yaml` forwards it"
        )
    try:
        client: Any = JobSubmissionClient(url)
        version = client._server_ray_version
    except ray.exceptions.AuthenticationError:
        raise UserError(
            f"{url} refuses the token: set RAY_AUTH_MODE=token, and RAY_AUTH_TOKEN (or ~/.ray/auth_token) as the "
            f"cluster has it"
        ) from None
    except (RuntimeError, ConnectionError, requests.RequestException, ValueError, KeyError, AttributeError) as error:
        raise UserError(f"{url} is not Ray's dashboard, or fails: {_line(error)}") from None
    if version != ray.__version__:
        raise UserError(
            f"Ray is {ray.__version__} here and {version} at {url}; install the same on both sides "
            f"(pip install 'ray[default]=={version}' here)"
        )
    return client


def _answers(host: str, port: int) -> bool:
    try:
        socket.create_connection((host, port), timeout=_CONNECT_SECONDS).close()
    except OSError:
        return False
    return True


def _end(process: subprocess.Popen[str]) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGTERM)
    process.wait()


def _line(error: object) -> str:
    return " ".join(str(error).split())[:500]
