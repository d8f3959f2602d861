"""The constructors of the strategies, one for DDP and one for FSDP2, the same for Lightning and Fabric.

All that is about synchronization goes into one `SyncOptions`: a new option is a field there, and what it does is
written there. The constructors show these fields as arguments, so that LightningCLI knows them.
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

from lowbit_strategy import leaves
from lowbit_strategy.attach.companion import companion_of
from lowbit_strategy.attach.replicas import Replicas
from lowbit_strategy.attach.rounds import EveryStep, RoundRule
from lowbit_strategy.checkpoint.all_ranks import OnMissingResidual
from lowbit_strategy.checkpoint.capture import OnWorldSizeChange
from lowbit_strategy.hooks.ddp import default_bucket_cap_mb
from lowbit_strategy.methods._base.chooser import Chooser
from lowbit_strategy.methods._base.compressor import Compressor
from lowbit_strategy.methods.loco import LoCo
from lowbit_strategy.methods.registry import PRESETS, as_compressor
from lowbit_strategy.methods.topk import TopK
from lowbit_strategy.methods.weight_codings import WeightCoding
from lowbit_strategy.model.fsdp_sharding import (
    DEFAULT_MIN_SHARD_NUMEL,
    ShardPolicy,
    policy_of,
    shard_any,
    sharded_groups,
)
from lowbit_strategy.model.mesh import by_rows, data_ranks
from lowbit_strategy.options.configuration import configuration, take_options, takes_options_of
from lowbit_strategy.options.conversion import known_of, types_of, unknown_option
from lowbit_strategy.ranks.ranks import find_topology, resolve_shard_size


@configuration
class SyncOptions:
    """How compression behaves around the compressor.

    Args:
        seed: Seed of stochastic rounding and selection; the same on all ranks.
        on_world_size_change: Resuming on another number of ranks: ``reset`` starts residuals from zero, ``fold`` gives
            every rank the mean of the saved ones (reads all ranks' files).
        on_missing_residual: A rank's residual file is missing or damaged on resuming: ``error``, or ``reset`` to start
            residuals from zero. None: they start from zero if it is missing, with a warning; damage is an error.
        rollback: Copy residuals before each step, to restore them where reduced gradients are thrown away: a step that
            is skipped, `zero_grad` without a step. False: there they start from zero.
        max_residual: Largest norm of a parameter's residual, in norms of its gradient: without it what a spike leaves
            decays slowly where gradients are clipped. Measured: 3 for quantizers, one over the density for sparse
            methods. None: no bound.
        follows_rate: Residuals follow the learning rate, as in error feedback as first published: when the rate halves,
            they double, so that what was not sent counts at the rate of its own step. Measured to help sparse methods
            with SGD, not with AdamW. Not with `outer`.
        check_digest: DDP: compare a digest of the parameters over the ranks after 2, 10 and 100 steps and after every
            1,000, and stop with an error if they differ. False where ranks may round differently, as with processors
            of different types. With local steps the anchors are compared, and under HSDP the replicas' parameters.
        two_level: Gradients are added up exactly inside a node and compressed between the ranks of equal index on all
            nodes, so that each travels once per node and not once per rank. None: enabled when there are several nodes
            with the same number (> 1) of ranks. False: all ranks exchange with all others.
        intra: 8: inside a node ranks send each other codes of 8 bits instead of exact gradients, for nodes whose links
            inside are slow too. The error, at most 1/250 of the largest magnitude in a block, is in no residual. Exempt
            parameters stay exact, and so does what DDP gathers inside a node. Needs two levels or HSDP. None: exact.
        shard_size: FSDP2: how many ranks of a node share one model; the gradients of their shards are compressed
            between these replicas (HSDP). ``"node"``: all ranks of a node. None: all ranks of the run.
        weights: FSDP2: how weights travel: `Exact`, `WeightCode` or `WeightDelta`, or a name such as ``"delta4"``.
            None: as `default_weights` chooses for the compressor.
        outer: Local steps with an outer optimizer between synchronizations: a rule such as ``DiLoCo(every=30)`` or its
            name. None: gradients are synchronized in every step.
        elastic: Replicas join and leave, each with its own world: `Elastic`, with the address of a lighthouse. Needs
            `outer`, and the extra ``elastic``. None: the ranks are the same from the beginning to the end.
        memory: GB (10^9 bytes) per rank that compression may keep: residuals, weights between gathers, messages of a
            module. To fit, in this order: residuals are not copied; weights are gathered again in backward instead of
            being kept as codes, unless `weights` is given; LoCo's residuals are dropped, at 4 bits or more and with at
            least four ranks or nodes, where the loss was measured. None: half of what the smallest GPU has free after
            parameters, gradients and Adam's state, from an eighth to a quarter of its memory; unlimited on CPUs.
        far_links: On CPU: all messages travel at once, point to point, into buffers allocated in the step before.
            Results are the same; a rank needs as much more memory as it sends per step. None: enabled if a measured
            round trip takes 5 ms or more.
        second_moment: For few bits and optimizers like Adam: in one step of 32 ranks exchange the squares of their own
            gradients (an eighth of a bit per element and step) and compute `exp_avg_sq` from them, which compression
            noise would otherwise enlarge. Below the best learning rate, and where it decays, one bit then needs far
            fewer steps. Costs up to 4 bytes per parameter; not for two levels under DDP. With `outer` each rank scales
            its own to the size it has for the ranks' mean gradient, and nothing is sent or kept: see `MeanMoment`.
            None: enabled where codes with error feedback have two bits or fewer, until an optimizer steps that is not
            like Adam; off with `outer`, and for two levels under DDP.
    """

    seed: int = 0
    on_world_size_change: OnWorldSizeChange = "reset"
    on_missing_residual: OnMissingResidual | None = None
    rollback: bool = True
    max_residual: float | None = None
    follows_rate: bool = False
    check_digest: bool = True
    two_level: bool | None = None
    intra: int | None = None
    shard_size: int | Literal["node"] | None = None
    weights: WeightCoding | None = None
    outer: RoundRule | None = None
    elastic: Replicas | None = None
    memory: float | None = None
    far_links: bool | None = None
    second_moment: bool | None = None

    @property
    def default_compressor(self) -> Compressor:
        """The compressor if the user chooses none."""
        return LoCo() if self.outer is None else self.outer.compressor()

    @property
    def meet(self) -> Callable[..., EveryStep] | None:
        """What lets ranks meet in rounds; None: they meet in every step."""
        return None if self.outer is None else self.outer.attach

    def __post_init__(self) -> None:
        companion_of(self).check_options(self)
        for option, part in leaves.OPTIONS.items():
            if getattr(self, option):
                leaves.need(part, option)
        if self.intra not in (None, 8):
            raise ValueError(f"intra must be 8, for codes of 8 bits inside a node, or None, got {self.intra!r}")
        if self.max_residual is not None and not self.max_residual > 0:
            raise ValueError(f"max_residual must be a positive number or None, got {self.max_residual!r}")
        if self.follows_rate and self.outer is not None:
            raise ValueError("follows_rate=True does not go with outer, whose residuals are of weights: leave it out")
        if self.memory is not None and not self.memory > 0:
            raise ValueError(f"memory must be a positive number of GB or None, got {self.memory!r}")
        if isinstance(self.shard_size, int) and self.shard_size < 1:
            raise ValueError(f'shard_size must be a positive number of ranks, "node" or None, got {self.shard_size}')
        if self.shard_size is not None and self.two_level is not None:
            raise ValueError("two_level must not be given with shard_size: replicas of shards are two levels already")


def check_options(options: SyncOptions, *, scatter: bool) -> None:
    """Raises:
    ValueError: They do not go together, or not with FSDP2 (`scatter`) or DDP.
    """
    if options.shard_size is not None and not scatter:
        raise ValueError("shard_size is an option of FSDP2 strategies: under DDP no rank has a shard")
    if options.weights is not None and not scatter:
        raise ValueError(
            f"weights={type(options.weights).__name__}(...) is for FSDP2, whose ranks gather weights: under DDP every"
            " rank has them all. Leave weights out, or use FSDP2 (loco_fsdp; fsdp_version: 2)"
        )
    if options.outer is not None:
        options.outer.check_options(options, scatter=scatter)
    if options.elastic is not None:
        options.elastic.check(options)


Accumulate = Literal["local", "reduce"]

# Options of FSDP1, for those who come from it.
_FSDP1_REMEDIES = {
    "cpu_offload": "parameters stay on the device: shard smaller blocks (min_shard_numel) to save memory",
    "sharding_strategy": "parameters are sharded over all ranks, or over those of a node with shard_size='node'",
    "auto_wrap_policy": "blocks are chosen by min_shard_numel, or call fully_shard in configure_model",
    "mixed_precision": "give the trainer precision='bf16-mixed' or 'bf16-true', or this strategy an mp_policy",
    "state_dict_type": "use save_distributed_checkpoint=True for a folder of shards",
    "activation_checkpointing_policy": "apply activation checkpointing in configure_model",
}


class LowBitStrategy:
    """What the strategies of both frameworks have: what their constructors leave behind, and the framework's parts.

    Attributes:
        compressor, options: The user's choice.
    """

    compressor: Compressor
    options: SyncOptions

    @classmethod
    def register_strategies(cls, strategy_registry: Any) -> None:
        """Nothing: `lowbit_strategy.register` does it, for both kinds."""

    @property
    def root_device(self) -> torch.device:
        """This rank's. A launcher other than the framework's own, such as Ray's, may show each process one device."""
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
        """The ``GradScaler``; None: there is none."""
        stock: Any = self
        precision = stock.precision_plugin if hasattr(stock, "precision_plugin") else stock.precision
        return getattr(precision, "scaler", None)

    def _configure(self, compressor: Compressor | str | None, options: SyncOptions, *, scatter: bool) -> None:
        check_options(options, scatter=scatter)
        self.options = options
        if compressor is not None:
            self.compressor = as_compressor(compressor)
        else:
            self.compressor = options.default_compressor
        self.on_configured()

    def on_configured(self) -> None:
        """All options are valid and stored; nothing has been attached."""


class DDPConstructor(LowBitStrategy):
    """Put between a framework's mixin and its ``DDPStrategy`` in the bases of a class.

    Args:
        compressor: A configuration such as ``LoCo(bits=4)``, the default, or a preset's name such as ``"loco2"``.
        kwargs: Options of `SyncOptions`, and arguments of the framework's ``DDPStrategy`` other than its hooks.
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
        """The ranks that there are, where a launcher shows each process fewer devices."""
        stock: Any = self
        return {"num_replicas": stock.world_size, "rank": stock.global_rank}

    def choose_buckets(self, device: torch.device) -> None:
        """Sets the default size of DDP's buckets on `device`, before DDP wraps."""
        if not isinstance(self.compressor, Chooser):  # the framework's own step has the framework's own buckets
            self._ddp_kwargs.setdefault("bucket_cap_mb", default_bucket_cap_mb(device))


class FSDPConstructor(LowBitStrategy):
    """Put between a framework's mixin and its ``ModelParallelStrategy`` in the bases of a class.

    Args:
        compressor: A configuration such as ``LoCo(bits=4)``, the default, or a preset's name such as ``"loco2"``.
        min_shard_numel: Smallest block that is gathered and reduced by itself. Smaller: less memory, more messages.
        mp_policy: FSDP2's types. None: as the framework's ``precision`` says. With ``bf16-mixed`` weights are
            gathered, and computed with, in bfloat16, float inputs of modules are cast to it, and gradients are reduced
            in float32; batch norms keep the parameters' type.
        accumulate: Over several micro-batches. ``local``: unsharded gradients are kept on every rank until the last
            one, and compressed once per step; ``reduce``: every micro-batch is reduced, as the stock strategy does,
            which keeps none and sends that many times the bytes.
        data_parallel_size: Ranks over which gradients are a mean; ``"auto"``: those that tensor parallelism leaves.
        tensor_parallel_size: Ranks that share the parameters that the model parallelizes; ``"auto"``: those that
            `data_parallel_size` leaves.
        parallelize_fn: Fabric: applies tensor parallelism, given the module and the mesh; before it is sharded, unless
            it shards the module as well. In Lightning a module does so in ``configure_model``.
        save_distributed_checkpoint: True: a folder of shards; False: one full file.
        process_group_backend, timeout: See ``ModelParallelStrategy``.
        options: Those of `SyncOptions`.
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
        """Shard `module` in place, in the types that were chosen or that follow from the framework's `precision`."""
        stock: Any = self
        policy = ShardPolicy(
            min_numel=self.min_shard_numel,
            forward_methods=("training_step", "validation_step", "test_step", "predict_step"),
            by_child=by_child,
            mp_policy=self.mp_policy or policy_of(getattr(precision, "precision", "")),
        )
        shard_any(module, device_mesh["data_parallel"], stock.root_device, policy)
        self._follow_mesh(module)
        return module

    def stock_options(self) -> dict[str, Any]:
        """More arguments of the framework's strategy."""
        return {}

    def setup_environment(self) -> None:
        # Stock "auto" means one data-parallel rank per node; here every rank is one.
        stock: Any = self
        stock.cluster_environment.set_world_size(self.num_nodes * self.num_processes)
        world_size, auto = stock.world_size, "auto"  # other launchers than the framework's own keep what they know
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
        """The ranks over which gradients are a mean have different data."""
        stock: Any = self
        if self._sampler is None:
            tensor = stock._tensor_parallel_size
            self._sampler = {"num_replicas": stock._data_parallel_size, "rank": stock.global_rank // tensor}
        return self._sampler

    def _follow_mesh(self, module: nn.Module) -> None:
        """A sharded module may be on a mesh that it has made itself. Where gradients are a mean over more ranks than
        were given as data-parallel, these have parts of the same data.

        Raises:
            ValueError: There are data loaders for other ranks already.
        """
        stock: Any = self
        rows, (each, *_) = next(iter(by_rows(sharded_groups(module), self.data_parallel_mesh).items()))
        ranks = data_ranks(rows, each)
        sampler = {"num_replicas": len(ranks), "rank": ranks.index(stock.global_rank)}
        if self._sizes_are_given and len(ranks) > stock._data_parallel_size:
            return
        if self._sampler not in (None, sampler):
            raise ValueError(
                f"data was split for {self._sampler['num_replicas']} ranks, and the model has made a mesh on which"
                f" {len(ranks)} have different data: set the model up before the data loaders, or give"
                f" data_parallel_size={len(ranks)}"
            )
        self._sampler = sampler

    @property
    def data_parallel_mesh(self) -> DeviceMesh | None:
        """HSDP, whose modules are sharded over one dim: both dims."""
        stock: Any = self
        return None if self.options.shard_size is None else stock.device_mesh["replicate", "data_parallel"]


def _refuse_unknown(
    strategy: type, options: Iterable[str], known: Collection[str], remedies: Mapping[str, str] = MappingProxyType({})
) -> None:
    """Raises:
    TypeError: There is an option that is not in `known`. The message has the nearest one, or where the option goes.
    """
    for name in options:
        if name in remedies:
            raise TypeError(f"{name} is an option of FSDP1, and this strategy is FSDP2: {remedies[name]}")
        if name not in known:
            raise unknown_option(strategy.__name__, name, dict.fromkeys(known), advice=_whose(strategy, name))


def _whose(strategy: type, name: str) -> str:
    """Hint for an unknown option that belongs to another class; "" if none has it."""
    of_options = [(f"{field}={{}}({{}}=...)", known_of(kind)) for field, kind in types_of(SyncOptions).items()]
    compressors = (f"the compressor, {strategy.__name__}({{}}({{}}=...))", (LoCo(), TopK(), *PRESETS.values()))
    for form, configurations in (compressors, *of_options):
        for each in configurations:
            if name in {field.name for field in dataclasses.fields(each)}:
                return f"it is an option of {form.format(type(each).__name__, name)}"
    return ""
