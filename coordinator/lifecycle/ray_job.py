"""Runs on a cluster, submitted from another machine: the coordinator is the driver of a Ray job.

The job carries the config's folder (with the user's environment), this machine's Stagecoach code and the command line,
but no secrets: the cluster's machines have them in their environment. A job whose machine died is submitted again with
`--or-resume`.
"""

import atexit
import contextlib
import logging
import os
import re
import shlex
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from stagecoach.coordinator.catalog.run_files import RunStatus
from stagecoach.coordinator.catalog.run_folder import RemoteLink, RunFolder, Submission
from stagecoach.coordinator.catalog.status import Status, ended_status
from stagecoach.coordinator.lifecycle.supervisor import Outcome
from stagecoach.coordinator.services.embedded import free_port
from stagecoach.coordinator.services.ray_internals import server_version
from stagecoach.shared.base import world
from stagecoach.shared.base.code_version import CODE_VERSION, code_version
from stagecoach.shared.base.errors import PACKAGE, StagecoachError, UserError, WaitTimeout
from stagecoach.shared.base.failure import Failure, FailureKind, RunEnd
from stagecoach.shared.base.process import child_environment, end_with_parent
from stagecoach.shared.base.user_code import install
from stagecoach.shared.config.loading import ENV_PREFIX
from stagecoach.shared.config.run_config import Config
from stagecoach.shared.protocol.heartbeat import Wait, poll

OR_RESUME = "--or-resume"
EXCLUDES = [".?*", "*.env", "__pycache__", "*.pyc", "runs"]
"""Files that stay here: hidden files (keys, .git, .venv; Ray takes `.*` for everything), secrets, caches."""
_MOST_BYTES = 90 << 20
"""Below the 100 MiB, compressed, that Ray's job server accepts."""
_RUNS_DIR = "~/stagecoach-runs"
"""Folder of runs on the cluster; a job's working folder is deleted after it."""
_CONNECT_SECONDS = 5.0
_TUNNEL_SECONDS = 60.0
_SAID_SECONDS = 2.0
"""Timeout of the tunnel's output: an orphaned ssh may hold the pipe open."""
_SSH_FAILURE = re.compile(r"^ssh: |: Permission denied|^Host key verification")
"""Matches ssh's own messages, which Ray's guesses follow."""
_LIVE_SECONDS = 600.0
"""Time for the cluster to install packages and place the driver."""
_STARTING_SECONDS = 180.0
"""Age at which a job whose run has no heartbeats counts as dead."""
_STOP_SECONDS = 60
_POLL_SECONDS = 0.5
_GONE_POLLS = 20
_ENDED = {"SUCCEEDED", "FAILED", "STOPPED"}


def reachable(origin: str, runs_dir: Path) -> str:
    """Replaces a run known here in `initialize_from` by its URL in the store, which a cluster can read."""
    target, sign, policy_id = origin.partition("#")
    run_id, slash, name = target.partition("/")
    try:
        folder = RunFolder.find(run_id, runs_dir)
    except UserError:
        return origin  # a path, which may be in the folder that is sent
    config = folder.config()
    url = folder.offline_address(config).store_url
    if config.store.url == "embedded" and not url.startswith("s3://"):
        raise UserError(
            f"initialize_from={origin}: a cluster cannot read the store of run {run_id!r}, which is on this machine; "
            f"`stagecoach checkpoints export {run_id} DIR` next to the config, then set it to DIR/{run_id}"
        )
    return f"{url.rstrip('/')}/{run_id}{slash}{name}{sign}{policy_id}"


def submission(
    cluster: str, config: Path, sets: Sequence[str], run_id: str, working_dir: Path | None = None,
    or_resume: bool = False,
) -> Submission:  # fmt: skip
    """Builds the job for `stagecoach train CONFIG`; raises `UserError` if the config is outside the folder to send."""
    folder = (working_dir or config.parent).resolve()
    try:
        name = config.resolve().relative_to(folder)
    except ValueError:
        raise UserError(f"{config} is not in --working-dir {folder}, so it would not be sent with the run") from None
    size = 0
    for path, folders, files in os.walk(folder):
        folders[:] = [name for name in folders if not name.startswith(".") and name not in EXCLUDES]
        names = [Path(path, name) for name in files if not name.startswith(".")]
        size += sum(name.stat().st_size for name in names if name.is_file())
        if size > _MOST_BYTES:  # such as a home folder
            raise UserError(
                f"the folder {folder} would be sent to the cluster, and holds more than {_MOST_BYTES >> 20} MiB; move "
                f"the config (and the modules it needs) to a separate folder, or name one with --working-dir"
            )
    cluster = str(Path(cluster).resolve()) if Path(cluster).is_file() else cluster
    # this machine's STAGECOACH__… variables are not set on the cluster
    known = {name.removeprefix(ENV_PREFIX): value for name, value in os.environ.items() if name.startswith(ENV_PREFIX)}
    known.pop("RUNS_DIR", None)
    variables = [f"{name.replace('__', '.').lower()}={value}" for name, value in sorted(known.items())]
    given = [f"runs_dir={_RUNS_DIR}", *variables, *sets, "ray.address=auto"]
    command = ["train", str(name), *(f"--set={item}" for item in given), "--run-id", run_id]
    command += [OR_RESUME] if or_resume else []
    return Submission(cluster=cluster, working_dir=str(folder), command=tuple(command))


class JobServer:
    """Ray's job server, by its address or through the cluster file that leads to it."""

    def __init__(self, cluster: str) -> None:
        self._open = ExitStack()
        atexit.register(self.close)  # `--detach` leaves it open, and `ray dashboard` does not end its ssh
        try:
            self.url = self._tunnel(Path(cluster)) if Path(cluster).is_file() else cluster
            self._client: Any = job_client(self.url)
        except BaseException:
            self._open.close()
            raise

    def close(self) -> None:
        self._open.close()

    def submit(self, sent: Submission, name: str) -> str:
        """Submits the job; returns its id. Raises `UserError` if the cluster refuses it."""
        # a final checkpoint takes longer than Ray's default of three seconds
        environment = {CODE_VERSION: code_version(), "RAY_JOB_STOP_WAIT_TIME_S": str(_STOP_SECONDS)}
        logging.disable(logging.INFO)  # Ray logs each package that it uploads
        try:
            job: str = self._client.submit_job(
                entrypoint=shlex.join(["python", "-P", "-m", "stagecoach", *sent.command]),
                submission_id=f"{name}-{os.urandom(2).hex()}", metadata={"stagecoach_run": name},
                runtime_env={
                    "working_dir": sent.working_dir, "py_modules": [str(PACKAGE)], "excludes": EXCLUDES,
                    "env_vars": environment,
                },
            )  # fmt: skip
            return job
        except Exception as error:  # Ray's errors have no common base
            raise UserError(f"{self.url} rejects the job: {_line(error)}") from None
        finally:
            logging.disable(logging.NOTSET)

    def info(self, job: str) -> Any:
        """Ray's `JobDetails`: status, start time, the driver's exit code. Raises `StagecoachError`."""
        with self._asked(f"does not report job {job}"):
            return self._client.get_job_info(job)

    @contextlib.contextmanager
    def _asked(self, problem: str) -> Iterator[None]:
        try:
            yield
        except (RuntimeError, OSError) as error:  # what requests raises is an OSError
            raise StagecoachError(f"{self.url} {problem}: {_line(error)}") from None

    def starts(self, job: str) -> bool:
        """Returns whether the job may still start its run.

        A recreated cluster does not know the job, and a restarted head reports RUNNING forever for a job whose driver
        died with the former head.
        """
        try:
            found = self.info(job)
        except StagecoachError:
            return False
        age = world.unix_time() - (found.start_time or 0) / 1000
        return found.status.value not in _ENDED and age < _STARTING_SECONDS

    def logs(self, job: str) -> str:
        """Output of the job, if its machine still has it."""
        with contextlib.suppress(RuntimeError, OSError):
            return str(self._client.get_job_logs(job))
        return ""

    def stop(self, job: str) -> None:
        """Stops the job (SIGTERM, a minute later SIGKILL); raises `StagecoachError`."""
        with self._asked(f"does not stop job {job}"):
            self._client.stop_job(job)

    def _tunnel(self, cluster: Path) -> str:
        """Forwards a local port to the head by `ray dashboard`; raises `UserError`."""
        port = free_port()
        ray = str(Path(sys.executable).with_name("ray"))
        process = subprocess.Popen(
            [ray, "dashboard", str(cluster), "--port", str(port)], stdin=subprocess.DEVNULL, stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT, text=True, start_new_session=True, preexec_fn=end_with_parent(signal.SIGTERM),
            env=child_environment("store", "ray"),  # Ray's launcher asks the cloud for the head's address
        )  # fmt: skip
        said: list[str] = []

        def read() -> None:
            assert process.stdout is not None
            with process.stdout:
                said.extend(process.stdout)

        reader = world.Thread(target=read, name="tunnel", daemon=True)
        reader.start()

        @self._open.callback
        def end() -> None:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGTERM)
            process.wait()

        def through() -> bool:
            if process.poll() is not None:
                reader.join(_SAID_SECONDS)
                reasons = [line for line in said if _SSH_FAILURE.search(line)] or said[-5:]
                raise UserError(
                    f"cannot reach the head of {cluster} (ray dashboard): {_line(' '.join(reasons))}; is it up? "
                    f"`ray up {cluster}` starts it"
                )
            return _answers("127.0.0.1", port)

        try:
            poll(Wait(f"a tunnel to the head of {cluster}", _TUNNEL_SECONDS), through)
        except WaitTimeout as error:
            raise UserError(f"{error}; is the cluster up? `ray up {cluster}` starts it") from None
        return f"http://127.0.0.1:{port}"


class JobCoordinator:
    """Follows a run's coordinator that is a job on a cluster."""

    def __init__(self, jobs: JobServer, job: str, folder: RunFolder, config: Config) -> None:
        self._jobs, self._job, self._folder, self._config = jobs, job, folder, config
        self._started, self._missed = world.monotonic(), 0
        self.outcome: Outcome | None = None
        self.first_event = "0-0"

    def until_live(self) -> None:
        """Waits until the run trains; raises `UserError` or `StagecoachError` with the output of a failed job."""
        marker = f"run {self._folder.run_id}; its folder is"

        def live() -> bool:
            found = self._poll()
            if found is None or marker in self._jobs.logs(self._job):
                return found is not None
            if (state := found.status.value) in _ENDED:
                failed = UserError if found.driver_exit_code == 2 else StagecoachError
                raise failed(f"on the cluster: {self._exit_diagnostics(state)}")
            return False

        poll(Wait("the job to start the run", _LIVE_SECONDS), live, _POLL_SECONDS)
        world.Thread(target=self._follow, name=f"job-{self._job}", daemon=True).start()

    def _poll(self) -> Any:
        """Details of the job; None during a short outage of its server, `StagecoachError` after a long one."""
        try:
            found, self._missed = self._jobs.info(self._job), 0
        except StagecoachError:
            self._missed += 1
            if self._missed == _GONE_POLLS:
                raise
            return None
        return found

    def abandon(self) -> None:
        """Ends the job, and with it the run, within a minute; durable data stay."""
        self._jobs.stop(self._job)

    def _follow(self) -> None:
        """Polls until the job has ended; a short outage of the job server, or a sleeping laptop, does not matter."""
        state = "RUNNING"
        with contextlib.suppress(StagecoachError):
            while state not in _ENDED:
                world.sleep(2.0 if self._missed else _POLL_SECONDS)
                state = found.status.value if (found := self._poll()) is not None else state
        status, diagnostics = Status(self._folder.run_id), self._exit_diagnostics(state)
        try:
            status = ended_status(self._folder.checkpoint_store(self._config))
        except StagecoachError as error:
            diagnostics = f"{diagnostics} ({error})"
        finished = status.state is RunStatus.FINISHED
        end = status.end if finished else RunEnd.failed(Failure(FailureKind.OTHER, diagnostics))
        self.outcome = Outcome(end, status, world.monotonic() - self._started)

    def _exit_diagnostics(self, state: str) -> str:
        if state not in _ENDED:
            return f"the job server no longer answers; `stagecoach attach {self._folder.run_id}` tries again"
        lines = self._jobs.logs(self._job).strip().splitlines()
        errors = [line.removeprefix("Error: ") for line in lines if line.startswith("Error: ")]
        tail = " | ".join(line.strip() for line in lines[-3:])
        return errors[-1] if errors else f"job {self._job} ended as {state}; its output ends with: {tail}"


def submit_and_follow(
    folder: RunFolder, config: Config, sent: Submission, jobs: JobServer, once: tuple[str, ...] = (),
    replace: bool = False,
) -> JobCoordinator:  # fmt: skip
    """Submits the run's job and waits until it trains.

    Follows the run's last job if that may still start; with `replace`, waits for its end instead. `once` are arguments
    for this job only.

    Raises `UserError` or `StagecoachError` with the job's output, after ending a job that was submitted.
    """
    known = folder.remote
    with ExitStack() as undo:
        undo.callback(jobs.close)
        job = known.job if known else None
        if replace and (former := job) is not None:
            poll(Wait(f"job {former} to end", _STOP_SECONDS), lambda: not jobs.starts(former), _POLL_SECONDS)
        if job is None or not jobs.starts(job):
            if known is not None and OR_RESUME not in sent.command:
                sent = sent.model_copy(update={"command": (*sent.command, OR_RESUME)})
            job = jobs.submit(sent.model_copy(update={"command": (*sent.command, *once)}), folder.run_id)
            before = known or RemoteLink()
            before.model_copy(update={"submission": sent, "job": job}).write(folder.path)
            if known is not None:
                undo.callback(known.write, folder.path)
        coordinator = JobCoordinator(jobs, job, folder, config)
        try:
            coordinator.until_live()
        except BaseException:
            with contextlib.suppress(StagecoachError):  # it has ended, or is unreachable
                coordinator.abandon()
            raise
        undo.pop_all()
    return coordinator


def job_client(url: str) -> Any:
    """Connects a job client and checks its token and Ray version; raises `UserError`."""
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
            f"nothing answers at {url}: is the cluster up, and is its dashboard's port open from here? "
            f"`ray dashboard CLUSTER.yaml` forwards it"
        )
    try:
        client: Any = JobSubmissionClient(url)
        version = server_version(client)
    except ray.exceptions.AuthenticationError:
        raise UserError(
            f"{url} refuses the token: set RAY_AUTH_MODE=token, and RAY_AUTH_TOKEN (or ~/.ray/auth_token) to the "
            f"cluster's token"
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


def _line(error: object) -> str:
    return " ".join(str(error).split())[:500]
