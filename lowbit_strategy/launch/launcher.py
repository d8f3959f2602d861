"""``lowbit launch``: ``accelerate launch`` for a run that has to be compressed.

1. Accelerate completes the arguments from the configuration file, section included
2. `_complete`: a section has to be there, a dry run is run, several processes are started on CPU too
3. Accelerate starts the processes, after the checks that `accelerate_hooks` adds
4. this process ends as they do: exit status and signals pass through, both ways
"""

from __future__ import annotations

import argparse
import contextlib
import copy
import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict
from types import FrameType
from typing import Any, NoReturn
from unittest import mock

import psutil
import torch
from accelerate.commands import launch as accelerate_launch
from accelerate.commands.config.config_args import default_config_file
from accelerate.commands.launch import launch_command_parser

from lowbit_strategy.autoload import SECTION, VARIABLE, problem
from lowbit_strategy.launch.accelerate_hooks import hand_on
from lowbit_strategy.launch.dry_run import Planned
from lowbit_strategy.launch.section import read_config, section_of

# Parsed, but what they are for is refused.
_NOT_SHOWN = ("DeepSpeed Arguments", "Megatron-LM Arguments", "ParallelismConfig Arguments", "TPU", "AWS Arguments")
_FORWARDED = (signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2, signal.SIGINT)
_RUN = "lowbit_strategy.run"


def launch_parser() -> argparse.ArgumentParser:
    parser: argparse.ArgumentParser = launch_command_parser()
    parser.prog = "lowbit launch"
    parser.usage = "lowbit launch [flags] train.py [its own arguments]"
    parser.formatter_class = _Help
    parser.description = (
        "Run an Accelerate or Hugging Face Trainer script with compressed gradients: accelerate launch with a"
        f" {SECTION} section in its configuration file (lowbit config writes one)."
    )
    ours = parser.add_argument_group("Compression Arguments", "Those that accelerate launch does not have.")
    ours.add_argument(
        "--lowbit_config",
        help=f"A file with a {SECTION} section, or the section itself, '{{compressor: loco, bits: 4}}'. Default: the"
        " section of --config_file.",
    )
    ours.add_argument(
        "--dry_run",
        action="store_true",
        help="Report what would be compressed, bytes and residual memory for the model that the script prepares.",
    )
    parser._action_groups = [group for group in parser._action_groups if group.title not in _NOT_SHOWN]
    return parser


class _Help(argparse.HelpFormatter):
    """Every flag once. Accelerate's own formatter takes ``launch`` in ``sys.argv`` for a choice and hides most."""

    def add_argument(self, action: argparse.Action) -> None:
        shown = copy.copy(action)
        shown.option_strings = [option for option in action.option_strings if "-" not in option[2:]]
        super().add_argument(shown)


def end_as(call: Callable[..., Any], *args: Any) -> None:
    """Run Accelerate's launcher; leave with the script's status, ``128 + n`` if signal n ended it.

    Raises:
        SystemExit: The script failed.
    """
    from torch.distributed.elastic.multiprocessing.api import SignalException
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError

    try:
        call(*args)
    except subprocess.CalledProcessError as error:
        _leave(error.returncode)
    except ChildFailedError as error:
        _, failure = error.get_first_failure()
        print(error, file=sys.stderr)  # torchrun's summary: which rank, when, and where its log is
        _leave(failure.exitcode)
    except SignalException as error:
        _leave(-int(error.sigval))


def _leave(status: int) -> NoReturn:
    raise SystemExit(128 - status if status < 0 else status)


@contextlib.contextmanager
def forwarded_signals() -> Iterator[None]:
    """Signals sent to the launcher reach the processes it has started.

    torchrun does that itself, with handlers of its own; this is for the single process that Accelerate starts
    otherwise, which would be left behind.
    """

    def forward(number: int, frame: FrameType | None) -> None:
        if number == signal.SIGINT and _from_terminal():
            return  # Ctrl-C has reached the children already
        for child in psutil.Process().children():
            with contextlib.suppress(psutil.NoSuchProcess):
                child.send_signal(number)

    before = {number: signal.signal(number, forward) for number in _FORWARDED}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _from_terminal() -> bool:
    """Whether this process is in the foreground of a terminal."""
    try:
        return os.tcgetpgrp(0) == os.getpgrp()
    except OSError:
        return False


def launch(argv: Sequence[str]) -> None:
    """Raises:
    ValueError: The section is missing or wrong, or the run cannot be served.
    SystemExit: With the script's status.
    """
    args = launch_parser().parse_args(argv)
    if args.config_file is not None:
        if not os.path.isfile(args.config_file):
            raise ValueError(f"there is no configuration file {args.config_file!r}")
        read_config(args.config_file)
    completed = accelerate_launch._validate_launch_command(args)
    args, defaults, _ = completed
    _complete(args, defaults)
    once = mock.patch.object(accelerate_launch, "_validate_launch_command", return_value=completed)
    with once, forwarded_signals():
        end_as(accelerate_launch.launch_command, args)


def _complete(args: argparse.Namespace, defaults: Any) -> None:
    """Args:
    args: Completed by Accelerate.
    defaults: Defaults of the configuration file; None: there is none.
    """
    _check_section(args, defaults)
    if args.dry_run:
        _dry_run(args)
    _several_on_cpu(args, defaults)
    if args.debug:  # Accelerate would print a failure and then end with status 0: debug in the children only
        os.environ["ACCELERATE_DEBUG_MODE"] = "true"
        args.debug = False


def _check_section(args: argparse.Namespace, defaults: Any) -> None:
    if not (getattr(args, SECTION, None) or os.environ.get(VARIABLE)):
        if defaults is not None:
            section_of({}, repr(args.config_file or default_config_file))
        raise ValueError(
            f"there is no {SECTION} section: give a configuration file that has one, --config_file job.yaml (lowbit"
            " config writes it), or the section itself, --lowbit_config '{compressor: loco, bits: 4}'"
        )
    hand_on(args)
    why = None if _runs_run_module(args) or args.dry_run else problem()
    if why is not None:
        raise ValueError(
            f"the script would not find lowbit_strategy by itself ({why}), and would train uncompressed: undo that, or"
            f" launch it as -m {_RUN} {args.training_script}"
        )


def _runs_run_module(args: argparse.Namespace) -> bool:
    return bool(args.module) and args.training_script == _RUN


def _several_on_cpu(args: argparse.Namespace, defaults: Any) -> None:
    """Accelerate (1.15) starts one process on CPU where several are asked for, unless mpirun is there, and under FSDP
    independent ones: start them through torchrun, and set the variable that keeps them on CPU.
    """
    asked = args.cpu or args.use_cpu or (defaults is not None and defaults.distributed_type == "MULTI_CPU")
    if args.mpirun_hostfile or args.num_processes < 2 or (torch.cuda.is_available() and not asked):
        return
    if not asked:
        print(f"lowbit launch: no GPU here: {args.num_processes} processes on CPU", file=sys.stderr)
    os.environ["ACCELERATE_USE_CPU"] = "true"
    args.cpu = False
    args.multi_gpu = not args.use_fsdp


def _dry_run(args: argparse.Namespace) -> None:
    """One process in this one's place: the run module reports and ends."""
    planned = Planned(
        scatter=args.use_fsdp, world_size=max(args.num_processes, 1), num_nodes=int(args.num_machines or 1)
    )
    target = [] if _runs_run_module(args) else [*(["-m"] if args.module else []), args.training_script]
    command = [
        sys.executable,
        "-m",
        _RUN,
        "--lowbit_dry_run",
        json.dumps(asdict(planned)),
        *target,
        *args.training_script_args,
    ]
    os.execv(sys.executable, command)
