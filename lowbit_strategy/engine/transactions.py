"""Reductions of parameters: prepared, then committed or rolled back."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext

from torch.optim import Optimizer

from lowbit_strategy.codecs.base import StateTensors
from lowbit_strategy.collectives.step_flags import StepFlags
from lowbit_strategy.engine.byte_check import ByteCheck
from lowbit_strategy.engine.copies import Copies, average_, copy_
from lowbit_strategy.engine.method_state import MethodState


class Tally:
    """What goes with reductions. It does nothing: what derives from this overrides what concerns it."""

    def keep(self, names: Collection[str]) -> None:
        """These parameters are about to be reduced, and the reduction may be rolled back."""

    def commit(self, names: Collection[str]) -> None:
        """The open reductions of these parameters are used."""

    def roll_back(self, names: Collection[str]) -> None:
        """Those are thrown away."""

    def set_aside(self, names: Collection[str]) -> None:
        """Their gradients were cleared: what becomes of them will be known later."""
        self.roll_back(names)

    def settle(self, names: Collection[str], *, used: bool) -> None:
        """It is known what became of those that were set aside."""

    def taken_back(self, names: Collection[str]) -> AbstractContextManager[None]:
        """A context, for a checkpoint, in which what is kept of these parameters is as before their reductions."""
        return nullcontext()


class Follower(Tally):
    """Nobody. Who follows gradients to the optimizers' steps derives from this."""

    def stepped(self, optimizer: Optimizer) -> None:
        """It has stepped on what was reduced."""

    def name_parameters(self) -> None:
        """The model has others now."""


class Transactions:
    """The open reductions of one model, one per parameter.

    1. A reduction is *prepared* in backward. The passes of an accumulated gradient are one reduction.
    2. It is *committed* when an optimizer steps its parameter.
    3. It is *rolled back* when its gradient is thrown away: a loss scaler skips the step, or an exchange fails. The
       state is then what it was before 1.
    4. It is *set aside* when its gradient is cleared. The next pass finds the state as it was before 1, and the next
       step of the parameter shows what became of the gradient (`settle`): it was thrown away, or used. In the latter
       case the state becomes the mean of what each of the step's passes left, since each sent its gradient and what
       was unsent before.

    Where no copies are kept, 3 and 4 forget: the state is as at the start.

    Args:
        state: What methods keep between steps.
        flags: What buckets have found; made in the stream of training, as this is.
        keeps_copies: The state before a reduction is copied.

    Attributes:
        byte_check: Byte check of the step.
        prepared: Parameters with an open reduction.
        tallies: Told what becomes of reductions.
    """

    def __init__(self, state: MethodState, flags: StepFlags, *, keeps_copies: bool) -> None:
        self.flags, self.keeps_copies = flags, keeps_copies
        self.byte_check = ByteCheck()
        self._state = state
        self.prepared: set[str] = set()
        self.tallies: list[Tally] = []
        self._begun: set[str] = set()  # of those prepared: the state before is in `_copies`
        self._copies = Copies(state)
        self._aside: dict[str, tuple[int, StateTensors]] = {}  # how many passes, and the mean of what they left

    @property
    def undecided(self) -> Collection[str]:
        """Parameters with reductions that were set aside."""
        return self._aside.keys()

    def to_keep(self, names: Iterable[str]) -> tuple[str, ...]:
        """Those of the parameters to be prepared whose state has to be kept (`keep`) before that."""
        return tuple(name for name in names if name not in self.prepared) if self.keeps_copies else ()

    def keep(self, names: tuple[str, ...]) -> None:
        """The state of these parameters is about to change: copy it. In the stream and thread that change it."""
        self._copies.take(names)
        self._begun |= self.prepared.intersection(names)
        for tally in self.tallies:
            tally.keep(names)

    def commit(self, names: Iterable[str] | None = None) -> None:
        """An optimizer has stepped these parameters; None: all."""
        closed = self._close(names)
        self._state.carryover.commit(closed)
        for tally in self.tallies:
            tally.commit(closed)

    def roll_back(self, names: Collection[str] | None = None) -> None:
        """The gradients of these parameters were thrown away; None: of all."""
        self.settle(list(self._aside if names is None else names), used=False)
        self._take_back(names)

    def set_aside(self, names: Collection[str]) -> None:
        """The gradients of these parameters were cleared."""
        if not self.keeps_copies:
            self.roll_back(names)
            return
        names = [name for name in names if name in self.prepared]
        for name in names:
            live = self._state.tensors(name)
            count, mean = self._aside.get(name, (0, {}))
            if count:
                average_(mean, live, 1 / (count + 1))
            else:
                mean = {key: tensor.clone() for key, tensor in live.items()}
            self._aside[name] = count + 1, mean
        closed = self._restored(names)
        for tally in self.tallies:
            tally.set_aside(closed)

    def settle(self, names: Iterable[str], *, used: bool) -> None:
        """An optimizer steps these parameters. `used`: on what was made of the gradients of reductions set aside."""
        undecided = [name for name in names if name in self._aside]
        for tally in self.tallies:
            tally.settle(undecided, used=used)
        for name in undecided:
            count, mean = self._aside.pop(name)
            if used:
                average_(self._state.tensors(name), mean, count / (count + (name in self.prepared)))
                self.prepared.add(name)

    def rescale_(self, factor: float) -> None:
        """The loss scale has changed by `factor`: so has the unit of all that may become the state again."""
        kept = [(name, mean) for name, (_, mean) in self._aside.items()]
        for name, tensors in kept + [(name, self._copies.of(name)) for name in self._begun]:
            self._state.store(name).method.rescale_({name: tensors}, factor)

    def rescale_residual_(self, name: str, factor: float) -> None:
        """The learning rate of one parameter, none of whose reductions is open, has changed."""
        if name in self._aside:
            self._state.store(name).method.rescale_residual_(self._aside[name][1], factor)

    @contextmanager
    def taken_back(self) -> Iterator[None]:
        """A context in which the state is as before all open reductions, whose gradients no checkpoint has."""
        after = {name: {key: x.clone() for key, x in self._state.tensors(name).items()} for name in self.prepared}
        self._restore(after)
        with ExitStack() as others:
            others.enter_context(self._state.carryover.taken_back(after))
            for tally in self.tallies:
                others.enter_context(tally.taken_back(after))
            yield
        for name, tensors in after.items():
            copy_(self._state.tensors(name), tensors)

    def withdraw(self, names: Iterable[str]) -> None:
        """No rank had a gradient of these parameters: zeros were reduced.

        The state is what it was before. Without copies it is if zeros leave it so (`Method.rests`), else forgotten.
        """
        resting = [
            name
            for name in (() if self.keeps_copies else names)
            if name in self.prepared and self._state.assignments[name].method.rests(self._state.specs[name])
        ]
        closed = self._close(resting)
        self._state.carryover.roll_back(closed)
        for tally in self.tallies:
            tally.roll_back(closed)
        self._take_back(names)

    def forget(self) -> None:
        """Methods or their state have been changed: what is open is committed, copies are dropped."""
        if self.prepared:
            self.commit()
        self.roll_back()
        self._copies = Copies(self._state)

    def _take_back(self, names: Iterable[str] | None) -> None:
        """Open reductions of these parameters are thrown away; None: of all."""
        closed = self._restored(names)
        for tally in self.tallies:
            tally.roll_back(closed)

    def _restored(self, names: Iterable[str] | None) -> set[str]:
        """The state is as before the open reductions of these parameters, which are closed. Returns which they were."""
        self._restore(self.prepared if names is None else self.prepared.intersection(names))
        closed = self._close(names)
        self._state.carryover.roll_back(closed)
        return closed

    def _close(self, names: Iterable[str] | None) -> set[str]:
        closed = self.prepared.copy() if names is None else self.prepared.intersection(names)
        self.prepared -= closed
        self._begun -= closed
        return closed

    def _restore(self, names: Iterable[str]) -> None:
        """The state of these parameters, which are prepared, becomes what it was before."""
        for name in names:
            if name in self._begun:
                copy_(self._state.tensors(name), self._copies.of(name))
            elif not self.keeps_copies:
                copy_(self._state.tensors(name), self._state.fresh(name))
