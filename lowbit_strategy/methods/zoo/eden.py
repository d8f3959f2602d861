"""EDEN: rotated blocks at one to four bits, scaled so that their inner product with the original is exact."""

from __future__ import annotations

import functools
from dataclasses import dataclass, replace
from typing import ClassVar

import torch
from torch import Tensor

from lowbit_strategy.codecs.base import Codec, StateTensors
from lowbit_strategy.codecs.block import BlockCodec
from lowbit_strategy.codecs.blockwise import BlockwiseCodec, Noise
from lowbit_strategy.codecs.packed import pack_segments
from lowbit_strategy.collectives.layout import TensorSpec
from lowbit_strategy.kernels.codebooks import gaussian_codebook
from lowbit_strategy.kernels.format import uniform
from lowbit_strategy.kernels.integers import Planes
from lowbit_strategy.kernels.reference.blocks import tree_sum
from lowbit_strategy.kernels.segments import Segments
from lowbit_strategy.methods._base.code_sizes import check_codes
from lowbit_strategy.methods._base.codec_pair import CodecPair
from lowbit_strategy.methods._base.compressor import TwoPrecisionCompressor
from lowbit_strategy.methods.zoo.feedback import FeedbackCodec, ResidualDtype
from lowbit_strategy.methods.zoo.kernels.rotation import rotate
from lowbit_strategy.options.configuration import configuration

_SCALE_NBYTES = 2  # bfloat16


@dataclass(frozen=True, slots=True)
class EdenCodec(BlockwiseCodec):
    """`EDEN`'s quantizer: a decoded block has the same inner product with the original as the original itself.

    Args:
        bits: Bits per code, 1 to 4.
        block_size: Elements that are rotated together and share a scale, a power of two.
        least_error: ``S = <y, c> / |c|^2`` instead: the block shrinks, and the error never exceeds it.
    """

    bits: int = 1
    block_size: int = 128
    least_error: bool = False

    @property
    def label(self) -> str:
        return f"{self.bits}-bit eden, block {self.block_size}"

    def nearest(self) -> EdenCodec:
        return replace(self, least_error=True)

    @property
    def block_nbytes(self) -> int:
        return self.block_size * self.bits // 8 + _SCALE_NBYTES

    def encode_blocks(self, h_KB: Tensor, valid_KB: Tensor, finite_K: Tensor, noise: Noise) -> Tensor:
        largest_K = h_KB.abs().amax(-1)  # squares of what remains neither overflow nor vanish
        unit_KB = h_KB / torch.where(largest_K > 0, largest_K, 1.0)[:, None]
        y_KB = rotate(unit_KB)
        square_K = tree_sum(y_KB * y_KB)
        rms_K = (square_K / self.block_size).sqrt()
        codebook = _codebook(self.bits, h_KB.device)
        code_KB = torch.bucketize(
            y_KB / torch.where(rms_K > 0, rms_K, 1.0)[:, None], codebook.diff() / 2 + codebook[:-1]
        )
        c_KB = codebook[code_KB]
        product_K = tree_sum(y_KB * c_KB)
        scale_K = product_K / tree_sum(c_KB * c_KB) if self.least_error else square_K / product_K
        scale_K = torch.where(largest_K > 0, scale_K * largest_K, 0.0)
        scale_K = torch.where(finite_K, scale_K, torch.nan).to(torch.bfloat16)
        return torch.cat([Planes((1,) * self.bits).pack(code_KB), scale_K[:, None].view(torch.uint8)], 1)

    def decode_blocks(self, payload_KC: Tensor) -> Tensor:
        return rotate(self._rotated(payload_KC), inverse=True)

    def decode_sum_(self, wire_WB: Tensor, out: Tensor, segments: Segments, state: StateTensors, alpha: float) -> None:
        packed = pack_segments(segments, self.block_size)
        total = torch.zeros(packed.num_blocks, self.block_size, dtype=torch.float32, device=out.device)
        for wire in wire_WB:
            total += self._rotated(packed.collect_wire(wire, self.block_nbytes))
        packed.spread_(rotate(total, inverse=True).mul_(alpha).view(-1), out)

    def _rotated(self, payload_KC: Tensor) -> Tensor:
        scale_K1 = self.trailer(payload_KC, _SCALE_NBYTES, torch.bfloat16).float()
        code_KB = Planes((1,) * self.bits).unpack(payload_KC[:, :-_SCALE_NBYTES])
        return _codebook(self.bits, payload_KC.device)[code_KB.long()] * scale_K1


@functools.cache
def _codebook(bits: int, device: torch.device) -> Tensor:
    return torch.tensor(gaussian_codebook(2**bits), dtype=torch.float32, device=device)


_BITS = (1, 2, 3, 4)


@configuration
class EDEN(TwoPrecisionCompressor):
    """Rotates blocks, codes them with values fitted to a Gaussian, and scales them to an exact inner product.

    For each block x, on every rank, and again at the owner for the mean (DDP):

    1. ``y = H D x / sqrt(n)`` with the Hadamard matrix H and fixed random signs D
    2. ``c``: y in units of its root mean square, rounded to the nearest of 2**bits values (Lloyd-Max)
    3. c and ``S = |x|^2 / <y, c>`` are sent; the sum of all ranks' ``S c`` is rotated back once

    At one bit this is DRIVE: signs, and ``S = |x|^2 / |y|_1``. In the publications D is random in every message, which
    makes the estimate unbiased without a residual. Here it is fixed, so that the ranks' sum is rotated back once, and
    LoCo's moving average of the error corrects the bias.

    Args:
        bits: Bits per code, 1 to 4.
        block_size: Elements that are rotated together and share S (bfloat16), a power of two from 32. Larger: closer to
            a Gaussian, fewer scales, a longer rotation.
        return_bits: Bits per code on the downlink; None: `bits`.
        beta: Weight of the old error in the residual, as in `LoCo`, on both hops. 0: classic error feedback, with the
            scale of least error. None: no residual; a constant gradient then keeps a bias.
        residual: With `beta`: ``float32`` costs 4 bytes per parameter on every rank, ``int8`` one.

    References:
        Vargaftik et al., "DRIVE: One-bit Distributed Mean Estimation", 2021, arXiv 2105.08339, section 4;
        Vargaftik et al., "EDEN: Communication-Efficient and Robust Distributed Mean Estimation for Federated Learning",
        2022, arXiv 2108.08842, section 3.
    """

    name: ClassVar[str] = "eden"

    bits: int = 1
    block_size: int = 128
    return_bits: int | None = None
    beta: float | None = 0.8
    residual: ResidualDtype = "float32"

    def __post_init__(self) -> None:
        TwoPrecisionCompressor.__post_init__(self)
        for field in ("bits", "return_bits"):
            if (bits := getattr(self, field)) not in _BITS and (field == "bits" or bits is not None):
                raise ValueError(f"{field} must be an integer from 1 to 4, got {bits!r}")
        check_codes(self.block_size, high_precision_bits=self.high_precision_bits)
        if self.beta is not None and not 0.0 <= self.beta < 1.0:
            raise ValueError(f"beta must be in [0, 1) or None for no residual, got {self.beta!r}")

    def _stateful(self, bits: int) -> Codec:
        codec = EdenCodec(bits, self.block_size)
        return self._with_residual(codec.nearest() if self.beta == 0.0 else codec)

    def _with_residual(self, codec: Codec) -> Codec:
        if self.beta is None:
            return codec
        return FeedbackCodec(codec=codec, beta=self.beta, residual=self.residual)

    def method(self, spec: TensorSpec) -> CodecPair:
        return CodecPair(self._stateful(self.bits), self._stateful(self.return_bits or self.bits))

    def high_precision_method(self, spec: TensorSpec) -> CodecPair:
        stateful = self._with_residual(BlockCodec(uniform(self.high_precision_bits, self.block_size), "stochastic"))
        return CodecPair(stateful)
