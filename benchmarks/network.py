"""What compressed synchronization saves on slow links: emulated hosts of one or several ranks, bytes counted between.

    sudo .venv/bin/python -m benchmarks.network --mode ddp-step --rate 200mbit,1gbit --variants ddp,loco_ddp

Every host is a network namespace behind a rate-limited link, and runs what several machines would run: torchrun, one
node each, a Lightning script with ``Trainer(num_nodes=...)``. Modes:

* ``ddp-step``: step times of a transformer of 9.6M parameters; communication is the step less the same step without
  synchronization.
* ``fsdp-step``: the same under FSDP2, weights included: Lightning's own in float32 and in bfloat16, `loco_fsdp`, and
  `loco_fsdp` with weights sent in other ways (``loco_fsdp:delta4``).
* ``outer-step``: the same with local steps, whose seconds and bytes are means over whole rounds.
* ``fsdp-reduce-scatter``: the gradient reduce-scatters of a step under FSDP2.
* ``hsdp-step``: step times of the same model, sharded inside a host and replicated between hosts, against the step
  without synchronization between hosts. Give ``--ranks-per-host``.
* ``collective``: one all-reduce and one reduce-scatter of N elements, outside any framework.

With ``--delay 75ms`` links are far: a program holds every packet for so long, one way, and hosts are set up for it.
What a ping and one TCP stream get is printed with each run. ``--loss 0.01`` loses packets besides.

A variant is a strategy's name; ``loco_ddp:flat`` has one level of ranks, ``loco1_ddp:all`` no high precision for
embeddings and heads, ``loco_ddp:bucket4`` DDP's buckets of 4 MB.

Times are medians over steps, and comparable within one run only.
"""

from __future__ import annotations

import argparse
import functools
import json
import os
import platform
import signal
import statistics
import sys
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch

from benchmarks.runs import show as show_table
from benchmarks.runs import table_of
from testing.hosts.namespaces import SlowNetwork, bits_per_second, why_not
from testing.hosts.torchrun import run_on_hosts

SCRIPTS = Path(__file__).parent / "slow_links"
NO_SYNC = "no-sync"
INSIDE_HOST = "inside-host"


@dataclass(frozen=True, kw_only=True, slots=True)
class Mode:
    """A script for the hosts, what it compares by default, and how often a gradient element crosses the network."""

    script: str
    variants: tuple[str, ...]
    baseline: str
    hops: int
    mean: bool = False  # of all steps, in the place of the median: rounds are among them


MODES = {
    "ddp-step": Mode(script="ddp_step.py", variants=("ddp", "loco_ddp"), baseline="ddp", hops=2),
    "fsdp-step": Mode(
        script="fsdp_step.py",
        variants=("fsdp2", "fsdp2-bf16", "loco_fsdp", "loco_fsdp:delta4"),
        baseline="fsdp2",
        hops=3,  # FSDP2 gathers weights twice and reduces gradients once
    ),
    "outer-step": Mode(
        script="ddp_step.py",
        variants=("ddp", "loco_ddp", "diloco_ddp", "streamingdiloco_ddp"),
        baseline="ddp",
        hops=2,
        mean=True,
    ),
    "fsdp-reduce-scatter": Mode(
        script="fsdp_reduce_scatter.py", variants=("fsdp2", "loco_fsdp"), baseline="fsdp2", hops=1
    ),
    "hsdp-step": Mode(script="ddp_step.py", variants=("dense_hsdp", "loco_hsdp"), baseline=INSIDE_HOST, hops=2),
    "collective": Mode(script="collective.py", variants=("fp32", "loco"), baseline="fp32", hops=2),
}


@dataclass(frozen=True, kw_only=True, slots=True)
class Row:
    """One variant at one rate.

    Args:
        seconds: Of a step (ddp-step), of a step's reduce-scatters, or of one collective: the ranks' mean, median over
            steps.
        communication_s: ddp-step: `seconds` less those without synchronization. Otherwise `seconds`.
        speedup: The baseline's communication over this one's.
        step_speedup: The baseline's `seconds` over this one's.
        limit_s: What the link allows: the step without synchronization, its bytes at the link's rate, and two messages
            one after the other, each as long as the delay. None: the link has no limit, or steps are not measured.
        sent_nbytes: On the interface of one host in one step, headers and acknowledgements included.
        bits_per_element_hop: `sent_nbytes` over what an ideal ring of H hosts moves: (H - 1) / H of the elements per
            hop.
    """

    mode: str
    rate: str
    variant: str
    seconds: float
    communication_s: float
    speedup: float | None
    step_speedup: float
    limit_s: float | None
    sent_nbytes: float
    bits_per_element_hop: float


def parse_arguments(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--mode", choices=MODES, default="ddp-step")
    parser.add_argument("--rate", default="200mbit,1gbit", help="rates as tc writes them, with commas; none: no limit")
    parser.add_argument("--delay", type=_seconds, default=0.0, help="of every packet, one way: 75ms")
    parser.add_argument("--loss", type=float, default=0.0, help="share of the packets that are lost: 0.01")
    parser.add_argument(
        "--host-setting",
        action="append",
        default=[],
        metavar="NAME=VALUE",
        help="of the hosts' kernels, where links are far: net.ipv4.tcp_congestion_control=reno",
    )
    parser.add_argument("--variants", help="strategies or compressors, with commas; the mode's baseline is added")
    parser.add_argument("--baseline", help="the variant that others are compared with, in the place of the mode's")
    parser.add_argument("--world-size", "--hosts", type=int, default=4, help="how many hosts")
    parser.add_argument("--ranks-per-host", type=int, default=1)
    parser.add_argument("--rounds", type=int, default=2, help="how often the variants take turns")
    parser.add_argument("--steps", type=int, default=6, help="measured steps of a variant's turn")
    parser.add_argument("--warmup-steps", type=int, default=2, help="unmeasured steps before them")
    parser.add_argument("--width", type=int, default=256)
    parser.add_argument("--depth", type=int, default=12)
    parser.add_argument("--context", type=int, default=64)
    parser.add_argument("--batch-size", type=int, default=1)
    parser.add_argument("--numel", type=int, default=9_597_440, help="elements of a collective")
    parser.add_argument("--timeout", type=float, default=900, help="seconds for all variants at one rate")
    parser.add_argument("--json", type=Path, help="write the figures here")
    options = parser.parse_args(arguments)
    if (
        options.warmup_steps < 1
        or options.steps < 1
        or options.rounds < 1
        or options.world_size < 2
        or options.ranks_per_host < 1
    ):
        parser.error("--warmup-steps, --steps, --rounds and --ranks-per-host must be at least 1, --hosts at least 2")
    options.baseline = options.baseline or MODES[options.mode].baseline
    return options


def _seconds(text: str) -> float:
    """Of a time as ``75ms`` or ``0.5s``."""
    for unit, factor in (("ms", 1e-3), ("s", 1.0)):
        if text.endswith(unit):
            return float(text.removesuffix(unit)) * factor
    raise ValueError(text)


def variants_of(options: argparse.Namespace) -> list[str]:
    """What the hosts run, in order: the baselines first, then what was asked for."""
    mode = MODES[options.mode]
    named = options.variants.split(",") if options.variants else list(mode.variants)
    ordered = list(dict.fromkeys([options.baseline, *named]))
    if options.mode in ("ddp-step", "fsdp-step", "outer-step"):
        return [NO_SYNC, *ordered]
    if options.mode == "collective":
        return [f"{operation}/{name}" for operation in ("all-reduce", "reduce-scatter") for name in ordered]
    return ordered


def host_arguments(options: argparse.Namespace) -> list[str]:
    names = ("rounds", "steps", "warmup_steps", "width", "depth", "context", "batch_size", "numel")
    pairs = ((f"--{name.replace('_', '-')}", str(getattr(options, name))) for name in names)
    return [*(part for pair in pairs for part in pair), "--variants", *variants_of(options)]


def seconds_of(reports: Sequence[Any], variant: str, *, mean: bool = False) -> float:
    by_step = zip(*(report[variant]["times_s"] for report in reports), strict=True)
    each = [statistics.mean(times) for times in by_step]
    return statistics.mean(each) if mean else statistics.median(each)


def limit_of(rate: str, sent_nbytes: float, without_s: float, delay_s: float = 0.0) -> float | None:
    """Seconds of a step on a link that does nothing but carry its bytes, in two messages one after the other.

    Args:
        rate: As tc writes it, or ``none``.
        sent_nbytes: In a step.
        without_s: Of a step that sends nothing.
        delay_s: One way.
    """
    if rate == "none" or not without_s:
        return None
    return without_s + 8 * sent_nbytes / bits_per_second(rate) + 2 * delay_s


def rows_of(reports: Sequence[Any], rate: str, options: argparse.Namespace) -> list[Row]:
    mode, world_size = MODES[options.mode], len(reports)
    seconds_in = functools.partial(seconds_of, reports, mean=mode.mean)
    without = seconds_in(NO_SYNC) if NO_SYNC in reports[0] else 0.0
    alone = seconds_in(INSIDE_HOST) if INSIDE_HOST in reports[0] else without
    rows = []
    for variant in reports[0]:
        operation, _, _ = variant.rpartition("/")
        hops = 1 if operation == "reduce-scatter" else mode.hops
        baseline = f"{operation}/{options.baseline}" if operation else options.baseline
        seconds = seconds_in(variant)
        sent = statistics.mean(n for report in reports for n in report[variant]["sent_nbytes"])
        communication = seconds - without
        elements = hops * (world_size - 1) / world_size * reports[0][variant]["numel"]
        speedup = (seconds_in(baseline) - without) / communication if communication > 0 else None
        rows.append(
            Row(
                mode=options.mode,
                rate=rate,
                variant=variant,
                seconds=seconds,
                communication_s=communication,
                speedup=speedup,
                step_speedup=seconds_of(reports, baseline) / seconds,
                limit_s=None if variant in (NO_SYNC, INSIDE_HOST) else limit_of(rate, sent, alone, options.delay),
                sent_nbytes=sent,
                bits_per_element_hop=8 * sent / elements,
            )
        )
    return rows


def show(rows: Sequence[Row], options: argparse.Namespace) -> None:
    far = f", {1e3 * options.delay:g} ms one way" if options.delay else ""
    lossy = f", {options.loss:g} of packets lost" if options.loss else ""
    title = f"{options.mode}, {options.world_size} hosts, {options.ranks_per_host} ranks each{far}{lossy}"
    figures = (
        "seconds",
        "link's limit",
        "step faster",
        "communication",
        "faster",
        "MB sent per host",
        "bits/element/hop",
    )
    cells = (
        (
            row.rate,
            row.variant,
            f"{row.seconds:.3f}",
            "" if row.limit_s is None else f"{row.limit_s:.3f}",
            f"{row.step_speedup:.2f}",
            f"{row.communication_s:.3f}",
            "" if row.speedup is None else f"{row.speedup:.2f}",
            f"{row.sent_nbytes / 1e6:.2f}",
            f"{row.bits_per_element_hop:.2f}",
        )
        for row in rows
    )
    show_table(table_of(title, ("link", "variant"), figures, cells), width=110)


def describe_machine() -> dict[str, Any]:
    """What the times depend on; says so if the machine is busy with something else."""
    cpus, load = os.cpu_count() or 1, os.getloadavg()[0]
    if load > 0.25 * cpus:
        message = f"warning: other programs keep this machine busy (load {load:.1f} on {cpus} cores): times will suffer"
        print(message, file=sys.stderr)
    return {"cpus": cpus, "load_before": load, "python": platform.python_version(), "torch": torch.__version__}


def show_links(links: Mapping[str, Any]) -> None:
    """What far links have given to programs that are not ours."""
    for rate, link in links.items():
        probed, packets = link["probe"], link["packets"]
        print(
            f"{rate}: ping {1e3 * probed['ping_s']:.1f} ms, 1.2 MB after a second of silence and an answer"
            f" {1e3 * probed['message_s']:.0f} ms, one TCP stream {probed['stream_bps'] / 1e6:.0f} Mbit/s in"
            f" 5 s, {probed['settled_bps'] / 1e6:.0f} in the second half. Of {packets['packets']} packets"
            f" {packets['dropped']} found a queue full, {packets['lost']} were lost; late by"
            f" {1e3 * packets['latest_s']:.1f} ms at most"
        )


def write_json(
    path: Path,
    rows: Sequence[Row],
    samples: dict[str, Any],
    links: Mapping[str, Any],
    machine: dict[str, Any],
    options: argparse.Namespace,
) -> None:
    settings = {name: value for name, value in vars(options).items() if name != "json"}
    content = {
        "settings": settings,
        "machine": machine,
        "links": links,
        "rows": [asdict(row) for row in rows],
        "samples": samples,
    }
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(content, indent=1) + "\n")


def main() -> int:
    options = parse_arguments()
    if (reason := why_not()) is not None:
        print(f"benchmarks/network.py cannot run here: {reason}", file=sys.stderr)
        return 2
    for number in (signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, lambda number, frame: sys.exit(128 + number))  # so that the network is taken down
    machine = describe_machine()
    rows: list[Row] = []
    samples: dict[str, Any] = {}
    links: dict[str, Any] = {}
    settings = dict(setting.split("=", 1) for setting in options.host_setting)
    with SlowNetwork(
        options.world_size,
        delay_s=options.delay,
        loss=options.loss,
        settings=settings,
        ranks_per_host=options.ranks_per_host,
    ) as network:
        for rate in options.rate.split(","):
            limit = None if rate == "none" else rate
            network.set_rate(limit)
            probed = network.probe() if network.is_far else {}
            print(f"{options.mode} at {rate}: {', '.join(variants_of(options))} ...", file=sys.stderr, flush=True)
            script = SCRIPTS / MODES[options.mode].script
            reports = run_on_hosts(
                network, script, host_arguments(options), timeout=options.timeout, ranks_per_host=options.ranks_per_host
            )
            rows += rows_of(reports, rate, options)
            samples[rate] = reports
            if network.is_far:
                links[rate] = {"probe": probed, "packets": network.set_rate(limit)}
    show(rows, options)
    show_links(links)
    if options.json is not None:
        write_json(options.json, rows, samples, links, machine, options)
    return 0


if __name__ == "__main__":
    sys.exit(main())
