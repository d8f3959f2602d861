"""torchmetrics metrics of compression: right under distributed reduction, usable in a module of your own."""

from lowbit_strategy.metrics.energy import (
    CompressionCosineSimilarity,
    CompressionGain,
    CompressionRelativeError,
    ResidualNorm,
)
from lowbit_strategy.metrics.wire import BitsPerElement, CompressionRatio, WireBytes

__all__ = [
    "BitsPerElement",
    "CompressionCosineSimilarity",
    "CompressionGain",
    "CompressionRatio",
    "CompressionRelativeError",
    "ResidualNorm",
    "WireBytes",
]
