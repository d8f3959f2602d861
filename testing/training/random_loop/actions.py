"""What scripts do: each function is one action of a loop, and checks what must hold right after it."""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import Tensor

from testing.training.comparing import full
from testing.training.random_loop.loop import Loop, local
from testing.training.random_loop.space import ACTIONS, action, has_own_rates, has_two, unscaled
from testing.training.random_loop.ways import can_save_alone


@action()
def together(loop: Loop) -> None:
    loop.clear()
    loop.backward(overflows=loop.at % 4 == 3 and not loop.still)
    loop.step()


@action(has_own_rates)
def warmed_up(loop: Loop) -> None:
    """A step at a rate of zero, as the first one of a warm-up: moments move, weights do not."""
    groups = [group for optimizer in loop.optimizers for group in optimizer.param_groups]
    rates = [group["lr"] for group in groups]
    for group in groups:
        group["lr"] = 0.0
    ACTIONS["together"].run(loop)
    for group, rate in zip(groups, rates, strict=True):
        group["lr"] = rate


@action(has_own_rates)
def decayed(loop: Loop) -> None:
    """A scheduler lowers the rates."""
    ACTIONS["together"].run(loop)
    for group in (group for optimizer in loop.optimizers for group in optimizer.param_groups):
        group["lr"] *= 0.7


@action()
def clipped(loop: Loop) -> None:
    loop.clear()
    loop.backward()
    loop.step(clips=True)


@action()
def empty(loop: Loop) -> None:
    """The last rank has no samples left."""
    loop.clear()
    loop.backward(empty=True)
    loop.step()


@action(unscaled)
def accumulated(loop: Loop) -> None:
    """The frameworks' own way to add up several batches, with clipping."""
    loop.accumulate(num_batches=2 + loop.at % 2)


@action(has_two)
def first_alone(loop: Loop) -> None:
    """The second's gradients are thrown away."""
    loop.clear()
    loop.backward()
    loop.step(0)
    loop.clear()


@action(has_two)
def second_alone(loop: Loop) -> None:
    loop.clear()
    loop.backward("second")
    loop.step(1)


@action(has_two)
def in_turns(loop: Loop) -> None:
    """As a generator and its critic."""
    ACTIONS["first_alone"].run(loop)
    ACTIONS["second_alone"].run(loop)


@action(has_two)
def at_two_rates(loop: Loop) -> None:
    """The second steps once on the gradients of three passes, the first on those of each."""
    loop.clear()
    for _ in range(3):
        loop.optimizers[0].zero_grad(set_to_none=loop.program.to_none)
        loop.backward()
        loop.step(0)
    loop.step(1)


@action()
def thrown_away(loop: Loop) -> None:
    loop.clear()
    loop.backward(("both", "first", "second")[loop.at % 3])
    loop.clear()


@action(unscaled)
def spiked(loop: Loop) -> None:
    """A step is skipped because the norm of its gradients is finite and too large; nothing moves."""
    loop.clear()
    before = loop.sums()
    loop.backward(factor=1e4)
    norm = torch.nn.utils.get_total_norm([param.grad for param in loop.every_param() if param.grad is not None])
    loop.check(float(full(norm)) > 10, "the gradients of the spike are small")
    loop.clear()
    loop.check(loop.place.is_local or before == loop.sums(), "weights moved in a step that was skipped")


@action()
def surgery(loop: Loop) -> None:
    """One backward pass per task, then a step on the mean of what they gave. What was cleared before it since the last
    step would count as well.
    """
    ACTIONS["together"].run(loop)
    kept: list[list[Tensor | None]] = []
    params = loop.every_param()
    for _ in range(2 + loop.at % 2):
        loop.clear()
        loop.backward()
        kept.append([None if param.grad is None else param.grad.clone() for param in params])
    loop.clear()
    for param, *grads in zip(params, *kept, strict=True):
        there = [grad for grad in grads if grad is not None]
        param.grad = sum(there[1:], there[0]) / len(grads) if there else None
    loop.step()


@action()
def taken_away(loop: Loop) -> None:
    """Some gradients are taken from the optimizer."""
    loop.clear()
    loop.backward()
    for param in loop.params[1]:
        param.grad = None
    loop.step(0)


@action()
def added(loop: Loop) -> None:
    """A micro-batch is not synchronized."""
    loop.clear()
    with loop.unsynchronized():
        loop.backward()
    loop.backward()
    loop.step()


@action(lambda program: unscaled(program) and has_two(program))
def closure(loop: Loop) -> None:
    """The optimizer itself calls backward."""
    loop.clear()

    @torch.enable_grad()
    def compute() -> Tensor:
        loss = loop.backward()
        loop.add_up(loop.params[1])
        return loss

    loop.optimizers[1].step(compute)
    loop.stepped(loop.optimizers[1])
    loop.clear()


@action()
def rests(loop: Loop) -> None:
    """The other head works: this one has no gradient and stays."""
    loop.clear()
    loop.backward(head=1)
    resting = loop.net.second.heads[0].weight
    if loop.program.to_none:
        loop.check(resting.grad is None, "a head that rests has a gradient")
    before = local(resting).clone()
    loop.step()
    if loop.program.to_none and not loop.place.is_local and "lookahead" not in loop.program.optimizers:
        loop.check(torch.equal(before, local(resting)), "a head that rests has moved")


@action()
def renamed(loop: Loop) -> None:
    """A layer is pruned, or a module put around one."""
    prunes = not (loop.place.sharded or "prune" in loop.renamed) and loop.at % 2 == 0
    loop.rename("prune" if prunes else "around")
    ACTIONS["together"].run(loop)


@action()
def saved_on_one_rank(loop: Loop) -> None:
    """As scripts do whose checkpoint the first rank writes, where stock waits for nobody."""
    if can_save_alone(loop) and dist.get_rank() == 0:
        loop.save("of one rank")
