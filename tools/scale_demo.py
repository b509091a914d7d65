"""Two routers and two engine hosts on a network of their own: a host is cut off, a router is killed, and nobody notices.

    python tools/scale_demo.py [--clients 12] [--loopback] [--json]

Each router and each host runs in a network namespace behind one bridge (needs root and iproute2; with --loopback, or where that
is missing, they have addresses of 127.0.0.0/8, and a host is killed instead of cut off). The routers share their table through
`redis-server`. Clients keep sessions going through both routers, half of them with streams, and go to the other router when one
gives no answer, as an SDK that tries again behind any TCP balancer does. Prints each phase and ends with code 0 only if no
request of which no byte had come failed, and every session kept its backend while that was there.
"""

from __future__ import annotations

import argparse
import http.client
import json
import shutil
import sys
import tempfile
import threading
import time
from collections import Counter, defaultdict
from contextlib import ExitStack
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT / "tools"))

from failover_demo import work  # noqa: E402
from scale_network import LoopbackNetwork, Network, namespaces_work  # noqa: E402
from scripted_upstream import ScriptedUpstream  # noqa: E402

ROUTER_PORT, HOST_PORT, REDIS_PORT = 8000, 9000, 6390
# Of a router that has gone: the client's balancer tries the other one then.
NO_ANSWER = (OSError, http.client.HTTPException)


class Clients:
    """Threads, each with a session of its own; `phase` says to which list their answers go."""

    def __init__(self, routers: list[str], count: int) -> None:
        self.outcomes: Counter[str] = Counter()
        self.homes: dict[str, dict[int, list[str]]] = defaultdict(lambda: defaultdict(list))  # phase -> session -> backends
        self.slowest: dict[str, float] = defaultdict(float)
        self.phase = "both"
        self._routers = routers
        self._stop = threading.Event()
        self._lock = threading.Lock()
        self._threads = [threading.Thread(target=self._run, args=(n,)) for n in range(count)]

    def start(self) -> None:
        for thread in self._threads:
            thread.start()

    def stop(self) -> None:
        self._stop.set()
        for thread in self._threads:
            thread.join(60)

    def _run(self, session: int) -> None:
        turn = session
        while not self._stop.is_set():
            began, phase = time.monotonic(), self.phase
            turn += 1
            outcome, backend = self._ask(self._routers[turn % len(self._routers)], session)
            again = outcome == "no answer"
            if again:
                turn += 1
                outcome, backend = self._ask(self._routers[turn % len(self._routers)], session)
            if phase != self.phase:
                phase = "moving"  # begun before the cut or the kill, and ended after it
            with self._lock:
                self.outcomes[f"{outcome}, by the other router" if again else outcome] += 1
                if backend:
                    self.homes[phase][session].append(backend)
                self.slowest[phase] = max(self.slowest[phase], time.monotonic() - began)

    def _ask(self, router: str, session: int) -> tuple[str, str | None]:
        """What came of it, and the backend that answered."""
        stream = session % 2 == 0
        body = json.dumps({"model": "m", "stream": stream, "messages": [{"role": "user", "content": "hi"}]})
        connection = http.client.HTTPConnection(router, ROUTER_PORT, timeout=60)
        try:
            connection.request(
                "POST", "/v1/chat/completions", body, {"content-type": "application/json", "x-laya-session": f"s{session}"}
            )
            response = connection.getresponse()
        except NO_ANSWER:
            return "no answer", None
        try:
            data = response.read()
        except NO_ANSWER:
            data = b""
        finally:
            connection.close()
        if response.status != 200:
            return f"FAILED without a byte (status {response.status}: {data[:160].decode(errors='replace')})", None
        whole = data.endswith(b"data: [DONE]\n\n") if stream else b'"whole"' in data
        if whole:
            return "whole", response.getheader("x-laya-backend")
        return ("cut after the first byte" if stream or not data else "FAILED in a plain answer"), None


def router_config(address: str, hosts: dict[str, str], redis: str) -> dict:
    return {
        "server": {"host": address, "port": ROUTER_PORT, "log_level": "error"},
        # All hosts share one machine here, which may well be busy for longer than the 50 ms after which a router goes on with a
        # new session by itself.
        "router": {"mode": "shared", "redis": f"redis://{redis}:{REDIS_PORT}/0", "timeout_ms": 2000},
        "backends": {
            name: {"url": f"http://{host}:{HOST_PORT}/v1", "connect_timeout_s": 1} for name, host in hosts.items()
        },
        "routes": [{"name": "demo", "match": "*", "policy": "session", "to": list(hosts)}],
    }  # fmt: skip


def seen_by(router: str, backend: str) -> bool | None:
    """Whether this router holds the backend for healthy."""
    connection = http.client.HTTPConnection(router, ROUTER_PORT, timeout=5)
    try:
        connection.request("GET", "/ready", headers={"host": "localhost"})
        return json.loads(connection.getresponse().read())["components"]["backends"][backend]["healthy"]
    except (*NO_ANSWER, ValueError, KeyError):
        return None
    finally:
        connection.close()


def wait_until(condition, seconds: float, what: str) -> None:
    until = time.monotonic() + seconds
    while not condition():
        if time.monotonic() > until:
            raise SystemExit(f"{what} did not come about in {seconds:g} s")
        time.sleep(0.1)


def demo(network: Network, count: int, seconds: float, say) -> dict:
    """All phases; what came of them. `seconds` is how long the quiet phases last."""
    with tempfile.TemporaryDirectory() as directory, ExitStack() as stack:
        stack.enter_context(network)
        hosts = {"e1": network.address("e1"), "e2": network.address("e2")}
        routers = {"r1": network.address("r1"), "r2": network.address("r2")}
        network.run("redis", ["redis-server", "--bind", network.address("redis"), "--port", str(REDIS_PORT), "--save", "",
                              "--protected-mode", "no", "--dir", directory])  # fmt: skip
        for name, address in hosts.items():
            network.run(name, [sys.executable, __file__, "--host", address])
        for name, address in routers.items():
            path = Path(directory) / f"{name}.yaml"
            path.write_text(json.dumps(router_config(address, hosts, network.address("redis"))))
            network.run(name, [sys.executable, "-m", "laya", "router", "--config", str(path)])
        for router in routers.values():
            wait_until(lambda router=router: all(seen_by(router, name) for name in hosts), 60, "two ready routers")
        clients = Clients(list(routers.values()), count)
        stack.callback(clients.stop)
        clients.start()
        time.sleep(seconds)
        say(f"both routers and both hosts: {sum(clients.outcomes.values())} requests; now e1 is cut off")
        clients.phase = "moving"
        began = time.monotonic()
        network.cut("e1")
        for router in routers.values():
            wait_until(lambda router=router: seen_by(router, "e1") is False, 30, "e1 found unhealthy")
        noticed = time.monotonic() - began
        time.sleep(3.0)  # what waited there has moved on: connect time-out, and a probe's pace
        clients.phase = "cut"
        time.sleep(seconds)
        say(f"both routers know after {noticed:.1f} s; e1 comes back")
        clients.phase = "moving"
        network.restore("e1")
        for router in routers.values():
            wait_until(lambda router=router: bool(seen_by(router, "e1")), 30, "e1 found healthy again")
        time.sleep(1.0)  # what had waited for e1 ends, and both routers hear of each other's moves
        clients.phase = "back"
        time.sleep(seconds)
        say("router r1 is killed")
        clients.phase = "one router"
        network.kill("r1")
        time.sleep(seconds)
        clients.stop()
        return {**judged(clients), "noticed_s": round(noticed, 1), "kind": network.kind}


def judged(clients: Clients) -> dict:
    """The counts, and what they say of the two promises."""
    homes = clients.homes
    first = {session: set(backends) for session, backends in homes["both"].items()}
    stayed = all(len(backends) == 1 for backends in first.values())
    for session, backends in first.items():
        later = [set(homes[phase][session]) for phase in ("cut", "moving", "back", "one router")]
        if backends == {"e2"}:
            stayed &= all(found <= {"e2"} for found in later)  # it had no reason to leave, at no time
        else:
            stayed &= later[0] <= {"e2"} and len(later[2] | later[3]) == 1  # at the host that is left, and then at one for both
    return {
        "outcomes": dict(clients.outcomes),
        "failed": sum(n for outcome, n in clients.outcomes.items() if "FAILED" in outcome or outcome.startswith("no answer")),
        "sessions_kept_their_backend": stayed,
        "sessions_at_first": dict(Counter(next(iter(backends)) for backends in first.values())),
        "slowest_s": {phase: round(value, 2) for phase, value in clients.slowest.items()},
    }


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--clients", type=int, default=12)
    parser.add_argument("--seconds", type=float, default=4.0, help="of each quiet phase")
    parser.add_argument("--loopback", action="store_true", help="addresses of 127.0.0.0/8 instead of namespaces")
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--host", metavar="ADDRESS", help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.host is not None:
        with ScriptedUpstream(work, port=HOST_PORT, host=given.host):
            threading.Event().wait()
    if shutil.which("redis-server") is None:
        raise SystemExit("redis-server is missing: apt-get install redis-server")
    network = LoopbackNetwork() if given.loopback or not namespaces_work() else Network()
    found = demo(network, given.clients, given.seconds, lambda text: None if given.json else print(text, flush=True))
    if given.json:
        print(json.dumps(found))
    else:
        for name, value in found.items():
            print(f"  {name}: {value}")
    return 1 if found["failed"] or not found["sessions_kept_their_backend"] else 0


if __name__ == "__main__":
    sys.exit(main())
