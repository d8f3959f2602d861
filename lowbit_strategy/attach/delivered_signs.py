"""Tells whether an optimizer steps on what the last backward pass delivered."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor, nn

from lowbit_strategy.engine.engine import GradientSync
from lowbit_strategy.model.parameters import local_part

_SAMPLE = 512  # elements per parameter


_MOST_DIFFERENT = 0.05  # fraction of the signs, since rounding may change some


class DeliveredSigns:
    """Remembers the signs of some delivered gradient elements: scaling and clipping keep signs, while a combination of
    several passes changes some.
    """

    def __init__(self, sync: GradientSync) -> None:
        self._sync = sync
        self._signs: dict[str, Tensor] = {}

    def note_after_backward(self, params: Mapping[str, nn.Parameter]) -> None:
        """Note the signs of these parameters when the next backward pass that reduces has ended."""
        self._signs = {}

        def note() -> None:
            self._signs = {n: _signs(param.grad) for n, param in params.items() if param.grad is not None}

        self._sync.call_after_backward(note)

    def differ_from(self, params: Mapping[str, nn.Parameter]) -> bool:
        """Whether the gradients of these parameters differ from what was delivered; the same on all ranks."""
        pairs = [(_signs(p.grad), self._signs.get(name)) for name, p in params.items() if p.grad is not None]
        counts = torch.zeros(2, device=self._sync.device)
        for now, before in pairs:
            before = torch.zeros_like(now) if before is None or before.shape != now.shape else before
            counts += torch.stack([(now != before).sum(), ((now != 0) | (before != 0)).sum()])
        different, all_of_them = self._sync.summed_in_parts(counts).tolist()
        return bool(different > _MOST_DIFFERENT * all_of_them)


def _signs(grad: Tensor) -> Tensor:
    """Signs as int8, of elements spread over this rank's part of a gradient."""
    flat = local_part(grad).detach().reshape(-1)
    return flat[:: max(1, flat.numel() // _SAMPLE)].sign().to(torch.int8)
