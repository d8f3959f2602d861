"""What travels, and what is kept, where ranks exchange squares of their gradients for Adam's second moment."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from lowbit_strategy.collectives.layout import ALIGNMENT, round_up
from lowbit_strategy.methods._base.compressor import Assignment, dense_method
from lowbit_strategy.methods._base.method import Method
from lowbit_strategy.methods._base.tensor_spec import TensorSpec
from lowbit_strategy.methods.outer.state_code import StateCode
from lowbit_strategy.plan.gradients import Reduced, bucket_messages, message_memory
from lowbit_strategy.plan.messages import Level, Message, Unit
from lowbit_strategy.ranks.shape import Shape

EVERY = 32  # steps between two exchanges of a bucket's squares, after the first ones
SKETCH_NUMEL, NUM_SUMS = 64, 3  # numbers per parameter
_CODES = StateCode(bits=4, exempt=(), high_precision=())


def served(assignments: Mapping[str, Assignment]) -> list[str]:
    """Parameters whose gradients are in few bits; of others the optimizer's own second moment is as good."""
    exact = dense_method()
    return [name for name, each in assignments.items() if each.kind == "compressed" and each.method != exact]


def methods_of_squares(specs: Sequence[TensorSpec]) -> dict[str, Method]:
    """How each parameter's roots travel."""
    return {spec.name: _CODES.method(spec) for spec in specs}


def square_units(
    reduced: Sequence[Reduced],
    assignments: Mapping[str, Assignment],
    specs: Mapping[str, TensorSpec],
    shape: Shape,
    *,
    scatter: bool,
) -> tuple[Unit, ...]:
    """Of a step in the mean, after the first ones: roots of a bucket's squares, and sketches."""
    names, peers, leaving = set(served(assignments)), shape.num_peers, shape.peers_share_leaving()
    level: Level = "flat" if shape.share is None else "inter-node"
    methods = methods_of_squares([specs[name] for name in names])
    units = []
    for each in reduced:
        members = [name for name in each.names if name in names]
        if not members or peers == 1:
            continue
        messages = bucket_messages(methods, specs, members, peers, scatter=scatter, level=level, leaving=leaving)
        sketches = 4 * (SKETCH_NUMEL + NUM_SUMS) * len(members)
        messages.append(Message(level, "sketches", 2 * (peers - 1) * sketches // peers, leaving=leaving))
        memory, mean = message_memory(methods, specs, members, peers, scatter=scatter)
        numel = sum(specs[name].numel for name in members)
        memory += 8 * round_up(numel, ALIGNMENT)  # roots, and squares on their way into sums
        units.append(Unit("squares", numel, tuple(messages), 1 / EVERY, memory, 2 * numel, mean))
    return tuple(units)


def squares_nbytes(
    assignments: Mapping[str, Assignment], specs: Mapping[str, TensorSpec], shape: Shape, *, scatter: bool
) -> int:
    """Memory for sums of squares, of whole gradients, and for what is known of the own elements; of blocks a little."""
    numel = sum(specs[name].numel for name in served(assignments))
    own = numel // shape.num_peers if scatter else numel
    return 2 * numel + 2 * own + own // 8
