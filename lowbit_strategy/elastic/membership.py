"""Connects this replica to the others that it meets, and again when these change."""

from __future__ import annotations

import contextlib
import functools
import hashlib
import logging
import pickle
import signal
import threading
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, TypeVar, cast

import torch
import torch.distributed as dist

from lowbit_strategy.collectives.comm import Comm, LocalComm
from lowbit_strategy.elastic.admission import Admission, RefusedError
from lowbit_strategy.elastic.lighthouse import (
    Identity,
    Quorum,
    has_ended,
    import_torchft,
    watched,
)
from lowbit_strategy.elastic.member_comm import ExchangeFailedError, MemberComm, as_failed_exchange
from lowbit_strategy.elastic.options import Elastic

_STATUS = 128 + signal.SIGTERM
_LOOK_S = 0.5  # seconds between two checks, while connecting, that the others live

_log = logging.getLogger("lowbit_strategy")
T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Members:
    """The replicas in a round.

    Args:
        replicas: All replicas in rank order.
        comm: Connects the ranks that have the same index in their replica as this one.
    """

    replicas: tuple[Identity, ...]
    comm: MemberComm

    @property
    def names(self) -> list[str]:
        return [replica.name for replica in self.replicas]

    @property
    def digest(self) -> int:
        """A digest of the members' identities and order; fits 63 bits, never 0."""
        return int.from_bytes(hashlib.sha256("\n".join(map(str, self.replicas)).encode()).digest()[:7], "big") + 1


class Membership:
    """The membership of this replica. All of its ranks call the methods, which may wait for other replicas: the first
    rank asks the lighthouse, and all act on its answer.

    Args:
        options: The user's.
        facts: What must be the same on all replicas, as plain values by names that a user knows.
        replica: The ranks of this replica, on the CPU, in a separate group without a timeout.

    Attributes:
        asked_to_end: Whether a framework has noted SIGTERM, and will act on it at the next batch.
        end: The error that a wait raises in that case.

    Raises:
        ImportError: torchft is not installed.
        ConnectionError: Nobody answers at the lighthouse's address.
    """

    def __init__(self, options: Elastic, facts: Mapping[str, object], replica: Comm | None = None) -> None:
        self.options = options
        self.replica = LocalComm() if replica is None else replica
        self.asked_to_end: Callable[[], bool] = lambda: False
        self.end: type[SystemExit] = SystemExit
        self._noted: Callable[[], bool] = lambda: False  # whether SIGTERM arrived during a wait
        self._admission: Admission | None = None  # only on the first rank
        self.identity = self._by_first(lambda: self._register(facts))
        self._group: Any = None  # torchft's group of the connected members
        self._connected: tuple[int, tuple[Identity, ...]] | None = None  # number and replicas of the quorum
        self._members: Members | None = None
        self._num_failures = 0  # exchanges since the last success

    def rendezvous(self, round_index: int) -> Members:
        """Wait for all live replicas, and connect to them unless they are the same as before.

        Args:
            round_index: Number of times that members have met; 0: this replica has not met any.

        Raises:
            RefusedError: This replica does not fit the others, or another has its name.
            ConnectionError: The lighthouse does not answer, or there are too few replicas, for `Elastic.patience`.
            SystemExit: SIGTERM has arrived.
        """
        with noting_sigterm() as self._noted:
            while True:
                quorum = self._by_first(lambda: self._found(round_index))
                if self._members is not None and self._connected == (quorum.number, quorum.replicas):
                    return self._members
                try:
                    self._members = self.together(functools.partial(self._connect, quorum))
                except ExchangeFailedError as error:
                    self.fail(error)
                    continue
                self._connected = quorum.number, quorum.replicas
                if self._admission is not None:
                    self._admission.met()
                return self._members

    def together(self, work: Callable[[], T]) -> T:
        """Return the result of `work`, an exchange with other replicas, once all ranks of this replica have completed
        it.

        Raises:
            ExchangeFailedError: On all of its ranks, if it has failed on one.
        """
        error, results = None, []
        try:
            results.append(work())
        except ExchangeFailedError as caught:
            error = caught
            self._abort()
        done = torch.tensor([len(results)], dtype=torch.int32)
        self.replica.all_reduce(done, dist.ReduceOp.MIN).wait()
        if error is not None:
            raise error
        if not done:
            raise ExchangeFailedError("another rank of this replica has lost its peers")
        return results[0]

    def decide(self, answer: bool) -> bool:
        """The answer of the replica's first rank."""
        decided = torch.tensor([int(answer)], dtype=torch.int32)
        self.replica.broadcast(decided, 0).wait()
        return bool(decided)

    def fail(self, error: Exception) -> None:
        """Connect again at the next rendezvous, because an exchange or connecting has failed."""
        self._num_failures += 1
        self._members = None
        self._abort()
        _log.info("replica %s: an exchange has failed (%s)", self.identity.name, str(error).splitlines()[0])

    def succeed(self) -> None:
        """Note that an exchange has been committed."""
        self._num_failures = 0

    def leave(self) -> None:
        """Make the others stop waiting for this replica."""
        self._abort()
        if self._admission is not None:
            self._admission.end()
        if isinstance(self.replica.group, dist.ProcessGroup):
            group = self.replica.group
            self.replica.release([group])
            with contextlib.suppress(ValueError):  # the framework has destroyed all groups already
                dist.destroy_process_group(group)

    # -- inside the replica ---------------------------------------------------------------------------------------

    def _register(self, facts: Mapping[str, object]) -> Identity:
        self._admission = Admission(self.options, facts)
        return self._admission.identity

    def _found(self, round_index: int) -> Quorum:
        assert self._admission is not None
        return self._admission.found(
            self.options.min_replicas,
            round_index=round_index,
            num_failures=self._num_failures,
            check_end=self._check_end,
        )

    def _by_first(self, find: Callable[[], T]) -> T:
        """Return on all ranks what `find` returns on the replica's first rank, or raise its error."""
        found: T | None = None
        error: BaseException | None = None
        if self.replica.rank == 0:
            try:
                found = find()
            except (RefusedError, ConnectionError, ImportError, ValueError, SystemExit) as caught:
                error = caught
        outcome = pickle.dumps((found, error))
        found, raised = pickle.loads(_bytes_from_first_rank(outcome, self.replica, torch.device("cpu")))
        if raised is not None:
            raise error or raised
        return cast("T", found)

    def _check_end(self) -> None:
        """Raise SystemExit if this process has been asked to end."""
        if self._noted() or self.asked_to_end():
            _log.warning("replica %s: SIGTERM while it waits for the others: it ends", self.identity.name)
            raise self.end(_STATUS)

    # -- connections ----------------------------------------------------------------------------------------------

    @as_failed_exchange()
    def _connect(self, quorum: Quorum) -> Members:
        """Connect this rank to the ranks of the same index in the other replicas."""
        self._abort()
        # the store keeps old keys, and a restarted lighthouse counts from the beginning
        place = f"lowbit/{quorum.number}/{quorum.round_index}/{self.replica.rank}"
        group = import_torchft().process_group.ProcessGroupGloo(timedelta(seconds=self.options.connect_timeout))
        connect = functools.partial(
            group.configure,
            f"{quorum.store}/{place}",
            self.identity.name,
            quorum.replicas.index(self.identity),
            len(quorum.replicas),
            quorum.number,
            self.replica.rank,
            self.replica.world_size,
            None,
        )
        others = [each.store for each in quorum.replicas if each != self.identity]

        def why_not() -> str:
            self._check_end()
            ended = next(filter(has_ended, others), None)
            return "" if ended is None else f"nobody listens at {ended} now"

        watched(connect, why_not, every=_LOOK_S)
        self._group = group
        self._backend.set_timeout(timedelta(seconds=self.options.timeout))
        return Members(quorum.replicas, MemberComm(self._group.parent))

    @property
    def _backend(self) -> Any:
        return self._group.parent._get_backend(torch.device("cpu"))

    def _abort(self) -> None:
        """Close all connections, so that the others notice immediately."""
        if self._group is not None:
            with contextlib.suppress(RuntimeError):
                self._backend.abort()
            self._group.abort(errored=False)
            self._group = None


def _bytes_from_first_rank(message: bytes, comm: Comm, device: torch.device) -> bytes:
    """The first rank's `message` on every rank: its length, and then the bytes, sent from `device`."""
    length = torch.tensor([len(message)], device=device)
    comm.broadcast(length, 0).wait()
    wire = torch.empty(int(length), dtype=torch.uint8, device=device)
    if comm.rank == 0:
        wire.copy_(torch.frombuffer(bytearray(message), dtype=torch.uint8))
    comm.broadcast(wire, 0).wait()
    return wire.cpu().numpy().tobytes()


@contextlib.contextmanager
def noting_sigterm() -> Iterator[Callable[[], bool]]:
    """Yields a function that tells whether SIGTERM has arrived since; the program's own handler is also called.

    Frameworks' handlers only note the signal and act at the next batch, which a wait delays. Without a handler the
    signal ends the process as usual.
    """
    handler = signal.getsignal(signal.SIGTERM)
    if not callable(handler) or threading.current_thread() is not threading.main_thread():
        yield lambda: False
        return
    received = []

    def note(number: int, frame: Any) -> None:
        received.append(number)
        handler(number, frame)

    signal.signal(signal.SIGTERM, note)
    try:
        yield lambda: bool(received)
    finally:
        signal.signal(signal.SIGTERM, handler)
