"""What Accelerate runs that can be served, and doing what was asked where Accelerate quietly does something else."""

from __future__ import annotations

import logging
import os
from typing import Any

from accelerate import Accelerator
from accelerate.state import PartialState
from accelerate.utils import DistributedType, FullyShardedDataParallelPlugin

_SERVED = (DistributedType.NO, DistributedType.MULTI_CPU, DistributedType.MULTI_GPU, DistributedType.FSDP)
_AXES = ("tp_size", "cp_size", "sp_size", "dp_replicate_size")
_log = logging.getLogger("lowbit_strategy")


def check_served(distributed_type: str, *, fsdp_version: int | None = None, axes: dict[str, int] | None = None) -> None:
    """Raises:
    ValueError: Gradients of this kind of run do not pass where they could be compressed.
    """
    if distributed_type not in [str(kind.value) for kind in _SERVED]:
        raise ValueError(
            f"distributed_type {distributed_type} cannot be compressed:"
            " use MULTI_GPU or MULTI_CPU (DDP), or FSDP with fsdp_version: 2"
        )
    if distributed_type == DistributedType.FSDP.value and fsdp_version != 2:
        raise ValueError("FSDP1 cannot be compressed: set fsdp_version: 2 in fsdp_config (--fsdp_version 2)")
    for axis, size in (axes or {}).items():
        if size > 1:
            raise ValueError(
                f"{axis} = {size} cannot be compressed: gradients are reduced over all processes, along one axis."
                " Leave tensor, context and sequence parallelism and replication (HSDP) at 1"
            )


def check_accelerator(accelerator: Accelerator) -> None:
    """Raises:
    ValueError: The accelerator runs in a way that cannot be served.
    """
    kind = DistributedType(accelerator.distributed_type)
    plugin = getattr(accelerator.state, "fsdp_plugin", None)
    config = accelerator.parallelism_config
    check_served(
        str(kind.value),
        fsdp_version=getattr(plugin, "fsdp_version", None),
        axes={axis: getattr(config, axis, 1) or 1 for axis in _AXES} if config is not None else None,
    )
    world_size = int(os.environ.get("WORLD_SIZE", "1"))
    if world_size > 1 and accelerator.num_processes == 1:
        raise ValueError(
            f"{world_size} processes were launched, but Accelerate runs each of them on its own, without"
            " synchronisation: there is no GPU, so set ACCELERATE_USE_CPU=true (or Accelerator(cpu=True))"
        )


def keep_fsdp_on_cpu(accelerator: Accelerator, plugin: FullyShardedDataParallelPlugin | None) -> None:
    """Accelerate (1.15, ``state.py``) turns FSDP on CPU into DDP without a word: make it FSDP2 again.

    Args:
        accelerator: Whatever it runs.
        plugin: What it was made with; if it came from a configuration file, None: the environment says the same.

    Raises:
        ValueError: FSDP was asked for in code, and the plugin that says how is not known.
    """
    asked = os.environ.get("ACCELERATE_USE_FSDP", "false").lower() == "true"
    if not asked or accelerator.distributed_type != DistributedType.MULTI_CPU:
        return
    if plugin is None:
        if "FSDP_VERSION" not in os.environ:  # set by the launcher only: this was asked for in code
            raise ValueError(
                "Accelerate replaces FSDP on CPU by DDP and forgets the plugin: pass it on,"
                " LowBitPlugin(...).attach(accelerator, fsdp_plugin=plugin), or use LowBitAccelerator"
            )
        plugin = FullyShardedDataParallelPlugin()
    if accelerator.mixed_precision != "no":
        plugin.set_mixed_precision(accelerator.mixed_precision)
    accelerator.state.distributed_type = DistributedType.FSDP
    accelerator.state.fsdp_plugin = plugin
    PartialState._shared_state["distributed_type"] = DistributedType.FSDP  # the next Accelerator reads it there
    if accelerator.is_main_process:
        _log.warning("Accelerate would train with DDP on CPU although FSDP was asked for: it is FSDP2 again")


def describe(accelerator: Accelerator) -> Any:
    """How the accelerator synchronises, in a word."""
    return DistributedType(accelerator.distributed_type).value
