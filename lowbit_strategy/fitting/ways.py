"""Lists set-ups by the memory that they need, and chooses one that fits when a model is set up.

This is pure arithmetic on shapes, the same on all ranks: every rank computes the memory of the first rank, which needs
most.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TypeGuard

from lowbit_strategy.attach.prepare import Wrapper
from lowbit_strategy.collectives.layout import TensorSpec
from lowbit_strategy.fitting.memory import Memory, memory_of
from lowbit_strategy.methods._base.compressor import Compressor, assign_all
from lowbit_strategy.methods.loco import LoCo
from lowbit_strategy.methods.weight_codings import WeightCoding
from lowbit_strategy.model.module_layout import ModuleLayout
from lowbit_strategy.options.sizes import size
from lowbit_strategy.plan.extra import Extra
from lowbit_strategy.plan.plan import make_plan
from lowbit_strategy.plan.reduced import ParamGroup
from lowbit_strategy.ranks.topology import Topology

FEWEST_PEERS = 4  # among fewer, random rounding without a residual has more noise than was measured


@dataclass(frozen=True, kw_only=True, slots=True)
class Setup:
    """Everything that determines the memory.

    Args:
        specs: Whole parameters.
        topology: The ranks.
        wrapper: What wraps the model.
        modules: The units that FSDP2 gathers; empty under DDP.
        extra: Exchanges in addition to gradients.
        copies: Whether methods' state is copied before it changes.
    """

    specs: Sequence[TensorSpec]
    topology: Topology
    wrapper: Wrapper
    modules: Mapping[str, ModuleLayout]
    extra: Extra = field(default_factory=Extra)
    copies: bool = True


@dataclass(frozen=True, kw_only=True, slots=True)
class MemoryOption:
    """One option, and the memory that a rank needs with it.

    Args:
        compressor, weights: The option.
        memory: Bytes by purpose.
        extra, copies: See `Setup`.
        differs: A description of the difference from the request; empty: there is none.
        costs: A description of the difference's cost.
    """

    compressor: Compressor
    weights: WeightCoding | None
    memory: Memory
    extra: Extra = field(default_factory=Extra)
    copies: bool = True
    differs: str = ""
    costs: str = ""

    def arithmetic(self) -> str:
        memory = self.memory
        purposes = (
            ("residuals", memory.residuals),
            ("copies of them", memory.copies),
            ("weights between gathers", memory.weights),
            (self.extra.purpose, memory.extra),
            ("messages", memory.messages),
            ("coding by plain PyTorch", memory.working),
        )
        parts = ", ".join(f"{size(nbytes)} for {what}" for what, nbytes in purposes if nbytes)
        return f"{size(memory.total)} ({parts})"


def memory_options(
    compressor: Compressor, weights: WeightCoding | None, setup: Setup, *, may_recode: bool
) -> Iterator[MemoryOption]:
    """List options, from the requested one down to the one that needs least memory.

    Args:
        compressor: The requested compressor.
        weights: The requested coding of weights, or the compressor's default.
        setup: See `Setup`.
        may_recode: Whether weights may be gathered again instead of being kept, because the user has not chosen
            `weights`.
    """
    yield memory_option(compressor, weights, setup)
    differs: list[str] = []
    costs: list[str] = []
    copies = setup.copies
    if copies:
        setup = replace(setup, copies=False)
        without = "residuals are not copied", "they are lost where gradients are discarded"
        yield memory_option(compressor, weights, setup, *without)
        differs, costs = [[each] for each in without]
    if (without_it := setup.extra.given_up) is not None:
        setup = replace(setup, extra=Extra())
        differs.append(without_it[0])
        costs.append(without_it[1])
        yield memory_option(compressor, weights, setup, "; ".join(differs), "; ".join(costs))
    if may_recode and weights is not None and weights.keep == "codes" and setup.modules:
        weights = replace(weights, keep="nothing")
        differs.append("weights are gathered again in backward instead of kept as codes")
        costs.append("none in loss, weights travel twice per step")
        yield memory_option(compressor, weights, setup, "; ".join(differs), "; ".join(costs))
    if _loss_is_measured(compressor, setup.topology):
        differs.append("no residual is kept")
        costs.append("within 0.3 % in loss where it was measured")
        compressor = replace(compressor, residual="none")
        if copies:  # without residuals there are none
            setup, differs, costs = replace(setup, copies=True), differs[1:], costs[1:]
        yield memory_option(compressor, weights, setup, "; ".join(differs), "; ".join(costs))


def _loss_is_measured(compressor: Compressor, topology: Topology) -> TypeGuard[LoCo]:
    """Whether the cost of the compressor without its residual has been measured: benchmarks/LOG.md."""
    if not isinstance(compressor, LoCo) or compressor.residual != "int8":
        return False
    codebooks = {compressor.codebook, compressor.return_codebook}
    return codebooks <= {"uniform", None} and compressor.bits >= 4 and topology.num_peers >= FEWEST_PEERS


def memory_option(
    compressor: Compressor, weights: WeightCoding | None, setup: Setup, differs: str = "", costs: str = ""
) -> MemoryOption:
    topology = replace(setup.topology, rank=0)
    parts = topology.own_parts(setup.specs, sharded=setup.wrapper == "fsdp")
    trained = {spec.name for spec in parts}
    reduced = [
        ParamGroup(tuple(spec.name for spec in layout.specs if spec.name in trained), name=name)
        for name, layout in list(setup.modules.items())[::-1]  # in backward's order
    ]
    plan = make_plan(
        parts,
        assign_all(compressor.phase(0), parts),
        topology,
        setup.wrapper,
        reduced=[each for each in reduced if each.names] if reduced else None,
        coding=weights if setup.modules else None,
        modules=setup.modules or None,
        extra=setup.extra,
        copies=setup.copies,
    )
    return MemoryOption(
        compressor=compressor,
        weights=weights,
        memory=memory_of(plan),
        extra=setup.extra,
        copies=setup.copies,
        differs=differs,
        costs=costs,
    )


def enough_gb(choice: MemoryOption) -> str:
    """The value of `memory=` that allows a choice."""
    return f"{1.005 * choice.memory.total / 1e9:.3g}"


def choose(found: Sequence[MemoryOption], room_nbytes: int, limit_nbytes: int) -> MemoryOption:
    """The first option that fits into the room, or the smallest one if it is within the limit.

    Raises:
        ValueError: The smallest option exceeds the limit.
    """
    for each in found:
        if each.memory.total <= room_nbytes:
            return each
    smallest = min(found, key=lambda each: each.memory.total)
    if smallest.memory.total > limit_nbytes:
        raise ValueError(
            f"compression would keep {found[0].arithmetic()} on every rank, at least {smallest.arithmetic()}, but only"
            f" {size(limit_nbytes)} are allowed: use weights='exact', HSDP (shard_size='node') or nodes of several"
            f" ranks, which divide residuals, LoCo(residual='none'), or allow more: memory={enough_gb(smallest)}"
        )
    return smallest
