"""``lowbit launch``: ``accelerate launch`` for a run that has to be compressed.

1. Accelerate completes the arguments from the configuration file, section included
2. `_complete`: a section has to be there, a dry run is run, several processes are started on CPU too
3. Accelerate starts the processes, after the checks that `accelerate_commands` adds
4. this process ends as they do
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Sequence
from typing import Any
from unittest import mock

import torch
from accelerate.commands import launch as accelerate_launch
from accelerate.commands.config.config_args import default_config_file

from lowbit_strategy.autoload import SECTION, VARIABLE, problem
from lowbit_strategy.config.section import section_of
from lowbit_strategy.launch.accelerate_commands import hand_on
from lowbit_strategy.launch.arguments import launch_parser
from lowbit_strategy.launch.dry_run_report import Planned
from lowbit_strategy.launch.exit_status import end_as, forwarded_signals
from lowbit_strategy.launch.linked import Linked

_RUN = "lowbit_strategy.run"
_BENCH = "lowbit_strategy.advisor.bench"


def launch(argv: Sequence[str]) -> None:
    """Raises:
    ValueError: The section is missing or wrong, or the run cannot be served.
    SystemExit: With the script's status.
    """
    args = launch_parser().parse_args(argv)
    if args.config_file is not None and not os.path.isfile(args.config_file):
        raise ValueError(f"there is no configuration file {args.config_file!r}")
    complete = accelerate_launch._validate_launch_command

    def complete_more(args: argparse.Namespace) -> tuple[argparse.Namespace, Any, bool]:
        args, defaults, mixed_precision_of_file = complete(args)
        _complete(args, defaults)
        return args, defaults, mixed_precision_of_file

    with mock.patch.object(accelerate_launch, "_validate_launch_command", complete_more), forwarded_signals():
        end_as(accelerate_launch.launch_command, args)


def _complete(args: argparse.Namespace, defaults: Any) -> None:
    """Args:
    args: Completed by Accelerate.
    defaults: Of the configuration file; None: there is none.
    """
    if not args.module and args.training_script == "bench" and not os.path.exists("bench"):  # no script of that name
        args.module, args.training_script = True, _BENCH
    else:
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
    options = ["--lowbit_dry_run", str(planned)]
    if args.link is not None:
        options += ["--lowbit_link", str(Linked.of(args.link, args.latency, args.compute))]
    elif args.latency is not None or args.compute is not None:
        raise ValueError("--latency and --compute need --link, the bandwidth of a machine")
    target = [] if _runs_run_module(args) else [*(["-m"] if args.module else []), args.training_script]
    command = [sys.executable, "-m", _RUN, *options, *target, *args.training_script_args]
    os.execv(sys.executable, command)
