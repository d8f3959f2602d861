"""The part of a plan that follows from a prepared model, before there is an engine."""

from __future__ import annotations

from typing import Protocol, runtime_checkable

from lowbit_strategy.attach.part import Part
from lowbit_strategy.attach.prepare import PreparedModel
from lowbit_strategy.plan.extra import Extra


@runtime_checkable
class WithExtra(Protocol):
    """A `Part` for which ranks exchange or keep more than gradients."""

    def extra(self, prepared: PreparedModel) -> Extra:
        """Exchanges and memory that this part will need."""

    def given_up(self) -> Part:
        """The replacement if the part cannot work and the user has not requested it."""


def extra_of(prepared: PreparedModel) -> Extra:
    """Exchanges in addition to gradients."""
    return next((part.extra(prepared) for part in prepared.parts if isinstance(part, WithExtra)), Extra())


def without_extra(prepared: PreparedModel) -> tuple[Part, ...]:
    """The parts that remain without the extra exchanges."""
    return tuple(part.given_up() if isinstance(part, WithExtra) else part for part in prepared.parts)


def copies_residuals(prepared: PreparedModel) -> bool:
    """Whether residuals are copied before each reduction. Rounds discard nothing unless replicas leave."""
    return prepared.options.rollback and (not prepared.in_rounds or prepared.options.comes_and_goes)
