"""``lowbit launch``: ``accelerate launch`` plus a ``lowbit_config`` section, for scripts that know nothing of it.

1. take Accelerate's own arguments, and the configuration file they name
2. take the section out of it, validate it, check that this kind of run can be served
3. put the section into the environment and the run module (`lowbit_strategy.run`) before the script
4. hand everything else to Accelerate's launcher
"""

from __future__ import annotations

import argparse
import contextlib
import os
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import yaml
from accelerate.commands.config.config_args import default_config_file
from accelerate.commands.launch import launch_command

from lowbit_strategy.accelerate.support import check_served
from lowbit_strategy.config.section import SECTION, Section, export, plugin_from_section, read_section, section_of
from lowbit_strategy.launch.arguments import launch_parser
from lowbit_strategy.launch.dry_run_report import Planned
from lowbit_strategy.launch.exit_status import end_as, forwarded_signals
from lowbit_strategy.launch.linked import Linked

_RUN = "lowbit_strategy.run"
_BENCH = "lowbit_strategy.launch.bench"
_AXES = ("tp_size", "cp_size", "sp_size")


def launch(argv: Sequence[str]) -> None:
    """Raises:
    ValueError: The section is missing or wrong, or the run cannot be served.
    SystemExit: With the script's status.
    """
    args = launch_parser().parse_args(argv)
    accelerate_config = _load(args.config_file)
    if args.no_python:
        raise ValueError("lowbit launch runs Python scripts: leave --no_python out")
    _check(args, accelerate_config)
    if not args.module and args.training_script == "bench" and not os.path.exists("bench"):  # no script of that name
        args.module, args.training_script = True, _BENCH
    else:
        section = _section(args, accelerate_config)
        plugin_from_section(section)
        _insert_run_module(args)
        os.environ.update(export(section))
    if args.dry_run:
        _dry_run(args, accelerate_config)
    _several_on_cpu(args, accelerate_config)
    _keep_failures(args, accelerate_config)
    with _plain_copy(args, accelerate_config), forwarded_signals():
        end_as(launch_command, args)


def _load(path: str | None) -> dict[str, Any]:
    """The configuration file that Accelerate would read, section included."""
    if path is None and not os.path.isfile(default_config_file):
        return {}
    name = path or default_config_file
    if not os.path.isfile(name):
        raise ValueError(f"there is no configuration file {name!r}")
    with open(name, encoding="utf-8") as file:
        content = yaml.safe_load(file)  # JSON is YAML
    if not isinstance(content, dict):
        raise ValueError(f"{name!r} is not a configuration file of Accelerate: it must be a mapping")
    return content


def _section(args: argparse.Namespace, config: Mapping[str, Any]) -> Section:
    if args.lowbit_config:
        return read_section(args.lowbit_config)
    if not args.config_file and SECTION not in config:
        raise ValueError(
            f"there is no {SECTION} section: give a configuration file that has one, --config_file job.yaml (lowbit"
            " config writes it), or the section itself, --lowbit_config '{compressor: loco, bits: 4}'"
        )
    return section_of(config, repr(args.config_file or default_config_file))


def _check(args: argparse.Namespace, config: Mapping[str, Any]) -> None:
    if config.get("compute_environment", "LOCAL_MACHINE") != "LOCAL_MACHINE":
        raise ValueError(f"compute_environment {config['compute_environment']} cannot be served: use LOCAL_MACHINE")
    kind = _kind(args, config)
    given: set[str] = getattr(args, "nondefault", set())
    fsdp = config.get("fsdp_config") or {}
    version = args.fsdp_version if "fsdp_version" in given or not fsdp else fsdp.get("fsdp_version", args.fsdp_version)
    sizes = config.get("parallelism_config") or {}
    axes = {}
    for axis in _AXES:
        key = f"parallelism_config_{axis}"
        axes[axis] = int(getattr(args, key, 1) if key in given else sizes.get(key, 1))
    check_served(kind, fsdp_version=int(version), axes=axes)


def _kind(args: argparse.Namespace, config: Mapping[str, Any]) -> str:
    """The distributed type: flags go before the file, as in Accelerate."""
    flags = {
        "use_deepspeed": "DEEPSPEED",
        "use_fsdp": "FSDP",
        "use_megatron_lm": "MEGATRON_LM",
        "tpu": "XLA",
        "multi_gpu": "MULTI_GPU",
    }
    chosen = [kind for flag, kind in flags.items() if getattr(args, flag)]
    return chosen[0] if chosen else str(config.get("distributed_type", "NO"))


def _num_processes(args: argparse.Namespace, config: Mapping[str, Any]) -> int:
    """The number of processes that Accelerate would start."""
    if args.num_processes is not None:
        return int(args.num_processes)
    if "num_processes" in config:
        return int(config["num_processes"])
    import torch

    return max(torch.cuda.device_count(), 1)


def _insert_run_module(args: argparse.Namespace) -> None:
    target = ["-m", args.training_script] if args.module else [args.training_script]
    if target == ["-m", _RUN]:
        return
    if not args.module and not os.path.isfile(args.training_script):
        raise ValueError(f"there is no script {args.training_script!r}")
    args.training_script_args = [*target, *args.training_script_args]
    args.module, args.training_script = True, _RUN


def _several_on_cpu(args: argparse.Namespace, config: Mapping[str, Any]) -> None:
    """Accelerate (1.15) starts one process on CPU where several are asked for, unless mpirun is there, and under FSDP
    independent ones: start them through torchrun, and set the variable that keeps them on CPU.
    """
    import torch

    asked = args.cpu or config.get("use_cpu", False) or _kind(args, config) == "MULTI_CPU"
    uses_mpi = args.mpirun_hostfile or (config.get("mpirun_config") or {}).get("mpirun_hostfile")
    if uses_mpi or _num_processes(args, config) < 2 or (torch.cuda.is_available() and not asked):
        return
    if not asked:
        print(f"lowbit launch: no GPU here: {_num_processes(args, config)} processes on CPU", file=sys.stderr)
    os.environ["ACCELERATE_USE_CPU"] = "true"
    args.cpu = False
    if not args.use_fsdp and _kind(args, config) != "FSDP":
        args.multi_gpu = True


def _keep_failures(args: argparse.Namespace, config: dict[str, Any]) -> None:
    """Accelerate's debug mode prints a failure and then ends with status 0: switch on what it does in the children
    only.
    """
    if args.debug or config.get("debug"):
        os.environ["ACCELERATE_DEBUG_MODE"] = "true"
        args.debug = config["debug"] = False


@contextlib.contextmanager
def _plain_copy(args: argparse.Namespace, config: Mapping[str, Any]) -> Iterator[None]:
    """Accelerate refuses keys it does not know: point it to a copy without ours."""
    if not (args.config_file or SECTION in config):
        yield
        return
    with tempfile.TemporaryDirectory(prefix="lowbit-") as folder:
        args.config_file = os.path.join(folder, "accelerate.yaml")
        with open(args.config_file, "w", encoding="utf-8") as file:
            yaml.safe_dump({key: value for key, value in config.items() if key != SECTION}, file)
        yield


def _dry_run(args: argparse.Namespace, config: Mapping[str, Any]) -> None:
    """One process in this one's place: the run module reports and ends."""
    num_nodes = int(args.num_machines or config.get("num_machines") or 1)
    planned = Planned(
        scatter=_kind(args, config) == "FSDP", world_size=_num_processes(args, config), num_nodes=num_nodes
    )
    options = ["--lowbit_dry_run", str(planned)]
    if args.link is not None:
        options += ["--lowbit_link", str(Linked.of(args.link, args.latency, args.compute))]
    elif args.latency is not None or args.compute is not None:
        raise ValueError("--latency and --compute need --link, the bandwidth of a machine")
    os.execv(sys.executable, [sys.executable, "-m", _RUN, *options, *args.training_script_args])
