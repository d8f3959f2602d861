"""Links and coding speeds as numbers, and the file in which ``lowbit bench`` stores them."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path

from lowbit_strategy.options.conversion import convert
from lowbit_strategy.version import __version__

ANY_RATE = 1e12  # bytes per second: faster than any link
FORMAT = 6  # format of the file
_LEAST = 1e-300  # above 0


def check_finite(owner: object, *, least: float, **values: float) -> None:
    """Raise a ValueError if a value is not a finite number of at least `least`."""
    for name, value in values.items():
        if not (math.isfinite(value) and value >= least):
            bound = "0 or more" if least == 0 else "above 0"
            raise ValueError(f"{type(owner).__name__}.{name} must be a finite number, {bound}, got {value!r}")


@dataclass(frozen=True, slots=True)
class Link:
    """A link between ranks or machines.

    Args:
        latency_s: One-way latency in seconds.
        nbytes_per_s: Bytes per second, for long messages.
        measured: Bytes of messages and the seconds each took beyond the latency, in rising order. Short messages are
            often faster than the rate of long ones suggests. Empty: the rate holds for all.
        ring: The link as seen by the framework's own collectives: in rings, which may be slower than direct messages.
            Latency and bytes are those of one of the consecutive messages that a plan counts. None: the same.
        latency_spread, rate_spread: Relative spread of the measurements.
    """

    latency_s: float
    nbytes_per_s: float
    measured: tuple[tuple[float, float], ...] = ()
    ring: Link | None = None
    latency_spread: float = 0.0
    rate_spread: float = 0.0

    def __post_init__(self) -> None:
        check_finite(self, least=0.0, latency_s=self.latency_s)
        check_finite(self, least=0.0, latency_spread=self.latency_spread, rate_spread=self.rate_spread)
        check_finite(self, least=_LEAST, nbytes_per_s=self.nbytes_per_s)
        for at, point in enumerate(self.measured):
            check_finite(self, least=0.0, **{f"measured[{at}]": min(point)})

    def traveling_s(self, nbytes: float) -> float:
        """Seconds beyond the latency: interpolated between measurements, then by the rate."""
        last = (0.0, 0.0)
        for point in self.measured:
            if nbytes <= point[0]:
                return last[1] + (nbytes - last[0]) / (point[0] - last[0]) * (point[1] - last[1])
            last = point
        return last[1] + (nbytes - last[0]) / self.nbytes_per_s

    def split_s(self, nbytes: float) -> tuple[float, float]:
        """`traveling_s` in two parts: the delay of a lone message compared with the rate, in which others could travel;
        and the seconds for which it keeps the link busy.
        """
        seconds = self.traveling_s(nbytes)
        busy = min(seconds, nbytes / self.nbytes_per_s)
        return seconds - busy, busy

    def shared_by(self, ranks: int) -> Link:
        """The link of a node whose ranks each have this link when all send at once."""
        measured = tuple((ranks * nbytes, seconds) for nbytes, seconds in self.measured)
        return replace(self, nbytes_per_s=min(ANY_RATE, ranks * self.nbytes_per_s), measured=measured)

    def scaled(self, rate: float = 1.0, latency: float = 1.0) -> Link:
        """The link with its rate and latency multiplied by these factors."""
        return replace(
            self,
            latency_s=latency * self.latency_s,
            nbytes_per_s=rate * self.nbytes_per_s,
            measured=tuple((nbytes, seconds / rate) for nbytes, seconds in self.measured),
            ring=None if self.ring is None else self.ring.scaled(rate, latency),
        )


@dataclass(frozen=True, slots=True)
class Coding:
    """A rank's speed of encoding or decoding while all others do the same.

    Args:
        numel_per_s: Elements per second, a hop.
        bucket_s: Seconds for every bucket or module, a hop, however small.
        spread: Fraction by which measurements of the rate differ.
    """

    numel_per_s: float
    bucket_s: float = 0.0
    spread: float = 0.0

    def __post_init__(self) -> None:
        check_finite(self, least=_LEAST, numel_per_s=self.numel_per_s)
        check_finite(self, least=0.0, bucket_s=self.bucket_s)

    def scaled(self, rate: float) -> Coding:
        """The coding with its rate multiplied by `rate`."""
        return replace(self, numel_per_s=rate * self.numel_per_s, bucket_s=self.bucket_s / rate)

    def __str__(self) -> str:
        each = f" and {1e3 * self.bucket_s:.2g} ms per bucket" if self.bucket_s else ""
        return f"{self.numel_per_s:.2g} elements/s encoded{each}"


@dataclass(frozen=True, kw_only=True, slots=True)
class Cluster:
    """The links and coding speeds of a cluster.

    Args:
        inter_node: The link of a node, which its ranks share.
        intra_node: Links of each rank to the others of its node.
        coding: The ranks' coding speed; None: coding takes no time.
        gloo: Whether CPUs compute and gloo sends: no trees where those wait less often than rings, as NCCL has them; an
            uncompressed reduce-scatter sends as much as an all-reduce; and FSDP2 waits for each of its collectives.
        codings: Speeds by the names of presets, for `coding_as`.
    """

    inter_node: Link
    intra_node: Link
    coding: Coding | None = None
    gloo: bool = False
    codings: Mapping[str, Coding] = field(default_factory=dict)

    def scaled(self, *, link: float = 1.0, latency: float = 1.0, inside: float = 1.0, coding: float = 1.0) -> Cluster:
        """The cluster with each figure multiplied: of links between nodes and inside them, of coding."""
        return replace(
            self,
            inter_node=self.inter_node.scaled(link, latency),
            intra_node=self.intra_node.scaled(inside),
            coding=None if self.coding is None else self.coding.scaled(coding),
            codings={name: each.scaled(coding) for name, each in self.codings.items()},
        )

    def coding_as(self, preset: str) -> Cluster:
        """The cluster with the speed of a preset's codecs, if that was measured."""
        return replace(self, coding=self.codings.get(preset, self.coding))


@dataclass(frozen=True, kw_only=True, slots=True)
class Bench:
    """Measurements.

    Args:
        version: Version of this package.
        nodes: Number of nodes; with one, `Cluster.inter_node` is meaningless.
        ranks_per_node: Ranks of each node; with one, `Cluster.intra_node` is meaningless.
        cluster: Links while all ranks send at once, and codecs.
    """

    version: str
    nodes: int = 1
    ranks_per_node: int = 1
    cluster: Cluster

    def __post_init__(self) -> None:
        if min(self.nodes, self.ranks_per_node) < 1:
            raise ValueError(f"nodes and ranks_per_node must be at least 1, got {self.nodes} and {self.ranks_per_node}")
        if "loco" not in self.cluster.codings:
            raise ValueError("codings must have loco")

    def write(self, path: Path) -> None:
        path.write_text(json.dumps({"format": FORMAT, **asdict(self)}, indent=1) + "\n")


def read_bench(path: Path) -> Bench:
    """Read the results of `lowbit bench`.

    Raises:
        ValueError: The file does not exist, is of the wrong kind, or comes from a different version.
    """
    try:
        content = json.loads(path.read_text())
    except OSError as error:
        raise ValueError(f"{path} cannot be read ({error.strerror}): lowbit bench --out {path} writes one") from None
    except ValueError:
        content = None
    if not isinstance(content, dict) or content.pop("format", None) != FORMAT or "version" not in content:
        raise ValueError(f"{path} was not written by this version's lowbit bench: measure again")
    if content["version"] != __version__:
        raise ValueError(
            f"{path} was measured with lowbit_strategy {content['version']}, this is {__version__}, whose codecs may"
            " have another speed: measure again with lowbit bench"
        )
    try:
        return convert(content, Bench, "it")
    except ValueError as error:
        raise ValueError(f"{path} is damaged: {error}: measure again with lowbit bench") from None


def slowest(links: Sequence[Link]) -> Link:
    """The slowest link of all ranks, which the others wait for."""
    sizes = zip(*(link.measured for link in links), strict=False)
    rings = [link.ring for link in links if link.ring is not None]
    return Link(
        max(link.latency_s for link in links),
        min(link.nbytes_per_s for link in links),
        tuple((points[0][0], max(seconds for _, seconds in points)) for points in sizes),
        ring=slowest(rings) if rings else None,
        latency_spread=max(link.latency_spread for link in links),
        rate_spread=max(link.rate_spread for link in links),
    )


def slowest_cluster(found: Sequence[Cluster]) -> Cluster:
    """The slowest of the clusters that the ranks have measured with the same presets."""
    codings = {
        name: Coding(
            min(each.codings[name].numel_per_s for each in found),
            max(each.codings[name].bucket_s for each in found),
            max(each.codings[name].spread for each in found),
        )
        for name in found[0].codings
    }
    return replace(
        found[0],
        inter_node=slowest([each.inter_node for each in found]),
        intra_node=slowest([each.intra_node for each in found]),
        codings=codings,
    )
