"""Step times that others published, predicted from the inputs that they state; prints a table, or JSON.

    python -m benchmarks.published_steps [--json FILE]

* 1-bit Adam (Tang et al. 2021, arXiv 2102.02888, table 1): BERT-Large, all-reduce of fp16 gradients over a measured
  4.1 Gbit/s.
* ZeRO++ (Wang et al. 2023, arXiv 2306.10209, and its blog): 24 nodes of 16 V100, 100 Gbit/s per node, 1,024 tokens per
  GPU; TFLOPs per GPU. What a V100 computes is not stated: assumed 40 % of its peak. Baseline ZeRO-3 in fp16; ZeRO++
  sends what 8-bit weights kept from forward to backward and 4-bit gradients over two levels send.
* Bagua's benchmark page: BERT-Large on SQuAD, 16 nodes of 8 V100, seconds per epoch. Steps per epoch follow from DDP at
  1 Gbit/s and compute from ByteGrad at 100 Gbit/s; both rows are left out of the comparison.
"""

from __future__ import annotations

import argparse
import json
from dataclasses import asdict, dataclass
from pathlib import Path

from lowbit_strategy import QSGD, LoCo, WeightCode
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
    specs: list[TensorSpec], nodes: int, per_node: int, layout: Layout, compressor: Compressor, *, itemsize: int
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


def rows() -> list[Row]:
    return [*one_bit_adam(), *zeropp(), *bagua()]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path, help="write the rows here")
    arguments = parser.parse_args()
    found = rows()
    for row in found:
        mark = "" if row.within else "   not within 20 %"
        print(f"{row.source:28} {row.what:36} {row.published:9.4g} {row.predicted:9.4g} {row.ratio:6.2f}{mark}")
    print(f"{sum(row.within for row in found)} of {len(found)} within 20 %")
    if arguments.json is not None:
        lines = [asdict(row) | {"ratio": row.ratio, "within": row.within} for row in found]
        arguments.json.write_text(json.dumps(lines, indent=1) + "\n")


if __name__ == "__main__":
    main()
