"""What travels uncompressed with each turn of local steps."""

from __future__ import annotations

import logging
import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from lowbit_strategy.engine.engine import GradientSync
from lowbit_strategy.plan.rounds import NUM_FACTS

_log = logging.getLogger("lowbit_strategy")


class TurnHeader:
    """Summed over ranks: ``[done?, asks?, steps, loss, ||s||^2, finite? of each rank, s, changes of buffers]``.

    Args:
        flat: float32; `comm.all_reduce` may be under way on it.
        world_size: Of the ranks that take the turn.
        sample_numel: Elements of the sample ``s``.
    """

    def __init__(self, flat: Tensor, world_size: int, sample_numel: int) -> None:
        self.flat = flat
        self.world_size = world_size
        self._sizes = (NUM_FACTS, world_size, sample_numel, flat.numel() - NUM_FACTS - world_size - sample_numel)

    @classmethod
    def of(
        cls,
        sync: GradientSync,
        sample: Tensor,
        changes: Sequence[Tensor],
        *,
        done: bool,
        asks: bool,
        loss: Tensor | None,
        finite: Tensor,
    ) -> TurnHeader:
        """This rank's.

        Args:
            sync: Its engine, which counts its steps.
            sample: Of its pseudo-gradient; zeros if the rank is left out.
            changes: Of its buffers; likewise.
            done: It has no more steps.
            asks: All ranks are to do something together after this turn.
            loss: Mean of its losses since the last turn; None: not known.
            finite: 1 or 0; 0 leaves the rank out.
        """
        peers = sync.ranks.peers
        facts = torch.zeros(NUM_FACTS + peers.world_size, device=sample.device)
        facts[0], facts[1], facts[2] = float(done), float(asks), float(sync.step_index)
        facts[3] = torch.nan if loss is None else loss
        facts[4] = torch.dot(sample, sample)
        facts[NUM_FACTS + peers.rank] = finite
        return cls(torch.cat([facts, sample, *changes]), peers.world_size, sample.numel())

    @property
    def num_done(self) -> int:
        """Ranks that train no more. Waits for the device."""
        return int(self.flat[0])

    @property
    def asked(self) -> bool:
        """Whether any rank has asked. Waits for the device."""
        return bool(self.flat[1])

    @property
    def steps(self) -> float:
        """Optimizer steps that a rank has completed, in the mean. Waits for the device."""
        return float(self.flat[2]) / self.world_size

    @property
    def loss(self) -> float | None:
        """The mean of all ranks'; None if one does not know its own, or it is not finite. Waits for the device."""
        loss = float(self.flat[3]) / self.world_size
        return loss if math.isfinite(loss) else None

    @property
    def left_out(self) -> list[int]:
        """Ranks whose weights were not finite: they have taken part with zeros. Waits for the device."""
        finite_W = self.flat.split(self._sizes)[1]
        return [rank for rank, finite in enumerate(finite_W.tolist()) if not finite]

    def means(self, share: float) -> tuple[Tensor, Tensor, Tensor]:
        """Of ``||s||^2``, of ``s`` and of the changes of buffers, over ranks that took part and count `share`."""
        facts, _, sample, changes = (self.flat / (share or 1.0)).split(self._sizes)
        return facts[4], sample, changes

    def state_dict(self) -> dict[str, Any]:
        return {"flat": self.flat, "world_size": self.world_size, "sample_numel": self._sizes[2]}

    @classmethod
    def from_state(cls, state: dict[str, Any], device: torch.device) -> TurnHeader:
        return cls(state["flat"].to(device), state["world_size"], state["sample_numel"])


def warn_of(left_out: Sequence[int], sync: GradientSync, *, all_of_them: bool) -> None:
    """Log, on one rank, that these ranks' weights were not finite in a turn."""
    if sync.ranks.rank:
        return
    which = "rank" if sync.ranks.share is None else "replica"
    names = ", ".join(f"{which} {rank}" for rank in left_out)
    then = "the anchors stay as they are" if all_of_them else "the others go on without them"
    _log.warning(
        "weights that are not finite at optimizer step %d, on %s: %s, and they start again from the anchors, with a"
        " fresh optimizer state",
        sync.step_index,
        names,
        then,
    )
