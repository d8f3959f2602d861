"""FSDP2: parameters that a backward pass gives no gradient, on this rank or on any.

All ranks reduce all trainable parameters of a module, with zeros where a rank has no gradient. Messages between the
ranks that reduce say which parameters those are (`Exchange`). At the end of a backward pass a parameter that no rank
had a gradient of has the ``.grad`` that it had before, mostly none, as without compression.

Sums inside a node, or an HSDP replica, have no place for it: there one message at the end of a pass has a bit for each
parameter. A rank that had all gradients needs to know nothing more, and waits for no device.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from lowbit_strategy.collectives.exchange import and_rows_, marks_nbytes
from lowbit_strategy.engine.engine import GradientSync, in_backward
from lowbit_strategy.hooks.overlap import BetweenNodes, OverlappedReducer
from lowbit_strategy.ranks.ranks import Ranks

_HOOKS = "_post_accumulate_grad_hooks"


@dataclass(slots=True, eq=False, kw_only=True)
class Reduction:
    """One reduction of a module's gradients.

    Args:
        params: FSDP2's records of its trainable parameters.
        names: Names of the parameters.
        absent: Those that this rank has no gradient of.
        is_sent: Whether other ranks take part; otherwise the gradients wait, and none is in any ``.grad``.
        device: Where gradients are.

    Attributes:
        marks: On the device, a bit for each: `absent`; after the exchange, what none of the peers had. None: nothing.
        fresh: Parameters without a ``.grad`` before.
        done: CUDA: it has been reduced.
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
        """FSDP2 shall not tell of gradients that may turn out to be none."""
        for param, name in zip(self.params, self.names, strict=True):
            hooks = getattr(param.sharded_param, _HOOKS, None)
            if hooks and (name in self.absent or not self.is_sent):
                setattr(param.sharded_param, _HOOKS, None)
                self._held_back.append((param, hooks))

    def put_hooks_back(self) -> None:
        for param, hooks in self._held_back:
            setattr(param.sharded_param, _HOOKS, hooks)

    def settle(self, unused: set[Any]) -> list[str]:
        """`unused`: records of parameters. Returns the names of those that have no gradient now."""
        gone = []
        for param, name in zip(self.params, self.names, strict=True):
            if param in unused and name in self.fresh:
                param.sharded_param.grad = None
                gone.append(name)
        return gone

    def call_hooks(self, unused: set[Any]) -> None:
        """Those that were held back, of parameters that have a gradient after all."""
        for param, hooks in self._held_back:
            for hook in list(hooks.values()) if param not in unused else ():
                hook(param.sharded_param)


class Reductions:
    """Those of a backward pass, of modules whose parameters the same ranks reduce. At its end it looks for parameters
    that no rank had a gradient of.

    Args:
        ranks: Who reduces the parameters.
        overlapped: Where they are reduced meanwhile; None: FSDP2 waits for each module's.
        between: The stream for exchanges between nodes, on CUDA with two levels.
    """

    def __init__(
        self,
        sync: GradientSync,
        ranks: Ranks,
        overlapped: OverlappedReducer | None,
        between: BetweenNodes | None,
    ) -> None:
        self.sync, self.ranks, self.overlapped, self.between = sync, ranks, overlapped, between
        self._pass, self._reductions = -1, list[Reduction]()
        self._outside = list[Reduction]()

    def add(self, reduction: Reduction) -> None:
        """A module has been reduced, or is going to be: in a backward pass, which may be inside another one, or outside
        of one, where `end_outside` follows.
        """
        if not in_backward():
            self._outside.append(reduction)
            return
        current = torch._C._current_graph_task_id()
        if self._pass != current or not self._reductions:
            self._pass, self._reductions = current, []
            settle = functools.partial(self._end_of_backward, self._reductions)
            torch.autograd.Variable._execution_engine.queue_callback(settle)
        self._reductions.append(reduction)

    def end_outside(self) -> None:
        """A module has been reduced, perhaps outside of a backward pass, which has no end to wait for."""
        if self._outside:
            self._end_of_backward(self._outside)
            self.sync.reduced_outside()

    def _end_of_backward(self, reductions: list[Reduction]) -> None:
        if self.overlapped is not None:
            self.overlapped.finish()
        found, reductions[:] = reductions.copy(), []  # what is added from now on comes with its own call
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
        """FSDP2's records of parameters that no rank had a gradient of, in any of these reductions."""
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
