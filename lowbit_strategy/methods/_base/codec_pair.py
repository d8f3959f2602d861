"""Methods that share a bucket's exchange: a codec for each hop, and the store of the codecs' state."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from lowbit_strategy.codecs.base import Codec, StatefulCodec, StateTensors
from lowbit_strategy.collectives.comm import Comm
from lowbit_strategy.collectives.exchange import CodedGroup
from lowbit_strategy.collectives.layout import ParamView, TensorSpec, round_up
from lowbit_strategy.methods._base.method import Method, MethodStore, ReducerState


@dataclass(frozen=True, slots=True)
class CodecPair(Method):
    """A method that consists of two codecs: for the uplink, to the owner of a share, and for the downlink, from the
    owner (DDP only).

    Args:
        uplink: Codec of every rank's gradient.
        downlink: Codec of the mean; None: the same codec.

    Attributes:
        block_size: Shares and their state are cut into multiples of this, whole blocks of both codecs.
    """

    uplink: Codec
    downlink: Codec = field(default=None)  # type: ignore[assignment]
    block_size: int = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        if self.downlink is None:
            object.__setattr__(self, "downlink", self.uplink)
        up, down = self.uplink.block_size, self.downlink.block_size
        if max(up, down) % min(up, down):
            raise ValueError(
                "the larger blocks of a pair of codecs must be a multiple of the smaller ones, got"
                f" {up} on the uplink and {down} on the downlink"
            )
        object.__setattr__(self, "block_size", max(up, down))

    def hops(self, spec: TensorSpec) -> tuple[Codec, ...]:
        """The codecs of a parameter, hop by hop. FSDP2's owners keep the result; DDP's send it to everyone."""
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

    def keeps_zero_rows(self, spec: TensorSpec) -> bool:
        return all(hop.keeps_zeros for hop in self.hops(spec))

    def rests(self, spec: TensorSpec) -> bool:
        return self.conserves(spec)  # a block of zeros is idle

    def description(self, spec: TensorSpec) -> str:
        return "; downlink ".join(dict.fromkeys(hop.label for hop in self.hops(spec)))

    def wire_nbytes(self, spec: TensorSpec, world_size: int) -> int:
        row_numel = spec.row_numel(world_size, self.block_size)
        return sum(hop.wire_nbytes(row_numel) for hop in self.hops(spec)) * (world_size - 1)

    def rescale_(self, state: ReducerState, factor: float | Tensor) -> None:
        for tensors in state.values():
            for tensor in tensors.values():  # float residuals, or the scales of int8 ones
                if tensor.is_floating_point():
                    tensor.mul_(factor)

    def make_store(self, specs: Mapping[str, TensorSpec], comm: Comm, device: torch.device) -> CodecStore:
        return CodecStore(self, specs, comm, device)


class CodecStore(MethodStore):
    """State of all parameters of one pair of codecs, one after the other in arenas.

    Under FSDP2 nothing is sent back, so the downlink has no state.
    """

    hop = "uplink."

    def __init__(self, pair: CodecPair, specs: Mapping[str, TensorSpec], comm: Comm, device: torch.device) -> None:
        self._pair, self._is_sharded = pair, False
        self._shares: dict[str, tuple[int, int]] = {}  # begin and end of each parameter's share in the state
        numbers: dict[str, dict[str, Any]] = {}
        state: ReducerState = {}
        of_all = {
            "world_size": comm.world_size,
            "rank": comm.rank,
            "residual_gain": self.finite_gain(pair.uplink.residual_gain),
            "downlink_residual_gain": self.finite_gain(pair.downlink.residual_gain),
        }
        block_size, end = pair.block_size, 0
        for name, spec in specs.items():
            self._is_sharded = spec.sharded  # all parameters are sharded, or none is
            row_numel = spec.row_numel(comm.world_size, block_size)
            start, end = end, end + round_up(row_numel, block_size)
            self._shares[name] = (start, end)
            numbers[name] = {"numel": spec.numel, "row_numel": row_numel} | of_all
            state[name] = {}
        self._by_hop: dict[str, StateTensors] = {"uplink": {}, "downlink": {}}
        arenas: list[Tensor] = []
        hops = {"uplink": pair.uplink} if self._is_sharded else {"uplink": pair.uplink, "downlink": pair.downlink}
        for hop, codec in hops.items():
            for key, arena in (codec.arenas() if isinstance(codec, StatefulCodec) else {}).items():
                covers_all_shares = arena.extent == ("sender" if hop == "uplink" else "receiver")
                num_shares = comm.world_size if covers_all_shares else 1
                unit = codec.block_size if arena.per_block else 1
                values = torch.zeros(end * num_shares // unit, dtype=arena.dtype, device=device)
                self._by_hop[hop][key] = values
                arenas.append(values)
                for name, (start, stop) in self._shares.items():
                    state[name][f"{hop}.{key}"] = values[start * num_shares // unit : stop * num_shares // unit]
        super().__init__(pair, state, numbers, device, arenas)

    def group(self, params: Iterable[ParamView]) -> CodedGroup:
        """The group by which an `Exchange` carries these parameters."""
        return CodedGroup(
            self._pair.uplink,
            self._by_hop["uplink"],
            None if self._is_sharded else self._pair.downlink,
            self._by_hop["downlink"],
            self._pair.block_size,
            tuple(param._replace(state_offset=self._shares[param.name][0]) for param in params),
        )

    def park(self) -> None:
        super().park()
        self._by_hop = {}
