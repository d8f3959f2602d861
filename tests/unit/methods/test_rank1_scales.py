"""LoCo with scales of rows times columns: which parameters get them, how they are cut, what they cost and keep."""

from __future__ import annotations

import dataclasses

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from lowbit_strategy.collectives.layout import Share, dim0_cut
from lowbit_strategy.engine.bucket import BucketLayout, Entry
from lowbit_strategy.engine.engine import GradientSync
from lowbit_strategy.kernels.codebooks import unit_gain
from lowbit_strategy.kernels.format import BlockFormat, Rank1Format
from lowbit_strategy.methods._base.codec_pair import CodecPair
from lowbit_strategy.methods._base.tensor_spec import TensorSpec
from lowbit_strategy.methods.quantization.loco import LoCo, LoCoCodec
from lowbit_strategy.methods.registry import preset
from lowbit_strategy.methods.wrappers.ef21 import EF21
from lowbit_strategy.methods.wrappers.rotate import Rotate
from lowbit_strategy.ranks.ranks import Ranks
from tests.worlds.one_tensor import OneTensor, gaussian
from tests.worlds.simulated import SimulatedWorld

EVERYTHING = {"exempt": (), "high_precision": ()}
RANK1 = LoCo(bits=2, codebook="unit_gain", scales="rank1", block_size=64, return_beta=0.8, **EVERYTHING)  # type: ignore[arg-type]


def uplink(compressor: LoCo, spec: TensorSpec) -> LoCoCodec:
    method = compressor.assign(spec).method
    assert isinstance(method, CodecPair)
    assert isinstance(method.uplink, LoCoCodec)
    return method.uplink


@pytest.mark.parametrize(
    ("shape", "columns"),
    [
        ((256, 64), 64),
        ((64, 32, 3, 3), 288),  # a convolution: one row per output channel
        ((8, 128, 96), 96),  # experts: one row per expert and input
        ((32000, 48), 48),
        ((32, 32), 32),
        ((31, 31), None),  # more than a bit per element
        ((4096,), None),
        ((4096, 1), None),
        ((), None),
        ((0, 64), None),
    ],
)
def test_matrices_get_scales_of_rows_and_columns_where_those_cost_a_bit_at_most(
    shape: tuple[int, ...], columns: int | None
) -> None:
    fmt = uplink(RANK1, TensorSpec("p", shape)).fmt
    assert fmt == (RANK1.fmt if columns is None else Rank1Format(codes=unit_gain(4, 128), columns=columns))


def test_rows_are_runs_in_memory() -> None:
    spec = TensorSpec("conv", (64, 32, 3, 3), memory_order=(0, 2, 3, 1))
    assert spec.matrix_shape == (192, 96)
    assert TensorSpec("turned", (48, 96), memory_order=(1, 0)).matrix_shape == (96, 48)


def test_both_hops_the_warm_up_and_high_precision_have_them() -> None:
    spec = TensorSpec("p", (256, 64))
    method = dataclasses.replace(RANK1, return_bits=4, warmup_steps=3, warmup_bits=4).at(0).method(spec)
    assert isinstance(method.downlink, LoCoCodec)
    for codec, bits in ((method.uplink, 4), (method.downlink, 4)):
        assert isinstance(codec.fmt, Rank1Format)
        assert (codec.fmt.columns, codec.fmt.codes.bits) == (64, bits)
    high = RANK1.high_precision_method(spec)
    assert high.label == "loco 8-bit, scales of rows times 64 columns"
    assert isinstance(uplink(preset("loco1"), spec).fmt, BlockFormat)  # type: ignore[arg-type]


@given(rows=st.integers(30, 90), columns=st.integers(40, 90), world_size=st.integers(1, 9))
def test_chunks_are_whole_rows_under_both_frameworks(rows: int, columns: int, world_size: int) -> None:
    spec = TensorSpec("p", (rows, columns))
    method = RANK1.assign(spec).method
    for scatter in (False, True):
        cut = spec.cut(world_size, method.block_size, scatter=scatter)
        assert cut.row_numel == -(-rows // world_size) * columns
        assert sum(cut.row_length(rank) for rank in range(world_size)) == spec.numel
        assert all(cut.row_length(rank) % columns == 0 for rank in range(world_size))
        hops = 1 if scatter else 2
        message = -(-cut.row_numel // 128) * 32 + 2 * (cut.row_numel // columns + columns)
        assert method.wire_nbytes(spec, world_size, scatter=scatter) == hops * (world_size - 1) * message


@given(rows=st.integers(30, 90), columns=st.integers(40, 90), count=st.integers(1, 5), world_size=st.integers(1, 5))
def test_parts_of_two_levels_are_whole_rows(rows: int, columns: int, count: int, world_size: int) -> None:
    spec = TensorSpec("p", (rows, columns))
    method = RANK1.assign(spec).method
    for index in range(count):
        part = spec.shared(Share(index, count))
        cut = part.cut(world_size, method.block_size, scatter=False)
        assert all(cut.row_length(rank) % columns == 0 for rank in range(world_size))


@given(
    rows=st.integers(30, 50),
    columns=st.integers(40, 60),
    world_size=st.integers(1, 5),
    dtype=st.sampled_from([torch.float32, torch.bfloat16, torch.float16]),
    scatter=st.booleans(),
)
def test_what_came_in_has_come_out_or_is_in_a_residual(
    rows: int, columns: int, world_size: int, dtype: torch.dtype, scatter: bool
) -> None:
    """Over simulated ranks, uneven chunks and empty ones included; and the bytes are those of the account."""
    spec = TensorSpec("p", (rows, columns))
    world, device = SimulatedWorld(world_size), torch.device("cpu")
    syncs = [
        GradientSync(RANK1.conserving(), [spec], Ranks.flat(comm), device, scatter=scatter) for comm in world.comms
    ]
    row = dim0_cut(spec.shape, world_size).row_numel
    layout = BucketLayout((Entry("p", 0),), row_numel=row if scatter else None)
    came, out = torch.zeros(spec.numel, dtype=torch.float64), torch.zeros(spec.numel, dtype=torch.float64)
    for step in range(4):
        grads = [gaussian(spec.shape, 10 * step + rank).to(dtype).view(-1) for rank in range(world_size)]
        came += sum(g.double() for g in grads) / world_size
        if scatter:
            padded = [torch.nn.functional.pad(g, (0, row * world_size - spec.numel)) for g in grads]
            results = [torch.zeros(row, dtype=torch.float32) for _ in grads]
            world.reduce(syncs, layout, padded, results)
            out += torch.cat(results)[: spec.numel].double() / world_size
        else:
            buffers = [g.float() for g in grads]
            world.reduce(syncs, layout, buffers, buffers)
            assert all(torch.equal(buffer, buffers[0]) for buffer in buffers)
            out += buffers[0].double()
    unsent = [sync.store("p").export_unsent("p") for sync in syncs]
    left = sum(part.double() for part in unsent if part is not None) / world_size
    assert torch.allclose(came, out + left, atol=1e-3)
    method = RANK1.assign(spec).method
    headers = 16 * (1 if scatter else 2) * (world_size - 1)
    padding = 16 * (1 if scatter else 2) * (world_size - 1)  # a message is filled up to a multiple of 16 bytes
    exact = method.wire_nbytes(spec, world_size, scatter=scatter)
    assert 0 <= world.comms[0].sent_nbytes / 4 - exact - headers <= padding


def test_a_rank_one_gradient_is_sent_with_its_magnitudes() -> None:
    """Rows and columns of very different sizes: blocks send most of them far too large or small, in one step."""
    rows, columns = 10.0 ** torch.linspace(-2, 2, 96), 10.0 ** torch.linspace(2, -2, 64)
    g = torch.outer(rows, columns) * gaussian((96, 64), 0).sign()
    for name in ("loco1", "loco2", "loco3"):
        compressor = dataclasses.replace(preset(name), scales="rank1", **EVERYTHING)  # type: ignore[type-var]
        mean = OneTensor(compressor, (96, 64), 3).step([g] * 3).view(96, 64)
        ratio = mean / g
        assert float(ratio.max() / ratio.min()) < 1.03
        blocks = dataclasses.replace(compressor, scales="blocks")
        ratio = OneTensor(blocks, (96, 64), 3).step([g] * 3).view(96, 64) / g
        assert float(ratio.max() / ratio.min()) > 4.0


def test_differences_take_codes_with_a_zero() -> None:
    inner = LoCo(bits=4, scales="rank1", **EVERYTHING)  # type: ignore[arg-type]
    world, g = OneTensor(EF21(compressor=inner), (40, 50), 3), gaussian((40, 50), 1)
    for _ in range(20):
        mean = world.step([g] * 3)
    assert torch.allclose(mean, g.view(-1), atol=1e-5)


def test_wrappers_refuse_what_rows_times_columns_cannot_do() -> None:
    signs = LoCo(bits=1, codebook="unit_gain", scales="rank1", **EVERYTHING)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="can err by more than its input"):
        EF21(compressor=signs)
    with pytest.raises(ValueError, match="cannot be rotated: wrap a quantiser of blocks"):
        Rotate(compressor=signs)


def test_scales_are_blocks_or_rank1() -> None:
    with pytest.raises((TypeError, ValueError), match="scales"):
        LoCo(scales="rows")  # type: ignore[arg-type]


def test_blocks_that_do_not_fit_those_of_the_other_hop_are_refused() -> None:
    rows, blocks = (LoCo(scales=scales).method(TensorSpec("w", (480, 48))) for scales in ("rank1", "blocks"))
    assert isinstance(rows, CodecPair)
    assert isinstance(blocks, CodecPair)
    with pytest.raises(ValueError, match="must be a multiple of the smaller ones, got 48 on the uplink and 128 on the"):
        CodecPair(rows.uplink, blocks.downlink)
