"""HSDP: sharded inside a node, compressed between the replicas, on four real processes that stand for two nodes."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from accelerate import Accelerator
from accelerate.parallelism_config import ParallelismConfig
from lightning.pytorch.callbacks import ModelCheckpoint

from lowbit_strategy import LoCo
from lowbit_strategy.accelerate import LowBitPlugin
from lowbit_strategy.lightning import LowBitFSDPStrategy
from tests.accelerated import fresh_state, fsdp_plugin, prepared, train
from tests.scenarios import Facts, scenarios
from tests.training import (
    MIN_SHARD_NUMEL,
    ByStep,
    Regression,
    count_exchanges,
    fingerprint,
    full_parameters,
    listen,
    loader,
    trainer,
)


@contextlib.contextmanager
def nodes_of(num_ranks: int) -> Iterator[None]:
    """As a launcher says how many ranks share a node."""
    before = os.environ.get("LOCAL_WORLD_SIZE")
    os.environ["LOCAL_WORLD_SIZE"] = str(num_ranks)
    try:
        yield
    finally:
        if before is None:
            del os.environ["LOCAL_WORLD_SIZE"]
        else:
            os.environ["LOCAL_WORLD_SIZE"] = before


def hsdp(compressor: Any = None, **options: Any) -> LowBitFSDPStrategy:
    compressor = compressor if compressor is not None else LoCo(block_size=32)
    options = {"shard_size": "node", "min_shard_numel": MIN_SHARD_NUMEL} | options
    return LowBitFSDPStrategy(compressor, **options)


def by_name(folder: Path) -> Facts:
    runs: dict[str, Any] = {}
    with nodes_of(2):
        for name in ("ddp", "dense_hsdp", "loco_hsdp"):
            torch.manual_seed(0)
            model = Regression()
            made = trainer(name, max_steps=20)
            made.fit(model, loader())
            runs[name] = {"losses": model.losses, "values": {k: v.tolist() for k, v in full_parameters(model).items()}}
    sync = made.strategy.sync
    return {
        **runs,
        "print": fingerprint(model),
        "world": (sync.comm.world_size, sync.everyone.world_size),
        "sent": sync.comm.sent_nbytes,
        "accounted": 20 * sum(sync.sent_nbytes(name) for name in sync.specs),
        "numel": sum(spec.numel for spec in sync.specs.values()),
        "steps": sync.step_index,
        "batches": len(made.train_dataloader),
    }


@scenarios(by_name, world_size=4)
def test_by_name(facts: list[Facts]) -> None:
    for rank in facts:
        assert rank["print"] == facts[0]["print"]
        assert rank["world"] == (2, 4)
        assert rank["steps"] == 20
        assert rank["batches"] == 6  # of 24: every rank has its own
        assert rank["loco_hsdp"]["losses"][-1] < 0.8 * rank["loco_hsdp"]["losses"][0]
        for name, values in rank["ddp"]["values"].items():
            torch.testing.assert_close(torch.tensor(rank["dense_hsdp"]["values"][name]), torch.tensor(values))
        headers_and_padding = 20 * 2 * 3 * (16 + 6 * 15)
        assert rank["accounted"] < rank["sent"] <= rank["accounted"] + headers_and_padding
    assert sum(rank["numel"] for rank in facts) == 2 * sum(torch.tensor(v).numel() for v in facts[0]["ddp"]["values"].values())


def resume(folder: Path, distributed: bool) -> Facts:
    """Accumulation, clipping and another number of replicas on the way."""
    given: dict[str, Any] = {"max_steps": 6, "accumulate_grad_batches": 2, "gradient_clip_val": 0.5}
    with nodes_of(2):
        whole = ByStep()
        saving = ModelCheckpoint(folder, every_n_train_steps=3, save_top_k=-1, filename="{step}")
        made = trainer(
            hsdp(save_distributed_checkpoint=distributed), enable_checkpointing=True, callbacks=[saving], **given
        )
        with count_exchanges() as sizes:
            made.fit(whole, loader())
        model, other = ByStep(), ByStep()
        trainer(hsdp(save_distributed_checkpoint=distributed), **given).fit(
            model, loader(), ckpt_path=folder / "step=3.ckpt"
        )
        with listen() as lines:
            four = trainer(
                hsdp(shard_size=1, on_world_size_change="fold", save_distributed_checkpoint=distributed), **given
            )
            four.fit(other, loader(), ckpt_path=folder / "step=3.ckpt")
    return {
        "whole": whole.losses,
        "resumed": model.losses,
        "same": fingerprint(whole) == fingerprint(model),
        "print": fingerprint(whole),
        "exchanges": len(sizes),
        "other": (fingerprint(other), other.losses[0], four.strategy.sync.step_index),
        "log": lines,
    }


@scenarios(resume, world_size=4, distributed=(False, True))
def test_resume_is_as_if_never_stopped(facts: list[Facts]) -> None:
    for rank in facts:
        assert rank["resumed"] == rank["whole"][6:]
        assert rank["same"]
        assert rank["print"] == facts[0]["print"]
        assert rank["exchanges"] == facts[0]["exchanges"]
        assert rank["other"][0] == facts[0]["other"][0]
        assert rank["other"][1] == rank["whole"][6]
        assert rank["other"][2] == 6
    assert "grouped into nodes or replicas otherwise: compression residuals are averaged" in "\n".join(facts[0]["log"])


def accelerator(*, own: bool) -> Accelerator:
    """On CPU Accelerate refuses a `ParallelismConfig`: what its constructor would do with one is done here."""
    fresh_state()
    sharding = fsdp_plugin()
    made = Accelerator(fsdp_plugin=sharding)
    if own:
        config = ParallelismConfig(dp_replicate_size=2, dp_shard_size=2)
        made.state.parallelism_config = config
        made.state.device_mesh = config.get_device_mesh("cpu")
    LowBitPlugin(LoCo(), shard_size=None if own else "node").attach(made, fsdp_plugin=sharding)
    return made


def with_accelerate(folder: Path) -> Facts:
    """Accelerate's own HSDP; the plugin's `shard_size` is the same."""
    runs: dict[str, Any] = {}
    with nodes_of(2):
        for own in (True, False):
            job = prepared(accelerator(own=own))
            train(job, 4, clip=1.0)
            job.accelerator.save_state(str(folder / str(own)))
            train(job, 6, skip=4)
            runs["accelerate" if own else "plugin"] = {
                "losses": job.losses,
                "print": fingerprint(job.model),
                "replicas": job.sync.comm.world_size,
                "steps": job.sync.step_index,
                "samples": len(job.batches),
            }
        again = prepared(accelerator(own=True))
        again.accelerator.load_state(str(folder / "True"))
        train(again, 6, skip=4)
    return runs | {"resumed": again.losses, "resumed_print": fingerprint(again.model)}


@scenarios(with_accelerate, world_size=4)
def test_accelerate(facts: list[Facts]) -> None:
    for rank in facts:
        assert rank["accelerate"] == rank["plugin"]
        assert rank["accelerate"]["replicas"] == 2
        assert rank["accelerate"]["steps"] == 6
        assert rank["accelerate"]["print"] == facts[0]["accelerate"]["print"] == rank["resumed_print"]
        assert rank["resumed"] == rank["accelerate"]["losses"][4:]
