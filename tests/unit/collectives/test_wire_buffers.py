"""Memory for messages is that of what is under way at the same time, whatever comes in between."""

from __future__ import annotations

import torch

from lowbit_strategy.collectives.wire_buffers import WireBuffers


def test_what_is_given_back_serves_the_next_message() -> None:
    buffers = WireBuffers(torch.device("cpu"))
    for _ in range(3):
        first, second = buffers.borrow(2, 50), buffers.borrow(1, 30)
        buffers.give_back(first, second)
    assert buffers.nbytes == 130


def test_a_short_message_does_not_take_the_memory_of_a_long_mean() -> None:
    """Two buckets at a time: one sends while the other has its mean."""
    buffers = WireBuffers(torch.device("cpu"), several=True)
    for _ in range(3):
        mean = buffers.borrow(1, 400)
        buffers.give_back(mean)
        message, mean = buffers.borrow(1, 100), buffers.borrow(1, 400)
        buffers.give_back(message, mean)
    assert buffers.nbytes == 500


def test_a_larger_message_takes_the_place_of_a_smaller_one() -> None:
    buffers = WireBuffers(torch.device("cpu"))
    buffers.give_back(buffers.borrow(1, 10))
    buffers.give_back(buffers.borrow(1, 30))
    assert buffers.nbytes == 30
    wire = buffers.borrow(1, 20)
    buffers.reclaim()
    assert buffers.borrow(1, 20).data_ptr() == wire.data_ptr()


def test_what_a_pass_has_not_used_is_given_up() -> None:
    """DDP rebuilds its buckets, which have other sizes then."""
    buffers = WireBuffers(torch.device("cpu"), several=True)
    buffers.give_back(buffers.borrow(1, 100))
    buffers.reclaim()
    short = buffers.borrow(1, 60)
    assert buffers.nbytes == 100  # it lies where the long one has been
    long = buffers.borrow(1, 1000)
    buffers.give_back(short, long)
    buffers.reclaim()
    assert buffers.nbytes == 1100
    buffers.give_back(buffers.borrow(1, 1000))
    buffers.reclaim()
    assert buffers.nbytes == 1000
    buffers.reclaim()  # a pass in which nothing was sent
    assert buffers.nbytes == 1000


def test_what_lay_there_before_does_not_lie_beside_what_needs_more() -> None:
    """DDP's first buckets and the rebuilt ones in one pass: memory is that of the larger, not of both."""
    buffers = WireBuffers(torch.device("cpu"), several=True)
    before = [buffers.borrow(1, 100) for _ in range(3)]
    buffers.give_back(*before)
    buffers.reclaim()
    wire = buffers.borrow(1, 250)
    assert buffers.nbytes == 250
    buffers.give_back(wire, buffers.borrow(1, 40))
    assert buffers.nbytes == 290
