"""Hosts for `scale_demo.py`: network namespaces behind one bridge, or addresses of 127.0.0.0/8 where those are not allowed.

In: names of hosts. Out: an address for each, processes that run there, and their cables to be pulled. Everything is taken down
at the end.
"""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
NAMES = ("redis", "r1", "r2", "e1", "e2")


def namespaces_work() -> bool:
    """This machine and user may make network namespaces and bridges."""
    if os.geteuid() != 0 or shutil.which("ip") is None:
        return False
    name = f"laya-try-{os.getpid()}"
    try:
        _ip("netns", "add", name)
        _ip("netns", "exec", name, "ip", "link", "add", "try", "type", "bridge")
    except subprocess.CalledProcessError:
        return False
    finally:
        subprocess.run(["ip", "netns", "del", name], stderr=subprocess.DEVNULL)
    return True


def _ip(*words: str) -> None:
    subprocess.run(["ip", *words], check=True, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)


class Network:
    """One namespace a host, each with a cable (a veth pair) to a bridge that has an address on this machine's side too."""

    kind = "network namespaces"

    def __init__(self) -> None:
        self._mark = f"{os.getpid() % 0xFFFF:04x}"
        self._subnet = f"10.{77 + os.getpid() % 100}.{os.getpid() // 100 % 250}"
        self._processes: dict[str, tuple[list[str], subprocess.Popen]] = {}

    def __enter__(self):
        try:
            bridge = f"lb{self._mark}"
            _ip("link", "add", bridge, "type", "bridge")
            _ip("addr", "add", f"{self._subnet}.1/24", "dev", bridge)
            _ip("link", "set", bridge, "up")
            for number, name in enumerate(NAMES):
                space, cable = self._space(name), self._cable(name)
                _ip("netns", "add", space)
                _ip("link", "add", cable, "type", "veth", "peer", "name", "eth0", "netns", space)
                _ip("link", "set", cable, "master", bridge, "up")
                _ip("-n", space, "addr", "add", f"{self._subnet}.{11 + number}/24", "dev", "eth0")
                _ip("-n", space, "link", "set", "eth0", "up")
                _ip("-n", space, "link", "set", "lo", "up")
        except BaseException:
            self.__exit__()
            raise
        return self

    def __exit__(self, *_) -> None:
        self._end_processes()
        for name in NAMES:
            subprocess.run(["ip", "netns", "del", self._space(name)], stderr=subprocess.DEVNULL)
        subprocess.run(["ip", "link", "del", f"lb{self._mark}"], stderr=subprocess.DEVNULL)

    def address(self, name: str) -> str:
        return f"{self._subnet}.{11 + NAMES.index(name)}"

    def run(self, name: str, command: list[str]) -> None:
        """One process a host."""
        self._start(name, ["ip", "netns", "exec", self._space(name), *command])

    def cut(self, name: str) -> None:
        """Pull the cable: nobody says goodbye."""
        _ip("link", "set", self._cable(name), "down")

    def restore(self, name: str) -> None:
        _ip("link", "set", self._cable(name), "up")

    def kill(self, name: str) -> None:
        process = self._processes[name][1]
        process.send_signal(signal.SIGKILL)  # `ip netns exec` has become the command itself
        process.wait(10)

    def _start(self, name: str, command: list[str]) -> None:
        process = subprocess.Popen(
            command, cwd=ROOT, env={**os.environ, "PYTHONPATH": str(ROOT / "src")}, stdout=subprocess.DEVNULL
        )
        self._processes[name] = (command, process)

    def _end_processes(self) -> None:
        for _, process in self._processes.values():
            if process.poll() is None:
                process.send_signal(signal.SIGKILL)
            process.wait(10)

    def _space(self, name: str) -> str:
        return f"laya-{self._mark}-{name}"

    def _cable(self, name: str) -> str:
        return f"lv{self._mark}{name}"[:15]


class LoopbackNetwork(Network):
    """A host is an address; one that is cut off is killed, and started anew when it comes back."""

    kind = "loopback addresses"

    def __enter__(self):
        return self

    def __exit__(self, *_) -> None:
        self._end_processes()

    def address(self, name: str) -> str:
        return f"127.{77 + os.getpid() % 100}.{os.getpid() // 100 % 250}.{11 + NAMES.index(name)}"

    def run(self, name: str, command: list[str]) -> None:
        self._start(name, command)

    def cut(self, name: str) -> None:
        self.kill(name)

    def restore(self, name: str) -> None:
        self._start(name, self._processes[name][0])
