"""Mistakes in code get messages as good as those in files: what is wrong, the nearest name, where it goes."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import pytest

import lowbit_strategy
from lowbit_strategy import DiLoCo, LoCo, PowerSGD, TopK, accelerate, as_weights, fabric
from lowbit_strategy.accelerate import LowBitPlugin
from lowbit_strategy.config_file.section import plugin_from_section
from lowbit_strategy.lightning import AdaptiveCompression, CompressionMonitor, LowBitDDPStrategy, LowBitFSDPStrategy

untyped: Any = lambda each: each  # noqa: E731 (mistakes are not for the type checker)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: untyped(LoCo)(bit=4), "LoCo has no option 'bit'; did you mean 'bits'? Known: exempt,"),
        (lambda: untyped(TopK)(k=10), "TopK has no option 'k'. Known: exempt, density"),
        (lambda: untyped(PowerSGD)(xyz=1), "PowerSGD has no option 'xyz'. Known: exempt, rank"),
        (
            lambda: untyped(CompressionMonitor)(every_steps=50),
            "CompressionMonitor has no option 'every_steps'; did you mean 'every_n_steps'? Known: every_n_steps,",
        ),
        (
            lambda: untyped(accelerate.MonitorOptions)(every_steps=50),
            "MonitorOptions has no option 'every_steps'; did you mean 'every_n_steps'?",
        ),
        (
            lambda: untyped(AdaptiveCompression)(controler=None),
            "AdaptiveCompression has no option 'controler'; did you mean 'controller'?",
        ),
        (
            lambda: LowBitFSDPStrategy(wieghts="delta4"),
            "LowBitFSDPStrategy has no option 'wieghts'; did you mean 'weights'?",
        ),
        (
            lambda: LowBitFSDPStrategy(bits=4),
            "LowBitFSDPStrategy has no option 'bits': it is an option of the compressor, "
            "LowBitFSDPStrategy(LoCo(bits=...))",
        ),
        (
            lambda: LowBitDDPStrategy(density=0.1),
            "it is an option of the compressor, LowBitDDPStrategy(TopK(density=...))",
        ),
        (lambda: LowBitDDPStrategy(every=30), "it is an option of outer=DiLoCo(every=...)"),
        (lambda: LowBitDDPStrategy(outr="diloco"), "LowBitDDPStrategy has no option 'outr'; did you mean 'outer'?"),
        (lambda: LowBitDDPStrategy(two_levels=True), "did you mean 'two_level'?"),
        (lambda: LowBitDDPStrategy(check_digests=True), "did you mean 'check_digest'?"),
        (lambda: LowBitFSDPStrategy(shard_sise=4), "did you mean 'shard_size'?"),
        (lambda: untyped(LowBitPlugin)(check_digst=False), "LowBitPlugin has no option 'check_digst'; did you mean"),
    ],
)
def test_unknown_options(make: Callable[[], object], message: str) -> None:
    with pytest.raises(TypeError, match=re.escape(message)):
        make()


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (
            lambda: LowBitDDPStrategy("diloco"),
            "compressor: 'diloco' is not a compressor: it is an outer rule, outer='diloco'",
        ),
        (lambda: fabric.LowBitDDPStrategy("sparseloco"), "'sparseloco' is not a compressor: it is an outer rule"),
        (lambda: plugin_from_section({"compressor": "diloco"}), "'diloco' is not a compressor: it is an outer rule"),
        (
            lambda: LowBitFSDPStrategy("delta"),
            "'delta' is not a compressor: it is a way of sending weights, weights='delta'",
        ),
        (
            lambda: plugin_from_section({"compresor": "loco"}),
            "lowbit_config: unknown key 'compresor'; did you mean 'compressor'?",
        ),
        (lambda: plugin_from_section({"bits": 3, "compresor": "loco"}), "unknown key 'compresor'; did you mean"),
        (lambda: plugin_from_section({"seed": 3}), "lowbit_config: compressor is missing: name one, such as loco"),
        (lambda: CompressionMonitor(bounds=untyped({})), "bounds: give at least one of max_error"),
        (lambda: untyped(accelerate.MonitorOptions)(bounds={}), "bounds: give at least one of max_error"),
        (lambda: LowBitFSDPStrategy(outer=DiLoCo()), "outer needs replicas that train separately, but FSDP2 shards"),
        (lambda: fabric.LowBitFSDPStrategy(outer="diloco"), 'give shard_size="node" as well'),
        (lambda: LowBitDDPStrategy(outer="diloco", two_level=True), "two_level=True is incompatible with outer"),
    ],
)
def test_wrong_values(make: Callable[[], object], message: str) -> None:
    with pytest.raises(ValueError, match=re.escape(message)):
        make()


def test_what_goes_together_is_accepted() -> None:
    assert LowBitFSDPStrategy(outer="diloco", shard_size="node").options.outer == DiLoCo()
    assert LowBitFSDPStrategy(weights="delta4").options.weights == as_weights("delta4")


def test_names_that_are_in_a_framework_s_module() -> None:
    with pytest.raises(ImportError, match=r"LowBitDDPStrategy is in lowbit_strategy\.lightning \(or"):
        from lowbit_strategy import LowBitDDPStrategy  # type: ignore[attr-defined]  # noqa: F401
    with pytest.raises(ImportError, match=r"LowBitPlugin is in lowbit_strategy\.accelerate, not in lowbit_strategy"):
        from lowbit_strategy import LowBitPlugin  # type: ignore[attr-defined]  # noqa: F401
    assert not hasattr(lowbit_strategy, "nothing")
    assert not hasattr(lowbit_strategy, "LowBitPlugin")  # for those who ask without importing
    with pytest.raises(AttributeError, match=r"LowBitPlugin is in lowbit_strategy\.accelerate"):
        lowbit_strategy.LowBitPlugin  # noqa: B018
    for name, where in lowbit_strategy._IN_FRAMEWORKS.items():  # each is where the text says
        module = where.split()[0].removeprefix("lowbit_strategy.").rstrip(",")
        assert hasattr(__import__(f"lowbit_strategy.{module}", fromlist=[name]), name)


def test_unused_parameters_are_one_text() -> None:
    """Lightning prints the exception; its own arguments were a tuple once."""
    strategy = LowBitDDPStrategy()
    error = RuntimeError("Expected to have finished reduction in the prior iteration before starting a new one.")
    strategy.on_exception(error)
    lines = str(error).splitlines()
    assert lines[0].startswith("The model has parameters that the loss of training_step does not depend on")
    assert lines[1].startswith("Expected to have finished reduction")
