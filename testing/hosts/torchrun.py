"""Start one script on every host, as on as many machines: torchrun, one node each, and read back what ranks report."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from testing.hosts.namespaces import INTERFACE, SlowNetwork

_ROOT = Path(__file__).resolve().parents[2]
_PORT = 29500  # every host has all ports to itself


def run_on_hosts(
    network: SlowNetwork,
    script: Path,
    arguments: Sequence[str],
    *,
    timeout: float,
    ranks_per_host: int = 1,
    own_processors: bool = False,
) -> list[Any]:
    """Run `script` on every host of the network; it is given ``--report PATH`` on top, and the first rank of each host
    writes JSON there.

    What ranks of one host send to each other goes over its loopback, neither limited nor counted. `own_processors`:
    where there are enough, a host computes on some that no other does, as machines do; hosts that wait for each other's
    messages would otherwise compute in turn, each on all of them.

    Returns:
        The hosts' reports, in order.

    Raises:
        RuntimeError: A rank failed or time ran out; the message has the end of its output.
    """
    with tempfile.TemporaryDirectory(prefix="slow-links-") as name:
        folder = Path(name)
        processes = [
            _start(network, rank, script, arguments, folder, ranks_per_host, own_processors=own_processors)
            for rank in range(len(network.hosts))
        ]
        try:
            _wait(processes, network, folder, timeout)
        finally:
            network.signal_all(signal.SIGKILL)
            for process in processes:
                process.kill()
                process.wait()
        return [json.loads(_report(folder, rank).read_text()) for rank in range(len(processes))]


def _start(
    network: SlowNetwork,
    rank: int,
    script: Path,
    arguments: Sequence[str],
    folder: Path,
    ranks_per_host: int,
    *,
    own_processors: bool,
) -> subprocess.Popen[bytes]:
    host = network.hosts[rank]
    torchrun = [
        *(sys.executable, "-m", "torch.distributed.run"),
        *("--nnodes", str(len(network.hosts)), "--nproc-per-node", str(ranks_per_host), "--node-rank", str(rank)),
        *("--master-addr", network.hosts[0].address, "--master-port", str(_PORT)),
    ]
    processors = _processors_of(rank, len(network.hosts)) if own_processors else []
    command = ["ip", "netns", "exec", host.namespace, *processors, *torchrun, str(script), *arguments]
    environment = os.environ | {
        "GLOO_SOCKET_IFNAME": INTERFACE,
        "OMP_NUM_THREADS": "1",
        "PYTHONPATH": os.pathsep.join([str(_ROOT), *filter(None, [os.environ.get("PYTHONPATH")])]),
        "PYTHONFAULTHANDLER": "1",
    }
    with _output(folder, rank).open("wb") as output:
        return subprocess.Popen(
            [*command, "--report", str(_report(folder, rank))],
            stdout=output,
            stderr=subprocess.STDOUT,
            env=environment,
            start_new_session=True,  # Ctrl-C reaches the benchmark alone, which then kills what it started
        )


def _processors_of(host: int, num_hosts: int) -> list[str]:
    """What a command begins with to run on that host's alone; nothing where there are fewer processors than hosts."""
    every = sorted(os.sched_getaffinity(0))
    each = len(every) // num_hosts
    own = every[host * each : (host + 1) * each]
    return ["taskset", "--cpu-list", ",".join(map(str, own))] if own else []


def _wait(processes: Sequence[subprocess.Popen[bytes]], network: SlowNetwork, folder: Path, timeout: float) -> None:
    deadline = time.monotonic() + timeout
    while any(process.poll() is None for process in processes):
        failed = [rank for rank, process in enumerate(processes) if process.returncode]
        if failed:
            time.sleep(2)  # the rank that fails first may not be the one to blame: let the others report theirs
            raise RuntimeError("\n".join(_tail(folder, rank) for rank in range(len(processes))))
        if time.monotonic() > deadline:
            network.signal_all(signal.SIGABRT)  # Python answers with the stacks of its threads
            time.sleep(2)
            tails = "\n".join(_tail(folder, rank) for rank in range(len(processes)))
            raise RuntimeError(f"not done after {timeout:.0f} s\n{tails}")
        time.sleep(0.2)
    missing = [rank for rank in range(len(processes)) if not _report(folder, rank).exists()]
    if missing:
        raise RuntimeError("\n".join(_tail(folder, rank) for rank in missing))


def _report(folder: Path, rank: int) -> Path:
    return folder / f"report-{rank}.json"


def _output(folder: Path, rank: int) -> Path:
    return folder / f"output-{rank}.txt"


def _tail(folder: Path, rank: int) -> str:
    text = _output(folder, rank).read_text(errors="replace")
    return f"--- host {rank} ---\n{text[-4000:]}"
