"""Compressed collectives on three real processes, against torch's own and against what the bound promises."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from lowbit_strategy import functional
from lowbit_strategy.codecs.base import Codec
from lowbit_strategy.codecs.chunk import ChunkTopK
from lowbit_strategy.codecs.dense import DenseCodec
from lowbit_strategy.codecs.eden import EdenCodec
from lowbit_strategy.functional import Bounded
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


def any_codec(rank: int, world_size: int) -> dict[str, float]:
    """And any group: ranks 0 and 2 only."""
    group = dist.new_group([0, 2])
    if rank == 1:
        return {}
    codecs: dict[str, Codec] = {"eden": EdenCodec(4), "top": ChunkTopK(0.25), "bfloat16": DenseCodec("bfloat16")}
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
    ):
        try:
            call()
        except ValueError as error:
            found.append(str(error))
    return found


def test_refusals() -> None:
    expected = ("codec must be", "op must be", "dim 0 must be", "input_splits must be", "output_splits must have")
    for found in run_ranks(refusals, SIZE):
        assert [message.startswith(start) for message, start in zip(found, expected, strict=True)] == [True] * 5
