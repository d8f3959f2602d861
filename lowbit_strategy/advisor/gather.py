"""From what users say, what `lowbit bench` measured and what a machine's maker publishes to a `Situation`."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

from lowbit_strategy.advisor import units
from lowbit_strategy.advisor.bench_file import Bench
from lowbit_strategy.advisor.cluster import Cluster, Link
from lowbit_strategy.advisor.inputs import Figure, Situation, Source, What, is_far_link
from lowbit_strategy.advisor.machines import Machine, find_machine
from lowbit_strategy.ranks.topology import FAR_S

LINK, LATENCY, INSIDE, MEMORY = "10gbit", "0.1ms", "50GB/s", "80GB"  # where nobody says
# Bytes in flight between two nodes, where nobody says: those of a connection per 100 Gbit/s. NCCL keeps a buffer of
# NCCL_BUFFSIZE, 4 MiB, in flight per channel; a TCP connection half of net.ipv4.tcp_rmem's largest, 3 MiB of 6.
WINDOW_MB, _PER_CONNECTION = 4, "100gbit"
_INSIDE_LATENCY_S = 5e-6
_ENCODED_PER_S, _BUCKET_S = 1e11, 4e-4  # elements per hop, and per bucket; of a GPU: an H100 was measured at 2.3e11
_ENCODED_PER_S_ON_CPU = 1e9  # a core or two
_TOKENS, _FLOPS, _FLOPS_ON_CPU = 4096, 2e14, 2e11  # of a step where nobody says how long it takes


@dataclass(frozen=True, slots=True)
class Said:
    """What a user gives, as text; None: nothing.

    Args:
        machine: A name of the table, or ``here``.
        link: Bandwidth between nodes.
        latency: Between nodes, one way.
        inside: Bandwidth of a GPU inside its node.
        window: Bytes in flight between two nodes.
        compute: A step without communication.
        memory: Of a device.
    """

    machine: str | None = None
    link: str | None = None
    latency: str | None = None
    inside: str | None = None
    window: str | None = None
    compute: str | None = None
    memory: str | None = None

    def known_machine(self) -> Machine | None:
        """Raises:
        ValueError: There is none of that name.
        """
        return None if self.machine is None else find_machine(self.machine)


def gather(
    said: Said,
    numel: int,
    measured: Bench | None = None,
    machine: Machine | None = None,
    *,
    on_cpu: bool = False,
) -> Situation:
    """What was given goes before what was measured, that before what a machine's maker says, and that before what is
    assumed.

    Args:
        said: By the user.
        numel: Parameters, from which computing is assumed.
        measured: By `lowbit bench`.
        machine: Of the table.
        on_cpu: Ranks compute on CPUs.

    Raises:
        ValueError: A quantity is none.
    """
    flops = _FLOPS_ON_CPU if on_cpu else _FLOPS if machine is None else machine.flops
    compute = _either("compute", said.compute, None, None, f"{6 * numel * _TOKENS / flops:.3g}s", units.duration)
    if said.compute is None and machine is not None:
        compute = Figure.of("compute", compute.text, compute.value, "nominal")
    cluster, figures = cluster_of(said, measured, machine, on_cpu=on_cpu)
    source: Source = "assumed" if said.memory is None else "given"
    memory = units.size(said.memory or MEMORY)
    if machine is not None and said.memory is None:
        source, memory = "nominal", machine.memory_nbytes
    return Situation(cluster, compute.value, (*figures, compute), memory, source)


def cluster_of(
    said: Said, measured: Bench | None = None, machine: Machine | None = None, *, on_cpu: bool = False
) -> tuple[Cluster, list[Figure]]:
    """The links and the speed of coding, and the figures of them."""
    levels = {} if measured is None else measured.levels
    far, near = levels.get("inter-node"), levels.get("intra-node")
    link = _either(
        "link",
        said.link,
        None if far is None else (far.nbytes_per_s, far),
        None if machine is None or machine.link_nbytes_per_s is None else machine.link_nbytes_per_s,
        LINK,
        units.rate,
    )
    latency = _either(
        "latency",
        said.latency,
        None if far is None else (far.latency_s, far),
        None if machine is None else machine.latency_s,
        LATENCY,
        units.duration,
    )
    inside = _either(
        "inside",
        said.inside,
        None if near is None else (near.nbytes_per_s, near),
        None if machine is None else machine.inside_nbytes_per_s,
        INSIDE,
        units.rate,
    )
    connections = max(1, round(link.value / units.rate(_PER_CONNECTION)))
    window = _either("window", said.window, None, None, f"{connections * WINDOW_MB}MB", units.size)
    cluster = _cluster(measured, on_cpu=on_cpu)
    as_measured = link.source == latency.source == "measured"
    if not as_measured:
        given = Link(latency.value, link.value, window_nbytes=window.value)
        cluster = replace(cluster, inter_node=replace(given, work=cluster.inter_node.work), rings=None)
        cluster = replace(
            cluster,
            latency_multiplier=cluster.latency_multiplier
            if latency.source == "measured"
            else _latency_multiplier(on_cpu=on_cpu),
        )
    if inside.source != "measured":
        work = cluster.intra_node.work
        cluster = replace(cluster, intra_node=Link(_INSIDE_LATENCY_S, inside.value, work=work), rings=None)
    coding = Figure.of(
        "coding",
        coding_of(cluster),
        cluster.encoded_per_s or 0.0,
        "assumed" if measured is None else "measured",
    )
    return cluster, [link, latency, inside, *([] if as_measured else [window]), coding]


def _cluster(measured: Bench | None, *, on_cpu: bool) -> Cluster:
    """As measured, or of links that are put in later."""
    coded = _ENCODED_PER_S_ON_CPU if on_cpu else _ENCODED_PER_S
    if measured is not None:
        cluster = measured.cluster()
        return replace(cluster, encoded_per_s=cluster.encoded_per_s or coded)
    nowhere = Link(0.0, 1.0)
    return Cluster(
        inter_node=nowhere,
        intra_node=nowhere,
        encoded_per_s=coded,
        bucket_s=0.0 if on_cpu else _BUCKET_S,
        latency_multiplier=_latency_multiplier(on_cpu=on_cpu),
        gloo=on_cpu,
    )


def _latency_multiplier(*, on_cpu: bool) -> int:
    return 2 if on_cpu else 1  # of gloo's: a sender first hears that the receiver waits


def _either(
    what: What,
    said: str | None,
    measured: tuple[float, Link] | None,
    nominal: float | None,
    assumed: str,
    parse: Any,
) -> Figure:
    """The figure of the best source available. `measured`: its value, and the link that it is a figure of."""
    if said is not None:
        return Figure.of(what, said, parse(said), "given")
    if measured is not None:
        value, link = measured
        spread = link.latency_spread if what == "latency" else link.rate_spread
        return Figure.of(what, _text(what, value), value, "measured", far=is_far_link(link.latency_s), spread=spread)
    if nominal is not None:
        return Figure.of(what, _text(what, nominal), nominal, "nominal")
    return Figure.of(what, assumed, parse(assumed), "assumed")


def _text(what: What, value: float) -> str:
    if what == "latency":
        return f"{1e3 * value:.3g} ms"
    return f"{8 * value / 1e9:.4g} Gbit/s" if what == "link" else f"{value / 1e9:.3g} GB/s"


def coding_of(cluster: Cluster) -> str:
    """How fast devices code, in words."""
    each = f" and {1e3 * cluster.bucket_s:.2g} ms per bucket" if cluster.bucket_s else ""
    return f"{cluster.encoded_per_s:.2g} elements/s encoded{each}"


def is_far(latency: str | None) -> bool:
    """Whether messages of ranks on CPUs all travel at once."""
    return 2 * units.duration(latency or LATENCY) >= FAR_S
