"""Messages of bytes whose length depends on what they say: lengths first, then bytes."""

from __future__ import annotations

from collections.abc import Generator, Sequence

import torch
from torch import Tensor

from lowbit_strategy.collectives.comm import Comm, Pending


def gather_uneven(
    wire_B: Tensor, comm: Comm, lengths: Sequence[int] | None = None
) -> Generator[Pending, None, list[Tensor]]:
    """Every rank's message, uint8, on every rank, in rank order. They travel as long as the longest.

    Args:
        wire_B: The own one.
        comm: Group.
        lengths: Of every rank's, where that is known; None: they travel first.
    """
    if comm.world_size == 1:
        return [wire_B]
    if lengths is None:
        length = torch.tensor([wire_B.numel()], device=wire_B.device)
        lengths_W = torch.empty(comm.world_size, 1, dtype=torch.int64, device=wire_B.device)
        yield comm.all_gather(lengths_W, length)
        lengths = lengths_W.view(-1).tolist()
    received_WB = wire_B.new_empty(comm.world_size, max(lengths))
    yield comm.all_gather(received_WB, torch.nn.functional.pad(wire_B, (0, max(lengths) - wire_B.numel())))
    return [row[:length] for row, length in zip(received_WB, lengths, strict=True)]


def scatter_uneven(
    wires: Sequence[Tensor], comm: Comm, lengths: Sequence[int] | None = None
) -> Generator[Pending, None, list[Tensor]]:
    """Message r, uint8, goes to rank r: what each rank has sent to this one, in rank order.

    Args:
        wires: For each rank.
        comm: Group.
        lengths: Of what comes from each rank, where that is known; None: they travel first.
    """
    if comm.world_size == 1:
        return [wires[0]]
    sent = [wire.numel() for wire in wires]
    if lengths is None:
        lengths_W = torch.empty(comm.world_size, 1, dtype=torch.int64, device=wires[0].device)
        yield comm.all_to_all(lengths_W, torch.tensor(sent, device=wires[0].device).view(-1, 1))
        lengths = lengths_W.view(-1).tolist()
    received = wires[0].new_empty(sum(lengths))
    yield comm.all_to_all_uneven(received, torch.cat(list(wires)), lengths, sent)
    return list(received.split(list(lengths)))
