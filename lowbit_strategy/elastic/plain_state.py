"""State that one replica sends to another: dicts, numbers, texts and tensors, never pickled code."""

from __future__ import annotations

import io
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_map

from lowbit_strategy.elastic.member_comm import MemberComm
from lowbit_strategy.model.parameters import local_part


def send(state: Any, comm: MemberComm, rank: int) -> None:
    """Send dicts, lists, numbers, texts, None and tensors to one member, in torch's format. torchft pickles them, and
    loading a pickle may run code.

    Raises:
        ExchangeFailedError: It is lost.
        TypeError: The state contains something else.
    """
    buffer = io.BytesIO()
    torch.save(tree_map(_plain, state), buffer)
    data = torch.frombuffer(buffer.getbuffer(), dtype=torch.uint8)
    comm.send(torch.tensor([data.numel()]), rank).wait()
    comm.send(data, rank).wait()


def receive(comm: MemberComm, rank: int) -> Any:
    """Receive state from one member; tensors are on the CPU.

    Raises:
        ExchangeFailedError: It is lost.
        ValueError: The member has sent something else.
    """
    size = torch.empty(1, dtype=torch.int64)
    comm.receive(size, rank).wait()
    data = torch.empty(int(size), dtype=torch.uint8)
    comm.receive(data, rank).wait()
    try:
        return torch.load(io.BytesIO(data.numpy().tobytes()), map_location="cpu", weights_only=True)
    except Exception as error:  # other bytes can fail in many ways
        raise ValueError(f"a state that has arrived is damaged ({error})") from error


def _plain(value: Any) -> Any:
    if isinstance(value, Tensor):
        local = local_part(value.detach()).cpu()
        return local.clone() if local.nbytes < local.untyped_storage().nbytes() else local  # else all is saved
    if value is None or isinstance(value, (bool, int, float, str)):
        return value
    raise TypeError(f"{type(value).__name__} cannot be sent to another replica: numbers, texts and tensors can")
