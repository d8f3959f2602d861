"""The inner optimizers' state, averaged with the weights: what is averaged when, its bytes, ranks that lack some."""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable
from concurrent.futures import wait
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from lowbit_strategy import Dense, DiLoCo, LocalSGD, OuterRule
from lowbit_strategy.engine.engine import GradientSync
from lowbit_strategy.methods.outer.published import as_outer
from lowbit_strategy.methods.outer.rule import StateCode
from lowbit_strategy.model.parameters import describe_parameters
from lowbit_strategy.plan.messages import step_nbytes
from lowbit_strategy.ranks.ranks import Ranks
from lowbit_strategy.rounds.inner_state import bound_
from lowbit_strategy.rounds.outer import OuterSync
from testing.worlds.threaded import ThreadedWorld

CPU = torch.device("cpu")
ADAM = {"exp_avg": 1, "exp_avg_sq": 2}


def _adam(params: Any) -> torch.optim.Optimizer:
    return torch.optim.Adam(params, lr=1e-2)


class Replicas:
    """Copies of one model with a matrix that is coded and one that is exempt; ranks have batches of their own."""

    def __init__(self, rule: OuterRule, make: Callable[[Any], torch.optim.Optimizer] = _adam, size: int = 3) -> None:
        torch.manual_seed(0)
        first = nn.Sequential(nn.Linear(48, 64), nn.Tanh(), nn.Linear(64, 8))
        self.models = [copy.deepcopy(first) for _ in range(size)]
        self.optimizers = [make(model.parameters()) for model in self.models]
        self.world = ThreadedWorld(size)
        self.outers = [self._outer(rank, rule) for rank in range(size)]

    def _outer(self, rank: int, rule: OuterRule) -> OuterSync:
        model = self.models[rank]
        sync = GradientSync(Dense(), describe_parameters(model), Ranks.flat(self.world.comms[rank]), CPU, scatter=False)
        return OuterSync(sync, dict(model.named_parameters()), rule, states=functools.partial(self.states, rank))

    def states(self, rank: int) -> dict[str, dict[str, Any]]:
        """As `LocalSteps` gives them; nothing where the optimizer keeps nothing."""
        optimizer = self.optimizers[rank]
        kept = {name: optimizer.state.get(param, {}) for name, param in self.models[rank].named_parameters()}
        options = {key: value for key, value in optimizer.param_groups[0].items() if key != "params"}
        return {name: options | state if state else {} for name, state in kept.items()}

    def together(self, call: Callable[[int], Any]) -> None:
        futures = [self.world._threads.submit(call, rank) for rank in range(len(self.models))]
        wait(futures)
        for future in futures:
            future.result()

    def train(self, seed: int) -> float:
        """Returns the mean of the ranks' losses."""
        losses = []
        for rank, (model, optimizer) in enumerate(zip(self.models, self.optimizers, strict=True)):
            x = torch.randn(8, 48, generator=torch.Generator().manual_seed(1000 * rank + seed))
            optimizer.zero_grad()
            loss = (model(x) - torch.tanh(x[:, :8])).square().mean()
            losses.append(loss.item())
            loss.backward()
            optimizer.step()
        return sum(losses) / len(losses)

    def turn(self) -> None:
        self.together(lambda rank: self.outers[rank].after_step(1e-2))

    def step(self, seed: int) -> float:
        loss = self.train(seed)
        self.turn()
        return loss

    def kept(self, name: str, key: str) -> Tensor:
        """Of all ranks."""
        return torch.stack([self.states(rank)[name][key] for rank in range(len(self.models))])


def equal_on_all(values_W: Tensor) -> bool:
    return all(torch.equal(values_W[0], other) for other in values_W[1:])


def test_each_key_has_its_rounds() -> None:
    ranks = Replicas(DiLoCo(every=2, average_state=ADAM))
    seen = []
    for seed in range(8):
        ranks.step(seed)
        seen.append(tuple(equal_on_all(ranks.kept("2.weight", key)) for key in ADAM))
    nothing, one = (False, False), (True, False)
    assert [value[0] for value in seen] == [False, True] * 4
    assert seen[:3] == [nothing, one, nothing]
    assert not seen[5][1]  # a bound of each rank's own may hold it back a little
    spread = [_spread(ranks.kept("0.weight", "exp_avg_sq"))]
    assert spread[0] < 0.6
    ranks.world.close()


def _spread(values_W: Tensor) -> float:
    return float((values_W - values_W.mean(0)).norm() / values_W.norm())


def test_exempt_state_is_the_exact_mean_and_squares_are_those_of_mean_roots() -> None:
    ranks = Replicas(LocalSGD(every=1, average_state={"exp_avg": 1, "exp_avg_sq": 1}))
    ranks.train(0)
    first, second = ranks.kept("2.weight", "exp_avg").clone(), ranks.kept("2.weight", "exp_avg_sq").clone()
    ranks.turn()
    torch.testing.assert_close(ranks.kept("2.weight", "exp_avg")[1], first.mean(0), rtol=1e-5, atol=1e-9)
    torch.testing.assert_close(
        ranks.kept("2.weight", "exp_avg_sq")[2], second.sqrt().mean(0).square(), rtol=1e-5, atol=1e-12
    )
    ranks.world.close()


def test_coded_state_is_near_the_mean_and_no_square_vanishes() -> None:
    ranks = Replicas(LocalSGD(every=1, average_state={"exp_avg": 1, "exp_avg_sq": 1}))
    ranks.train(0)
    before = {key: ranks.kept("0.weight", key).clone() for key in ADAM}
    ranks.turn()
    mean = before["exp_avg"].mean(0)
    error = (ranks.kept("0.weight", "exp_avg")[0] - mean).norm() / mean.norm()
    assert 1e-4 < error < 0.25  # 4 bits, both hops
    after = ranks.kept("0.weight", "exp_avg_sq")
    assert bool((after >= before["exp_avg_sq"] / 9.01).all())
    wanted = before["exp_avg_sq"].sqrt().mean(0)
    assert (after[0].sqrt() - wanted).norm() / wanted.norm() < 0.25
    ranks.world.close()


def test_bytes_are_those_of_the_codes() -> None:
    sent = []
    for average in (False, {"exp_avg": 2}):
        ranks = Replicas(LocalSGD(every=1, average_state=average))
        counted = []
        for seed in range(2):
            before = ranks.world.comms[0].sent_nbytes
            ranks.step(seed)
            counted.append(ranks.world.comms[0].sent_nbytes - before)
        sent.append(counted)
        ranks.world.close()
    (plain, _), (without, with_state) = sent
    assert without == plain
    specs = describe_parameters(ranks.models[0])
    codes = sum(StateCode().assign(spec).method.wire_nbytes(spec, 3) for spec in specs)
    framing = 2 * 2 * (16 + 16 * len(specs)) + 2 * 2 * 4 * len(specs) // 3
    assert codes <= with_state - plain <= codes + framing
    (unit,) = ranks.outers[0].sync.plan().state
    assert sum(message.total_nbytes for message in unit.messages) == with_state - plain
    assert step_nbytes([unit]) == codes // 2  # of a round on average


@pytest.mark.parametrize("average", [{"exp_avg": 1}, {"exp_avg": 1, "exp_avg_sq": 2}, True])
def test_the_plan_has_the_bytes_of_a_round(average: Any) -> None:
    """In the mean over rounds where keys take turns; framing is shared by keys that travel together."""
    ranks = Replicas(LocalSGD(every=1, fragments=1, average_state=average))
    comm, before = ranks.world.comms[0], 0
    for seed in range(3):
        before = comm.sent_nbytes if seed == 1 else before
        ranks.step(seed)
    plan = ranks.outers[0].sync.plan()
    units = plan.rounds + plan.state
    planned = sum(unit.repeats * message.total_nbytes for unit in units for message in unit.messages)
    framing = sum(message.framing_nbytes for unit in units for message in unit.messages)
    assert abs((comm.sent_nbytes - before) / 2 - planned) <= (0 if average == {"exp_avg": 1} else framing)
    ranks.world.close()


def test_a_rank_without_state_takes_no_part_in_the_mean() -> None:
    """It has not trained this parameter yet, or its state is not finite: the others' mean is theirs alone."""
    ranks = Replicas(LocalSGD(every=1, average_state=True))
    ranks.train(0)
    weight = ranks.models[0][2].weight
    ranks.optimizers[0].state.pop(weight)
    ranks.optimizers[1].state[ranks.models[1][0].weight]["exp_avg"][3, 3] = torch.nan
    others = torch.stack([ranks.states(rank)["2.weight"]["exp_avg"] for rank in (1, 2)]).clone()
    ranks.turn()
    assert "2.weight" not in {name for name, state in ranks.states(0).items() if state}
    torch.testing.assert_close(ranks.states(1)["2.weight"]["exp_avg"], others.mean(0), rtol=1e-5, atol=1e-9)
    assert bool(ranks.states(0)["0.weight"]["exp_avg"].isfinite().all())
    ranks.world.close()


@pytest.mark.parametrize(
    ("make", "key"),
    [
        (lambda params: torch.optim.SGD(params, lr=0.1, momentum=0.9), "momentum_buffer"),
        (lambda params: torch.optim.RMSprop(params), "square_avg"),
        (lambda params: torch.optim.Adamax(params), "exp_inf"),
        (lambda params: torch.optim.Adam(params, amsgrad=True), "max_exp_avg_sq"),
    ],
)
def test_any_optimizer_of_torch(make: Callable[[Any], torch.optim.Optimizer], key: str) -> None:
    ranks = Replicas(DiLoCo(every=2, average_state=True), make)
    for seed in range(2):
        ranks.step(seed)
    assert _spread(ranks.kept("2.weight", key)) < 1e-6
    ranks.world.close()


def test_fragments_take_their_state_with_them() -> None:
    ranks = Replicas(DiLoCo(every=4, fragments=2, average_state={"exp_avg": 1}))
    same = []
    for seed in range(4):
        ranks.step(seed)
        same.append(tuple(_spread(ranks.kept(name, "exp_avg")) < 1e-6 for name in ("0.weight", "2.weight")))
    assert same == [(False, False), (True, False), (False, False), (False, True)]
    ranks.world.close()


def _adam_ratio(state: dict[str, Any]) -> float:
    """The largest ratio of the first moment to the root of the second, both corrected as the optimizer does."""
    beta1, beta2 = state["betas"]
    root = state["exp_avg_sq"].sqrt() / (1 - beta2 ** state["step"]).sqrt()
    return float((state["exp_avg"].abs() / (1 - beta1 ** state["step"]) / root.clamp(min=1e-12)).max())


def _adamax_ratio(state: dict[str, Any]) -> float:
    return float((state["exp_avg"].abs() / (1 - state["betas"][0] ** state["step"]) / state["exp_inf"]).max())


def _centered_ratio(state: dict[str, Any]) -> float:
    return float((state["grad_avg"].abs() / state["square_avg"].sqrt().clamp(min=1e-12)).max())


@pytest.mark.parametrize(
    ("make", "average", "ratio"),
    [
        (_adam, True, _adam_ratio),
        (_adam, {"exp_avg": 1}, _adam_ratio),
        (_adam, {"exp_avg_sq": 1}, _adam_ratio),
        (lambda params: torch.optim.Adam(params, amsgrad=True), {"exp_avg": 1}, _adam_ratio),
        (lambda params: torch.optim.Adamax(params), {"exp_avg": 1}, _adamax_ratio),
        (lambda params: torch.optim.RMSprop(params, centered=True), {"grad_avg": 1}, _centered_ratio),
    ],
)
@pytest.mark.parametrize("num_steps", [1, 30])
def test_no_first_moment_outgrows_its_second(make: Any, average: Any, ratio: Any, num_steps: int) -> None:
    """Elements that are idle on one rank get the others' first moments."""
    ranks = Replicas(LocalSGD(every=num_steps, average_state=average), make)
    for model, inputs in zip(ranks.models, (slice(0, 16), slice(16, 32), slice(32, 48)), strict=True):
        mask = torch.zeros(48)
        mask[inputs] = 1.0
        model[0].weight.register_hook(lambda grad, mask=mask: grad * mask * 10.0 ** torch.arange(-24, 24).div(6))
    for seed in range(num_steps):
        ranks.step(seed)
    states = [ranks.states(rank)["0.weight"] for rank in range(3)]
    assert max(ratio(state) for state in states) < 1.001
    if "max_exp_avg_sq" in states[0]:
        assert all(bool((state["max_exp_avg_sq"] >= state["exp_avg_sq"] * 0.999).all()) for state in states)
    ranks.world.close()


@pytest.mark.parametrize("average", [True, {"exp_avg": 1}, {"exp_avg": 2, "exp_avg_sq": 2}])
def test_units_that_are_idle_on_some_ranks_train_on(average: Any) -> None:
    ends = []
    for rule in (LocalSGD(every=4), LocalSGD(every=4, average_state=average)):
        ranks = Replicas(rule)
        for model in ranks.models:
            model[1] = nn.ReLU()
            model[0].bias.data -= 1.5  # most units are idle for most samples
        ends.append(sum(ranks.step(seed) for seed in range(40)) / 40)
        ranks.world.close()
    without, averaged = ends
    assert averaged < 1.1 * without


def test_moments_of_one_history_stay_as_they_are() -> None:
    state = {"exp_avg": torch.full((4,), 0.1), "exp_avg_sq": torch.full((4,), 1e-3), "step": torch.tensor(1.0)}
    before = state["exp_avg_sq"].clone()
    bound_(state | {"betas": (0.9, 0.999)})
    torch.testing.assert_close(state["exp_avg_sq"], before, rtol=1e-4, atol=0.0)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"average_state": {"exp_avg": 0}}, "average_state.*positive integer"),
        ({"synchronous": 0.1}, "give its length as num_steps"),
        ({"synchronous": 1.5}, "share of the run below 1"),
        ({"synchronous": -1}, "share of the run below 1"),
        ({"num_steps": 0, "synchronous": 0.1}, "num_steps must be a positive integer"),
    ],
)
def test_options_out_of_range(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        DiLoCo(**options)


def test_rules_from_files() -> None:
    rule = as_outer(
        {"name": "diloco", "average_state": {"exp_avg_sq": 3, "exp_avg": 1}, "synchronous": 0.05, "num_steps": 3000}
    )
    assert rule == DiLoCo(average_state=(("exp_avg", 1), ("exp_avg_sq", 3)), synchronous=0.05, num_steps=3000)
    assert rule.synchronous_steps == 150
    assert "exp_avg_sq averaged every 3 rounds" in rule.label
