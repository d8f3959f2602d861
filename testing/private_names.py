"""What this package relies on in other packages beyond their documented interface, as data.

A test resolves every name against the installed version, so that an upgrade that moves one fails there, with the
reason why it matters.
"""

from __future__ import annotations

import functools
import inspect
import textwrap
from collections.abc import Sequence
from dataclasses import dataclass
from importlib import import_module
from operator import attrgetter
from typing import Literal, get_args

Use = Literal["wrapped", "overridden", "called", "read", "set"]


@dataclass(frozen=True, kw_only=True, slots=True)
class PrivateName:
    """One name of another package.

    Args:
        target: ``module:Class.attribute`` or ``module:name``.
        use: ``wrapped``: replaced on a class, an instance or a module by a function that calls it; ``overridden`` in a
            subclass; ``called``; ``read``; ``set``.
        parameters: Names of a function's parameters that callers pass or an override receives, in order; others may
            follow. None: it is no function.
        seen: Versions of the package it was seen in.
        reason: Why the documented interface is not enough.
    """

    target: str
    use: Use
    parameters: tuple[str, ...] | None = None
    seen: str
    reason: str

    def problem(self) -> str | None:
        """What is wrong with it in the installed version; None: nothing."""
        module, _, path = self.target.partition(":")
        owner_path, _, name = path.rpartition(".")
        try:
            namespace = import_module(module)
            owner = attrgetter(owner_path)(namespace) if owner_path else namespace
        except (ImportError, AttributeError) as error:
            return f"{self.target} is gone ({error}); it is {self.use} because {self.reason}"
        if not hasattr(owner, name):
            if self.parameters is None and _is_set_on_instances(owner, name):
                return None
            return f"{self.target} is gone; it is {self.use} because {self.reason}"
        if self.parameters is None:
            return None
        found = tuple(inspect.signature(getattr(owner, name)).parameters)
        if found[: len(self.parameters)] != self.parameters:
            return f"{self.target} takes {found} instead of {self.parameters}; it is {self.use} because {self.reason}"
        return None


def _listed(seen: str, table: str) -> tuple[PrivateName, ...]:
    """Names of one package, from a table: a line for each reason, and below it one for each name that it is given for.

    A name's line is indented and has the use, the target and, of a function, the parameters in parentheses.
    """
    names: list[PrivateName] = []
    reason = ""
    for line in textwrap.dedent(table).strip().splitlines():
        if not line.startswith(" "):
            reason = " ".join(line.split())
            continue
        use, name = line.split(maxsplit=1)
        assert use in get_args(Use), line
        target, parenthesis, inside = name.rstrip(")").partition("(")
        parameters = tuple(inside.replace(",", " ").split()) if parenthesis else None
        names.append(PrivateName(target=target, use=use, parameters=parameters, seen=seen, reason=reason))  # type: ignore[arg-type]
    return tuple(names)


def _is_set_on_instances(owner: object, name: str) -> bool:
    """Whether a class gives its instances an attribute of this name."""
    if not inspect.isclass(owner):
        return False
    classes = [base for base in owner.__mro__ if base is not object and base.__module__ != "builtins"]
    return any(f"self.{name}" in _source(base) or name in getattr(base, "__annotations__", {}) for base in classes)


@functools.cache  # finding a class in its file takes a tenth of a second
def _source(cls: type) -> str:
    try:
        return inspect.getsource(cls)
    except (OSError, TypeError):
        return ""


def problems(names: Sequence[PrivateName]) -> list[str]:
    """One sentence for each entry that the installed versions do not have as expected."""
    return [text for name in names if (text := name.problem()) is not None]


PRIVATE_NAMES: dict[str, tuple[PrivateName, ...]] = {}  # by package

_FSDP = "torch.distributed.fsdp._fully_shard"
_FSDP_API = f"{_FSDP}._fsdp_api"
_FSDP_COLLECTIVES = f"{_FSDP}._fsdp_collectives"
_FSDP_STATE = f"{_FSDP}._fsdp_state:FSDPState"
_FSDP_GROUP = f"{_FSDP}._fsdp_param_group:FSDPParamGroup"
_FSDP_PARAM = f"{_FSDP}._fsdp_param:FSDPParam"
_WRAPPER = "torch.nn.parallel:DistributedDataParallel"

PRIVATE_NAMES["torch"] = _listed(
    "torch 2.11 to 2.14",
    f"""
    set_custom_reduce_scatter and set_custom_all_gather take subclasses, which the public module does not export
      overridden {_FSDP_API}:ReduceScatter.allocate(self, size, dtype, device)
      overridden {_FSDP_API}:ReduceScatter.__call__(self, output_tensor, input_tensor, group, op, async_op)
      overridden {_FSDP_API}:AllGather.allocate(self, size, dtype, device)
      overridden {_FSDP_API}:AllGather.__call__(self, output_tensor, input_tensor, group, async_op)
    memory for what is communicated comes from where it would without this package
      called {_FSDP_COLLECTIVES}:DefaultAllocMixin.allocate(self, size, dtype, device)
    weights that are not coded travel as they would without this package
      called {_FSDP_COLLECTIVES}:DefaultAllGather.__call__(self, output_tensor, input_tensor, group, async_op)
    weights that an earlier forward pass has left gathered are freed: they may be those of a validation
      wrapped {_FSDP_GROUP}.pre_forward(self, module, args, kwargs)
      called {_FSDP_GROUP}.reshard(self)
      read {_FSDP_GROUP}.is_unsharded
    a backward pass gathers as its forward pass did
      read {_FSDP_GROUP}._training_state
    a backward pass is known before it adds gradients, once, and whether an optimizer steps in it
      wrapped {_FSDP_GROUP}.pre_backward(self, default_prefetch, unused)
      read torch._C:_current_graph_task_id
    when a module's gradients have been reduced
      read {_FSDP_GROUP}._reduce_scatter_comm
    after reshard_after_forward=int the gather is of a smaller group
      read {_FSDP_GROUP}.is_sharded_post_forward
    whether weights are gathered in backward
      read {_FSDP_GROUP}.post_forward_mesh_info
    the type that weights are gathered in
      read {_FSDP_GROUP}.mp_policy
    the outermost module stays gathered
      read {_FSDP_STATE}._auto_reshard_after_forward
    only the outermost module that has run can be reset after an exception
      read {_FSDP_STATE}._is_root
    modules that were sharded together share one state, and only it gives their parameters in order
      called torch.distributed.fsdp:FSDPModule._get_fsdp_state(self)
    the layout of a reduce-scatter is that of its parameter group
      read {_FSDP_STATE}._fsdp_param_groups
      read {_FSDP_GROUP}.fsdp_params
    HSDP's all-reduce over replicas cannot be replaced, so a mesh of two dims is taken for its second one
      set {_FSDP_GROUP}.mesh_info
    micro-batches that the user does not want to be reduced between replicas
      read {_FSDP_GROUP}.all_reduce_grads
    where gradients are converted after the all-reduce hook they cannot be reduced while backward goes on
      read {_FSDP_GROUP}._orig_dtype
    the end of a backward pass waits for shards that are reduced beside it; DDP and FSDP2 wait in this way
      called torch.autograd:Variable._execution_engine
    gradients of a window of accumulation that an exception has ended belong to no later step
      set {_FSDP_PARAM}.unsharded_accumulated_grad
      set {_FSDP_PARAM}._unsharded_param
    names of parameters are those of the sharded ones
      read {_FSDP_PARAM}.sharded_param
    only parameters that are sharded along their first dim can be compressed
      read {_FSDP_PARAM}.fsdp_placement
    a module with newly trainable parameters is wrapped again, and the old wrapper must let go of it
      called {_WRAPPER}._remove_autograd_hooks(self)
    a hook cannot be taken away: where none helps, the reducer is made again, as by unpickling
      called {_WRAPPER}._build_params_for_reducer(self)
      called {_WRAPPER}._build_debug_param_to_name_mapping(self, parameters)
      called {_WRAPPER}._ddp_init_helper(self, parameters, expect_sparse_gradient, param_to_name_mapping, static_graph)
      set {_WRAPPER}._comm_hooks
      set {_WRAPPER}._has_rebuilt_buckets
      set {_WRAPPER}._bucket_config
      set {_WRAPPER}.bucket_bytes_cap
    local steps: a static graph is reduced at the end of its first backward pass, synchronized or not
      set {_WRAPPER}._static_graph_delay_allreduce_enqueued
    what DDP ignores may differ between ranks (divergence/comparison.py)
      read {_WRAPPER}._set_params_and_buffers_to_ignore_for_model(module, params_and_buffers_to_ignore)
    where compression does not help, all that attaching has set is put back (auto/switching.py, hooks/fsdp.py)
      set {_FSDP_GROUP}._all_gather_comm
    what FSDP2 must be set to, it is set to while it reduces: the user's settings stay (hooks/fsdp_gradients.py)
      set {_FSDP_GROUP}._all_reduce_hook
      set {_FSDP_GROUP}._all_reduce_hook_stream
      set {_FSDP_GROUP}.gradient_divide_factor
      set {_FSDP_GROUP}.force_sum_reduction_for_comms
    parameters without a gradient have zeros while FSDP2 reduces, and none afterwards if no rank had one
      wrapped {_FSDP_GROUP}.post_backward(self, unused)
      read {_FSDP_GROUP}.reduce_grads
      read {_FSDP_GROUP}._post_reduce_event
      set torch:Tensor._post_accumulate_grad_hooks
    members make their group alone, under a name that they agree on, and without splitting NCCL's (ranks/groups.py)
      wrapped torch.distributed.distributed_c10d:_hash_ranks_to_str(ranks)
      set torch.distributed.distributed_c10d:_world.pg_names
      set torch.distributed.distributed_c10d:_world.group_count
      set torch.distributed:ProcessGroup.bound_device_id
    the hook's own group has to be as patient as DDP's, whose timeout is not public
      called torch.distributed:ProcessGroup._get_backend
    "python_reducer" bypasses communication hooks, which must be refused
      read torch._dynamo.config:optimize_ddp
    it takes the device of an optimizer's state from an entry, and SGD without momentum has none \
    (attach/stateless_optimizers.py, while a checkpoint is loaded)
      wrapped torch.distributed.checkpoint.state_dict:set_optimizer_state_dict(model, optimizers)
    """,
)

# Both packages of Lightning carry the same code under two names each; the table has one, and a test checks both.
_LIGHTNING = "lightning.pytorch"
_LIGHTNING_DDP = f"{_LIGHTNING}.strategies.ddp:DDPStrategy"
_MODEL_PARALLEL = f"{_LIGHTNING}.strategies.model_parallel:ModelParallelStrategy"
_FABRIC = "lightning.fabric.strategies.model_parallel"
_ASYNC_IO = f"{_LIGHTNING}.plugins.io.async_plugin:AsyncCheckpointIO"
_CONNECTORS = f"{_LIGHTNING}.trainer.connectors"

PRIVATE_NAMES["lightning"] = _listed(
    "lightning 2.6",
    f"""
    the stock method registers communication hooks on CUDA only
      overridden {_LIGHTNING_DDP}._register_ddp_hooks(self)
    a module with newly trainable parameters is wrapped again
      called {_LIGHTNING_DDP}._setup_model(self, model)
    the default size of buckets depends on the device, which is known after the constructor
      set {_LIGHTNING_DDP}._ddp_kwargs
      set lightning.fabric.strategies.ddp:DDPStrategy._ddp_kwargs
    processes that were spawned take their residuals with them, which has to be reported; in the process that spawned \
    them nothing else tells that they have trained
      read {_LIGHTNING_DDP}._start_method
      read {_LIGHTNING}.strategies.launchers.multiprocessing:_MultiProcessingLauncher._already_fit
    sync_batchnorm=True is served by DDP strategies only; ours does it under FSDP2 too
      read {_LIGHTNING_DDP}._layer_sync
    the stock "auto" means tensor parallelism inside of a node; here every rank is data-parallel
      set {_MODEL_PARALLEL}._tensor_parallel_size
      set {_MODEL_PARALLEL}._data_parallel_size
      set {_FABRIC}:ModelParallelStrategy._tensor_parallel_size
      set {_FABRIC}:ModelParallelStrategy._data_parallel_size
    HSDP: the ranks that shard a model are those of a node, and the stock mesh has no such dim
      set {_MODEL_PARALLEL}._device_mesh
      set {_FABRIC}:ModelParallelStrategy._device_mesh
    its module's names are those that loading looks up (attach/stateless_optimizers.py)
      read {_FABRIC}:_load_checkpoint
    it looks at the first entry of an optimizer's state, and SGD without momentum has none \
    (attach/stateless_optimizers.py, while a checkpoint is loaded)
      wrapped {_FABRIC}:_rekey_optimizer_state_if_needed(optimizer_state_dict, module)
    the error for an unknown name of a strategy knows nothing of the nearest one (register.py)
      wrapped {_LIGHTNING}.strategies:StrategyRegistry.available_strategies()
    local steps: ranks take the mean of their weights before any callback learns that training has ended
      wrapped {_LIGHTNING}.loops.fit_loop:_FitLoop.on_run_end(self)
    it asks rank 0 alone whether a signal has come, and ranks that train locally have speeds of their own
      overridden {_LIGHTNING}.loops.training_epoch_loop:_TrainingEpochLoop._broadcast_sigterm_tensor(self)
    residuals of a replaced checkpoint stay until the new one has been written (base_strategy.py)
      read {_ASYNC_IO}._executor
      read {_ASYNC_IO}._error
    its handlers of signals call collectives, so they run when all ranks can answer (signals.py)
      read {_CONNECTORS}.signal_connector:_HandlersCompose.signal_handlers
      read {_CONNECTORS}.signal_connector:_SignalConnector.received_sigterm
      read {_CONNECTORS}.accelerator_connector:_AcceleratorConnector.cluster_environment
    """,
)

_ACCELERATOR = "accelerate.accelerator:Accelerator"

PRIVATE_NAMES["accelerate"] = _listed(
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
    FSDP on CPU is replaced by DDP there (accelerate/supported.py)
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
    """,
)

_HF_TRAINER = "transformers.trainer:Trainer"

PRIVATE_NAMES["transformers"] = _listed(
    "transformers 5.23",
    f"""
    no callback is given the checkpoint that is resumed from, whose residuals have to be loaded, or comes before the \
    optimizer is made of the model's parameters
      wrapped {_HF_TRAINER}.train(self, resume_from_checkpoint)
    scripts that run with a lowbit_config section make Trainers that know nothing of compression
      wrapped {_HF_TRAINER}.__init__(self)
    a hyperparameter search makes an accelerator for each trial
      wrapped {_HF_TRAINER}.create_accelerator_and_postprocess(self)
    it is read when the accelerator is made; attaching brings FSDP back where there is no GPU
      set {_HF_TRAINER}.is_fsdp_enabled
    metrics of groups go to trackers and not to the console, which Trainer.log cannot separate
      read {_HF_TRAINER}.callback_handler
    of replicas that come and go only the lowest one writes checkpoints
      wrapped {_HF_TRAINER}._save_checkpoint(self, model, trial)
    a replica that joins takes over the others' step, and the mean of its losses is over its own steps
      set {_HF_TRAINER}._globalstep_last_logged
    Accelerate forgets the FSDP plugin on CPU, and the arguments are all that is left of it
      read transformers.training_args:TrainingArguments.fsdp_plugin_args
    the one free-form part of trainer_state.json: it marks checkpoints that need residuals
      set transformers.trainer_callback:TrainerState.stateful_callbacks
    local steps: what is evaluated, saved and compared is what all ranks share; FSDP2: what was evaluated stays gathered
      wrapped {_HF_TRAINER}.evaluate(self, eval_dataset, ignore_keys, metric_key_prefix)
      wrapped {_HF_TRAINER}.predict(self, test_dataset, ignore_keys, metric_key_prefix)
      wrapped {_HF_TRAINER}.save_model(self, output_dir, _internal_call)
      wrapped {_HF_TRAINER}._load_best_model(self)
    """,
)
