"""What the package relies on in PyTorch beyond its documented interface."""

from __future__ import annotations

from lowbit_strategy.private_names import private_names

_FSDP = "torch.distributed.fsdp._fully_shard"
_API = f"{_FSDP}._fsdp_api"
_COLLECTIVES = f"{_FSDP}._fsdp_collectives"
_STATE = f"{_FSDP}._fsdp_state:FSDPState"
_GROUP = f"{_FSDP}._fsdp_param_group:FSDPParamGroup"
_PARAM = f"{_FSDP}._fsdp_param:FSDPParam"
_DDP = "torch.nn.parallel:DistributedDataParallel"

PATCHES = private_names(
    "torch 2.11 to 2.13",
    f"""
    set_custom_reduce_scatter and set_custom_all_gather take subclasses, which the public module does not export
      overridden {_API}:ReduceScatter.allocate(self, size, dtype, device)
      overridden {_API}:ReduceScatter.__call__(self, output_tensor, input_tensor, group, op, async_op)
      overridden {_API}:AllGather.allocate(self, size, dtype, device)
      overridden {_API}:AllGather.__call__(self, output_tensor, input_tensor, group, async_op)
    memory for what is communicated comes from where it would without this package
      called {_COLLECTIVES}:DefaultAllocMixin.allocate(self, size, dtype, device)
    weights that are not coded travel as they would without this package
      called {_COLLECTIVES}:DefaultAllGather.__call__(self, output_tensor, input_tensor, group, async_op)
    weights that an earlier forward pass has left gathered are freed: they may be those of a validation
      wrapped {_GROUP}.pre_forward(self, module, args, kwargs)
      called {_GROUP}.reshard(self)
      read {_GROUP}.is_unsharded
    a backward pass gathers as its forward pass did
      read {_GROUP}._training_state
    several forward passes may belong to one backward pass
      read torch._C:_current_graph_task_id
    when a module's gradients have been reduced
      read {_GROUP}._reduce_scatter_comm
    after reshard_after_forward=int the gather is of a smaller group
      read {_GROUP}.is_sharded_post_forward
    whether weights are gathered in backward
      read {_GROUP}.post_forward_mesh_info
    the type that weights are gathered in
      read {_GROUP}.mp_policy
    the outermost module stays gathered
      read {_STATE}._auto_reshard_after_forward
    only the outermost module that has run can be reset after an exception
      read {_STATE}._is_root
    modules that were sharded together share one state, and only it gives their parameters in order
      called torch.distributed.fsdp:FSDPModule._get_fsdp_state(self)
    the layout of a reduce-scatter is that of its parameter group
      read {_STATE}._fsdp_param_group
      read {_GROUP}.fsdp_params
    HSDP's all-reduce over replicas cannot be replaced, so a mesh of two dims is taken for its second one
      set {_GROUP}.mesh_info
    micro-batches that the user does not want to be reduced between replicas
      read {_GROUP}.all_reduce_grads
    where gradients are converted after the all-reduce hook they cannot be reduced while backward goes on
      read {_GROUP}._orig_dtype
    the end of a backward pass waits for shards that are reduced beside it; DDP and FSDP2 wait in this way
      called torch.autograd:Variable._execution_engine
    gradients of a window of accumulation that an exception has ended belong to no later step
      set {_PARAM}.unsharded_accumulated_grad
      set {_PARAM}._unsharded_param
    names of parameters are those of the sharded ones
      read {_PARAM}.sharded_param
    only parameters that are sharded along their first dim can be compressed
      read {_PARAM}.fsdp_placement
    a module with newly trainable parameters is wrapped anew, and the old wrapper must let go of it
      called {_DDP}._remove_autograd_hooks(self)
    a hook cannot be taken away: where none helps, the reducer is made anew, as by unpickling
      called {_DDP}._build_params_for_reducer(self)
      called {_DDP}._build_debug_param_to_name_mapping(self, parameters)
      called {_DDP}._ddp_init_helper(self, parameters, expect_sparse_gradient, param_to_name_mapping, static_graph)
      set {_DDP}._comm_hooks
      set {_DDP}._has_rebuilt_buckets
      set {_DDP}._bucket_config
      set {_DDP}.bucket_bytes_cap
    where compression does not help, all that attaching has set is put back (hooks/ddp.py, attach/wiring.py)
      set {_GROUP}._all_gather_comm
      set {_GROUP}._all_reduce_hook
      set {_GROUP}._all_reduce_hook_stream
      set {_GROUP}.gradient_divide_factor
      set {_GROUP}.force_sum_reduction_for_comms
      set {_GROUP}.reduce_scatter_unused_params
    members make their group alone, under a name that they agree on, and without splitting NCCL's (ranks/ranks.py)
      wrapped torch.distributed.distributed_c10d:_hash_ranks_to_str(ranks)
      set torch.distributed.distributed_c10d:_world.pg_names
      set torch.distributed:ProcessGroup.bound_device_id
    the hook's own group has to be as patient as DDP's, whose timeout is not public
      called torch.distributed:ProcessGroup._get_backend
    "python_reducer" bypasses communication hooks, which must be refused
      read torch._dynamo.config:optimize_ddp
    it takes the device of an optimizer's state from an entry, and SGD without momentum has none \
    (checkpoint/loading.py, while a checkpoint is loaded)
      wrapped torch.distributed.checkpoint.state_dict:set_optimizer_state_dict(model, optimizers)
    """,
)
