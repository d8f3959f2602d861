"""The option: a compressor that chooses among others."""

from __future__ import annotations

from typing import Any, ClassVar, Literal

from lowbit_strategy import leaves
from lowbit_strategy.methods._base.chooser import Chooser
from lowbit_strategy.options.configuration import configuration


@configuration
class Auto(Chooser):
    """Chooses during training, and removes itself if it cannot help.

    1. the first steps are the framework's own, and are timed
    2. LoCo at 4 bits and bfloat16 are tried for a few steps each; under FSDP2 LoCo with coded weights and with exact
       ones. All candidates together take 20 steps at most
    3. the fastest is kept if it is certainly faster than the framework's own. Otherwise the hook is removed. The log
       says why
    4. when steps take more than 1.5 times or less than two thirds as long as before, it tries again

    Gradients that a candidate has not sent yet are carried over to the next one, and are sent uncompressed before the
    framework takes over. Local steps are never chosen, because they change the algorithm.

    Args:
        quality: ``same``: 4 bits and more, whose measured loss equals that of float32. ``close``: also 2 bits, whose
            measured loss is slightly higher. One bit needs `second_moment`, which does not allow a change of
            compressors.

    Raises:
        ValueError: `quality` is neither of the two.
    """

    name: ClassVar[str] = "auto"

    quality: Literal["same", "close"] = "same"

    def begin(self, prepared: Any, sync: Any, model: Any, hook: Any) -> Any:
        return leaves.load("lowbit_strategy.auto.choice:AutoChoice", "Auto")(prepared, sync, model, hook)
