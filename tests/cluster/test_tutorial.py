"""docs/tutorials/cluster.md as its reader does it: its files, edits and commands, in terminals of the laptop.

The tests stand in the order of the page. Addresses and the user are those of the hosts; nothing else is changed.
"""

from __future__ import annotations

import json
import subprocess
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import yaml

from tests.support.cluster.hosts import HOME, SOURCE, Network
from tests.support.cluster.ray_cluster import prepare_machine, until
from tests.support.processes.installation import download_build_system
from tests.support.suite.pages import SHELL, Block, blocks

PAGE = SOURCE / "docs" / "tutorials" / "cluster.md"
CHECKOUT = HOME / "stagecoach"
SIX = {f"worker-{index}" for index in range(6)}
pytestmark = [pytest.mark.nightly, pytest.mark.timeout(900)]


class Reader:
    """Follows the page on the laptop; folder and variables of the terminal stay from block to block."""

    def __init__(self, network: Network) -> None:
        self.laptop, self.two = network.hosts["laptop"], network.hosts["two"]
        self.elsewhere: list[subprocess.Popen[str]] = []
        self._addresses = {f"192.168.0.{10 + n}": network.hosts[name].address for n, name in _MACHINES}
        headings = [number for number, line in enumerate(PAGE.read_text().splitlines(), 1) if line.startswith("## ")]
        self._sections: list[list[Block]] = [[] for _ in range(len(headings) + 1)]
        for block in blocks(PAGE):
            line = int(block.place.partition(":")[2])
            self._sections[sum(heading < line for heading in headings)].append(block)

    def follow(self, section: int) -> str:
        """Does what a section shows; returns the output of its commands."""
        output = ""
        for block in self._sections[section]:
            text = block.text.replace("ssh_user: ada", "ssh_user: root")
            for address, here in self._addresses.items():
                text = text.replace(address, here)
            if block.not_run == "until Ctrl-C":
                self._type_elsewhere(text)
            elif block.language in SHELL:
                output += self.type(text)
            elif block.file:
                self.type(f"mkdir -p ~/robot && cd ~/robot && cat >{block.file} <<'END'\n{text}END")
            elif block.language == "yaml":
                self._edit(yaml.safe_load(text))
        return output

    def type(self, commands: str) -> str:
        script = f"{_BEFORE}\n{commands}\n{{ declare -px; echo \"cd '$PWD'\"; }} >~/terminal"
        return self.laptop.run("bash", "-euo", "pipefail", "-c", script, seconds=600).stdout

    def shown(self, command: str) -> str:
        """Returns what a command in another terminal has printed so far."""
        return self.laptop.path(HOME / f"{command}.log").read_text()

    def until(self, what: str, done: Callable[[Any], bool]) -> Any:
        """Waits for a status of the run that is as wanted; returns it."""
        found: list[Any] = []

        def look() -> bool:
            found[:] = [json.loads(self.type("stagecoach status robot --json"))]
            return done(found[0])

        until(what, look, lambda: found, seconds=400)
        return found[0]

    def _type_elsewhere(self, command: str) -> None:
        with self.laptop.path(HOME / f"{command.split()[1]}.log").open("w") as log:
            shell = ("bash", "-c", f"{_BEFORE}\n{command}")
            self.elsewhere.append(self.laptop.start(*shell, stdout=log, stderr=subprocess.STDOUT))

    def _edit(self, values: dict[str, Any]) -> None:
        file = self.laptop.path(HOME / "my-cluster.yaml")
        content = yaml.safe_load(file.read_text())
        assert values.keys() <= content.keys()
        file.write_text(yaml.safe_dump(content | values, width=10_000, sort_keys=False))


_MACHINES = [(1, "head"), (2, "one"), (3, "two")]
_RAY_STATUS = "ray exec ~/my-cluster.yaml 'ray status'"
_BEFORE = f"cd {CHECKOUT}; [ ! -e ~/terminal ] || . ~/terminal"


@pytest.fixture(scope="module")
def reader(network: Network) -> Iterator[Reader]:
    """A laptop with a checkout and a key, and three machines with Python and PyTorch."""
    reader = Reader(network)
    download_build_system(wheels := network.folder / "wheels")
    for name, folder in (("laptop", "stagecoach/.venv"), *((name, "stagecoach-venv") for _, name in _MACHINES)):
        prepare_machine(network.hosts[name], wheels, HOME / folder)
    home = reader.laptop.path(HOME)
    (home / ".ssh").mkdir(mode=0o700)
    (home / ".ssh" / "id_ed25519").write_bytes(network.key.read_bytes())
    (home / ".ssh" / "id_ed25519").chmod(0o600)
    tracked = subprocess.run(["git", "ls-files", "-z", "-co", "--exclude-standard"], cwd=SOURCE, capture_output=True)
    copy = ["rsync", "-a", "--from0", "--files-from=-", "--ignore-missing-args", f"{SOURCE}/", str(home / "stagecoach")]
    subprocess.run(copy, input=tracked.stdout, check=True)
    yield reader
    for process in reader.elsewhere:
        process.kill()
        process.wait()


def test_ray_up_starts_three_machines(reader: Reader) -> None:
    reader.follow(1)
    said = reader.follow(2)
    until("three machines", lambda: "3 local.cluster.node" in reader.type(_RAY_STATUS), lambda: said)


def test_run_scales_to_six_workers(reader: Reader) -> None:
    assert "run robot is live on the cluster" in reader.follow(3)
    reader.until("two workers", lambda status: len(alive(status) & SIX) == 2)
    assert "scaling to 6 workers" in reader.follow(4)
    reader.until("six workers that are learned from", lambda status: alive(status) >= SIX <= status["ledger"].keys())


def test_run_survives_a_power_cut(reader: Reader) -> None:
    reader.two.power_off()
    others = {"trainer", "evaluator"}

    def moved(status: Any) -> bool:
        return alive(status) >= others and reader.two.address not in {
            beat["address"] for beat in status["roles"] if beat["alive"]
        }

    version = reader.until("all roles elsewhere", moved)["version"]
    assert "workers" in reader.follow(5)
    reader.until("more versions", lambda status: status["version"] > version)
    reader.two.boot()
    reader.until("six workers again", lambda status: alive(status) >= SIX)
    until("three machines again", lambda: "3 local.cluster.node" in reader.type(_RAY_STATUS), lambda: "")


def test_policy_is_evaluated_after_the_run(reader: Reader) -> None:
    assert "robot: stopped" in reader.follow(6)
    status = reader.until("the end", lambda status: status["state"] == "finished")
    assert status["ledger"].keys() >= SIX and all(line["balances"] for line in status["ledger"].values())
    assert (reader.laptop.path(HOME / "robot" / "robot.png")).read_bytes().startswith(b"\x89PNG")
    assert "is replaced" in reader.shown("attach") and "finished" in reader.shown("attach")
    assert "http://127.0.0.1:8420/runs/robot" in reader.shown("page")
    assert "over 5 episodes" in reader.follow(7)


def test_ray_down_ends_the_head(reader: Reader, network: Network) -> None:
    reader.follow(8)
    lines = network.hosts["head"].processes().values()
    assert [line for line in lines if "gcs_server" in line or "redis" in line or "rclone" in line] == []


def alive(status: Any) -> set[str]:
    return {beat["id"] for beat in status["roles"] if beat["alive"]}
