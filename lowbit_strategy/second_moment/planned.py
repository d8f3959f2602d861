"""The messages of squared gradients for Adam's second moment, as numbers; they are sent only in some steps."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

from lowbit_strategy.collectives.layout import ALIGNMENT, TensorSpec, round_up
from lowbit_strategy.methods._base.compressor import Assignment
from lowbit_strategy.options.sizes import size
from lowbit_strategy.plan.extra import Extra
from lowbit_strategy.plan.gradients import peer_transfer, summed
from lowbit_strategy.plan.messages import TransferGroup, step_nbytes
from lowbit_strategy.plan.plan import StepPlan
from lowbit_strategy.plan.reduced import ParamGroup
from lowbit_strategy.ranks.topology import Topology
from lowbit_strategy.second_moment.exchange_steps import EVERY, turns
from lowbit_strategy.second_moment.few_bits import few_bits
from lowbit_strategy.second_moment.served import NUM_SUMS, ROOTS, SKETCH_NUMEL, served


class NoSquares(Extra):
    """Leaves second moments unchanged, and says so where it matters."""

    def lines(self, plan: StepPlan) -> list[str]:
        if plan.topology.num_peers == 1 or not few_bits(plan.assignments):
            return []
        two_levels = plan.topology.node_size and not plan.sharded
        why = "local steps" if plan.round_plan else "two levels" if two_levels else ""
        if not why:
            return ["  second moment: left as it is; Adam needs more steps with so few bits (second_moment)"]
        return [f"  second moment: left as it is, because of {why} (second_moment)"]


class Squares(Extra):
    """The exchange of squares as numbers.

    Args:
        optional: Whether it may be given up, because the user has not requested it.
    """

    purpose = "Adam's second moment"

    def __init__(self, *, optional: bool = False) -> None:
        if optional:
            self.given_up = "Adam's second moment is not corrected", "more steps with Adam"

    def transfers(
        self,
        reduced: Sequence[ParamGroup],
        assignments: Mapping[str, Assignment],
        specs: Mapping[str, TensorSpec],
        topology: Topology,
    ) -> tuple[TransferGroup, ...]:
        """Transfers after the first steps: roots of squares of a bucket's parameters that are due, and sketches."""
        names = served(assignments)
        methods, turn_of = dict.fromkeys(names, ROOTS), turns(names)
        transfers = []
        for each in reduced if topology.num_peers > 1 else ():
            together: dict[int, list[TensorSpec]] = {}
            for name in each.names:
                if name in turn_of:
                    together.setdefault(turn_of[name], []).append(specs[name])
            for members in together.values():
                transfer = peer_transfer("squares", members, methods, topology)
                sketches = summed("sketches", (SKETCH_NUMEL + NUM_SUMS) * len(members), topology)
                # in addition to messages: roots, as they lie in the bucket, and squares on their way into sums
                memory = transfer.buffer_nbytes + 8 * round_up(sum(specs[name].numel for name in each.names), ALIGNMENT)
                messages = (*transfer.messages, replace(sketches, nbytes=sketches.framing_nbytes, framing_nbytes=0))
                transfers.append(replace(transfer, messages=messages, repeats=1 / EVERY, buffer_nbytes=memory))
        return tuple(transfers)

    def kept_nbytes(
        self,
        assignments: Mapping[str, Assignment],
        specs: Mapping[str, TensorSpec],
        topology: Topology,
        *,
        copies: bool,
    ) -> int:
        """Memory for sums of squares of whole gradients, and for statistics of this rank's elements and blocks."""
        members = [specs[name] for name in served(assignments)]
        numel = sum(spec.numel for spec in members)
        own = numel // topology.num_peers if members and members[0].sharded else numel
        return (4 if copies else 2) * numel + 2 * own + own // 8

    def lines(self, plan: StepPlan) -> list[str]:
        kept = self.kept_nbytes(plan.assignments, plan.specs, plan.topology, copies=plan.copies)
        if not kept:
            return NoSquares().lines(plan)
        sent = step_nbytes(plan.extra, "flat", "inter-node")
        return [
            f"  second moment: for Adam ranks exchange squares, {size(sent)}/step, and keep at most"
            f" {size(kept)} per rank"
        ]
