"""What survives a restart: residuals and counters beside checkpoints, under DDP and FSDP2, on two real processes."""

from __future__ import annotations

import re
import resource
from collections.abc import Callable
from pathlib import Path
from typing import Any

import lightning as L
import torch
from lightning.pytorch.callbacks import ModelCheckpoint

from lowbit_strategy import QSGD, LoCo
from lowbit_strategy.accelerate import checkpoint_folder
from lowbit_strategy.checkpoint import residual_files
from lowbit_strategy.custom_loop import compress
from testing.log import listen
from testing.processes.scenarios import Facts, all_but, raised, scenarios
from testing.training.comparing import fingerprint
from testing.training.plain import batch, load_local, local_values, wrap
from testing.training.regression import KINDS, ByStep, Kind, Regression, fit, loader, mlp, strategy, trainer


def _files(folder: Path) -> list[str]:
    """All files, runs and checksums in their names left out."""
    torch.distributed.barrier()
    found = (path.relative_to(folder).as_posix() for path in folder.rglob("*") if not path.is_dir())
    return sorted(re.sub(r"-[0-9a-f]{8}\.\d+-[0-9a-f]{16}\.pt$", ".pt", name) for name in found)


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
        "steps": made.strategy.sync.step_index,
        "steps without": without.strategy.sync.step_index,
    }


@scenarios(resume, kind=KINDS, distributed=(False, True))
def test_resume_is_as_if_never_stopped(facts: list[Facts]) -> None:
    for rank in facts:
        assert rank["resumed"] == rank["whole"][4:]
        assert rank["same"]
        assert rank["without"][0] == rank["resumed"][0]  # the same parameters
        assert rank["without"] != rank["resumed"]  # residuals matter
        assert rank["steps"] == rank["steps without"] == 9


def reduced_twice(folder: Path, kind: Kind) -> Facts:
    """Both micro-batches of a step are reduced, and rounded at random; DDP changes its buckets after the first one."""
    saved: Any = None
    trained = []
    for steps in (range(6), range(3, 6)):
        torch.manual_seed(0)
        model = wrap(kind, mlp())
        if saved is not None:
            load_local(model.parameters(), saved[1])
        optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
        session = compress(model, optimizer, QSGD(bits=2, exempt=()))
        if saved is not None:
            session.load(folder / "3.ckpt", saved[0])
        for step in steps:
            if step == 3 and saved is None:
                with session.save(folder / "3.ckpt") as stamp:
                    saved = stamp, local_values(model.parameters())
            for number in range(2):
                model(batch(2 * step + number)).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
        trained.append(local_values(model.parameters()))
        session.close()
    return {"same": all(map(torch.equal, *trained))}


@scenarios(reduced_twice, kind=KINDS)
def test_resume_where_each_micro_batch_is_reduced(facts: list[Facts]) -> None:
    for rank in facts:
        assert rank["same"]


def top_k(folder: Path, kind: Kind) -> Facts:
    saving = _saving(dirpath=folder, every_n_train_steps=1, save_top_k=2, monitor="step", mode="max")
    fit(kind, Regression(), max_steps=5, **saving)
    return {"files": _files(folder)}


@scenarios(top_k, kind=KINDS, slow=all_but(kind="ddp"))
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


@scenarios(overwritten, kind=KINDS, slow=all_but(kind="ddp"))
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


@scenarios(last, kind=KINDS, how=(True, "link"), slow=all_but(kind="fsdp", how="link"))
def test_resume_from_the_last_checkpoint_which_may_be_a_link(facts: list[Facts]) -> None:
    for rank in facts:
        assert len(rank["resumed"]) == 2
        assert rank["is_link"] == ("step=6.ckpt" in rank["files"] and "last.ckpt.lowbit" not in str(rank["files"]))


def single_file(folder: Path, kind: Kind) -> Facts:
    model = Regression()
    made = fit(kind, model, max_steps=3)
    path = folder / "one.ckpt"
    made.save_checkpoint(path)
    residuals = next((folder / "one.ckpt.lowbit").glob("step-3-rank-0-of-2-*.pt"))
    stamp = torch.load(path, weights_only=True)["lowbit_strategy"]
    again = Regression.load_from_checkpoint(path, weights_only=True)
    return {
        "saved": fingerprint(model),
        "loaded": fingerprint(again),
        "stamp": {key: stamp[key] for key in ("step_index", "world_size")},
        "residuals": sorted(torch.load(residuals, weights_only=True)),
    }


@scenarios(single_file, kind=KINDS)
def test_checkpoints_load_anywhere_with_weights_only(facts: list[Facts]) -> None:
    for rank in facts:
        assert rank["saved"] == rank["loaded"]
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
    compressed = folder / "compressed.ckpt"
    made.save_checkpoint(compressed)
    plain = ByStep()
    trainer("ddp", max_steps=8).fit(plain, loader(), ckpt_path=compressed)
    return {"steps": made.strategy.sync.step_index, "compressed": len(model.losses), "plain": len(plain.losses)}


@scenarios(uncompressed, kind=KINDS, slow=all_but(kind="ddp"))
def test_from_an_uncompressed_checkpoint_and_back(facts: list[Facts]) -> None:
    for rank in facts:
        assert rank == {"steps": 3, "compressed": 3, "plain": 2}


def another_configuration(folder: Path, kind: Kind) -> Facts:
    """What one configuration has not sent passes to another: ``residual / (1 - beta)``, and the owner's residual."""
    made = fit(kind, ByStep(), options={"compressor": LoCo(block_size=32, beta=0.5, residual="float32")}, max_steps=4)
    sync = made.strategy.sync
    unsent = sync.state.export_unsent("net.2.weight")
    made.save_checkpoint(folder / "one.ckpt")

    class Look(L.Callback):
        def on_train_start(self, trainer: L.Trainer, module: L.LightningModule) -> None:
            self.residual = trainer.strategy.sync.state.residual("net.2.weight")

    look = Look()
    made = trainer(strategy(kind, LoCo(bits=3, beta=0.8, block_size=64)), max_steps=5, callbacks=[look])
    made.fit(ByStep(), loader(), ckpt_path=folder / "one.ckpt")
    return {"error": ((look.residual / (1 - 0.8) - unsent).norm() / unsent.norm()).item()}


@scenarios(another_configuration, kind=KINDS, slow=all_but(kind="ddp"))
def test_residuals_are_converted_for_another_configuration(facts: list[Facts]) -> None:
    for rank in facts:
        assert 0 < rank["error"] < 0.02  # rounded to 8 bits


def frozen_since(folder: Path, kind: Kind) -> Facts:
    """Saved with all parameters trained, resumed with a layer frozen, and the other way round."""

    class All(ByStep):
        def configure_optimizers(self) -> torch.optim.Optimizer:
            return torch.optim.SGD(self.parameters(), lr=0.1)

    made = fit(kind, All(), max_steps=4)
    carryover = made.strategy.sync.state.residual("net.2.weight")
    made.save_checkpoint(folder / "all.ckpt")
    model = All()
    model.net[2].requires_grad_(False)
    made = trainer(strategy(kind), max_steps=6)
    made.fit(model, loader(), ckpt_path=folder / "all.ckpt")
    kept = made.strategy.sync.state.residual("net.2.weight")
    made.save_checkpoint(folder / "part.ckpt")
    made = trainer(strategy(kind), max_steps=8)
    made.fit(All(), loader(), ckpt_path=folder / "part.ckpt")
    return {"kept": bool(carryover.any()) and torch.equal(carryover, kept), "steps": made.strategy.sync.step_index}


@scenarios(frozen_since, kind=KINDS, slow=all_but(kind="ddp"))
def test_a_residual_outlives_the_freezing_of_its_parameter(facts: list[Facts]) -> None:
    for rank in facts:
        assert rank == {"kept": True, "steps": 8}


# -- damage -----------------------------------------------------------------------------------------------------------


def _flip_a_bit(file: Path) -> None:
    content = bytearray(file.read_bytes())
    content[len(content) // 2] ^= 1
    file.write_bytes(content)


def _restamp(checkpoint: Path, change: Callable[[Any], None]) -> None:
    """Change what rank 1 has saved, and its checksum with it: only what is in the file is wrong."""
    file = next((checkpoint.parent / f"{checkpoint.name}.lowbit").glob("*rank-1*"))
    saved = torch.load(file, weights_only=True)
    change(saved)
    residual_files.save(checkpoint, saved)
    file.unlink()


def _spoil(saved: Any) -> None:
    tensors = saved["parameters"]["net.2.weight"]["tensors"]
    next(value for value in tensors.values() if value.is_floating_point()).view(-1)[0] = float("nan")


def _age(saved: Any) -> None:
    saved["format"] = 3


def _empty(saved: Any) -> None:
    """As another version may write it: what is expected in it is not there."""
    saved["parameters"]["net.2.weight"] = {}


_DAMAGE: dict[str, tuple[Callable[[Path, Path], object], str]] = {
    "truncated": (lambda checkpoint, file: file.write_bytes(file.read_bytes()[:1000]), "its checksum is"),
    "flipped": (lambda checkpoint, file: _flip_a_bit(file), "its checksum is"),
    "another rank's": (
        lambda checkpoint, file: file.write_bytes(next(file.parent.glob("*rank-0*")).read_bytes()),
        "its checksum is",
    ),
    "not finite": (lambda checkpoint, file: _restamp(checkpoint, _spoil), "is not finite, in parameters.net.2.weight"),
    "another format": (lambda checkpoint, file: _restamp(checkpoint, _age), "has format 3 and this version reads 6"),
    "another structure": (lambda checkpoint, file: _restamp(checkpoint, _empty), "cannot be restored (KeyError: "),
}


def damaged(folder: Path, kind: Kind, what: str) -> Facts:
    damage, message = _DAMAGE[what]
    made = fit(kind, ByStep(), max_steps=3)
    path = folder / "some.ckpt"
    made.save_checkpoint(path)
    torch.distributed.barrier()
    if torch.distributed.get_rank() == 1:
        damage(path, next((folder / "some.ckpt.lowbit").glob("*rank-1*")))
    torch.distributed.barrier()
    made = trainer(strategy(kind), max_steps=6)
    error = raised(lambda: made.fit(ByStep(), loader(), ckpt_path=path))
    model = ByStep()
    made = trainer(strategy(kind, on_missing_residual="reset"), max_steps=6)
    made.fit(model, loader(), ckpt_path=path)
    return {
        "error": error,
        "message": message,
        "steps": made.strategy.sync.step_index,
        "print": fingerprint(model),
    }


@scenarios(damaged, kind=KINDS, what=tuple(_DAMAGE), slow=all_but(kind="ddp"))
def test_a_damaged_residual_file_is_an_error_on_all_ranks_or_a_fresh_start_on_all(facts: list[Facts]) -> None:
    assert facts[0] == facts[1]
    assert facts[0]["steps"] == 6
    assert facts[0]["error"].startswith("ResidualFileError: rank 1: ")
    assert "step-3-rank-1-of-2-" in facts[0]["error"]
    assert facts[0]["message"] in facts[0]["error"]
    assert 'pass on_missing_residual="reset"' in facts[0]["error"]


def stamps(folder: Path, kind: Kind) -> Facts:
    """Machines whose checkpoints are not the same; a checkpoint of another version; one of no compression at all."""
    made = fit(kind, ByStep(), max_steps=3)
    session, path = made.strategy.session, folder / "some.ckpt"
    with session.save(path) as stamp:
        pass
    first = torch.distributed.get_rank() == 0
    folders = [folder / "complete", folder / "without"]
    for each in folders:
        each.mkdir(exist_ok=True)
    with checkpoint_folder.save(str(folders[0]), [session], writes_stamp=first):
        pass
    torch.distributed.barrier()
    mine = str(folders[0 if first else 1])
    errors = {
        "one machine has none": raised(lambda: session.load(path, stamp if first else None)),
        "another step": raised(lambda: session.load(path, stamp if first else stamp | {"step_index": 4})),
        "another version": raised(lambda: session.load(path, {"step_index": 3, "world_size": 2, "parameters": []})),
        "no ranks": raised(lambda: session.load(path, stamp | {"world_size": 0})),
        "a folder": raised(lambda: checkpoint_folder.load(mine, [session])),
    }
    with listen() as unfinished:
        checkpoint_folder.load(mine, [session], compressed=True)
    torch.distributed.barrier()
    if first:
        (folders[0] / "residuals.lowbit" / "stamp.json").write_text('{"step_index": 3, ')
    torch.distributed.barrier()
    errors["damaged"] = raised(lambda: checkpoint_folder.load(str(folders[0]), [session]))
    torch.distributed.barrier()
    steps = session.sync.step_index
    patient = fit(kind, ByStep(), options={"on_missing_residual": "reset"}, max_steps=3).strategy.session
    with listen() as lines:
        checkpoint_folder.load(mine, [patient], compressed=True)
    same_path = {case: error.replace(str(folders[1]), str(folders[0])) for case, error in errors.items()}
    return {"errors": same_path, "steps": steps, "lines": unfinished + lines}


@scenarios(stamps, kind=KINDS, slow=all_but(kind="ddp"))
def test_ranks_agree_on_what_a_checkpoint_says_of_its_residuals(facts: list[Facts]) -> None:
    assert facts[0]["errors"] == facts[1]["errors"]
    errors = facts[0]["errors"]
    assert all(error.startswith("ResidualFileError: rank ") for error in errors.values()), errors
    for case in ("one machine has none", "another step", "a folder"):
        assert "rank 1: this rank and rank 0 find different records of residuals in" in errors[case]
    assert "some.ckpt records no run of its residual files: a different version" in errors["another version"]
    assert "records residual files of 0 ranks at step 3, which no run has saved" in errors["no ranks"]
    assert "stamp.json cannot be read" in errors["damaged"]
    assert 'on_missing_residual="reset"' in errors["damaged"]
    assert facts[0]["steps"] == 3
    assert "its residuals are missing" in facts[0]["lines"][0]
    assert "stamp.json cannot be read" in facts[0]["lines"][1]
    assert all("continuing with residuals of zero on all ranks" in line for line in facts[0]["lines"])
    assert facts[1]["lines"] == []


def full_disk(folder: Path, kind: Kind) -> Facts:
    """Of one rank: training goes on, the checkpoint is written without that rank's residuals, and a warning says so."""
    made = fit(kind, ByStep(), max_steps=3)
    path = folder / "some.ckpt"
    made.save_checkpoint(path)
    made.fit_loop.epoch_loop.max_steps = 5
    made.fit(made.lightning_module, loader())
    torch.distributed.barrier()
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    if torch.distributed.get_rank() == 1:
        resource.setrlimit(resource.RLIMIT_FSIZE, (2000, hard))
    with listen() as lines:
        made.save_checkpoint(path)
    resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    files = _files(folder)
    strict = trainer(strategy(kind, on_missing_residual="error"), max_steps=6)
    error = raised(lambda: strict.fit(ByStep(), loader(), ckpt_path=path))
    with listen() as resumed:
        made = trainer(strategy(kind), max_steps=6)
        made.fit(ByStep(), loader(), ckpt_path=path)
    return {"lines": lines, "files": files, "error": error, "resumed": resumed, "steps": made.strategy.sync.step_index}


@scenarios(full_disk, kind=KINDS, slow=all_but(kind="ddp"))
def test_a_full_disk_on_one_rank(facts: list[Facts]) -> None:
    assert facts[0]["lines"] == []
    (warning,) = facts[1]["lines"]
    assert warning.startswith("the residuals of rank 1 cannot be written to ")
    assert "some.ckpt.lowbit" in warning
    assert "File too large" in warning
    for rank in facts:
        assert rank["files"] == ["some.ckpt", "some.ckpt.lowbit/step-5-rank-0-of-2.pt"]
        assert rank["error"].startswith("ResidualFileError: rank 1: the checkpoint's residual file ")
        assert "step-5-rank-1-of-2-" in rank["error"]
        assert "is missing" in rank["error"]
        assert rank["steps"] == 6
    assert any("is missing. It was lost, or" in line for line in facts[0]["resumed"])


def second_run(folder: Path, kind: Kind) -> Facts:
    """Another run saves at the same path and step, and stops before its checkpoint has replaced the first one's."""
    path = folder / "some.ckpt"
    torch.manual_seed(1)
    made = fit(kind, ByStep(), max_steps=3)
    made.save_checkpoint(path)
    other = fit(kind, ByStep(lr=0.1), max_steps=3)
    other.strategy.session.save(path).__enter__()  # and never left
    between = len(_files(folder))
    model = ByStep()
    trainer(strategy(kind), max_steps=5).fit(model, loader(), ckpt_path=path)
    torch.manual_seed(1)
    reference = ByStep()
    fit(kind, reference, max_steps=5)
    other.save_checkpoint(path)
    return {"between": between, "same": model.losses == reference.losses[3:], "files": _files(folder)}


@scenarios(second_run, kind=KINDS, slow=all_but(kind="ddp"))
def test_a_run_does_not_replace_the_residuals_of_another_before_its_checkpoint(facts: list[Facts]) -> None:
    for rank in facts:
        assert rank["between"] == 5
        assert rank["same"]
        assert rank["files"] == ["some.ckpt", *(f"some.ckpt.lowbit/step-3-rank-{other}-of-2.pt" for other in (0, 1))]
