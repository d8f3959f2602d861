"""In a step of LoCo on CUDA the host never waits for the device."""

from __future__ import annotations

import weakref
from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from lowbit_strategy.engine.engine import GradientSync
from lowbit_strategy.methods._base.codec_pair import CodecPair
from lowbit_strategy.methods._base.compressor import Compressor
from lowbit_strategy.methods.dense import Dense
from lowbit_strategy.methods.loco import LoCo
from lowbit_strategy.methods.topk import TopK
from lowbit_strategy.ranks.ranks import Ranks
from testing.compressors import Phased
from testing.worlds.echo import EchoComm, Operations

pytest.importorskip("triton", reason="triton is not installed")

from testing.cuda.host_code import CUDA, HostWaits, NoHostSync, on_cuda
from testing.cuda.steps import SPECS, bucket, check_no_step_waits, step


@pytest.mark.parametrize(
    ("dtype", "sharded"), [(torch.float32, False), (torch.bfloat16, True)], ids=["ddp", "fsdp in bfloat16"]
)
@pytest.mark.parametrize(
    "compressor",
    [LoCo(), LoCo(bits=2, codebook="fitted"), LoCo(bits=2, codebook="ternary_unit_gain"), LoCo(reset_steps=1), Dense()],
    ids=["loco", "fitted", "ternary", "reset", "dense"],
)
def test_no_step_waits_for_the_device(compressor: Compressor, sharded: bool, dtype: torch.dtype) -> None:
    check_no_step_waits(compressor, dtype, sharded=sharded)


def test_a_step_on_cuda_takes_few_operations() -> None:
    layout, numel = bucket(sharded=False)
    with on_cuda() as launched:
        sync = GradientSync(LoCo(), SPECS, Ranks.flat(EchoComm(64)), CUDA, sharded=False)
        x = torch.empty(numel, device=CUDA)
        step(sync, layout, x, x)
        launched.clear()
        with Operations() as operations:
            step(sync, layout, x, x)
    assert len(operations.names) <= 40, operations.names  # views included
    assert len(launched) == 8  # LoCo and dense: encode and decode on both hops


@pytest.mark.parametrize("compressor", [LoCo(), TopK()], ids=["codes", "a reducer"])
def test_old_and_new_state_are_never_in_a_gpus_memory_together(
    compressor: Compressor, monkeypatch: pytest.MonkeyPatch
) -> None:
    layout, numel = bucket(sharded=False)
    changes = Phased(later=LoCo(bits=2, codebook="fitted"), first=compressor, steps=1)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda device=None: None)
    make_store, seen = CodecPair.make_store, []

    def noting(self: CodecPair, specs: object, comm: object, device: object) -> object:
        seen.append([each() for each in old if each() is not None])
        return make_store(self, specs, comm, device)  # type: ignore[arg-type]

    with on_cuda():
        sync = GradientSync(changes, SPECS, Ranks.flat(EchoComm(64)), CUDA, sharded=False)
        x = torch.empty(numel, device=CUDA)
        if compressor == LoCo():
            step(sync, layout, x, x)  # a bucket knows where the state of its parameters lies
        else:
            sync.step_index = 1
        old = [weakref.ref(tensor) for tensor in sync.state.all_tensors()]
        monkeypatch.setattr(CodecPair, "make_store", noting)
        assert old
        sync.follow_phase()
        assert all(tensor.device == CUDA for tensor in sync.state.all_tensors())
    assert seen
    assert not any(seen)


READS: dict[str, Callable[[Tensor], object]] = {
    "item": lambda x: x.sum().item(),
    "bool": lambda x: bool(x.isfinite().all()),
    "tolist": lambda x: x[:2].tolist(),
    "nonzero": lambda x: x.nonzero(),
    "mask": lambda x: x[x > 0],
    "write by mask": lambda x: x.__setitem__(x > 0, torch.zeros(3, device=CUDA)),
    "equal": lambda x: torch.equal(x, x),
    "cpu": lambda x: x.cpu(),
    "copy to the host": lambda x: torch.empty(x.shape).copy_(x),
    "a table from the host": lambda x: torch.tensor([1.0, 2.0]).to(CUDA),
    "repeat_interleave": lambda x: torch.repeat_interleave(torch.empty(3, dtype=torch.int64, device=CUDA)),
}


@pytest.mark.parametrize("name", READS)
def test_what_waits_is_noticed(name: str) -> None:
    with on_cuda():
        x = torch.empty(10, device=CUDA)
        with NoHostSync(), pytest.raises(HostWaits):
            READS[name](x)


def test_a_copy_that_does_not_wait_is_allowed() -> None:
    with on_cuda():
        x = torch.empty(10, device=CUDA)
        with NoHostSync():
            torch.empty(10).copy_(x, non_blocking=True)
