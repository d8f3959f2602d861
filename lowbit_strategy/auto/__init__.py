"""`Auto`, which times the framework's own steps and those of compressors, and keeps the faster ones."""

from lowbit_strategy.auto.auto import Auto as Auto
