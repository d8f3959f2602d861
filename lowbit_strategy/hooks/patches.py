"""What the package relies on in PyTorch beyond its documented interface."""

from __future__ import annotations

from lowbit_strategy.private_names import PrivateName

_FSDP = "torch.distributed.fsdp"
_SEEN = "torch 2.11 to 2.13"

SET_ON_GROUPS = (  # by attaching, on the parameter groups of FSDP2
    "_all_gather_comm",
    "_all_reduce_hook",
    "_all_reduce_hook_stream",
    "gradient_divide_factor",
    "force_sum_reduction_for_comms",
    "reduce_scatter_unused_params",
)

PATCHES = (
    PrivateName(
        target=f"{_FSDP}._fully_shard._fsdp_api:ReduceScatter.allocate",
        use="overridden",
        parameters=("self", "size", "dtype", "device"),
        seen=_SEEN,
        reason="set_custom_reduce_scatter takes a subclass, which the public module does not export",
    ),
    PrivateName(
        target=f"{_FSDP}._fully_shard._fsdp_api:ReduceScatter.__call__",
        use="overridden",
        parameters=("self", "output_tensor", "input_tensor", "group", "op", "async_op"),
        seen=_SEEN,
        reason="likewise",
    ),
    PrivateName(
        target=f"{_FSDP}._fully_shard._fsdp_api:AllGather.allocate",
        use="overridden",
        parameters=("self", "size", "dtype", "device"),
        seen=_SEEN,
        reason="set_custom_all_gather takes a subclass, which the public module does not export",
    ),
    PrivateName(
        target=f"{_FSDP}._fully_shard._fsdp_api:AllGather.__call__",
        use="overridden",
        parameters=("self", "output_tensor", "input_tensor", "group", "async_op"),
        seen=_SEEN,
        reason="likewise",
    ),
    PrivateName(
        target=f"{_FSDP}._fully_shard._fsdp_collectives:DefaultAllocMixin.allocate",
        use="called",
        parameters=("self", "size", "dtype", "device"),
        seen=_SEEN,
        reason="memory for what is communicated comes from where it would without this package",
    ),
    PrivateName(
        target=f"{_FSDP}._fully_shard._fsdp_collectives:DefaultAllGather.__call__",
        use="called",
        parameters=("self", "output_tensor", "input_tensor", "group", "async_op"),
        seen=_SEEN,
        reason="weights that are not coded travel as they would without this package",
    ),
    PrivateName(
        target=f"{_FSDP}._fully_shard._fsdp_param_group:FSDPParamGroup.pre_forward",
        use="wrapped",
        parameters=("self", "module", "args", "kwargs"),
        seen=_SEEN,
        reason="weights that an earlier forward pass has left gathered are freed: they may be those of a validation",
    ),
    PrivateName(
        target=f"{_FSDP}._fully_shard._fsdp_param_group:FSDPParamGroup.reshard",
        use="called",
        parameters=("self",),
        seen=_SEEN,
        reason="likewise",
    ),
    *(
        PrivateName(target=f"{_FSDP}._fully_shard.{name}", use="read", seen=_SEEN, reason=reason)
        for name, reason in {
            "_fsdp_param_group:FSDPParamGroup._training_state": "a backward pass gathers as its forward pass did",
            "_fsdp_param_group:FSDPParamGroup.is_unsharded": "weights that an earlier forward pass has left",
            "_fsdp_param_group:FSDPParamGroup._reduce_scatter_comm": "when a module's gradients have been reduced",
            "_fsdp_param_group:FSDPParamGroup.is_sharded_post_forward": "after reshard_after_forward=int the gather is"
            " of a smaller group",
            "_fsdp_param_group:FSDPParamGroup.post_forward_mesh_info": "whether weights are gathered in backward",
            "_fsdp_param_group:FSDPParamGroup.mp_policy": "the type that weights are gathered in",
            "_fsdp_state:FSDPState._auto_reshard_after_forward": "the outermost module stays gathered",
            "_fsdp_state:FSDPState._is_root": "only the outermost module that has run can be reset after an exception",
        }.items()
    ),
    PrivateName(
        target=f"{_FSDP}:FSDPModule._get_fsdp_state",
        use="called",
        parameters=("self",),
        seen=_SEEN,
        reason="modules that were sharded together share one state, and only it gives their parameters in order",
    ),
    PrivateName(
        target=f"{_FSDP}._fully_shard._fsdp_state:FSDPState._fsdp_param_group",
        use="read",
        seen=_SEEN,
        reason="the layout of a reduce-scatter is that of its parameter group",
    ),
    PrivateName(
        target=f"{_FSDP}._fully_shard._fsdp_param_group:FSDPParamGroup.mesh_info",
        use="set",
        seen=_SEEN,
        reason="HSDP's all-reduce over replicas cannot be replaced, so a mesh of two dims is taken for its second one",
    ),
    PrivateName(
        target=f"{_FSDP}._fully_shard._fsdp_param_group:FSDPParamGroup._orig_dtype",
        use="read",
        seen=_SEEN,
        reason="where gradients are converted after the all-reduce hook they cannot be reduced while backward goes on",
    ),
    PrivateName(
        target="torch.autograd:Variable._execution_engine",
        use="called",
        seen=_SEEN,
        reason="the end of a backward pass waits for shards that are reduced beside it; DDP and FSDP2 wait in this way",
    ),
    PrivateName(
        target=f"{_FSDP}._fully_shard._fsdp_param_group:FSDPParamGroup.fsdp_params",
        use="read",
        seen=_SEEN,
        reason="likewise",
    ),
    *PrivateName.each(
        f"{_FSDP}._fully_shard._fsdp_param:FSDPParam",
        ("unsharded_accumulated_grad", "_unsharded_param"),
        use="set",
        seen=_SEEN,
        reason="gradients of a window of accumulation that an exception has ended belong to no later step",
    ),
    PrivateName(
        target=f"{_FSDP}._fully_shard._fsdp_param:FSDPParam.sharded_param",
        use="read",
        seen=_SEEN,
        reason="names of parameters are those of the sharded ones",
    ),
    PrivateName(
        target=f"{_FSDP}._fully_shard._fsdp_param:FSDPParam.fsdp_placement",
        use="read",
        seen=_SEEN,
        reason="only parameters that are sharded along their first dim can be compressed",
    ),
    PrivateName(
        target="torch.nn.parallel:DistributedDataParallel._remove_autograd_hooks",
        use="called",
        parameters=("self",),
        seen=_SEEN,
        reason="a module with newly trainable parameters is wrapped anew, and the old wrapper must let go of it",
    ),
    *PrivateName.each(
        "torch.nn.parallel:DistributedDataParallel",
        {
            "_build_params_for_reducer": ("self",),
            "_build_debug_param_to_name_mapping": ("self", "parameters"),
            "_ddp_init_helper": (
                "self",
                "parameters",
                "expect_sparse_gradient",
                "param_to_name_mapping",
                "static_graph",
            ),
        },
        use="called",
        seen=_SEEN,
        reason="a hook cannot be taken away: where none helps, the reducer is made anew, as by unpickling",
    ),
    *PrivateName.each(
        "torch.nn.parallel:DistributedDataParallel",
        ("_comm_hooks", "_has_rebuilt_buckets", "_bucket_config", "bucket_bytes_cap"),
        use="set",
        seen=_SEEN,
        reason="likewise: what belongs to the reducer, and the size of its buckets",
    ),
    *PrivateName.each(
        f"{_FSDP}._fully_shard._fsdp_param_group:FSDPParamGroup",
        SET_ON_GROUPS,
        use="set",
        seen=_SEEN,
        reason="where compression does not help, all that attaching has set is put back (hooks/stock.py)",
    ),
    PrivateName(
        target="torch.distributed:ProcessGroup._get_backend",
        use="called",
        seen=_SEEN,
        reason="the hook's own group has to be as patient as DDP's, whose timeout is not public",
    ),
    PrivateName(
        target="torch._dynamo.config:optimize_ddp",
        use="read",
        seen=_SEEN,
        reason='"python_reducer" bypasses communication hooks, which must be refused',
    ),
    PrivateName(
        target="torch.distributed.checkpoint.state_dict:set_optimizer_state_dict",
        use="wrapped",
        parameters=("model", "optimizers"),
        seen=_SEEN,
        reason="it takes the device of an optimizer's state from an entry, and SGD without momentum has none"
        " (checkpoint/stateless_optimizers.py, while a checkpoint is loaded)",
    ),
)
