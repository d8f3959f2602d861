"""Adds error feedback to a codec."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from lowbit_strategy.codecs.base import Arena, Codec, StatefulCodec, StateTensors, StepContext
from lowbit_strategy.codecs.packed import Packed, pack_segments
from lowbit_strategy.kernels.reference import blocks
from lowbit_strategy.kernels.reference.rng import RESIDUAL_STREAM
from lowbit_strategy.kernels.segments import Segments
from lowbit_strategy.methods._base.residuals import ResidualDtype, residual_arenas


@dataclass(frozen=True, kw_only=True, slots=True)
class FeedbackCodec(StatefulCodec):
    """A codec with a residual, applied to all segments of a bucket at once:

    1. ``h = g + e``
    2. send ``Q = C(h)``
    3. ``e' = decay * (beta * e + (1 - beta) * (h - Q))``

    A segment whose gradient is all zero is idle: it sends zeros and keeps its residual. If h or Q is not finite, the
    residual is unchanged.

    Args:
        codec: C.
        beta: 0 is classic feedback; above, LoCo's moving average.
        decay: Below 1 old errors fade; nothing is conserved then.
        residual: ``int8`` has one scale per block and is rounded at random.
    """

    codec: Codec
    beta: float = 0.0
    decay: float = 1.0
    residual: ResidualDtype = "float32"

    @property
    def label(self) -> str:
        return f"{self.codec.label}, error feedback"

    @property
    def residual_gain(self) -> float | None:
        return 1.0 - self.beta if self.decay == 1.0 else None

    def arenas(self) -> dict[str, Arena]:
        return residual_arenas(self.residual)

    def encode_(
        self, x: Tensor, wire: Tensor, segments: Segments, state: StateTensors, step: StepContext, flag: Tensor
    ) -> None:
        packed = pack_segments(segments, self.block_size)
        g = packed.collect(x)
        e = self._read(packed, state)
        idle = packed.idle(g)
        h = torch.where(idle, 0.0, g + e)
        self.codec.encode_(h, wire, packed.segments, {}, step, flag)
        sent = torch.zeros_like(h)
        self.codec.decode_sum_(wire.view(1, -1), sent, packed.segments, {}, 1.0)
        updated = (e * self.beta + (h - sent) * (1.0 - self.beta)) * self.decay
        keep = idle | ~updated.isfinite()
        self._write_(packed, state, torch.where(keep, e, updated), keep, step)

    def _read(self, packed: Packed, state: StateTensors) -> Tensor:
        e = packed.collect_state(state["residual"])
        if self.residual == "float32":
            return e
        scale_K = packed.collect_state(state["residual_scale"], self.block_size).float()
        return (e.view(-1, self.block_size).float() * scale_K[:, None]).view(-1)

    def _write_(self, packed: Packed, state: StateTensors, e: Tensor, keep: Tensor, step: StepContext) -> None:
        if self.residual == "float32":
            packed.store_state_(state["residual"], e)
            return
        noise_KB = packed.noise(step.seed, RESIDUAL_STREAM, e.device)
        codes_KB, scale_K = blocks.quantize_residual(e.view(-1, self.block_size), noise_KB)
        keep_K = keep.view(-1, self.block_size).all(-1)  # unchanged, not rounded again
        old_KB = packed.collect_state(state["residual"]).view_as(codes_KB)
        old_scale_K = packed.collect_state(state["residual_scale"], self.block_size)
        codes = torch.where(keep_K[:, None], old_KB, codes_KB).view(-1)
        packed.store_state_(state["residual"], codes)
        new_scale_K = torch.where(keep_K, old_scale_K, blocks.to_bfloat16(scale_K))
        packed.store_state_(state["residual_scale"], new_scale_K, self.block_size)
