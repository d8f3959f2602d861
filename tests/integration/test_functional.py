"""Compressed collectives on three real processes, against torch's own and against what the bound promises."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from lowbit_strategy import functional
from lowbit_strategy.codecs.base import Codec, DenseCodec
from lowbit_strategy.functional import Bounded
from lowbit_strategy.methods.zoo.chunk_codec import ChunkCodec
from lowbit_strategy.methods.zoo.eden import EdenCodec
from testing.processes.ranks import run_ranks

SIZE = 3
EXACT = DenseCodec("float32")


def tensor(rank: int, *shape: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(rank))


def mean(*shape: int) -> Tensor:
    return torch.stack([tensor(rank, *shape) for rank in range(SIZE)]).mean(0)


def reductions(rank: int, world_size: int) -> dict[str, Any]:
    shape = (3 * 17, 5, 3)
    x = tensor(rank, *shape)
    before = x.clone()
    found: dict[str, Any] = {
        "exact": functional.all_reduce(x, EXACT),
        "sum": functional.all_reduce(x, EXACT, op="sum"),
        "bits": functional.all_reduce(x, 8),
        "bounded": functional.all_reduce(x, Bounded(1e-3)),
        "bounded sum": functional.all_reduce(x, Bounded(1e-3), op="sum"),
        "rows": functional.reduce_scatter(x, EXACT, op="sum"),
        "bounded rows": functional.reduce_scatter(x, Bounded(1e-2), op="sum"),
        "half": functional.all_reduce(x.bfloat16(), 8).dtype,
        "empty": functional.all_reduce(torch.empty(0, 4), 4).shape,
        "scalar": functional.all_reduce(torch.tensor(float(rank)), Bounded(1e-4)),
    }
    found["unchanged"] = torch.equal(x, before)
    return found


def test_reductions() -> None:
    shape = (3 * 17, 5, 3)
    facts = run_ranks(reductions, SIZE)
    for rank, found in enumerate(facts):
        torch.testing.assert_close(found["exact"], mean(*shape), rtol=1e-6, atol=1e-6)
        torch.testing.assert_close(found["sum"], SIZE * mean(*shape), rtol=1e-6, atol=1e-6)
        assert 1e-4 < (found["bits"] - mean(*shape)).abs().max() < 0.05
        assert 1e-5 < (found["bounded"] - mean(*shape)).abs().max() <= 1e-3 + 1e-6
        assert (found["bounded sum"] - SIZE * mean(*shape)).abs().max() <= 1e-3 + 1e-6
        own = slice(17 * rank, 17 * (rank + 1))
        torch.testing.assert_close(found["rows"], SIZE * mean(*shape)[own], rtol=1e-6, atol=1e-6)
        assert (found["bounded rows"] - SIZE * mean(*shape)[own]).abs().max() <= 1e-2 + 1e-6
        assert found["half"] == torch.bfloat16
        assert found["empty"] == (0, 4)
        assert abs(float(found["scalar"]) - 1.0) <= 1e-4
        assert found["unchanged"]
        for key in ("exact", "bits", "bounded", "bounded sum", "scalar"):
            assert torch.equal(found[key], facts[0][key])


INS = ((4, 0, 7), (2, 5, 1), (0, 3, 3))  # rows that each rank sends


def exchanged(codec: functional.Code, backward: functional.Code) -> dict[str, Tensor]:
    rank = dist.get_rank()
    ins, outs = list(INS[rank]), [each[rank] for each in INS]
    x = tensor(rank, sum(ins), 40).requires_grad_()
    y = functional.all_to_all(x, codec, input_splits=ins, output_splits=outs, backward=backward)
    expected = torch.empty(sum(outs), 40)
    dist.all_to_all_single(expected, x.detach(), outs, ins)
    weight = tensor(10 + rank, sum(outs), 40)
    (y * weight).sum().backward()
    gradient = torch.empty(sum(ins), 40)
    dist.all_to_all_single(gradient, weight, ins, outs)
    assert x.grad is not None
    return {"forward": (y.detach() - expected).abs().max(), "backward": (x.grad - gradient).abs().max()}


def gathered(codec: functional.Code, backward: functional.Code) -> dict[str, Tensor]:
    rank = dist.get_rank()
    x = tensor(rank, 6, 50).requires_grad_()
    y = functional.all_gather(x, codec, backward=backward)
    weight = tensor(20 + rank, SIZE * 6, 50)
    (y * weight).sum().backward()
    total = weight.clone()
    dist.all_reduce(total)
    expected = torch.cat([tensor(r, 6, 50) for r in range(SIZE)])
    assert x.grad is not None
    return {
        "forward": (y.detach() - expected).abs().max(),
        "backward": (x.grad - total[6 * rank : 6 * rank + 6]).abs().max(),
    }


class Errors(NamedTuple):
    """At most, of a result and of the gradient that comes back."""

    forward: float
    backward: float


def differentiable(rank: int, world_size: int) -> dict[str, Errors]:
    codes: dict[str, tuple[functional.Code, functional.Code]] = {
        "exact": (EXACT, EXACT),
        "bounded": (Bounded(1e-3), Bounded(1e-2)),
        "bits": (8, 4),
        "bits forward": (4, EXACT),
    }
    found = {}
    for name, pair in codes.items():
        for function in (exchanged, gathered):
            result = function(*pair)
            found[f"{name} {function.__name__}"] = Errors(float(result["forward"]), float(result["backward"]))
    return found


def test_gradients_go_back_compressed_as_well() -> None:
    limits = {
        "exact exchanged": Errors(0.0, 0.0),
        "exact gathered": Errors(0.0, 1e-6),
        "bounded exchanged": Errors(1e-3, 1e-2),
        "bounded gathered": Errors(1e-3, 1e-2),
        "bits exchanged": Errors(0.05, 0.5),
        "bits gathered": Errors(0.05, 1.5),
        "bits forward exchanged": Errors(0.5, 0.0),
        "bits forward gathered": Errors(0.5, 1e-6),
    }
    for found in run_ranks(differentiable, SIZE):
        assert found.keys() == limits.keys()
        for name, errors in found.items():
            forward, backward = limits[name]
            assert errors.forward <= forward + 1e-6 * (forward > 0), name
            assert errors.backward <= backward + 1e-6 * (backward > 0), name
        assert all(errors.forward > 1e-5 for name, errors in found.items() if "exact" not in name)
        assert found["bits exchanged"].backward > 1e-3 < found["bounded gathered"].backward


Function = Callable[[Tensor], Tensor]
REDUCED: dict[str, tuple[Function, Callable[[Tensor, int], Tensor]]] = {  # and the same of all ranks' tensors [W, ...]
    "mean": (lambda x: functional.all_reduce(x, EXACT), lambda x_W, rank: x_W.mean(0)),
    "sum": (lambda x: functional.all_reduce(x, EXACT, op="sum"), lambda x_W, rank: x_W.sum(0)),
    "mean of rows": (lambda x: functional.reduce_scatter(x, EXACT), lambda x_W, rank: x_W.mean(0).chunk(SIZE)[rank]),
    "sum of rows": (
        lambda x: functional.reduce_scatter(x, EXACT, op="sum"),
        lambda x_W, rank: x_W.sum(0).chunk(SIZE)[rank],
    ),
    "all rows": (lambda x: functional.all_gather(x, EXACT), lambda x_W, rank: x_W.flatten(0, 1)),
    "exchanged rows": (
        lambda x: functional.all_to_all(x, EXACT),
        lambda x_W, rank: torch.cat([x.chunk(SIZE)[rank] for x in x_W]),
    ),
}


def derivatives(y: Tensor, x: Tensor) -> list[Tensor]:
    """The first two of a loss that is the sum of all ranks': there, of one that all ranks have a part of."""
    (first,) = torch.autograd.grad(y.pow(3).sum(), x, create_graph=True)
    (second,) = torch.autograd.grad(first.pow(2).sum(), x)
    return [first.detach(), second]


def differentiated(rank: int, world_size: int) -> dict[str, list[Tensor]]:
    found = {}
    for name, (function, _) in REDUCED.items():
        x = tensor(rank, 2 * SIZE, 5).requires_grad_()
        found[name] = derivatives(function(x), x)
    return found


def test_gradients_of_gradients() -> None:
    """Against one process that has the tensors of all ranks."""
    facts = run_ranks(differentiated, SIZE)
    for name, (_, whole) in REDUCED.items():
        x_W = torch.stack([tensor(rank, 2 * SIZE, 5) for rank in range(SIZE)]).requires_grad_()
        wanted = derivatives(torch.stack([whole(x_W, rank) for rank in range(SIZE)]), x_W)
        for rank, found in enumerate(facts):
            for one, all_ranks in zip(found[name], wanted, strict=True):
                assert torch.allclose(one, all_ranks[rank], rtol=1e-4, atol=1e-4), name


ROUNDING = {torch.float32: 2.0**-24, torch.float16: 2.0**-11, torch.bfloat16: 2.0**-8}
BOUND = 1e-3


def within_bounds(rank: int, world_size: int) -> dict[str, float]:
    """The largest error in units of what is promised, of values whose rounding is below the bound and far above."""
    code, found = Bounded(BOUND), {}
    for dtype, rounding in ROUNDING.items():
        for size in (0.01, 1.0, 1000.0):
            x_W = (size * torch.stack([tensor(r, SIZE, 50) for r in range(SIZE)])).to(dtype)
            calls: dict[str, tuple[Tensor, Tensor]] = {
                "gather": (functional.all_gather(x_W[rank], code), x_W.flatten(0, 1)),
                "exchange": (functional.all_to_all(x_W[rank], code), x_W[:, rank]),
                "mean": (functional.all_reduce(x_W[rank], code), x_W.double().mean(0)),
                "sum": (functional.all_reduce(x_W[rank], code, op="sum"), x_W.double().sum(0)),
                "rows": (functional.reduce_scatter(x_W[rank], code), x_W.double().mean(0)[rank, None]),
            }
            added = (2 * SIZE - 1) * 2.0**-24 * x_W.double().abs().sum(0).max()  # of the sum, which is float32's
            for name, (result, exact) in calls.items():
                promised = (
                    BOUND + rounding * result.double().abs() + (added if name in ("mean", "sum", "rows") else 0.0)
                )
                assert result.dtype == dtype
                found[f"{name} {dtype} {size}"] = float(((result.double() - exact.double()).abs() / promised).max())
    return found


def test_a_bound_is_kept_to_the_rounding_of_the_type() -> None:
    for found in run_ranks(within_bounds, SIZE):
        assert {name: error for name, error in found.items() if error > 1.0} == {}
        assert found["mean torch.bfloat16 1000.0"] > 0.3  # the rounding of the type is most of it


def any_codec(rank: int, world_size: int) -> dict[str, float]:
    """And any group: ranks 0 and 2 only."""
    group = dist.new_group([0, 2])
    if rank == 1:
        return {}
    codecs: dict[str, Codec] = {"eden": EdenCodec(4), "top": ChunkCodec(0.25), "bfloat16": DenseCodec("bfloat16")}
    x = tensor(rank, 8192)
    expected = (tensor(0, 8192) + tensor(2, 8192)) / 2
    return {
        name: float((functional.all_reduce(x, codec, group=group) - expected).norm() / expected.norm())
        for name, codec in codecs.items()
    }


def test_any_codec_on_any_group() -> None:
    first, other, last = run_ranks(any_codec, SIZE)
    assert first == last
    assert not other
    assert first["bfloat16"] < 0.01 < first["eden"] < 0.25 < first["top"] < 0.9


def refusals(rank: int, world_size: int) -> list[str]:
    x, found = torch.randn(7, 2), []
    for call in (
        lambda: functional.all_reduce(x, "loco"),  # type: ignore[arg-type]
        lambda: functional.all_reduce(x, 4, op="max"),  # type: ignore[arg-type]
        lambda: functional.reduce_scatter(x),
        lambda: functional.all_to_all(x, input_splits=[1, 2, 3]),
        lambda: functional.all_to_all(x, input_splits=[1, 2, 4], output_splits=[7]),
        lambda: functional.all_reduce(x.long()),
        lambda: functional.all_gather(x.to(torch.complex64)),
    ):
        try:
            call()
        except ValueError as error:
            found.append(str(error))
    return found


def test_refusals() -> None:
    splits = ("dim 0 must be", "input_splits must be", "output_splits must have")
    expected = ("codec must be", "op must be", *splits, *["x must be a tensor of floats"] * 2)
    for found in run_ranks(refusals, SIZE):
        assert [message.startswith(start) for message, start in zip(found, expected, strict=True)] == [True] * 7
