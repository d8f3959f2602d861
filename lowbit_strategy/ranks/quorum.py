"""The conversation with torchft's lighthouse, which knows which replicas are there."""

from __future__ import annotations

import contextlib
import logging
import os
import socket
import time
from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from typing import Any
from urllib.parse import urlparse

from lowbit_strategy.ranks.elastic import Elastic
from lowbit_strategy.ranks.watched import answers, watched

_HEARTBEAT = timedelta(milliseconds=100)
_ASK = timedelta(seconds=300)  # of one question to the lighthouse, which takes as long as a round does
_RETRY_S = 0.2
_TICK_S = 0.01  # between two looks of the lighthouse whether all have asked; its own default is a tenth of a second
_PROBE_S = 1.0
_NUM_PROBES = 3  # in a row, before the lighthouse counts as lost
_REMIND_S = 30.0

_log = logging.getLogger("lowbit_strategy")


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
class Quorum:
    """What the lighthouse has answered.

    Args:
        number: Of this set of replicas.
        round_index: How often the replica that has met others most often has met them.
        store: Address of that one's store, where all connect.
        replicas: What each tells of itself, in the order of ranks.
    """

    number: int
    round_index: int
    store: str
    replicas: list[str]


class Registration:
    """This replica at the lighthouse, as long as its process lives: one per replica, whatever the number of its ranks.

    Args:
        options: As the user has given them.
        identity: What it tells of itself.
        address: Of this machine, as the others reach it.

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
        """Wait until all who live have asked.

        Args:
            round_index: How often this replica has met others.
            num_failures: Exchanges that have failed since one has succeeded.
            deadline: Of the wait for a lighthouse that does not answer.

        Raises:
            ConnectionError: It does not, for longer than that.
            SystemExit: As `deadline` checks.
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
                return Quorum(found.quorum_id, found.max_step, found.store_address, list(found.replica_ids))
            except TimeoutError:
                _log.info("replica %s: still waiting for the others", self._name)
            except RuntimeError:  # torchft's client, which gives up at once or not at all
                deadline.wait(missing)

    def end(self) -> None:
        """Nobody waits for this replica any more."""
        with contextlib.suppress(RuntimeError):
            self._server.shutdown()

    def _lighthouse_listens(self) -> bool:
        url = urlparse(self._lighthouse)
        return answers(url.hostname or "", url.port or 0)


class Patience:
    """Waiting that ends some day, and says now and then what for.

    Args:
        seconds: So long at most.
        check: Called while it lasts; what it raises ends the wait.
    """

    def __init__(self, seconds: float, check: Callable[[], None]) -> None:
        self._seconds = seconds
        self.check = check
        self._start: float | None = None
        self._remind = 0.0  # seconds of the wait, twice as long each time

    def wait(self, what: str) -> None:
        """Raises:
        ConnectionError: It has taken too long.
        """
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
    """torchft's, in this process; it answers who asks soon after the last one has asked.

    Args:
        bind: Address and port to listen on.
        min_replicas: With fewer nobody goes on.
        join_timeout: Seconds that replicas wait in a round for one that lives and is slower.
        heartbeat_timeout: Seconds without a heartbeat after which a replica is lost.
    """
    return import_torchft().coordination.LighthouseServer(
        bind=bind,
        min_replicas=min_replicas,
        join_timeout_ms=round(1000 * join_timeout),
        quorum_tick_ms=round(1000 * _TICK_S),
        heartbeat_timeout_ms=round(1000 * heartbeat_timeout),
    )


def address_towards(lighthouse: str) -> str:
    """The address from which this machine reaches the lighthouse; nothing is sent."""
    url = urlparse(lighthouse)
    assert url.hostname is not None
    family, kind, protocol, _, target = socket.getaddrinfo(url.hostname, url.port, type=socket.SOCK_DGRAM)[0]
    with socket.socket(family, kind, protocol) as probe:
        probe.connect(target)
        address: str = probe.getsockname()[0]
        return address


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
