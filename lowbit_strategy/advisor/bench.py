"""``lowbit bench``: links and codecs, measured, in a file that ``lowbit advise`` reads.

Alone it measures every codec on this device. Under ``torchrun --no-python lowbit bench`` or ``lowbit launch bench`` it
measures the links between all ranks, and the codecs that ``lowbit advise`` compares.
"""

from __future__ import annotations

import os
import platform
from pathlib import Path
from typing import Annotated, Any

import typer
from rich import box
from rich.console import Console
from rich.progress import Progress
from rich.table import Table

_SLOW = {"exdyna", "partition", "warmup"}  # presets that code as another preset does, or need a whole model


def bench(
    out: Annotated[Path, typer.Option(help="The file to write.")] = Path("lowbit-bench.json"),
    cpu: Annotated[bool, typer.Option("--cpu", help="Measure on the CPU, with gloo, although there is a GPU.")] = False,
) -> None:
    """Measure links, codecs and memory, for lowbit advise --bench, in two minutes: over long ways with fewer sizes."""
    import torch
    import torch.distributed as dist

    rank, world_size = int(os.environ.get("RANK", "0")), int(os.environ.get("WORLD_SIZE", "1"))
    device = _device(cpu=cpu)
    if world_size > 1:
        dist.init_process_group("gloo" if device.type == "cpu" else "nccl")
    try:
        with torch.no_grad(), Progress(console=Console(stderr=True), disable=rank > 0, transient=True) as progress:
            measured = _measure(device, world_size, progress)
    finally:
        if dist.is_initialized():
            dist.destroy_process_group()
    if rank == 0:
        measured.write(out)
        _show(measured)
        print(f"written to {out}: lowbit advise --bench {out} --params 7e9 --compute 0.9s")


def this_machine(*, cpu: bool = False) -> Any:
    """As a file of measurements names it."""
    import torch

    from lowbit_strategy.advisor.bench_file import Machine

    device = _device(cpu=cpu)
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else platform.processor() or platform.machine()
    return Machine(platform.node(), name, os.cpu_count() or 1)


def _device(*, cpu: bool) -> Any:
    import torch

    if cpu or not torch.cuda.is_available():
        return torch.device("cpu")
    device = torch.device("cuda", int(os.environ.get("LOCAL_RANK", "0")))
    torch.cuda.set_device(device)
    return device


def _measure(device: Any, world_size: int, progress: Progress) -> Any:
    from lowbit_strategy.advisor.advice import BITS
    from lowbit_strategy.advisor.bench_file import Bench, slowest_codings
    from lowbit_strategy.advisor.clocks import measure_coding, memcpy_nbytes_per_s
    from lowbit_strategy.methods.registry import PRESETS
    from lowbit_strategy.version import __version__

    wanted = set(BITS) if world_size > 1 else PRESETS.keys() - _SLOW  # links take long enough
    presets = {name: PRESETS[name] for name in sorted(wanted)}
    coding = progress.add_task("codecs", total=len(presets))
    coded = {}
    for name, each in presets.items():
        coded[name] = measure_coding(each, device)
        progress.advance(coding)
    copied = memcpy_nbytes_per_s(device)
    everyone: list[Any] = [(this_machine(cpu=device.type == "cpu"), coded, copied)]
    links: dict[str, Any] = {}
    if world_size > 1:
        import torch.distributed as dist

        links = _links(device, world_size, progress)
        everyone *= world_size
        dist.all_gather_object(everyone, everyone[0])
    return Bench(
        version=__version__,
        machines=tuple(dict.fromkeys(each for each, _, _ in everyone)),
        codings=slowest_codings([each for _, each, _ in everyone]),
        memcpy_nbytes_per_s=min(each for _, _, each in everyone),
        **links,
    )


def _links(device: Any, world_size: int, progress: Progress) -> dict[str, Any]:
    """What a `Bench` has of several ranks: all at once, by level, and pairs."""
    import torch.distributed as dist

    from lowbit_strategy.advisor.links import measure_network, slowest_network
    from lowbit_strategy.advisor.pairs import measure_pairs, pairs_to_measure
    from lowbit_strategy.collectives.comm import gathered
    from lowbit_strategy.ranks.ranks import make_ranks
    from lowbit_strategy.ranks.topology import find_topology

    topology = find_topology()
    size = topology.ranks_per_node if topology.obstacle is None else None
    ranks = make_ranks(None, topology, size, device)
    network = slowest_network(gathered(measure_network(ranks, device)))
    far = ranks.peers.is_far
    ranks.destroy()
    levels = {"inter-node": network.inter_node} if topology.num_nodes != 1 else {}
    if topology.num_nodes == 1 or size is not None:
        levels["intra-node"] = network.intra_node
    going = progress.add_task("pairs of ranks", total=len(pairs_to_measure(world_size)))
    pairs = measure_pairs(topology, device, lambda: progress.advance(going))
    per_node = topology.ranks_per_node or 1
    return {
        "nodes": world_size // per_node,
        "ranks_per_node": per_node,
        "backend": str(dist.get_backend()),
        "levels": levels,
        "pairs": tuple(pairs),
        "far": far,
        "rings": network.rings,
        "cpu_oversubscription": network.cpu_oversubscription,
    }


def _link_figures(link: Any) -> tuple[str, str]:
    """Latency and rate of a link or a pair, and by how much measurements of them differ."""
    return (
        f"{1e3 * link.latency_s:.3g} ± {link.latency_spread:.0%}",
        f"{link.nbytes_per_s / 1e6:,.0f} ± {link.rate_spread:.0%}",
    )


def _show(measured: Any) -> None:
    console = Console()
    links = Table(box=box.SIMPLE, title=f"links, {measured.nodes} x {measured.ranks_per_node} ranks")
    for name in ("link", "latency, ms", "MB/s", "MB/s, 4 streams"):
        links.add_column(name, justify="left" if name == "link" else "right")
    for level, link in measured.levels.items():
        links.add_row(f"{level}, all at once", *_link_figures(link), "")
    for pair in measured.pairs[:12]:
        streams = f"{pair.streams_nbytes_per_s / 1e6:,.0f}"
        links.add_row(f"{pair.level}, ranks {pair.first} and {pair.second}", *_link_figures(pair), streams)
    if measured.rings is not None:
        for what, link in (("all ranks", measured.rings.between), ("a node", measured.rings.inside)):
            links.add_row(f"rings of {what}", *_link_figures(link), "")
    if len(measured.pairs) > 12:
        links.add_row(f"and {len(measured.pairs) - 12} more pairs, in the file")
    if measured.levels:
        console.print(links)
    codecs = Table(box=box.SIMPLE, title=f"one hop, encoded and decoded, on {measured.machines[0].device}")
    codecs.add_column("preset")
    codecs.add_column("million elements/s", justify="right")
    codecs.add_column("ms per bucket", justify="right")
    for name, coding in sorted(measured.codings.items(), key=lambda item: -item[1].numel_per_s):
        rate = f"{coding.numel_per_s / 1e6:,.0f} ± {coding.spread:.0%}"
        codecs.add_row(name, rate, f"{1e3 * coding.bucket_s:.2g}")
    codecs.add_row("memcpy, of 4 bytes each", f"{measured.memcpy_nbytes_per_s / 8e6:,.0f}", "")
    console.print(codecs)
    console.print("±: by how much measurements of the same figure differ")
    for sentence in measured.outlier_links():
        console.print(f"[bold]{sentence}[/bold]")


if __name__ == "__main__":
    typer.run(bench)
