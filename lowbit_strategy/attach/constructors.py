"""The strategies' constructors, one for DDP and one for FSDP2, shared by Lightning and Fabric.

All options about synchronization go into one `SyncOptions`. The constructors show its fields as arguments, so that
LightningCLI knows them.
"""

from __future__ import annotations

import dataclasses
import inspect
from collections.abc import Callable, Collection, Iterable, Mapping
from datetime import timedelta
from types import MappingProxyType
from typing import Any, Literal, get_args

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy
from torch.nn.parallel import DistributedDataParallel

from lowbit_strategy.attach.prepare import PreparedModel
from lowbit_strategy.attach.session import Session
from lowbit_strategy.attach.stateless_optimizers import optimizers_without_state
from lowbit_strategy.attach.sync_options import SyncOptions
from lowbit_strategy.hooks.bucket_cap import default_bucket_cap_mb
from lowbit_strategy.methods._base.chooser import Chooser
from lowbit_strategy.methods._base.compressor import Compressor
from lowbit_strategy.methods.loco import LoCo
from lowbit_strategy.methods.registry import PRESETS, as_compressor
from lowbit_strategy.methods.topk import TopK
from lowbit_strategy.model.fsdp_sharding import DEFAULT_MIN_SHARD_NUMEL, ShardPolicy, shard_any
from lowbit_strategy.model.mesh import by_mesh, data_ranks, give_replicas
from lowbit_strategy.model.sharded import sharded_groups
from lowbit_strategy.options.configuration import take_options, takes_options_of
from lowbit_strategy.options.conversion import known_of, types_of, unknown_option
from lowbit_strategy.ranks.topology import find_topology, resolve_shard_size

Accumulate = Literal["local", "reduce"]
_COMPUTE = {"bf16-mixed": torch.bfloat16, "16-mixed": torch.float16}

# FSDP1 options, and what replaces them.
_FSDP1_REMEDIES = {
    "cpu_offload": "parameters stay on the device: shard smaller blocks (min_shard_numel) to save memory",
    "sharding_strategy": "parameters are sharded over all ranks, or over those of a node with shard_size='node'",
    "auto_wrap_policy": "blocks are chosen by min_shard_numel, or call fully_shard in configure_model",
    "mixed_precision": "give the trainer precision='bf16-mixed' or 'bf16-true', or this strategy an mp_policy",
    "state_dict_type": "use save_distributed_checkpoint=True for a folder of shards",
    "activation_checkpointing_policy": "apply activation checkpointing in configure_model",
}


class LowBitStrategy:
    """The common base of both frameworks' strategies: stored options, and properties that the framework reads.

    Attributes:
        compressor, options: The user's choice.
    """

    compressor: Compressor
    options: SyncOptions

    @property
    def root_device(self) -> torch.device:
        """This rank's device. A launcher such as Ray's may show each process only one device."""
        stock: Any = super()
        try:
            device: torch.device = stock.root_device
        except IndexError:
            devices: Any = getattr(self, "parallel_devices", ())
            if len(devices) != 1:
                raise
            device = devices[0]
        return device

    @property
    def loss_scaler(self) -> Any:
        stock: Any = self
        precision = stock.precision_plugin if hasattr(stock, "precision_plugin") else stock.precision
        return getattr(precision, "scaler", None)

    def _configure(self, compressor: Compressor | str | None, options: SyncOptions, *, scatter: bool) -> None:
        options.check_wrapper(scatter=scatter)
        self.options = options
        if compressor is not None:
            self.compressor = as_compressor(compressor)
        else:
            self.compressor = options.default_compressor
        self.on_configured()

    def _attached(self, attach: Callable[..., Session], model: nn.Module, prepared: PreparedModel) -> Session:
        """Start compression on a model that is wrapped or sharded."""
        return attach(model, prepared, device=self.root_device, has_scaler=self.loss_scaler is not None)

    def on_configured(self) -> None:
        """Called when all options are valid and stored, and before anything is attached."""


class DDPConstructor(LowBitStrategy):
    """The constructor of a DDP strategy; the framework's ``DDPStrategy`` follows it in the class's bases.

    Args:
        compressor: A configuration such as ``LoCo(bits=4)``, the default, or a preset's name such as ``"loco2"``.
        kwargs: Fields of `SyncOptions`, and arguments of the framework's ``DDPStrategy`` except its hooks.
    """

    _ddp_kwargs: dict[str, Any]

    @takes_options_of(SyncOptions)
    def __init__(self, compressor: Compressor | str | None = None, **kwargs: Any) -> None:
        options = take_options(SyncOptions, kwargs)
        for option in ("ddp_comm_hook", "ddp_comm_state", "ddp_comm_wrapper"):
            if kwargs.get(option) is not None:  # LightningCLI passes every default
                raise ValueError(f"the compressor is the communication hook: leave {option} out")
        of_ddp = [
            name for each in (super().__init__, DistributedDataParallel) for name in inspect.signature(each).parameters
        ]
        _refuse_unknown(type(self), kwargs, (*inspect.signature(DDPConstructor).parameters, *of_ddp))
        super().__init__(**kwargs)
        self._configure(compressor, options, scatter=False)

    @property
    def distributed_sampler_kwargs(self) -> dict[str, Any]:
        """Use the real number of ranks, even if a launcher shows each process fewer devices."""
        stock: Any = self
        return {"num_replicas": stock.world_size, "rank": stock.global_rank}

    def choose_buckets(self, device: torch.device) -> None:
        """Set the default size of DDP's buckets on `device`, before DDP wraps the model."""
        if not isinstance(self.compressor, Chooser):  # the framework's own steps use the framework's own buckets
            self._ddp_kwargs.setdefault("bucket_cap_mb", default_bucket_cap_mb(device))


class FSDPConstructor(LowBitStrategy):
    """The constructor of an FSDP2 strategy; the framework's ``ModelParallelStrategy`` follows it in the class's bases.

    Args:
        compressor: A configuration such as ``LoCo(bits=4)``, the default, or a preset's name such as ``"loco2"``.
        min_shard_numel: Smallest block that is gathered and reduced separately. Smaller: less memory, more messages.
        mp_policy: FSDP2's dtypes. None: the framework's ``precision`` decides. With ``bf16-mixed``, weights are
            gathered and used in bfloat16, float inputs of modules are cast to it, and gradients are reduced in float32;
            batch norms keep the parameters' dtype.
        accumulate: What happens with several micro-batches per step. ``local``: every rank keeps unsharded gradients
            and compresses them once, after the last micro-batch. ``reduce``: every micro-batch is reduced, as in the
            stock strategy, which needs no extra memory but multiplies the bytes sent.
        data_parallel_size: Number of ranks that average gradients. ``"auto"``: all ranks divided by the tensor-parallel
            size.
        tensor_parallel_size: Number of ranks that share each parallelized parameter. ``"auto"``: all ranks divided by
            `data_parallel_size`.
        parallelize_fn: Fabric only: a function of the module and the mesh that applies tensor parallelism, and may
            shard the module; otherwise it is sharded afterwards. In Lightning, ``configure_model`` does this.
        save_distributed_checkpoint: True: a folder of shards; False: one full file.
        process_group_backend, timeout: See ``ModelParallelStrategy``.
        options: The fields of `SyncOptions`.
    """

    num_nodes: int
    num_processes: int
    _sampler: dict[str, Any] | None = None
    _sizes_are_given: bool

    @takes_options_of(SyncOptions)
    def __init__(
        self,
        compressor: Compressor | str | None = None,
        *,
        min_shard_numel: int = DEFAULT_MIN_SHARD_NUMEL,
        mp_policy: MixedPrecisionPolicy | None = None,
        accumulate: Accumulate = "local",
        data_parallel_size: int | Literal["auto"] = "auto",
        tensor_parallel_size: int | Literal["auto"] = "auto",
        parallelize_fn: Callable[[Any, DeviceMesh], Any] | None = None,
        save_distributed_checkpoint: bool = False,
        process_group_backend: str | None = None,
        timeout: timedelta | None = timedelta(minutes=30),
        **options: Any,
    ) -> None:
        sync_options = take_options(SyncOptions, options)
        _refuse_unknown(type(self), options, inspect.signature(FSDPConstructor).parameters, _FSDP1_REMEDIES)
        super().__init__(  # type: ignore[call-arg]
            **self.stock_options(),
            data_parallel_size=data_parallel_size,
            tensor_parallel_size=tensor_parallel_size,
            save_distributed_checkpoint=save_distributed_checkpoint,
            process_group_backend=process_group_backend,
            timeout=timeout,
        )
        if not isinstance(min_shard_numel, int) or isinstance(min_shard_numel, bool) or min_shard_numel < 1:
            raise ValueError(f"min_shard_numel must be a positive integer, got {min_shard_numel!r}")
        if mp_policy is not None and not isinstance(mp_policy, MixedPrecisionPolicy):
            raise TypeError(
                f"mp_policy must be a torch.distributed.fsdp.MixedPrecisionPolicy or None, got {mp_policy!r}"
            )
        if parallelize_fn is not None and "parallelize_fn" not in self.stock_options():
            raise ValueError("parallelize_fn is for Fabric: a LightningModule parallelizes itself in configure_model")
        self.parallelize_fn = parallelize_fn
        self._sizes_are_given = (data_parallel_size, tensor_parallel_size) != ("auto", "auto")
        if accumulate not in get_args(Accumulate):
            raise ValueError(f'accumulate must be "local" or "reduce", got {accumulate!r}')
        self.min_shard_numel, self.mp_policy, self.accumulate = min_shard_numel, mp_policy, accumulate
        self._configure(compressor, sync_options, scatter=True)

    def shard(self, module: nn.Module, device_mesh: Any, precision: Any, *, by_child: bool = False) -> nn.Module:
        """Shard `module` in place, with the chosen dtypes or those that the framework's `precision` implies."""
        stock: Any = self
        policy = ShardPolicy(
            min_numel=self.min_shard_numel,
            forward_methods=("training_step", "validation_step", "test_step", "predict_step"),
            by_child=by_child,
            mp_policy=self.mp_policy or policy_of(getattr(precision, "precision", "")),
        )
        shard_any(module, device_mesh["data_parallel"], stock.root_device, policy)
        if self.options.shard_size is not None:
            give_replicas(sharded_groups(module), device_mesh["replicate", "data_parallel"])
        self._follow_mesh(module)
        return module

    def stock_options(self) -> dict[str, Any]:
        """Additional arguments for the framework's strategy."""
        return {}

    def load_checkpoint(self, *args: Any, **kwargs: Any) -> dict[str, Any]:
        stock: Any = super()
        with optimizers_without_state(stock.load_checkpoint):
            loaded: dict[str, Any] = stock.load_checkpoint(*args, **kwargs)
        return loaded

    def setup_environment(self) -> None:
        # Stock "auto" means one data-parallel rank per node; here every rank is one.
        stock: Any = self
        stock.cluster_environment.set_world_size(self.num_nodes * self.num_processes)
        world_size, auto = stock.world_size, "auto"  # launchers other than the framework's own know the world size
        data, tensor = stock._data_parallel_size, stock._tensor_parallel_size
        if tensor == auto:
            tensor = 1 if data == auto else max(1, world_size // data)
        stock._tensor_parallel_size = tensor
        stock._data_parallel_size = data = max(1, world_size // tensor) if data == auto else data
        super().setup_environment()  # type: ignore[misc]
        if self.options.shard_size is not None:
            shard_size = resolve_shard_size(self.options.shard_size, find_topology(), tensor)
            shape, names = (data // shard_size, shard_size, tensor), ("replicate", "data_parallel", "tensor_parallel")
            stock._device_mesh = init_device_mesh(stock.root_device.type, shape, mesh_dim_names=names)
            if (module := getattr(stock, "lightning_module", None)) is not None:
                module._device_mesh = stock._device_mesh  # for configure_model

    @property
    def distributed_sampler_kwargs(self) -> dict[str, Any]:
        """Give different data to the ranks that average gradients."""
        stock: Any = self
        if self._sampler is None:
            tensor = stock._tensor_parallel_size
            self._sampler = {"num_replicas": stock._data_parallel_size, "rank": stock.global_rank // tensor}
        return self._sampler

    def _follow_mesh(self, module: nn.Module) -> None:
        """Follow the mesh of a module that sharded itself. If more ranks average gradients than are data-parallel, some
        share the same data.

        Raises:
            ValueError: Data loaders have already been made for other ranks.
        """
        stock: Any = self
        ranks = data_ranks(by_mesh(sharded_groups(module))[0][0])
        sampler = {"num_replicas": len(ranks), "rank": ranks.index(stock.global_rank)}
        if self._sizes_are_given and len(ranks) > stock._data_parallel_size:
            return
        if self._sampler not in (None, sampler):
            raise ValueError(
                f"data was split for {self._sampler['num_replicas']} ranks, but on the model's mesh {len(ranks)} ranks"
                " have different data: set the model up before the data loaders, or give"
                f" data_parallel_size={len(ranks)}"
            )
        self._sampler = sampler


def _refuse_unknown(
    strategy: type, options: Iterable[str], known: Collection[str], remedies: Mapping[str, str] = MappingProxyType({})
) -> None:
    """Raise a TypeError if an option is not in `known`. It names the nearest one, or says where the option belongs."""
    for name in options:
        if name in remedies:
            raise TypeError(f"{name} is an option of FSDP1, and this strategy is FSDP2: {remedies[name]}")
        if name not in known:
            raise unknown_option(strategy.__name__, name, dict.fromkeys(known), advice=_whose(strategy, name))


def _whose(strategy: type, name: str) -> str:
    """A hint for an unknown option that belongs to another class; "" if no class has it."""
    of_options = [(f"{field}={{}}({{}}=...)", known_of(kind)) for field, kind in types_of(SyncOptions).items()]
    compressors = (f"the compressor, {strategy.__name__}({{}}({{}}=...))", (LoCo(), TopK(), *PRESETS.values()))
    for form, configurations in (compressors, *of_options):
        for each in configurations:
            if name in {field.name for field in dataclasses.fields(each)}:
                return f"it is an option of {form.format(type(each).__name__, name)}"
    return ""


def policy_of(precision: str) -> MixedPrecisionPolicy:
    """FSDP2's policy for a trainer's `precision`.

    With ``bf16-mixed`` and ``16-mixed``, shards and optimizer states stay float32, and weights are gathered and used in
    half precision. Otherwise FSDP2 would gather float32, and autocast would keep a half-precision copy of every weight
    for backward. The compressor gets float32 gradients: it codes them anyway, and their mean is not rounded to half
    precision.

    With any other precision, everything has the parameters' dtype.
    """
    if precision not in _COMPUTE:
        return MixedPrecisionPolicy()
    return MixedPrecisionPolicy(param_dtype=_COMPUTE[precision], reduce_dtype=torch.float32)
