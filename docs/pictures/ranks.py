"""From 8 ranks to 100,000: seconds of a step by methods whose messages grow in different ways, as the model predicts.

1 billion parameters under DDP, 8 ranks a machine, 10 Gbit/s and 0.05 ms between machines, 0.3 s of computing. Prints
the rows of the table in docs/advise.md.
"""

from __future__ import annotations

import matplotlib.pyplot as plt
from style import BLUE, GREEN, GREY, ORANGE, RED, save

from lowbit_strategy import preset
from lowbit_strategy.methods.outer.registry import OUTER_RULES, default_compressor
from lowbit_strategy.advisor.advice import Wanted, plan_for
from lowbit_strategy.plan.cluster import Cluster, Link
from lowbit_strategy.plan.cost import step_time
from lowbit_strategy.plan.models import transformer
from lowbit_strategy.plan.plan import Plan
from lowbit_strategy.plan.uncompressed import uncompressed

PER_NODE = 8
RANKS = (8, 64, 1024, 8192, 100_000)
COMPUTE_S = 0.3
CLUSTER = Cluster(inter_node=Link(5e-5, 1.25e9), intra_node=Link(5e-6, 5e10), encoded_per_s=1e11, bucket_s=4e-4)
METHODS = {
    "loco": (BLUE, "-"),
    "loco1": (BLUE, "--"),
    "powersgd": (GREEN, "-"),
    "topk": (RED, "-"),
    "dgc": (RED, "--"),
    "gtopk": (ORANGE, "-"),
    "exdyna": (ORANGE, "--"),
    "diloco": (GREY, "--"),
}


def planned(name: str, ranks: int) -> Plan:
    wanted = Wanted(transformer(1e9), ranks // PER_NODE, PER_NODE, itemsize=2)
    if name in OUTER_RULES:
        return plan_for(wanted, "ddp", default_compressor(OUTER_RULES[name]), outer=OUTER_RULES[name])
    return plan_for(wanted, "ddp", preset("dense" if name == "bf16" else name))


def seconds(name: str, ranks: int) -> float:
    plan = planned(name, ranks)
    return step_time(uncompressed(plan, 2) if name == "bf16" else plan, CLUSTER, COMPUTE_S).seconds


def draw(found: dict[str, list[float]], name: str, width: float) -> None:
    figure, axes = plt.subplots(figsize=(width, 4.6), layout="constrained")
    for method, times in found.items():
        color, style = METHODS.get(method, ("black", "-"))
        axes.plot(RANKS, times, style, color=color, label=method, marker=".")
    axes.set(xscale="log", yscale="log", xlabel="ranks", ylabel="seconds of a step", ylim=(0.25, 800))
    axes.xaxis.set_major_formatter("{x:,.0f}")
    axes.yaxis.set_major_formatter("{x:g}")
    figure.legend(loc="outside lower center", ncols=3 if width < 6 else 9, fontsize=8, frameon=False)
    save(figure, name)


if __name__ == "__main__":
    steps = {name: [seconds(name, ranks) for ranks in RANKS] for name in ("bf16", *METHODS)}
    for name, times in steps.items():
        print(f"| `{name}` | " + " | ".join(f"{each:.2g}" if each < 10 else f"{each:.0f}" for each in times) + " |")
    draw(steps, "ranks", 8.0)
    draw(steps, "ranks_narrow", 4.2)
