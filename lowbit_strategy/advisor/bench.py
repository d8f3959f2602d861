"""``lowbit bench``: links and codecs, measured, in a file that ``lowbit advise`` reads.

Alone it measures every codec on this device. Under ``torchrun --no-python lowbit bench`` it measures the links between
all ranks, and the codecs that ``lowbit advise`` compares.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Annotated, Any

import typer
from rich import box
from rich.console import Console
from rich.progress import Progress
from rich.table import Table

_SLOW = {"exdyna", "partition", "warmup"}  # presets that code like a different one, or need a whole model


def bench(
    out: Annotated[Path, typer.Option(help="The file to write.")] = Path("lowbit-bench.json"),
    cpu: Annotated[bool, typer.Option("--cpu", help="Measure on the CPU, with gloo, although there is a GPU.")] = False,
) -> None:
    """Measure links and codecs, for lowbit advise --bench, in two minutes: over long ways with fewer sizes."""
    import torch
    import torch.distributed as dist

    from lowbit_strategy.advisor.advice import COMPARED
    from lowbit_strategy.advisor.measured import measure
    from lowbit_strategy.methods.registry import PRESETS

    rank, world_size = int(os.environ.get("RANK", "0")), int(os.environ.get("WORLD_SIZE", "1"))
    device = torch.device("cpu")
    if torch.cuda.is_available() and not cpu:
        device = torch.device("cuda", int(os.environ.get("LOCAL_RANK", "0")))
        torch.cuda.set_device(device)
    if world_size > 1:
        dist.init_process_group("gloo" if device.type == "cpu" else "nccl")
    presets = sorted(COMPARED if world_size > 1 else PRESETS.keys() - _SLOW)  # measuring links takes long enough
    try:
        with torch.no_grad(), Progress(console=Console(stderr=True), disable=rank > 0, transient=True) as progress:
            coding = progress.add_task("codecs, then links", total=len(presets))
            measured = measure(presets, device, lambda: progress.advance(coding))
    finally:
        if dist.is_initialized():
            dist.destroy_process_group()
    if rank == 0:
        measured.write(out)
        _show(measured)
        print(f"written to {out}: lowbit advise --bench {out} --params 7e9 --compute 0.9s")


def _show(measured: Any) -> None:
    console, cluster = Console(), measured.cluster
    links = Table(box=box.SIMPLE, title=f"links, {measured.nodes} x {measured.ranks_per_node} ranks")
    for name in ("link", "latency, ms", "MB/s"):
        links.add_column(name, justify="left" if name == "link" else "right")
    for what, link, number in (
        ("between nodes", cluster.inter_node, measured.nodes),
        ("inside a node", cluster.intra_node, measured.ranks_per_node),
    ):
        if number == 1:
            continue
        for kind, found in (("all at once", link), ("in a ring", link.ring)):
            links.add_row(
                f"{what}, {kind}",
                f"{1e3 * found.latency_s:.3g} ± {found.latency_spread:.0%}",
                f"{found.nbytes_per_s / 1e6:,.0f} ± {found.rate_spread:.0%}",
            )
    if links.row_count:
        console.print(links)
    codecs = Table(box=box.SIMPLE, title="one hop, encoded and decoded")
    codecs.add_column("preset")
    codecs.add_column("million elements/s", justify="right")
    codecs.add_column("ms per bucket", justify="right")
    for name, coding in sorted(cluster.codings.items(), key=lambda item: -item[1].numel_per_s):
        rate = f"{coding.numel_per_s / 1e6:,.0f} ± {coding.spread:.0%}"
        codecs.add_row(name, rate, f"{1e3 * coding.bucket_s:.2g}")
    console.print(codecs)
    console.print("±: by how much measurements of the same figure differ")
