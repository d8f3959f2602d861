"""Run a function on several real processes in a test. For scripts and commands: `scripts.run_script`.

    from testing.processes.ranks import run_ranks

    def _mean(rank, world_size, numel):          # a plain function of a module: found by name in every rank
        x = torch.full((numel,), float(rank))
        dist.all_reduce(x)
        return x                                 # anything that can be pickled; tensors travel by value

    def test_mean():
        results = run_ranks(_mean, 3, 10)        # [rank 0's value, rank 1's, rank 2's]

A rank that raises ends the run at once and the error quotes the rank and its traceback. A run that does not end within
`timeout` seconds is killed and the error quotes the Python stack of every thread of every rank.
"""

from __future__ import annotations

import contextlib
import faulthandler
import functools
import gc
import logging
import multiprocessing
import os
import pickle
import random
import signal
import socket
import sys
import tempfile
import time
import traceback
import warnings
from collections.abc import Callable, Mapping, Sequence
from datetime import timedelta
from importlib import metadata
from multiprocessing import forkserver, resource_tracker
from multiprocessing.connection import wait
from multiprocessing.context import ForkServerContext
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any, Literal
from unittest import mock

import torch
import torch.distributed as dist

from testing.processes.scripts import OUTPUT_CHARACTERS, describe_exit, environment, set_environment

GRACE_S = 3.0  # after the first failure the other ranks have this long to report theirs
START_LIMIT_S = 240.0  # for interpreters and imports, which take a minute where many programs share few cores
_RANDOM = random.SystemRandom()  # no seed of a test makes two of them ask for one port

ProcessGroup = Literal["file", "env"] | None


def free_port() -> int:
    """A TCP port nobody listens on now. Another process may take it before you do: prefer a file store.

    It is none of those that the system hands out to whoever asks for any: a rank whose launcher's port had become
    another rank's connection would wait for an answer for half an hour.
    """
    while True:
        with socket.socket() as listener, contextlib.suppress(OSError):
            port = _RANDOM.randrange(10_000, 32_000)
            listener.bind(("127.0.0.1", port))
            return port


def run_ranks(
    fn: Callable[..., Any],
    world_size: int,
    *args: Any,
    timeout: float = 60,
    env: Mapping[str, str | None] | None = None,
    process_group: ProcessGroup = "file",
) -> list[Any]:
    """Run ``fn(rank, world_size, *args)`` in `world_size` processes and return every rank's value, in rank order.

    Each rank has RANK, LOCAL_RANK, WORLD_SIZE, LOCAL_WORLD_SIZE, MASTER_ADDR, MASTER_PORT (a free port) and
    OMP_NUM_THREADS=1 set, uses one torch thread, and destroys its process groups on the way out.

    Ranks are forked from a server that holds what this process had imported before its first test or run.
    With `env`, or where CUDA is present, each rank is a fresh interpreter instead, so that variables read on import
    (TRITON_INTERPRET, for one) are in place before anything is imported.

    Args:
        fn: A function of a module, found by name; not a lambda or a nested function.
        world_size: Number of processes.
        args: Passed on to `fn`; must pickle.
        timeout: Seconds, from when all ranks have started, until every rank's stacks are dumped and all are killed.
        env: Environment variables; None removes one.
        process_group: ``"file"`` makes the default gloo group through a file, ``"env"`` through MASTER_PORT, None
            leaves it to `fn` (Lightning and Accelerate make their own: pass None for them).

    Raises:
        AssertionError: A rank raised, died or hung; the text has tracebacks, stacks and what the ranks printed.
    """
    with tempfile.TemporaryDirectory(prefix="ranks-") as folder:
        run = _Run(Path(folder), world_size, timeout)
        run.start(fn, args, env, process_group)
        try:
            failure = run.wait()
        finally:
            run.kill()
        output = run.output()
        if failure:
            raise AssertionError(f"{failure}\n{output}")
        if output:
            print(output)
        return [pickle.loads((run.folder / f"{rank}.result").read_bytes()) for rank in range(world_size)]


class _Run:
    """The processes of one `run_ranks` and the folder where each leaves its result, error, stacks and output."""

    def __init__(self, folder: Path, world_size: int, timeout: float) -> None:
        self.folder = folder
        self.world_size = world_size
        self.timeout = timeout
        self.processes: list[BaseProcess] = []

    def start(
        self,
        fn: Callable[..., Any],
        args: tuple[Any, ...],
        env: Mapping[str, str | None] | None,
        process_group: ProcessGroup,
    ) -> None:
        fresh = bool(env) or torch.cuda.is_available()
        context = multiprocessing.get_context("spawn") if fresh else fork_server()
        # Pickled here, because multiprocessing would hand tensors over as shared memory that dies with this process.
        job = pickle.dumps((fn, args))
        port = str(free_port())
        for rank in range(self.world_size):
            variables = rank_variables(rank, self.world_size, port) | dict(env or {})
            process = context.Process(
                target=_rank_main,
                args=(rank, self.world_size, str(self.folder), job, variables, process_group, self.timeout),
            )
            with environment(variables):
                process.start()
            self.processes.append(process)

    def wait(self) -> str:
        """Until all ranks are done, one fails or time is up; returns what went wrong, or nothing."""
        self._wait_for_start()
        deadline = time.monotonic() + self.timeout
        failed = False
        while running := [process for process in self.processes if process.exitcode is None]:
            if not failed and any(process.exitcode for process in self.processes):
                failed = True
                deadline = min(deadline, time.monotonic() + GRACE_S)
            remaining = deadline - time.monotonic()
            if remaining <= 0:
                break
            wait([process.sentinel for process in running], timeout=remaining)
        if running:
            self._dump_stacks(running)
        if any(process.exitcode for process in self.processes):  # the last may have ended as the loop looked again
            return self._errors()
        if running:
            return f"{len(running)} of {self.world_size} ranks still ran after {self.timeout} s\n{self._stacks()}"
        return ""

    def _wait_for_start(self) -> None:
        deadline = time.monotonic() + START_LIMIT_S
        starting = set(range(self.world_size))
        while starting and time.monotonic() < deadline:
            starting = {r for r in starting if not (self.folder / f"{r}.stacks").exists()}
            if any(self.processes[r].exitcode is not None for r in starting):
                return
            time.sleep(0.02)

    def _dump_stacks(self, running: list[BaseProcess]) -> None:
        for process in running:
            if process.pid is not None:
                with contextlib.suppress(ProcessLookupError):  # it may end in this very moment
                    os.kill(process.pid, signal.SIGUSR1)
        time.sleep(0.5)  # the handler writes a file and says nothing when it is done

    def _stacks(self) -> str:
        parts = []
        for rank in range(self.world_size):
            path = self.folder / f"{rank}.stacks"
            text = path.read_text(errors="replace").strip() if path.exists() else ""
            if text:
                parts.append(f"--- stacks of rank {rank} ---\n{text}")
        return "\n".join(parts)

    def _errors(self) -> str:
        """The tracebacks, earliest first: later ones are often only the lost connection to the rank that failed."""
        paths = sorted(self.folder.glob("*.error"), key=lambda path: path.stat().st_mtime_ns)
        parts = [f"--- rank {path.stem} raised ---\n{path.read_text(errors='replace')}" for path in paths]
        reported = {int(path.stem) for path in paths}
        for rank, process in enumerate(self.processes):
            if rank not in reported and process.exitcode:
                how = describe_exit(process.exitcode)
                parts.append(f"--- rank {rank} {how} without a traceback ---")
        return "\n".join([f"{len(parts)} of {self.world_size} ranks failed", *parts, self._stacks()])

    def kill(self) -> None:
        for process in self.processes:
            if process.pid is not None:
                with contextlib.suppress(ProcessLookupError):  # the whole group is gone: nothing is left to kill
                    os.killpg(process.pid, signal.SIGKILL)  # the rank and what it started
                if process.exitcode is None:
                    process.kill()
        for process in self.processes:
            process.join()
            process.close()

    def output(self) -> str:
        parts = []
        for rank in range(self.world_size):
            path = self.folder / f"{rank}.output"
            text = path.read_text(errors="replace").rstrip() if path.exists() else ""
            if text:
                parts.append(f"--- output of rank {rank} ---\n{text[-OUTPUT_CHARACTERS:]}")
        return "\n".join(parts)


@functools.cache
def fork_server() -> ForkServerContext:
    """A server that ranks are forked from, itself a fork of this process: ranks begin with all that is imported here.

    tests/conftest.py starts it before the first test, whose threads and settings would be in no rank's way then.
    """
    resource_tracker.ensure_running()
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload([])
    with mock.patch("multiprocessing.util.spawnv_passfds", _fork):
        forkserver.ensure_running()
    return context


def _fork(_: str, command: Sequence[str], descriptors: Sequence[int]) -> int:
    """A fork of this process in place of an interpreter that runs `command`."""
    sys.stdout.flush()
    sys.stderr.flush()
    gc.collect()
    gc.freeze()  # or each full collection, here and in a rank, would walk over a million objects
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # threads of numpy and execnet, which hold nothing now
        pid = os.fork()
    if pid:
        return pid
    try:
        _let_go_of_files(keep={0, 1, 2, *descriptors})
        logging.root.handlers.clear()  # pytest's, with which warnings would not be printed
        torch.manual_seed(0)
        _read_entry_points_once()
        exec(command[-1], {})
    except Exception:
        traceback.print_exc()
    finally:
        os._exit(0)


def _read_entry_points_once() -> None:
    """For every Trainer Lightning reads those of all packages: a twentieth of what its tests take."""
    for name in ("lightning.fabric.utilities.registry", "lightning_fabric.utilities.registry"):
        if name in sys.modules:
            vars(sys.modules[name])["entry_points"] = functools.cache(metadata.entry_points)


def _let_go_of_files(keep: set[int]) -> None:
    """Put nothing in place of every other open file: whoever waits for its last user waits for no rank.

    They stay open, so that no number is given to another file while an object here would still close it.
    """
    nothing = os.open(os.devnull, os.O_RDWR)
    for name in os.listdir("/dev/fd"):
        if (number := int(name)) not in keep:
            with contextlib.suppress(OSError):  # that of the listing itself
                os.fstat(number)
                os.dup2(nothing, number)
    sys.stdout, sys.stderr = (open(number, "w", buffering=1, closefd=False) for number in (1, 2))  # noqa: SIM115


def rank_variables(rank: int, world_size: int, port: str) -> dict[str, str | None]:
    return {
        "RANK": str(rank),
        "LOCAL_RANK": str(rank),
        "WORLD_SIZE": str(world_size),
        "LOCAL_WORLD_SIZE": str(world_size),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": port,
        "OMP_NUM_THREADS": "1",
    }


def _rank_main(
    rank: int,
    world_size: int,
    folder_name: str,
    job: bytes,
    variables: dict[str, str | None],
    process_group: ProcessGroup,
    timeout: float,
) -> None:
    os.setpgid(0, 0)  # so that the launcher can kill this rank together with what it started
    folder = Path(folder_name)
    prepare_process(folder, str(rank), rank, variables, timeout)
    try:
        result = _call(rank, world_size, folder, job, process_group, timeout)
        (folder / f"{rank}.result").write_bytes(result)
    except BaseException:
        (folder / f"{rank}.error").write_text(traceback.format_exc())
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(1)  # no clean-up: with a collective pending it may never come back, and the error is already written
    faulthandler.cancel_dump_traceback_later()


def join_group(rank: int, world_size: int, folder: Path | None, timeout_s: float) -> None:
    """Make the default process group, through a file in `folder` or, without one, through MASTER_PORT.

    It returns once every rank is connected: one that ended while another still connects would break that connection.
    """
    method = "env://" if folder is None else f"file://{folder}/store"
    limit = timedelta(seconds=timeout_s)
    dist.init_process_group("gloo", init_method=method, rank=rank, world_size=world_size, timeout=limit)
    store = dist.distributed_c10d._get_default_store()
    store.set(f"connected/{rank}", "")
    store.wait([f"connected/{other}" for other in range(world_size)], limit)


def _call(rank: int, world_size: int, folder: Path, job: bytes, process_group: ProcessGroup, timeout: float) -> bytes:
    fn, args = pickle.loads(job)
    if process_group is not None:
        # The launcher's limit comes first, and has stacks to show.
        join_group(rank, world_size, folder if process_group == "file" else None, timeout + START_LIMIT_S)
    result = pickle.dumps(fn(rank, world_size, *args))
    if dist.is_initialized():
        dist.destroy_process_group()
    return result


def prepare_process(folder: Path, key: str, rank: int, variables: Mapping[str, str | None], timeout: float) -> None:
    """Output and stacks go to files of `folder`, variables and threads are those of a rank, and an end is certain."""
    redirect_output(folder / f"{key}.output")
    stacks = (folder / f"{key}.stacks").open("w")  # open until the process ends: faulthandler keeps the descriptor
    faulthandler.enable(stacks)
    faulthandler.register(signal.SIGUSR1, stacks, all_threads=True)
    # If the launcher itself is killed nobody else ends this process.
    faulthandler.dump_traceback_later(timeout + START_LIMIT_S, exit=True, file=stacks)
    set_environment({"OMP_NUM_THREADS": "1", **variables})
    tell_lightning(rank)
    torch.set_num_threads(1)


def redirect_output(path: Path) -> None:
    file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    os.dup2(file, 1)
    os.dup2(file, 2)
    os.close(file)


def tell_lightning(rank: int) -> None:
    """Lightning reads RANK when it is imported, which in a forked rank was before RANK was set."""
    module = sys.modules.get("lightning_utilities.core.rank_zero")
    if module is not None:
        module.rank_zero_only.rank = rank
