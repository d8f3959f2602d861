"""Run an unmodified Accelerate or Hugging Face Trainer script with compressed gradients.

    python -m lowbit_strategy.run [--lowbit_config FILE] train.py --its-own-args
    python -m lowbit_strategy.run [--lowbit_config FILE] -m package.train --its-own-args

This is what ``lowbit launch`` starts in every process, and what other launchers can start instead of the script:

    accelerate launch ... -m lowbit_strategy.run --lowbit_config job.yaml train.py
    torchrun ... -m lowbit_strategy.run --lowbit_config job.yaml train.py

The ``lowbit_config`` section comes from FILE, or from the environment variable LOWBIT_CONFIG (a file, or the section).
"""

from __future__ import annotations

import argparse
import os
import runpy
import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING

import wrapt

if TYPE_CHECKING:
    from lowbit_strategy.launch.auto_attach import AutoAttach
    from lowbit_strategy.launch.dry_run import DryRun


def main(argv: Sequence[str] | None = None) -> None:
    """Raises:
    SystemExit: With status 2 for a section that is missing or wrong; otherwise whatever the script ends with.
    """
    arguments = _parser().parse_args(argv)
    try:
        around = _around(arguments)
    except ValueError as error:
        print(f"lowbit: {error}", file=sys.stderr)
        raise SystemExit(2) from None
    around.install()
    _run(arguments.target, arguments.arguments, module=arguments.module)
    around.finish()
    _leave()


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m lowbit_strategy.run",
        description="Run an Accelerate or Hugging Face Trainer script with compressed gradients.",
        allow_abbrev=False,
    )
    parser.add_argument("--lowbit_config", metavar="FILE", help="file with a lowbit_config section, or the section")
    parser.add_argument("--lowbit_dry_run", metavar="KIND:PROCESSES", help="report for ddp:8 or fsdp:8; do not train")
    parser.add_argument("--lowbit_link", metavar="LINK,LATENCY,COMPUTE", help="for a dry run: predict its steps too")
    parser.add_argument("-m", "--module", action="store_true", help="the target is a module, as for python -m")
    parser.add_argument("target", help="the script")
    parser.add_argument("arguments", nargs=argparse.REMAINDER, help="its arguments")
    return parser


def _around(arguments: argparse.Namespace) -> AutoAttach | DryRun:
    """What goes around the script: attaches, or reports only."""
    from lowbit_strategy.config.section import (
        VARIABLE,
        plugin_from_section,
        read_section,
        section_from_environment,
    )
    from lowbit_strategy.launch.auto_attach import AutoAttach
    from lowbit_strategy.launch.dry_run import DryRun
    from lowbit_strategy.launch.dry_run_report import Planned
    from lowbit_strategy.launch.linked import Linked

    section = read_section(arguments.lowbit_config) if arguments.lowbit_config else section_from_environment()
    if section is None:
        raise ValueError(f"no lowbit_config section: give --lowbit_config FILE, or set {VARIABLE} to the file")
    plugin = plugin_from_section(section)
    if arguments.lowbit_dry_run:
        linked = Linked.parse(arguments.lowbit_link) if arguments.lowbit_link else None
        return DryRun(plugin, Planned.parse(arguments.lowbit_dry_run), linked)
    wrapt.register_post_import_hook(_bind_trainers, "transformers.trainer")
    return AutoAttach(plugin)


def _bind_trainers(module: object) -> None:
    """The Trainer has checkpoints of its own: residuals must go along."""
    from lowbit_strategy.transformers.binding import bind_every_trainer

    bind_every_trainer(module)


def _run(target: str, arguments: Sequence[str], *, module: bool) -> None:
    """Run the script or module as ``python target arguments`` or ``python -m target arguments`` would."""
    sys.argv = [target, *arguments]
    if module:
        runpy.run_module(target, run_name="__main__", alter_sys=True)
        return
    if not os.path.isfile(target):
        print(f"lowbit: there is no script {target!r}", file=sys.stderr)
        raise SystemExit(2)
    sys.path[0] = os.path.dirname(os.path.abspath(target))
    runpy.run_path(target, run_name="__main__")


def _leave() -> None:
    """For scripts that do not: gloo aborts now and then in a process that ends with its groups open."""
    import torch.distributed as dist

    if dist.is_initialized():
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
