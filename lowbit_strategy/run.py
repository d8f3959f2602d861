"""Runs an Accelerate or Hugging Face Trainer script with compressed gradients, if the script would not find this
package by itself.

    python -m lowbit_strategy.run [--lowbit_config FILE] train.py --its-own-args
    python -m lowbit_strategy.run [--lowbit_config FILE] -m package.train --its-own-args

If autoloading works (``lowbit doctor`` says so), the environment variable LOWBIT_CONFIG does the same. Its value is a
file with a ``lowbit_config`` section, or the section itself:

    LOWBIT_CONFIG=job.yaml torchrun ... train.py
"""

from __future__ import annotations

import argparse
import os
import runpy
import sys
from collections.abc import Sequence

from lowbit_strategy.autoload import VARIABLE, serve
from lowbit_strategy.config_file.section import export, read_section


def main(argv: Sequence[str] | None = None) -> None:
    """Run the script, and exit with its status, or with 2 if the section is missing or wrong."""
    arguments = _parser().parse_args(argv)
    try:
        _prepare(arguments)
    except ValueError as error:
        print(f"lowbit: {error}", file=sys.stderr)
        raise SystemExit(2) from None
    run_script(arguments.target, arguments.arguments, module=arguments.module)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m lowbit_strategy.run",
        description="Run an Accelerate or Hugging Face Trainer script with compressed gradients.",
        allow_abbrev=False,
    )
    parser.add_argument("--lowbit_config", metavar="FILE", help="file with a lowbit_config section, or the section")
    parser.add_argument("-m", "--module", action="store_true", help="the target is a module, as for python -m")
    parser.add_argument("target", help="the script")
    parser.add_argument("arguments", nargs=argparse.REMAINDER, help="its arguments")
    return parser


def _prepare(arguments: argparse.Namespace) -> None:
    """Put the section into the environment, where every `Accelerator` finds it."""
    source = arguments.lowbit_config or os.environ.get(VARIABLE)
    if not source:
        raise ValueError(f"no lowbit_config section: give --lowbit_config FILE, or set {VARIABLE} to the file")
    export(read_section(source))
    serve()


def run_script(target: str, arguments: Sequence[str], *, module: bool) -> None:
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


if __name__ == "__main__":
    main()
