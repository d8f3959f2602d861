"""Run a script or a command in a test, as a user would: fresh interpreters, a hard limit, output shown on failure."""

from __future__ import annotations

import contextlib
import os
import runpy
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

import psutil

from lowbit_strategy.autoload import serve

REPOSITORY = Path(__file__).resolve().parents[2]
OUTPUT_CHARACTERS = 20_000  # of each process's output, counted from its end, that a failure shows
_GRACE_S = 5.0  # between the signal that prints stacks and the one that kills


def set_environment(variables: Mapping[str, str | None]) -> None:
    """Set variables of this process; None removes one."""
    for name, value in variables.items():
        if value is None:
            os.environ.pop(name, None)
        else:
            os.environ[name] = value


@contextlib.contextmanager
def environment(variables: Mapping[str, str | None]) -> Iterator[None]:
    """`set_environment`, undone at the end."""
    before = {name: os.environ.get(name) for name in variables}
    set_environment(variables)
    try:
        yield
    finally:
        set_environment(before)


def describe_exit(exitcode: int) -> str:
    return f"died of {signal.Signals(-exitcode).name}" if exitcode < 0 else f"exited with status {exitcode}"


def run_script(
    script: str | Path | Sequence[str | Path],
    world_size: int = 1,
    *,
    timeout: float = 120,
    env: Mapping[str, str | None] | None = None,
    cwd: str | Path | None = None,
    check: bool = True,
) -> subprocess.CompletedProcess[str]:
    """Run a script or command as a user would, in fresh interpreters, and return its status and output.

    Args:
        script: A ``.py`` file, or a list: ``["train.py", "--flag"]``, ``["-m", "package.module"]``, ``["-c", code]``
            (these run under this Python) or any other command as it is, ``["lowbit", "doctor"]``.
        world_size: More than one runs it under torchrun on this machine (Python files and modules only).
        timeout: Seconds until all processes it started print their stacks and are killed.
        env: Environment variables; None removes one. This Python's commands come first on PATH, the repository is on
            PYTHONPATH and OMP_NUM_THREADS is 1.
        cwd: Working folder; this process's by default.
        check: Raise on a non-zero exit status.

    Raises:
        AssertionError: It failed (with `check`) or did not end in time; the text has its output.
    """
    command = _command(script, world_size)
    variables: dict[str, str | None] = {
        "PATH": os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]]),
        "PYTHONPATH": os.pathsep.join([str(REPOSITORY), *filter(None, [os.environ.get("PYTHONPATH")])]),
        "OMP_NUM_THREADS": "1",
        "PYTHONFAULTHANDLER": "1",
        **(env or {}),
    }
    # Files, not pipes: a grandchild that outlives the command would keep a pipe open.
    with tempfile.TemporaryFile("w+") as out, tempfile.TemporaryFile("w+") as err:
        with environment(variables):
            process = subprocess.Popen(command, stdout=out, stderr=err, cwd=cwd, start_new_session=True)
        try:
            process.wait(timeout)
            hung = False
        except subprocess.TimeoutExpired:
            hung = True
        finally:
            _end_tree(process)
        out.seek(0)
        err.seek(0)
        done = subprocess.CompletedProcess(command, process.returncode, out.read(), err.read())
    if hung or (check and done.returncode):
        what = f"still ran after {timeout} s" if hung else describe_exit(done.returncode)
        shown = (
            f"--- stdout ---\n{done.stdout[-OUTPUT_CHARACTERS:]}\n--- stderr ---\n{done.stderr[-OUTPUT_CHARACTERS:]}"
        )
        raise AssertionError(f"{' '.join(command)} {what}\n{shown}")
    return done


def as_main(
    rank: int,
    world_size: int,
    script: str | Path,
    arguments: Sequence[str | Path],
    variables: Mapping[str, str | None],
    cwd: str | Path,
) -> None:
    """For `run_ranks`: a script in a rank, where the frameworks have been imported already.

    It saves the seconds that `run_script` takes for interpreters and imports. Start one there where these matter.
    """
    set_environment(variables)
    os.chdir(cwd)
    sys.argv = [str(script), *map(str, arguments)]
    serve()  # as ``import torch`` does, with these variables
    runpy.run_path(str(script), run_name="__main__")


def _command(script: str | Path | Sequence[str | Path], world_size: int) -> list[str]:
    arguments = [str(script)] if isinstance(script, str | Path) else [str(part) for part in script]
    is_python = arguments[0].endswith(".py") or arguments[0] in ("-m", "-c")
    if world_size > 1:
        if not is_python or arguments[0] == "-c":
            raise ValueError(
                f"only Python files and modules run under torchrun, not {arguments[0]!r}: use world_size=1"
            )
        torchrun = ["-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={world_size}"]
        arguments = [*torchrun, *arguments]
    return [sys.executable, *arguments] if is_python else arguments


def _end_tree(process: subprocess.Popen[bytes]) -> None:
    """End the process and all it started, after they have printed their stacks.

    SIGABRT makes Python print them; SIGKILL, because Lightning survives SIGTERM. torchrun's workers have sessions of
    their own, so the tree is walked instead of killing the process group.
    """
    if process.poll() is not None:
        return
    tree = [*psutil.Process(process.pid).children(recursive=True), psutil.Process(process.pid)]
    for member in tree:
        with contextlib.suppress(psutil.NoSuchProcess):
            member.send_signal(signal.SIGABRT)
    _, alive = psutil.wait_procs(tree, timeout=_GRACE_S)
    for member in alive:
        with contextlib.suppress(psutil.NoSuchProcess):
            member.kill()
    process.wait()
