"""Methods that share the exchange of a bucket: one stateful codec per hop, and the arenas that hold their state."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from lowbit_strategy.codecs.base import Codec
from lowbit_strategy.collectives.exchange import Hop, Route
from lowbit_strategy.collectives.layout import Cut, Slot, round_up
from lowbit_strategy.collectives.stateful_codec import StatefulCodec, StateTensors
from lowbit_strategy.methods._base.method import Method, MethodStore, Placement, finite_gain
from lowbit_strategy.methods._base.stateful_codec import PlainCodec
from lowbit_strategy.methods._base.tensor_spec import TensorSpec


@dataclass(frozen=True, slots=True)
class CodecPair(Method):
    """The codec on the uplink, to the owner of a chunk, and the one on the downlink, from the owner (DDP only)."""

    uplink: StatefulCodec
    downlink: StatefulCodec

    def __post_init__(self) -> None:
        finer = min(self.uplink.block_size, self.downlink.block_size)
        if self.block_size % finer:
            raise ValueError(
                "the larger blocks of a pair of codecs must be a multiple of the smaller ones, got"
                f" {self.uplink.block_size} on the uplink and {self.downlink.block_size} on the downlink"
            )

    @property
    def label(self) -> str:
        return self.uplink.label

    @property
    def block_size(self) -> int:
        """What chunks and their state are cut to: whole blocks of both codecs."""
        return max(self.uplink.block_size, self.downlink.block_size)

    @property
    def idle_numel(self) -> int:
        return self.uplink.block_size

    @property
    def residual_gain(self) -> float | None:
        return self.uplink.residual_gain

    def conserves(self, *, scatter: bool) -> bool:
        hops = (self.uplink,) if scatter else (self.uplink, self.downlink)
        return all(hop.residual_gain is not None for hop in hops)

    def description(self, *, scatter: bool) -> str:
        differs = not scatter and self.downlink.label != self.uplink.label
        return f"{self.label}; downlink {self.downlink.label}" if differs else self.label

    def wire_nbytes(self, spec: TensorSpec, world_size: int, *, scatter: bool) -> int:
        row_numel = spec.cut(world_size, self.block_size, scatter=scatter).row_numel
        hops = (self.uplink,) if scatter else (self.uplink, self.downlink)
        return sum(hop.wire_nbytes(row_numel) for hop in hops) * (world_size - 1)

    def make_store(self, specs: Mapping[str, TensorSpec], placement: Placement) -> CodecStore:
        return CodecStore(self, specs, placement)

    def transform(self, codec: Callable[[StatefulCodec], StatefulCodec], reducer: Callable[[Any], Any]) -> CodecPair:
        return CodecPair(codec(self.uplink), codec(self.downlink))


def plain_pair(codec: Codec) -> CodecPair:
    """One codec on both hops, without memory."""
    return CodecPair(PlainCodec(codec), PlainCodec(codec))


@dataclass(frozen=True, slots=True)
class _HopArenas:
    """One codec's arenas on one hop, and how many elements each parameter takes in them."""

    stateful: StatefulCodec
    state: StateTensors
    offsets: Mapping[str, int]  # of each parameter, in arenas of the sender's extent
    lengths: Mapping[str, int]
    receiver_offsets: Mapping[str, int]  # the same, receiver's extent
    receiver_lengths: Mapping[str, int]

    def tensors(self, name: str) -> StateTensors:
        """Views of one parameter's state."""
        views: StateTensors = {}
        arenas = self.stateful.arenas()
        for key in self.state:
            arena = arenas[key]
            sender = arena.extent == "sender"
            start = (self.offsets if sender else self.receiver_offsets)[name]
            length = (self.lengths if sender else self.receiver_lengths)[name]
            unit = arena.unit(self.stateful.block_size)
            views[key] = self.state[key][start // unit : (start + length) // unit]
        return views


class CodecStore(MethodStore):
    """State of all parameters that one pair of codecs carries.

    Under FSDP2 nothing travels back, so the downlink keeps nothing.
    """

    hop = "uplink."

    def __init__(self, pair: CodecPair, specs: Mapping[str, TensorSpec], placement: Placement) -> None:
        self.pair = pair
        self.placement = placement
        self.cuts: dict[str, Cut] = {name: placement.cut(spec, pair.block_size) for name, spec in specs.items()}
        block = pair.block_size
        shard = {name: round_up(cut.row_numel, block) for name, cut in self.cuts.items()}
        full = {name: length * placement.world_size for name, length in shard.items()}
        full_at, shard_at = _starts(full), _starts(shard)
        num_full, num_shard, device = sum(full.values()), sum(shard.values()), placement.device
        uplink = _arenas(pair.uplink, num_full, num_shard, device)
        self.uplink = _HopArenas(pair.uplink, uplink, full_at, full, shard_at, shard)
        downlink = {} if placement.scatter else _arenas(pair.downlink, num_shard, num_full, device)
        self.downlink = _HopArenas(pair.downlink, downlink, shard_at, shard, full_at, full)

    def route(self, slots: Iterable[Slot]) -> Route:
        """What an `Exchange` needs to carry the parameters of `slots`."""
        return Route(
            Hop(self.pair.uplink, self.uplink.state),
            Hop(self.pair.downlink, self.downlink.state),
            tuple(slots),
            self.uplink.offsets,
            self.downlink.offsets,
            self.pair.block_size,
        )

    def tensors(self, name: str) -> StateTensors:
        """Views of one parameter's state on both hops, keys ``uplink.*`` and ``downlink.*``."""
        uplink = {f"uplink.{key}": value for key, value in self.uplink.tensors(name).items()}
        return uplink | {f"downlink.{key}": value for key, value in self.downlink.tensors(name).items()}

    def state_tensors(self) -> list[Tensor]:
        return [*self.uplink.state.values(), *self.downlink.state.values()]

    def numbers(self, name: str) -> dict[str, Any]:
        cut = self.cuts[name]
        return {
            "numel": cut.numel,
            "row_numel": cut.row_numel,
            "world_size": cut.world_size,
            "rank": self.placement.rank,
            "residual_gain": finite_gain(self.pair.uplink.residual_gain),
            "downlink_residual_gain": finite_gain(self.pair.downlink.residual_gain),
        }

    def rescale_(self, factor: float) -> None:
        for tensor in self.state_tensors():  # float residuals, or the scales of int8 ones
            if tensor.is_floating_point():
                tensor.mul_(factor)


def _starts(lengths: Mapping[str, int]) -> dict[str, int]:
    starts, at = {}, 0
    for name, length in lengths.items():
        starts[name] = at
        at += length
    return starts


def _arenas(stateful: StatefulCodec, sender: int, receiver: int, device: torch.device) -> StateTensors:
    state: StateTensors = {}
    for key, arena in stateful.arenas().items():
        numel = sender if arena.extent == "sender" else receiver
        unit = arena.unit(stateful.block_size)
        state[key] = torch.zeros(numel // unit, dtype=arena.dtype, device=device)
    return state
