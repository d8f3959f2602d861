"""The ends of what sparse methods may be asked for: everything, one element for all, nothing at all."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from lowbit_strategy.collectives.comm import Pending
from lowbit_strategy.collectives.layout import TensorSpec
from lowbit_strategy.engine.engine import GradientSync
from lowbit_strategy.methods import exdyna as exclusive
from lowbit_strategy.methods._base import flat_model
from lowbit_strategy.methods._base.compressor import Compressor
from lowbit_strategy.methods.dgc import DGC
from lowbit_strategy.methods.exdyna import ExDyna
from lowbit_strategy.methods.randomk import RandomK
from lowbit_strategy.methods.topk import TopK
from lowbit_strategy.methods.zoo.adacomp import AdaComp
from lowbit_strategy.methods.zoo.gtopk import GTopK
from lowbit_strategy.methods.zoo.micro import MiCRO
from lowbit_strategy.methods.zoo.scalecom import ScaleCom
from lowbit_strategy.methods.zoo.sidco import SIDCo
from lowbit_strategy.ranks.ranks import Ranks
from testing.worlds.one_tensor import OneTensor, gaussian
from testing.worlds.simulated import SimulatedComm, SimulatedWorld

KINDS = (TopK, DGC, SIDCo, ExDyna, MiCRO, GTopK, RandomK, ScaleCom)
SHAPE, NUMEL = (7, 33), 231


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("density", [0.0, -0.5, 1.0001, float("nan"), "0.1", True])
def test_a_density_outside_its_range_is_refused(kind: type[Compressor], density: object) -> None:
    with pytest.raises(ValueError, match=r"density must be (in \(0, 1\]|a number)"):
        kind(density=density)  # type: ignore[call-arg]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("world_size", [1, 3])
def test_all_of_it_is_the_mean(kind: type[Compressor], world_size: int) -> None:
    ranks = OneTensor(kind(density=1.0), SHAPE, world_size)  # type: ignore[call-arg]
    for step in range(3):
        gradients = [gaussian((NUMEL,), 10 * step + rank) for rank in range(world_size)]
        mean = torch.stack(gradients).mean(0)
        torch.testing.assert_close(ranks.step(gradients), mean, atol=0.02, rtol=0)  # DGC keeps back the least


@pytest.mark.parametrize("kind", KINDS)
def test_one_element_has_everything(kind: type[Compressor]) -> None:
    """Thresholds lie far above all other elements, and most ranks' shares of the positions have none above them."""
    ranks = OneTensor(kind(density=0.01), SHAPE, 5)  # type: ignore[call-arg]
    gradients = [1e-3 * gaussian((NUMEL,), rank) for rank in range(5)]
    for gradient in gradients:
        gradient[100] = 1e3
    total = torch.zeros(NUMEL)
    for _ in range(40):
        mean = ranks.step(gradients)
        assert mean.isfinite().all()
        total += mean
    assert total[100] >= 1e3  # sent in some steps, however rarely its position is drawn
    assert total.abs().argmax() == 100


@pytest.mark.parametrize("kind", KINDS)
def test_zeros_choose_nothing(kind: type[Compressor]) -> None:
    ranks = OneTensor(kind(density=0.1), SHAPE, 3)  # type: ignore[call-arg]
    for _ in range(2):
        assert not ranks.step([torch.zeros(NUMEL) for _ in range(3)]).any()
    assert ranks.step([gaussian((NUMEL,), rank) for rank in range(3)]).any()


BOUNDED: dict[str, Compressor] = {
    "topk": TopK(density=0.01),
    "dgc": DGC(density=0.01),
    "dgc_momentum": DGC(density=0.01, momentum=0.9),
    "sidco": SIDCo(density=0.01),
    "sidco_exponential": SIDCo(density=0.01, distribution="exponential"),
    "exdyna": ExDyna(density=0.01),
    "micro": MiCRO(density=0.01),
    "gtopk": GTopK(density=0.01),
    "randomk": RandomK(density=0.01),
    "scalecom": ScaleCom(density=0.01),
    "adacomp": AdaComp(bin_size=500),
}
_ROWS, _COLUMNS = 400, 300


def _shaped(kind: str, seed: int) -> torch.Tensor:
    """Gradients that fitted thresholds and thresholds of the last step are wrong for."""
    x = gaussian((_ROWS, _COLUMNS), seed)
    return {
        "normal": x,
        "signs": x.sign(),
        "few ones": (x > 1.28).float(),
        "spike": x * 100,
        "rows": x * torch.logspace(-6, 0, _ROWS)[:, None],
        "rounded": x.round(),
        "one row": torch.cat([x[:1], torch.zeros(_ROWS - 1, _COLUMNS)]),
        "constant": torch.full_like(x, 0.5),
        "zeros": torch.zeros_like(x),
        "tiny": x * 1e-38,
        "huge": x * 1e30,
    }[kind].reshape(-1)


_SHAPED = ("normal", "signs", "few ones", "spike", "rows", "rounded", "one row", "constant", "zeros", "tiny", "huge")


@pytest.mark.parametrize("name", BOUNDED)
@settings(max_examples=3, deadline=None, derandomize=True, suppress_health_check=list(HealthCheck))
@given(kinds=st.lists(st.sampled_from(_SHAPED), min_size=1, max_size=4), world_size=st.sampled_from([1, 2, 5]))
def test_no_method_ever_sends_more_than_four_times_its_target(name: str, kinds: list[str], world_size: int) -> None:
    compressor, shape = BOUNDED[name], (_ROWS, _COLUMNS)
    target = _target(compressor.method(TensorSpec("p", shape)), TensorSpec("p", shape))
    ranks = OneTensor(compressor, shape, world_size)
    for step, kind in enumerate(["normal", *kinds]):
        mean = ranks.step([_shaped(kind, 10 * step + rank) for rank in range(world_size)])
        exclusive = isinstance(compressor, (ExDyna, MiCRO, GTopK, RandomK, ScaleCom))
        assert int(mean.count_nonzero()) <= 4 * target * (1 if exclusive else world_size)


def _target(method: Any, spec: TensorSpec) -> int:
    return method.num_kept(spec) if hasattr(method, "num_kept") else round(method.density * spec.numel)


@pytest.mark.parametrize("name", ["exdyna", "micro"])
def test_a_spike_sends_no_more_than_four_times_the_target(name: str) -> None:
    """In calm training the threshold follows the last count, and has no notice of a gradient 100 times as large."""
    ranks, target = OneTensor(BOUNDED[name], (200, 300), 2), 600
    for step in range(20):
        ranks.step([gaussian((200, 300), 10 * step + rank).view(-1) for rank in range(2)])
    assert all(bool(ranks.state(rank)["calm"]) for rank in range(2))
    mean = ranks.step([100 * gaussian((200, 300), 1000 + rank).view(-1) for rank in range(2)])
    assert int(mean.count_nonzero()) == 4 * target  # as many as are allowed: far more reach the old threshold


@pytest.mark.parametrize("name", ["sidco", "exdyna", "micro"])
def test_signs_send_the_target_and_not_nothing(name: str) -> None:
    """All thresholds are the same there: all elements reach it or none."""
    ranks = OneTensor(BOUNDED[name], (_ROWS, _COLUMNS), 2)
    mean = ranks.step([_shaped("signs", rank) for rank in range(2)])
    assert 0.5 * 1200 <= int(mean.count_nonzero()) <= 4 * 2 * 1200


VALUED = [TopK, DGC, SIDCo]


@pytest.mark.parametrize(("world_size", "values"), [(1, "int2"), (2, "int8"), (3, "int4"), (3, "bfloat16")])
@pytest.mark.parametrize("kind", VALUED)
def test_coarse_values_lose_nothing(kind: type[Compressor], world_size: int, values: str) -> None:
    """What came in is what went out plus the residuals, whichever rank rounded."""
    ranks = OneTensor(kind(density=0.05, values=values), (30, 50), world_size)  # type: ignore[call-arg]
    total_in, total_out = torch.zeros(1500, dtype=torch.float64), torch.zeros(1500, dtype=torch.float64)
    for step in range(6):
        gradients = [gaussian((1500,), 10 * step + rank) for rank in range(world_size)]
        total_in += torch.stack(gradients).double().mean(0)
        total_out += ranks.step(gradients).double()
    left = torch.stack([ranks.state(rank)["residual"].double() for rank in range(world_size)]).mean(0)
    torch.testing.assert_close(total_out + left, total_in, atol=2e-5, rtol=0)
    assert 0 < int(total_out.count_nonzero()) < 1500


def test_exdynas_description_has_the_constants_of_its_code() -> None:
    text = " ".join((ExDyna.__doc__ or "").split())
    assert f"drift += {exclusive._INTEGRAL:g} ln ratio; ln tau += {exclusive._PROPORTIONAL:g} ln ratio + drift" in text
    assert f"off the target by more than a factor of {exclusive._BAND:g}" in text
    assert f"move by more than {100 * exclusive._CALM:g} % per step" in text
    assert "At most four times the wanted number" in text
    assert flat_model._MOST == 4


@pytest.mark.parametrize(
    "kind", [TopK, AdaComp, *(pytest.param(kind, marks=pytest.mark.slow) for kind in KINDS if kind is not TopK)]
)
def test_a_compact_residual_is_small_and_unbiased(kind: type[Compressor]) -> None:
    """A constant gradient: rounding to the nearest value would lose it where the residual is large."""
    options = {} if kind is AdaComp else {"density": 0.02}
    results = {}
    for dtype in ("float32", "int8"):
        ranks = OneTensor(kind(residual=dtype, **options), (40, 60), 2)  # type: ignore[call-arg]
        total = torch.zeros(2400, dtype=torch.float64)
        for _ in range(80):
            total += ranks.step([gaussian((2400,), rank) for rank in range(2)]).double()
        results[dtype] = total
        state = ranks.state(0)
        nbytes = state["residual"].nbytes + (state["residual_scale"].nbytes if "residual_scale" in state else 0)
    assert nbytes <= 1.05 * 2400
    left = ranks.syncs[0].state.residual("p").double() + ranks.syncs[1].state.residual("p").double()
    came = 80 * (gaussian((2400,), 0) + gaussian((2400,), 1)).double() / 2
    lost = came - results["int8"] - left / 2
    assert float(lost.norm() / came.norm()) < 0.06
    assert abs(float(lost @ came / came.square().sum())) < 0.003


def test_an_idle_parameter_keeps_a_compact_residual_bit_for_bit() -> None:
    ranks = OneTensor(TopK(density=0.02, residual="int8"), (40, 60), 1)
    ranks.step([gaussian((2400,), 0)])
    before = {key: value.clone() for key, value in ranks.state(0).items()}
    ranks.step([torch.zeros(2400)])
    assert all(torch.equal(value, before[key]) for key, value in ranks.state(0).items())


def test_residual_must_be_known() -> None:
    with pytest.raises(ValueError, match="residual must be"):
        DGC(residual="int4")


class _Damage(SimulatedComm):
    """Of a rank whose messages are damaged: the n-th collective's input is changed before it is sent."""

    def __init__(self, world: SimulatedWorld, rank: int, at: int, change: Callable[[torch.Tensor], None]) -> None:
        super().__init__(world, rank)
        self._at, self._change = at, change

    def all_gather(self, out_WB: torch.Tensor, x_B: torch.Tensor) -> Pending:
        return super().all_gather(out_WB, self._damaged(x_B))

    def all_to_all_uneven(self, out: torch.Tensor, x: torch.Tensor, *splits: Sequence[int]) -> Pending:
        return super().all_to_all_uneven(out, self._damaged(x), *splits)

    def _damaged(self, x: torch.Tensor) -> torch.Tensor:
        self._at -= 1
        if self._at == 0:
            x = x.clone()
            self._change(x)
        return x


def _count_below_zero(table: torch.Tensor) -> None:
    table[-2:] += torch.tensor([100_000, -100_000], dtype=torch.int32)  # the sum stays right


def _count_above_the_partition(table: torch.Tensor) -> None:
    table[-1] = 60_000


def _position_beyond_the_end(wire: torch.Tensor) -> None:
    wire.view(torch.int16)[-1] = -1  # 65,535


@pytest.mark.parametrize("kind", [ExDyna, MiCRO])
@pytest.mark.parametrize(
    ("at", "change", "message"),
    [
        (2, _count_below_zero, "table 1 of counts is impossible for 2 of 2 blocks"),
        (2, _count_above_the_partition, "table 1 of counts is impossible for 1 of 2 blocks"),
        (3, _position_beyond_the_end, "a position lies beyond the end of its (parameter|partition)"),
    ],
    ids=["below zero", "too many", "beyond"],
)
def test_damaged_positions_are_an_error(
    kind: type[Compressor], at: int, change: Callable[[torch.Tensor], None], message: str
) -> None:
    """Counts are trusted by an operation that writes as many entries as they announce, wherever that ends."""
    ranks = OneTensor(kind(density=0.01, exempt=()), (400, 400), 2)  # type: ignore[call-arg]
    world = ranks.world
    world.comms[1] = _Damage(world, 1, at, change)
    ranks.syncs[1] = GradientSync(
        kind(density=0.01, exempt=()),  # type: ignore[call-arg]
        [TensorSpec("p", (400, 400))],
        Ranks.flat(world.comms[1]),
        torch.device("cpu"),
        sharded=False,
    )
    with pytest.raises(RuntimeError, match=f"a sparse message is damaged: {message}"):
        ranks.step([gaussian((400, 400), rank) for rank in range(2)])
