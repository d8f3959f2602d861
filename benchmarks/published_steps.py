"""Step times that others published, predicted from the inputs that they state; prints a table, or JSON.

    python -m benchmarks.published_steps [--json FILE]

* 1-bit Adam (Tang et al. 2021, arXiv 2102.02888, table 1): BERT-Large, all-reduce of fp16 gradients over a measured
  4.1 Gbit/s.
* ZeRO++ (Wang et al. 2023, arXiv 2306.10209, and its blog): 24 nodes of 16 V100, 100 Gbit/s per node, 1,024 tokens per
  GPU; TFLOPs per GPU. What a V100 computes is not stated: assumed 40 % of its peak. Baseline ZeRO-3 in fp16; ZeRO++
  sends what 8-bit weights kept from forward to backward and 4-bit gradients over two levels send.
* Bagua's benchmark page: BERT-Large on SQuAD, 16 nodes of 8 V100, seconds per epoch. Steps per epoch follow from DDP at
  1 Gbit/s and compute from ByteGrad at 100 Gbit/s; both rows are left out of the comparison.
* Streaming DiLoCo (Douillard et al. 2025, arXiv 2501.18512, table 4): 1, 10 and 100 billion parameters in two places, a
  simulation of its authors that gives the bandwidth at which a step's computing is 50 or 80 % of it; bfloat16 but for
  the last set-up, a round per 100 steps, fragments of 3 layers. Compared is the step at that bandwidth.
"""

from __future__ import annotations

import argparse
import json
from dataclasses import asdict, dataclass
from pathlib import Path

from lowbit_strategy import QSGD, Dense, DiLoCo, LoCo, WeightCode
from lowbit_strategy.methods._base.compressor import Compressor, assign_all
from lowbit_strategy.methods._base.tensor_spec import TensorSpec
from lowbit_strategy.plan.cluster import Cluster, Link
from lowbit_strategy.plan.cost import step_time
from lowbit_strategy.plan.gradients import Layout, Reduced
from lowbit_strategy.plan.models import layers_of, transformer
from lowbit_strategy.plan.plan import Plan, make_plan
from lowbit_strategy.plan.uncompressed import uncompressed
from lowbit_strategy.ranks.ranks import share_of
from lowbit_strategy.ranks.shape import Shape
from lowbit_strategy.ranks.topology import Topology

TOLERANCE = 0.2
LATENCY_S = 50e-6  # assumed everywhere: none states it
BERT_LARGE = [TensorSpec(f"layer.{at}.weight", (1024, 13_134)) for at in range(25)]  # 336 million, in equal parts
V100_FLOPS = 0.4 * 125e12


@dataclass(frozen=True, slots=True)
class Row:
    """One published figure and its prediction."""

    source: str
    what: str
    published: float
    predicted: float

    @property
    def ratio(self) -> float:
        return self.predicted / self.published

    @property
    def within(self) -> bool:
        return abs(self.ratio - 1) <= TOLERANCE


def plan_of(
    specs: list[TensorSpec],
    nodes: int,
    per_node: int,
    layout: Layout,
    compressor: Compressor,
    *,
    itemsize: int,
    outer: DiLoCo | None = None,
) -> Plan:
    topology = Topology((per_node,) * nodes, nodes * per_node)
    two = nodes > 1 and per_node > 1
    share = share_of(0, per_node, nodes * per_node, scatter=layout == "fsdp") if two else None
    parts = [spec.shared(share) for spec in specs]
    modules = layers_of(specs, itemsize)
    reduced = [Reduced(tuple(s.name for s in m.specs), itemsize, name) for name, m in reversed(modules.items())]
    return make_plan(
        parts,
        assign_all(compressor, parts),
        Shape(nodes * per_node, 0, share, topology),
        layout,
        reduced=reduced,
        coding=WeightCode() if layout == "fsdp" else None,
        modules=modules if layout == "fsdp" else None,
        outer=outer,
    )


def cluster(gbit: float) -> Cluster:
    return Cluster(inter_node=Link(LATENCY_S, gbit * 1e9 / 8), intra_node=Link(5e-6, 50e9))


def one_bit_adam() -> list[Row]:
    rows = []
    for nodes, published in ((16, 2.275), (8, 2.173), (4, 2.133), (2, 1.897)):
        plan = uncompressed(plan_of(BERT_LARGE, nodes, 4, "ddp", LoCo(), itemsize=2), 2)
        rows.append(
            Row("1-bit Adam, table 1", f"{nodes} x 4, all-reduce", published, step_time(plan, cluster(4.1), 0).seconds)
        )
    return rows


def zeropp() -> list[Row]:
    rows = []
    for numel, stock, zeropp in ((18e9, 14, 31), (49e9, 11, 22), (138e9, 11, 22)):
        specs = transformer(numel)
        plan = plan_of(specs, 24, 16, "fsdp", LoCo(bits=4), itemsize=2)
        flops = 8 * sum(spec.numel for spec in specs) * 1024  # with recomputation of activations
        for name, each, published in (("ZeRO-3", uncompressed(plan, 2), stock), ("ZeRO++", plan, zeropp)):
            seconds = step_time(each, cluster(100), flops / V100_FLOPS).seconds
            rows.append(Row("ZeRO++ blog", f"{numel / 1e9:.0f}B, {name}, TFLOPs", published, flops / seconds / 1e12))
    return rows


def bagua() -> list[Row]:
    ddp = plan_of(BERT_LARGE, 16, 8, "ddp", LoCo(), itemsize=4)
    stock, bytegrad = uncompressed(ddp, 4), plan_of(BERT_LARGE, 16, 8, "ddp", QSGD(bits=8), itemsize=4)
    steps = 2580 / step_time(stock, cluster(1), 0).seconds
    compute = 86 / steps
    rows = []
    for name, plan, published in (
        ("DDP", stock, {2: 1290, 4: 645, 8: 325, 16: 165, 100: 125}),
        ("ByteGrad", bytegrad, {1: 700, 2: 350, 4: 175, 8: 90}),
    ):
        for gbit, seconds in published.items():
            found = steps * step_time(plan, cluster(gbit), compute).seconds
            rows.append(Row("Bagua, BERT-Large on SQuAD", f"{name}, {gbit} Gbit/s, s per epoch", seconds, found))
    return rows


def streaming_diloco() -> list[Row]:
    bf16 = Dense(dtype="bfloat16")
    rows = []
    for numel, layers, compute, published in (
        (1e9, 24, 0.1, ((86.8, 152.6), (1.4, 6.2), (1.4, 5.2), (1.4, 4.3), (0.4, 0.9))),
        (1e10, 48, 0.8, ((104.8, 222.3), (1.7, 7.5), (1.7, 5.2), (1.7, 3.6), (0.4, 0.9))),
        (1e11, 108, 4.9, ((184.2, 323.8), (3.0, 11.0), (2.4, 6.2), (1.7, 3.6), (0.5, 0.9))),
    ):
        specs = [TensorSpec(f"layer.{at}.weight", (1024, int(numel / layers / 1024))) for at in range(layers)]
        in_turn, travels = DiLoCo(every=100, fragments=layers // 3), DiLoCo(every=100, fragments=layers // 3, delay=1)
        plans = {
            "data-parallel": uncompressed(plan_of(specs, 2, 1, "ddp", bf16, itemsize=2), 2),
            "DiLoCo": plan_of(specs, 2, 1, "ddp", bf16, itemsize=2, outer=DiLoCo(every=100)),
            "fragments": plan_of(specs, 2, 1, "ddp", bf16, itemsize=2, outer=in_turn),
            "overlapped": plan_of(specs, 2, 1, "ddp", bf16, itemsize=2, outer=travels),
            "overlapped, 4 bits": plan_of(specs, 2, 1, "ddp", LoCo(), itemsize=2, outer=travels),
        }
        for (name, plan), gbits in zip(plans.items(), published, strict=True):
            for computing, gbit in zip((0.5, 0.8), gbits, strict=True):
                what = f"{numel / 1e9:.0f}B, {name}, {gbit} Gbit/s, s"
                rows.append(
                    Row("Streaming DiLoCo", what, compute / computing, step_time(plan, cluster(gbit), compute).seconds)
                )
    return rows


def rows() -> list[Row]:
    return [*one_bit_adam(), *zeropp(), *bagua(), *streaming_diloco()]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path, help="write the rows here")
    arguments = parser.parse_args()
    found = rows()
    for row in found:
        mark = "" if row.within else "   not within 20 %"
        print(f"{row.source:28} {row.what:44} {row.published:9.4g} {row.predicted:9.4g} {row.ratio:6.2f}{mark}")
    print(f"{sum(row.within for row in found)} of {len(found)} within 20 %")
    if arguments.json is not None:
        lines = [asdict(row) | {"ratio": row.ratio, "within": row.within} for row in found]
        arguments.json.write_text(json.dumps(lines, indent=1) + "\n")


if __name__ == "__main__":
    main()
