"""How fast ranks reach each other, measured with what training uses."""

from __future__ import annotations

import copy
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import replace

import torch

from lowbit_strategy.advisor.bench_file import slowest
from lowbit_strategy.advisor.clocks import finish, seconds_of
from lowbit_strategy.advisor.cluster import ANY_RATE, Cluster, Link, Rings, Work
from lowbit_strategy.collectives.comm import Comm, GroupComm
from lowbit_strategy.ranks.ranks import Ranks

_SMALL_NBYTES = 64
_SIZES = (1 << 16, 1 << 18, 1 << 20, 1 << 22)  # of what goes to each other rank
_RING_SIZES = tuple(4 * nbytes for nbytes in _SIZES)  # of what goes round a ring, up to most of a bucket of DDP's
_LONG_S = 0.25  # a message that takes so long tells the bandwidth well enough
_LONG_FAR_S = 2.0  # where packets are lost, a shorter one is slower than those that follow
_WARM = 0.8  # a connection that was idle begins slowly: calls are repeated until one takes at least so much of the last
_MOST_WARMING = 8
_ENOUGH_S, _MOST_TIMES, _FEWEST_TIMES = 0.35, 12, 3  # of one measurement
_MOST_FAR = 6
_FEWEST_OF_LONG, _LONG_CALL_S = 2, 1.0
_SLOW_CALL_S, _SURE = 0.05, 0.05  # slow calls are not repeated once they differ by no more than this part
_UNKNOWN = 10.0  # times: calls that differ so much tell nothing but the size of a figure
_STRAIGHT = 0.1  # two sizes whose rates differ by less tell those of the sizes after them
_BUDGET_S, _RING_BUDGET_S = 22.0, 12.0  # of one link: a longer message is not begun where it would take longer
_CALLS_OF_LONGER = 6  # of a longer message, at most
_MORE_OF_SHORT = 3  # times the calls: from what a message of no length takes all other times are counted


def slowest_network(found: Sequence[Cluster]) -> Cluster:
    """Of what each rank has measured: the slowest is waited for."""
    rings = [(each.rings.between, each.rings.inside) for each in found if each.rings is not None]
    waiting = [each.cpu_oversubscription for each in found if each.cpu_oversubscription is not None]
    return replace(
        found[0],
        inter_node=slowest([each.inter_node for each in found]),
        intra_node=slowest([each.intra_node for each in found]),
        cpu_oversubscription=statistics.mean(waiting) if waiting else None,
        rings=Rings(*map(slowest, zip(*rings, strict=True))) if rings else None,
    )


def measure_network(ranks: Ranks, device: torch.device) -> Cluster:
    """On all ranks, which all call this."""
    far = (ranks.peers,) if ranks.peers.is_far and not ranks.comes_and_goes else ()
    turns = ComputeLoad(ranks.world, device, far=ranks.peers.is_far, near=ranks.intra_node, between=far)
    between, near = measure_link(ranks.peers, turns), turns.inside_a_node()
    inside = between if ranks.intra_node is None else measure_link(ranks.intra_node, near)
    per_node = ranks.topology.ranks_per_node or 1
    rings = None
    if isinstance(ranks.world, GroupComm) and ranks.world.world_size > 1:
        nodes = -(-ranks.world.world_size // per_node)
        around = measure_ring(ranks.world, turns, max(1, nodes - 1))
        rings = Rings(around, around if ranks.intra_node is None else measure_ring(ranks.intra_node, near, 1))
    cpu_oversubscription = turns.cpu_oversubscription if turns.cpu_oversubscription > _OVERSUBSCRIBED else None
    return Cluster(
        inter_node=between.shared_by(per_node),
        intra_node=inside,
        gloo=device.type == "cpu",
        cpu_oversubscription=cpu_oversubscription,
        rings=rings,
    )


class ComputeLoad:
    """On CPU, computation before each message that is timed, as a step has it.

    Ranks that have computed are not ready at the same moment, nor does a processor turn to a message at once where
    others wait for it: a message takes longer than one right after another does.

    Attributes:
        cpu_oversubscription: Seconds that a second of a processor's time takes while all ranks compute.
    """

    def __init__(
        self,
        comm: Comm,
        device: torch.device,
        *,
        far: bool = False,
        near: Comm | None = None,
        between: Sequence[Comm] = (),
    ) -> None:
        """`between`: with `near` they reach all of `comm`, and sooner than its ring does."""
        self.device = device
        self.far = far
        self._near = near
        self._meets = [each for each in (near, *between) if each is not None] if between else [comm]
        self._usual: Callable[[list[float]], float] = min if far else statistics.median
        self.seconds = self.work_s = self._longest_s = 0.0
        self.cpu_oversubscription = 1.0
        self._x = torch.ones(256, 256, device=device) / 256
        self._times = 0
        if device.type != "cpu" or comm.world_size == 1:
            return
        self._times = 10
        self.take()
        began = time.thread_time()
        self.take()
        fits = torch.tensor([10 * _TURN_S / max(time.thread_time() - began, 1e-6)], dtype=torch.float64)
        _highest(comm, fits)  # all compute as much, and begin together
        self._times = max(1, round(float(fits)))
        turns = _NUM_TURNS * (_TIMES_FAR if far else 1)
        own = time.thread_time()
        self.seconds, self.work_s = self._timed(turns)
        self.cpu_oversubscription = max(1.0, self.seconds * turns / max(time.thread_time() - own, 1e-6))
        self._longest_s = self.agreed(self.seconds)

    def take(self) -> None:
        """Compute for a while."""
        for _ in range(self._times):
            torch.mm(self._x, self._x)

    def alone(self, times: int) -> tuple[float, float]:
        """Seconds of a turn with no message after it, and processor time; as before where ranks are far apart, which do
        not begin together.
        """
        return (self.seconds, self.work_s) if self.far else self._timed(times)

    def _timed(self, times: int) -> tuple[float, float]:
        began, working = time.perf_counter(), time.process_time()
        for _ in range(times):
            self.take()
        return (time.perf_counter() - began) / times, (time.process_time() - working) / times

    def agreed(self, seconds: float) -> float:
        """The longest of all ranks that measure together: they are to measure as often."""
        longest = torch.tensor([seconds], dtype=torch.float64, device=self.device)
        for comm in self._meets:
            _highest(comm, longest)
        return float(longest)

    def inside_a_node(self) -> ComputeLoad:
        """The same for messages that do not leave a node."""
        near = copy.copy(self)
        near._usual, near.far = statistics.median, False
        near._meets = self._meets if self._near is None else [self._near]
        return near

    def cost_of(
        self,
        comm: Comm,
        call: Callable[[], object],
        more: int = 1,
        pause_s: float = float("inf"),
        most_s: float = float("inf"),
    ) -> tuple[float, float, float]:
        """Seconds of a collective that follows a turn, the median of a few calls; their mean processor time; and by
        which part of the seconds calls differ (`spread_of`).

        Of each call the mean over ranks counts: the first rank waits for the last, and each is last now and then. The
        load alone is timed before and after: processor speed varies by more than a short message takes. Slow calls end
        as soon as they differ little.

        Args:
            comm: The ranks.
            call: The collective.
            more: Times the usual number of calls.
            pause_s: The longest pause before a call.
            most_s: Fewer calls where they take longer together.

        Ranks that are far apart report ahead that their next receive is posted. In training these reports arrive long
        before a message is sent; here they are given the time, as much as a call takes and `pause_s` at most. Where
        some are far apart the fastest of the few counts: their connections become faster for a while, and those of
        training are used longer. Ranks of a node begin together, as they do in a step: one after the other, each would
        have their link to itself.
        """
        each = self._warm(call)
        pause = min(each, pause_s) if comm.is_far else 0.0
        fewest = _FEWEST_OF_LONG if each > _LONG_CALL_S else _FEWEST_TIMES
        times = int(
            min(more * _MOST_TIMES, max(_MOST_FAR if comm.is_far else fewest, more * _ENOUGH_S / (each + pause)))
        )
        times = max(_FEWEST_OF_LONG, int(min(times, most_s / (each + pause))))
        finish(self.device)
        worked, seconds = 0.0, list[float]()
        turn_s, turn_work_s = self.alone(times // 2 + 1)
        while len(seconds) < times:
            enough = each > _SLOW_CALL_S and len(seconds) % fewest == 0 and len(seconds) > 0
            if enough and self.agreed(self.spread_of(seconds)) < _SURE:
                break
            time.sleep(pause)
            if self._near is not None:
                _highest(self._near, torch.zeros(1, device=self.device))
            began, working = time.perf_counter(), time.process_time()
            self.take()
            call()
            finish(self.device)
            seconds.append(time.perf_counter() - began)
            worked += time.process_time() - working
        later_s, later_work_s = self.alone(len(seconds) // 2 + 1)
        mean = torch.tensor(seconds, dtype=torch.float64, device=self.device) - (turn_s + later_s) / 2
        mean /= comm.world_size
        comm.all_reduce(mean).wait()
        working = worked / len(seconds) - (turn_work_s + later_work_s) / 2
        return max(self._usual(mean.tolist()), 1e-7), max(0.0, working), self.spread_of(mean.tolist())

    def spread_of(self, seconds: Sequence[float]) -> float:
        """By which part calls differ: half the range of the middle half; the two fastest where the fastest counts.

        At most `_UNKNOWN`: a message of no length may take less than computing differs.
        """
        ordered, quarter = sorted(seconds), len(seconds) // 4
        differ = ordered[1] - ordered[0] if self.far else (ordered[-1 - quarter] - ordered[quarter]) / 2
        return min(_UNKNOWN, differ / max(self._usual(ordered), 1e-7))

    def _warm(self, call: Callable[[], object]) -> float:
        """Seconds of a load and the last call on the slowest rank, so that all ranks repeat it equally often."""
        longest = 0.0
        for _ in range(1 + _MOST_WARMING):
            before, longest = longest, self.agreed(seconds_of(call, self.device))
            if longest > _WARM * before > 0:
                break
        return longest + self._longest_s


def _highest(comm: Comm, x: torch.Tensor) -> None:
    """Of all ranks, in place; not counted as traffic of a step."""
    counted = comm.sent_nbytes
    comm.all_reduce_max(x).wait()
    comm.sent_nbytes = counted


_TURN_S, _NUM_TURNS = 4e-3, 25  # of a processor's time; turns that tell how long one takes
_TIMES_FAR = 8  # times the turns: ranks that are far apart do not begin together, and are to compute at the same time
_OVERSUBSCRIBED = 1.25  # below it, ranks have processors to spare


def measure_link(comm: Comm, turns: ComputeLoad) -> Link:
    """Of one rank, by all-to-alls among the ranks of `comm`."""
    device, others = turns.device, comm.world_size - 1

    def exchange(nbytes: int) -> Callable[[], object]:
        x = torch.zeros((comm.world_size, nbytes), dtype=torch.uint8, device=device)
        out = torch.empty_like(x)
        return lambda: comm.all_to_all(out, x).wait()

    return _measure(comm, turns, exchange, _SIZES, lambda nbytes: others * nbytes, 1, _BUDGET_S)


def measure_ring(comm: Comm, turns: ComputeLoad, in_series: int) -> Link:
    """Of one rank, by the backend's own all-reduces, each of two hops of `in_series` messages."""
    own, size = GroupComm(comm.group), comm.world_size

    def reduce(nbytes: int) -> Callable[[], object]:
        x = torch.zeros(nbytes // 4, dtype=torch.float32, device=turns.device)
        return lambda: own.all_reduce(x).wait()

    return _measure(
        own, turns, reduce, _RING_SIZES, lambda nbytes: 2 * (size - 1) * nbytes / size, 2 * in_series, _RING_BUDGET_S
    )


def _measure(
    comm: Comm,
    turns: ComputeLoad,
    collective: Callable[[int], Callable[[], object]],
    sizes: Sequence[int],
    sent_nbytes: Callable[[int], float],
    in_series: int,
    budget_s: float,
) -> Link:
    if comm.world_size == 1:
        return Link(0.0, ANY_RATE)
    counted = comm.sent_nbytes  # this is not traffic of a step
    began = time.perf_counter()
    latency, waking, unsure = turns.cost_of(comm, collective(_SMALL_NBYTES), _MORE_OF_SHORT, most_s=budget_s / 4)
    used_s = turns.agreed(time.perf_counter() - began)
    pause_s = 2 * turns.agreed(latency)
    nbyte_s = beyond = rate_unsure = took_s = 0.0
    measured: list[tuple[float, float]] = []
    left = _finer(sizes) if turns.far else list(sizes)
    while left:
        nbytes = left.pop(0)
        if measured and budget_s - used_s < took_s + _CALLS_OF_LONGER * turns.agreed(beyond):
            break  # what has been measured has to tell the rest
        before_s = used_s
        seconds, working, spread = turns.cost_of(
            comm, collective(nbytes), pause_s=pause_s, most_s=(budget_s - used_s) / 2
        )
        beyond = max(beyond, seconds - latency)
        rate_unsure = min(1.0, spread * seconds / max(beyond, 1e-9))
        measured.append((sent_nbytes(nbytes) / in_series, beyond / in_series))
        nbyte_s = max(0.0, working - waking) / sent_nbytes(nbytes)
        if turns.agreed(beyond) > (_LONG_FAR_S if turns.far else _LONG_S):  # all ranks stop at the same size
            break
        used_s = turns.agreed(time.perf_counter() - began)
        took_s = used_s - before_s
        if turns.far and not turns.agreed(float(not is_straight(measured))):
            left = left[-2:]
    comm.sent_nbytes = counted
    work = Work(turns.cpu_oversubscription * waking / in_series, turns.cpu_oversubscription * nbyte_s)
    return Link(
        latency / in_series, rate_of(measured), tuple(measured), work, latency_spread=unsure, rate_spread=rate_unsure
    )


def _finer(sizes: Sequence[int]) -> list[int]:
    """With half of the longest: between far ranks, what a queue on the way holds takes much less than what overflows
    it.
    """
    return [*sizes[:-1], sizes[-1] // 2, sizes[-1]]


def is_straight(measured: Sequence[tuple[float, float]]) -> bool:
    """Whether the last two sizes have one rate, which tells those between them and the longest."""
    if len(measured) < 2:
        return False
    one, other = (nbytes / max(seconds, 1e-9) for nbytes, seconds in measured[-2:])
    return abs(one - other) < _STRAIGHT * other


def rate_of(measured: Sequence[tuple[float, float]]) -> float:
    """By how much longer the longest took than the next shorter: what passes at once does not count."""
    (nbytes, seconds), (longer, longest) = [(0.0, 0.0), *measured][-2:]
    if longest <= 1.1 * seconds:  # too little to tell
        return min(ANY_RATE, longer / max(longest, 1e-9))
    return min(ANY_RATE, (longer - nbytes) / (longest - seconds))
