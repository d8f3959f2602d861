"""The coding of gradients inside a node."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from lowbit_strategy.codecs.base import Codec, DenseCodec
from lowbit_strategy.codecs.block import BlockCodec
from lowbit_strategy.collectives.comm import Comm
from lowbit_strategy.engine.method_state import MethodState
from lowbit_strategy.kernels.format import uniform
from lowbit_strategy.node_codes.means import CodedMeans

_BLOCK_SIZE = 128  # LoCo's


@dataclass(frozen=True, slots=True)
class BlockCoding:
    """Blocks of integers with a scale. Parameters that are sent between nodes as float32 are sent so inside, too."""

    bits: int

    @property
    def label(self) -> str:
        return f"{self.bits}-bit codes"

    def codec(self, *, exact: bool) -> Codec:
        return DenseCodec() if exact else BlockCodec(uniform(self.bits, _BLOCK_SIZE))

    def means(self, state: MethodState, comm: Comm, device: torch.device) -> CodedMeans:
        return CodedMeans(self, state, comm, device)
