"""Asks the lighthouse for the replicas. torchft's `Manager` raises an error if the lighthouse is lost."""

from __future__ import annotations

import contextlib
import logging
import os
import socket
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future, wait
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, TypeVar
from urllib.parse import urlparse

from lowbit_strategy.elastic.options import Elastic

_HEARTBEAT = timedelta(milliseconds=100)
_ASK = timedelta(seconds=300)  # limit for one request, which takes as long as a round
_RETRY_S = 0.2
_TICK_S = 0.01  # how often the lighthouse checks whether all have asked; its own default is 0.1 s
_PROBE_S = 1.0
_NUM_PROBES = 3  # failed probes in a row before the lighthouse counts as lost
_REMIND_S = 30.0
_ANSWER_S = 5.0
_REFUSAL_S = 1.0  # a refusal is immediate

T = TypeVar("T")

_log = logging.getLogger("lowbit_strategy")


@dataclass(frozen=True, slots=True)
class Identity:
    """A replica's description of itself for the lighthouse and all other replicas.

    Args:
        name: The user's name for it; replicas are ordered by name.
        store: Address of its store.
        fits: Digest of everything that must be the same on all replicas.
        process: A new value whenever the replica is started.
    """

    name: str
    store: str
    fits: str
    process: str

    def __str__(self) -> str:
        return "|".join((self.name, self.store, self.fits, self.process))

    @classmethod
    def parse(cls, text: str) -> Identity:
        """Parse the text; raise a ValueError if it comes from a different program."""
        parts = text.split("|")
        if len(parts) != 4:
            raise ValueError(f"the lighthouse knows a replica {text!r} of another program: give each run a lighthouse")
        return cls(*parts)


@dataclass(frozen=True, slots=True)
class Quorum:
    """The answer of the lighthouse.

    Args:
        number: Number of this set of replicas.
        round_index: The largest number of earlier meetings of any replica.
        store: Address of that replica's store, to which all connect.
        replicas: Every replica's identity, in rank order.
    """

    number: int
    round_index: int
    store: str
    replicas: tuple[Identity, ...]


class Registration:
    """The registration of this replica at the lighthouse while its process lives, one for all of its ranks.

    Args:
        options: The user's options.
        identity: The replica's identity.
        address: Address of this machine, as the others reach it.

    Raises:
        ImportError: torchft is not installed.
        ConnectionError: Nobody answers at the lighthouse's address.
    """

    def __init__(self, options: Elastic, identity: Identity, address: str) -> None:
        torchft = import_torchft()
        self._lighthouse, self._name = options.lighthouse_address, identity.name
        timeout = timedelta(seconds=options.connect_timeout)
        try:
            self._server = torchft.coordination.ManagerServer(
                replica_id=str(identity),
                lighthouse_addr=self._lighthouse,
                hostname=address,
                bind=f"{address}:0",
                store_addr=identity.store,
                world_size=1,
                heartbeat_interval=_HEARTBEAT,
                connect_timeout=timeout,
                quorum_retries=0,
            )
        except RuntimeError as error:
            raise ConnectionError(
                f"the lighthouse has not answered within {options.connect_timeout:g} s"
                f" ({str(error).splitlines()[0][:200]}): start one with lowbit lighthouse, and check address, port and"
                " firewall"
            ) from error
        self._client = torchft.coordination.ManagerClient(self._server.address(), connect_timeout=timeout)

    def ask(self, round_index: int, num_failures: int, deadline: Patience) -> Quorum:
        """Wait until all live replicas have asked.

        Args:
            round_index: Number of times that this replica has met others.
            num_failures: Exchanges that have failed since the last success.
            deadline: How long to wait for a lighthouse that does not answer.

        Raises:
            ConnectionError: The lighthouse does not answer in time.
            SystemExit: This process has been asked to end.
        """
        missing = (
            f"the lighthouse at {self._lighthouse} does not answer: training waits. Start it again at that address:"
            " lowbit lighthouse"
        )

        def why_not() -> str:
            deadline.check()
            return "" if self._lighthouse_listens() else missing

        while True:
            while not self._lighthouse_listens():
                deadline.wait(missing)
            try:
                found = watched(
                    lambda: self._client._quorum(
                        group_rank=0,
                        step=round_index,
                        checkpoint_metadata="",
                        shrink_only=False,
                        timeout=_ASK,
                        commit_failures=num_failures,
                        init_sync=False,
                    ),
                    why_not,
                    every=_PROBE_S,
                    num_looks=_NUM_PROBES,
                )
                replicas = tuple(map(Identity.parse, found.replica_ids))
                return Quorum(found.quorum_id, found.max_step, found.store_address, replicas)
            except TimeoutError:
                _log.info("replica %s: still waiting for the others", self._name)
            except RuntimeError:  # torchft's client gives up immediately, or never
                deadline.wait(missing)

    def end(self) -> None:
        """Make the others stop waiting for this replica."""
        with contextlib.suppress(RuntimeError):
            self._server.shutdown()

    def _lighthouse_listens(self) -> bool:
        url = urlparse(self._lighthouse)
        return answers(url.hostname or "", url.port or 0)


class Patience:
    """A wait with a time limit, which occasionally logs what it waits for.

    Args:
        seconds: The limit.
        check: Called during the wait; may raise.
    """

    def __init__(self, seconds: float, check: Callable[[], None]) -> None:
        self._seconds = seconds
        self.check = check
        self._start: float | None = None
        self._remind = 0.0  # seconds until the next log line, doubled each time

    def wait(self, what: str) -> None:
        """Raise a ConnectionError if the wait has taken too long."""
        self.check()
        now = time.monotonic()
        self._start = now if self._start is None else self._start
        if now - self._start > self._seconds:
            raise ConnectionError(f"{what}. Given up after {self._seconds:g} s (Elastic(patience=...))")
        if now - self._start >= self._remind:
            self._remind = max(_REMIND_S, 2 * self._remind)
            _log.warning("%s", what)
        time.sleep(_RETRY_S)


def start_lighthouse(bind: str, *, min_replicas: int, join_timeout: float, heartbeat_timeout: float) -> Any:
    """Start torchft's lighthouse in this process. It answers all replicas once the last live one has asked.

    Args:
        bind: Address and port to listen on.
        min_replicas: If there are fewer replicas, all wait.
        join_timeout: Seconds that replicas wait in a round for a slower one.
        heartbeat_timeout: Seconds without a heartbeat after which a replica is lost.
    """
    return import_torchft().coordination.LighthouseServer(
        bind=bind,
        min_replicas=min_replicas,
        join_timeout_ms=round(1000 * join_timeout),
        quorum_tick_ms=round(1000 * _TICK_S),
        heartbeat_timeout_ms=round(1000 * heartbeat_timeout),
    )


def import_torchft() -> Any:
    """Import torchft; raise an ImportError if it is not installed."""
    os.environ.setdefault("RUST_LOG", "error")  # torchft logs every round
    try:
        import torchft.coordination
        import torchft.process_group
    except ImportError as error:
        raise ImportError(
            f"elastic needs torchft, which cannot be imported ({error}): pip install 'lowbit-strategy[elastic]'"
        ) from error
    return torchft


def watched(call: Callable[[], T], why_not: Callable[[], str], *, every: float, num_looks: int = 1) -> T:
    """The result of `call`, which runs in another thread while this one handles signals.

    An abandoned call continues until its own timeout, so nothing that it uses may be used again.

    Args:
        call: A function that may take long.
        why_not: Returns the reason why the call can no longer be answered; empty: it can. May raise.
        every: Seconds between two calls of `why_not`.
        num_looks: Number of consecutive reasons that end the wait.

    Raises:
        RuntimeError: The call can no longer be answered.
    """
    outcome: Future[T] = Future()

    def run() -> None:
        try:
            outcome.set_result(call())
        except BaseException as error:
            outcome.set_exception(error)

    threading.Thread(target=run, daemon=True, name="lowbit_strategy members").start()
    reasons: list[str] = []
    while len(reasons) < num_looks:
        wait([outcome], every)
        if outcome.done():
            return outcome.result()
        reason = why_not()
        reasons = [*reasons, reason] if reason else []
    raise RuntimeError(reasons[-1])


def answers(host: str, port: int) -> bool:
    """Whether a listener there can be reached."""
    return _failure(host, port, _ANSWER_S) is None


def has_ended(address: str) -> bool:
    """Whether the connection to ``host:port`` is refused; a host that does not answer may only be slow."""
    host, _, port = address.rpartition(":")
    return isinstance(_failure(host, int(port), _REFUSAL_S), ConnectionRefusedError)


def _failure(host: str, port: int, timeout: float) -> OSError | None:
    try:
        socket.create_connection((host, port), timeout=timeout).close()
    except OSError as error:
        return error
    return None
