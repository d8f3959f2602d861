"""Digests of parameters: if reduced gradients ever differ between ranks, parameters drift apart while the loss falls.

1. Of each parameter (of this rank's shard): a weighted sum of its 64-bit words modulo 2^64, one pass over memory.
2. Of the model: the same over the parameters' digests. One all-gather of 8 bytes per rank.
3. Only if those differ, one all-gather of all parameters' digests, to name what differs.

Under DDP all parameters must agree. Buffers need not (BatchNorm's statistics are each rank's own). Under FSDP2 nothing
can be compared: each element has one owner, whose value the others gather. Under HSDP ranks with the same shards are
compared.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

import torch
from torch import Tensor

from lowbit_strategy.collectives.comm import Comm
from lowbit_strategy.kernels.digest import digests
from lowbit_strategy.model.parameters import local_part

EARLY_STEPS = (2, 10, 100)
EVERY = 1000


class DivergenceError(RuntimeError):
    """Ranks that should hold the same parameters do not."""


def is_due(num_steps: int) -> bool:
    """Whether ranks compare after `num_steps` optimizer steps of this run."""
    return num_steps in EARLY_STEPS or (num_steps > 0 and num_steps % EVERY == 0)


class ParameterDigest:
    """Compares parameters over the ranks of one engine.

    Args:
        params: Gives what must agree, by name, in the same order on all ranks.
        comm: The engine's; nothing is under way on it after a step.
    """

    def __init__(self, params: Callable[[], Mapping[str, Tensor]], comm: Comm, device: torch.device) -> None:
        self._params = params
        self._comm = comm
        self._device = device
        self._num_steps = 0  # since set-up, so that ranks which resume from different weights are noticed soon

    def after_step(self, step_index: int) -> None:
        """Compare if it is due; call on all ranks after a step.

        Raises:
            DivergenceError: On every rank, if parameters differ.
        """
        self._num_steps += 1
        if is_due(self._num_steps):
            self.compare(step_index)

    @torch.no_grad()
    def compare(self, step_index: int) -> None:
        """Raises:
        DivergenceError: On every rank, if parameters differ.
        """
        if each := self._differing():
            raise DivergenceError(_message(step_index, each))

    @torch.no_grad()
    def agree(self) -> bool:
        """Whether all ranks have the same parameters; the same answer on all of them."""
        return not self._differing()

    def _differing(self) -> dict[str, list[int]]:
        params, comm = self._params(), self._comm.with_own_counter()  # the engine's counts gradients
        found = differing({name: local_part(param) for name, param in params.items()}, comm, self._device)
        comm.end()
        return found


def differing(tensors: Mapping[str, Tensor], comm: Comm, device: torch.device) -> dict[str, list[int]]:
    """The tensors that differ between ranks, and each rank's digest of those. Called on all ranks."""
    if not tensors or comm.world_size == 1:
        return {}
    mine_N = digests(list(tensors.values()), device)
    if len(set(_gathered(comm, digests([mine_N], device)).flatten().tolist())) == 1:
        return {}
    each_NW = _gathered(comm, mine_N).T.tolist()
    return {name: each for name, each in zip(tensors, each_NW, strict=True) if len({*each}) > 1}


def _gathered(comm: Comm, mine_N: Tensor) -> Tensor:
    everyone_WN = mine_N.new_empty(comm.world_size, mine_N.numel())
    comm.all_gather(everyone_WN, mine_N).wait()
    return everyone_WN


def _message(step_index: int, differing: Mapping[str, list[int]]) -> str:
    first, each_W = next(iter(differing.items()))
    groups: dict[int, list[int]] = {}
    for rank, value in enumerate(each_W):
        groups.setdefault(value, []).append(rank)
    ranks = "; ".join(f"rank{'s' * (len(same) > 1)} {_short(same)}" for same in groups.values())
    others = len(differing) - 1
    more = f" and {others} more parameter{'s' * (others > 1)}" if others else ""
    return (
        f"after optimizer step {step_index} the ranks no longer hold the same parameters: {first}{more}"
        f" differ{'' if others else 's'} between {ranks}. Look for code that changes gradients or parameters on some"
        " ranks only, between backward and the end of the step, and go back to a checkpoint from before. Where ranks"
        " have processors of different types, which round differently, small differences are expected:"
        " check_digest=False does not compare. If neither is so, report it"
    )


def _short(ranks: list[int]) -> str:
    return ", ".join(map(str, ranks[:8])) + (" ..." if len(ranks) > 8 else "")
