"""`Auto`, which times the framework's own steps and those of compressors, and keeps what is faster."""

from lowbit_strategy.auto.auto import Auto as Auto
