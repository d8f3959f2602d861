"""Which replicas are there: torchft's lighthouse is asked, and those who are connect to each other."""

from __future__ import annotations

import contextlib
import hashlib
import json
import logging
import os
import socket
import threading
import time
import uuid
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, TypeVar
from urllib.parse import urlparse

import torch
import torch.distributed as dist

from lowbit_strategy.collectives.transports.member_comm import ExchangeFailedError, MemberComm
from lowbit_strategy.ranks.elastic import Elastic

_HEARTBEAT = timedelta(milliseconds=100)
_ASK = timedelta(seconds=300)  # of one question to the lighthouse, which takes as long as a round does
_RETRY_S = 0.2
_PROBE_S = 5.0
_NUM_PROBES = 3  # in a row, before the lighthouse counts as lost
_REMIND_S = 30.0
_FACTS = "lowbit_strategy/facts"

_log = logging.getLogger("lowbit_strategy")
T = TypeVar("T")


class RefusedError(RuntimeError):
    """This replica does not fit those that are training."""


@dataclass(frozen=True, slots=True)
class Identity:
    """What a replica tells the lighthouse of itself, which every other one sees before it connects.

    Args:
        name: The user's; replicas are ordered by it.
        store: Address of its store.
        fits: Digest of all that must be the same on all replicas.
        process: Tells apart those that are started again.
    """

    name: str
    store: str
    fits: str
    process: str

    def __str__(self) -> str:
        return "|".join((self.name, self.store, self.fits, self.process))

    @classmethod
    def parse(cls, text: str) -> Identity:
        """Raises:
        ValueError: It is none of this package's.
        """
        parts = text.split("|")
        if len(parts) != 4:
            raise ValueError(f"the lighthouse knows a replica {text!r} of another program: give each run a lighthouse")
        return cls(*parts)


@dataclass(frozen=True, slots=True)
class Members:
    """The replicas of a round.

    Args:
        replicas: In the order of ranks.
        comm: Among them.
    """

    replicas: tuple[Identity, ...]
    comm: MemberComm

    @property
    def names(self) -> list[str]:
        return [replica.name for replica in self.replicas]


class Membership:
    """This replica's place among the others. Everything may take as long as others need.

    Args:
        options: As the user has given them.
        facts: What must be the same on all replicas, as plain values by the names that a user knows.

    Raises:
        ImportError: torchft is not installed.
        ConnectionError: Nobody answers at the lighthouse's address.
    """

    def __init__(self, options: Elastic, facts: Mapping[str, object]) -> None:
        torchft = import_torchft()
        self.options = options
        self._facts = {name: str(value) for name, value in facts.items()}
        lighthouse = options.lighthouse_address
        address = options.address or _address_towards(lighthouse)
        self._store = dist.TCPStore(address, 0, None, True, wait_for_workers=False)
        self._store.set(_FACTS, json.dumps(self._facts))
        self.identity = Identity(
            options.name or f"{socket.gethostname()}-{os.getpid()}",
            f"{address}:{self._store.port}",
            hashlib.sha256(json.dumps(self._facts, sort_keys=True).encode()).hexdigest()[:16],
            uuid.uuid4().hex[:8],
        )
        self._server = self._answered(
            lambda: torchft.coordination.ManagerServer(
                replica_id=str(self.identity),
                lighthouse_addr=lighthouse,
                hostname=address,
                bind=f"{address}:0",
                store_addr=self.identity.store,
                world_size=1,
                heartbeat_interval=_HEARTBEAT,
                connect_timeout=timedelta(seconds=options.connect_timeout),
                quorum_retries=0,
            ),
            options.connect_timeout,
        )
        self._client = torchft.coordination.ManagerClient(
            self._server.address(), connect_timeout=timedelta(seconds=options.connect_timeout)
        )
        self._group = torchft.process_group.ProcessGroupGloo(timedelta(seconds=options.connect_timeout))
        self._present: tuple[int, tuple[str, ...]] | None = None  # who is connected
        self._members: Members | None = None
        self._num_failures = 0  # exchanges, since one has succeeded
        self._inside = False  # others have been met, who fit

    def meet(self, round_index: int) -> Members:
        """Wait until all who live are there, and connect to them if they are others than before.

        Args:
            round_index: How often members have met; 0: this replica has not met any.

        Raises:
            RefusedError: This replica does not fit the others.
            ConnectionError: The lighthouse does not answer, or there are too few replicas, for `Elastic.patience`.
        """
        deadline = _Patience(self.options.patience)
        while True:
            quorum = self._ask(round_index, deadline)
            replicas = self._fitting(quorum)
            if len(replicas) < self.options.min_replicas:
                deadline.wait(
                    f"{len(replicas)} of at least {self.options.min_replicas} replicas are there"
                    f" ({', '.join(each.name for each in replicas)}): waiting for more"
                )
                continue
            present = (quorum.quorum_id, tuple(map(str, replicas)))
            if self._members is not None and present == self._present:
                return self._members
            try:
                self._connect(quorum, replicas)
            except RuntimeError as error:
                self.fail(error)
                continue
            self._present = present
            assert self._members is not None
            return self._members

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
        with contextlib.suppress(RuntimeError):
            self._server.shutdown()

    # -- the lighthouse -------------------------------------------------------------------------------------------

    def _ask(self, round_index: int, deadline: _Patience) -> Any:
        missing = (
            f"the lighthouse at {self.options.lighthouse_address} does not answer: training waits. Start it again at"
            " that address: lowbit lighthouse"
        )
        while True:
            while not self._lighthouse_listens():
                deadline.wait(missing)
            try:
                return _interruptible(
                    lambda: self._client._quorum(
                        group_rank=0,
                        step=round_index,
                        checkpoint_metadata="",
                        shrink_only=False,
                        timeout=_ASK,
                        commit_failures=self._num_failures,
                        init_sync=False,
                    ),
                    self._lighthouse_listens,
                )
            except TimeoutError:
                _log.info("replica %s: still waiting for the others", self.identity.name)
            except RuntimeError:  # torchft's client, which gives up at once or not at all
                deadline.wait(missing)

    def _lighthouse_listens(self) -> bool:
        url = urlparse(self.options.lighthouse_address)
        try:
            with socket.create_connection((url.hostname or "", url.port or 0), timeout=_PROBE_S):
                return True
        except OSError:
            return False

    @staticmethod
    def _answered(make: Callable[[], T], timeout: float) -> T:
        try:
            return make()
        except RuntimeError as error:
            raise ConnectionError(
                f"the lighthouse has not answered within {timeout:g} s ({str(error).splitlines()[0][:200]}): start one"
                " with lowbit lighthouse, and check address, port and firewall"
            ) from error

    def _fitting(self, quorum: Any) -> tuple[Identity, ...]:
        """Those who train the same as the replica that has met others most often, in the order of ranks.

        Raises:
            RefusedError: This replica is none of them, and has never been.
        """
        replicas = [Identity.parse(text) for text in quorum.replica_ids]
        fits = self.identity.fits
        if not self._inside:
            reference = next((each for each in replicas if each.store == quorum.store_address), self.identity)
            if reference.fits != fits:
                raise RefusedError(self._why_refused(reference))
        refused = [each.name for each in replicas if each.fits != fits]
        if refused:
            _log.warning("replica %s: refused, because they do not fit: %s", self.identity.name, ", ".join(refused))
        return tuple(each for each in replicas if each.fits == fits)

    def _why_refused(self, reference: Identity) -> str:
        try:
            theirs = json.loads(self._client_of(reference.store).get(_FACTS))
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

    def _client_of(self, address: str) -> dist.TCPStore:
        host, _, port = address.rpartition(":")
        timeout = timedelta(seconds=self.options.connect_timeout)
        return dist.TCPStore(host, int(port), None, False, timeout=timeout, wait_for_workers=False)

    def _connect(self, quorum: Any, replicas: tuple[Identity, ...]) -> None:
        self._abort()
        rank = replicas.index(self.identity)
        # a lighthouse that was started again counts from the beginning, and the store keeps old keys
        place = f"lowbit/{quorum.quorum_id}/{quorum.max_step}"
        self._group.configure(
            f"{quorum.store_address}/{place}",
            self.identity.name,
            rank,
            len(replicas),
            quorum.quorum_id,
            0,
            1,
            None,
        )
        self._backend.set_timeout(timedelta(seconds=self.options.timeout))
        self._members = Members(replicas, MemberComm(self._group.parent))
        self._inside = True

    @property
    def _backend(self) -> Any:
        return self._group.parent._get_backend(torch.device("cpu"))

    def _abort(self) -> None:
        """Close all connections, so that whoever waits for this replica learns of it at once."""
        if self._group._pg is not None:
            with contextlib.suppress(RuntimeError):
                self._backend.abort()
            self._group.abort(errored=False)


class _Patience:
    """Waiting that ends some day, and says now and then what for."""

    def __init__(self, seconds: float) -> None:
        self._seconds = seconds
        self._start: float | None = None
        self._logged = -_REMIND_S

    def wait(self, what: str) -> None:
        """Raises:
        ConnectionError: It has taken too long.
        """
        now = time.monotonic()
        self._start = now if self._start is None else self._start
        if now - self._start > self._seconds:
            raise ConnectionError(f"{what}. Given up after {self._seconds:g} s (Elastic(patience=...))")
        if now - self._start - self._logged >= _REMIND_S:
            self._logged = now - self._start
            _log.warning("%s", what)
        time.sleep(_RETRY_S)


def _interruptible(call: Callable[[], T], is_possible: Callable[[], bool]) -> T:
    """The result of a call that may take long, during which this thread still answers signals.

    Raises:
        RuntimeError: It has become impossible.
    """
    results: list[T] = []
    errors: list[BaseException] = []

    def run() -> None:
        try:
            results.append(call())
        except BaseException as error:
            errors.append(error)

    thread = threading.Thread(target=run, daemon=True, name="lowbit_strategy members")
    thread.start()
    num_failures = 0
    while thread.is_alive() and num_failures < _NUM_PROBES:
        thread.join(1.0)
        num_failures = 0 if not thread.is_alive() or is_possible() else num_failures + 1
    if thread.is_alive():
        raise RuntimeError("there is nobody who could answer")
    if errors:
        raise errors[0]
    return results[0]


def _address_towards(lighthouse: str) -> str:
    """The address from which this machine reaches the lighthouse; nothing is sent."""
    url = urlparse(lighthouse)
    assert url.hostname is not None
    family, kind, protocol, _, target = socket.getaddrinfo(url.hostname, url.port, type=socket.SOCK_DGRAM)[0]
    with socket.socket(family, kind, protocol) as probe:
        probe.connect(target)
        address: str = probe.getsockname()[0]
        return address


def _short(value: object) -> str:
    text = str(value)
    return text if len(text) <= 200 else text[:200] + " ..."


def import_torchft() -> Any:
    """Raises:
    ImportError: It is not installed.
    """
    os.environ.setdefault("RUST_LOG", "error")  # torchft's own words about every round
    try:
        import torchft.coordination
        import torchft.process_group
    except ImportError as error:
        raise ImportError(
            f"elastic needs torchft, which cannot be imported ({error}): pip install 'lowbit-strategy[elastic]'"
        ) from error
    return torchft


__all__ = ["ExchangeFailedError", "Identity", "Members", "Membership", "RefusedError"]
