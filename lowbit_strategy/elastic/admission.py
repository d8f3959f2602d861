"""Finds compatible replicas, for the first rank of a replica. torchft's `Manager` accepts any replica, regardless of
its model or options.
"""

from __future__ import annotations

import hashlib
import json
import logging
import os
import socket
import uuid
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from datetime import timedelta
from urllib.parse import urlparse

import torch.distributed as dist

from lowbit_strategy.elastic.lighthouse import Identity, Patience, Quorum, Registration, has_ended
from lowbit_strategy.elastic.options import Elastic

_FACTS, _MET = "lowbit_strategy/facts", "lowbit_strategy/met"

_log = logging.getLogger("lowbit_strategy")


class RefusedError(RuntimeError):
    """This replica is not compatible with the replicas that are training."""


class Admission:
    """The first rank of a replica: it registers the replica at the lighthouse, publishes in a store what the replica
    trains, and finds others that train the same.

    Args:
        options: The user's options.
        facts: Values that must be the same on all replicas, by user-facing names.

    Attributes:
        identity: The replica's identity.

    Raises:
        ImportError: torchft is not installed.
        ConnectionError: Nobody answers at the lighthouse's address.
    """

    def __init__(self, options: Elastic, facts: Mapping[str, object]) -> None:
        self._options = options
        self._facts = {name: str(value) for name, value in facts.items()}
        self._has_met = False  # whether compatible replicas were met
        address = options.address or address_towards(options.lighthouse_address)
        self._store = dist.TCPStore(address, 0, None, True, wait_for_workers=False)
        self._store.set(_FACTS, json.dumps(self._facts))
        self.identity = Identity(
            options.name or f"{socket.gethostname()}-{os.getpid()}",
            f"{address}:{self._store.port}",
            hashlib.sha256(json.dumps(self._facts, sort_keys=True).encode()).hexdigest()[:16],
            uuid.uuid4().hex[:8],
        )
        self._registration = Registration(options, self.identity, address)

    def found(self, min_replicas: int, *, round_index: int, num_failures: int, check_end: Callable[[], None]) -> Quorum:
        """Wait for `min_replicas` replicas that train the same, this one included.

        Args:
            min_replicas: Minimum number of replicas.
            round_index: Number of times that members have met.
            num_failures: Number of exchanges that have failed since the last success.
            check_end: Raises an error if this process has been asked to end.

        Raises:
            RefusedError: This replica is not compatible with the others, or one of them has its name.
            ConnectionError: The lighthouse does not answer, or there are too few replicas, for `Elastic.patience`.
        """
        deadline = Patience(self._options.patience, check_end)
        check_end()
        while True:
            quorum = self._registration.ask(round_index, num_failures, deadline)
            replicas = self._fitting(quorum)
            if len(replicas) >= min_replicas:
                return replace(quorum, replicas=replicas)
            deadline.wait(
                f"{len(replicas)} of at least {min_replicas} replicas are there"
                f" ({', '.join(each.name for each in replicas)}): waiting for more"
            )

    def met(self) -> None:
        """Note that this replica is connected to the others."""
        self._has_met = True
        self._store.set(_MET, "")

    def end(self) -> None:
        """Make the others stop waiting for this replica."""
        self._registration.end()

    def _fitting(self, quorum: Quorum) -> tuple[Identity, ...]:
        """The replicas that train the same as this one, in rank order.

        Raises:
            RefusedError: This replica is new, and not compatible with the one that has met others most often.
        """
        replicas, fits = quorum.replicas, self.identity.fits
        if not self._has_met:
            self._check_name(replicas)
            reference = next((each for each in replicas if each.store == quorum.store), self.identity)
            if reference.fits != fits:
                raise RefusedError(self._why_refused(reference))
        refused = [each.name for each in replicas if each.fits != fits]
        if refused:
            _log.warning("replica %s: refused as not compatible: %s", self.identity.name, ", ".join(refused))
        return tuple(each for each in replicas if each.fits == fits)

    def _check_name(self, replicas: Sequence[Identity]) -> None:
        """Raise a RefusedError if a live replica of this name has met the others, or is the first of two new ones."""
        for other in replicas:
            if other.name != self.identity.name or other == self.identity or has_ended(other.store):
                continue
            if str(other) < str(self.identity) or self._store_of(other).check([_MET]):
                raise RefusedError(
                    f"a replica with the name {other.name!r} exists already, at {other.store}: checkpoints and state"
                    " are found by name, so give each replica its own (Elastic(name=...)). To replace that one, end it"
                    " first"
                )

    def _store_of(self, replica: Identity) -> dist.TCPStore:
        host, _, port = replica.store.rpartition(":")
        timeout = timedelta(seconds=self._options.connect_timeout)
        return dist.TCPStore(host, int(port), None, False, timeout=timeout, wait_for_workers=False)

    def _why_refused(self, reference: Identity) -> str:
        try:
            theirs = json.loads(self._store_of(reference).get(_FACTS))
        except (RuntimeError, ValueError) as error:
            theirs, difference = {}, f"what it trains cannot be read ({str(error).splitlines()[0]})"
        for name in {**theirs, **self._facts}:
            if theirs and theirs.get(name) != self._facts.get(name):
                difference = f"{name}: {_short(self._facts.get(name))} instead of {_short(theirs.get(name))}"
                break
        return (
            f"this replica, {self.identity.name}, is not compatible with {reference.name}, which is training:"
            f" {difference}. All replicas must have the same model, options and versions; a different run needs its own"
            " lighthouse"
        )


def _short(value: object) -> str:
    text = str(value)
    return text if len(text) <= 200 else text[:200] + " ..."


def address_towards(lighthouse: str) -> str:
    """The address from which this machine reaches the lighthouse; nothing is sent."""
    url = urlparse(lighthouse)
    assert url.hostname is not None
    family, kind, protocol, _, target = socket.getaddrinfo(url.hostname, url.port, type=socket.SOCK_DGRAM)[0]
    with socket.socket(family, kind, protocol) as probe:
        probe.connect(target)
        address: str = probe.getsockname()[0]
        return address
