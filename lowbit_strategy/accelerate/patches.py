"""What the plugin relies on in Accelerate beyond its documented interface, and what it does there."""

from __future__ import annotations

import logging
import os

from accelerate import Accelerator
from accelerate.state import PartialState
from accelerate.utils import DistributedType, FullyShardedDataParallelPlugin

from lowbit_strategy.private_names import private_names

_ACCELERATOR = "accelerate.accelerator:Accelerator"

PATCHES = private_names(
    "accelerate 1.15",
    f"""
    an Accelerator has no callbacks: its methods on the instance are the moments that the binding needs
      wrapped {_ACCELERATOR}.prepare_model(self, model, device_placement, evaluation_mode)
      wrapped {_ACCELERATOR}._prepare_fsdp2(self, args)
      wrapped {_ACCELERATOR}.prepare_optimizer(self, optimizer, device_placement)
      wrapped {_ACCELERATOR}.prepare_data_loader(self, data_loader, device_placement, slice_fn_for_dispatch)
      wrapped {_ACCELERATOR}.backward(self, loss, kwargs)
      wrapped {_ACCELERATOR}.accumulate(self, models)
      wrapped {_ACCELERATOR}.free_memory(self, objects)
      wrapped {_ACCELERATOR}.prepare(self, args)
      wrapped {_ACCELERATOR}.get_state_dict(self, model, unwrap)
      wrapped {_ACCELERATOR}.load_state(self, input_dir)
      wrapped {_ACCELERATOR}.end_training(self)
    a plugin that is attached too late has to be refused; and the learning rate of a model is that of its optimizer
      read {_ACCELERATOR}._models
      read {_ACCELERATOR}._optimizers
    the default size of DDP's buckets; kwargs_handlers accepts exact classes only, when it is made
      set {_ACCELERATOR}.ddp_handler
    shard_size of the plugin is what dp_replicate_size of Accelerate is, for an accelerator that has none
      set accelerate.state:AcceleratorState.parallelism_config
      set accelerate.state:AcceleratorState.device_mesh
    windows of accumulation are counted from where a controller changes their length
      set {_ACCELERATOR}.step
    a step is over when its optimizer has stepped; schedulers rebind a patched attribute, so the class of prepared \
    optimizers is changed instead
      overridden accelerate.optimizer:AcceleratedOptimizer.step(self, closure)
    FSDP on CPU is replaced by DDP there (keep_fsdp_on_cpu)
      set accelerate.state:PartialState._shared_state
    its commands refuse a configuration file with a section; SageMaker's jobs cannot have one
      overridden accelerate.commands.config.config_args:ClusterConfig.process_config(config_dict)
      overridden accelerate.commands.config.config_args:ClusterConfig.to_dict(self)
      wrapped accelerate.commands.config.config_args:SageMakerConfig.process_config(config_dict)
    sections are checked before processes are started, and put into their environment
      wrapped accelerate.utils.launch:prepare_simple_launcher_cmd_env(args)
      wrapped accelerate.utils.launch:prepare_multi_gpu_env(args)
      wrapped accelerate.utils.launch:prepare_deepspeed_cmd_env(args)
      wrapped accelerate.utils.launch:prepare_tpu(args, current_env)
    lowbit launch goes on from what Accelerate makes of flags and configuration file
      wrapped accelerate.commands.launch:_validate_launch_command(args)
    """,
)

_log = logging.getLogger("lowbit_strategy")


def keep_fsdp_on_cpu(accelerator: Accelerator, plugin: FullyShardedDataParallelPlugin | None) -> None:
    """Accelerate (1.15, ``state.py``) silently replaces FSDP on CPU by DDP: make it FSDP2 again.

    Args:
        accelerator: Whatever it runs.
        plugin: What it was made with; if it came from a configuration file, None: the environment has the same options.

    Raises:
        ValueError: FSDP was asked for in code, and the plugin with its options is not known.
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
