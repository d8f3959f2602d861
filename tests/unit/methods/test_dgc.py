"""DGC's sampled threshold, and its configuration."""

from __future__ import annotations

import warnings

import pytest
import torch

from lowbit_strategy.collectives.comm import LocalComm
from lowbit_strategy.collectives.layout import TensorSpec
from lowbit_strategy.engine.bucket import BucketLayout
from lowbit_strategy.engine.engine import GradientSync
from lowbit_strategy.kernels.reference.select import top_k
from lowbit_strategy.kernels.select import Sum
from lowbit_strategy.methods._base.momentum import MomentumCodec
from lowbit_strategy.methods.dgc import DGC, select_by_sample
from lowbit_strategy.methods.loco import LoCo
from lowbit_strategy.methods.registry import preset
from lowbit_strategy.ranks.ranks import Ranks
from testing.worlds.one_tensor import OneTensor, gaussian


def _values(kind: str, numel: int) -> torch.Tensor:
    x = torch.randn(numel, generator=torch.Generator().manual_seed(1))
    return {"normal": x, "heavy": x**5, "rows": x * torch.linspace(0, 1, numel), "few": x.round()}[kind]


@pytest.mark.parametrize("kind", ["normal", "heavy", "rows", "few"])
@pytest.mark.parametrize("density", [0.001, 0.01, 0.25])
def test_the_sample_finds_nearly_the_largest(kind: str, density: float) -> None:
    x = _values(kind, 400_000)
    k = round(density * x.numel())
    chosen = select_by_sample(Sum(x), k, seed=3)
    assert 0.8 * k <= chosen.indices.numel() <= k
    assert torch.equal(chosen.indices, chosen.indices.unique())
    assert torch.equal(chosen.values, x[chosen.indices])
    assert torch.equal(chosen.indices, top_k(x, chosen.indices.numel()))


def test_a_small_tensor_gives_exactly_the_largest() -> None:
    x = _values("normal", 500)
    assert torch.equal(select_by_sample(Sum(x), 25, seed=0).indices, top_k(x, 25))


def test_zeros_are_never_sent() -> None:
    x = torch.zeros(100_000)
    assert not select_by_sample(Sum(x), 100, seed=0).indices.numel()
    x[70_000] = -2.0
    chosen = select_by_sample(Sum(x), 100, seed=0)
    assert chosen.indices.tolist() == [70_000]
    assert chosen.values.tolist() == [-2.0]


def test_warm_up_goes_through_its_stages() -> None:
    dgc = DGC(density=0.004, warmup_steps=10)
    densities = [dgc.phase(step).density for step in range(40)]
    assert densities == [0.25] * 10 + [0.0625] * 10 + [0.015625] * 10 + [0.004] * 10
    assert dgc.phase(35) == dgc.phase(1_000_000) == DGC(density=0.004)
    assert dgc.phase(0).method(TensorSpec("a", (8, 8))).continues(dgc.phase(10).method(TensorSpec("a", (8, 8))))


def test_exempt_parameters_get_the_momentum_too() -> None:
    vector = TensorSpec("bias", (2000,))
    assert isinstance(DGC(momentum=0.9).assign(vector).method.uplink, MomentumCodec)
    assert not isinstance(DGC().assign(vector).method.uplink, MomentumCodec)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"density": 0.0}, "density must be in"),
        ({"density": 1.5}, "density must be in"),
        ({"density": True}, "density must be a number"),
        ({"momentum": 1.0}, "momentum must be in"),
        ({"nesterov": True}, "nesterov=True needs"),
        ({"clip_norm": 0.0}, "clip_norm must be positive"),
        ({"warmup_steps": -1}, "warmup_steps must be"),
        ({"warmup_densities": (0.5, 0.0)}, "warmup_densities must be in"),
        ({"values": "float8"}, "values must be"),
    ],
)
def test_bad_options_are_refused(options: dict[str, object], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        DGC(**options)


def _model(compressor: DGC, gradients: dict[str, torch.Tensor], steps: int) -> list[dict[str, torch.Tensor]]:
    """Means of a model of several parameters on one rank, step by step."""
    specs = [TensorSpec(name, tuple(g.shape)) for name, g in gradients.items()]
    sync = GradientSync(compressor, specs, Ranks.flat(LocalComm()), torch.device("cpu"), sharded=False)
    entries, at = [], 0
    for spec in specs:
        entries.append((spec.name, at))
        at += spec.numel
    means = []
    for _ in range(steps):
        x = torch.cat([g.reshape(-1) for g in gradients.values()])
        sync.begin_step()
        for _pending in sync.reduce(BucketLayout(tuple(entries)), x, x):
            pass
        sync.end_step()
        means.append({name: x[at : at + gradients[name].numel()].clone() for name, at in entries})
    return means


@pytest.mark.parametrize("momentum", [0.0, 0.9])
def test_clipping_is_by_one_norm_of_all_parameters(momentum: float) -> None:
    """A bias of 1e6 must neither pass nor leave the weights alone."""
    gradients = {"weight": gaussian((64, 64), 0), "bias": torch.full((64,), 1e6)}
    (mean,) = _model(DGC(density=1.0, clip_norm=1.0, momentum=momentum), gradients, 1)
    norm = torch.cat([g.reshape(-1) for g in gradients.values()]).norm()
    for name, gradient in gradients.items():
        torch.testing.assert_close(mean[name], gradient.reshape(-1) / norm, rtol=1e-5, atol=1e-9)
    assert float(torch.cat(list(mean.values())).norm()) == pytest.approx(1.0, rel=1e-5)


def test_exempt_parameters_stay_dense_and_exempt_under_clipping() -> None:
    dgc = DGC(density=0.01, clip_norm=1.0)
    assert dgc.assign(TensorSpec("bias", (2000,))).kind == "exempt"
    means = _model(dgc, {"weight": gaussian((64, 64), 0), "bias": gaussian((64,), 1)}, 1)
    assert means[0]["bias"].count_nonzero() == 64
    assert means[0]["weight"].count_nonzero() <= 41


@pytest.mark.parametrize("nesterov", [False, True])
def test_at_density_one_momentum_is_that_of_the_optimizer(nesterov: bool) -> None:
    gradients = {"weight": gaussian((64, 64), 0), "bias": gaussian((64,), 1)}
    means = _model(DGC(density=1.0, momentum=0.9, nesterov=nesterov), gradients, 60)
    for name, gradient in gradients.items():
        parameter = torch.nn.Parameter(torch.zeros_like(gradient))
        optimizer = torch.optim.SGD([parameter], lr=1.0, momentum=0.9, nesterov=nesterov)
        before = parameter.detach().clone()
        for mean in means:
            before = parameter.detach().clone()
            parameter.grad = gradient.clone()
            optimizer.step()
            moved = (before - parameter.detach()).reshape(-1)
            torch.testing.assert_close(mean[name], moved, rtol=1e-3, atol=1e-3)
    assert float(means[-1]["weight"].norm() / gradients["weight"].norm()) == pytest.approx(10.0, rel=0.01)


def test_momentum_decays_where_the_gradient_is_zero() -> None:
    """An expert without tokens: SGD would go on moving it, ever slower, and so does DGC."""
    ranks = OneTensor(DGC(density=0.5, momentum=0.5, exempt=()), (40, 40), 1)
    ranks.step([gaussian((1600,), 0)])
    before = ranks.state(0)["momentum"].clone()
    velocity = ranks.state(0)["residual"].clone()
    assert before.count_nonzero()
    mean = ranks.step([torch.zeros(1600)])
    unsent = mean == 0
    torch.testing.assert_close(ranks.state(0)["momentum"][unsent], 0.5 * before[unsent])
    torch.testing.assert_close(ranks.state(0)["residual"][unsent], (velocity + 0.5 * before)[unsent])


def test_momentum_of_an_empty_parameter_is_nothing() -> None:
    gradients = {"weight": gaussian((64, 64), 0), "empty": torch.empty(0)}
    (mean,) = _model(DGC(density=0.1, momentum=0.9, exempt=()), gradients, 1)
    assert mean["weight"].count_nonzero()
    assert not mean["empty"].numel()


def _optimizer(kind: str) -> torch.optim.Optimizer:
    parameters = [torch.nn.Parameter(torch.zeros(3)), torch.nn.Parameter(torch.zeros(3))]
    groups = [{"params": parameters[:1]}, {"params": parameters[1:], "momentum": 0.9}]
    return {
        "sgd": lambda: torch.optim.SGD(parameters, lr=0.1),
        "momentum": lambda: torch.optim.SGD(parameters, lr=0.1, momentum=0.9),
        "one group": lambda: torch.optim.SGD(groups, lr=0.1),
        "adam": lambda: torch.optim.AdamW(parameters),
    }[kind]()


@pytest.mark.parametrize("kind", ["momentum", "one group"])
def test_momentum_applied_twice_is_refused(kind: str) -> None:
    compressor = DGC(momentum=0.9)
    with pytest.raises(ValueError, match=r"momentum is applied twice: 0.9 by the compressor and 0.9 by SGD"):
        compressor.check_optimizer(_optimizer(kind))
    compressor.check_optimizer(_optimizer("sgd"))


def test_momentum_with_adam_warns_and_without_is_silent() -> None:
    with pytest.warns(UserWarning, match="smoothed twice"):
        DGC(momentum=0.9).check_optimizer(_optimizer("adam"))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for compressor in (DGC(), LoCo()):
            for kind in ("sgd", "momentum", "one group", "adam"):
                compressor.check_optimizer(_optimizer(kind))


def test_the_preset_warms_up_as_its_description_says() -> None:
    dgc = preset("dgc")
    assert [dgc.phase(step).density for step in (0, 100, 200, 300, 400)] == [0.25, 0.0625, 0.015625, 0.004, 0.001]
