"""State of all parameters: arenas for lanes, tensors for reducers; export, import, rollback.

A lane's state is a few long tensors (arenas) that hold all its parameters one after the other, so that one kernel call
serves a bucket. Saved and carried-over state is per parameter: `LaneStore.tensors` gives views into the arenas.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from lowbit_strategy.collectives.exchange import Hop, Route, State
from lowbit_strategy.collectives.layout import Cut, Slot, round_up
from lowbit_strategy.methods._base.base import CodecPair
from lowbit_strategy.methods._base.stateful_codec import StatefulCodec, read_residual, write_residual_


@dataclass(frozen=True, slots=True)
class HopStore:
    """One lane's arenas on one hop, and how many elements each parameter takes in them."""

    stateful: StatefulCodec
    state: State
    offsets: Mapping[str, int]  # of each parameter, in arenas of the sender's extent
    lengths: Mapping[str, int]
    receiver_offsets: Mapping[str, int]  # the same, receiver's extent
    receiver_lengths: Mapping[str, int]

    def tensors(self, name: str) -> State:
        """Views of one parameter's state."""
        views: State = {}
        arenas = self.stateful.arenas()
        for key in self.state:
            arena = arenas[key]
            sender = arena.extent == "sender"
            start = (self.offsets if sender else self.receiver_offsets)[name]
            length = (self.lengths if sender else self.receiver_lengths)[name]
            unit = self.stateful.block_size if arena.per_block else 1
            views[key] = self.state[key][start // unit : (start + length) // unit]
        return views


class CodecStore:
    """State of all parameters that one pair of lanes carries; `scatter`: nothing travels back, so nothing is kept."""

    def __init__(
        self, pair: CodecPair, cuts: Mapping[str, Cut], rank: int, device: torch.device, *, scatter: bool
    ) -> None:
        if pair.uplink.block_size != pair.downlink.block_size:
            raise ValueError("both lanes of a pair must have the same block size")
        self.pair = pair
        self.cuts = dict(cuts)
        self.rank = rank
        block = pair.uplink.block_size
        full = {name: round_up(cut.row_numel, block) * cut.world_size for name, cut in cuts.items()}
        shard = {name: round_up(cut.row_numel, block) for name, cut in cuts.items()}
        full_at, shard_at = _starts(full), _starts(shard)
        sizes = {"full": sum(full.values()), "shard": sum(shard.values())}
        self.uplink = HopStore(
            pair.uplink, _arenas(pair.uplink, sizes["full"], sizes["shard"], device), full_at, full, shard_at, shard
        )
        downlink_state = {} if scatter else _arenas(pair.downlink, sizes["shard"], sizes["full"], device)
        self.downlink = HopStore(pair.downlink, downlink_state, shard_at, shard, full_at, full)

    def route(self, slots: Iterable[Slot]) -> Route:
        return Route(
            Hop(self.pair.uplink, self.uplink.state),
            Hop(self.pair.downlink, self.downlink.state),
            tuple(slots),
            self.uplink.offsets,
            self.downlink.offsets,
        )

    def tensors(self, name: str) -> State:
        """Views of one parameter's state on both hops, keys ``uplink.*`` and ``downlink.*``."""
        uplink = {f"uplink.{key}": value for key, value in self.uplink.tensors(name).items()}
        return uplink | {f"downlink.{key}": value for key, value in self.downlink.tensors(name).items()}

    def arenas(self) -> list[Tensor]:
        return [*self.uplink.state.values(), *self.downlink.state.values()]

    def residual_arenas(self) -> list[Tensor]:
        """Tensors that scale with the loss scale: float residuals, or the scales of int8 ones."""
        states = (self.uplink.state, self.downlink.state)
        return [value for state in states for value in state.values() if value.is_floating_point()]

    def export_residual(self, name: str) -> Tensor | None:
        """float32 ``[numel]``, flat in the parameter's own order; None where the lane keeps no residual."""
        values = read_residual(self.uplink.tensors(name), self.pair.uplink.block_size)
        if values is None:
            return None
        cut = self.cuts[name]
        return values.view(cut.world_size, -1)[:, : cut.row_numel].reshape(-1)[: cut.numel].clone()

    def import_residual_(self, name: str, values: Tensor) -> None:
        """Store float32 ``[numel]`` in whatever form the lane keeps; nothing to do for a lane without residual."""
        tensors = self.uplink.tensors(name)
        if "residual" not in tensors:
            return
        cut = self.cuts[name]
        padded = torch.nn.functional.pad(values, (0, cut.row_numel * cut.world_size - cut.numel))
        rows = padded.view(cut.world_size, cut.row_numel)
        row_state = self.uplink.lengths[name] // cut.world_size
        rows = torch.nn.functional.pad(rows, (0, row_state - cut.row_numel)).to(tensors["residual"].device)
        write_residual_(tensors, self.pair.uplink.block_size, rows.reshape(-1))

    def export_owner_residual(self, name: str) -> Tensor | None:
        """float32, the own chunk without padding."""
        values = read_residual(self.downlink.tensors(name), self.pair.downlink.block_size)
        return None if values is None else values[: self.cuts[name].row_length(self.rank)].clone()

    def import_owner_residual_(self, name: str, values: Tensor) -> None:
        tensors = self.downlink.tensors(name)
        if "residual" not in tensors:
            return
        padded = torch.nn.functional.pad(values, (0, self.downlink.lengths[name] - values.numel()))
        write_residual_(tensors, self.pair.downlink.block_size, padded.to(tensors["residual"].device))


def _starts(lengths: Mapping[str, int]) -> dict[str, int]:
    starts, at = {}, 0
    for name, length in lengths.items():
        starts[name] = at
        at += length
    return starts


def _arenas(stateful: StatefulCodec, sender: int, receiver: int, device: torch.device) -> State:
    state: State = {}
    for key, arena in stateful.arenas().items():
        numel = sender if arena.extent == "sender" else receiver
        state[key] = torch.zeros(
            numel // (stateful.block_size if arena.per_block else 1), dtype=arena.dtype, device=device
        )
    return state
