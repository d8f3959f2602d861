"""Hooks in stock Accelerate for a `lowbit_config` section: its commands keep and check the section, and its processes
train with it.

1. `ClusterConfig` gets one more field, so that every command (``launch``, ``test``, ``env``) reads a file with a
   section, and ``config update`` keeps it
2. ``launch`` uses the fields of a file for flags that were not given
3. before processes are started, the section and the kind of run are checked, and the section is put into their
   environment
4. in the processes it is attached to every new `Accelerator`

Slow modules are imported only if there is a section and an object is made, since Accelerate's own imports wait for this
module.
"""

from __future__ import annotations

import argparse
import atexit
import functools
import inspect
import json
import logging
import os
import sys
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import wrapt

from lowbit_strategy.autoload import SECTION, VARIABLE
from lowbit_strategy.inform import inform
from lowbit_strategy.options.conversion import nearest

if TYPE_CHECKING:
    from accelerate import Accelerator

_LAUNCHERS = ("prepare_simple_launcher_cmd_env", "prepare_multi_gpu_env", "prepare_deepspeed_cmd_env", "prepare_tpu")
_OTHER_WAYS = tuple(  # other ways to train with compression
    f"lowbit_strategy.{name}"
    for name in ("lightning", "pytorch_lightning", "fabric", "lightning_fabric", "custom_loop")
)
_log = logging.getLogger("lowbit_strategy")
_accelerators: list[Accelerator] = []  # accelerators that have or had a section's plugin


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
        raise ValueError(f"compute_environment {args[0]['compute_environment']} is not supported: use LOCAL_MACHINE")
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
            "accelerate launch starts one process on CPU, not %d, and a single process sends no gradients: use"
            " distributed_type MULTI_GPU with ACCELERATE_USE_CPU=true in front of the command to start all",
            num_processes,
        )
    return prepare(*args, **kwargs)


def hand_on(args: argparse.Namespace) -> None:
    """If there is a section, check the run that `args` describe, and put the section into the environment.

    Args:
        args: Arguments of ``accelerate launch``, completed from the configuration file.

    Raises:
        ValueError: The section is wrong, or gradients of this kind of run cannot be compressed.
    """
    source = getattr(args, SECTION, None) or os.environ.get(VARIABLE)
    if not source:
        return
    from lowbit_strategy.accelerate.supported import check_served
    from lowbit_strategy.config_file.section import export, read_section

    section = read_section(source)
    sp_size = int(getattr(args, "parallelism_config_sp_size", None) or 1)
    check_served(kind_of(args), fsdp_version=int(args.fsdp_version), sp_size=sp_size)
    export(section)


def kind_of(args: argparse.Namespace) -> str:
    """The distributed type, found as Accelerate finds it when it chooses the launcher."""
    flags = {
        "use_deepspeed": "DEEPSPEED",
        "use_fsdp": "FSDP",
        "use_megatron_lm": "MEGATRON_LM",
        "multi_gpu": "MULTI_GPU",
        "tpu": "XLA",
    }
    return next((kind for flag, kind in flags.items() if getattr(args, flag)), "NO")


def serve_accelerators(module: Any) -> None:
    """`module` is ``accelerate.accelerator``."""
    wrapt.wrap_function_wrapper(module, "Accelerator.__init__", _accelerator_made)


def serve_trainers(module: Any) -> None:
    """`module` is ``transformers.trainer``. The Trainer has its own checkpoints, which must include residuals."""
    wrapt.wrap_function_wrapper(module, "Trainer.__init__", _trainer_made)


@functools.cache  # once
def watch_for_section(module: Any) -> None:
    """`module` is ``torch.optim.optimizer``, in a process that has a section: training must not ignore the section."""
    check_once = functools.cache(_check_training)
    module.register_optimizer_step_pre_hook(lambda *_: check_once())


def _accelerator_made(wrapped: Callable[..., None], instance: Any, args: Any, kwargs: Any) -> None:
    wrapped(*args, **kwargs)
    if not (source := os.environ.get(VARIABLE)):
        return
    from lowbit_strategy.accelerate.binding import Binding

    given = inspect.signature(wrapped).bind(*args, **kwargs).arguments
    if not _accelerators:
        atexit.register(_leave)
    _accelerators.append(instance)
    Binding(_plugin(source), instance, fsdp_plugin=given.get("fsdp_plugin"), of_section=True)


@functools.cache
def _plugin(source: str) -> Any:
    from lowbit_strategy.config_file.section import plugin_from_section, read_section

    return plugin_from_section(read_section(source))


def _trainer_made(wrapped: Callable[..., None], instance: Any, args: Any, kwargs: Any) -> None:
    wrapped(*args, **kwargs)
    if os.environ.get(VARIABLE):
        from lowbit_strategy.transformers import bind_checkpoints

        bind_checkpoints(instance)


def _check_training() -> None:
    """Raise a RuntimeError if training starts and nothing would be compressed."""
    if not os.environ.get(VARIABLE):
        return  # a dry run
    if not _accelerators:
        if any(name in sys.modules for name in _OTHER_WAYS):
            return
        raise RuntimeError(
            "the script trains without an Accelerator, so nothing would be compressed: make one,"
            " accelerator = Accelerator(), and prepare model and optimizer with it (the Hugging Face Trainer does)"
        )
    from lowbit_strategy.accelerate.binding import binding_of

    bindings = [binding for each in _accelerators if (binding := binding_of(each)) is not None]
    distributed = any(each.num_processes > 1 for each in _accelerators)
    if distributed and not any(binding.sessions for binding in bindings):
        _log.warning(
            "the script steps an optimizer before any model has gone through accelerator.prepare: that training is not"
            " compressed"
        )


def _leave() -> None:
    """Destroy process groups for scripts that do not: gloo sometimes aborts if a process ends with open groups."""
    import torch.distributed as dist

    if dist.is_initialized() and not hasattr(sys, "last_value"):  # after an exception other ranks may still be waiting
        dist.destroy_process_group()
