"""Figures that others published, predicted from the inputs that they state; prints a table, or JSON.

Every row is compared by the quantity that was published, and has a range: the predictions where all inputs are as good
as they may be, and as bad (`advisor/inputs.py`). A row counts as inside where the published figure is in its range.
Where the same run was published with compression and without, the column "verdict right" has the answer that the range
of the gain leads to (`Gain.answer`) and the gain that was published: a plain yes is right where it is above 1.05, a
plain no where it is not, and "measure" is never wrong.

    python -m benchmarks.published_steps [--json FILE]

* 1-bit Adam (Tang et al. 2021, arXiv 2102.02888, table 1): BERT-Large, all-reduce of fp16 gradients over a measured
  4.1 Gbit/s.
* ZeRO++ (Wang et al. 2023, arXiv 2306.10209, and its blog): 24 nodes of 16 V100, 100 Gbit/s per node, 1,024 tokens per
  GPU; TFLOPs per GPU. What a V100 computes is not stated: 38 TFLOPs, what ZeRO reached on 400 of them (Rajbhandari et
  al. 2020, arXiv 1910.02054). Baseline ZeRO-3 in fp16; ZeRO++
  sends what 8-bit weights kept from forward to backward and 4-bit gradients over two levels send.
* Bagua's benchmark page: BERT-Large on SQuAD, 16 nodes of 8 V100, seconds per epoch. Steps per epoch follow from DDP at
  1 Gbit/s and compute from ByteGrad at 100 Gbit/s; both rows are left out of the comparison.
* Streaming DiLoCo (Douillard et al. 2025, arXiv 2501.18512, table 4): 1, 10 and 100 billion parameters in two places, a
  simulation of its authors that gives the bandwidth at which a step's computing is 50 or 80 % of it; bfloat16 but for
  the last set-up, a round per 100 steps, fragments of 3 layers. Compared is that bandwidth. In their simulation a
  fragment begins to travel within the last backward pass, layer by layer, which hides up to two thirds of a step more
  than here, where it leaves after the optimizer's step: the lower end of the range hides a step more.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from pathlib import Path

from lowbit_strategy import QSGD, Dense, DiLoCo, LoCo, WeightCode
from lowbit_strategy.advisor.advice import ADVISE_MIN_SPEEDUP, Answer, SetupOption, gain_of
from lowbit_strategy.advisor.cluster import Cluster, Link
from lowbit_strategy.advisor.cost import StepTime
from lowbit_strategy.advisor.inputs import Figure, Situation, Source
from lowbit_strategy.advisor.transformer import transformer
from lowbit_strategy.advisor.uncompressed import uncompressed
from lowbit_strategy.advisor.workload import layers_of
from lowbit_strategy.attach.prepare import Wrapper
from lowbit_strategy.collectives.layout import TensorSpec
from lowbit_strategy.methods._base.compressor import Compressor, assign_all
from lowbit_strategy.plan.plan import StepPlan, make_plan
from lowbit_strategy.plan.reduced import ParamGroup
from lowbit_strategy.ranks.topology import Topology

TOLERANCE = 0.2
LATENCY_S = 50e-6  # assumed everywhere: none states it
BERT_LARGE = [TensorSpec(f"layer.{at}.weight", (1024, 13_134)) for at in range(25)]  # 336 million, in equal parts
V100_FLOPS = 38e12
# Streaming DiLoCo's bandwidths are 50 from 0.1 to 1,000 Gbit/s, rounded down: the six rows of plain DiLoCo, which are
# bytes over time, are published as the one below.
_GRID = 10 ** (4 / 49)


@dataclass(frozen=True, slots=True)
class Row:
    """One published figure, its prediction and the range of that."""

    source: str
    what: str
    published: float
    predicted: float
    low: float
    high: float
    resolution: float = 1.0
    answer: Answer | None = None  # to whether compression pays; None: only one of the two was published
    gain: float | None = None  # as published

    @property
    def right(self) -> bool | None:
        """Whether the answer is; None: there is none."""
        if self.answer is None or self.gain is None:
            return None
        return self.answer == "measure" or (self.answer == "use") == (self.gain > ADVISE_MIN_SPEEDUP)

    @property
    def ratio(self) -> float:
        return self.predicted / self.published

    @property
    def within(self) -> bool:
        return abs(self.ratio - 1) <= TOLERANCE

    @property
    def inside(self) -> bool:
        """Whether it can be: what was found lies between the published figure and `resolution` times that."""
        return self.low <= self.published * self.resolution and self.published <= self.high


def plan_of(
    specs: list[TensorSpec],
    nodes: int,
    per_node: int,
    wrapper: Wrapper,
    compressor: Compressor,
    *,
    itemsize: int,
    outer: DiLoCo | None = None,
) -> StepPlan:
    two = nodes > 1 and per_node > 1
    topology = Topology(nodes * per_node, (per_node,) * nodes, node_size=per_node if two else None)
    parts = topology.own_parts(specs, sharded=wrapper == "fsdp")
    modules = layers_of(specs, itemsize)
    reduced = [ParamGroup(tuple(s.name for s in m.specs), itemsize, name) for name, m in reversed(modules.items())]
    return make_plan(
        parts,
        assign_all(compressor, parts),
        topology,
        wrapper,
        reduced=reduced,
        coding=WeightCode() if wrapper == "fsdp" else None,
        modules=modules if wrapper == "fsdp" else None,
        round_plan=None if outer is None else outer.planned(),
    )


def situation(
    gbit: float, compute_s: float, compute: Source = "given", *, is_exact: bool = False, rdma: bool = False
) -> Situation:
    """Links as publications state them, and computing.

    Args:
        gbit: Of a node.
        compute_s: A step without communication.
        compute: Where that comes from.
        is_exact: The links are those of a simulation.
        rdma: They are InfiniBand.
    """
    cluster = Cluster(inter_node=Link(LATENCY_S, gbit * 1e9 / 8), intra_node=Link(5e-6, 50e9))
    links = [Figure.of("link", "", gbit, "given", rdma=rdma), Figure.of("inside", "", 50e9, "assumed")]
    figures = [] if is_exact else links
    figures += [Figure.of("latency", "", LATENCY_S, "assumed"), Figure.of("compute", "", compute_s, compute)]
    return Situation(cluster, compute_s, figures)


def one_bit_adam() -> list[Row]:
    rows = []
    for nodes, published in ((16, 2.275), (8, 2.173), (4, 2.133), (2, 1.897)):
        plan = uncompressed(plan_of(BERT_LARGE, nodes, 4, "ddp", LoCo(), itemsize=2), 2)
        step = situation(4.1, 0.0).predicted(plan)
        rows.append(Row("1-bit Adam, table 1", f"{nodes} x 4, all-reduce, s", published, *_each(step, 1)))
    return rows


def zeropp() -> list[Row]:
    rows = []
    for numel, stock, zeropp in ((18e9, 14, 31), (49e9, 11, 22), (138e9, 11, 22)):
        specs = transformer(numel)
        plan = plan_of(specs, 24, 16, "fsdp", LoCo(bits=4), itemsize=2)
        flops = 8 * sum(spec.numel for spec in specs) * 1024  # with recomputation of activations
        own, at = uncompressed(plan, 2), situation(100, flops / V100_FLOPS, "nominal", rdma=True)
        for name, each, published in (("ZeRO-3", own, stock), ("ZeRO++", plan, zeropp)):
            step = at.predicted(each)
            likely, low, high = (flops / seconds / 1e12 for seconds in (step.seconds, step.high, step.low))
            row = Row("ZeRO++ blog", f"{numel / 1e9:.0f}B, {name}, TFLOPs", published, likely, low, high)
            rows.append(row if each is own else answered(row, plan, own, at, zeropp / stock))
    return rows


def bagua() -> list[Row]:
    ddp = plan_of(BERT_LARGE, 16, 8, "ddp", LoCo(), itemsize=4)
    stock, bytegrad = uncompressed(ddp, 4), plan_of(BERT_LARGE, 16, 8, "ddp", QSGD(bits=8), itemsize=4)
    steps = 2580 / situation(1, 0.0).step(stock).seconds
    compute = 86 / steps
    rows = []
    ddp_s = {1: 2580, 2: 1290, 4: 645, 8: 325, 16: 165, 100: 125}
    for name, plan, published in (
        ("DDP", stock, {gbit: seconds for gbit, seconds in ddp_s.items() if gbit > 1}),
        ("ByteGrad", bytegrad, {1: 700, 2: 350, 4: 175, 8: 90}),
    ):
        for gbit, seconds in published.items():
            at = situation(gbit, compute, "nominal")
            what = f"{name}, {gbit} Gbit/s, s per epoch"
            row = Row("Bagua, BERT-Large on SQuAD", what, seconds, *_each(at.predicted(plan), steps))
            gain = ddp_s[gbit] / (seconds if plan is bytegrad else 86)
            rows.append(answered(row, bytegrad, stock, at, gain) if plan is bytegrad or gbit == 100 else row)
    return rows


def answered(row: Row, plan: StepPlan, own: StepPlan, at: Situation, gain: float) -> Row:
    """With the answer that the range of the predicted gain over `own` leads to, and the `gain` that was published."""
    ours, theirs = SetupOption("", "", plan, 0), SetupOption("", "", own, 0)
    return replace(row, answer=gain_of(ours, [theirs], at).answer, gain=gain)


def _each(step: StepTime, times: float) -> tuple[float, float, float]:
    return times * step.seconds, times * step.low, times * step.high


def needed_gbit(seconds_at: Callable[[float], float], seconds: float) -> float:
    """The bandwidth at which a step takes so long."""
    low, high = 1e-3, 1e5
    for _ in range(50):
        middle = (low * high) ** 0.5
        low, high = (low, middle) if seconds_at(middle) <= seconds else (middle, high)
    return high


def streaming_diloco() -> list[Row]:
    rows = []
    for numel, layers, compute, published in (
        (1e9, 24, 0.1, ((86.8, 152.6), (1.4, 6.2), (1.4, 5.2), (1.4, 4.3), (0.4, 0.9))),
        (1e10, 48, 0.8, ((104.8, 222.3), (1.7, 7.5), (1.7, 5.2), (1.7, 3.6), (0.4, 0.9))),
        (1e11, 108, 4.9, ((184.2, 323.8), (3.0, 11.0), (2.4, 6.2), (1.7, 3.6), (0.5, 0.9))),
    ):
        specs = [TensorSpec(f"layer.{at}.weight", (1024, int(numel / layers / 1024))) for at in range(layers)]
        for (name, delay, compressor), gbits in zip(_STREAMED, published, strict=True):
            fragments = 1 if name in ("data-parallel", "DiLoCo") else layers // 3

            def planned(delay: int, fragments: int = fragments, compressor: Compressor = compressor) -> StepPlan:
                outer = DiLoCo(every=100, fragments=fragments, delay=delay)
                return plan_of(specs, 2, 1, "ddp", compressor, itemsize=2, outer=outer)  # noqa: B023

            plan = uncompressed(plan_of(specs, 2, 1, "ddp", compressor, itemsize=2), 2)
            sooner = plan
            if name != "data-parallel":
                plan, sooner = planned(delay), planned(delay + 1)
            for computing, gbit in zip((0.5, 0.8), gbits, strict=True):
                limit = compute / computing
                rows.append(
                    _needed(f"{numel / 1e9:.0f}B, {name}, {computing:.0%}, Gbit/s", gbit, plan, sooner, compute, limit)
                )
    return rows


_STREAMED = (
    ("data-parallel", 0, Dense(dtype="bfloat16")),
    ("DiLoCo", 0, Dense(dtype="bfloat16")),
    ("fragments", 0, Dense(dtype="bfloat16")),
    ("overlapped", 1, Dense(dtype="bfloat16")),
    ("overlapped, 4 bits", 1, LoCo()),
)


def _needed(what: str, gbit: float, plan: StepPlan, sooner: StepPlan, compute_s: float, limit_s: float) -> Row:
    """Of a simulation: its links are exact, and what overlaps is not known."""

    def at(rate: float) -> Situation:
        return situation(rate, compute_s, is_exact=True)

    likely = needed_gbit(lambda rate: at(rate).step(plan).seconds, limit_s)
    low = needed_gbit(lambda rate: at(rate).step(sooner).low, limit_s)
    high = needed_gbit(lambda rate: at(rate).step(plan).high, limit_s)
    return Row("Streaming DiLoCo", what, gbit, likely, low, high, _GRID)


def rows() -> list[Row]:
    return [*one_bit_adam(), *zeropp(), *bagua(), *streaming_diloco()]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path, help="write the rows here")
    arguments = parser.parse_args()
    found = rows()
    columns = f"{'published':>9} {'predicted':>9} {'between':>22} {'ratio':>6}  verdict right"
    print(f"{'source':28} {'what':44} {columns}")
    for row in found:
        mark = ("" if row.within else "   not within 20 %") + ("" if row.inside else "   outside its range")
        figures = f"{row.published:9.4g} {row.predicted:9.4g} {row.low:9.4g} to {row.high:9.4g} {row.ratio:6.2f}"
        verdict = "" if row.right is None else f"  {'yes' if row.right else 'NO'}: {row.answer}, it was {row.gain:.2f}"
        print(f"{row.source:28} {row.what:44} {figures}{verdict}{mark}")
    answers = [row for row in found if row.right is not None]
    wrong = {kind: sum(not row.right for row in answers if row.answer == kind) for kind in ("use", "no")}
    within, inside = sum(row.within for row in found), sum(row.inside for row in found)
    print(f"{within} of {len(found)} within 20 %, {inside} inside their range")
    print(f"{len(answers)} verdicts, {wrong['use']} wrong plain yes, {wrong['no']} wrong plain no")
    if arguments.json is not None:
        lines = [
            asdict(row) | {"ratio": row.ratio, "within": row.within, "inside": row.inside, "right": row.right}
            for row in found
        ]
        arguments.json.write_text(json.dumps(lines, indent=1) + "\n")


if __name__ == "__main__":
    main()
