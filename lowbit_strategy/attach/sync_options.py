"""How compression behaves around the compressor: what every framework offers beside it."""

from __future__ import annotations

from typing import Literal

from lowbit_strategy.checkpoint.all_ranks import OnMissingResidual
from lowbit_strategy.checkpoint.capture import OnWorldSizeChange
from lowbit_strategy.methods.outer.interval import Seconds
from lowbit_strategy.methods.outer.registry import OuterRule  # and what else may be given for one
from lowbit_strategy.methods.weights import WeightCoding, check_weights
from lowbit_strategy.options.configuration import configuration
from lowbit_strategy.ranks.elastic import Elastic


@configuration
class SyncOptions:
    """How compression behaves around the compressor.

    Args:
        seed: Of stochastic rounding and selection; the same on all ranks.
        on_world_size_change: Resuming on another number of ranks: ``reset`` starts residuals from zero, ``fold`` gives
            every rank the mean of the saved ones (reads all ranks' files).
        on_missing_residual: A checkpoint's residual file is missing or damaged: ``error``, or ``reset`` to start
            from zero.
        rollback: Restore residuals when a step overflows. None: only with a loss scaler (fp16); costs a second copy of
            the residuals.
        check_digest: DDP: compare a digest of the parameters over the ranks after 2, 10 and 100 steps and after every
            1,000, and stop with an error if they differ. False where ranks may round differently, as with processors
            of different types. With local steps the anchors are compared, and under HSDP the replicas' parameters.
        two_level: Gradients are added up exactly inside a node and compressed between the ranks of equal index on all
            nodes, so that each travels once per node and not once per rank. None: enabled when there are several nodes
            with the same number (> 1) of ranks. False: all ranks exchange with all others.
        shard_size: FSDP2: how many ranks of a node share one model; the gradients of their shards are compressed
            between these replicas (HSDP). ``"node"``: all ranks of a node. None: all ranks of the run.
        weights: FSDP2: how weights travel: `Exact`, `WeightCode` or `WeightDelta`, or a name such as ``"delta4"``.
            None: as `default_weights` chooses for the compressor.
        outer: Local steps with an outer optimizer between synchronizations: a rule such as ``DiLoCo(every=30)`` or its
            name. None: gradients are synchronized in every step.
        elastic: Replicas join and leave, each with its own world: `Elastic`, with the address of a lighthouse. Needs
            `outer`, and the extra ``elastic``. None: the ranks are the same from the beginning to the end.
        memory: GB (10^9 bytes) per rank that compression may keep: residuals, weights between gathers, messages of a
            module. To fit, in this order: weights are gathered again in backward instead of being kept as codes,
            unless `weights` is given; LoCo's residuals are dropped, at 4 bits or more and with at least four ranks or
            nodes, where the loss was measured. None: half of what the smallest GPU has free after parameters,
            gradients and Adam's state, from an eighth to a quarter of its memory; unlimited on CPUs.
        far_links: On CPU: all messages travel at once, point to point, into buffers allocated in the step before.
            Results are the same; a rank needs as much more memory as it sends per step. None: enabled if a measured
            round trip takes 5 ms or more.
        second_moment: For few bits and optimizers like Adam: in one step of 32 ranks exchange the squares of their own
            gradients (an eighth of a bit per element and step) and compute `exp_avg_sq` from them, which compression
            noise would otherwise enlarge. Below the best learning rate, and where it decays, one bit then needs far
            fewer steps. Costs up to 4 bytes per parameter; not for two levels under DDP. With `outer` each rank scales
            its own to the size it has for the ranks' mean gradient, and nothing is sent or kept: see `MeanMoment`.
            None: enabled where LoCo's codes have two bits or fewer, until an optimizer steps that is not like Adam;
            off with `outer`, and for two levels under DDP.
    """

    seed: int = 0
    on_world_size_change: OnWorldSizeChange = "reset"
    on_missing_residual: OnMissingResidual = "error"
    rollback: bool | None = None
    check_digest: bool = True
    two_level: bool | None = None
    shard_size: int | Literal["node"] | None = None
    weights: WeightCoding | None = None
    outer: OuterRule | None = None
    elastic: Elastic | None = None
    memory: float | None = None
    far_links: bool | None = None
    second_moment: bool | None = None

    def __post_init__(self) -> None:
        if self.second_moment and self.two_level:
            raise ValueError("second_moment=True does not go with two_level=True: leave one of them out")
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
    check_weights(options.weights, scatter=scatter)
    rule = options.outer
    if rule is not None and options.two_level:
        raise ValueError("two_level=True does not go with outer: under DDP each rank takes local steps by itself")
    if rule is not None and scatter and options.shard_size is None:
        raise ValueError(
            "outer needs replicas that train by themselves, and FSDP2 shards one model over all ranks: give"
            ' shard_size="node" as well, for local steps between nodes'
        )
    if options.elastic is None:
        if rule is not None and isinstance(rule.every, Seconds):
            raise ValueError(
                f'every="{rule.every.seconds:g}s" needs elastic: ranks that stay together take as many steps'
            )
        return
    if rule is None:
        raise ValueError("elastic needs local steps: give an outer rule as well, such as outer=DiLoCo(every=50)")
    for field in ("delay", "synchronous", "synchronous_end", "eager", "average_state"):
        if getattr(rule, field):
            raise ValueError(
                f"elastic does not go with {field} of an outer rule: members change at the beginning of an exchange,"
                " and are known for that one alone. Leave it out"
            )
