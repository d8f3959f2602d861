"""Finds codes that error feedback and EF21 can use, whose error is smaller than their input."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import TypeVar

import torch
from torch import Tensor

from lowbit_strategy.codecs.base import Codec, StatefulCodec, StepContext
from lowbit_strategy.codecs.block import BlockCodec
from lowbit_strategy.collectives.comm import LocalComm, wait_for_all
from lowbit_strategy.collectives.layout import ParamView, TensorSpec
from lowbit_strategy.methods._base.reducer import Reducer
from lowbit_strategy.methods.loco import LoCoCodec
from lowbit_strategy.methods.zoo.feedback import FeedbackCodec
from lowbit_strategy.methods.zoo.rotated import RotatedCodec

CodecOrReducer = TypeVar("CodecOrReducer", Codec, Reducer)
_SEED = 0x5EED


def contracting(part: CodecOrReducer) -> CodecOrReducer:
    """The rounding-to-nearest form of a codec or a reducer, which feedback can use.

    Raises:
        ValueError: Its error can be larger than its input: a residual would grow with every step.
    """
    found = nearest(part)
    if not _contracts(found):
        advice = "use smaller blocks, more bits or another compressor"
        if isinstance(part, Reducer):
            advice = "use it without feedback (for random-k: RandomK(scale=False), which has its own feedback)"
        raise ValueError(
            f"{part.label!r} can err by more than its input, so what has not been sent would grow with every step:"
            f" {advice}"
        )
    return found


def nearest(part: CodecOrReducer) -> CodecOrReducer:
    """The code with the least error instead of no bias, as feedback needs, since the error of an unbiased code with few
    values exceeds its input. A codec or reducer with such a form returns it from its method ``nearest``.
    """
    if isinstance(part, RotatedCodec):
        return replace(part, codec=nearest(part.codec))
    if isinstance(part, BlockCodec):
        if part.fmt.bits == 1 and part.fmt.scale_rule == "rms":  # signs fit best with a block's mean magnitude
            return BlockCodec(replace(part.fmt, scale_rule="mean_abs", codebook=(-1.0, 1.0)))
        return replace(part, rounding="nearest")
    found: CodecOrReducer = getattr(part, "nearest", lambda: part)()
    return found


@functools.cache
def _contracts(part: Codec | Reducer) -> bool:
    """A reducer is tried on one rank."""
    if isinstance(part, Codec):
        return contracts(part)
    size = 1024
    spec, comm = TensorSpec("probe", (32, size // 32)), LocalComm()

    def sent(x: Tensor) -> Tensor:
        result = torch.zeros_like(x)
        view = ParamView(spec, 1, size, x=x.clone(), out=torch.zeros_like(x), tracer=lambda _, sent: result.copy_(sent))
        state = part.init([spec], x.device)
        wait_for_all(part.reduce([view], state, comm, StepContext(0, 0, 0)))
        return result

    return shrinks(sent, size)


def contracts(codec: Codec) -> bool:
    """Whether ``|x - C(x)| < |x|``, as error feedback and EF21 need; tested with some hard blocks."""
    if isinstance(codec, RotatedCodec):  # a rotation keeps lengths
        return contracts(codec.codec)
    return shrinks(codec.decoded, max(codec.block_size, 64))


def without_residual(codec: Codec) -> Codec:
    """The codec without its residual, since wrappers have their own rule for errors.

    Raises:
        ValueError: It has no codec that could be used alone.
    """
    if not isinstance(codec, StatefulCodec):
        return codec
    if isinstance(codec, LoCoCodec | FeedbackCodec):
        return codec.codec
    raise ValueError(f"{codec.label!r} has no codec of its own: wrap a quantizer such as QSGD, LoCo or OneBitSGD")


def shrinks(decoded: Callable[[Tensor], Tensor], block_size: int) -> bool:
    """Whether ``|x - C(x)| < |x|`` held for each of some blocks that are hard for certain codes.

    Otherwise a residual of such a block would grow with every step. True is no proof; False is one.

    Args:
        decoded: C, for float32 of `block_size` elements.
        block_size: Elements that are coded together.
    """
    for x in hard_blocks(block_size):
        error = (x.double() - decoded(x).double()).square().sum()
        if not error < x.double().square().sum():
            return False
    return True


def hard_blocks(block_size: int) -> Iterator[Tensor]:
    """float32 [block_size]: one element alone, alone in noise, all equal, alternating, Gaussian, heavy tails."""
    noise = torch.randn(block_size, generator=torch.Generator().manual_seed(_SEED), dtype=torch.float32)
    index = torch.arange(block_size, dtype=torch.float32)
    alone = (index == block_size // 2).float()
    yield alone
    yield -alone
    yield alone + 0.01 * noise
    yield torch.ones_like(index)
    yield 1.0 - 2.0 * (index % 2)
    yield index + 1.0
    yield noise
    yield noise.pow(5)
    yield torch.exp2(-(index % 100))
