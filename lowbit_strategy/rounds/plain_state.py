"""State that travels between replicas, as JSON and tensor memory: torchft's transports unpickle, which can run code."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from lowbit_strategy.collectives.transports import MemberComm
from lowbit_strategy.model.parameters import local_part

_TENSOR = "tensor"
_DTYPES = {str(dtype): dtype for dtype in vars(torch).values() if isinstance(dtype, torch.dtype)}


def packed(state: Any) -> tuple[Tensor, Tensor]:
    """Dicts with text keys, lists, numbers, texts, None and tensors.

    Returns:
        uint8 on the CPU: a description in JSON, and the bytes of its tensors in order.
    """
    parts: list[Tensor] = []
    text = json.dumps(_described(state, parts))
    data = torch.cat(parts) if parts else torch.empty(0, dtype=torch.uint8)
    return torch.frombuffer(bytearray(text.encode()), dtype=torch.uint8), data


def send(state: Any, comm: MemberComm, rank: int) -> None:
    """To one member.

    Raises:
        ExchangeFailedError: It is lost.
    """
    description, data = packed(state)
    comm.send(torch.tensor([description.numel(), data.numel()]), rank).wait()
    comm.send(description, rank).wait()
    if data.numel():
        comm.send(data, rank).wait()


def receive(comm: MemberComm, rank: int) -> Any:
    """From one member; tensors are on the CPU.

    Raises:
        ExchangeFailedError: It is lost.
    """
    sizes = torch.empty(2, dtype=torch.int64)
    comm.receive(sizes, rank).wait()
    description, data = (torch.empty(int(size), dtype=torch.uint8) for size in sizes)
    comm.receive(description, rank).wait()
    if data.numel():
        comm.receive(data, rank).wait()
    return unpacked(description, data)


def unpacked(description: Tensor, data: Tensor) -> Any:
    """From `packed`; tensors are on the CPU.

    Raises:
        ValueError: The two do not belong together.
    """
    at = 0

    def restored(value: Any) -> Any:
        nonlocal at
        if isinstance(value, list) and value[:1] == [_TENSOR]:
            _, dtype, shape = value
            nbytes = math.prod(shape) * _DTYPES[dtype].itemsize
            if not 0 <= nbytes <= data.numel() - at:
                raise ValueError("a state that has arrived is shorter than its description")
            part = data[at : at + nbytes].clone()  # a copy is aligned
            at += nbytes
            return part.view(_DTYPES[dtype]).view(shape) if nbytes else torch.empty(shape, dtype=_DTYPES[dtype])
        if isinstance(value, dict):
            return {key: restored(each) for key, each in value.items()}
        if isinstance(value, list):
            return [restored(each) for each in value[1]]
        return value

    made = restored(json.loads(bytes(description.tolist()).decode()))
    if at != data.numel():
        raise ValueError("a state that has arrived is longer than its description")
    return made


def _described(value: Any, parts: list[Tensor]) -> Any:
    if isinstance(value, Tensor):
        flat = local_part(value.detach()).cpu().contiguous().reshape(-1)
        parts.append(flat.view(torch.uint8))
        return [_TENSOR, str(value.dtype), list(local_part(value).shape)]
    if isinstance(value, Mapping):
        return {str(key): _described(each, parts) for key, each in value.items()}
    if isinstance(value, (list, tuple)):
        return ["list", [_described(each, parts) for each in value]]
    if value is None or isinstance(value, (bool, int, float, str)):
        return value
    raise TypeError(f"{type(value).__name__} cannot be sent to another replica: numbers, texts and tensors can")
