"""The arguments of ``lowbit launch``: those of ``accelerate launch`` and two more."""

from __future__ import annotations

import argparse
import copy

from accelerate.commands.launch import launch_command_parser

from lowbit_strategy.config.section import SECTION

# Parsed, but what they are for is refused.
_NOT_SHOWN = ("DeepSpeed Arguments", "Megatron-LM Arguments", "ParallelismConfig Arguments", "TPU", "AWS Arguments")


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
    ours.add_argument(
        "--link", help="With --dry_run: bandwidth of a machine, such as 1gbit; adds predicted step times."
    )
    ours.add_argument("--latency", help="With --link: between machines, one way. Default: 0.1ms.")
    ours.add_argument(
        "--compute",
        help="With --link: a step without communication, such as 0.9s. Default: a few steps of the script are"
        " timed here, in one process.",
    )
    parser._action_groups = [group for group in parser._action_groups if group.title not in _NOT_SHOWN]
    return parser


class _Help(argparse.HelpFormatter):
    """Every flag once. Accelerate's own formatter takes ``launch`` in ``sys.argv`` for a choice and hides most."""

    def add_argument(self, action: argparse.Action) -> None:
        shown = copy.copy(action)
        shown.option_strings = [option for option in action.option_strings if "-" not in option[2:]]
        super().add_argument(shown)
