"""The figures behind a prediction: where each comes from, how far it may be off, and what follows for a step."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

from lowbit_strategy import leaves
from lowbit_strategy.advisor.cluster import Bench, Cluster, Coding, Link
from lowbit_strategy.advisor.cost import StepTime, step_time
from lowbit_strategy.advisor.quantities import duration, rate, size
from lowbit_strategy.options import sizes
from lowbit_strategy.plan.plan import StepPlan

Source = Literal["measured", "given", "nominal", "assumed"]
What = Literal["link", "latency", "inside", "coding", "compute"]

_WORSE_IF_MORE = ("latency", "compute")

# Between which multiples of a figure the truth lies. A bandwidth that somebody gives is nominal as a rule: collectives
# reached a third of a nominal 100 Gbit/s InfiniBand at 64 ranks, 0.18 to 0.38 of what cloud instances with plain TCP
# are said to have, and 1.2 times what iperf had measured of an Ethernet.
_RANGES: Mapping[tuple[What, Source], tuple[float, float]] = {
    ("link", "given"): (0.15, 1.25),
    ("link", "assumed"): (0.1, 10.0),
    ("latency", "given"): (0.8, 1.25),
    ("latency", "assumed"): (0.1, 3.0),
    ("inside", "given"): (0.4, 1.1),
    ("inside", "assumed"): (0.2, 9.0),  # PCIe that GPUs share, to NVLink of an H100
    ("coding", "assumed"): (0.4, 2.5),
    ("compute", "given"): (0.9, 1.3),  # it shares the GPU with communication
    ("compute", "nominal"): (0.5, 2.0),
    ("compute", "assumed"): (0.2, 5.0),
}
_RDMA_LINK = (0.3, 1.25)  # instead of ("link", "given")
_MEASURED = (0.8, 1.3)
_FAR_LINK = (0.55, 1.8)  # of a measured far link: one message of 3 MB took 1.1 to 1.9 s from one call to the next
_ADDED_S = 30e-6  # software latency, which is not an input
DEFAULTS = {"link": "10gbit", "latency": "0.1ms", "inside": "50GB/s", "memory": "80GB"}
_INSIDE_LATENCY_S = 5e-6
_CODING, _CODING_ON_CPU = Coding(1e11, 4e-4), Coding(1e9)  # an H100 was measured at 2.3e11; a core or two
_TOKENS, _FLOPS, _FLOPS_ON_CPU = 4096, 2e14, 2e11  # a step's, if its time is not given
_USED = 0.4  # fraction of a GPU's peak that training reaches


@dataclass(frozen=True, slots=True)
class Figure:
    """One input.

    Args:
        what: The name of the figure.
        text: The figure with its unit, the way people write it.
        value: Bytes, seconds, bytes per second or elements per second.
        source: Where it comes from.
        low, high: The truth lies between `low` times and `high` times the value.
    """

    what: What
    text: str
    value: float
    source: Source
    low: float
    high: float

    @classmethod
    def of(
        cls,
        what: What,
        text: str,
        value: float,
        source: Source,
        *,
        far: bool = False,
        rdma: bool = False,
        spread: float = 0.0,
    ) -> Figure:
        """A figure with the range that its source has.

        Args:
            what: The name of the figure.
            text: The figure the way people write it.
            value: Bytes, seconds, bytes per second or elements per second.
            source: Where it comes from.
            far: A measured link is one between far machines.
            rdma: A nominal link carries RDMA (InfiniBand, RoCE, EFA), not TCP.
            spread: Fraction by which measurements differ.
        """
        if source == "measured":
            low, high = _FAR_LINK if what == "link" and far else _MEASURED
        elif what == "link" and rdma and source in ("given", "nominal"):
            low, high = _RDMA_LINK
        else:
            low, high = _RANGES.get((what, source)) or _RANGES[what, "given"]
        if what == "latency" and source in ("given", "nominal"):
            high += _ADDED_S / value
        return cls(what, text, value, source, min(low, 1 / (1 + spread)), max(high, 1 + spread))

    @property
    def best(self) -> float:
        return self.low if self.what in _WORSE_IF_MORE else self.high

    @property
    def worst(self) -> float:
        return self.high if self.what in _WORSE_IF_MORE else self.low


def is_far(latency_s: float) -> bool:
    """Whether ranks, so far apart one way, let all messages travel at once; links lose packets and begin slowly."""
    far_s = "lowbit_strategy.far_links.distance:FAR_S"
    return leaves.is_present(far_s) and bool(2 * latency_s >= leaves.load(far_s, "far_links"))


@dataclass(frozen=True, slots=True)
class Situation:
    """All inputs of a prediction.

    Args:
        cluster: Links and coding, as they probably are.
        compute_s: A step without communication.
        figures: What is uncertain of these; empty: nothing.
        memory_nbytes: Memory of a rank; None: unlimited.
        memory_source: The source of that figure.
    """

    cluster: Cluster
    compute_s: float
    figures: Sequence[Figure] = ()
    memory_nbytes: float | None = None
    memory_source: Source = "assumed"

    def at(self, times: Mapping[What, float]) -> Situation:
        """The situation with the named figures multiplied by these factors."""
        factors = {str(what): factor for what, factor in times.items() if what != "compute"}
        return replace(
            self, cluster=self.cluster.scaled(**factors), compute_s=times.get("compute", 1.0) * self.compute_s
        )

    def coding_as(self, preset: str) -> Situation:
        """The situation with the speed of a preset's codecs, if that was measured."""
        return replace(self, cluster=self.cluster.coding_as(preset))

    def step(self, plan: StepPlan) -> StepTime:
        """Time of a step by the probable figures; overlap alone is uncertain."""
        return step_time(plan, self.cluster, self.compute_s)

    def predicted(self, plan: StepPlan) -> StepTime:
        """The probable step; and its bounds: the best of all figures and everything overlaps, the worst and nothing
        does.
        """
        best = self.at({each.what: each.best for each in self.figures})
        worst = self.at({each.what: each.worst for each in self.figures})
        return StepTime(self.step(plan).seconds, best.step(plan).low, worst.step(plan).high)

    def sources(self, more: Sequence[str], nodes: int, ranks_per_node: int) -> str:
        """One line: what is assumed, which comes first, what is nominal, given and measured.

        Args:
            more: What else is assumed.
            nodes: With one node, links between nodes are named only if they were given.
            ranks_per_node: With one rank, links inside a node are named only if they were given.
        """
        unused = (*(("link", "latency") if nodes == 1 else ()), *(("inside",) if ranks_per_node == 1 else ()))
        words: dict[Source, list[str]] = {"assumed": list(more), "nominal": [], "given": [], "measured": []}
        for each in self.figures:
            if each.source == "given" or each.what not in unused:
                words[each.source].append(f"{'inside a node' if each.what == 'inside' else each.what} {each.text}")
        if self.memory_nbytes is not None:
            words[self.memory_source].append(f"memory {sizes.size(self.memory_nbytes)}")
        return "; ".join(f"{source}: {', '.join(each)}" for source, each in words.items() if each)


def gather(
    given: Mapping[str, str | None],
    numel: int,
    bench: Bench | None = None,
    machine: Mapping[str, Any] | None = None,
    *,
    on_cpu: bool = False,
    rdma: bool | None = None,
) -> Situation:
    """What was given goes before what was measured, that before what a machine's maker says, and that before what is
    assumed.

    Args:
        given: What the user gave, as text: bandwidth and one-way latency between nodes, bandwidth of a GPU inside its
            node, a step without communication, and memory of a device.
        numel: Parameters, from which computing is assumed.
        bench: What was measured.
        machine: Machine of the table.
        on_cpu: Ranks compute on CPUs.
        rdma: Links between nodes carry RDMA; None: as the machine's do, without a machine TCP.

    Raises:
        ValueError: A quantity is none.
    """
    if rdma is None:
        rdma = machine is not None and machine["rdma"]
    flops = _FLOPS_ON_CPU if on_cpu else _FLOPS if machine is None else _USED * 1e12 * machine["tflops"]
    computing = {"compute": f"{6 * numel * _TOKENS / flops:.3g}s"}
    layers: Sequence[tuple[Source, Mapping[str, Any]]] = (
        ("given", given),
        ("nominal", {} if machine is None else {**machine, **computing}),
        ("assumed", {**DEFAULTS, **computing}),
    )

    def best(what: str) -> tuple[Source, str]:
        return next((source, known[what]) for source, known in layers if known.get(what) is not None)

    def figure(what: What, measured: Link | None = None) -> Figure:
        source, text = best(what)
        if measured is None or source == "given":
            return Figure.of(what, text, _PARSERS[what](text), source, rdma=rdma)
        far = is_far(measured.latency_s)
        if what == "latency":
            text, value, spread = f"{1e3 * measured.latency_s:.3g} ms", measured.latency_s, measured.latency_spread
        else:
            value, spread = measured.nbytes_per_s, measured.rate_spread
            text = f"{8 * value / 1e9:.4g} Gbit/s" if what == "link" else f"{value / 1e9:.3g} GB/s"
        return Figure.of(what, text, value, "measured", far=far, spread=spread)

    far = bench.cluster.inter_node if bench is not None and bench.nodes > 1 else None
    near = bench.cluster.intra_node if bench is not None and bench.ranks_per_node > 1 else None
    link, latency, inside, compute = (
        figure("link", far),
        figure("latency", far),
        figure("inside", near),
        figure("compute"),
    )
    between = (
        far if far is not None and link.source == latency.source == "measured" else Link(latency.value, link.value)
    )
    within = near if near is not None and inside.source == "measured" else Link(_INSIDE_LATENCY_S, inside.value)
    if bench is not None:
        cluster = replace(bench.cluster.coding_as("loco"), inter_node=between, intra_node=within)
    else:
        coding = _CODING_ON_CPU if on_cpu else _CODING
        cluster = Cluster(inter_node=between, intra_node=within, coding=coding, gloo=on_cpu)
    assert cluster.coding is not None
    source: Source = "assumed" if bench is None else "measured"
    coded = Figure.of("coding", str(cluster.coding), cluster.coding.numel_per_s, source, spread=cluster.coding.spread)
    memory_source, memory = best("memory")
    return Situation(cluster, compute.value, (link, latency, inside, coded, compute), size(memory), memory_source)


_PARSERS: Mapping[What, Callable[[str], float]] = {
    "link": rate,
    "latency": duration,
    "inside": rate,
    "compute": duration,
}
