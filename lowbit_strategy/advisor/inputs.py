"""The figures a prediction is made from: where each comes from, how far it may be off, and what follows for a step."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Literal

from lowbit_strategy.advisor import units
from lowbit_strategy.advisor.bench_file import Bench
from lowbit_strategy.advisor.cluster import Cluster, Coding, Link
from lowbit_strategy.advisor.cost import StepTime, step_time
from lowbit_strategy.advisor.machines import Machine
from lowbit_strategy.plan.plan import StepPlan
from lowbit_strategy.ranks.topology import FAR_S

Source = Literal["measured", "given", "nominal", "assumed"]
What = Literal["link", "latency", "inside", "window", "coding", "compute"]

_WORSE_IF_MORE = ("latency", "compute")

# Between which multiples of a figure the truth lies. A bandwidth that somebody gives is nominal as a rule: collectives
# reached a third of a nominal 100 Gbit/s InfiniBand at 64 ranks, and 1.2 times what iperf had measured of an Ethernet.
_RANGES: Mapping[tuple[What, Source], tuple[float, float]] = {
    ("link", "measured"): (0.85, 1.2),
    ("link", "given"): (0.3, 1.25),
    ("link", "nominal"): (0.3, 1.1),
    ("link", "assumed"): (0.1, 10.0),
    ("latency", "measured"): (0.8, 1.3),
    ("latency", "assumed"): (0.1, 3.0),
    ("inside", "measured"): (0.85, 1.2),
    ("inside", "given"): (0.4, 1.1),
    ("inside", "nominal"): (0.4, 1.1),
    ("inside", "assumed"): (0.2, 9.0),  # PCIe that GPUs share, to NVLink of an H100
    ("window", "given"): (0.75, 1.5),
    ("window", "assumed"): (0.6, 16.0),  # one connection, to a full buffer on each of 16 of NCCL's channels
    ("coding", "measured"): (0.8, 1.25),
    ("coding", "assumed"): (0.4, 2.5),
    ("compute", "measured"): (0.95, 1.15),
    ("compute", "given"): (0.9, 1.3),  # it shares the GPU with communication
    ("compute", "nominal"): (0.5, 2.0),
    ("compute", "assumed"): (0.2, 5.0),
}
_FAR_LINK = (0.55, 1.8)  # of a measured far link: one message of 3 MB took 1.1 to 1.9 s from one call to the next
_ADDED_S = 30e-6  # latency of the software, which nobody gives
LINK, LATENCY, INSIDE, MEMORY = "10gbit", "0.1ms", "50GB/s", "80GB"  # where nobody says
# Bytes in flight between two nodes, where nobody says: those of a connection per 100 Gbit/s. NCCL keeps a buffer of
# NCCL_BUFFSIZE, 4 MiB, in flight per channel; a TCP connection half of net.ipv4.tcp_rmem's largest, 3 MiB of 6.
WINDOW_MB, _PER_CONNECTION = 4, "100gbit"
_INSIDE_LATENCY_S = 5e-6
_CODING, _CODING_ON_CPU = Coding(1e11, 4e-4), Coding(1e9)  # an H100 was measured at 2.3e11; a core or two
_TOKENS, _FLOPS, _FLOPS_ON_CPU = 4096, 2e14, 2e11  # of a step where nobody says how long it takes


@dataclass(frozen=True, slots=True)
class Figure:
    """One input.

    Args:
        what: Which.
        text: As people write it, with its unit.
        value: In bytes, seconds, bytes per second or elements per second.
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
        cls, what: What, text: str, value: float, source: Source, *, far: bool = False, spread: float = 0.0
    ) -> Figure:
        """With the range that figures of this source have; `far`: a measured link between far machines; `spread`: by
        which part measurements differ.
        """
        if what == "latency" and source in ("given", "nominal"):
            return cls(what, text, value, source, 0.8, 1.25 + _ADDED_S / value)
        low, high = _FAR_LINK if what == "link" and source == "measured" and far else _RANGES[what, source]
        return cls(what, text, value, source, min(low, 1 / (1 + spread)), max(high, 1 + spread))

    @property
    def best(self) -> float:
        return self.low if self.what in _WORSE_IF_MORE else self.high

    @property
    def worst(self) -> float:
        return self.high if self.what in _WORSE_IF_MORE else self.low


def is_far(latency_s: float) -> bool:
    """Whether ranks, so far apart one way, let all messages travel at once; links lose packets and begin slowly."""
    return 2 * latency_s >= FAR_S


@dataclass(frozen=True, slots=True)
class Situation:
    """Everything a prediction is made from.

    Args:
        cluster: Links and coding, as they probably are.
        compute_s: A step without communication.
        figures: What is uncertain of these; empty: nothing.
        memory_nbytes: Of a rank; None: unlimited.
        memory_source: Where that comes from.
        optimizer_s: Of the step, the optimizer's, beside which nothing travels.
    """

    cluster: Cluster
    compute_s: float
    figures: Sequence[Figure] = ()
    memory_nbytes: float | None = None
    memory_source: Source = "assumed"
    optimizer_s: float = 0.0

    def at(self, times: Mapping[What, float]) -> Situation:
        """With the named figures multiplied by these factors."""
        factors = {str(what): factor for what, factor in times.items() if what != "compute"}
        return replace(
            self, cluster=self.cluster.scaled(**factors), compute_s=times.get("compute", 1.0) * self.compute_s
        )

    def coding_as(self, preset: str) -> Situation:
        """With the speed of a preset's codecs, if that was measured."""
        return replace(self, cluster=self.cluster.coding_as(preset))

    def step(self, plan: StepPlan) -> StepTime:
        """Of the probable figures; overlap alone is uncertain."""
        return step_time(plan, self.cluster, self.compute_s, self.optimizer_s)

    def predicted(self, plan: StepPlan) -> StepTime:
        """The probable step; and its bounds: the best of all figures and everything overlaps, the worst and nothing
        does.
        """
        likely = self.step(plan)
        if not self.figures:
            return likely
        best = self.at({each.what: each.best for each in self.figures})
        worst = self.at({each.what: each.worst for each in self.figures})
        return StepTime(likely.seconds, best.step(plan).low, worst.step(plan).high)

    def sources(
        self, more: Sequence[str] = (), measured_in: object = None, nodes: int = 2, ranks_per_node: int = 2
    ) -> str:
        """One line: what is assumed, which comes first, what is nominal, given and measured.

        Args:
            more: What else is assumed.
            measured_in: The file of measurements.
            nodes: Where there is one, links between them are named only if they were given.
            ranks_per_node: Likewise, of those inside.
        """
        unused = (*(("link", "latency", "window") if nodes == 1 else ()), *(("inside",) if ranks_per_node == 1 else ()))
        words: dict[Source, list[str]] = {"assumed": list(more), "nominal": [], "given": [], "measured": []}
        for each in self.figures:
            if each.source == "given" or each.what not in unused:
                words[each.source].append(f"{_NAMES.get(each.what, each.what)} {each.text}")
        if self.memory_nbytes is not None:
            words[self.memory_source].append(f"memory {units.rounded(self.memory_nbytes / 1e9)} GB")
        found = [f"{source}: {', '.join(each)}" for source, each in words.items() if each]
        return "; ".join(found) + ("" if measured_in is None else f", in {measured_in}")


_NAMES: Mapping[What, str] = {"inside": "inside a node", "window": "in flight between nodes"}


def gather(
    said: Mapping[str, str | None],
    numel: int,
    measured: Bench | None = None,
    machine: Machine | None = None,
    *,
    on_cpu: bool = False,
) -> Situation:
    """What was given goes before what was measured, that before what a machine's maker says, and that before what is
    assumed.

    Args:
        said: By the user, as text: bandwidth and one-way latency between nodes, bandwidth of a GPU inside its node,
            bytes in flight between two nodes, a step without communication, and memory of a device.
        numel: Parameters, from which computing is assumed.
        measured: By `lowbit bench`.
        machine: Of the table.
        on_cpu: Ranks compute on CPUs.

    Raises:
        ValueError: A quantity is none.
    """
    flops = _FLOPS_ON_CPU if on_cpu else _FLOPS if machine is None else machine.flops
    compute_s = 6 * numel * _TOKENS / flops
    compute = _either("compute", said.get("compute"), None, None if machine is None else compute_s, f"{compute_s:.3g}s")
    cluster, figures = cluster_of(said, measured, machine, on_cpu=on_cpu)
    if (given := said.get("memory")) is not None or machine is None:
        source: Source = "assumed" if given is None else "given"
        memory = units.size(given or MEMORY)
    else:
        source, memory = "nominal", machine.memory_nbytes
    return Situation(cluster, compute.value, (*figures, compute), memory, source)


def cluster_of(
    said: Mapping[str, str | None],
    measured: Bench | None = None,
    machine: Machine | None = None,
    *,
    on_cpu: bool = False,
) -> tuple[Cluster, list[Figure]]:
    """The links and the speed of coding, and the figures of them."""
    levels = {} if measured is None else measured.levels
    far, near = levels.get("inter-node"), levels.get("intra-node")
    nominal: Sequence[float | None] = (None, None, None)
    if machine is not None:
        nominal = machine.link_nbytes_per_s, machine.latency_s, machine.inside_nbytes_per_s
    link = _either("link", said.get("link"), far, nominal[0], LINK)
    latency = _either("latency", said.get("latency"), far, nominal[1], LATENCY)
    inside = _either("inside", said.get("inside"), near, nominal[2], INSIDE)
    connections = max(1, round(link.value / units.rate(_PER_CONNECTION)))
    window = _either("window", said.get("window"), None, None, f"{connections * WINDOW_MB}MB")
    if measured is not None:
        cluster = measured.cluster()
    else:
        nowhere, assumed = Link(0.0, 1.0), _CODING_ON_CPU if on_cpu else _CODING
        cluster = Cluster(inter_node=nowhere, intra_node=nowhere, coding=assumed, gloo=on_cpu)
    if latency.source != "measured":  # of gloo's: a sender first hears that the receiver waits
        cluster = replace(cluster, latency_multiplier=2 if on_cpu else 1)
    as_measured = link.source == latency.source == "measured"
    if not as_measured:
        given = Link(latency.value, link.value, work=cluster.inter_node.work, window_nbytes=window.value)
        cluster = replace(cluster, inter_node=given, rings=None)
    if inside.source != "measured":
        given = Link(_INSIDE_LATENCY_S, inside.value, work=cluster.intra_node.work)
        cluster = replace(cluster, intra_node=given, rings=None)
    coding = cluster.coding
    assert coding is not None
    source: Source = "assumed" if measured is None else "measured"
    coded = Figure.of("coding", str(coding), coding.numel_per_s, source, spread=coding.spread)
    return cluster, [link, latency, inside, *([] if as_measured else [window]), coded]


def _either(what: What, said: str | None, measured: Link | None, nominal: float | None, assumed: str) -> Figure:
    """The figure of the best source available."""
    parse = _PARSERS[what]
    if said is not None:
        return Figure.of(what, said, parse(said), "given")
    if measured is not None:
        of_latency = what == "latency"
        value = measured.latency_s if of_latency else measured.nbytes_per_s
        spread = measured.latency_spread if of_latency else measured.rate_spread
        return Figure.of(what, _text(what, value), value, "measured", far=is_far(measured.latency_s), spread=spread)
    if nominal is not None:
        return Figure.of(what, _text(what, nominal), nominal, "nominal")
    return Figure.of(what, assumed, parse(assumed), "assumed")


_PARSERS: Mapping[What, Callable[[str], float]] = {
    "link": units.rate,
    "latency": units.duration,
    "inside": units.rate,
    "window": units.size,
    "compute": units.duration,
}


def _text(what: What, value: float) -> str:
    if what in ("latency", "compute"):
        return f"{1e3 * value:.3g} ms" if what == "latency" else f"{value:.3g}s"
    return f"{8 * value / 1e9:.4g} Gbit/s" if what == "link" else f"{value / 1e9:.3g} GB/s"
