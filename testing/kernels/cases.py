"""What every fast kernel is compared with the reference on: formats, awkward values, awkward segments.

The same cases run in Triton's interpreter and on a real GPU. A case fills every buffer with a pattern first, so that a
byte written outside the segments shows as well.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any, Literal

import torch
from torch import Tensor

from lowbit_strategy.kernels.codebooks import unbiased_lloyd_max
from lowbit_strategy.kernels.feedback import Feedback
from lowbit_strategy.kernels.format import BlockFormat, DenseFormat, e2m1, ternary, uniform
from lowbit_strategy.kernels.reference import blocks as reference_blocks
from lowbit_strategy.kernels.reference import dense as reference_dense
from lowbit_strategy.kernels.segments import Segment, Segments

FITTED_2 = (-1.5078125, -0.453125, 0.453125, 1.5078125)
FITTED_1 = (-0.796875, 0.796875)
ODD = (-2.0, -0.875, 0.0, 0.75, 1.875)  # five codebook, not symmetric


def codebook_format(bits: int, codebook: tuple[float, ...], block_size: int = 128, rule: str = "rms") -> BlockFormat:
    return BlockFormat(bits=bits, block_size=block_size, scale_rule=rule, codebook=codebook)  # type: ignore[arg-type]


FORMATS: dict[str, BlockFormat] = {
    **{f"uniform{bits}": uniform(bits, 128) for bits in range(2, 9)},
    **{f"uniform4-block{size}": uniform(4, size) for size in (32, 64, 256, 1024, 4096)},
    "uniform8-block32": uniform(8, 32),
    "uniform3-block32": uniform(3, 32),
    "uniform8-block4096": uniform(8, 4096),
    "fitted2": codebook_format(2, FITTED_2),
    "fitted2-block64": codebook_format(2, FITTED_2, 64),
    "fitted2-mean": codebook_format(2, FITTED_2, 32, "mean_abs"),
    "fitted1": codebook_format(1, FITTED_1, 128, "mean_abs"),
    "fitted1-block32": codebook_format(1, FITTED_1, 32, "rms"),
    "fitted1-block1024": codebook_format(1, FITTED_1, 1024, "rms"),
    "fitted3-odd": codebook_format(3, ODD),
    "fitted4": codebook_format(4, tuple((i - 7.5) / 4 for i in range(16)), 64),
    **{f"ternary-block{size}": ternary(size) for size in (32, 64, 128, 256)},
    "fitted3-absmax": codebook_format(3, (-2.0, -0.875, 0.0, 0.75, 2.0), rule="absmax"),
    "e2m1": e2m1(128),
    "e2m1-block32": e2m1(32),
    "unit1": unbiased_lloyd_max(2, 64),
    "unit2": unbiased_lloyd_max(4, 64),
    "unit-ternary": unbiased_lloyd_max(3, 128),
    "unit-ternary-block32": unbiased_lloyd_max(3, 32),
}


@dataclass(frozen=True, kw_only=True)
class Case:
    """One comparison. ``steps`` LoCo steps are taken one after the other, so that residuals are met in use."""

    name: str
    fmt: BlockFormat
    dtype: torch.dtype = torch.float32
    residual: torch.dtype = torch.int8
    num_tiles: float = 1.3
    options: dict[str, Any] = field(default_factory=dict)


CORE = frozenset(  # one for each path through the code
    {f"uniform{bits}" for bits in (2, 4, 7, 8)}
    | {"uniform4-block32", "uniform4-block4096", "fitted2", "fitted1-block32", "fitted3-odd", "e2m1"}
    | {"ternary-block128", "ternary-block32", "unit2", "unit-ternary", "uniform3-stochastic", "uniform4-stochastic"}
    | {f"{name}-{what}" for name in ("uniform4", "fitted2") for what in ("residual32", "dithered")}
    | {"uniform4-bfloat16", "uniform4-float16"}
)


QUICK = frozenset({"uniform4", "fitted2", "ternary-block128", "e2m1"})


def quick_cases() -> list[Case]:
    """A case for each way in which codes are found or packed; the rest of the core is marked slow."""
    return [case for case in cases() if case.name in QUICK]


def core_cases() -> list[Case]:
    return [case for case in cases() if case.name in CORE]


def other_cases() -> list[Case]:
    return [case for case in cases() if case.name not in CORE]


def cases() -> Iterator[Case]:
    """Every format once, and the four formats that training uses in every combination that changes the code path."""
    for name, fmt in FORMATS.items():
        yield Case(name=name, fmt=fmt)
    for name in ("uniform4", "uniform8", "fitted2", "ternary-block128"):
        fmt = FORMATS[name]
        yield Case(name=f"{name}-bfloat16", fmt=fmt, dtype=torch.bfloat16)
        yield Case(name=f"{name}-float16", fmt=fmt, dtype=torch.float16)
        yield Case(name=f"{name}-residual32", fmt=fmt, residual=torch.float32)
        yield Case(name=f"{name}-dithered", fmt=fmt, options={"stochastic_residual": True})
    for name in ("uniform2", "uniform3", "uniform4", "uniform8"):
        options = {"stochastic": True, "stochastic_residual": True, "beta": 0.5}
        yield Case(name=f"{name}-stochastic", fmt=FORMATS[name], options=options)
    yield Case(name="uniform4-plain-feedback", fmt=FORMATS["uniform4"], options={"beta": 0.0})


def segments_for(fmt: BlockFormat, tile: int, num_tiles: float) -> Segments:
    """Whole tiles on an aligned place, a tail, an unaligned piece, one element, and nothing; with gaps between."""
    block = fmt.block_size
    rows, x_offset, state, wire = [], 0, block, 16
    for i, (numel, shift) in enumerate(
        ((int(tile * num_tiles), 0), (2 * block, 0), (block + 5, 3), (1, 1), (0, 0), (3 * block - 1, 2))
    ):
        x_offset = -(-x_offset // 16) * 16 + 16 + shift
        rows.append(Segment(x_offset, numel, state, wire, 1000 + 77 * i))
        x_offset += numel
        state += (fmt.num_blocks(numel) + 1) * block
        wire += -(-fmt.wire_nbytes(numel) // 16) * 16 + 32
    return Segments(rows)


def gradient(numel: int, block: int, seed: int, dtype: torch.dtype) -> Tensor:
    """Blocks of every kind in turn: ordinary ones of many sizes, then those that break careless kernels."""
    generator = torch.Generator().manual_seed(seed)
    num_blocks = -(-numel // block)
    x_KB = torch.randn(num_blocks, block, generator=generator)
    x_KB *= 10.0 ** torch.randint(-6, 3, (num_blocks, 1), generator=generator)
    special = [0.0, -0.0, 1e-40, 1.3e-38, 3e38, 3.4028e38, float("inf"), float("nan"), 6.0, -1e-39]
    for i, value in enumerate(special):
        k = (5 * i + 3 + seed) % num_blocks
        match i % 3:
            case 0:
                x_KB[k] = value
            case 1:
                x_KB[k, (7 * i) % block] = value
            case 2:
                x_KB[k] = torch.randn(block, generator=generator).sign() * value
    x_KB[(2 + seed) % num_blocks] = 0.0  # idle
    grid = torch.randint(-7, 8, (block,), generator=generator) * 0.5
    x_KB[(4 + seed) % num_blocks] = grid + 0.25 * (grid.abs() < 3)  # ties
    halfway = torch.tensor([0.5, 1.5, 2.5, 3.5, 5.0, 7.0, 10.0])[grid.abs().mul(2).long().clamp(max=6)] * grid.sign()
    halfway[0] = 12.0
    x_KB[(9 + seed) % num_blocks] = halfway  # ties of E2M1
    return x_KB.view(-1)[:numel].to(dtype)


def filled(numel: int, dtype: torch.dtype, device: torch.device | str) -> Tensor:
    pattern = torch.arange(numel * dtype.itemsize, dtype=torch.int64) * 37 % 251
    return pattern.to(torch.uint8).view(dtype).to(device)


def bits(x: Tensor) -> Tensor:
    """What must be equal: every bit, with all NaNs alike."""
    x = x.cpu()
    if not x.is_floating_point():
        return x
    return torch.where(x.isnan(), torch.full_like(x, float("nan")), x).view(
        {2: torch.int16, 4: torch.int32}[x.element_size()]
    )


def differences(got: dict[str, Tensor], want: dict[str, Tensor]) -> list[str]:
    out = []
    for name, expected in want.items():
        wrong = (bits(got[name]) != bits(expected)).view(-1)
        if wrong.any():
            at = wrong.nonzero()[:4, 0].tolist()
            got_there, want_there = got[name].cpu().view(-1)[at].tolist(), expected.cpu().view(-1)[at].tolist()
            out.append(f"{name}: {int(wrong.sum())} differ, first at {at}: {got_there}, reference {want_there}")
    return out


def check_case(case: Case, fast_blocks: Any, tile: int, device: str, *, truncating: bool = False) -> list[str]:
    """Run one case on both implementations; what differs, in words.

    `truncating`: `device` stores bfloat16 by cutting bits off, as Triton's interpreter does (a GPU rounds).
    """
    segments = segments_for(case.fmt, tile, case.num_tiles)
    last = segments.rows[-1]
    x_numel = last.x_offset + last.numel + 9
    wire_nbytes = last.wire_offset + case.fmt.wire_nbytes(last.numel) + 37
    state_numel = last.state_offset + (case.fmt.num_blocks(last.numel) + 1) * case.fmt.block_size
    x_2 = [gradient(x_numel, case.fmt.block_size, seed, case.dtype) for seed in (0, 1)]
    sizes = {"wire": wire_nbytes, "state": state_numel, "blocks": state_numel // case.fmt.block_size}

    def decode(blocks: Any, device: str) -> dict[str, Tensor]:
        cut = truncating and case.dtype == torch.bfloat16 and blocks is reference_blocks
        return run_decode(case, blocks, segments, x_2, sizes, x_numel, device, cut=cut)

    def encode(blocks: Any, device: str) -> dict[str, Tensor]:
        return run_encode(case, blocks, segments, x_2, sizes, device)

    def loco(blocks: Any, device: str) -> dict[str, Tensor]:
        return run_loco(case, blocks, segments, x_2, sizes, device)

    wrong = []
    for what, run in (("encode", encode), ("loco", loco), ("decode_sum", decode)):
        want, got = run(reference_blocks, "cpu"), run(fast_blocks, device)
        wrong += [f"{case.name} {what}: {line}" for line in differences(got, want)]
    return wrong


def run_encode(
    case: Case, blocks: Any, segments: Segments, x_2: list[Tensor], sizes: dict[str, int], device: str
) -> dict[str, Tensor]:
    wire, flag = filled(sizes["wire"], torch.uint8, device), torch.zeros(1, dtype=torch.int32, device=device)
    stochastic = case.options.get("stochastic", False)
    blocks.encode_(x_2[0].to(device), wire, segments, case.fmt, stochastic=stochastic, seed=2**32 - 5, flag=flag)
    return {"wire": wire, "flag": flag}


def run_loco(
    case: Case, blocks: Any, segments: Segments, x_2: list[Tensor], sizes: dict[str, int], device: str
) -> dict[str, Tensor]:
    wire = filled(sizes["wire"], torch.uint8, device)
    state: tuple[Tensor, Tensor | None]
    if case.residual == torch.int8:
        scale = torch.linspace(0, 1e-2, sizes["blocks"]).bfloat16()
        state = filled(sizes["state"], torch.int8, device), scale.to(device)
    else:
        generator = torch.Generator().manual_seed(9)
        state = (torch.randn(sizes["state"], generator=generator) * 1e-3).to(device), None
    flag = torch.zeros(1, dtype=torch.int32, device=device)
    stochastic, beta = case.options.get("stochastic", False), case.options.get("beta", 0.8)
    dithered = case.options.get("stochastic_residual", False)
    seen: dict[str, Tensor] = {}
    for step, (x, reset) in enumerate(((x_2[1], False), (x_2[0], False), (x_2[1], True))):
        feedback = Feedback(state[0], state[1], beta, reset, dithered)
        options: dict[str, Any] = {"stochastic": stochastic, "seed": step}
        blocks.encode_(x.to(device), wire, segments, case.fmt, flag=flag, feedback=feedback, **options)
        seen |= {f"wire{step}": wire.clone(), f"residual{step}": state[0].clone(), f"flag{step}": flag.clone()}
        if state[1] is not None:
            seen[f"residual_scale{step}"] = state[1].clone()
    return seen


def run_decode(
    case: Case,
    blocks: Any,
    segments: Segments,
    x_2: list[Tensor],
    sizes: dict[str, int],
    x_numel: int,
    device: str,
    *,
    cut: bool,
) -> dict[str, Tensor]:
    """Three sources, encoded by the reference; rows of an odd length."""
    wire_3B = torch.zeros(3, sizes["wire"] + 1, dtype=torch.uint8)
    for source, x in zip(wire_3B, (x_2[0], x_2[1], x_2[0].flip(0)), strict=True):
        flag = torch.zeros(1, dtype=torch.int32)
        reference_blocks.encode_(x, source, segments, case.fmt, stochastic=False, seed=1, flag=flag)
    out = filled(x_numel, case.dtype, device)
    if cut:
        high = torch.stack((torch.zeros_like(out.view(torch.int16)), out.view(torch.int16)), 1).view(torch.float32)
        blocks.decode_sum_(wire_3B, high.view(-1), segments, case.fmt, alpha=1 / 3)
        out = high.view(torch.bfloat16)[:, 1].contiguous()
    else:
        blocks.decode_sum_(wire_3B.to(device), out, segments, case.fmt, alpha=1 / 3)
    one = filled(x_numel, torch.float32, device)
    blocks.decode_sum_(wire_3B[:1, :-1].to(device).contiguous(), one, segments, case.fmt, alpha=1.0)
    return {"mean": out, "one": one}


MANY_SOURCES = (1, 8, 9, 16, 19)  # with and without whole groups, with and without a rest


def check_sources(fast_blocks: Any, device: str, *, fewer: bool = False) -> list[str]:
    """Decode and sum over many sources on both implementations; what differs, in words.

    `fewer`: one number of sources, with a group and a rest, for every format but the first.
    """
    wrong = []
    for name in ("uniform4", "uniform3", "fitted2", "fitted3-odd", "ternary-block128"):
        fmt = FORMATS[name]
        segments = segments_for(fmt, 512, 1.3)
        last = segments.rows[-1]
        x_numel, wire_nbytes = last.x_offset + last.numel, last.wire_offset + fmt.wire_nbytes(last.numel)
        wire_WB = torch.zeros(max(MANY_SOURCES), wire_nbytes, dtype=torch.uint8)
        for seed, source in enumerate(wire_WB):
            x, flag = gradient(x_numel, fmt.block_size, seed, torch.float32), torch.zeros(1, dtype=torch.int32)
            reference_blocks.encode_(x, source, segments, fmt, stochastic=False, seed=1, flag=flag)
        for sources in (9,) if fewer and name != "uniform4" else MANY_SOURCES:
            want, got = filled(x_numel, torch.float32, "cpu"), filled(x_numel, torch.float32, device)
            reference_blocks.decode_sum_(wire_WB[:sources], want, segments, fmt, alpha=1 / sources)
            fast_blocks.decode_sum_(wire_WB[:sources].to(device), got, segments, fmt, alpha=1 / sources)
            wrong += [f"{name} of {sources} sources: {line}" for line in differences({"sum": got}, {"sum": want})]
    return wrong


def check_unaligned(fast_blocks: Any, device: str) -> list[str]:
    """A message at an odd address, which no bucket has; what differs, in words."""
    fmt = FORMATS["uniform4"]
    segments = segments_for(fmt, 512, 1.3)
    last = segments.rows[-1]
    x, found = gradient(last.x_offset + last.numel, fmt.block_size, 0, torch.float32), []
    wire = filled(last.wire_offset + fmt.wire_nbytes(last.numel) + 1, torch.uint8, "cpu")[1:]
    for blocks, where in ((reference_blocks, "cpu"), (fast_blocks, device)):
        sent, flag = torch.cat((wire[:1], wire)).to(where)[1:], torch.zeros(1, dtype=torch.int32, device=where)
        blocks.encode_(x.to(where), sent, segments, fmt, stochastic=False, seed=1, flag=flag)
        found.append({"wire": sent.cpu()})
    return differences(found[1], found[0])


def dense_case(dtype: torch.dtype, *, num_rows: int) -> tuple[Segments, list[Tensor], int]:
    """Pieces of many sizes in another order than on the wire, unaligned ones too, gradients, and bytes of a message."""
    numels = (5000, 1, 0, 7, 2048, 4096, 33, 9001)
    at, x_offsets = 3, []
    for i, numel in enumerate(numels):
        x_offsets.append(at)
        at += numel + 5 * (i % 3)
    rows, wire = [], 16
    for i in reversed(range(len(numels))):
        rows.append(Segment(x_offsets[i], numels[i], 0, wire))
        wire += -(-4 * numels[i] // 16) * 16 + 16
    return Segments(rows), [gradient(at + 3, 128, seed, dtype) for seed in range(num_rows)], wire


def check_dense(fast: Any, device: str, *, truncating: bool = False, fewer: bool = False) -> list[str]:
    """Dense encode and decode of every dtype on both implementations; what differs, in words.

    `truncating`: as in `check_case`. `fewer`: every pair of wire, dtype and number of sources, not every triple.
    """
    wrong = []
    wires: tuple[Literal["float32", "bfloat16"], ...] = ("float32", "bfloat16")
    dtypes = (torch.float32, torch.bfloat16, torch.float16)
    choices = itertools.product(enumerate(wires), enumerate(dtypes), enumerate((1, 3, 11)))
    for (i, wire_dtype), (j, dtype), (k, sources) in choices:
        if fewer and (i + j + k) % 2:
            continue
        fmt = DenseFormat(wire_dtype)
        segments, rows, wire_nbytes = dense_case(dtype, num_rows=sources)
        out_dtype = torch.float32 if truncating and dtype == torch.bfloat16 else dtype
        run = functools.partial(run_dense, fmt, segments, rows, wire_nbytes, out_dtype)
        name = f"{dtype} as {wire_dtype} from {sources}"
        wrong += [f"{name}: {line}" for line in differences(run(fast, device), run(reference_dense, "cpu"))]
    return wrong


def run_dense(
    fmt: DenseFormat,
    segments: Segments,
    rows: list[Tensor],
    wire_nbytes: int,
    out_dtype: torch.dtype,
    kernels: Any,
    device: str,
) -> dict[str, Tensor]:
    """One message from each row, and their mean."""
    message_WB = filled(len(rows) * wire_nbytes, torch.uint8, device).view(len(rows), wire_nbytes)
    flag = torch.zeros(1, dtype=torch.int32, device=device)
    for x, message in zip(rows, message_WB, strict=True):
        kernels.encode_(x.to(device), message, segments, fmt, flag=flag)
    total = filled(rows[0].numel(), out_dtype, device)
    kernels.decode_sum_(message_WB, total, segments, fmt, alpha=1 / len(rows))
    floats = bits(message_WB[:, 16:].contiguous().view(fmt.torch_dtype))  # all NaNs alike
    return {"wire": floats, "flag": flag, "total": total}
