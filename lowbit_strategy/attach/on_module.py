"""Holds a session on the module that it trains, so that both live equally long."""

from __future__ import annotations

from lowbit_strategy.attach.session import Session


class OnModule:
    """A module's attribute. Copies of the module, and files of it, have None instead."""

    def __init__(self, session: Session) -> None:
        self.session = session

    def __reduce__(self) -> tuple[type[None], tuple[()]]:
        return (type(None), ())
