"""Where 4 bits pay: how many times faster than bf16 a step is, over bandwidth, latency, machines and model size.

From the model of a step alone (`lowbit_strategy/advisor/cost.py`): 8 GPUs a machine, each computing at 200 TFLOP/s on
4,096 tokens a step, 50 GB/s inside a machine (assumed; above 400 Gbit/s between machines it alone decides), 1e11
elements encoded per second and 0.4 ms per bucket. bf16 travels in
rings; where NCCL takes trees it waits less often, and the curves over latency of many machines are lower.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import matplotlib.pyplot as plt
from matplotlib.ticker import FixedLocator, NullLocator
from style import BLUE, GRAY, GREEN, ORANGE, RED, save

from lowbit_strategy import Dense, preset
from lowbit_strategy.advisor.cluster import Cluster, Coding, Link
from lowbit_strategy.advisor.cost import step_time
from lowbit_strategy.advisor.transformer import transformer
from lowbit_strategy.advisor.uncompressed import uncompressed
from lowbit_strategy.advisor.workload import Workload, plan_for
from lowbit_strategy.plan.plan import StepPlan

TOKENS, FLOPS = 4096, 2e14
CLUSTER = Cluster(inter_node=Link(5e-5, 1.25e9), intra_node=Link(5e-6, 5e10), coding=Coding(1e11, 4e-4))
GBITS = [0.1 * 10 ** (at / 4) for at in range(17)]
MILLISECONDS = [0.01 * 10 ** (at / 3) for at in range(14)]
COLORS = (GREEN, BLUE, ORANGE, RED)
LAYOUTS = {"ddp": "DDP", "fsdp": "FSDP2"}


def plans(params: float, nodes: int, layout: Any) -> tuple[StepPlan, StepPlan, float]:
    """Of 4 bits, of bf16, and the seconds that a rank computes."""
    workload = Workload(transformer(params), nodes, 8, itemsize=2)
    plain = uncompressed(plan_for(workload, layout, Dense()), 2)
    return plan_for(workload, layout, preset("loco")), plain, 6 * workload.numel * TOKENS / FLOPS


def faster(found: tuple[StepPlan, StepPlan, float], links: Sequence[Link]) -> list[float]:
    ours, plain, compute_s = found
    ratios = []
    for link in links:
        cluster = replace(CLUSTER, inter_node=link)
        ratios.append(step_time(plain, cluster, compute_s).seconds / step_time(ours, cluster, compute_s).seconds)
    return ratios


def draw(name: str, *, narrow: bool) -> None:
    figure, rows = plt.subplots(6, 1, figsize=(4.2, 17)) if narrow else plt.subplots(2, 3, figsize=(11, 6.4))
    axes = list(rows) if narrow else [each for row in rows for each in row]
    near = CLUSTER.inter_node
    for at, (layout, title) in enumerate(LAYOUTS.items()):
        sizes, machines, far = axes[3 * at : 3 * at + 3]
        rates = [Link(near.latency_s, gbit * 1e9 / 8) for gbit in GBITS]
        for params, color in zip((1e8, 1e9, 7e9), COLORS, strict=False):
            label = f"{params / 1e9:g} billion parameters"
            sizes.plot(GBITS, faster(plans(params, 4, layout), rates), color=color, label=label)
        for nodes, color in zip((2, 4, 16, 64), COLORS, strict=False):
            machines.plot(GBITS, faster(plans(1e9, nodes, layout), rates), color=color, label=f"{nodes} machines")
        late = [Link(ms / 1e3, near.nbytes_per_s) for ms in MILLISECONDS]
        for nodes, color in zip((2, 4, 16), COLORS, strict=False):
            far.plot(MILLISECONDS, faster(plans(1e9, nodes, layout), late), color=color, label=f"{nodes} machines")
        sizes.set(
            title=f"{title}, 4 machines",
            xlabel="Gbit/s between machines, 50 GB/s inside",
            ylabel="times faster than bf16",
        )
        machines.set(title=f"{title}, 1 billion", xlabel="Gbit/s between machines")
        far.set(title=f"{title}, 1 billion, 10 Gbit/s", xlabel="ms between machines, one way")
    for each in axes:
        each.set(xscale="log", yscale="log", ylim=(0.8, 24))
        each.xaxis.set_major_formatter("{x:g}")
        each.yaxis.set_major_locator(FixedLocator((1, 2, 5, 10, 20)))
        each.yaxis.set_major_formatter("{x:g}")
        each.yaxis.set_minor_locator(NullLocator())
        each.axhline(1, color=GRAY, linewidth=1)
        each.legend(fontsize=8, frameon=False, loc="upper left" if "ms" in each.get_xlabel() else "best")
    figure.tight_layout()
    save(figure, name)


if __name__ == "__main__":
    draw("break_even", narrow=False)
    draw("break_even_narrow", narrow=True)
