"""How compression behaves around the compressor: what every framework offers beside it."""

from __future__ import annotations

from dataclasses import dataclass

from lowbit_strategy.checkpoint.capture import OnWorldSizeChange
from lowbit_strategy.checkpoint.resume import OnMissingResidual


@dataclass(frozen=True, kw_only=True, slots=True)
class SyncOptions:
    """How compression behaves around the compressor.

    Args:
        seed: Of stochastic rounding and selection; the same on all ranks.
        on_world_size_change: Resuming on another number of ranks: ``reset`` starts residuals from zero, ``fold`` gives
            every rank the mean of the saved ones (reads all ranks' files).
        on_missing_residual: A checkpoint's residual file is missing or damaged: ``error``, or ``reset`` to start
            from zero.
        rollback: Put residuals back when a step overflows. None: only where there is a loss scaler (fp16); costs a
            second copy of the residuals.
        check_digest: DDP: compare a digest of the parameters over the ranks after 2, 10 and 100 steps and after every
            1,000, and stop with an error if they differ. False where ranks may round differently, as with processors
            of different types.
    """

    seed: int = 0
    on_world_size_change: OnWorldSizeChange = "reset"
    on_missing_residual: OnMissingResidual = "error"
    rollback: bool | None = None
    check_digest: bool = True

    def __post_init__(self) -> None:
        if self.on_world_size_change not in ("reset", "fold"):
            raise ValueError(f"on_world_size_change must be 'reset' or 'fold', got {self.on_world_size_change!r}")
        if self.on_missing_residual not in ("error", "reset"):
            raise ValueError(f"on_missing_residual must be 'error' or 'reset', got {self.on_missing_residual!r}")
