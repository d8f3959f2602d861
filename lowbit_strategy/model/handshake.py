"""Ranks compare: before the first step what they are about to do, so that a difference is an error and not a hang;
then digests of their parameters, because if reduced gradients ever differ, parameters drift apart while the loss falls.

1. Of each parameter (of this rank's shard): a weighted sum of its 64-bit words modulo 2^64, one pass over memory.
2. Of the model: the same over the parameters' digests. One all-gather of 8 bytes per rank.
3. Only if those differ, one all-gather of all parameters' digests, to name what differs.

Under DDP all parameters must agree. Buffers need not (BatchNorm's statistics are each rank's own). Under FSDP2 nothing
can be compared: each element has one owner, whose value the others gather. Under HSDP ranks with the same shards are
compared.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping

import torch
import torch.distributed as dist
from torch import Tensor, nn

from lowbit_strategy.collectives.comm import Comm, gathered
from lowbit_strategy.collectives.lost_ranks import naming_lost_ranks
from lowbit_strategy.kernels.digest import digests
from lowbit_strategy.methods._base.compressor import Compressor
from lowbit_strategy.model.parameters import canonical_name, local_part
from lowbit_strategy.version import __version__

Facts = Mapping[str, object]


def fingerprint(
    compressor: Compressor, module: nn.Module, *, scatter: bool, settings: Mapping[str, object]
) -> dict[str, object]:
    """Everything that must be the same on all ranks, by the name a user would know it by."""
    shapes, types, buffers = [], [], []
    for name, param in module.named_parameters():
        if param.requires_grad:
            shapes.append((canonical_name(name), tuple(param.shape)))
            types.append((canonical_name(name), str(param.dtype)))
    for name, buffer in module.named_buffers():
        if buffer.is_floating_point():
            buffers.append((canonical_name(name), tuple(buffer.shape)))
    return {
        "lowbit_strategy version": __version__,
        "torch version": torch.__version__,
        "strategy": "fsdp" if scatter else "ddp",
        **to_plain("compressor", compressor),
        **settings,
        "parameters": shapes,
        "parameter types": types,
        "floating-point buffers": buffers,
    }


def to_plain(name: str, value: object) -> dict[str, object]:
    """A configuration as plain values by dotted names. Functions go by name: their address differs between ranks."""
    found: dict[str, object] = {}
    waiting = [(name, value)]
    while waiting:
        name, value = waiting.pop()
        if dataclasses.is_dataclass(value):
            found[name] = type(value).__name__
            for field in reversed(dataclasses.fields(value)):
                waiting.append((f"{name}.{field.name}", getattr(value, field.name)))
        elif isinstance(value, tuple):
            found[name] = f"{len(value)} entries"
            for index, entry in reversed(list(enumerate(value))):
                waiting.append((f"{name}[{index}]", entry))
        else:
            found[name] = getattr(value, "__qualname__", type(value).__name__) if callable(value) else repr(value)
    return found


def handshake(mine: Facts, group: dist.ProcessGroup | None = None) -> None:
    """Compare `mine` over the ranks of `group`.

    Raises:
        LostRankError: A rank has ended.
        RuntimeError: On every rank, naming the first rank and field that differ from rank 0.
    """
    everyone = gathered(dict(mine), group, "the comparison of models and options")
    for rank, theirs in enumerate(everyone):
        for field in everyone[0] | theirs:
            value, their_value = everyone[0].get(field), theirs.get(field)
            if their_value != value:
                difference = _difference(value, their_value)
                raise RuntimeError(
                    f"rank {rank} differs from rank 0 in {field}: {difference}."
                    " All ranks must run the same model, configuration and versions"
                )


def _difference(expected: object, found: object) -> str:
    """The first place where two facts differ, short enough to read."""
    if isinstance(expected, list) and isinstance(found, list):
        for index, (a, b) in enumerate(zip(expected, found, strict=False)):
            if a != b:
                return f"number {index} is {b} instead of {a}"
        return f"{len(found)} instead of {len(expected)}"
    return f"{found} instead of {expected}"


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
        device: Of its collectives.
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
        if not self.agree():
            raise DivergenceError(_message(step_index, list(self._params()), self._gather(self._each()).cpu()))

    @torch.no_grad()
    def agree(self) -> bool:
        """Whether all ranks have the same parameters; the same answer on all of them."""
        if self._comm.world_size == 1:
            return True
        if not (each := self._each()).numel():
            return True
        whole_W = self._gather(digests([each], self._device)).view(-1)
        return bool((whole_W == whole_W[0]).all())

    def _each(self) -> Tensor:
        """int64 ``[parameters]``."""
        return digests([local_part(param) for param in self._params().values()], self._device)

    def _gather(self, mine_N: Tensor) -> Tensor:
        """int64 ``[W, N]``; not counted by the engine, which counts gradients."""
        rows = [torch.empty_like(mine_N) for _ in range(self._comm.world_size)]
        with naming_lost_ranks(self._comm.group, "the comparison of parameters", self._comm.describe_step()):
            dist.all_gather(rows, mine_N, group=self._comm.group)
        return torch.stack(rows)


def _message(step_index: int, names: list[str], each_WP: Tensor) -> str:
    differs_P = (each_WP != each_WP[0]).any(0)
    first = int(differs_P.nonzero()[0])
    groups: dict[int, list[int]] = {}
    for rank, value in enumerate(each_WP[:, first].tolist()):
        groups.setdefault(value, []).append(rank)
    ranks = "; ".join(f"rank{'s' * (len(same) > 1)} {_short(same)}" for same in groups.values())
    others = int(differs_P.sum()) - 1
    more = f" and {others} more parameter{'s' * (others > 1)}" if others else ""
    return (
        f"after optimizer step {step_index} the ranks no longer hold the same parameters: {names[first]}{more}"
        f" differ{'' if others else 's'} between {ranks}. Look for code that changes gradients or parameters on some"
        " ranks only, between backward and the end of the step, and go back to a checkpoint from before. Where ranks"
        " have processors of different types, which round differently, small differences are expected:"
        " check_digest=False does not compare. If neither is so, report it"
    )


def _short(ranks: list[int]) -> str:
    return ", ".join(map(str, ranks[:8])) + (" ..." if len(ranks) > 8 else "")
