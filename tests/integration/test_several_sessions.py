"""Several models in one process: under one optimizer, and with parameters that they share."""

from __future__ import annotations

import itertools

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from lowbit_strategy import Auto, DiLoCo, LoCo
from lowbit_strategy.attach.mistakes import MANY_PASSES
from lowbit_strategy.attach.optimizer_hook import _watching as watching
from lowbit_strategy.custom_loop import attach_ddp, compress, prepare
from testing.log import listen
from testing.processes.ranks import run_ranks
from testing.processes.scenarios import raised


def train(rank: int, world_size: int) -> tuple[list[int], Tensor]:
    torch.manual_seed(0)
    other_heap = [object() for _ in range(3000 * rank)]  # addresses differ between ranks, as in real programs
    parts = [DistributedDataParallel(nn.Linear(24, 24)) for _ in range(6)]
    optimizer = torch.optim.AdamW(itertools.chain.from_iterable(part.parameters() for part in parts), lr=1e-3)
    sessions = [compress(part, optimizer, "loco") for part in parts]
    order = [sessions.index(session) for session in watching]
    for step in range(4):
        x = torch.randn(8, 24, generator=torch.Generator().manual_seed(2 * step + rank))
        y = x
        for part in parts:
            y = part(y).relu()
        optimizer.zero_grad()
        (y - x).square().mean().backward()
        optimizer.step()
    for session in sessions:
        session.finish()
        session.close()
    del other_heap
    return order, torch.cat([param.detach().view(-1) for part in parts for param in part.parameters()])


def test_sessions_that_share_an_optimizer_end_in_the_order_in_which_they_were_made() -> None:
    (order, weights), (other_order, other_weights) = run_ranks(train, 2)
    assert order == other_order == list(range(6))
    assert torch.equal(weights, other_weights)


def train_in_turns(rank: int, world_size: int, order: list[int]) -> tuple[list[int], list[int], Tensor]:
    """Two models with one trunk. `order`: in which compression is attached to them."""
    torch.manual_seed(0)
    trunk = nn.Linear(24, 24)
    models = [DistributedDataParallel(nn.Sequential(trunk, nn.Tanh(), nn.Linear(24, width))) for width in (24, 8)]
    optimizers = [torch.optim.AdamW(model.parameters(), lr=1e-2) for model in models]
    sessions = {each: compress(models[each], optimizers[each], LoCo(block_size=32, exempt=())) for each in order}
    for step in range(9):
        x = torch.randn(8, 24, generator=torch.Generator().manual_seed(2 * step + rank))
        for model, optimizer in list(zip(models, optimizers, strict=True))[: 1 + step % 2]:
            optimizer.zero_grad()
            model(x).square().mean().backward()
            optimizer.step()
    counts = [sessions[each].sync.step_index for each in range(2)]
    left = [len(sessions[each].sync.transactions.open) for each in range(2)]
    return counts, left, torch.cat([param.detach().view(-1) for model in models for param in model.parameters()])


def test_models_that_share_parameters_count_their_own_steps() -> None:
    runs = [result for order in ([0, 1], [1, 0]) for result in run_ranks(train_in_turns, 2, order)]
    for counts, left, weights in runs:
        assert counts == [9, 4]
        assert left == [0, 0]
        assert torch.equal(weights, runs[0][2])


def train_one(rank: int, world_size: int) -> tuple[list[str], list[list[float | None]]]:
    """Each of two models that share a trunk is trained alone for a while. Return warnings, and learning rates."""
    trunk = nn.Linear(24, 24)
    models = [DistributedDataParallel(nn.Sequential(trunk, nn.Linear(24, width))) for width in (24, 8)]
    optimizers = [torch.optim.SGD(model.parameters(), lr=rate) for model, rate in zip(models, (0.1, 0.2), strict=True)]
    rates = []
    with listen() as lines:
        sessions = [compress(*each, LoCo(block_size=32)) for each in zip(models, optimizers, strict=True)]
        for model, optimizer in zip(models, optimizers, strict=True):
            for _ in range(MANY_PASSES + 1):
                model(torch.ones(2, 24)).square().mean().backward()
                optimizer.step()
                optimizer.zero_grad()
            rates.append([session.sync.learning_rates.first_rate() for session in sessions])
    return [line for line in lines if "no gradient has been" in line or "no step has ended" in line], rates


def test_a_step_is_of_the_model_whose_gradients_were_reduced() -> None:
    for lines, rates in run_ranks(train_one, 2):
        assert lines == []
        assert rates == [[0.1, 0.2]] * 2


def share_in_rounds(rank: int, world_size: int, closed: int) -> list[str]:
    """Of two models that share parameters, the one that is not `closed` is trained alone in the end."""
    trunk = nn.Linear(24, 24)
    models = [DistributedDataParallel(nn.Sequential(trunk, nn.Linear(24, width))) for width in (24, 8)]
    sessions = [compress(model, torch.optim.SGD(model.parameters(), lr=0.1), outer=DiLoCo(every=2)) for model in models]
    errors = [raised(model(torch.ones(2, 24)).sum().backward) for model in models]
    sessions[closed].close()
    return [*errors, raised(models[1 - closed](torch.ones(2, 24)).sum().backward)]


def test_local_steps_of_models_that_share_parameters_are_refused() -> None:
    for closed in range(2):
        for *errors, alone in run_ranks(share_in_rounds, 2, closed):
            assert all("another model that shares parameters with this one, and local steps" in each for each in errors)
            assert alone == ""


def prepared_again(rank: int, world_size: int) -> list[str]:
    """In rounds; compression was to be attached once more, and was not."""
    net = nn.Linear(24, 24)
    model = DistributedDataParallel(net)
    session = compress(model, torch.optim.SGD(net.parameters(), lr=0.1), outer=DiLoCo(every=2))
    prepare(nn.Sequential(net), "loco")
    error = raised(model(torch.ones(2, 24)).sum().backward)
    session.close()
    return [error]


def test_a_model_that_was_only_prepared_shares_nothing() -> None:
    assert run_ranks(prepared_again, 2) == [[""], [""]]


def outlive(rank: int, world_size: int) -> int:
    """`Auto` lets steps be DDP's own, and nobody ends them. A session that shared parameters has been closed."""
    trunk = nn.Linear(24, 24)
    modules = [nn.Sequential(trunk, nn.Linear(24, width)) for width in (24, 8)]
    models = [DistributedDataParallel(each) for each in modules]
    first, second = [attach_ddp(models[at], prepare(modules[at], Auto())) for at in range(2)]
    second.close()
    model = models[0]
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for _ in range(3):
        optimizer.zero_grad()
        model(torch.ones(2, 24)).sum().backward()
        optimizer.step()
    first.finish()
    return first.sync.step_index


def test_a_session_that_outlives_one_that_shared_its_parameters_counts_its_steps() -> None:
    assert run_ranks(outlive, 2) == [3, 3]
