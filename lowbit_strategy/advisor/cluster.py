"""What messages travel on and who codes them: links, processors and codecs, in numbers."""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping
from dataclasses import dataclass, field, replace

ANY_RATE = 1e12  # bytes per second: faster than any link


def check_finite(owner: object, *, least: float, **values: float) -> None:
    """Raises:
    ValueError: A value is not a number of at least `least`, or is infinite.
    """
    for name, value in values.items():
        if not (math.isfinite(value) and value >= least):
            bound = "0 or more" if least == 0 else "above 0"
            raise ValueError(f"{type(owner).__name__}.{name} must be a finite number, {bound}, got {value!r}")


_LEAST = 1e-300  # above 0
_MOST_INSIDE = 7.0  # times the latency inside a node, 5 µs: with the software's 30, which may be many times a link's


@dataclass(frozen=True, slots=True)
class Work:
    """What sending takes of the processors that ranks compute on, in seconds by which a step's compute grows.

    Where more ranks compute than there are processors, each second of a processor's time counts as several.

    Args:
        message_s: Of every collective.
        nbyte_s: Of every byte sent, received and added: the more, the slower bytes come, a few at a time.
    """

    message_s: float
    nbyte_s: float

    def __post_init__(self) -> None:
        check_finite(self, least=0.0, message_s=self.message_s, nbyte_s=self.nbyte_s)


@dataclass(frozen=True, slots=True)
class Link:
    """Args:
    latency_s: Seconds from one end to the other.
    nbytes_per_s: Bytes per second, of long messages.
    measured: Bytes of messages and the seconds each took beyond the latency, in rising order. Short messages are often
        faster than the rate of long ones says. Empty: the rate holds for all.
    work: What its messages take of the processors, where ranks have none to spare; None: nothing.
    window_nbytes: Bytes that may be in flight before the first is acknowledged. Over a long way they are the limit: no
        more than a window passes per round trip. None: no limit, or the rate was measured over this way.
    latency_spread, rate_spread: By which part of it measurements of it differ.
    """

    latency_s: float
    nbytes_per_s: float
    measured: tuple[tuple[float, float], ...] = ()
    work: Work | None = None
    window_nbytes: float | None = None
    latency_spread: float = 0.0
    rate_spread: float = 0.0

    def __post_init__(self) -> None:
        check_finite(self, least=0.0, latency_s=self.latency_s)
        check_finite(self, least=0.0, latency_spread=self.latency_spread, rate_spread=self.rate_spread)
        check_finite(self, least=_LEAST, nbytes_per_s=self.nbytes_per_s)
        for at, point in enumerate(self.measured):
            check_finite(self, least=0.0, **{f"measured[{at}]": min(point)})

    @property
    def rate(self) -> float:
        """Bytes per second of a long message: what the link carries, or a window per round trip if that is less."""
        if self.window_nbytes is None or not self.latency_s:
            return self.nbytes_per_s
        return min(self.nbytes_per_s, self.window_nbytes / (2 * self.latency_s))

    def traveling_s(self, nbytes: float) -> float:
        """Seconds beyond the latency: straight lines between what was measured, then the rate."""
        last = (0.0, 0.0)
        for point in self.measured:
            if nbytes <= point[0]:
                return last[1] + (nbytes - last[0]) / (point[0] - last[0]) * (point[1] - last[1])
            last = point
        return last[1] + (nbytes - last[0]) / self.rate

    def split_s(self, nbytes: float) -> tuple[float, float]:
        """`traveling_s` in two: by how much a message alone is slower than the rate, in which others could travel; and
        the seconds for which it keeps the link busy.
        """
        seconds = self.traveling_s(nbytes)
        busy = min(seconds, nbytes / self.rate)
        return seconds - busy, busy

    def streaming_s(self, nbytes: float) -> float:
        """Seconds of many messages one after the other: of the best rate that was measured, after one burst.

        What passes faster than that at first, as a limit of the rate allows after a pause, does so once.
        """
        rates = [self.rate]
        for (before, began), (after, ended) in itertools.pairwise(self.measured):
            if ended > began > 0:
                rates.append((after - before) / (ended - began))
        rate = max(rates)
        burst_s = max((size / rate - seconds for size, seconds in self.measured), default=0.0)
        return max(0.0, nbytes / rate - max(0.0, burst_s))

    def shared_by(self, ranks: int) -> Link:
        """The link of a node, of whose ranks each has this when all send at once."""
        measured = tuple((ranks * nbytes, seconds) for nbytes, seconds in self.measured)
        return replace(self, nbytes_per_s=min(ANY_RATE, ranks * self.nbytes_per_s), measured=measured)

    def scaled(self, rate: float = 1.0, latency: float = 1.0, window: float = 1.0) -> Link:
        """The link with its rate, latency and window multiplied by these factors."""
        return replace(
            self,
            latency_s=latency * self.latency_s,
            nbytes_per_s=rate * self.nbytes_per_s,
            measured=tuple((nbytes, seconds / rate) for nbytes, seconds in self.measured),
            window_nbytes=None if self.window_nbytes is None else window * self.window_nbytes,
        )


@dataclass(frozen=True, slots=True)
class Coding:
    """How fast a rank encodes or decodes while all others do, too.

    Args:
        numel_per_s: Elements per second, a hop.
        bucket_s: Seconds for every bucket or module, a hop, however small.
        spread: By which part measurements of the rate differ.
    """

    numel_per_s: float
    bucket_s: float = 0.0
    spread: float = 0.0

    def __post_init__(self) -> None:
        check_finite(self, least=_LEAST, numel_per_s=self.numel_per_s)
        check_finite(self, least=0.0, bucket_s=self.bucket_s)

    def scaled(self, rate: float) -> Coding:
        """So many times as fast."""
        return replace(self, numel_per_s=rate * self.numel_per_s, bucket_s=self.bucket_s / rate)

    def __str__(self) -> str:
        each = f" and {1e3 * self.bucket_s:.2g} ms per bucket" if self.bucket_s else ""
        return f"{self.numel_per_s:.2g} elements/s encoded{each}"


@dataclass(frozen=True, slots=True)
class Rings:
    """Links as the framework's own collectives find them: in rings, which may be slower than messages to each other.

    Args:
        between: All ranks; latency and bytes are those of one of the messages in series that a plan counts.
        inside: The ranks of a node.
    """

    between: Link
    inside: Link


@dataclass(frozen=True, kw_only=True, slots=True)
class Cluster:
    """What messages travel on.

    Args:
        inter_node: The link of a node, which its ranks share.
        intra_node: Of each rank to the others of its node.
        coding: How fast ranks code; None: in no time.
        latency_multiplier: Latencies that one collective costs: 2 where the sender first waits for the receiver (gloo).
        gloo: Whether CPUs compute and gloo sends: no trees where those wait less often than rings, as NCCL has them; an
            uncompressed reduce-scatter sends as much as an all-reduce; and FSDP2 waits for each of its collectives.
        cpu_oversubscription: Seconds that a second of processor time takes while all ranks compute; None: there are
            processors to spare, so messages and coding take none of that time.
        rings: Of the framework's own collectives; None: the same links.
        codings: By the names of presets, for `coding_as`.
        memcpy_nbytes_per_s: Bytes read and written per second by copying; None: copies take no time.
    """

    inter_node: Link
    intra_node: Link
    coding: Coding | None = None
    latency_multiplier: int = 1
    gloo: bool = False
    cpu_oversubscription: float | None = None
    rings: Rings | None = None
    codings: Mapping[str, Coding] = field(default_factory=dict)
    memcpy_nbytes_per_s: float | None = None

    def between_nodes(self, link: Link) -> Cluster:
        """The same with another link between nodes, whose rings were not measured."""
        now = self.inter_node
        return replace(self, inter_node=replace(link, work=now.work, window_nbytes=now.window_nbytes), rings=None)

    def scaled(
        self, *, link: float = 1.0, latency: float = 1.0, window: float = 1.0, inside: float = 1.0, coding: float = 1.0
    ) -> Cluster:
        """The cluster with each figure multiplied: of links between nodes and inside them, of coding."""
        rings, near = self.rings, min(latency, _MOST_INSIDE)
        if rings is not None:
            rings = Rings(rings.between.scaled(link, latency), rings.inside.scaled(inside, near))
        return replace(
            self,
            inter_node=self.inter_node.scaled(link, latency, window),
            intra_node=self.intra_node.scaled(inside, near),
            rings=rings,
            coding=None if self.coding is None else self.coding.scaled(coding),
            codings={name: each.scaled(coding) for name, each in self.codings.items()},
        )

    def coding_as(self, preset: str) -> Cluster:
        """The same with the speed of a preset's codecs, if that was measured."""
        return replace(self, coding=self.codings.get(preset, self.coding))
