"""Trainings that are saved and resumed, fitted a second time, or met by an overflow."""

from benchmarks.gpu_acceptance.checks import Check
from benchmarks.gpu_acceptance.interrupted import continued, overflow

CHECKS = (
    Check(name="resume and second fit with residuals carried over", run=continued),
    Check(name="fp16 overflow", run=overflow),
)
