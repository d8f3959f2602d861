"""The interface of options by which ranks meet in rounds; between meetings, gradients stay on their rank."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable
from typing import Any, ClassVar

from lowbit_strategy import leaves
from lowbit_strategy.attach.part import Part
from lowbit_strategy.methods._base.compressor import Compressor
from lowbit_strategy.methods.registry import register_other_names
from lowbit_strategy.options.conversion import register_conversion


class RoundRule(Part, ABC):
    """Decides how long a round is, and how the model is updated when ranks meet."""

    in_rounds: ClassVar[bool] = True

    @abstractmethod
    def compressor(self) -> Compressor:
        """The compressor to use if the user chooses none."""


def _from_value(value: Any) -> RoundRule:
    made: RoundRule = leaves.load("lowbit_strategy.local_steps.published:made_rule", "outer")(value)
    return made


def _known() -> Iterable[RoundRule]:
    target = leaves.NAMES["OUTER_RULES"]
    return leaves.load(target, "outer").values() if leaves.is_present(target) else ()


register_other_names(leaves.RULES, "it is an outer rule, outer={0!r} with a compressor or alone (strategy {0}_ddp)")
register_conversion(
    RoundRule,
    _from_value,
    "an outer rule such as DiLoCo(every=30), 'diloco' or {name: diloco, every: 30}",
    known=_known,
)
