"""Transactions: reductions of parameters are opened, then committed or rolled back."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator
from contextlib import ExitStack, contextmanager

from lowbit_strategy.codecs.base import StateTensors
from lowbit_strategy.collectives.step_flags import StepFlags
from lowbit_strategy.engine.copies import Copies, copy_, move_toward_
from lowbit_strategy.engine.method_state import MethodState
from lowbit_strategy.engine.transaction_listener import Follower, TransactionListener


class Transactions:
    """The open reductions of one model, one per parameter.

    1. A reduction is *opened* in backward (`begin`). All passes of an accumulated gradient form one reduction.
    2. It is *committed* when an optimizer steps its parameter.
    3. It is *rolled back* when its gradient is discarded: a loss scaler skips the step, or an exchange fails. The state
       before 1 is then restored.
    4. It is *set aside* when its gradient is cleared. The next pass finds the state as it was before 1, and the next
       step of the parameter shows whether the gradient was discarded or used (`settle`). If it was used, the state
       becomes the mean of the states that the step's passes left, since each sent its gradient and what was unsent
       before.

    Without copies, 3 and 4 reset the state.

    Args:
        state: The methods' state.
        flags: Overflows and errors that buckets have found. Like this object, it is made in the stream of training.
        keeps_copies: Whether the state before a reduction is copied.

    Attributes:
        open: Parameters with an open reduction.
        follower: Called when optimizers step on reduced gradients.
    """

    def __init__(self, state: MethodState, flags: StepFlags, *, keeps_copies: bool) -> None:
        self.flags, self.keeps_copies = flags, keeps_copies
        self._state = state
        self.open: set[str] = set()
        self.follower = Follower()
        self._others: list[TransactionListener] = [state.carryover]
        self._kept: set[str] = set()  # open parameters whose earlier state is in `_copies`
        self._copies = Copies(state)
        self._aside: dict[str, tuple[int, StateTensors]] = {}  # number of passes, and the mean of the states after them

    def follow(self, follower: Follower) -> None:
        """Tell `follower`, instead of an earlier one, first what becomes of reductions."""
        self.follower = follower

    def add(self, listener: TransactionListener) -> None:
        """Tell `listener`, too, what becomes of reductions."""
        self._others.append(listener)

    @property
    def _listeners(self) -> list[TransactionListener]:
        return [self.follower, *self._others]

    @property
    def undecided(self) -> Collection[str]:
        """Parameters whose reductions were set aside."""
        return self._aside.keys()

    def to_keep(self, names: Iterable[str]) -> tuple[str, ...]:
        """The parameters whose state must be copied (`keep`) before they are reduced."""
        return tuple(name for name in names if name not in self.open) if self.keeps_copies else ()

    def begin(self, names: Iterable[str]) -> None:
        """Open the reductions of these parameters, unless they are open."""
        self.open.update(names)

    def keep(self, names: tuple[str, ...]) -> None:
        """Copy these parameters' state, which is about to change, in the stream and thread that change it."""
        self._copies.take(names)
        self._kept |= self.open.intersection(names)
        for listener in self._listeners:
            listener.keep(names)

    def commit(self, names: Iterable[str] | None = None) -> None:
        """Commit these parameters, because an optimizer has stepped them; None: all."""
        closed = self._close(names)
        for listener in self._listeners:
            listener.commit(closed)

    def roll_back(self, names: Collection[str] | None = None) -> None:
        """Roll back these parameters, because their gradients were discarded; None: all."""
        self.settle(list(self._aside if names is None else names), used=False)
        self._take_back(names)

    def set_aside(self, names: Collection[str]) -> None:
        """Set the reductions of these parameters aside, because their gradients were cleared."""
        if not self.keeps_copies:
            self.roll_back(names)
            return
        names = [name for name in names if name in self.open]
        for name in names:
            live = self._state.tensors(name)
            count, mean = self._aside.get(name, (0, {}))
            if count:
                move_toward_(mean, live, 1 / (count + 1))
            else:
                mean = {key: tensor.clone() for key, tensor in live.items()}
            self._aside[name] = count + 1, mean
        closed = self._restored(names)
        for listener in self._listeners:
            listener.set_aside(closed)

    def settle(self, names: Iterable[str], *, used: bool) -> None:
        """Settle these parameters when an optimizer steps them. `used`: whether the step used the gradients of the
        reductions that were set aside.
        """
        undecided = [name for name in names if name in self._aside]
        for listener in self._listeners:
            listener.settle(undecided, used=used)
        for name in undecided:
            count, mean = self._aside.pop(name)
            if used:
                move_toward_(self._state.tensors(name), mean, count / (count + (name in self.open)))
                self.open.add(name)

    def rescale_(self, factor: float) -> None:
        """Rescale all copies that may become the state again, because the loss scale has changed by `factor`."""
        kept = [(name, mean) for name, (_, mean) in self._aside.items()]
        for name, tensors in kept + [(name, self._copies.of(name)) for name in self._kept]:
            self._state.store(name).method.rescale_({name: tensors}, factor)

    def rescale_residual_(self, name: str, factor: float) -> None:
        """Rescale the residual of one parameter, which has no open reduction, because its learning rate has changed."""
        if name in self._aside:
            self._state.store(name).method.rescale_residual_(self._aside[name][1], factor)

    @contextmanager
    def taken_back(self) -> Iterator[None]:
        """A context in which the state is as before all open reductions, since a checkpoint lacks their gradients."""
        after = {name: {key: x.clone() for key, x in self._state.tensors(name).items()} for name in self.open}
        self._restore(after)
        try:
            with ExitStack() as others:
                for listener in self._listeners:
                    others.enter_context(listener.taken_back(after))
                yield
        finally:
            for name, tensors in after.items():
                copy_(self._state.tensors(name), tensors)

    def withdraw(self, names: Iterable[str]) -> None:
        """Withdraw the reductions of these parameters: no rank had a gradient, so only zeros were reduced.

        The earlier state is restored. Without copies the state is kept if zeros do not change it (`Method.rests`),
        otherwise reset.
        """
        resting = [
            name
            for name in (() if self.keeps_copies else names)
            if name in self.open and self._state.assignments[name].method.rests(self._state.specs[name])
        ]
        closed = self._close(resting)
        for listener in self._listeners:
            listener.roll_back(closed)
        self._take_back(names)

    def forget(self) -> None:
        """Commit what is open and drop the copies, because methods or their state have changed."""
        if self.open:
            self.commit()
        self.roll_back()
        self._copies = Copies(self._state)

    def _take_back(self, names: Iterable[str] | None) -> None:
        """Discard the open reductions of these parameters; None: of all parameters."""
        closed = self._restored(names)
        for listener in self._listeners:
            listener.roll_back(closed)

    def _restored(self, names: Iterable[str] | None) -> set[str]:
        """Restore the state from before these parameters' open reductions, and close them. Return which were open."""
        self._restore(self.open if names is None else self.open.intersection(names))
        return self._close(names)

    def _close(self, names: Iterable[str] | None) -> set[str]:
        closed = self.open.copy() if names is None else self.open.intersection(names)
        self.open -= closed
        self._kept -= closed
        return closed

    def _restore(self, names: Iterable[str]) -> None:
        """Restore the state that these open parameters had before."""
        for name in names:
            if name in self._kept:
                copy_(self._state.tensors(name), self._copies.of(name))
            elif not self.keeps_copies:
                copy_(self._state.tensors(name), self._state.fresh(name))
