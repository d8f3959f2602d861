"""What the Lightning and Fabric strategies rely on beyond the frameworks' documented interface.

Both packages carry the same code under two names each; the entries name one, and a test checks them in both.
"""

from __future__ import annotations

from lowbit_strategy.private_names import PrivateName

_SEEN = "lightning 2.6"
_DDP = "lightning.pytorch.strategies.ddp:DDPStrategy"
_MODEL_PARALLEL = "lightning.pytorch.strategies.model_parallel:ModelParallelStrategy"
_FABRIC_MODEL_PARALLEL = "lightning.fabric.strategies.model_parallel:ModelParallelStrategy"

PATCHES = (
    PrivateName(
        target=f"{_DDP}._register_ddp_hooks",
        use="overridden",
        parameters=("self",),
        seen=_SEEN,
        reason="the stock method registers communication hooks on CUDA only",
    ),
    PrivateName(
        target=f"{_DDP}._setup_model",
        use="called",
        parameters=("self", "model"),
        seen=_SEEN,
        reason="a module with newly trainable parameters is wrapped anew",
    ),
    PrivateName(
        target=f"{_DDP}._ddp_kwargs",
        use="set",
        seen=_SEEN,
        reason="the default size of buckets depends on the device, which is known after the constructor",
    ),
    PrivateName(
        target=f"{_DDP}._start_method",
        use="read",
        seen=_SEEN,
        reason="processes that were spawned take their residuals with them, which has to be reported",
    ),
    PrivateName(
        target="lightning.pytorch.strategies.launchers.multiprocessing:_MultiProcessingLauncher._already_fit",
        use="read",
        seen=_SEEN,
        reason="likewise: in the process that spawned them nothing else tells that they have trained",
    ),
    PrivateName(
        target=f"{_DDP}._layer_sync",
        use="read",
        seen=_SEEN,
        reason="sync_batchnorm=True is served by DDP strategies only; ours does it under FSDP2 too",
    ),
    *(
        PrivateName(
            target=f"{cls}.{name}",
            use="set",
            seen=_SEEN,
            reason='the stock "auto" means tensor parallelism inside of a node; here every rank is data-parallel',
        )
        for cls in (_MODEL_PARALLEL, _FABRIC_MODEL_PARALLEL)
        for name in ("_tensor_parallel_size", "_data_parallel_size")
    ),
    *(
        PrivateName(
            target=f"{cls}._device_mesh",
            use="set",
            seen=_SEEN,
            reason="HSDP: the ranks that shard a model are those of a node, and the stock mesh has no such dim",
        )
        for cls in (_MODEL_PARALLEL, _FABRIC_MODEL_PARALLEL)
    ),
    PrivateName(
        target="lightning.fabric.strategies.ddp:DDPStrategy._ddp_kwargs",
        use="set",
        seen=_SEEN,
        reason="as for the Trainer's DDPStrategy",
    ),
    PrivateName(
        target="lightning.fabric.strategies.model_parallel:_load_checkpoint",
        use="read",
        seen=_SEEN,
        reason="its module's names are those that loading looks up (checkpoint/stateless_optimizers.py)",
    ),
    PrivateName(
        target="lightning.fabric.strategies.model_parallel:_rekey_optimizer_state_if_needed",
        use="wrapped",
        parameters=("optimizer_state_dict", "module"),
        seen=_SEEN,
        reason="it looks at the first entry of an optimizer's state, and SGD without momentum has none"
        " (checkpoint/stateless_optimizers.py, while a checkpoint is loaded)",
    ),
    PrivateName(
        target="lightning.pytorch.strategies:StrategyRegistry.available_strategies",
        use="wrapped",
        parameters=(),
        seen=_SEEN,
        reason="the error for an unknown name of a strategy knows nothing of the nearest one (register.py)",
    ),
    PrivateName(
        target="lightning.pytorch.loops.fit_loop:_FitLoop.on_run_end",
        use="wrapped",
        parameters=("self",),
        seen=_SEEN,
        reason="local steps: ranks take the mean of their weights before any callback learns that training has ended",
    ),
    PrivateName(
        target="lightning.pytorch.loops.training_epoch_loop:_TrainingEpochLoop._broadcast_sigterm_tensor",
        use="overridden",
        parameters=("self",),
        seen=_SEEN,
        reason="it asks rank 0 alone whether a signal has come, and ranks that train locally have speeds of their own",
    ),
    *PrivateName.each(
        "lightning.pytorch.plugins.io.async_plugin:AsyncCheckpointIO",
        ("_executor", "_error"),
        use="read",
        seen=_SEEN,
        reason="residuals of a replaced checkpoint stay until the new one has been written (asynchronous.py)",
    ),
    *PrivateName.each(
        "lightning.pytorch.trainer.connectors",
        (
            "signal_connector:_HandlersCompose.signal_handlers",
            "signal_connector:_SignalConnector.received_sigterm",
            "accelerator_connector:_AcceleratorConnector.cluster_environment",
        ),
        use="read",
        seen=_SEEN,
        reason="its handlers of signals call collectives, so they run when all ranks can answer (signals.py)",
    ),
)
