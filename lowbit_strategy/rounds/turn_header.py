"""What travels uncompressed with each turn of local steps."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor


class TurnHeader:
    """``[no more steps?, asks?, ||s||^2, has finite weights? of each rank, s, changes of buffers]``, summed over ranks.

    Args:
        flat: float32; `comm.all_reduce` may be under way on it.
        world_size: Of the ranks that take the turn.
        sample_numel: Elements of the sample ``s``.
    """

    def __init__(self, flat: Tensor, world_size: int, sample_numel: int) -> None:
        self.flat = flat
        self.world_size = world_size
        self._sizes = (3, world_size, sample_numel, flat.numel() - 3 - world_size - sample_numel)

    @classmethod
    def of(
        cls,
        sample: Tensor,
        changes: Sequence[Tensor],
        *,
        done: bool,
        asks: bool,
        finite: Tensor,
        rank: int,
        world_size: int,
    ) -> TurnHeader:
        """This rank's.

        Args:
            sample: Of its pseudo-gradient; zeros if the rank is left out.
            changes: Of its buffers; likewise.
            done: It has no more steps.
            asks: All ranks are to do something together after this turn.
            finite: 1 or 0; 0 leaves the rank out.
            rank: This rank.
            world_size: Ranks that take the turn.
        """
        facts = torch.zeros(3 + world_size, device=sample.device)
        facts[0], facts[1] = float(done), float(asks)
        facts[2] = torch.dot(sample, sample)
        facts[3 + rank] = finite
        return cls(torch.cat([facts, sample, *changes]), world_size, sample.numel())

    @property
    def num_done(self) -> int:
        """Ranks that train no more. Waits for the device."""
        return int(self.flat[0])

    @property
    def asked(self) -> bool:
        """Whether any rank has asked. Waits for the device."""
        return bool(self.flat[1])

    @property
    def left_out(self) -> list[int]:
        """Ranks whose weights were not finite: they have taken part with zeros. Waits for the device."""
        finite_W = self.flat.split(self._sizes)[1]
        return [rank for rank, finite in enumerate(finite_W.tolist()) if not finite]

    def means(self, num_ranks: int) -> tuple[Tensor, Tensor, Tensor]:
        """Of ``||s||^2``, of ``s`` and of the changes of buffers, over the `num_ranks` ranks that took part."""
        facts, _, sample, changes = (self.flat / max(1, num_ranks)).split(self._sizes)
        return facts[2], sample, changes

    def state_dict(self) -> dict[str, Any]:
        return {"flat": self.flat, "world_size": self.world_size, "sample_numel": self._sizes[2]}

    @classmethod
    def from_state(cls, state: dict[str, Any], device: torch.device) -> TurnHeader:
        return cls(state["flat"].to(device), state["world_size"], state["sample_numel"])
