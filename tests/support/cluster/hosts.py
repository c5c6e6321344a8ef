"""Hosts of a cluster on one Linux machine: each in namespaces of its own, joined by a bridge, with its own sshd.

A host has its own network, processes, mounts, name and shared memory, and an own /tmp and home, which survive its death
as a disk does. The machine's other files (Python, this checkout) are seen by all. Hosts have no names in the file
system and end with the thread that made them, even when that is killed: all that can stay behind is the bridge, which
the next `Network` removes.
"""

from __future__ import annotations

import contextlib
import ipaddress
import json
import os
import pwd
import re
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from stagecoach.shared.base.process import end_with_parent
from tests.support.suite.speed import stretched

SOURCE = Path(__file__).resolve().parents[3]
HOME = Path(pwd.getpwuid(os.getuid()).pw_dir)  # where sshd takes a user to, whatever HOME says here
_TOOLS = ("ip", "nsenter", "unshare", "mount", "ssh", "ssh-keygen", "rsync")
_SSHD = Path("/usr/sbin/sshd")
_BRIDGE = re.compile(r"sc(\d+)br")
_START_SECONDS = 60.0
_BOOT = """
set -e
echo "$NAME" > /proc/sys/kernel/hostname
mount -t tmpfs -o size=512m,mode=1777 tmpfs /dev/shm
mount -t tmpfs tmpfs /run && mkdir /run/sshd
mount --bind "$COMMON/resolv.conf" /etc/resolv.conf
mount --bind "$COMMON/hosts" /etc/hosts
for path in $SEEN; do mkdir -p "$DISK$path"; mount --bind "$path" "$DISK$path"; done
cd "$DISK"
for path in $PRIVATE; do mount --no-canonicalize --rbind ".$path" "$path"; done
cd /
exec /usr/sbin/sshd -D -e -f "$COMMON/sshd_config"
"""
"""Script of a host's first process: mounts, then sshd, which also buries orphans. The disk may itself lie below a
folder that becomes private, so it is named from within."""


def unsupported() -> str | None:
    """Returns why this machine cannot create hosts, or None if it can."""
    if not sys.platform.startswith("linux") or os.geteuid() != 0:
        return "hosts are network namespaces, which only root can make, on Linux"
    missing = [tool for tool in _TOOLS if shutil.which(tool) is None] + [str(_SSHD)] * (not _SSHD.exists())
    if missing:
        return f"not installed: {', '.join(missing)} (Debian: openssh-server iproute2 rsync util-linux)"
    tried = subprocess.run(
        ["unshare", "--net", "--mount", "--pid", "--uts", "--ipc", "--fork", "--mount-proc", "sh", "-c",
         "ip link add one type veth peer name two && ip link add three type bridge && mount -t tmpfs tmpfs /mnt"],
        capture_output=True, text=True, stdin=subprocess.DEVNULL,
    )  # fmt: skip
    return f"namespaces are forbidden here: {tried.stderr.strip()}" if tried.returncode else None


class Host:
    def __init__(self, network: Network, name: str, number: int) -> None:
        self.name = name
        self.address = str(network.subnet[10 + number])
        self.disk = network.folder / name
        self._network = network
        self._cable, self._plug = f"sc{os.getpid()}h{number}", f"sc{os.getpid()}p{number}"
        self._unshare: subprocess.Popen[bytes] | None = None
        self._first: int | None = None

    def path(self, inside: str | Path) -> Path:
        """Returns the path on this machine of a file in its /tmp or home, even while it is off."""
        return self.disk / str(inside).lstrip("/")

    def boot(self) -> None:
        """Switches it on; returns when its sshd answers."""
        network, private = self._network, ["/tmp", str(HOME)]
        for folder in private:
            self.path(folder).mkdir(parents=True, exist_ok=True)
        self.path("/tmp").chmod(0o1777)
        profile = self.path(HOME / ".bashrc")
        if not profile.exists():
            profile.write_text(f"export PATH={sys.prefix}/bin:$PATH\n")
        environ = {
            "NAME": self.name, "COMMON": str(network.folder), "DISK": str(self.disk), "PRIVATE": " ".join(private),
            "SEEN": " ".join(path for path in network.seen if any(Path(path).is_relative_to(each) for each in private)),
        }  # fmt: skip
        with (self.disk / "console.log").open("ab") as log:
            self._unshare = subprocess.Popen(
                ["unshare", "--net", "--mount", "--pid", "--uts", "--ipc", "--fork", "--kill-child", "--mount-proc",
                 "bash", "-c", _BOOT],
                env=self.environ() | environ, stdin=subprocess.DEVNULL, stdout=log, stderr=log, start_new_session=True,
                preexec_fn=end_with_parent(signal.SIGKILL),
            )  # fmt: skip
        self._first = _only_child(self._unshare)
        self._connect()
        self._wait_for_ssh()

    def power_off(self) -> None:
        """Cuts its power: its processes and its network are gone at once."""
        if self._unshare is None:
            return
        with contextlib.suppress(RuntimeError):  # a second time, or its network is gone already
            self.cut()
        with contextlib.suppress(ProcessLookupError):
            os.kill(self._first or self._unshare.pid, signal.SIGKILL)  # with the first process all others of it end
        self._unshare.wait()
        with contextlib.suppress(RuntimeError):
            command("ip", "link", "delete", self._cable)
        self._unshare = self._first = None

    def cut(self) -> None:
        """Pulls its network cable; its processes live on."""
        command("ip", "link", "set", self._cable, "down")

    def heal(self) -> None:
        command("ip", "link", "set", self._cable, "up")

    def start(self, *arguments: str, environ: Mapping[str, str] | None = None, **popen: Any) -> subprocess.Popen[str]:
        """A command in its home, in the background; it ends with the host at the latest."""
        assert self._first is not None, f"{self.name} is off"
        script = 'cd ~ && . ~/.bashrc && exec "$@"'
        return subprocess.Popen(
            ["nsenter", "--target", str(self._first), "--mount", "--uts", "--ipc", "--net", "--pid",
             "bash", "-c", script, "bash", *arguments],
            env=self.environ() | dict(environ or {}), stdin=subprocess.DEVNULL, text=True, start_new_session=True,
            **popen,
        )  # fmt: skip

    def run(
        self, *arguments: str, environ: Mapping[str, str] | None = None, seconds: float = 120.0, check: bool = True
    ) -> subprocess.CompletedProcess[str]:
        """A command in its home, until it ends."""
        process = self.start(*arguments, environ=environ, stdout=subprocess.PIPE, stderr=subprocess.PIPE)
        try:
            out, err = process.communicate(timeout=seconds)
        except subprocess.TimeoutExpired as error:
            process.kill()
            raise AssertionError(f"{self.name}: {arguments} takes longer than {seconds} s: {error.output}") from None
        assert not (check and process.returncode), f"{self.name}: {arguments} → {process.returncode}\n{out}\n{err}"
        return subprocess.CompletedProcess(arguments, process.returncode, out, err)

    def processes(self) -> dict[int, str]:
        """Processes except the first: process id on this machine → command line."""
        mine, found = os.readlink(f"/proc/{self._first}/ns/pid"), {}
        for entry in Path("/proc").iterdir():
            with contextlib.suppress(OSError):
                if entry.name.isdigit() and os.readlink(entry / "ns" / "pid") == mine:
                    found[int(entry.name)] = (entry / "cmdline").read_bytes().replace(b"\0", b" ").decode().strip()
        return {pid: line for pid, line in found.items() if pid != self._first and line}

    @staticmethod
    def environ() -> dict[str, str]:
        """Variables of a fresh session; none of ours reach a host by accident."""
        return {"PATH": os.environ["PATH"], "HOME": str(HOME), "LANG": "C.UTF-8", "COLUMNS": "200"}

    def _connect(self) -> None:
        bridge, inside = self._network.bridge, ["nsenter", "--target", str(self._first), "--net", "ip"]
        mac = f"02:00:00:00:00:{int(self.address.rpartition('.')[2]):02x}"  # the same each time: others remember it
        command("ip", "link", "add", self._cable, "type", "veth", "peer", "name", self._plug, "address", mac)
        command("ip", "link", "set", self._plug, "netns", str(self._first))
        command("ip", "link", "set", self._cable, "master", bridge, "up")
        command(*inside, "link", "set", self._plug, "name", "eth0")
        command(*inside, "address", "add", f"{self.address}/24", "dev", "eth0")
        command(*inside, "link", "set", "lo", "up")
        command(*inside, "link", "set", "eth0", "up")
        command(*inside, "route", "add", "default", "via", str(self._network.gateway))

    def _wait_for_ssh(self) -> None:
        deadline = time.monotonic() + stretched(_START_SECONDS)
        while True:
            with contextlib.suppress(OSError), socket.create_connection((self.address, 22), timeout=1) as client:
                if client.recv(4) == b"SSH-":
                    return
            console = (self.disk / "console.log").read_text(errors="replace")
            on = self._unshare is not None and self._unshare.poll() is None
            assert on and time.monotonic() < deadline, f"{self.name} does not boot: {console}"
            time.sleep(0.05)


class Network:
    """A bridge and the hosts on it; `folder` holds their disks."""

    def __init__(self, folder: Path, names: Sequence[str]) -> None:
        _sweep()
        self.folder = folder.resolve()
        self.bridge = f"sc{os.getpid()}br"
        self.subnet = _free_subnet()
        self.gateway = self.subnet[1]
        seen = (Path(sys.prefix), Path(sys.base_prefix), SOURCE, folder)
        self.seen = sorted({str(path.resolve()) for path in seen})
        self.key = self.folder / "id_ed25519"
        self.hosts = {name: Host(self, name, number) for number, name in enumerate(names, start=1)}
        self._write_files()

    def __enter__(self) -> Network:
        command("ip", "link", "add", self.bridge, "type", "bridge")
        try:
            command("ip", "address", "add", f"{self.gateway}/24", "dev", self.bridge)
            command("ip", "link", "set", self.bridge, "up")
            for host in self.hosts.values():
                host.boot()
        except BaseException:
            self.__exit__()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        for host in self.hosts.values():
            host.power_off()
        command("ip", "link", "delete", self.bridge)

    def _write_files(self) -> None:
        self.folder.mkdir(parents=True, exist_ok=True)
        host_key = self.folder / "host_key"
        for key in (self.key, host_key):
            command("ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", str(key))
        (self.folder / "sshd_config").write_text(
            f"HostKey {host_key}\nAuthorizedKeysFile {self.key}.pub\nPidFile none\n"
            "StrictModes no\nUsePAM no\nUseDNS no\n"
            "PermitRootLogin prohibit-password\nPasswordAuthentication no\nPrintMotd no\nPrintLastLog no\n"
            "MaxStartups 100\nMaxSessions 100\nLogLevel ERROR\nSubsystem sftp internal-sftp\n"
        )
        (self.folder / "resolv.conf").write_text("")  # names that nobody knows are refused at once
        names = [f"{host.address} {host.name}" for host in self.hosts.values()]
        (self.folder / "hosts").write_text("\n".join(["127.0.0.1 localhost", f"{self.gateway} gateway", *names, ""]))


def command(*arguments: str) -> str:
    """A command on this machine; raises `RuntimeError` with what it says."""
    done = subprocess.run(arguments, capture_output=True, text=True, stdin=subprocess.DEVNULL)
    if done.returncode:
        raise RuntimeError(f"{' '.join(arguments)}: {done.stderr.strip() or done.stdout.strip()}")
    return done.stdout


def _only_child(process: subprocess.Popen[bytes]) -> int:
    """The process id of the one that it forks, which is made after the namespaces."""
    children = Path(f"/proc/{process.pid}/task/{process.pid}/children")
    deadline = time.monotonic() + stretched(_START_SECONDS)
    while True:
        found = children.read_text().split() if process.poll() is None else []
        if found:
            return int(found[0])
        assert process.poll() is None and time.monotonic() < deadline, "unshare does not fork"
        time.sleep(0.01)


def _free_subnet() -> ipaddress.IPv4Network:
    """A private network that this machine has no route to, so that several test sessions can stand side by side."""
    routes = [route["dst"] for route in json.loads(command("ip", "-json", "route", "show", "table", "all"))]
    taken = [ipaddress.ip_network(route, strict=False) for route in routes if route[0].isdigit() and ":" not in route]
    for number in range(256):
        candidate = ipaddress.ip_network(f"10.77.{(os.getpid() + number) % 256}.0/24")
        assert isinstance(candidate, ipaddress.IPv4Network)
        if not any(candidate.overlaps(network) for network in taken):
            return candidate
    raise AssertionError(f"no network is free; there are {taken}")


def _sweep() -> None:
    """Removes the bridges of test sessions that were killed; their hosts have ended with them."""
    for link in json.loads(command("ip", "-json", "link", "show", "type", "bridge")):
        owner = _BRIDGE.fullmatch(link.get("ifname", ""))
        if owner and not Path(f"/proc/{owner[1]}").exists():
            with contextlib.suppress(RuntimeError):  # another session sweeps as well
                command("ip", "link", "delete", link["ifname"])
