"""Two hosts on one machine: network namespaces, joined by a cable that can be cut."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path

SOURCE = Path(__file__).resolve().parent.parent / "src"


def ip(*arguments: str) -> None:
    subprocess.run(["ip", *arguments], check=True, capture_output=True, text=True)


@cache
def why_not() -> str:
    """Why this machine cannot play two hosts; empty if it can."""
    if shutil.which("ip") is None or shutil.which("unshare") is None:
        return "network namespaces need iproute2 and util-linux"
    name = f"sl{os.getpid()}"
    try:
        ip("netns", "add", name)
        ip("netns", "del", name)
    except subprocess.CalledProcessError as error:
        return f"network namespaces are not allowed here: {error.stderr.strip()}"
    return ""


@dataclass
class Ended:
    """How the launcher of a host ended: its exit code, and what it and its processes said and printed."""

    code: int
    text: str


@dataclass
class TwoHosts:
    """`with TwoHosts() as hosts`: 0 and 1 are 10.77.0.1 and 10.77.0.2 for each other, and see no other network."""

    names: tuple[str, str] = field(default_factory=lambda: (f"sla{os.getpid()}", f"slb{os.getpid()}"))
    started: list[subprocess.Popen[bytes]] = field(default_factory=list)

    def __enter__(self) -> TwoHosts:
        for name in self.names:
            ip("netns", "add", name)
            ip("-n", name, "link", "set", "lo", "up")
        self.place = Path(tempfile.mkdtemp())
        (self.place / "hosts").write_text("127.0.0.1 localhost\n10.77.0.1 host-a\n10.77.0.2 host-b\n")
        first, second = self.names
        ip("-n", first, "link", "add", "cable", "type", "veth", "peer", "name", "cable", "netns", second)
        for number, name in enumerate(self.names, start=1):
            ip("-n", name, "addr", "add", f"10.77.0.{number}/24", "dev", "cable")
            ip("-n", name, "link", "set", "cable", "up")
        return self

    def __exit__(self, *_: object) -> None:
        for host in range(len(self.started)):
            self.power_off(host)
        for name in self.names:
            ip("netns", "del", name)
        shutil.rmtree(self.place)

    def start(self, commands: Sequence[Sequence[object]], folders: Sequence[Path], **environment: str) -> None:
        """Start a command of `scalelong` on both hosts by torchrun, each in its folder."""
        self.started = []
        for number, (command, folder) in enumerate(zip(commands, folders, strict=True)):
            address = f"10.77.0.{number + 1}"
            launcher = ["-m", "torch.distributed.run", "--nnodes=2", "--nproc-per-node=1", "--rdzv-backend=c10d"]
            launcher += ["--rdzv-endpoint=10.77.0.1:29400", "--rdzv-id=test", f"--local-addr={address}"]
            named = f'mount --bind {self.place}/hosts /etc/hosts; hostname host-{"ab"[number]}; exec "$@"'
            inside = ["ip", "netns", "exec", self.names[number], "unshare", "--uts", "--mount", "sh", "-c", named, "sh"]
            settings = {"OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "cable", "PYTHONPATH": str(SOURCE), **environment}
            with (self.place / str(number)).open("wb") as said:
                process = subprocess.Popen(
                    [*inside, sys.executable, *launcher, "-m", "scalelong", *map(str, command)],
                    cwd=folder,
                    env={**os.environ, **settings},
                    stdout=said,
                    stderr=subprocess.STDOUT,
                )
            self.started.append(process)

    def cut(self) -> None:
        """Take the cable out: nothing is refused or reset, packets are lost."""
        ip("-n", self.names[1], "link", "set", "cable", "down")

    def power_off(self, host: int) -> None:
        """End everything that runs on a host, and its network, without a word to the other."""
        ip("-n", self.names[host], "link", "set", "cable", "down")
        found = subprocess.run(["ip", "netns", "pids", self.names[host]], capture_output=True, text=True, check=True)
        for process in found.stdout.split():
            subprocess.run(["kill", "-9", process], check=False)
        self.started[host].wait()

    def said(self, host: int) -> str:
        """All that was said on a host by now."""
        return (self.place / str(host)).read_text(errors="replace")

    def wait_for(self, word: str, host: int, seconds: float = 120) -> str:
        """Until it was said on a host; returns the line."""
        self.until(lambda: word in self.said(host), seconds)
        return next(line for line in self.said(host).splitlines() if word in line)

    def until(self, condition: Callable[[], bool], seconds: float = 120) -> None:
        """Until a condition holds."""
        end = time.monotonic() + seconds
        while not condition():
            assert time.monotonic() < end, f"{self.said(0)}\n{self.said(1)}"
            time.sleep(0.1)

    def wait(self, host: int, seconds: float) -> Ended:
        """How a host's launcher ends, which must be within so many seconds."""
        try:
            code = self.started[host].wait(seconds)
        except subprocess.TimeoutExpired as error:
            raise AssertionError(f"host {host} still runs after {seconds:g} s: {self.said(host)}") from error
        return Ended(code, self.said(host))
