"""All options about synchronization except the compressor, the same in every framework and configuration file."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import fields
from typing import Any, Literal

from torch.optim import Optimizer

from lowbit_strategy import leaves
from lowbit_strategy.attach.part import Part, made_parts
from lowbit_strategy.attach.round_rule import RoundRule
from lowbit_strategy.checkpoint.agreement import OnMissingResidual
from lowbit_strategy.checkpoint.restoring import OnWorldSizeChange
from lowbit_strategy.methods._base.compressor import Compressor
from lowbit_strategy.methods.loco import LoCo
from lowbit_strategy.methods.weight_codings import WeightCoding
from lowbit_strategy.options.configuration import configuration
from lowbit_strategy.options.conversion import Mismatch, call, register_conversion


class RoundMembers(Part):
    """An option that lets ranks join and leave: each process, or each node that shares one model, has its own world."""


@configuration
class SyncOptions:
    """Options of synchronization that do not belong to the compressor.

    Args:
        seed: Seed of stochastic rounding and selection; the same on all ranks.
        on_world_size_change: Resuming on a different number of ranks: ``reset`` starts residuals from zero, ``fold``
            gives every rank the mean of the saved ones (reads all ranks' files).
        on_missing_residual: A rank's residual file is missing or damaged on resuming: ``error``, or ``reset`` to start
            residuals from zero. None: they start from zero if it is missing, with a warning; damage is an error.
        rollback: Copy residuals before each step, to restore them if reduced gradients are discarded: a skipped step,
            `zero_grad` without a step. False: they start from zero then.
        max_residual: Largest norm of a parameter's residual, in units of its gradient's norm. Without a bound, the
            residual of a spike decays slowly if gradients are clipped. Measured: 3 for quantizers, one over the density
            for sparse methods. None: no bound.
        follows_rate: Residuals follow the learning rate, as in error feedback as first published: when the rate halves,
            they double, so that what was not sent counts at the rate of its own step. Measured to help sparse methods
            with SGD, not with AdamW. Not with `outer`.
        check_digest: DDP: compare a digest of the parameters over the ranks after 2, 10 and 100 steps and then every
            1,000, and stop with an error if they differ. Use False if ranks may round differently, as with processors
            of different types. With local steps the anchors are compared, and under HSDP the replicas' parameters.
        two_level: Gradients are added up exactly inside a node and compressed between the ranks of equal index on all
            nodes, so that each travels once per node and not once per rank. None: enabled when there are several nodes
            with the same number (> 1) of ranks. False: all ranks exchange with all others.
        intra: 8: inside a node ranks send each other codes of 8 bits instead of exact gradients, for nodes whose inner
            links are slow too. No residual keeps the error, at most 1/250 of the largest magnitude in a block. Exempt
            parameters stay exact, and so does what DDP gathers inside a node. Needs two levels or HSDP. None: exact.
        shard_size: FSDP2: how many ranks of a node share one model; the gradients of their shards are compressed
            between these replicas (HSDP). ``"node"``: all ranks of a node. None: all ranks of the run.
        weights: FSDP2: how weights travel: `Exact`, `WeightCode` or `WeightDelta`, or a name such as ``"delta4"``.
            None: `default_weights` chooses for the compressor.
        outer: Local steps with an outer optimizer between synchronizations: a rule such as ``DiLoCo(every=30)`` or its
            name. None: gradients are synchronized in every step.
        elastic: Replicas join and leave, each with its own world: `Elastic`, with the address of a lighthouse. Needs
            `outer`, and the extra ``elastic``. None: the ranks stay the same.
        memory: GB (10^9 bytes) per rank that compression may keep: residuals, weights between gathers, messages of a
            module. To fit, in this order: residuals are not copied; weights are gathered again in backward instead of
            being kept as codes, unless `weights` is given; LoCo's residuals are dropped, at 4 bits or more and with at
            least four ranks or nodes, where the loss was measured. None: half of the smallest GPU's free memory after
            parameters, gradients and Adam's state, but at least an eighth and at most a quarter of its memory;
            unlimited on CPUs.
        far_links: Whether all messages travel at once on CPU, point to point, into buffers allocated in the previous
            step. Results are the same; a rank needs additional memory for as many bytes as it sends per step. None:
            enabled if a measured round trip takes 5 ms or more.
        second_moment: Whether to correct Adam's second moment, for few bits: in one step of 32 ranks exchange the
            squares of their own gradients (an eighth of a bit per element and step) and compute `exp_avg_sq` from them,
            which compression noise would otherwise enlarge. Below the best learning rate, and where it decays, one bit
            then needs far fewer steps. Costs up to 4 bytes per parameter; not for two levels under DDP. With `outer`
            each rank scales its own moment to that of the ranks' mean gradient, and nothing is sent or kept: see
            `MeanMoment`. None: enabled for codes with error feedback and two bits or fewer, until an optimizer steps
            that is not like Adam; off with `outer`, and for two levels under DDP.
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
    elastic: RoundMembers | None = None
    memory: float | None = None
    far_links: bool | None = None
    second_moment: bool | None = None

    @property
    def comes_and_goes(self) -> bool:
        """Whether replicas join and leave, each with its own world."""
        return self.elastic is not None

    @property
    def parts(self) -> list[Part]:
        """The parts that options add."""
        return [*made_parts(self), *(part for part in (self.elastic, self.outer) if part is not None)]

    def adapter(self, framework: str) -> Any:
        """A module with additional functions for the adapter of that name; None: there is none."""
        found = (part.adapter(framework) for part in self.parts)
        return next((adapter for adapter in found if adapter is not None), None)

    @property
    def default_compressor(self) -> Compressor:
        """The compressor if the user chooses none."""
        return LoCo() if self.outer is None else self.outer.compressor()

    @property
    def chosen(self) -> dict[str, str]:
        """The options that trackers and loggers show: those that differ from their defaults."""
        values = {field.name: (getattr(self, field.name), field.default) for field in fields(SyncOptions)}
        return {f"lowbit/{name}": str(value) for name, (value, default) in values.items() if value != default}

    def __post_init__(self) -> None:
        for part in self.parts:
            part.check_options(self)
        if isinstance(self.shard_size, int) and self.shard_size < 1:
            raise ValueError(f'shard_size must be a positive number of ranks, "node" or None, got {self.shard_size}')
        if self.shard_size is not None and self.two_level is not None:
            raise ValueError("two_level must not be given with shard_size: replicas of shards are two levels already")

    def check_wrapper(self, *, scatter: bool) -> None:
        """Raise a ValueError if the options do not suit FSDP2 (`scatter`) or DDP."""
        if self.shard_size is not None and not scatter:
            raise ValueError("shard_size is an option of FSDP2 strategies: under DDP no rank has a shard")
        if self.weights is not None and not scatter:
            raise ValueError(
                f"weights={type(self.weights).__name__}(...) is for FSDP2, whose ranks gather weights: under DDP every"
                " rank has them all. Leave weights out, or use FSDP2 (loco_fsdp; fsdp_version: 2)"
            )
        for part in self.parts:
            part.check_wrapper(self, scatter=scatter)

    def check_optimizers(self, compressor: Compressor, optimizers: Iterable[Optimizer]) -> None:
        """Raise a ValueError if an optimizer's momentum conflicts with the compressor's, if it lacks what the options
        need, or if it exchanges weights itself with local steps.
        """
        for optimizer in optimizers:
            compressor.check_optimizer(optimizer)
            for part in self.parts:
                part.check_optimizer(optimizer)


def _members(value: Any) -> RoundMembers:
    if not isinstance(value, Mapping):
        raise Mismatch
    made: RoundMembers = call(leaves.load(leaves.NAMES["Elastic"], "elastic"), value)
    return made


register_conversion(RoundMembers, _members, "an instance of Elastic or a mapping")
