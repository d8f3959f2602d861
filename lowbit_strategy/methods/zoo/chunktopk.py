"""Top-k by chunks: the same number of elements from every 4,096, in messages of fixed size."""

from __future__ import annotations

import functools
import math
import zlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from lowbit_strategy.codecs.base import Codec, StepContext
from lowbit_strategy.codecs.sparse_values import Values, value_codec
from lowbit_strategy.collectives.comm import Comm, Pending
from lowbit_strategy.collectives.layout import ParamView, TensorSpec
from lowbit_strategy.methods._base.codec_pair import CodecPair
from lowbit_strategy.methods._base.compressor import Compressor
from lowbit_strategy.methods._base.method import Method
from lowbit_strategy.methods._base.reducer import Reducer, ReducerState
from lowbit_strategy.methods._base.residuals import ResidualDtype
from lowbit_strategy.methods.zoo.chunk_codec import ChunkCodec
from lowbit_strategy.methods.zoo.contraction import nearest
from lowbit_strategy.methods.zoo.errorfeedback import FeedbackReducer, check_decay
from lowbit_strategy.methods.zoo.feedback import FeedbackCodec
from lowbit_strategy.methods.zoo.rotated import RotatedCodec
from lowbit_strategy.options.configuration import configuration


@dataclass(frozen=True, kw_only=True, slots=True)
class GatheredReducer(Reducer):
    """The mean of what all ranks' messages decode to.

    1. every rank encodes its gradient
    2. one all-gather of bytes: each rank sends its message W - 1 times
    3. every rank decodes all messages and adds them in rank order

    Args:
        codec: Codec of a whole parameter.
    """

    codec: Codec

    fixed_size: ClassVar[bool] = True

    @property
    def label(self) -> str:
        return f"{self.codec.label}, gathered"

    def keeps_zero_rows(self, spec: TensorSpec) -> bool:
        return self.codec.keeps_zeros

    def nearest(self) -> GatheredReducer:
        return GatheredReducer(codec=nearest(self.codec))

    def reduce(
        self, views: Sequence[ParamView], state: ReducerState, comm: Comm, step: StepContext
    ) -> Iterator[Pending]:
        wires = []
        for view in views:
            g_N = view.flat().float()
            wires.append(self.codec.encode(g_N, seed=step.seed ^ zlib.crc32(view.spec.name.encode())))
        message = torch.cat(wires)
        received_WB = message.new_empty(comm.world_size, message.numel())
        yield comm.all_gather(received_WB, message)
        for view, wire_WB in zip(views, received_WB.split([wire.numel() for wire in wires], dim=1), strict=True):
            mean_N = self._decode(wire_WB, view.spec.numel) / comm.world_size
            if view.tracer is not None:
                view.trace(view.flat().float(), self._decode(wire_WB[comm.rank, None], view.spec.numel))
            view.write_mean_(mean_N, comm.rank)

    def _decode(self, wire_WB: Tensor, numel: int) -> Tensor:
        return self.codec.decode_sum(wire_WB.contiguous(), numel)

    def num_messages(self, specs: Sequence[TensorSpec], world_size: int) -> int:
        return 1

    def wire_nbytes(self, spec: TensorSpec, world_size: int) -> int:
        return (world_size - 1) * self.codec.wire_nbytes(spec.numel)


@dataclass(frozen=True, slots=True)
class CosineCodec(RotatedCodec):
    """Codes a discrete cosine transform, which turns smooth rows into few large coefficients, as selection needs.

    A rotation with random signs does the opposite: it makes all elements about equally large, as a grid needs.
    """

    @property
    def label(self) -> str:
        return f"{self.codec.label}, cosines of {self.rotation_size}"

    def transformed(self, x_KN: Tensor, *, inverse: bool = False) -> Tensor:
        return cosines(x_KN, inverse=inverse)


def cosines(x_KN: Tensor, *, inverse: bool) -> Tensor:
    """Orthonormal discrete cosine transform (type II) of the rows, or its inverse. Added up in order: the same bits for
    any K.
    """
    matrix = _cosine_matrix(x_KN.shape[1], x_KN.device)
    rows = matrix if inverse else matrix.T
    y = torch.zeros_like(x_KN)
    for n in range(x_KN.shape[1]):
        y.addcmul_(x_KN[:, n, None], rows[n])
    return y


@functools.cache
def _cosine_matrix(size: int, device: torch.device) -> Tensor:
    """float32 [frequency, place], the same numbers on every device."""
    place, frequency = torch.arange(size, dtype=torch.float64), torch.arange(size, dtype=torch.float64)[:, None]
    matrix = (math.pi / size * (place + 0.5) * frequency).cos() * (2 / size) ** 0.5
    matrix[0] *= 0.5**0.5
    return matrix.float().to(device)


@configuration
class ChunkTopK(Compressor):
    """Separate top-k sparsification of every 4,096 elements, with error feedback.

    It is coarser than `TopK`, since gradients differ between rows, but all sizes are fixed: no counts travel, positions
    take 12 bits, and the host never waits for the GPU. For each parameter, on every rank:

    1. ``h = g + e``
    2. of every 4,096 elements the ``round(4096 * density)`` largest ``|h|`` go to the owner of their share, with their
       positions; of equal ones the first
    3. ``e' = decay * h``, 0 where sent (or the codec's error)
    4. the owner adds up its share; under DDP it sends back as many of every 4,096 means, the largest, and keeps the
       rest in its own residual, so traffic does not grow with W

    With `decay` below 1 step 3 is DeMo's rule, in which h is a momentum and its largest elements are sent and removed.

    Args:
        density: Share of the elements that is sent, in (0, 1].
        values: How values travel: ``float32``, ``bfloat16``, ``int8`` to ``int2`` (blocks with a scale) or any codec.
        residual: ``float32``: 4 bytes per parameter on every rank; ``int8``: 1, with a scale per 4,096 elements,
            rounded stochastically.
        cosines: Take the largest coefficients of a discrete cosine transform of this many consecutive elements, a power
            of two; None: no transform. With `decay` and `gather` this is DeMo, without its two-dimensional transform
            and its optimizer's sign.
        gather: Send every message to all ranks instead of an owner: nothing is selected or coded twice, but traffic
            grows with W. Fewer bytes for few elements on few ranks.
        decay: The factor of the residual per step, in (0, 1].

    References:
        Stich et al., "Sparsified SGD with Memory", 2018, arXiv 1809.07599; `decay`: Peng, Quesnelle, Kingma, "DeMo:
        Decoupled Momentum Optimization", 2024, arXiv 2411.19870.
    """

    name: ClassVar[str] = "chunktopk"
    is_sparse: ClassVar[bool] = True

    density: float = 0.01
    values: Values | Codec = "float32"
    residual: ResidualDtype = "float32"
    cosines: int | None = None
    gather: bool = False
    decay: float = 1.0

    def __post_init__(self) -> None:
        Compressor.__post_init__(self)
        check_decay(self.decay)
        if self.gather and self.residual != "float32":
            raise ValueError(f"gather=True keeps its residual in float32, got residual={self.residual!r}")
        self._codec()  # checks the density and the size of the transform

    def method(self, spec: TensorSpec) -> Method:
        if self.gather:
            return FeedbackReducer(inner=GatheredReducer(codec=self._codec()), decay=self.decay)
        return CodecPair(FeedbackCodec(codec=self._codec(), residual=self.residual, decay=self.decay))

    def _codec(self) -> Codec:
        codec = ChunkCodec(self.density, value_codec(self.values))
        return codec if self.cosines is None else CosineCodec(codec, self.cosines)
