"""Predicted step times beside a dry run, from the link that it is planned for."""

from __future__ import annotations

import itertools
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch.optim.optimizer import register_optimizer_step_post_hook

from lowbit_strategy.launch import units
from lowbit_strategy.launch.advise import cluster_of
from lowbit_strategy.plan.cost import step_time, uncompressed
from lowbit_strategy.plan.plan import Plan

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
    def of(cls, link: str, latency: str | None, compute: str | None) -> Linked:
        """Raises:
        ValueError: One is no quantity.
        """
        found = cls(link, latency or "0.1ms", compute or "")
        cluster_of(found.link, found.latency)
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
        link, latency, compute = (text.split(",") + ["", ""])[:3]
        return cls.of(link, latency, compute)

    def predict(self, plan: Plan, compute_s: float) -> str:
        """A line for a report."""
        cluster = cluster_of(self.link, self.latency)
        ours = step_time(plan, cluster, compute_s)
        plain, half = (step_time(uncompressed(plan, size), cluster, compute_s) for size in (4, 2))
        source = "given" if self.compute else "timed here"
        return (
            f"  predicted on links of {self.link} and {self.latency}: a step takes {ours.seconds:.3g} s"
            f" ({ours.low:.3g} to {ours.high:.3g}); without compression {plain.seconds:.3g} s in float32,"
            f" {half.seconds:.3g} s in bf16. Computing takes {compute_s:.3g} s, {source}; assumed: 50 GB/s inside a"
            " node, 2e10 elements/s encoded"
        )


class StepTimer:
    """Times the script's optimizer steps, then calls `done` with the seconds of one.

    Args:
        done: Called once.
    """

    def __init__(self, done: Callable[[float], None]) -> None:
        self._done = done
        self._ends: list[float] = []
        self._handle = register_optimizer_step_post_hook(self._stepped)

    def _stepped(self, *_: Any) -> None:
        if torch.cuda.is_available():
            torch.cuda.synchronize()
        self._ends.append(time.perf_counter())
        if len(self._ends) > _WARM_STEPS + _TIMED_STEPS:
            self._handle.remove()
            ends = self._ends[_WARM_STEPS:]
            self._done(statistics.median(b - a for a, b in itertools.pairwise(ends)))
