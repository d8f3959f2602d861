"""The exchanges of a bucket on simulated ranks: any shapes, types and numbers of ranks, any mix of codecs."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import NamedTuple

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from lowbit_strategy.codecs.base import Codec, DenseCodec, StepContext
from lowbit_strategy.codecs.block import BlockCodec
from lowbit_strategy.collectives.exchange import CodedGroup, Exchange
from lowbit_strategy.collectives.layout import ParamView, TensorSpec
from lowbit_strategy.collectives.step_flags import StepFlags
from lowbit_strategy.collectives.wire_buffers import WireBuffers
from lowbit_strategy.kernels.format import uniform
from testing.worlds.simulated import SimulatedWorld

CPU = torch.device("cpu")
EXACT = DenseCodec("float32")
COARSE = BlockCodec(uniform(4, 32))


class Part(NamedTuple):
    """One parameter of a bucket."""

    shape: tuple[int, ...]
    codec: Codec


class Bucket:
    """Parameters in one buffer, as DDP or FSDP2 lays them out, and the exchanges that reduce it in a world."""

    def __init__(self, parts: Sequence[Part], world_size: int, *, sharded: bool, prefix: str = "p") -> None:
        self.world, self.sharded = SimulatedWorld(world_size), sharded
        specs = [TensorSpec(f"{prefix}{i}", part.shape, sharded=sharded) for i, part in enumerate(parts)]
        rows = [spec.row_numel(world_size, part.codec.block_size) for spec, part in zip(specs, parts, strict=True)]
        self.row_numel, at = sum(rows), 0
        self.slots: dict[ParamView, Codec] = {}
        for spec, part, row in zip(specs, parts, rows, strict=True):
            slot = ParamView(spec, world_size, row, at, self.row_numel if sharded else row)
            self.slots[slot] = part.codec
            at += row if sharded else spec.numel
        self.numel = at * world_size if sharded else at
        self.flags = [StepFlags(CPU) for _ in range(world_size)]
        self.exchanges = [
            Exchange(self._routes(), comm, CPU, buffers=WireBuffers(CPU), flags=flags)
            for comm, flags in zip(self.world.comms, self.flags, strict=True)
        ]

    def _routes(self) -> list[CodedGroup]:
        routes = []
        for codec in dict.fromkeys(self.slots.values()):
            slots = tuple(slot for slot, own in self.slots.items() if own == codec)
            routes.append(CodedGroup(codec, {}, None if self.sharded else codec, {}, codec.block_size, slots))
        return routes

    def share(self, slot: ParamView, rank: int) -> slice:
        """Where the share that `rank` owns of a parameter lies in a buffer."""
        start = slot.offset + rank * slot.row_stride
        return slice(start, start + slot.row_length(rank))

    def fill(self, dtype: torch.dtype = torch.float32) -> list[Tensor]:
        """Every rank's bucket; what no parameter fills is zero."""
        generator, buffers = torch.Generator().manual_seed(self.numel), []
        for rank in range(self.world.size):
            x = torch.zeros(self.numel)
            for slot, owner in itertools.product(self.slots, range(self.world.size)):
                values = torch.randn(slot.row_length(owner), generator=generator)
                x[self.share(slot, owner)] = values * (rank + 1)
            buffers.append(x.to(dtype))
        return buffers

    def run(self, buffers: Sequence[Tensor], sent: Sequence[Tensor] | None = None) -> list[Tensor]:
        """Every rank's result, at once: under FSDP2 rows, under DDP buffers."""
        outs = [torch.zeros(self.row_numel, dtype=x.dtype) if self.sharded else x.clone() for x in buffers]
        stages = [
            exchange.run(x, out, StepContext(0, rank + 1, 7), None if sent is None else sent[rank].copy_)
            for rank, (exchange, x, out) in enumerate(zip(self.exchanges, buffers, outs, strict=True))
        ]
        for pending in itertools.zip_longest(*stages):
            for handle in pending:
                handle.wait()
        return outs

    def owned(self, outs: Sequence[Tensor], slot: ParamView, rank: int) -> Tensor:
        """What the ranks' results hold of the share of `rank`."""
        if self.sharded:
            return outs[rank][slot.offset : slot.offset + slot.row_length(rank)]
        return outs[0][self.share(slot, rank)]


def total(values: Sequence[Tensor]) -> Tensor:
    """float32, added in rank order."""
    result = values[0].float()
    for value in values[1:]:
        result = result + value.float()
    return result


parts = st.lists(
    st.builds(Part, st.lists(st.integers(0, 9), max_size=3).map(tuple), st.sampled_from([EXACT, COARSE])),
    min_size=1,
    max_size=5,
)
worlds = st.integers(1, 5)
dtypes = st.sampled_from([torch.float32, torch.bfloat16, torch.float16])


@given(parts, worlds, st.booleans(), dtypes)
def test_a_codec_without_loss_gives_the_sum_in_rank_order(
    parts: list[Part], world_size: int, sharded: bool, dtype: torch.dtype
) -> None:
    bucket = Bucket([part._replace(codec=EXACT) for part in parts], world_size, sharded=sharded)
    buffers = bucket.fill(dtype)
    outs = bucket.run(buffers)
    for slot, owner in itertools.product(bucket.slots, range(world_size)):
        wanted = total([x[bucket.share(slot, owner)] for x in buffers]) * (1.0 if sharded else 1.0 / world_size)
        assert torch.equal(bucket.owned(outs, slot, owner), wanted.to(dtype))
    if not sharded:
        assert all(torch.equal(out, outs[0]) for out in outs)


@given(parts, worlds, dtypes)
def test_owners_add_what_the_others_report_to_have_sent(parts: list[Part], world_size: int, dtype: torch.dtype) -> None:
    bucket = Bucket(parts, world_size, sharded=True)
    buffers = bucket.fill(dtype)
    sent = [torch.zeros(bucket.numel) for _ in buffers]
    outs = bucket.run(buffers, sent)
    for (slot, codec), owner in itertools.product(bucket.slots.items(), range(world_size)):
        share = bucket.share(slot, owner)
        assert torch.equal(bucket.owned(outs, slot, owner), total([s[share] for s in sent]).to(dtype))
        for x, s in zip(buffers, sent, strict=True):
            error = (x[share].float() - s[share]).abs()
            limit = 0.0 if codec == EXACT else float(x[share].float().abs().amax()) / 7 if error.numel() else 0.0
            assert (error <= limit).all()


@given(parts, worlds)
def test_all_ranks_decode_the_same_bits_within_two_quantization_steps(parts: list[Part], world_size: int) -> None:
    bucket = Bucket(parts, world_size, sharded=False)
    buffers = bucket.fill()
    outs = bucket.run(buffers)
    assert all(torch.equal(out, outs[0]) for out in outs)
    for slot, owner in itertools.product(bucket.slots, range(world_size)):
        share = bucket.share(slot, owner)
        if slot.row_length(owner):
            mean = total([x[share] for x in buffers]) / world_size
            largest = max(float(x[share].abs().amax()) for x in buffers)
            assert ((outs[0][share] - mean).abs() <= 2 * largest / 7).all()


@given(parts, worlds, st.booleans())
def test_bytes_are_counted_before_and_while_they_travel(parts: list[Part], world_size: int, sharded: bool) -> None:
    bucket = Bucket(parts, world_size, sharded=sharded)
    bucket.run(bucket.fill())
    for exchange, comm in zip(bucket.exchanges, bucket.world.comms, strict=True):
        row_nbytes = exchange.uplink_nbytes + (0 if sharded else exchange.downlink_nbytes)
        assert comm.sent_nbytes == row_nbytes * (world_size - 1)
        assert (comm.sent_nbytes > 0) == (world_size > 1)


@given(parts, worlds, st.booleans())
def test_memory_for_messages_is_given_back(parts: list[Part], world_size: int, sharded: bool) -> None:
    bucket = Bucket(parts, world_size, sharded=sharded)
    results = [bucket.run(bucket.fill()) for _ in range(2)]
    held = [exchange._buffers.nbytes for exchange in bucket.exchanges]
    results.append(bucket.run(bucket.fill()))
    assert [exchange._buffers.nbytes for exchange in bucket.exchanges] == held  # no step asks for more than the last
    assert all(torch.equal(a, b) for again in results[1:] for a, b in zip(results[0], again, strict=True))


@pytest.mark.parametrize("sharded", [False, True])
@pytest.mark.parametrize("value", [float("inf"), float("nan")])
def test_a_value_that_is_not_finite_reaches_its_owner_and_is_noted(value: float, sharded: bool) -> None:
    bucket = Bucket([Part((40, 2), EXACT), Part((64, 3), COARSE)], 3, sharded=sharded)
    buffers = bucket.fill()
    for slot in bucket.slots:
        buffers[1][bucket.share(slot, 2).start] = value
    outs = bucket.run(buffers)
    for slot in bucket.slots:
        assert not bucket.owned(outs, slot, 2).isfinite().all()
        assert bucket.owned(outs, slot, 0).isfinite().all()
    assert bucket.flags[1].overflow.item() == 1


def test_a_message_of_another_layout_is_an_error_that_names_its_sender() -> None:
    bucket = Bucket([Part((64,), COARSE)], 3, sharded=False)
    other = Bucket([Part((64,), COARSE)], 3, sharded=False, prefix="another")
    bucket.exchanges[2] = Exchange(
        other._routes(), bucket.world.comms[2], CPU, buffers=WireBuffers(CPU), flags=StepFlags(CPU)
    )
    with pytest.raises(RuntimeError, match="rank 2 sent a message with a different layout than rank 0 expects"):
        bucket.run(bucket.fill())


class OnCuda(Tensor):
    """A tensor that says it is on a GPU: the code for CUDA runs, on values that can be looked at."""

    is_cuda = True  # type: ignore[assignment]


class Event:
    """A copy to the host has arrived when it is asked for."""

    def record(self) -> None: ...

    def query(self) -> bool:
        return True


def test_on_cuda_another_layout_in_any_step_is_an_error_one_step_later(monkeypatch: pytest.MonkeyPatch) -> None:
    """The host does not wait for the device within a step: it is noted there, and looked at after the next one."""
    zeros = torch.zeros
    monkeypatch.setattr(torch, "zeros", lambda *args, pin_memory=False, **kwargs: zeros(*args, **kwargs))
    monkeypatch.setattr(torch.cuda, "Event", Event)
    flags = StepFlags(CPU)
    flags._broken = flags._broken.as_subclass(OnCuda)
    header = torch.arange(16, dtype=torch.uint8)
    received = torch.cat([header, torch.ones(8, dtype=torch.uint8)]).repeat(4, 1).as_subclass(OnCuda)
    for _ in range(3):
        flags.check_layout(received, header, 0)
        flags.raise_if_broken(0)
    received[2, 5] += 1  # in a later step
    flags.check_layout(received, header, 0)
    flags.raise_if_broken(0)
    with pytest.raises(RuntimeError, match="rank 2 sent a message with a different layout than rank 0 expects"):
        flags.raise_if_broken(0)
