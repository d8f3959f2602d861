"""Auto: no compressor of its own; a session tries several, none included, and keeps the fastest."""

from __future__ import annotations

from typing import ClassVar, Literal

from lowbit_strategy.methods._base.codec_pair import CodecPair
from lowbit_strategy.methods._base.compressor import Compressor, dense_method
from lowbit_strategy.methods._base.presets import register_presets
from lowbit_strategy.methods._base.tensor_spec import TensorSpec
from lowbit_strategy.options.configuration import configuration


@configuration
class Auto(Compressor):
    """The package chooses while training runs, and steps aside where it cannot help.

    1. the first steps are the framework's own; they and the links are timed
    2. the step of every candidate is predicted, and the two that promise most are tried for a few steps each
    3. what reaches the same loss soonest is kept. If that is the framework's own, the hook is removed, and the log says
       why
    4. when step times have changed by a third, it looks again

    Gradients that a candidate has not sent yet are carried over to the next one, and are sent uncompressed before the
    framework takes over. Local steps are never chosen, because they change the algorithm.

    Args:
        quality: ``same``: 4 bits and more, whose loss was measured to be that of float32; ``close``: also 2 bits,
            whose loss was measured to be a little worse. What either needs of more steps to the same loss is counted
            as time. One bit needs too many without `second_moment`, which does not go with a change of compressors.

    Raises:
        ValueError: `quality` is neither of the two.
    """

    name: ClassVar[str] = "auto"

    quality: Literal["same", "close"] = "same"

    def method(self, spec: TensorSpec) -> CodecPair:
        """Float32, through the engine's messages: what sends the rest of a candidate's residuals."""
        return dense_method()


register_presets({Auto.name: Auto()})
