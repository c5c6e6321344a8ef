"""Each way to deploy installs Stagecoach from exactly what it carries, by its own commands."""

from __future__ import annotations

import fnmatch
import json
import os
import re
import shlex
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import yaml

from stagecoach.coordinator.lifecycle.ray_job import EXCLUDES
from tests.support.processes.installation import BUILD, LINKED, ROOT, TRAVELING, Machine, copy
from tests.support.suite.groups import some_quick

DEPLOY = ROOT / "deploy"
CLUSTER_FILES = ("local.yaml", "aws.yaml", "gcp.yaml")
ROLES = ("WORKER", "EVALUATOR", "TRAINER", "COORDINATOR", "VIEWER")
_INSTALLED = """
import importlib.metadata as metadata, json
print(json.dumps([str(path) for path in metadata.distribution("stagecoach-rl").files]))
"""


def by_cluster_file(name: str) -> Callable[[Machine], Path]:
    """`ray up`: copies `file_mounts`, then runs `setup_commands`."""

    def install(machine: Machine) -> Path:
        for tool in ("sudo", "cloud-init"):  # only a cloud's machines have them
            machine.add_tool(tool, "exit 0")
        cluster = yaml.safe_load((DEPLOY / name).read_text())
        for there, here in cluster["file_mounts"].items():
            if here.startswith("~"):  # the user's own secrets
                (machine.home / here[2:]).parent.mkdir(exist_ok=True)
                (machine.home / here[2:]).touch()
            else:
                copy(here, machine.home / there[2:])
        for command in cluster["setup_commands"]:
            machine.run(command)
        return machine.home / "stagecoach"

    return install


def by_image(machine: Machine) -> Path:
    """`docker build`: COPY takes what .dockerignore lets through; of RUN, what pip does."""
    folder, arguments = machine.home, dict[str, str]()
    text = (DEPLOY / "Dockerfile").read_text().replace("\\\n", "")
    for word, rest in re.findall(r"^(ARG|WORKDIR|COPY|RUN) (.*)$", text, re.MULTILINE):
        if word == "ARG":
            name, _, value = rest.partition("=")
            arguments[name] = value.strip('"')
        elif word == "WORKDIR" and (name := rest.lstrip("/")) == "opt/stagecoach":
            folder = machine.home / name
        elif word == "COPY":
            for path in build_context():
                if path.is_relative_to(rest.split()[0]):
                    copy(str(path), folder / path)
        elif rest.startswith("pip "):
            machine.run(rest, folder, arguments)
    return folder


def build_context() -> Iterator[Path]:
    """The files that .dockerignore lets through, whose last matching rule decides. No rule here enters a folder that an
    earlier one leaves out."""
    rules = (ROOT / ".dockerignore").read_text().split()

    def kept(path: Path) -> bool:
        matching = [rule for rule in rules if any(matches(part, rule) for part in (path, *path.parents[:-1]))]
        return not matching or matching[-1].startswith("!")

    def matches(path: Path, rule: str) -> bool:
        anywhere, name = re.fullmatch(r"!?(\*\*/)?(.*)", rule).groups()  # type: ignore[union-attr]
        return fnmatch.fnmatch(path.name if anywhere else str(path), name)

    for path, folders, files in os.walk(ROOT):
        here = Path(path).relative_to(ROOT)
        folders[:] = [name for name in folders if kept(here / name)]
        links = [name for name in folders if (ROOT / here / name).is_symlink()]
        yield from (here / name for name in (*files, *links) if kept(here / name))


def by_slurm(machine: Machine) -> Path:
    """The line in slurm.sbatch's comment, in a folder with what a source distribution holds."""
    for name in TRAVELING:
        copy(name, machine.home / "checkout" / name)
    (line,) = re.findall(r"^# +(python3 -m venv .*)$", (DEPLOY / "slurm.sbatch").read_text(), re.MULTILINE)
    # the stand-in made it already, with what takes minutes to install
    machine.add_tool("python3", f'test "$*" = "-m venv {machine.environment}"')
    machine.run(line, machine.home / "checkout")
    return machine.home / "checkout"


def by_ssh(machine: Machine) -> None:
    """`ssh.sh install`, with `ssh` to this machine itself."""
    machine.add_tool("ssh", 'cd && exec sh -c "$4"')  # ssh -o BatchMode=yes HOST COMMAND
    hosts = {"TRAINER_HOST": "here", "WORKER_HOSTS": "here", "STAGECOACH_PYTHON": sys.executable}
    machine.run(f"{DEPLOY}/ssh.sh install", environ=hosts)


WAYS: dict[str, Callable[[Machine], Path | None]] = {
    **{name: by_cluster_file(name) for name in CLUSTER_FILES},
    "Dockerfile": by_image, "slurm.sbatch": by_slurm, "ssh.sh": by_ssh,
}  # fmt: skip


@pytest.mark.parametrize("way", some_quick(WAYS, "local.yaml", "Dockerfile"))
def test_deployment_installs_everything_by_its_own_commands(way: str, tmp_path: Path, wheels: Path) -> None:
    machine = Machine(tmp_path / "home", wheels)
    carried = WAYS[way](machine)
    python = machine.environment / "bin" / "python"
    installed = set(json.loads(machine.run(f"{python} -c {shlex.quote(_INSTALLED)}")))
    places = {"src/stagecoach": "stagecoach"} | {name: f"stagecoach/{name}" for name in LINKED}
    places["examples"] = "stagecoach/coordinator/presets"
    needed = {
        f"{place}/{path.relative_to(ROOT / name)}" for name, place in places.items()
        for path in (ROOT / name).rglob("*") if path.is_file() and "__pycache__" not in path.parts
    }  # fmt: skip
    assert needed - installed == set()
    assert str(machine.environment) in machine.run(f"cd / && {python} -c 'import stagecoach as at; print(at.__file__)'")
    assert "id: CartPole-v1" in machine.run("stagecoach config cartpole")
    if carried is not None:
        passwords = {f"STAGECOACH_{role}_REDIS_PASSWORD": f"{role}-0123456789" for role in ROLES}
        assert "user worker on" in machine.run(f"{python} {carried}/deploy/make_acl.py", environ=passwords)


def test_traveling_files_are_those_of_a_source_distribution() -> None:
    ignore = (ROOT / ".dockerignore").read_text().split()
    assert sorted(ignore[1:-1]) == sorted(f"!{name}" for name in TRAVELING)
    assert (ignore[0], ignore[-1]) == ("*", "**/__pycache__")
    for file in CLUSTER_FILES:
        mounts = yaml.safe_load((DEPLOY / file).read_text())["file_mounts"]
        secrets = {"~/stagecoach.env": "~/stagecoach.env", "~/.ray/auth_token": "~/.ray/auth_token"}
        assert mounts == secrets | {f"~/stagecoach/{name}": name for name in TRAVELING}, file
    assert BUILD["wheel"]["packages"] == ["src/stagecoach"], "a Ray job takes it along"


def test_ray_job_leaves_no_module_behind() -> None:
    """What a job excludes from the user's folder, it excludes from ours as well."""
    names = {name for folder in LINKED for path in (ROOT / folder).rglob("*.py") for name in path.parts}
    assert {"coordinator", "run_access"} <= names
    assert [name for name in names for pattern in EXCLUDES if fnmatch.fnmatch(name, pattern)] == []


def test_files_that_deployments_name_travel() -> None:
    texts = {path: path.read_text() for path in DEPLOY.rglob("*") if path.suffix in {".yaml", ".sh", ".sbatch"}}
    named = {
        (str(file.relative_to(DEPLOY)), place)
        for file, text in texts.items() for place in re.findall(r"(?:~|/opt)/stagecoach/([\w./-]+)", text)
    }  # fmt: skip
    assert len(named) > 6
    lost = [each for each in named if not (ROOT / each[1]).exists() or each[1].split("/")[0] not in TRAVELING]
    assert lost == []
