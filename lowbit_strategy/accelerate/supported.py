"""Checks which of Accelerate's set-ups are supported, and adjusts them where needed."""

from __future__ import annotations

import logging
import os

from accelerate import Accelerator
from accelerate.state import PartialState
from accelerate.utils import DistributedType, FullyShardedDataParallelPlugin

_log = logging.getLogger("lowbit_strategy")

_SERVED = (DistributedType.NO, DistributedType.MULTI_CPU, DistributedType.MULTI_GPU, DistributedType.FSDP)


def check_served(distributed_type: str, *, fsdp_version: int | None = None, sp_size: int = 1) -> None:
    """Raise a ValueError if gradients of this kind of run cannot be compressed."""
    if distributed_type not in [str(kind.value) for kind in _SERVED]:
        raise ValueError(
            f"distributed_type {distributed_type} cannot be compressed:"
            " use MULTI_GPU or MULTI_CPU (DDP), or FSDP with fsdp_version: 2"
        )
    if distributed_type == DistributedType.FSDP.value and fsdp_version != 2:
        raise ValueError("FSDP1 cannot be compressed: set fsdp_version: 2 in fsdp_config (--fsdp_version 2)")
    if sp_size > 1:
        raise ValueError(
            f"sp_size = {sp_size} cannot be compressed, because DeepSpeed then reduces gradients. Leave it at 1, or use"
            " context parallelism, cp_size"
        )


def check_accelerator(accelerator: Accelerator, fsdp_plugin: FullyShardedDataParallelPlugin | None) -> None:
    """Raise a ValueError if the accelerator, which was made with this plugin, runs in an unsupported way."""
    _keep_fsdp_on_cpu(accelerator, fsdp_plugin)
    kind = DistributedType(accelerator.distributed_type)
    plugin = getattr(accelerator.state, "fsdp_plugin", None)
    check_served(
        str(kind.value),
        fsdp_version=getattr(plugin, "fsdp_version", None),
        sp_size=getattr(accelerator.parallelism_config, "sp_size", None) or 1,
    )
    world_size = int(os.environ.get("WORLD_SIZE", "1"))
    if world_size > 1 and accelerator.num_processes == 1:
        raise ValueError(
            f"{world_size} processes were launched, but Accelerate runs each of them separately, without"
            " synchronization: there is no GPU, so set ACCELERATE_USE_CPU=true (or Accelerator(cpu=True))"
        )


def _keep_fsdp_on_cpu(accelerator: Accelerator, plugin: FullyShardedDataParallelPlugin | None) -> None:
    """Restore FSDP2 on CPU, which Accelerate (1.15, ``state.py``) silently replaces with DDP.

    Args:
        accelerator: Any accelerator.
        plugin: The plugin with which it was made. None if it came from a configuration file, since the environment has
            the same options.

    Raises:
        ValueError: FSDP was requested in code, and the plugin with its options is unknown.
    """
    asked = os.environ.get("ACCELERATE_USE_FSDP", "false").lower() == "true"
    if not asked or accelerator.distributed_type != DistributedType.MULTI_CPU:
        return
    if plugin is None:
        if "FSDP_VERSION" not in os.environ:  # only the launcher sets it: FSDP was requested in code
            raise ValueError(
                "Accelerate replaces FSDP on CPU with DDP and forgets the plugin: pass it on,"
                " LowBitPlugin(...).attach(accelerator, fsdp_plugin=plugin), or use LowBitAccelerator"
            )
        plugin = FullyShardedDataParallelPlugin()
    if accelerator.mixed_precision != "no":
        plugin.set_mixed_precision(accelerator.mixed_precision)
    accelerator.state.distributed_type = DistributedType.FSDP
    accelerator.state.fsdp_plugin = plugin
    PartialState._shared_state["distributed_type"] = DistributedType.FSDP  # the next Accelerator reads it there
    if accelerator.is_main_process:
        _log.warning("Accelerate would train with DDP on CPU although FSDP was requested: FSDP2 is used")
