"""What survives a restart: residuals and counters beside checkpoints, under DDP and FSDP2, on two real processes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import lightning as L
import torch
from lightning.pytorch.callbacks import ModelCheckpoint

from lowbit_strategy import LoCo
from tests.scenarios import Facts, raised, scenarios
from tests.training import KINDS, ByStep, Kind, Regression, fingerprint, fit, loader, strategy, trainer


def _files(folder: Path) -> list[str]:
    torch.distributed.barrier()
    return sorted(path.relative_to(folder).as_posix() for path in folder.rglob("*") if not path.is_dir())


def _saving(**options: Any) -> dict[str, Any]:
    return {"enable_checkpointing": True, "callbacks": [ModelCheckpoint(filename="{step}", **options)]}


def resume(folder: Path, kind: Kind, distributed: bool) -> Facts:
    options = {"save_distributed_checkpoint": distributed} if kind == "fsdp" else {}
    whole = ByStep()
    fit(kind, whole, options=options, max_steps=9, **_saving(dirpath=folder, every_n_train_steps=4, save_top_k=-1))
    model, again = ByStep(), ByStep()
    made = trainer(strategy(kind, **options), max_steps=9)
    made.fit(model, loader(), ckpt_path=folder / "step=4.ckpt")
    without = trainer(strategy(kind, on_missing_residual="reset", **options), max_steps=9)
    torch.distributed.barrier()
    if torch.distributed.get_rank() == 0:
        (folder / "step=4.ckpt.lowbit").rename(folder / "elsewhere")
    torch.distributed.barrier()
    without.fit(again, loader(), ckpt_path=folder / "step=4.ckpt")
    return {
        "whole": whole.losses,
        "resumed": model.losses,
        "without": again.losses,
        "same": fingerprint(whole) == fingerprint(model) != fingerprint(again),
        "steps": (made.strategy.sync.step_index, without.strategy.sync.step_index),
    }


@scenarios(resume, kind=KINDS, distributed=(False, True))
def test_resume_is_as_if_never_stopped(facts: list[Facts]) -> None:
    for rank in facts:
        assert rank["resumed"] == rank["whole"][4:]
        assert rank["same"]
        assert rank["without"][0] == rank["resumed"][0]  # the same parameters
        assert rank["without"] != rank["resumed"]  # residuals matter
        assert rank["steps"] == (9, 9)


def top_k(folder: Path, kind: Kind) -> Facts:
    saving = _saving(dirpath=folder, every_n_train_steps=1, save_top_k=2, monitor="step", mode="max")
    fit(kind, Regression(), max_steps=5, **saving)
    return {"files": _files(folder)}


@scenarios(top_k, kind=KINDS)
def test_residuals_are_removed_with_their_checkpoint(facts: list[Facts]) -> None:
    assert facts[0]["files"] == [
        name
        for step in (4, 5)
        for name in (
            f"step={step}.ckpt",
            f"step={step}.ckpt.lowbit/step-{step}-rank-0-of-2.pt",
            f"step={step}.ckpt.lowbit/step-{step}-rank-1-of-2.pt",
        )
    ]


def overwritten(folder: Path, kind: Kind) -> Facts:
    made = fit(kind, ByStep(), max_steps=2)
    path = folder / "one.ckpt"
    made.save_checkpoint(path)
    made.fit_loop.epoch_loop.max_steps = 5
    made.fit(made.lightning_module, loader())
    made.save_checkpoint(path)
    return {"files": _files(folder)}


@scenarios(overwritten, kind=KINDS)
def test_an_overwritten_checkpoint_keeps_only_its_own_residuals(facts: list[Facts]) -> None:
    assert facts[0]["files"] == ["one.ckpt", *(f"one.ckpt.lowbit/step-5-rank-{rank}-of-2.pt" for rank in (0, 1))]


def last(folder: Path, kind: Kind, how: Any) -> Facts:
    whole = ByStep()
    fit(kind, whole, max_steps=8, **_saving(dirpath=folder / "all", every_n_train_steps=100))
    saving = _saving(dirpath=folder, every_n_train_steps=2, save_last=how)
    fit(kind, ByStep(), max_steps=6, **saving)
    is_link = (folder / "last.ckpt").is_symlink()
    model = ByStep()
    trainer(strategy(kind), max_steps=8).fit(model, loader(), ckpt_path=folder / "last.ckpt")
    return {"is_link": is_link, "resumed": model.losses, "whole": whole.losses, "files": _files(folder)}


@scenarios(last, kind=KINDS, how=(True, "link"))
def test_resume_from_the_last_checkpoint_which_may_be_a_link(facts: list[Facts]) -> None:
    for rank in facts:
        assert len(rank["resumed"]) == 2
        assert rank["is_link"] == ("step=6.ckpt" in rank["files"] and "last.ckpt.lowbit" not in str(rank["files"]))


def single_file(folder: Path, kind: Kind) -> Facts:
    model = Regression()
    made = fit(kind, model, max_steps=3)
    path = folder / "one.ckpt"
    made.save_checkpoint(path)
    residuals = folder / "one.ckpt.lowbit" / "step-3-rank-0-of-2.pt"
    stamp = torch.load(path, weights_only=True)["lowbit_strategy"]
    again = Regression.load_from_checkpoint(path, weights_only=True)
    return {
        "print": (fingerprint(model), fingerprint(again)),
        "stamp": {key: stamp[key] for key in ("step_index", "world_size")},
        "residuals": sorted(torch.load(residuals, weights_only=True)),
    }


@scenarios(single_file, kind=KINDS)
def test_checkpoints_load_anywhere_with_weights_only(facts: list[Facts]) -> None:
    for rank in facts:
        assert rank["print"][0] == rank["print"][1]
        assert rank["stamp"] == {"step_index": 3, "world_size": 2}
        assert "parameters" in rank["residuals"]


def uncompressed(folder: Path, kind: Kind) -> Facts:
    path = folder / "plain.ckpt"
    made = trainer("ddp", max_steps=3)
    made.fit(ByStep(), loader())
    made.save_checkpoint(path)
    model = ByStep()
    made = trainer(strategy(kind), max_steps=6)
    made.fit(model, loader(), ckpt_path=path)
    back = folder / "compressed.ckpt"
    made.save_checkpoint(back)
    plain = ByStep()
    trainer("ddp", max_steps=8).fit(plain, loader(), ckpt_path=back)
    return {"steps": made.strategy.sync.step_index, "compressed": len(model.losses), "plain": len(plain.losses)}


@scenarios(uncompressed, kind=KINDS)
def test_from_an_uncompressed_checkpoint_and_back(facts: list[Facts]) -> None:
    for rank in facts:
        assert rank == {"steps": 3, "compressed": 3, "plain": 2}


def another_configuration(folder: Path, kind: Kind) -> Facts:
    """What one configuration owes is owed by another: ``residual / (1 - beta)``, and what the owner has not said."""
    made = fit(kind, ByStep(), options={"compressor": LoCo(block_size=32, beta=0.5, residual="float32")}, max_steps=4)
    sync = made.strategy.sync
    unsent = sync.export_unsent("net.2.weight")
    made.save_checkpoint(folder / "one.ckpt")

    class Look(L.Callback):
        def on_train_start(self, trainer: L.Trainer, module: L.LightningModule) -> None:
            self.residual = trainer.strategy.sync.residual("net.2.weight")

    look = Look()
    made = trainer(strategy(kind, LoCo(bits=3, beta=0.8, block_size=64)), max_steps=5, callbacks=[look])
    made.fit(ByStep(), loader(), ckpt_path=folder / "one.ckpt")
    return {"error": ((look.residual / (1 - 0.8) - unsent).norm() / unsent.norm()).item()}


@scenarios(another_configuration, kind=KINDS)
def test_residuals_are_converted_for_another_configuration(facts: list[Facts]) -> None:
    for rank in facts:
        assert 0 < rank["error"] < 0.02  # rounded to 8 bits


def frozen_since(folder: Path, kind: Kind) -> Facts:
    """Saved with all parameters trained, resumed with a layer frozen, and the other way round."""

    class All(ByStep):
        def configure_optimizers(self) -> torch.optim.Optimizer:
            return torch.optim.SGD(self.parameters(), lr=0.1)

    made = fit(kind, All(), max_steps=4)
    carryover = made.strategy.sync.residual("net.2.weight")
    made.save_checkpoint(folder / "all.ckpt")
    model = All()
    model.net[2].requires_grad_(False)
    made = trainer(strategy(kind), max_steps=6)
    made.fit(model, loader(), ckpt_path=folder / "all.ckpt")
    kept = made.strategy.sync.residual("net.2.weight")
    made.save_checkpoint(folder / "part.ckpt")
    made = trainer(strategy(kind), max_steps=8)
    made.fit(All(), loader(), ckpt_path=folder / "part.ckpt")
    return {"kept": bool(carryover.any()) and torch.equal(carryover, kept), "steps": made.strategy.sync.step_index}


@scenarios(frozen_since, kind=KINDS)
def test_what_a_parameter_is_owed_outlives_its_being_frozen(facts: list[Facts]) -> None:
    for rank in facts:
        assert rank == {"kept": True, "steps": 8}


def damaged(folder: Path, kind: Kind, what: str) -> Facts:
    made = fit(kind, ByStep(), max_steps=3)
    path = folder / "some.ckpt"
    made.save_checkpoint(path)
    torch.distributed.barrier()
    if torch.distributed.get_rank() == 1:
        file = next((folder / "some.ckpt.lowbit").glob("*rank-1*"))
        file.unlink() if what == "missing" else file.write_bytes(file.read_bytes()[:1000])
    torch.distributed.barrier()
    made = trainer(strategy(kind), max_steps=6)
    error = raised(lambda: made.fit(ByStep(), loader(), ckpt_path=path))
    model = ByStep()
    made = trainer(strategy(kind, on_missing_residual="reset"), max_steps=6)
    made.fit(model, loader(), ckpt_path=path)
    return {"error": error, "steps": made.strategy.sync.step_index, "print": fingerprint(model)}


@scenarios(damaged, kind=KINDS, what=("missing", "truncated"))
def test_a_damaged_residual_file_is_an_error_on_all_ranks_or_a_fresh_start_on_all(facts: list[Facts]) -> None:
    assert facts[0] == facts[1]
    assert facts[0]["steps"] == 6
    assert facts[0]["error"].startswith("ResidualFileError: rank 1: the checkpoint's residual file")
    assert "step-3-rank-1-of-2.pt" in facts[0]["error"]
    assert 'pass on_missing_residual="reset"' in facts[0]["error"]
