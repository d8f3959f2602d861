"""What Accelerate's own commands do with a `lowbit_config` section: they keep it, check it, and hand it on.

1. `ClusterConfig` gets one more field, so that every command reads a file with a section (``launch``, ``test``,
   ``env``) and ``config update`` writes it again
2. ``launch`` takes the fields of a file for flags that were not given; ``--lowbit_config`` is one of ``lowbit launch``
3. before processes are started, the section and the kind of run are checked, and the section goes into their
   environment, where `auto_attach` finds it

Imports nothing of ours that is slow: Accelerate's own imports wait for this module.
"""

from __future__ import annotations

import argparse
import json
import os
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import wrapt

from lowbit_strategy.autoload import SECTION, VARIABLE
from lowbit_strategy.inform import inform
from lowbit_strategy.options.suggestions import nearest

_LAUNCHERS = (
    "prepare_simple_launcher_cmd_env",
    "prepare_multi_gpu_env",
    "prepare_deepspeed_cmd_env",
    "prepare_tpu",
)
_AXES = ("tp_size", "cp_size", "sp_size")


def serve_files(module: Any) -> None:
    """`module` is ``accelerate.commands.config.config_args``."""

    @dataclass
    class ClusterConfig(module.ClusterConfig):
        lowbit_config: str | None = None  # as JSON: Accelerate makes flags of the keys of a mapping

        @classmethod
        def process_config(cls, config_dict: dict[str, Any]) -> dict[str, Any]:
            for key in config_dict.keys() - cls.__dataclass_fields__.keys():
                if nearest(str(key), [SECTION], likeness=0.75):
                    raise ValueError(f"unknown key {key!r}; did you mean {SECTION!r}?")
            config: dict[str, Any] = super().process_config(config_dict)
            if SECTION in config:
                config[SECTION] = json.dumps({SECTION: config[SECTION]})
            return config

        def to_dict(self) -> dict[str, Any]:
            result: dict[str, Any] = super().to_dict()
            if SECTION in result:
                result |= json.loads(result[SECTION])
            return result

    ClusterConfig.__module__, ClusterConfig.__qualname__ = module.__name__, "ClusterConfig"
    module.ClusterConfig = ClusterConfig
    wrapt.wrap_function_wrapper(module, "SageMakerConfig.process_config", _refuse_section)


def _refuse_section(wrapped: Callable[..., Any], _: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    if SECTION in args[0]:
        raise ValueError(f"compute_environment {args[0]['compute_environment']} cannot be served: use LOCAL_MACHINE")
    return wrapped(*args, **kwargs)


def serve_launchers(module: Any) -> None:
    """`module` is ``accelerate.utils.launch``, which prepares the processes' environments."""
    for name in _LAUNCHERS:
        wrapt.wrap_function_wrapper(module, name, _check_and_prepare)


def _check_and_prepare(prepare: Callable[..., Any], _: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    hand_on(args[0])
    num_processes = args[0].num_processes or 1
    if os.environ.get(VARIABLE) and num_processes > 1 and kind_of(args[0]) == "NO" and not args[0].mpirun_hostfile:
        inform(
            "accelerate launch starts one process on CPU, not %d, and one sends no gradients: lowbit launch starts all",
            num_processes,
        )
    return prepare(*args, **kwargs)


def hand_on(args: argparse.Namespace) -> None:
    """Check the run that `args` describe, if there is a section, and put the section into the environment.

    Args:
        args: Of ``accelerate launch``, completed from the configuration file.

    Raises:
        ValueError: The section is wrong, or gradients of this kind of run cannot be compressed.
    """
    source = getattr(args, SECTION, None) or os.environ.get(VARIABLE)
    if not source:
        return
    from lowbit_strategy.accelerate.support import check_served
    from lowbit_strategy.config.section import export, plugin_from_section, read_section

    section = read_section(source)
    plugin_from_section(section)
    axes = {axis: int(getattr(args, f"parallelism_config_{axis}", None) or 1) for axis in _AXES}
    check_served(kind_of(args), fsdp_version=int(args.fsdp_version), axes=axes)
    os.environ.update(export(section))


def kind_of(args: argparse.Namespace) -> str:
    """The distributed type, as Accelerate chooses the launcher."""
    flags = {
        "use_deepspeed": "DEEPSPEED",
        "use_fsdp": "FSDP",
        "use_megatron_lm": "MEGATRON_LM",
        "multi_gpu": "MULTI_GPU",
        "tpu": "XLA",
    }
    return next((kind for flag, kind in flags.items() if getattr(args, flag)), "NO")
