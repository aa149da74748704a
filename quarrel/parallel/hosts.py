"""The hosts of a Ray cluster that have the other stages of a model: a place on each, where processes start.

Ray finds the places and starts there what starts the processes. These connect to the first process, which they speak with
from then on; Ray carries no step. The network is a private one, as Ray itself wants it.
"""

from __future__ import annotations

import contextlib
import json
import logging
import secrets
import signal
import socket
import subprocess
import threading
import time
from dataclasses import dataclass
from typing import Any

from quarrel.child.spawn import spawn_with
from quarrel.child.wire import Link
from quarrel.errors import BackendUnavailable, EngineFault, QuarrelError

log = logging.getLogger("quarrel")

PLACE_SECONDS = 90.0
"""Until the cluster has a free place on every host; a new machine takes about as long to join."""
_START_SECONDS = 120.0
_HELLO_SECONDS = 5.0
_END_SECONDS = 5.0
_MAX_HELLO = 4096
_ALIVE = {"TCP_KEEPIDLE": 5, "TCP_KEEPINTVL": 5, "TCP_KEEPCNT": 3, "TCP_USER_TIMEOUT": 20_000}
"""A machine that is gone without a word is lost after 20 s; the last one is in milliseconds."""


class Host:
    """On a host of the cluster: starts the members of a stage there, and ends them. They end by themselves without it."""

    def __init__(self) -> None:
        self._processes: list[subprocess.Popen[bytes]] = []

    def start(self, address: str, port: int, secret: str, ranks: list[int]) -> None:
        """A process for each rank, which is connected to the first process."""
        for rank in ranks:
            with socket.create_connection((address, port), _START_SECONDS) as end:
                end.settimeout(None)
                _keep(end)
                hello = {"secret": secret, "rank": rank, "address": end.getsockname()[0], "name": socket.gethostname()}
                link = Link(end)
                link.send(json.dumps(hello).encode())
                process = spawn_with("quarrel.parallel.worker", end)
                self._processes.append(process)
                link.send(json.dumps({"pid": process.pid}).encode())

    def end(self) -> None:
        for process in self._processes:
            process.kill()
            process.wait()


@dataclass(frozen=True)
class Far:
    """A process on another host, as `child.spawn.Child` is one on this. address: where the others reach it."""

    link: Link
    pid: int
    rank: int
    address: str
    host: str

    def end(self, timeout: float = 0.0) -> None:
        """It ends when its link is cut; `Hosts.close` makes sure."""


class Hosts:
    """Places on `stages - 1` hosts of a cluster, beside this machine, with `each` GPUs, or cores, on each.

    address: as `ray.init` takes it. Raises BackendUnavailable where Ray, the cluster or the places are not to be had.
    """

    def __init__(self, address: str, stages: int, each: int, gpus: bool) -> None:
        self._ray, self._mine = _connected(address)
        self._closed = False
        self._lock = threading.Lock()
        self._actors: list[Any] = []
        self._places: Any = None
        self.address = _address(self._ray, address)
        try:
            self._take(address, stages, each, gpus)
            self.members = self._start(each)
        except BaseException as error:
            self.close()
            if isinstance(error, QuarrelError) or not isinstance(error, Exception):
                raise
            if self._mine:
                self._ray.shutdown()  # the next attempt may find another head
            raise EngineFault(f"the Ray cluster at {address} failed: {type(error).__name__}: {error}") from error

    def _take(self, address: str, stages: int, each: int, gpus: bool) -> None:
        from ray.util.placement_group import placement_group
        from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

        need = {"GPU": float(each), "CPU": 1.0} if gpus else {"CPU": float(each)}
        own, taken = _own_node(self._ray, self.address)
        needs = [need] * (stages - 1)
        labels = [{} if own is None else {"ray.io/node-id": f"!{own}"}] * (stages - 1)
        if own is not None and not taken:
            # What this machine computes is taken from the cluster too.
            needs, labels = [*needs, need], [*labels, {"ray.io/node-id": own}]
        self._places = placement_group(needs, strategy="STRICT_SPREAD", bundle_label_selector=labels)
        if not self._places.wait(PLACE_SECONDS):
            what = "GPUs" if gpus else "CPU cores"
            message = (
                f"the Ray cluster at {address} has no {len(needs)} hosts with {each} free {what} each, this machine among"
                f" them, within {PLACE_SECONDS:.0f} s: start more (`ray status` lists them), or use a smaller"
                " pipeline_parallel"
            )
            raise BackendUnavailable(message, "hosts", "pipeline_parallel")
        for index in range(stages - 1):
            place = PlacementGroupSchedulingStrategy(self._places, placement_group_bundle_index=index)
            options = {"num_cpus": need["CPU"], "num_gpus": need.get("GPU", 0.0), "scheduling_strategy": place}
            self._actors.append(self._ray.remote(Host).options(**options).remote())

    def _start(self, each: int) -> list[Far]:
        secret, stages = secrets.token_hex(16), len(self._actors) + 1
        family = socket.AF_INET6 if ":" in self.address else socket.AF_INET
        with socket.create_server((self.address, 0), family=family, backlog=stages * each) as server:
            port = server.getsockname()[1]
            started = [
                actor.start.remote(self.address, port, secret, list(range(stage * each, (stage + 1) * each)))
                for stage, actor in enumerate(self._actors, 1)
            ]
            self._ray.get(started, timeout=_START_SECONDS)
            found: dict[int, Far] = {}
            deadline = time.monotonic() + _START_SECONDS
            while len(found) < (stages - 1) * each:
                server.settimeout(max(0.01, deadline - time.monotonic()))
                far = _hello(server.accept()[0], secret)
                if far is not None:
                    found[far.rank] = far
        return [found[rank] for rank in sorted(found)]

    def close(self) -> None:
        """Ends the processes and gives the places back. May be called twice, from any thread."""
        with self._lock:
            if self._closed:
                return
            self._closed = True
        with contextlib.suppress(Exception):  # hosts that are gone, and a cluster that is
            self._ray.wait(
                [actor.end.remote() for actor in self._actors], num_returns=len(self._actors), timeout=_END_SECONDS
            )
        for actor in self._actors:
            with contextlib.suppress(Exception):
                self._ray.kill(actor)
        if self._places is not None:
            from ray.util.placement_group import remove_placement_group

            with contextlib.suppress(Exception):
                remove_placement_group(self._places)


def _hello(end: socket.socket, secret: str) -> Far | None:
    """A member, by what it says first; None for anyone else, whose connection is closed."""
    link, deadline = Link(end), time.monotonic() + _HELLO_SECONDS
    try:
        said = json.loads(link.receive(deadline, _MAX_HELLO) or b"{}")
        if not secrets.compare_digest(str(said.get("secret")).encode(), secret.encode()):
            raise ValueError
        pid = json.loads(link.receive(deadline, _MAX_HELLO) or b"{}")["pid"]
        end.settimeout(None)
        _keep(end)
        return Far(link, int(pid), int(said["rank"]), str(said["address"]), str(said["name"]))
    except (OSError, OverflowError, ValueError, KeyError, AttributeError):
        log.warning("a stranger connected to the port where other hosts' processes are awaited")
        link.close()
        return None


def _keep(end: socket.socket) -> None:
    end.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    end.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for name, value in _ALIVE.items():
        if hasattr(socket, name):
            end.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), value)


def _connected(address: str) -> tuple[Any, bool]:
    """Ray, connected to the cluster, and whether it was not before."""
    try:
        import ray
    except ImportError:
        raise BackendUnavailable("hosts needs Ray: pip install 'longbow-quarrel[ray]' on every host", "hosts") from None
    if ray.is_initialized():
        return ray, False
    # Who runs this process says what its signals do.
    on_main = threading.current_thread() is threading.main_thread()
    before = {s: signal.getsignal(s) for s in (signal.SIGINT, signal.SIGTERM)} if on_main else {}
    try:
        ray.init(address=address, log_to_driver=False, logging_level=logging.ERROR, configure_logging=False)
    except Exception as error:
        first = str(error).strip().partition("\n")[0]
        message = f"no Ray cluster at {address}: {first} (`ray start --head` makes one; wanted ray://HOST:10001, or auto)"
        raise BackendUnavailable(message, "hosts") from None
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
    return ray, True


def _own_node(ray: Any, address: str) -> tuple[str | None, bool]:
    """The cluster's name of this machine, None where it is no part of it; and whether an actor that this process is has
    taken its share of it."""
    from ray.util.client import ray as client

    if client.is_connected():
        alive = (node for node in ray.nodes() if node["Alive"] and node["NodeManagerAddress"] == address)
        return next((str(node["NodeID"]) for node in alive), None), False
    context = ray.get_runtime_context()
    return str(context.get_node_id()), context.get_actor_id() is not None


def _address(ray: Any, address: str) -> str:
    """Where the cluster's hosts reach this machine."""
    scheme, _, rest = address.partition("://")
    if scheme != "ray":
        return str(ray.util.get_node_ip_address())
    host = rest.rpartition(":")[0].strip("[]")
    kind, _, _, _, there = socket.getaddrinfo(host, 10001, type=socket.SOCK_DGRAM)[0]
    with socket.socket(kind, socket.SOCK_DGRAM) as probe:
        probe.connect(there)  # sends nothing
        return str(probe.getsockname()[0])
