"""What an FSDP2 module costs the host in a step: torch's operations, as they are on a GPU, counted on two CPU ranks.

Kernels count as one operation each, as Triton launches them; all else is the code that runs on CUDA. Views count.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, nullcontext
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn import functional as F
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes

from lowbit_strategy.custom_loop import SyncOptions, attach_fsdp, prepare
from lowbit_strategy.kernels import backends
from lowbit_strategy.methods.zoo.kernels import chunk_top_k, rotation
from lowbit_strategy.second_moment import squares
from lowbit_strategy.second_moment.exchange_steps import EVERY, steps_until_due

STOCK = "stock"  # FSDP2 as it is
ALONE = "alone"  # the model on one rank
CORRECTED = ("eden", "efsignsgd", "loco1", "loco2", "loco_ternary", "onebitsgd")  # of Adam's second moment,
_SETTLED = 160  # steps after which a parameter's squares are exchanged in one of `EVERY`
_WIDTH = 64


class _Counted(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()
        self.num = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.num += func.namespace not in ("prim", "profiler")
        return func(*args, **(kwargs or {}))


@contextmanager
def _counting() -> Iterator[_Counted]:
    counted, implementation = _Counted(), backends.implementation

    def launched(function: Callable[..., Any]) -> Callable[..., Any]:
        def run(*args: Any, **kwargs: Any) -> Any:
            counted.num += 1
            with _disable_current_modes():
                return function(*args, **kwargs)

        return run

    def kernels(stem: str, backend: backends.Backend) -> SimpleNamespace:
        found = vars(implementation(stem, backend))
        return SimpleNamespace(**{name: launched(found[name]) for name in ("encode_", "decode_sum_")})

    of_the_zoo = [(rotation, "rotate_rows"), (chunk_top_k, "reference"), (chunk_top_k, "in_c")]
    with ExitStack() as patches:
        patches.enter_context(patch.object(backends, "implementation", kernels))
        for module, name in of_the_zoo:
            patches.enter_context(patch.object(module, name, launched(getattr(module, name))))
        patches.enter_context(counted)
        yield counted


class _Block(nn.Module):
    """Of a transformer, gated: 11 parameters, 7 of them matrices."""

    def __init__(self) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(_WIDTH), nn.LayerNorm(_WIDTH)
        self.q, self.k, self.v, self.o = (nn.Linear(_WIDTH, _WIDTH, bias=False) for _ in range(4))
        self.gate, self.up = (nn.Linear(_WIDTH, 2 * _WIDTH, bias=False) for _ in range(2))
        self.down = nn.Linear(2 * _WIDTH, _WIDTH, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        y = self.norm1(x)
        x = x + self.o(F.scaled_dot_product_attention(self.q(y), self.k(y), self.v(y)))
        y = self.norm2(x)
        return x + self.down(F.silu(self.gate(y)) * self.up(y))


def _operations(name: str, num_blocks: int, first: int, num: int) -> float:
    """Of a step: forward, backward and AdamW, the mean of `num` steps from the `first` one on."""
    torch.manual_seed(0)
    blocks = [_Block() for _ in range(num_blocks)]
    module = nn.Sequential(nn.Linear(16, _WIDTH), *blocks, nn.Linear(_WIDTH, 16))
    session = None
    prepared = None if name in (STOCK, ALONE) else prepare(module, name, SyncOptions(), scatter=True)
    if name != ALONE:
        mesh = init_device_mesh("cpu", (dist.get_world_size(),))
        for part in (*blocks, module):
            fully_shard(part, mesh=mesh)
    if prepared is not None:
        session = attach_fsdp(module, prepared, device=torch.device("cpu"))
    optimizer = torch.optim.AdamW(module.parameters(), 1e-3, foreach=True)
    generator, total = torch.Generator().manual_seed(dist.get_rank()), 0
    for step in range(first + num):
        x = torch.randn(4, 8, 16, generator=generator)
        with _counting() if step >= first else nullcontext() as counted:
            loss = module(x).square().mean()
            if session is not None:
                session.begin_step()
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            if session is not None:
                session.end_step()
        total += 0 if counted is None else counted.num
    if session is not None:
        session.close()
    return total / num


def of_a_module(rank: int, world_size: int, names: list[str]) -> dict[str, float]:
    """For `run_ranks`: operations of one more module in a step, by preset, `STOCK` or `ALONE`."""
    found = {}
    os.environ[backends.OVERRIDE] = "torch"  # what has no kernel on a GPU is not to be C either
    for name in names:
        span = (EVERY, EVERY) if name in CORRECTED else (2, 2)  # in the first step tables and memory are made
        with patch.object(squares, "steps_until_due", lambda age, turn: steps_until_due(_SETTLED + age, turn)):
            found[name] = round((_operations(name, 3, *span) - _operations(name, 1, *span)) / 2, 1)
    return found
