"""Methods that share the exchange of a bucket: one stateful codec per hop, and the arenas that hold their state."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, replace
from itertools import accumulate, pairwise
from typing import Any, NamedTuple

import torch
from torch import Tensor

from lowbit_strategy.codecs.base import Codec
from lowbit_strategy.collectives.comm import Comm
from lowbit_strategy.collectives.exchange import CodedGroup
from lowbit_strategy.collectives.layout import ParamView, round_up
from lowbit_strategy.collectives.stateful_codec import PlainCodec, StatefulCodec, StateTensors
from lowbit_strategy.methods._base.method import Method, MethodStore, finite_gain
from lowbit_strategy.methods._base.tensor_spec import TensorSpec


@dataclass(frozen=True, slots=True)
class CodecPair(Method):
    """The codec on the uplink, to the owner of a chunk, and the one on the downlink, from the owner (DDP only).

    Attributes:
        block_size: What chunks and their state are cut to: whole blocks of both codecs.
    """

    uplink: StatefulCodec
    downlink: StatefulCodec
    block_size: int = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        up, down = self.uplink.block_size, self.downlink.block_size
        if max(up, down) % min(up, down):
            raise ValueError(
                "the larger blocks of a pair of codecs must be a multiple of the smaller ones, got"
                f" {up} on the uplink and {down} on the downlink"
            )
        object.__setattr__(self, "block_size", max(up, down))

    def hops(self, spec: TensorSpec) -> tuple[StatefulCodec, ...]:
        """What codes a parameter, hop by hop: FSDP2's owners keep the result, DDP's send it to everyone."""
        return (self.uplink,) if spec.sharded else (self.uplink, self.downlink)

    @property
    def label(self) -> str:
        return self.uplink.label

    @property
    def idle_numel(self) -> int:
        return self.uplink.block_size

    @property
    def residual_gain(self) -> float | None:
        return self.uplink.residual_gain

    def conserves(self, spec: TensorSpec) -> bool:
        return all(hop.residual_gain is not None for hop in self.hops(spec))

    def keeps_zeros(self, spec: TensorSpec) -> bool:
        return all(hop.keeps_zeros for hop in self.hops(spec))

    def description(self, spec: TensorSpec) -> str:
        return "; downlink ".join(dict.fromkeys(hop.label for hop in self.hops(spec)))

    def wire_nbytes(self, spec: TensorSpec, world_size: int) -> int:
        row_numel = spec.cut(world_size, self.block_size).row_numel
        return sum(hop.wire_nbytes(row_numel) for hop in self.hops(spec)) * (world_size - 1)

    def make_store(self, specs: Mapping[str, TensorSpec], comm: Comm, device: torch.device) -> CodecStore:
        return CodecStore(self, specs, comm, device)

    def transform(self, codec: Callable[[StatefulCodec], StatefulCodec], reducer: Callable[[Any], Any]) -> CodecPair:
        return CodecPair(codec(self.uplink), codec(self.downlink))


def plain_pair(codec: Codec) -> CodecPair:
    """One codec on both hops, without memory."""
    return CodecPair(PlainCodec(codec), PlainCodec(codec))


class _Arena(NamedTuple):
    """One state tensor of all parameters, which lie in it in order."""

    values: Tensor
    num_chunks: int  # of each parameter: one per rank where whole parameters are coded, else the own one
    unit: int  # elements per entry


class CodecStore(MethodStore):
    """State of all parameters that one pair of codecs carries.

    Under FSDP2 nothing travels back, so the downlink keeps nothing.
    """

    hop = "uplink."

    def __init__(self, pair: CodecPair, specs: Mapping[str, TensorSpec], comm: Comm, device: torch.device) -> None:
        self.pair = pair
        self._rank, self._device = comm.rank, device
        self.cuts = {name: spec.cut(comm.world_size, pair.block_size) for name, spec in specs.items()}
        lengths = [round_up(cut.row_numel, pair.block_size) for cut in self.cuts.values()]
        self._chunks = dict(zip(self.cuts, pairwise(accumulate(lengths, initial=0)), strict=True))
        self._arenas: dict[str, _Arena] = {}
        self._parked = False
        self._is_sharded = any(spec.sharded for spec in specs.values())
        for hop, codec in (("uplink", pair.uplink), ("downlink", pair.downlink))[: 1 if self._is_sharded else 2]:
            for key, arena in codec.arenas().items():
                num_chunks = comm.world_size if (arena.extent == "sender") == (hop == "uplink") else 1
                unit = arena.unit(codec.block_size)
                values = torch.zeros(sum(lengths) * num_chunks // unit, dtype=arena.dtype, device=device)
                self._arenas[f"{hop}.{key}"] = _Arena(values, num_chunks, unit)

    def group(self, params: Iterable[ParamView]) -> CodedGroup:
        """What an `Exchange` needs to carry these parameters."""
        return CodedGroup(
            self.pair.uplink,
            self._state("uplink."),
            None if self._is_sharded else self.pair.downlink,
            self._state("downlink."),
            self.pair.block_size,
            tuple(replace(param, state_offset=self._chunks[param.name][0]) for param in params),
        )

    def _state(self, hop: str) -> StateTensors:
        return {key.removeprefix(hop): arena.values for key, arena in self._arenas.items() if key.startswith(hop)}

    def tensors(self, name: str) -> StateTensors:
        """Views of one parameter's state on both hops, keys ``uplink.*`` and ``downlink.*``."""
        start, end = self._chunks[name]
        tensors = {key: x[start * num // unit : end * num // unit] for key, (x, num, unit) in self._arenas.items()}
        return {key: x.to(self._device) for key, x in tensors.items()} if self._parked else tensors

    def park(self) -> None:
        self._parked = True
        self._arenas = {key: arena._replace(values=arena.values.cpu()) for key, arena in self._arenas.items()}

    def state_tensors(self) -> list[Tensor]:
        return [arena.values for arena in self._arenas.values()]

    def numbers(self, name: str) -> dict[str, Any]:
        cut = self.cuts[name]
        return {
            "numel": cut.numel,
            "row_numel": cut.row_numel,
            "world_size": cut.world_size,
            "rank": self._rank,
            "residual_gain": finite_gain(self.pair.uplink.residual_gain),
            "downlink_residual_gain": finite_gain(self.pair.downlink.residual_gain),
        }

    def rescale_(self, factor: float) -> None:
        for tensor in self.state_tensors():  # float residuals, or the scales of int8 ones
            if tensor.is_floating_point():
                tensor.mul_(factor)
