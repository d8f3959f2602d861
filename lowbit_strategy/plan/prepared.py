"""What of a plan follows from a model that is prepared, before there is an engine."""

from __future__ import annotations

from typing import Protocol, runtime_checkable

from lowbit_strategy.attach.part import Part
from lowbit_strategy.attach.prepare import PreparedModel
from lowbit_strategy.plan.extra import Extra


@runtime_checkable
class WithExtra(Protocol):
    """A `Part` for which ranks exchange or keep more than gradients."""

    def extra(self, prepared: PreparedModel) -> Extra:
        """What ranks will exchange and keep for it."""

    def given_up(self) -> Part:
        """What is left if it cannot be had and nobody has asked for it."""


def extra_of(prepared: PreparedModel) -> Extra:
    """What ranks will exchange in addition to gradients."""
    return next((part.extra(prepared) for part in prepared.parts if isinstance(part, WithExtra)), Extra())


def without_extra(prepared: PreparedModel) -> tuple[Part, ...]:
    """Its parts if that is given up."""
    return tuple(part.given_up() if isinstance(part, WithExtra) else part for part in prepared.parts)


def copies_residuals(prepared: PreparedModel) -> bool:
    """Whether they are copied before each reduction; rounds throw nothing away unless replicas leave."""
    return prepared.options.rollback and (not prepared.in_rounds or prepared.options.comes_and_goes)
