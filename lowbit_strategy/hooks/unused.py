"""FSDP2: handles parameters that get no gradient in a backward pass, on this rank or on any rank.

All ranks reduce all trainable parameters of a module, with zeros if a rank has no gradient. Messages between the
reducing ranks say which parameters those are (`Exchange`). If no rank had a gradient for a parameter, its ``.grad`` at
the end of the backward pass is what it was before, usually None, as without compression.

Sums inside a node or an HSDP replica have no room for these marks, so there one message at the end of a pass has a bit
for each parameter. A rank that had all gradients does not need the answer, nor wait for the device.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from lowbit_strategy.collectives.exchange import and_rows_, marks_nbytes
from lowbit_strategy.engine.backward_pass import NO_PASS, call_at_end, current_pass
from lowbit_strategy.engine.engine import GradientSync
from lowbit_strategy.hooks.overlap import OverlappedRunner
from lowbit_strategy.ranks.ranks import Ranks

_HOOKS = "_post_accumulate_grad_hooks"


@dataclass(slots=True, eq=False, kw_only=True)
class Reduction:
    """One reduction of a module's gradients.

    Args:
        params: FSDP2's records of its trainable parameters.
        names: Names of the parameters.
        absent: The parameters for which this rank has no gradient.
        is_sent: Whether other ranks take part; if not, the gradients wait outside any ``.grad``.
        device: Device of the gradients.

    Attributes:
        marks: A bit per parameter on the device, set for `absent`; after the exchange, set if no peer had a gradient.
            None: no bit is set.
        fresh: Parameters that had no ``.grad`` before.
        done: CUDA: an event after the reduction.
    """

    params: Sequence[Any]
    names: Sequence[str]
    absent: set[str]
    is_sent: bool
    device: torch.device
    marks: Tensor | None = None
    fresh: frozenset[str] = frozenset()
    done: Any = None
    _held_back: list[tuple[Any, Any]] = field(default_factory=list)

    def __post_init__(self) -> None:
        params = zip(self.params, self.names, strict=True)
        self.fresh = frozenset(name for param, name in params if param.sharded_param.grad is None)
        if self.absent:
            bits = sum(1 << at for at, name in enumerate(self.names) if name in self.absent)
            content = bytearray(bits.to_bytes(self.marks_nbytes, "little"))
            self.marks = torch.frombuffer(content, dtype=torch.uint8).to(self.device)

    @property
    def marks_nbytes(self) -> int:
        return marks_nbytes(len(self.names))

    def hold_back_hooks(self) -> None:
        """Hold back FSDP2's hooks for gradients that may turn out not to exist."""
        for param, name in zip(self.params, self.names, strict=True):
            hooks = getattr(param.sharded_param, _HOOKS, None)
            if hooks and (name in self.absent or not self.is_sent):
                setattr(param.sharded_param, _HOOKS, None)
                self._held_back.append((param, hooks))

    def put_hooks_back(self) -> None:
        for param, hooks in self._held_back:
            setattr(param.sharded_param, _HOOKS, hooks)

    def settle(self, unused: set[Any]) -> list[str]:
        """Remove gradients of `unused` parameters (FSDP2's records). Return the names of those that now have none."""
        gone = []
        for param, name in zip(self.params, self.names, strict=True):
            if param in unused and name in self.fresh:
                param.sharded_param.grad = None
                gone.append(name)
        return gone

    def call_hooks(self, unused: set[Any]) -> None:
        """Call the hooks that were held back, for parameters that have a gradient after all."""
        for param, hooks in self._held_back:
            if param not in unused:
                for hook in list(hooks.values()):
                    hook(param.sharded_param)


class Reductions:
    """The reductions in a backward pass of modules that the same ranks reduce. At the end of the pass it finds
    parameters for which no rank had a gradient.

    Args:
        ranks: The ranks that reduce the parameters.
        overlapped: Reduces modules while backward continues; None: FSDP2 waits for each module.
    """

    def __init__(self, sync: GradientSync, ranks: Ranks, overlapped: OverlappedRunner | None) -> None:
        self.sync, self.ranks, self.overlapped = sync, ranks, overlapped
        self._pass, self._reductions = NO_PASS, list[Reduction]()
        self._outside = list[Reduction]()

    def add(self, reduction: Reduction) -> None:
        """Add the reduction of a module in a backward pass (perhaps nested), or outside, before `end_outside`."""
        if (current := current_pass()) == NO_PASS:
            self._outside.append(reduction)
            return
        if self._pass != current or not self._reductions:
            self._pass, self._reductions = current, []
            call_at_end(functools.partial(self._end_of_backward, self._reductions))
        self._reductions.append(reduction)

    def end_outside(self) -> None:
        """Settle a module that may have been reduced outside a backward pass, where there is no end to wait for."""
        if self._outside:
            self._end_of_backward(self._outside)
            self.sync.reduced_outside()

    def _end_of_backward(self, reductions: list[Reduction]) -> None:
        if self.overlapped is not None:
            self.overlapped.finish()
        found, reductions[:] = reductions.copy(), []  # later reductions come with their own call
        for each in found:
            if each.done is not None:
                torch.cuda.current_stream(each.device).wait_event(each.done)
        unused = {param for each in found if not each.is_sent for param in each.params}
        if sent := [each for each in found if each.is_sent]:
            unused |= self._unused(sent)
        self.sync.withdraw([name for each in found for name in each.settle(unused)])
        for each in found:
            each.call_hooks(unused)

    def _unused(self, reductions: Sequence[Reduction]) -> set[Any]:
        """FSDP2's records of parameters for which no rank had a gradient in any of these reductions."""
        inside = self.ranks.intra_node
        tells = inside is not None and inside.world_size > 1
        if not (tells or any(each.absent for each in reductions)):
            return set()
        marks_B = torch.cat(
            [
                torch.zeros(each.marks_nbytes, dtype=torch.uint8, device=each.device)
                if each.marks is None
                else each.marks
                for each in reductions
            ]
        )
        if inside is not None and tells:
            all_LB = marks_B.new_empty(inside.world_size, marks_B.numel())
            inside.all_gather(all_LB, marks_B).wait()
            marks_B = all_LB[0]
            and_rows_(all_LB, marks_B)
        if not any(each.absent for each in reductions):
            return set()
        content, at = bytes(marks_B.tolist()), 0  # waits for the device
        unused: dict[Any, bool] = {}
        for each in reductions:
            marks, at = int.from_bytes(content[at : at + each.marks_nbytes], "little"), at + each.marks_nbytes
            for number, param in enumerate(each.params):
                unused[param] = unused.get(param, True) and bool(marks >> number & 1)
        return {param for param, is_unused in unused.items() if is_unused}
