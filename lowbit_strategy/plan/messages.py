"""What travels: messages, and the transfers that are sent as one."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Literal

Level = Literal["flat", "intra-node", "inter-node"]
EXACT_WEIGHTS = "exact weights"  # the framework's own gather


@dataclass(frozen=True, slots=True)
class Message:
    """What one rank sends in one collective, or in several of one method that wait for each other.

    Args:
        level: The ranks that exchange it: all (``flat``), those of a node, or those with the same part on all nodes.
        what: What is sent, in a word.
        nbytes: Bytes that this rank sends to others, as the method promises them.
        framing_nbytes: Sent in addition: headers, padding.
        in_series: Collectives, each of which waits for the one before.
        fixed: Whether the bytes do not depend on values.
        internode_fraction: How much of it leaves the node, from 0 to 1.
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
    """What is sent as one: a bucket of DDP, a module that FSDP2 shards, a bucket of a round.

    Args:
        name: What reports call it.
        numel: Elements of its parameters, wholly.
        messages: Each waits for the one before it.
        repeats: How often it travels per step (of a round: per round), on average.
        buffer_nbytes: Memory for its messages while they are under way.
        encoded_numel: Elements that this rank encodes and decodes for it, all hops together.
        brief_nbytes: Memory that only one transfer has at a time: what travels inside a node while all wait for it, and
            between two hops the mean of what this rank owns.
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
        """Collectives that wait for each other, each time that it travels."""
        return sum(message.in_series for message in self.messages)

    def nbytes(self, *levels: Level) -> int:
        """Promised bytes each time that it travels, on these levels; none given: on all."""
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
