"""What `lowbit bench` has measured, in a file that `lowbit advise` reads, and what of it a prediction needs."""

from __future__ import annotations

import json
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import asdict, astuple, dataclass, field
from pathlib import Path
from typing import Literal

from lowbit_strategy.advisor.cluster import ANY_RATE, Cluster, Coding, Link, Rings, Work, check_finite
from lowbit_strategy.options.conversion import convert
from lowbit_strategy.version import __version__

FORMAT = 5
PairLevel = Literal["intra-node", "inter-node"]
_OUTLIER = 4.0  # times slower than most of its level: somebody should look at that link


@dataclass(frozen=True, slots=True)
class Pair:
    """Two ranks, all others being quiet.

    Args:
        first, second: The ranks.
        level: ``intra-node`` or ``inter-node``.
        latency_s: One way.
        nbytes_per_s: Of one stream.
        streams_nbytes_per_s: Of four at a time.
        latency_spread, rate_spread: By which part of it measurements of it differ.
    """

    first: int
    second: int
    level: PairLevel
    latency_s: float
    nbytes_per_s: float
    streams_nbytes_per_s: float
    latency_spread: float = 0.0
    rate_spread: float = 0.0

    def __post_init__(self) -> None:
        check_finite(self, least=0.0, latency_s=self.latency_s)
        check_finite(self, least=1.0, nbytes_per_s=self.nbytes_per_s, streams_nbytes_per_s=self.streams_nbytes_per_s)


@dataclass(frozen=True, slots=True)
class Machine:
    """One that took part: its name, its device, how many CPU cores it has."""

    host: str
    device: str
    cpus: int


@dataclass(frozen=True, kw_only=True, slots=True)
class Bench:
    """Measurements.

    Args:
        version: Of this package.
        machines: That took part, each once.
        nodes: How many there are.
        ranks_per_node: On each.
        backend: Of torch.distributed; empty where one rank was alone.
        levels: Links when all ranks exchange at once, by ``intra-node`` and ``inter-node``; the latter a node's.
        pairs: One by one.
        far: Whether messages between machines take so long that all are to travel at once.
        rings: Links as the framework's own collectives find them; None: there is one rank.
        cpu_oversubscription: See `Cluster`.
        codings: How fast a rank encodes and decodes one hop, by the names of presets.
        memcpy_nbytes_per_s: Read and written once each on this device.
    """

    version: str
    machines: tuple[Machine, ...]
    nodes: int = 1
    ranks_per_node: int = 1
    backend: str = ""
    levels: Mapping[str, Link] = field(default_factory=dict)
    pairs: tuple[Pair, ...] = ()
    far: bool = False
    rings: Rings | None = None
    cpu_oversubscription: float | None = None
    codings: Mapping[str, Coding]
    memcpy_nbytes_per_s: float

    def __post_init__(self) -> None:
        check_finite(self, least=1.0, memcpy_nbytes_per_s=self.memcpy_nbytes_per_s)
        if min(self.nodes, self.ranks_per_node) < 1:
            raise ValueError(f"nodes and ranks_per_node must be at least 1, got {self.nodes} and {self.ranks_per_node}")
        if not self.levels.keys() <= {"inter-node", "intra-node"}:
            raise ValueError(f"levels are inter-node and intra-node, got {', '.join(self.levels)}")
        if "loco" not in self.codings:
            raise ValueError("codings must have loco")

    def cluster(self) -> Cluster:
        """What predictions need. Messages on a level that was not measured take the work of the other's."""
        work = next((link.work for link in self.levels.values()), None)
        inside = self.levels.get("intra-node", Link(0.0, ANY_RATE, work=work))
        return Cluster(
            inter_node=self.levels.get("inter-node", inside),
            intra_node=inside,
            gloo=self.backend == "gloo",
            cpu_oversubscription=self.cpu_oversubscription,
            rings=self.rings,
            codings=self.codings,
            memcpy_nbytes_per_s=self.memcpy_nbytes_per_s,
        ).coding_as("loco")

    def outlier_links(self) -> list[str]:
        """A sentence for each pair whose link is far slower than most of its level."""
        found = []
        for level in ("intra-node", "inter-node"):
            pairs = [pair for pair in self.pairs if pair.level == level]
            if len(pairs) < 3:
                continue
            rate = statistics.median(pair.nbytes_per_s for pair in pairs)
            latency = statistics.median(pair.latency_s for pair in pairs)
            for pair in pairs:
                if pair.nbytes_per_s * _OUTLIER < rate or pair.latency_s > _OUTLIER * latency + 1e-3:
                    found.append(
                        f"ranks {pair.first} and {pair.second} ({level}) reach each other at"
                        f" {pair.nbytes_per_s / 1e6:.3g} MB/s in {1e3 * pair.latency_s:.3g} ms, most pairs at"
                        f" {rate / 1e6:.3g} MB/s in {1e3 * latency:.3g} ms: all ranks wait for this pair, look at its"
                        " link"
                    )
        return found

    def write(self, path: Path) -> None:
        path.write_text(json.dumps({"format": FORMAT, **asdict(self)}, indent=1) + "\n")


def read_bench(path: Path, here: Machine) -> Bench:
    """Args:
    path: Written by `lowbit bench`.
    here: The machine that asks.

    Raises:
        ValueError: There is no such file, or it is none of this kind, of another version, or of other machines.
    """
    try:
        content = json.loads(path.read_text())
    except OSError as error:
        raise ValueError(f"{path} cannot be read ({error.strerror}): lowbit bench --out {path} writes one") from None
    except ValueError:
        content = None
    foreign = ValueError(f"{path} was not written by this version's lowbit bench: measure again")
    if not isinstance(content, dict) or content.pop("format", None) != FORMAT or "version" not in content:
        raise foreign
    if content["version"] != __version__:
        raise ValueError(
            f"{path} was measured with lowbit_strategy {content['version']}, this is {__version__}, whose codecs may"
            " be of another speed: measure again with lowbit bench"
        )
    try:
        bench = convert(content, Bench, "it")
    except ValueError as error:
        raise ValueError(f"{path} is damaged: {error}: measure again with lowbit bench") from None
    if here not in bench.machines:
        measured = ", ".join(f"{each.host} ({each.device}, {each.cpus} cores)" for each in bench.machines[:3])
        raise ValueError(
            f"{path} was measured on {measured}, and this is {here.host} ({here.device}, {here.cpus} cores): measure"
            " here with lowbit bench, or give figures with --link, --latency and --compute"
        )
    return bench


def slowest(links: Sequence[Link]) -> Link:
    """Of all ranks': the slowest is waited for; of the work of all the mean counts."""
    sizes = zip(*(link.measured for link in links), strict=False)
    measured = tuple((points[0][0], max(seconds for _, seconds in points)) for points in sizes)
    works = [astuple(link.work) for link in links if link.work is not None]
    work = Work(*map(statistics.mean, zip(*works, strict=True))) if works else None
    return Link(
        max(link.latency_s for link in links),
        min(link.nbytes_per_s for link in links),
        measured,
        work,
        latency_spread=max(link.latency_spread for link in links),
        rate_spread=max(link.rate_spread for link in links),
    )


def slowest_codings(codings: Sequence[Mapping[str, Coding]]) -> dict[str, Coding]:
    """Of all ranks', which have measured the same presets."""
    return {
        name: Coding(
            min(each[name].numel_per_s for each in codings),
            max(each[name].bucket_s for each in codings),
            max(each[name].spread for each in codings),
        )
        for name in codings[0]
    }
