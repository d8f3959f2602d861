"""Predicted step times beside a dry run, from the link that it is planned for."""

from __future__ import annotations

import itertools
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch.optim.optimizer import register_optimizer_step_post_hook

from lowbit_strategy.advisor import units
from lowbit_strategy.advisor.cluster import Cluster
from lowbit_strategy.advisor.cost import step_time
from lowbit_strategy.advisor.gather import INSIDE, LATENCY, Said, cluster_of, coding_of, is_far
from lowbit_strategy.advisor.timing.clocks import OptimizerClock
from lowbit_strategy.advisor.timing.coding import measure_coding
from lowbit_strategy.advisor.uncompressed import uncompressed
from lowbit_strategy.methods._base.compressor import Compressor
from lowbit_strategy.plan.plan import StepPlan

_WARM_STEPS, _TIMED_STEPS = 2, 5


@dataclass(frozen=True, slots=True)
class Linked:
    """As users write it, checked.

    Args:
        link: Bandwidth of a machine.
        latency: Between machines, one way.
        compute: A step without communication; empty: it is to be timed.
    """

    link: str
    latency: str
    compute: str

    @classmethod
    def of(cls, link: str, latency: str | None = None, compute: str | None = None) -> Linked:
        """Raises:
        ValueError: One is no quantity.
        """
        found = cls(link, latency or LATENCY, compute or "")
        cluster_of(Said(link=found.link, latency=found.latency))
        if found.compute:
            units.duration(found.compute)
        return found

    def __str__(self) -> str:
        return ",".join((self.link, self.latency, self.compute))

    @classmethod
    def parse(cls, text: str) -> Linked:
        """What `str` gives.

        Raises:
            ValueError: One is no quantity.
        """
        return cls.of(*text.split(",")[:3])

    def is_far(self, device: torch.device) -> bool:
        """Whether ranks let all messages between machines travel at once, as they do on CPU."""
        return self._is_here(device) and is_far(self.latency)

    def _is_here(self, device: torch.device) -> bool:
        """Whether devices of the run are like this one, a CPU: where computing is not given, they are taken to be."""
        return device.type == "cpu" and not self.compute

    def cluster(self, compressor: Compressor, device: torch.device) -> Cluster:
        """The links, and how fast devices code: measured here, but of GPUs assumed where computing is given."""
        links, _ = cluster_of(Said(link=self.link, latency=self.latency), on_cpu=self._is_here(device))
        if self.compute:
            return links
        coding = measure_coding(compressor.phase(0), device)
        return replace(links, encoded_per_s=coding.numel_per_s, bucket_s=coding.bucket_s)

    def predict(self, plan: StepPlan, cluster: Cluster, compute_s: float, optimizer_s: float = 0.0) -> str:
        """A line for a report."""
        ours = step_time(plan, cluster, compute_s, optimizer_s)
        plain, half = (step_time(uncompressed(plan, size), cluster, compute_s, optimizer_s) for size in (4, 2))
        coded = coding_of(cluster)
        if self.compute:
            sources = f"given; assumed: GPUs, {coded}, {INSIDE} inside a node"
        else:
            sources = (
                f"{optimizer_s:.3g} s of it the optimizer, and {coded}, measured here; assumed: {INSIDE} inside a node"
            )
        return (
            f"  predicted on links of {self.link} and {self.latency}: a step takes {ours.seconds:.3g} s"
            f" ({ours.low:.3g} to {ours.high:.3g}); without compression {plain.seconds:.3g} s in float32,"
            f" {half.seconds:.3g} s in bf16\n"
            f"  computing takes {compute_s:.3g} s, {sources}"
        )


def time_steps(done: Callable[[float, float], None], device: torch.device) -> None:
    """Time the script's steps, then call `done`, once, with the seconds of one and those of the optimizer in it."""
    clock = OptimizerClock(device)
    ends: list[float] = []
    optimizer_s: list[float] = []

    def stepped(*_: Any) -> None:
        ends.append(time.perf_counter())
        optimizer_s.append(clock.take())
        if len(ends) > _WARM_STEPS + _TIMED_STEPS:
            handle.remove()
            step_s = statistics.median(b - a for a, b in itertools.pairwise(ends[_WARM_STEPS:]))
            done(step_s, statistics.median(optimizer_s[-_TIMED_STEPS:]))

    handle = register_optimizer_step_post_hook(stepped)
