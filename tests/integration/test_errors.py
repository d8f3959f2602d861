"""Bad input: one clear error each that says what to change, on every rank, before anything is lost."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch._dynamo
from torch import nn
from torch.distributed.checkpoint.api import CheckpointException

from lowbit_strategy import LoCo, from_options, preset
from lowbit_strategy.lightning import LowBitDDPStrategy
from testing.processes.scenarios import Facts, raised, scenarios
from testing.training.comparing import fingerprint
from testing.training.regression import KINDS, Kind, Regression, fit, loader, mlp, strategy, trainer


def _rank() -> int:
    return torch.distributed.get_rank()


# -- ranks that differ ------------------------------------------------------------------------------------------------


def _other_layer() -> nn.Module:
    net = mlp()
    if _rank() == 1:
        net[2], net[4] = nn.Linear(64, 65), nn.Linear(65, 8)
    return net


def _other_name() -> nn.Module:
    return mlp() if _rank() == 0 else nn.Sequential(*mlp(), nn.Identity(), nn.Linear(8, 8))


def _even(spec: Any) -> bool:
    return spec.numel % 2 == 0


_DIFFERENT: dict[str, tuple[Any, Any, str]] = {
    "model": (
        _other_layer,
        dict,
        "in parameters: number 2 is ('net.2.weight', (65, 64)) instead of ('net.2.weight', (64, 64)).",
    ),
    "depth": (_other_name, dict, "in parameters: 8 instead of 6."),
    "type": (lambda: mlp().to(torch.float32 if _rank() == 0 else torch.bfloat16), dict, "in parameter types"),
    "bits": (mlp, lambda: {"compressor": LoCo(bits=4 + _rank())}, "in compressor.bits: 5 instead of 4."),
    "exempt": (
        mlp,
        lambda: {"compressor": LoCo(exempt=("@vector", ("a.*", "b.*")[_rank()]))},
        "in compressor.exempt[1]: 'b.*' instead of 'a.*'.",
    ),
    "seed": (mlp, lambda: {"seed": _rank()}, "in seed: 1 instead of 0."),
    "policy": (
        mlp,
        lambda: {"on_missing_residual": ("error", "reset")[_rank()]},
        "in on_missing_residual: 'reset' instead of 'error'.",
    ),
}


def different(folder: Path, kind: Kind, what: str) -> Facts:
    net, options, message = _DIFFERENT[what]
    return {"error": raised(lambda: fit(kind, Regression(net()), options=options())), "message": message}


@scenarios(different, kind=KINDS, what=tuple(_DIFFERENT))
def test_ranks_that_differ_are_distinguished_on_every_rank(facts: list[Facts]) -> None:
    for rank in facts:
        assert rank["error"].startswith("RuntimeError: rank 1 differs from rank 0 ")
        assert rank["message"] in rank["error"]


def same(folder: Path, kind: Kind) -> Facts:
    """Functions differ in their address only."""
    model = Regression()
    fit(kind, model, options={"compressor": LoCo(exempt=(lambda spec: spec.numel < 100, _even))}, max_steps=2)
    return {"print": fingerprint(model)}


@scenarios(same, kind=KINDS)
def test_functions_do_not_tell_ranks_apart(facts: list[Facts]) -> None:
    assert facts[0] == facts[1]


# -- what a model and a trainer may be ------------------------------------------------------------------------------


def misuse(folder: Path, kind: Kind) -> Facts:
    def fit_with(model: Regression | None = None, **options: Any) -> str:
        return raised(lambda: fit(kind, model or Regression(), **options))

    errors = {
        "nothing to train": fit_with(Regression().requires_grad_(False)),
        "64-true": fit_with(precision="64-true"),
        "16-mixed": fit_with(precision="16-mixed"),
        "double": fit_with(Regression(mlp().double())),
    }
    torch._dynamo.config.optimize_ddp = "python_reducer"
    errors["python_reducer"] = fit_with()
    torch._dynamo.config.optimize_ddp = True
    return errors


@scenarios(misuse, kind=KINDS)
def test_models_and_settings_that_cannot_be_served(facts: list[Facts], request: pytest.FixtureRequest) -> None:
    assert facts[0] == facts[1]
    errors = facts[0]
    assert "the model has no parameter that requires a gradient" in errors["nothing to train"]
    assert "parameter net.0.weight is torch.float64: gradients are reduced as float32" in errors["double"]
    if "fsdp" in request.node.name:
        assert "does not support `Fabric(..., precision='16-mixed')`. Choose a different" in errors["16-mixed"]
        assert "does not support `Fabric(..., precision='64-true')`. Choose a different" in errors["64-true"]
        assert errors["python_reducer"] == ""  # it concerns DDP only
    else:
        assert errors["16-mixed"] == ""  # Lightning takes bfloat16 instead on CPU
        assert "parameter net.0.weight is torch.float64" in errors["64-true"]
        assert 'optimize_ddp = "python_reducer" calls communication hooks' in errors["python_reducer"]
        assert "set it to True (the default) or False" in errors["python_reducer"]


def other_model(folder: Path, kind: Kind, distributed: bool) -> Facts:
    options = {"save_distributed_checkpoint": distributed} if kind == "fsdp" else {}
    model = Regression()
    made = fit(kind, model, options=options, max_steps=3)
    path = folder / "some.ckpt"
    made.save_checkpoint(path)
    saved = fingerprint(model)
    other = Regression(nn.Sequential(nn.Linear(16, 96), nn.Linear(96, 8)))

    def resume() -> None:
        try:
            trainer(strategy(kind, **options), max_steps=6).fit(other, loader(), ckpt_path=path)
        except CheckpointException as error:  # of distributed checkpoints: torch derives it from BaseException
            raise RuntimeError(str(error)) from error

    error = raised(resume)
    again = Regression()
    trainer(strategy(kind, **options), max_steps=3).fit(again, loader(), ckpt_path=path)
    names_it = kind == "ddp" or distributed  # FSDP2 copies whole tensors into its parts, and torch's error has sizes
    wanted = "net.0.weight" if names_it else "The size of tensor a (48) must match the size of tensor b (32)"
    return {"error": error, "wanted": wanted, "kept": fingerprint(again) == saved}


@scenarios(other_model, kind=KINDS, distributed=(False, True))
def test_a_checkpoint_of_another_model(facts: list[Facts]) -> None:
    for rank in facts:
        assert rank["wanted"] in rank["error"]  # the framework's own
        assert rank["kept"]


# -- configuration, without any process -----------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"bits": 1}, "bits must be an integer from 2 to 8.*got 1"),
        ({"bits": 9}, "bits must be an integer from 2 to 8.*got 9"),
        ({"block_size": 48}, "block_size must be a power of two"),
        ({"beta": 1.0}, r"beta must be in \[0, 1\), got 1.0"),
        ({"reset_steps": 0}, "reset_steps must be a positive integer or None, got 0"),
        ({"residual": "int2"}, "residual must be 'int8', 'float32' or 'none', got 'int2'"),
        ({"residual_rounding": "up"}, "residual_rounding must be 'nearest' or 'stochastic', got 'up'"),
        ({"exempt": "@vector"}, "exempt must be a list, each element a string or a function"),
        ({"exempt": ("@vectors",)}, "unknown predicate '@vectors', known: .* did you mean '@vector'"),
    ],
)
def test_options_out_of_range(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        LoCo(**options)


def test_unknown_names() -> None:
    with pytest.raises(ValueError, match="unknown compressor 'lcoo'; did you mean 'loco'"):
        preset("lcoo")
    with pytest.raises(ValueError, match="loco has no option 'bit'; did you mean 'bits'"):
        from_options("loco", {"bit": 4})


@pytest.mark.parametrize("kind", KINDS)
def test_strategy_options(kind: Kind) -> None:
    with pytest.raises(ValueError, match="unknown compressor 'lcoo'; did you mean 'loco'"):
        strategy(kind, "lcoo")
    with pytest.raises(ValueError, match="on_world_size_change must be 'reset' or 'fold', got 'mean'"):
        strategy(kind, on_world_size_change="mean")
    with pytest.raises(ValueError, match=r"on_missing_residual must be 'error' or 'reset'.*, got 'ignore'"):
        strategy(kind, on_missing_residual="ignore")
    with pytest.raises(TypeError, match="bits"):
        strategy(kind, bits=4)


def test_ddp_options() -> None:
    with pytest.raises(TypeError, match="has no option 'find_unused'; did you mean 'find_unused_parameters'"):
        LowBitDDPStrategy(find_unused=True)
    with pytest.raises(TypeError, match=r"option of the compressor, LowBit\w+\(LoCo\(bits=...\)\)"):
        LowBitDDPStrategy(bits=4)
    with pytest.raises(ValueError, match="the compressor is the communication hook: leave ddp_comm_hook out"):
        LowBitDDPStrategy(ddp_comm_hook=print)
    assert LowBitDDPStrategy(ddp_comm_hook=None, find_unused_parameters=True).sync is None
