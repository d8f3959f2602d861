"""Replicas that come and go, in a test: a real lighthouse, a real process for each, faults at chosen moments.

with Replicas(folder) as run:
    run.start("a", train, 40)                # a plain function of a module, called with an `Elastic` first
    run.start("b", train, 40)
    run.send("b", signal.SIGKILL)
    results = run.results("a")               # {"a": what train has returned}

A replica of several ranks is as many processes, of the names "a", "a1", "a2".
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import os
import pickle
import signal
import time
import traceback
from collections.abc import Callable
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

from lowbit_strategy import Elastic
from lowbit_strategy.elastic.lighthouse import import_torchft, start_lighthouse
from testing.hosts.namespaces import Host, Network, enter
from testing.processes.ranks import (
    START_LIMIT_S,
    fork_server,
    free_port,
    prepare_process,
    rank_variables,
    redirect_output,
)
from testing.processes.scripts import describe_exit

import_torchft()  # once, in the server that replicas are forked from

TIMEOUT_S = 6.0  # of a message, in faults
HEARTBEAT_S = 1.5


class Replicas:
    """The processes of one run.

    Args:
        folder: Of results, errors and output.
        timeout: Seconds in which a run must end, once its processes have started.
        min_replicas: Of every replica.
        network: Has a host for the lighthouse, and then one for each replica in the order in which they start.
    """

    def __init__(
        self, folder: Path, *, timeout: float = 90, min_replicas: int = 2, network: Network | None = None
    ) -> None:
        self.folder = folder
        self.timeout = timeout
        self.min_replicas = min_replicas
        self.port = free_port()
        self._hosts = iter([] if network is None else network.hosts)
        self._interface = "" if network is None else network.interface
        self._first: Host | None = next(self._hosts, None)
        self.processes: dict[str, BaseProcess] = {}
        self._lighthouse: BaseProcess | None = None

    def __enter__(self) -> Replicas:
        self.folder.mkdir(parents=True, exist_ok=True)
        self.light()
        return self

    def __exit__(self, *_: object) -> None:
        self.darken()
        for process in self.processes.values():
            with contextlib.suppress(ProcessLookupError):
                if process.pid is not None and process.exitcode is None:
                    os.kill(process.pid, signal.SIGKILL)
            process.join()

    def light(self) -> None:
        """Start the lighthouse, where it was before."""
        given = (self._address, self._namespace(self._first), str(self.folder))
        self._lighthouse = fork_server().Process(target=_lighthouse, args=given)
        self._lighthouse.start()

    @property
    def _address(self) -> str:
        return f"{'127.0.0.1' if self._first is None else self._first.address}:{self.port}"

    @staticmethod
    def _namespace(host: Host | None) -> str:
        return "" if host is None else host.namespace

    def darken(self) -> None:
        """The lighthouse is lost."""
        if self._lighthouse is not None:
            self._lighthouse.kill()
            self._lighthouse.join()
            self._lighthouse = None

    def elastic(self, name: str, **options: Any) -> Elastic:
        given = {"timeout": TIMEOUT_S, "connect_timeout": 5.0, "patience": 60.0, "min_replicas": self.min_replicas}
        return Elastic(lighthouse=f"http://{self._address}", name=name, **(given | options))

    def start(
        self, name: str, fn: Callable[..., Any], *args: Any, held: bool = False, num_ranks: int = 1, **options: Any
    ) -> None:
        """Run ``fn(elastic, *args)`` in a process, or in one for each rank of a replica.

        Args:
            name: Of the replica.
            fn: A function of a module.
            args: After the `Elastic`.
            held: Until `release`.
            num_ranks: Of the replica; each has the variables of a launcher.
            options: Of `Elastic` or of `fn`.
        """
        known = {field.name for field in dataclasses.fields(Elastic)}
        of_fn = {key: options.pop(key) for key in list(options) if key not in known}
        job = pickle.dumps((functools.partial(fn, **of_fn), (self.elastic(name, **options), *args)))
        port = str(free_port()) if num_ranks > 1 else ""
        namespace = self._namespace(next(self._hosts, None))
        for rank, key in enumerate(ranks_of(name, num_ranks)):
            for kind in ("result", "error", "ready", "go"):
                (self.folder / f"{key}.{kind}").unlink(missing_ok=True)
            variables = rank_variables(rank, num_ranks, port) if num_ranks > 1 else {"WORLD_SIZE": "1"}
            if namespace:
                variables["GLOO_SOCKET_IFNAME"] = self._interface
            given = (key, str(self.folder), job, self.timeout, held, rank, variables, namespace)
            self.processes[key] = fork_server().Process(target=_main, args=given)
            self.processes[key].start()

    def release(self, *names: str) -> None:
        """Those that are held go on, once all of them are there."""
        for name in names:
            self.wait_for((self.folder / f"{name}.ready").exists, f"{name} has started", START_LIMIT_S)
        for name in names:
            (self.folder / f"{name}.go").touch()

    def send(self, name: str, number: signal.Signals) -> None:
        pid = self.processes[name].pid
        assert pid is not None
        os.kill(pid, number)

    def wait_for(self, condition: Callable[[], bool], what: str, timeout: float | None = None) -> None:
        """Until it holds; fails after `timeout`."""
        deadline = time.monotonic() + (timeout or self.timeout)
        while not condition():
            assert time.monotonic() < deadline, f"not in time: {what}\n{self.output()}"
            time.sleep(0.02)

    def results(self, *names: str) -> dict[str, Any]:
        """What these have returned; fails if one has raised, died or hangs."""
        self._join(*names)
        for name in names:
            how = describe_exit(self.processes[name].exitcode or 0)
            assert self.processes[name].exitcode == 0, f"replica {name} {how}\n{self.output()}"
        return {name: pickle.loads((self.folder / f"{name}.result").read_bytes()) for name in names}

    def error(self, name: str) -> str:
        """What a replica has raised; fails if it has not, or hangs."""
        self._join(name)
        path = self.folder / f"{name}.error"
        assert path.exists(), f"replica {name} has not raised\n{self.output()}"
        return path.read_text()

    def _join(self, *names: str) -> None:
        """Until these have ended; fails, with the stacks of all that still run, if one hangs."""
        for name in names:
            self.wait_for((self.folder / f"{name}.ready").exists, f"{name} has started", START_LIMIT_S)
        deadline = time.monotonic() + self.timeout
        for name in names:
            self.processes[name].join(max(0.1, deadline - time.monotonic()))
            if self.processes[name].exitcode is None:
                self._dump_stacks()
                raise AssertionError(f"replica {name} hangs\n{self.output()}")

    def _dump_stacks(self) -> None:
        for name, process in self.processes.items():
            if process.exitcode is None:
                with contextlib.suppress(ProcessLookupError):  # it may end in this very moment
                    self.send(name, signal.SIGUSR1)
        time.sleep(0.5)  # the handler writes a file and says nothing when it is done

    def output(self) -> str:
        return "\n".join(
            f"--- {path.name} ---\n{path.read_text(errors='replace')[-6000:]}"
            for kind in ("error", "output", "stacks")
            for path in sorted(self.folder.glob(f"*.{kind}"))
        )


def _lighthouse(address: str, namespace: str, folder: str) -> None:
    if namespace:
        enter(namespace)
    redirect_output(Path(folder) / "lighthouse.output")
    os.environ["RUST_LOG"] = "info"
    server = start_lighthouse(address, min_replicas=1, join_timeout=20.0, heartbeat_timeout=HEARTBEAT_S)
    time.sleep(3600)
    server.shutdown()


def ranks_of(name: str, num_ranks: int) -> list[str]:
    """The processes of a replica."""
    return [name + (str(rank) if rank else "") for rank in range(num_ranks)]


def _main(
    name: str,
    folder_name: str,
    job: bytes,
    timeout: float,
    held: bool,
    rank: int,
    variables: dict[str, str | None],
    namespace: str,
) -> None:
    if namespace:
        enter(namespace)
    folder = Path(folder_name)
    prepare_process(folder, name, rank, variables, timeout)
    try:
        fn, args = pickle.loads(job)
        (folder / f"{name}.ready").touch()
        while held and not (folder / f"{name}.go").exists():
            time.sleep(0.01)
        (folder / f"{name}.result").write_bytes(pickle.dumps(fn(*args)))
    except BaseException:
        (folder / f"{name}.error").write_text(traceback.format_exc())
        os._exit(1)
    os._exit(0)
