"""Which replicas are there: the lighthouse is asked, and those who are connect to each other."""

from __future__ import annotations

import contextlib
import functools
import hashlib
import json
import logging
import os
import signal
import socket
import uuid
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from datetime import timedelta
from typing import Any, TypeVar

import torch
import torch.distributed as dist

from lowbit_strategy.collectives.comm import Comm, bytes_from_first_rank
from lowbit_strategy.collectives.local import LocalComm
from lowbit_strategy.collectives.transports.member_comm import ExchangeFailedError, MemberComm, as_failed_exchange
from lowbit_strategy.ranks.elastic import Elastic
from lowbit_strategy.ranks.quorum import Identity, Patience, Quorum, Registration, address_towards, import_torchft
from lowbit_strategy.ranks.watched import has_ended, noting_sigterm, watched

_FACTS, _MET = "lowbit_strategy/facts", "lowbit_strategy/met"
_STATUS = 128 + signal.SIGTERM  # of a process that ends for it
_LOOK_S = 0.5  # whether those still live to whom this one connects

_log = logging.getLogger("lowbit_strategy")
T = TypeVar("T")


class RefusedError(RuntimeError):
    """This replica does not fit those that are training."""


_SHARED_ERRORS: dict[str, type[Exception]] = {
    each.__name__: each for each in (RefusedError, ConnectionError, ImportError, ValueError)
}


@dataclass(frozen=True, slots=True)
class Members:
    """The replicas of a round.

    Args:
        replicas: In the order of ranks.
        comm: Among them, those of their ranks that have the same index inside of their replica as this one.
    """

    replicas: tuple[Identity, ...]
    comm: MemberComm

    @property
    def names(self) -> list[str]:
        return [replica.name for replica in self.replicas]

    @property
    def digest(self) -> int:
        """Of who they are, in the order of ranks: an integer that fits 63 bits and is not 0."""
        return int.from_bytes(hashlib.sha256("\n".join(map(str, self.replicas)).encode()).digest()[:7], "big") + 1


class Membership:
    """This replica's place among the others. Everything may take as long as others need, and is called on all ranks of
    the replica: the first one asks the lighthouse, and all do what it has found out.

    Args:
        options: As the user has given them.
        facts: What must be the same on all replicas, as plain values by the names that a user knows.
        replica: The ranks of this replica, on the CPU; nothing else uses their group, whose patience has no end.

    Attributes:
        asked_to_end: Whether a framework has noted SIGTERM, which it answers at the next batch.
        end: What a wait raises then.

    Raises:
        ImportError: torchft is not installed.
        ConnectionError: Nobody answers at the lighthouse's address.
    """

    def __init__(self, options: Elastic, facts: Mapping[str, object], replica: Comm | None = None) -> None:
        self.options = options
        self.replica = LocalComm() if replica is None else replica
        self.asked_to_end: Callable[[], bool] = lambda: False
        self.end: type[SystemExit] = SystemExit
        self._noted: Callable[[], bool] = lambda: False  # while it waits
        self._facts = {name: str(value) for name, value in facts.items()}
        self._registration: Registration | None = None  # the first rank's
        self.identity = Identity.parse(self._by_first(self._register))
        self._group: Any = None  # torchft's, of those who are connected
        self._present: tuple[int, list[str]] | None = None  # who is connected
        self._members: Members | None = None
        self._num_failures = 0  # exchanges, since one has succeeded
        self._has_met = False  # others, who fit

    def rendezvous(self, round_index: int) -> Members:
        """Wait until all who live are there, and connect to them if they are others than before.

        Args:
            round_index: How often members have met; 0: this replica has not met any.

        Raises:
            RefusedError: This replica does not fit the others, or one of its name is there.
            ConnectionError: The lighthouse does not answer, or there are too few replicas, for `Elastic.patience`.
            SystemExit: SIGTERM has come, before or meanwhile.
        """
        with noting_sigterm() as self._noted:
            return self._met(round_index)

    def _met(self, round_index: int) -> Members:
        while True:
            quorum = Quorum(**self._by_first(lambda: asdict(self._found(round_index))))
            present = (quorum.number, quorum.replicas)
            if self._members is not None and present == self._present:
                return self._members
            try:
                self._members = self.together(functools.partial(self._connect, quorum))
            except ExchangeFailedError as error:
                self.fail(error)
                continue
            self._present, self._has_met = present, True
            if self._registration is not None:
                self._store.set(_MET, "")
            return self._members

    def together(self, work: Callable[[], T]) -> T:
        """What `work` returns, which exchanges something with the other replicas, once all ranks of this one have
        done it.

        Raises:
            ExchangeFailedError: On all of them, if it has failed on one.
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
        """That of the replica's first rank, on all of them."""
        decided = torch.tensor([int(answer)], dtype=torch.int32)
        self.replica.broadcast(decided, 0).wait()
        return bool(decided)

    def fail(self, error: Exception) -> None:
        """An exchange has failed, or connecting has: everybody connects anew, once they have met."""
        self._num_failures += 1
        self._present = None
        self._members = None
        self._abort()
        _log.info("replica %s: an exchange has failed (%s)", self.identity.name, str(error).splitlines()[0])

    def succeed(self) -> None:
        """An exchange has been committed."""
        self._num_failures = 0

    def leave(self) -> None:
        """Nobody waits for this replica any more."""
        self._abort()
        if self._registration is not None:
            self._registration.end()
        if isinstance(self.replica.group, dist.ProcessGroup):
            group = self.replica.group
            self.replica.release([group])
            with contextlib.suppress(ValueError):  # the framework has destroyed all groups already
                dist.destroy_process_group(group)

    # -- inside of the replica ------------------------------------------------------------------------------------

    def _by_first(self, find: Callable[[], Any]) -> Any:
        """What the replica's first rank finds, plain data, on all of its ranks; so is what it raises."""
        answer: dict[str, Any] = {}
        error: BaseException | None = None
        if self.replica.rank == 0:
            try:
                answer = {"found": find()}
            except SystemExit as caught:
                error, answer = caught, {"raised": "SystemExit"}
            except tuple(_SHARED_ERRORS.values()) as caught:
                error = caught
                kind = next(name for name, each in _SHARED_ERRORS.items() if isinstance(caught, each))
                answer = {"raised": kind, "text": str(caught)}
        text = bytes_from_first_rank(json.dumps(answer).encode(), self.replica, torch.device("cpu"))
        answer = json.loads(text)
        if error is not None:
            raise error
        if answer.get("raised") == "SystemExit":
            raise self.end(_STATUS)
        if "raised" in answer:
            raise _SHARED_ERRORS[answer["raised"]](answer["text"])
        return answer["found"]

    def _check_end(self) -> None:
        """Raises:
        SystemExit: This process has been asked to end.
        """
        if self._noted() or self.asked_to_end():
            _log.warning("replica %s: SIGTERM while it waits for the others: it ends", self.identity.name)
            raise self.end(_STATUS)

    # -- the lighthouse, on the first rank ------------------------------------------------------------------------

    def _register(self) -> str:
        options = self.options
        lighthouse = options.lighthouse_address
        address = options.address or address_towards(lighthouse)
        self._store = dist.TCPStore(address, 0, None, True, wait_for_workers=False)
        self._store.set(_FACTS, json.dumps(self._facts))
        identity = Identity(
            options.name or f"{socket.gethostname()}-{os.getpid()}",
            f"{address}:{self._store.port}",
            hashlib.sha256(json.dumps(self._facts, sort_keys=True).encode()).hexdigest()[:16],
            uuid.uuid4().hex[:8],
        )
        self._registration = Registration(options, identity, address)
        return str(identity)

    def _found(self, round_index: int) -> Quorum:
        """Those who train the same as this replica, of whom there are enough."""
        assert self._registration is not None
        deadline = Patience(self.options.patience, self._check_end)
        self._check_end()
        while True:
            quorum = self._registration.ask(round_index, self._num_failures, deadline)
            replicas = self._fitting(quorum)
            if len(replicas) >= self.options.min_replicas:
                return replace(quorum, replicas=list(map(str, replicas)))
            deadline.wait(
                f"{len(replicas)} of at least {self.options.min_replicas} replicas are there"
                f" ({', '.join(each.name for each in replicas)}): waiting for more"
            )

    def _fitting(self, quorum: Quorum) -> list[Identity]:
        """Those who train the same as the replica that has met others most often, in the order of ranks.

        Raises:
            RefusedError: This replica is none of them, and has never been.
        """
        replicas = [Identity.parse(text) for text in quorum.replicas]
        fits = self.identity.fits
        if not self._has_met:
            self._check_name(replicas)
            reference = next((each for each in replicas if each.store == quorum.store), self.identity)
            if reference.fits != fits:
                raise RefusedError(self._why_refused(reference))
        refused = [each.name for each in replicas if each.fits != fits]
        if refused:
            _log.warning("replica %s: refused, because they do not fit: %s", self.identity.name, ", ".join(refused))
        return [each for each in replicas if each.fits == fits]

    def _check_name(self, replicas: Sequence[Identity]) -> None:
        """Raises:
        RefusedError: Another one of this name lives that has met the others, or of two new ones comes first.
        """
        for other in replicas:
            if other.name != self.identity.name or other == self.identity or has_ended(other.store):
                continue
            if str(other) < str(self.identity) or self._store_of(other).check([_MET]):
                raise RefusedError(
                    f"a replica of the name {other.name!r} is there already, at {other.store}: checkpoints and state go"
                    " by names, so give each replica one of its own (Elastic(name=...)). To replace that one end it"
                    " first"
                )

    def _store_of(self, replica: Identity) -> dist.TCPStore:
        host, _, port = replica.store.rpartition(":")
        timeout = timedelta(seconds=self.options.connect_timeout)
        return dist.TCPStore(host, int(port), None, False, timeout=timeout, wait_for_workers=False)

    def _why_refused(self, reference: Identity) -> str:
        try:
            theirs = json.loads(self._store_of(reference).get(_FACTS))
        except (RuntimeError, ValueError) as error:
            theirs, difference = {}, f"what it trains cannot be read ({str(error).splitlines()[0]})"
        for name in theirs.keys() | self._facts.keys():
            if theirs and theirs.get(name) != self._facts.get(name):
                difference = f"{name}: {_short(self._facts.get(name))} instead of {_short(theirs.get(name))}"
                break
        return (
            f"this replica, {self.identity.name}, does not fit {reference.name}, which is training: {difference}. All"
            " replicas must have the same model, options and versions; another run needs a lighthouse of its own"
        )

    # -- connections ----------------------------------------------------------------------------------------------

    @as_failed_exchange()
    def _connect(self, quorum: Quorum) -> Members:
        """This rank, and those of the same index in the other replicas."""
        self._abort()
        replicas = tuple(map(Identity.parse, quorum.replicas))
        # a lighthouse that was started again counts from the beginning, and the store keeps old keys
        place = f"lowbit/{quorum.number}/{quorum.round_index}/{self.replica.rank}"
        group = import_torchft().process_group.ProcessGroupGloo(timedelta(seconds=self.options.connect_timeout))
        connect = functools.partial(
            group.configure,
            f"{quorum.store}/{place}",
            self.identity.name,
            replicas.index(self.identity),
            len(replicas),
            quorum.number,
            self.replica.rank,
            self.replica.world_size,
            None,
        )
        others = [each.store for each in replicas if each != self.identity]

        def why_not() -> str:
            self._check_end()
            return _who_has_ended(others)

        watched(connect, why_not, every=_LOOK_S)
        self._group = group
        self._backend.set_timeout(timedelta(seconds=self.options.timeout))
        return Members(replicas, MemberComm(self._group.parent))

    @property
    def _backend(self) -> Any:
        return self._group.parent._get_backend(torch.device("cpu"))

    def _abort(self) -> None:
        """Close all connections, so that whoever waits for this replica learns of it at once."""
        if self._group is not None:
            with contextlib.suppress(RuntimeError):
                self._backend.abort()
            self._group.abort(errored=False)
            self._group = None


def _who_has_ended(addresses: Sequence[str]) -> str:
    ended = next(filter(has_ended, addresses), None)
    return "" if ended is None else f"nobody listens at {ended} any more"


def _short(value: object) -> str:
    text = str(value)
    return text if len(text) <= 200 else text[:200] + " ..."
