"""Compressed collectives for any tensors, over any process group.

Use them for recommender embeddings, expert tokens, or activations between pipeline stages. Each function returns a new
tensor; all ranks of the group call it with the same `codec`. There is no error feedback: errors are lost, or stay
within the bound of `Bounded`. All functions are differentiable any number of times: gradients take the opposite
collective, also coded, so all ranks must differentiate in the same way.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Generator, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch import Tensor

from lowbit_strategy.codecs.base import Codec
from lowbit_strategy.codecs.block import BlockCodec
from lowbit_strategy.collectives.comm import Comm, GroupComm, Pending, scatter_uneven
from lowbit_strategy.collectives.layout import round_up, row_length
from lowbit_strategy.kernels.format import uniform
from lowbit_strategy.kernels.integers import Planes

__all__ = ["Bounded", "Code", "all_gather", "all_reduce", "all_to_all", "reduce_scatter"]

_BLOCK = 128
_PLANE_NBYTES = _BLOCK // 8  # one bit per element
_RAW = 255  # the width of a block that travels as float32
_RAW_NBYTES = 4 * _BLOCK
_LARGEST = 2**23  # above this, neighboring float32 numbers are further apart than the bound allows


@dataclass(frozen=True, slots=True)
class Bounded:
    """Keeps every decoded element within `bound` of the original, before rounding to its dtype.

    Rounding adds at most half a unit in the last place, which relative to the magnitude is ``2**-24`` in float32,
    ``2**-11`` in float16, and ``2**-8`` in bfloat16. Only float32 keeps a bound below that.

    1. ``q = round(x / (2 * bound))``
    2. every block of 128 elements has the width that its largest ``|q|`` needs, from 0 bits on, and a byte that says so
    3. a block whose values are not finite, or too large for the bound, travels as float32

    The number of bytes depends on the values.

    Args:
        bound: Largest error, in units of the tensor. For a sum or a mean over ranks it applies to the result.

    Raises:
        ValueError: `bound` is not positive.

    References:
        Di, Cappello, "Fast Error-Bounded Lossy HPC Data Compression with SZ", 2016, the bound; Feng et al.,
        "Accelerating Communication in Deep Learning Recommendation Model Training with Dual-Level Adaptive Lossy
        Compression", 2024, arXiv 2407.04272, for embeddings.
    """

    bound: float

    def __post_init__(self) -> None:
        if not (self.bound > 0 and math.isfinite(self.bound)):
            raise ValueError(f"bound must be a positive number, the largest error allowed, got {self.bound!r}")

    def encode(self, x_N: Tensor) -> Tensor:
        """Encode as uint8 of variable length: a width per block, then the blocks' bits, grouped by width."""
        x_KB = torch.nn.functional.pad(x_N.detach().float().reshape(-1), (0, -x_N.numel() % _BLOCK)).view(-1, _BLOCK)
        q_KB = (x_KB.double() / (2 * self.bound)).round()
        raw_K = ~(q_KB.abs() <= _LARGEST).all(1)
        q_KB = torch.where(raw_K[:, None], 0.0, q_KB).long()
        u_KB = torch.where(q_KB < 0, -2 * q_KB - 1, 2 * q_KB)  # small numbers for small magnitudes
        width_K = torch.frexp(u_KB.amax(1).double())[1].to(torch.uint8)
        width_K[raw_K] = _RAW
        parts = [width_K]
        for width in width_K.unique().tolist():
            chosen = width_K == width
            if width == _RAW:
                parts.append(x_KB[chosen].contiguous().view(torch.uint8).reshape(-1))
            elif width:
                parts.append(Planes((1,) * width).pack(u_KB[chosen]).reshape(-1))
        return torch.cat(parts)

    def decode(self, wire_B: Tensor, numel: int) -> Tensor:
        """float32 ``[numel]``."""
        num_blocks = -(-numel // _BLOCK)
        width_K, at = wire_B[:num_blocks], num_blocks
        out_KB = torch.zeros(num_blocks, _BLOCK, dtype=torch.float32, device=wire_B.device)
        for width in width_K.unique().tolist():
            chosen = width_K == width
            nbytes = _RAW_NBYTES if width == _RAW else width * _PLANE_NBYTES
            end = at + nbytes * int(chosen.sum())
            payload_KC = wire_B[at:end].view(-1, nbytes) if nbytes else wire_B[:0]
            at = end
            if width == _RAW:
                out_KB[chosen] = payload_KC.clone().view(torch.float32)
            elif width:
                u_KB = Planes((1,) * width).unpack(payload_KC.long())
                q_KB = torch.where(u_KB % 2 == 1, -(u_KB + 1) // 2, u_KB // 2)
                out_KB[chosen] = (q_KB.double() * (2 * self.bound)).float()
        return out_KB.view(-1)[:numel]


Code = Codec | Bounded | int
Operation = Literal["mean", "sum"]
Transform = Callable[[Tensor], Tensor]
_BLOCK_SIZE = 128


def all_reduce(
    x: Tensor, codec: Code = 4, *, op: Operation = "mean", group: dist.ProcessGroup | None = None, seed: int = 0
) -> Tensor:
    """The mean or sum over ranks, bit-identical on all of them. Its gradient is reduced in the same way.

    1. the tensor is cut into one share per rank; each is coded and sent to its owner
    2. the owner decodes and adds in rank order, and codes the result
    3. all ranks gather and decode the results

    Args:
        x: Floats of any shape, the same on all ranks.
        codec: Bits of a blockwise code, any codec, or `Bounded`, whose bound holds for the result.
        op: ``mean`` or ``sum``.
        group: The default group if None.
        seed: Seed of codecs that round at random: a different one per call.

    Returns:
        A tensor of the shape and dtype of `x`.

    Raises:
        ValueError: `x` has no floats; `codec` or `op` is none of the above.
    """

    def forward(x: Tensor) -> Tensor:
        comm, code = GroupComm(group), _Coder.of(codec)
        row_numel = round_up(-(-x.numel() // comm.world_size), code.block_size)
        sizes = [row_length(x.numel(), row_numel, rank) for rank in range(comm.world_size)]
        # half of the bound for each hop; errors of a sum add up
        up, down = code.within(0.5 / (comm.world_size if op == "sum" else 1)), code.within(0.5)
        own = _sum(x.reshape(-1).split(sizes), up, comm, op, seed)
        parts = _gather(own, down, comm, sizes, seed + 1)
        return torch.cat(parts).view(x.shape).to(x.dtype)

    return _differentiable(x, forward, lambda grad: all_reduce(grad, codec, op=op, group=group, seed=seed))


def reduce_scatter(
    x: Tensor, codec: Code = 4, *, op: Operation = "mean", group: dist.ProcessGroup | None = None, seed: int = 0
) -> Tensor:
    """The mean or sum over ranks; rank r gets the r-th of W equal parts of dim 0. Gradients are gathered.

    Args:
        x: Floats, ``[W * n, ...]``.
        codec: See `all_reduce`.
        op: ``mean`` or ``sum``.
        group: The default group if None.
        seed: See `all_reduce`.

    Returns:
        ``[n, ...]`` in the dtype of `x`.

    Raises:
        ValueError: `x` has no floats; dim 0 is not divisible by the number of ranks; `codec` or `op` is none of the
            above.
    """

    def forward(x: Tensor) -> Tensor:
        comm, code = GroupComm(group), _Coder.of(codec)
        parts = x.split(_splits(x, None, comm.world_size, "dim 0"))
        within = code.within(1.0 / (comm.world_size if op == "sum" else 1))
        total = _sum([part.reshape(-1) for part in parts], within, comm, op, seed)
        return total.view(parts[0].shape).to(x.dtype)

    def backward(grad: Tensor) -> Tensor:
        gathered = all_gather(grad, codec, group=group, seed=seed)
        return gathered / dist.get_world_size(group) if op == "mean" else gathered

    return _differentiable(x, forward, backward)


def all_gather(
    x: Tensor,
    codec: Code = 4,
    *,
    backward: Code | None = None,
    group: dist.ProcessGroup | None = None,
    seed: int = 0,
) -> Tensor:
    """All ranks' tensors, concatenated along dim 0. Gradients are summed by `reduce_scatter`.

    Args:
        x: Floats, ``[n, ...]``, of the same shape on all ranks.
        codec: See `all_reduce`. A rank's own part is also decoded, so all ranks have the same result.
        backward: Codec of the gradients; None: `codec`.
        group: The default group if None.
        seed: See `all_reduce`.

    Returns:
        ``[W * n, ...]`` in the dtype of `x`.

    Raises:
        ValueError: `x` has no floats; `codec` is none of the above.
    """
    back = codec if backward is None else backward

    def forward(x: Tensor) -> Tensor:
        comm = GroupComm(group)
        parts = _gather(x.reshape(-1), _Coder.of(codec), comm, [x.numel()] * comm.world_size, seed)
        return torch.cat([part.view(x.shape) for part in parts]).to(x.dtype)

    return _differentiable(x, forward, lambda grad: reduce_scatter(grad, back, op="sum", group=group, seed=seed))


def all_to_all(
    x: Tensor,
    codec: Code = 4,
    *,
    output_splits: Sequence[int] | None = None,
    input_splits: Sequence[int] | None = None,
    backward: Code | None = None,
    group: dist.ProcessGroup | None = None,
    seed: int = 0,
) -> Tensor:
    """Parts of dim 0 to the ranks in order, as ``torch.distributed.all_to_all_single``. Gradients go back the same way.

    Args:
        x: Floats, ``[n, ...]``.
        codec: See `all_reduce`. The part that stays on this rank is coded too.
        output_splits: Rows from every rank; None: `input_splits`.
        input_splits: Rows to every rank; None: equal parts.
        backward: Codec of the gradients; None: `codec`.
        group: The default group if None.
        seed: See `all_reduce`.

    Returns:
        ``[sum(output_splits), ...]`` in the dtype of `x`.

    Raises:
        ValueError: `x` has no floats; splits do not fit; `codec` is none of the above.
    """
    world_size = dist.get_world_size(group)
    ins = _splits(x, input_splits, world_size, "input_splits")
    outs = list(output_splits) if output_splits is not None else ins
    if len(outs) != world_size:
        raise ValueError(f"output_splits must have a number for each of {world_size} ranks, got {len(outs)}")
    back = codec if backward is None else backward

    def forward(x: Tensor) -> Tensor:
        row = x[:1].numel() if x.shape[0] else x.new_empty((1, *x.shape[1:])).numel()
        messages = [part.reshape(-1) for part in x.split(ins)]
        received = _send(messages, _Coder.of(codec), GroupComm(group), [count * row for count in outs], seed)
        return torch.cat(received).view(sum(outs), *x.shape[1:]).to(x.dtype)

    def gradient(grad: Tensor) -> Tensor:
        return all_to_all(grad, back, output_splits=ins, input_splits=outs, group=group, seed=seed)

    return _differentiable(x, forward, gradient)


class _Collective(torch.autograd.Function):
    """Runs `forward` on a tensor, and `backward` on the gradient of its result."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, forward: Transform, backward: Transform) -> Tensor:
        ctx.transform = backward
        return forward(x)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        return ctx.transform(grads[0]), None, None


def _differentiable(x: Tensor, forward: Transform, backward: Transform) -> Tensor:
    if not x.is_floating_point():
        raise ValueError(f"x must be a tensor of floats, got {x.dtype}")
    result: Tensor = _Collective.apply(x, forward, backward)
    return result


# -- messages ----------------------------------------------------------------------------------------------------------


class _Coder:
    """One interface to both kinds of codes."""

    def __init__(self, code: Codec | Bounded) -> None:
        self._code = code

    @classmethod
    def of(cls, code: Code) -> _Coder:
        if isinstance(code, int) and not isinstance(code, bool):
            return cls(BlockCodec(uniform(code, _BLOCK_SIZE)))
        if not isinstance(code, (Codec, Bounded)):
            raise ValueError(f"codec must be a number of bits, a codec or Bounded(1e-3), got {code!r}")
        return cls(code)

    @property
    def block_size(self) -> int:
        return _BLOCK_SIZE if isinstance(self._code, Bounded) else self._code.block_size

    def within(self, share: float) -> _Coder:
        """The same options with this share of the bound, if there is one."""
        code = self._code
        return _Coder(replace(code, bound=code.bound * share)) if isinstance(code, Bounded) else self

    def nbytes(self, numel: int) -> int | None:
        """Bytes of a message; None: depends on the values."""
        return None if isinstance(self._code, Bounded) else self._code.wire_nbytes(numel)

    def encode(self, x_N: Tensor, seed: int) -> Tensor:
        if isinstance(self._code, Bounded):
            return self._code.encode(x_N)
        return self._code.encode(x_N.float(), seed=seed)

    def decode(self, wire_B: Tensor, numel: int) -> Tensor:
        if isinstance(self._code, Bounded):
            return self._code.decode(wire_B, numel)
        return self._code.decode_sum(wire_B.contiguous()[None], numel)


def _send(messages: Sequence[Tensor], code: _Coder, comm: Comm, numels: Sequence[int], seed: int) -> list[Tensor]:
    """Send one tensor to each rank, and decode one of `numels` elements from each, float32."""
    wires = [code.encode(message, seed + rank) for rank, message in enumerate(messages)]
    received = _transport(wires, comm, [code.nbytes(numel) for numel in numels])
    return [code.decode(wire, numel) for wire, numel in zip(received, numels, strict=True)]


def _gather(x_N: Tensor, code: _Coder, comm: Comm, numels: Sequence[int], seed: int) -> list[Tensor]:
    """Send one tensor to all ranks, and decode theirs."""
    wire = code.encode(x_N.detach(), seed)
    received = _transport([wire] * comm.world_size, comm, [code.nbytes(numel) for numel in numels])
    return [code.decode(each, numel) for each, numel in zip(received, numels, strict=True)]


def _transport(wires: Sequence[Tensor], comm: Comm, sizes: Sequence[int | None]) -> list[Tensor]:
    """Bytes to and from every rank. Sizes that the receiver cannot know are sent first."""
    known = [size for size in sizes if size is not None]
    return _finished(scatter_uneven(wires, comm, known if len(known) == len(sizes) else None))


def _finished(stages: Generator[Pending, None, list[Tensor]]) -> list[Tensor]:
    """Run all stages, wait for each one, and return the result."""
    while True:
        try:
            next(stages).wait()
        except StopIteration as done:
            received: list[Tensor] = done.value
            return received


def _sum(parts: Sequence[Tensor], code: _Coder, comm: Comm, op: Operation, seed: int) -> Tensor:
    """float32: all ranks' tensors for this rank, added in rank order."""
    if op not in ("mean", "sum"):
        raise ValueError(f"op must be 'mean' or 'sum', got {op!r}")
    received = _send(parts, code, comm, [parts[comm.rank].numel()] * comm.world_size, seed)
    total = received[0].clone()
    for part in received[1:]:
        total += part
    return total / comm.world_size if op == "mean" else total


def _splits(x: Tensor, splits: Sequence[int] | None, world_size: int, what: str) -> list[int]:
    rows = x.shape[0] if x.dim() else 0
    if splits is None:
        if not x.dim() or rows % world_size:
            raise ValueError(f"dim 0 must be a multiple of the {world_size} ranks, got a tensor of {tuple(x.shape)}")
        return [rows // world_size] * world_size
    if len(splits) != world_size or sum(splits) != rows:
        raise ValueError(f"{what} must be {world_size} numbers that add up to {rows} rows, got {list(splits)!r}")
    return list(splits)
