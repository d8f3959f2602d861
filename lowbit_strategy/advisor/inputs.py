"""The figures a prediction is made from: where each comes from, how far it may be off, and what follows for a step."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Literal

from lowbit_strategy.advisor.cluster import Cluster
from lowbit_strategy.advisor.cost import StepTime, step_time
from lowbit_strategy.advisor.units import rounded
from lowbit_strategy.plan.plan import StepPlan

Source = Literal["measured", "given", "nominal", "assumed"]
What = Literal["link", "latency", "inside", "window", "coding", "compute"]

_WORSE_IF_MORE = ("latency", "compute")
_FAR_S = 2.5e-3  # one way: from here on packets that are lost and connections that begin slowly count

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


def is_far_link(latency_s: float) -> bool:
    """Whether a link of that latency, one way, loses packets and begins slowly."""
    return latency_s >= _FAR_S


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

    def best(self) -> Situation:
        return self.at({each.what: each.best for each in self.figures})

    def worst(self) -> Situation:
        return self.at({each.what: each.worst for each in self.figures})

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
        return StepTime(likely.seconds, self.best().step(plan).low, self.worst().step(plan).high)

    def sources(self, more: Sequence[str] = (), measured_in: object = None) -> str:
        """One line: what is assumed, which comes first, what is nominal, given and measured.

        Args:
            more: What else is assumed.
            measured_in: The file of measurements.
        """
        words: dict[Source, list[str]] = {"assumed": list(more), "nominal": [], "given": [], "measured": []}
        for each in self.figures:
            words[each.source].append(f"{_NAMES[each.what]} {each.text}")
        if self.memory_nbytes is not None:
            words[self.memory_source].append(f"memory {rounded(self.memory_nbytes / 1e9)} GB")
        found = [f"{source}: {', '.join(each)}" for source, each in words.items() if each]
        return "; ".join(found) + ("" if measured_in is None else f", in {measured_in}")


_NAMES: Mapping[What, str] = {
    "link": "link",
    "latency": "latency",
    "inside": "inside a node",
    "window": "in flight between nodes",
    "coding": "coding",
    "compute": "compute",
}
