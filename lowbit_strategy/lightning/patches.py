"""What the Lightning and Fabric strategies rely on beyond the frameworks' documented interface.

Both packages carry the same code under two names each; the table names one, and a test checks them in both.
"""

from __future__ import annotations

from lowbit_strategy.private_names import private_names

_TRAINER = "lightning.pytorch"
_DDP = f"{_TRAINER}.strategies.ddp:DDPStrategy"
_MODEL_PARALLEL = f"{_TRAINER}.strategies.model_parallel:ModelParallelStrategy"
_FABRIC = "lightning.fabric.strategies.model_parallel"
_ASYNC = f"{_TRAINER}.plugins.io.async_plugin:AsyncCheckpointIO"
_CONNECTORS = f"{_TRAINER}.trainer.connectors"

PATCHES = private_names(
    "lightning 2.6",
    f"""
    the stock method registers communication hooks on CUDA only
      overridden {_DDP}._register_ddp_hooks(self)
    a module with newly trainable parameters is wrapped anew
      called {_DDP}._setup_model(self, model)
    the default size of buckets depends on the device, which is known after the constructor
      set {_DDP}._ddp_kwargs
      set lightning.fabric.strategies.ddp:DDPStrategy._ddp_kwargs
    processes that were spawned take their residuals with them, which has to be reported; in the process that spawned \
    them nothing else tells that they have trained
      read {_DDP}._start_method
      read {_TRAINER}.strategies.launchers.multiprocessing:_MultiProcessingLauncher._already_fit
    sync_batchnorm=True is served by DDP strategies only; ours does it under FSDP2 too
      read {_DDP}._layer_sync
    the stock "auto" means tensor parallelism inside of a node; here every rank is data-parallel
      set {_MODEL_PARALLEL}._tensor_parallel_size
      set {_MODEL_PARALLEL}._data_parallel_size
      set {_FABRIC}:ModelParallelStrategy._tensor_parallel_size
      set {_FABRIC}:ModelParallelStrategy._data_parallel_size
    HSDP: the ranks that shard a model are those of a node, and the stock mesh has no such dim
      set {_MODEL_PARALLEL}._device_mesh
      set {_FABRIC}:ModelParallelStrategy._device_mesh
    its module's names are those that loading looks up (checkpoint/loading.py)
      read {_FABRIC}:_load_checkpoint
    it looks at the first entry of an optimizer's state, and SGD without momentum has none \
    (checkpoint/loading.py, while a checkpoint is loaded)
      wrapped {_FABRIC}:_rekey_optimizer_state_if_needed(optimizer_state_dict, module)
    the error for an unknown name of a strategy knows nothing of the nearest one (register.py)
      wrapped {_TRAINER}.strategies:StrategyRegistry.available_strategies()
    local steps: ranks take the mean of their weights before any callback learns that training has ended
      wrapped {_TRAINER}.loops.fit_loop:_FitLoop.on_run_end(self)
    it asks rank 0 alone whether a signal has come, and ranks that train locally have speeds of their own
      overridden {_TRAINER}.loops.training_epoch_loop:_TrainingEpochLoop._broadcast_sigterm_tensor(self)
    residuals of a replaced checkpoint stay until the new one has been written (base_strategy.py)
      read {_ASYNC}._executor
      read {_ASYNC}._error
    its handlers of signals call collectives, so they run when all ranks can answer (signals.py)
      read {_CONNECTORS}.signal_connector:_HandlersCompose.signal_handlers
      read {_CONNECTORS}.signal_connector:_SignalConnector.received_sigterm
      read {_CONNECTORS}.accelerator_connector:_AcceleratorConnector.cluster_environment
    """,
)
