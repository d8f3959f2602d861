"""Ranks compare parameters: if reduced gradients ever differ, parameters drift apart while the loss falls.

Under DDP all parameters must agree. Buffers need not (BatchNorm's statistics are each rank's own). Under FSDP2 nothing
can be compared: each element has one owner, whose value the others gather. Under HSDP ranks with the same shards are
compared, and in rounds the shared weights.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping

import torch
import torch.distributed as dist
from torch import Tensor, nn

from lowbit_strategy.attach.part import Part
from lowbit_strategy.attach.prepare import PreparedModel
from lowbit_strategy.attach.sync_options import SyncOptions
from lowbit_strategy.collectives.comm import Comm, GroupComm, gathered
from lowbit_strategy.engine.engine import GradientSync
from lowbit_strategy.engine.listeners import StepListener, StepPhase
from lowbit_strategy.engine.rounds import Rounds
from lowbit_strategy.inform import listed
from lowbit_strategy.model.differing import differing
from lowbit_strategy.model.parameters import canonical_name, describe_parameters, sharded_parameters
from lowbit_strategy.ranks.groups import group_with
from lowbit_strategy.ranks.ranks import Ranks

EARLY_STEPS = (2, 10, 100)
EVERY = 1000


class DivergenceError(RuntimeError):
    """Ranks that should hold the same parameters do not."""


class DivergenceCheck(Part):
    """Whether to compare. Replicas that come and go do not, since they agree on their shared state when they meet."""

    def __init__(self, options: SyncOptions) -> None:
        self._compares = options.check_digest and not options.comes_and_goes

    def attach(self, sync: GradientSync, module: nn.Module, prepared: PreparedModel) -> None:
        if self._compares and prepared.wrapper != "fsdp":
            sync.listeners.add(Comparison(sync, module, prepared), StepPhase.RECORD)


def is_due(num_steps: int) -> bool:
    """Whether ranks compare after `num_steps` optimizer steps, or turns, of this run."""
    return num_steps in EARLY_STEPS or (num_steps > 0 and num_steps % EVERY == 0)


class Comparison(StepListener):
    """Compares parameters across ranks after steps and, in rounds, the shared weights after turns."""

    def __init__(self, sync: GradientSync, module: nn.Module, prepared: PreparedModel) -> None:
        self._sync, self._module = sync, module
        trained = {spec.name for spec in describe_parameters(module)}
        ignored = map(canonical_name, getattr(module, "_ddp_params_and_buffers_to_ignore", ()))
        self._left_out = {*ignored} | trained - sync.specs.keys()
        self._comms = {
            ranks: ranks.peers if prepared.scatter else _all_of(ranks, sync.device) for ranks in sync.all_ranks
        }
        self._compared: Rounds | None = None
        self._num_steps = 0  # since set-up, so that ranks which resume from different weights are noticed soon

    def end_step(self, *, counted: bool) -> None:
        if counted:
            self._sync.listeners.when_all_have_ended(functools.partial(self._after_step, self._sync.step_index))

    def _after_step(self, step_index: int) -> None:
        if self._compared is not self._sync.rounds:
            self._compared, self._num_steps = self._sync.rounds, 0
        self._num_steps += 1
        if is_due(self._num_steps):
            self.compare(step_index)

    @torch.no_grad()
    def compare(self, step_index: int) -> None:
        """Compare across ranks. Call it on all ranks.

        Raises:
            DivergenceError: On every rank that should have the same values, if they differ.
        """
        for tensors, comm in self.compared():
            if each := differing(tensors, comm, self._sync.device):
                raise DivergenceError(_message(step_index, each))

    def compared(self) -> list[tuple[Mapping[str, Tensor], Comm]]:
        """The tensors that must be equal, by name, in the same order on all ranks, and the ranks to compare."""
        sync = self._sync
        if sync.rounds is not None:
            return [(sync.rounds.shared, sync.ranks.peers)]
        params = {name: p for name, p in sharded_parameters(self._module).items() if name not in self._left_out}
        return [
            ({name: p for name, p in params.items() if sync.state.ranks_of(name) is ranks}, comm)
            for ranks, comm in self._comms.items()
        ]


def _all_of(ranks: Ranks, device: torch.device) -> Comm:
    """The ranks that average gradients. Call it on all of them. Under DDP they have the same parameters."""
    if ranks.intra_node is None:
        return ranks.peers
    if ranks.everyone.world_size == ranks.world_size:
        return ranks.everyone
    members, columns = dist.get_process_group_ranks(ranks.group), gathered(ranks.column, ranks.group)
    own = [rank for rank, column in zip(members, columns, strict=True) if column == ranks.column]
    return GroupComm(group_with(own, None, device))


def _message(step_index: int, differing: Mapping[str, list[int]]) -> str:
    first, each_W = next(iter(differing.items()))
    groups: dict[int, list[int]] = {}
    for rank, value in enumerate(each_W):
        groups.setdefault(value, []).append(rank)
    ranks = "; ".join(f"rank{'s' * (len(same) > 1)} {listed(same, 8)}" for same in groups.values())
    others = len(differing) - 1
    more = f" and {others} more parameter{'s' * (others > 1)}" if others else ""
    return (
        f"after optimizer step {step_index} the ranks no longer hold the same parameters: {first}{more}"
        f" differ{'' if others else 's'} between {ranks}. Look for code that changes gradients or parameters on some"
        " ranks only, between backward and the end of the step, and go back to an earlier checkpoint. If ranks have"
        " processors of different types, which round differently, small differences are expected: check_digest=False"
        " does not compare. Otherwise, please report it"
    )
