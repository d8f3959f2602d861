"""Messages, and the transfers that group them."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Literal

Level = Literal["flat", "intra-node", "inter-node"]
EXACT_WEIGHTS = "exact weights"  # the framework's own gather


@dataclass(frozen=True, slots=True)
class Message:
    """One rank's message in one collective, or in several consecutive collectives of one method.

    Args:
        level: The ranks that exchange it: all (``flat``), those of a node, or those with the same part on all nodes.
        what: The content, in a word.
        nbytes: Bytes that this rank sends to others, as promised by the method.
        framing_nbytes: Additional bytes for headers and padding.
        in_series: Number of collectives, each of which waits for the one before it.
        fixed: Whether the number of bytes is independent of values.
        internode_fraction: The fraction that leaves the node, from 0 to 1.
    """

    level: Level
    what: str
    nbytes: int
    framing_nbytes: int = 0
    in_series: int = 1
    fixed: bool = True
    internode_fraction: float = 1.0

    @property
    def total_nbytes(self) -> int:
        return self.nbytes + self.framing_nbytes


@dataclass(frozen=True, slots=True)
class TransferGroup:
    """Messages that are sent together: of a DDP bucket, a module that FSDP2 shards, or a bucket of a round.

    Args:
        name: Its name in reports.
        numel: Elements of its whole parameters.
        messages: Its messages, each of which waits for the one before it.
        repeats: How often it is sent per step, or per round, on average.
        buffer_nbytes: Memory for its messages while they are under way.
        encoded_numel: Elements that this rank encodes and decodes for it, on all hops together.
        brief_nbytes: Memory that only one transfer needs at a time: for messages inside a node while all wait for them
            and, between two hops, for the mean of this rank's shares.
    """

    name: str
    numel: int
    messages: tuple[Message, ...]
    repeats: float = 1
    buffer_nbytes: int = 0
    encoded_numel: int = 0
    brief_nbytes: int = 0

    @property
    def in_series(self) -> int:
        """Number of consecutive collectives per transfer."""
        return sum(message.in_series for message in self.messages)

    def nbytes(self, *levels: Level) -> int:
        """Promised bytes per transfer, on these levels; on all levels if none is given."""
        return sum(message.nbytes for message in self.messages if not levels or message.level in levels)


def step_nbytes(transfers: Iterable[TransferGroup], *levels: Level) -> int:
    """Promised bytes of a step."""
    return round(sum(transfer.repeats * transfer.nbytes(*levels) for transfer in transfers))


def internode_nbytes(transfers: Iterable[TransferGroup], *levels: Level) -> int:
    """Part of `step_nbytes` that leaves the node."""
    return round(
        sum(
            transfer.repeats * message.nbytes * message.internode_fraction
            for transfer in transfers
            for message in transfer.messages
            if not levels or message.level in levels
        )
    )
