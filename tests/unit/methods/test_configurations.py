"""What configurations refuse, and how files and names give them."""

from __future__ import annotations

from typing import Any

import pytest

import lowbit_strategy
from lowbit_strategy import ACPSGD, ATOMO, DEFT, GradiVeQ, SketchedSGD, ThreeLC
from lowbit_strategy.collectives.layout import TensorSpec
from lowbit_strategy.engine.engine import GradientSync
from lowbit_strategy.methods._base.compressor import Compressor
from lowbit_strategy.methods.dense import Dense
from lowbit_strategy.methods.efsignsgd import EFSignSGD
from lowbit_strategy.methods.loco import LoCo
from lowbit_strategy.methods.powersgd import PowerSGD
from lowbit_strategy.methods.qsgd import QSGD
from lowbit_strategy.methods.registry import PRESETS, from_options
from lowbit_strategy.methods.signsgd import SignSGD
from lowbit_strategy.methods.zoo.composed import Partition, WarmUp
from lowbit_strategy.methods.zoo.ef21 import EF21
from lowbit_strategy.methods.zoo.errorfeedback import ErrorFeedback
from lowbit_strategy.methods.zoo.natural import NaturalCompression
from lowbit_strategy.methods.zoo.onebitsgd import OneBitSGD
from lowbit_strategy.methods.zoo.sharedscale import MultiScale, SharedScale, TernGrad
from testing.worlds.one_tensor import OneTensor

WRONG: list[tuple[type[Compressor], dict[str, Any], str]] = [
    (QSGD, {"bits": 1}, "bits must be an integer from 2 to 8, got 1"),
    (QSGD, {"bits": 9}, "bits must be an integer from 2 to 8"),
    (QSGD, {"bits": 4.0}, "bits must be an integer, got 4.0"),
    (QSGD, {"bits": True}, "bits must be an integer, got True"),
    (QSGD, {"return_bits": "4"}, "return_bits must be an integer, got '4'"),
    (LoCo, {"beta": "high"}, "beta must be a number, got 'high'"),
    (PowerSGD, {"exempt": (3,)}, r"exempt\[0\] must be a string or a function, got 3"),
    (QSGD, {"return_bits": 0}, "return_bits must be an integer from 2 to 8"),
    (QSGD, {"block_size": 100}, "block_size must be a power of two"),
    (QSGD, {"exempt": "@vector"}, "exempt must be a list"),
    (TernGrad, {"clip_sigmas": 0.0}, "clip_sigmas must be positive or None"),
    (TernGrad, {"block_size": 0}, "block_size must be a power of two"),
    (SignSGD, {"scale": "two"}, "scale must be 'mean_abs' or 'one'"),
    (SignSGD, {"block_size": 16}, "block_size must be a power of two"),
    (EFSignSGD, {"residual": "int2"}, "residual must be 'int8' or 'float32', got 'int2'"),
    (OneBitSGD, {"residual": "bf16"}, "residual must be 'int8' or 'float32'"),
    (SharedScale, {"bits": 1}, "bits must be an integer from 2 to 8"),
    (MultiScale, {"finer_bits": 0}, "finer_bits must be an integer from 1 to 8"),
    (NaturalCompression, {"bits": 1}, "bits must be an integer from 2 to 8"),
    (PowerSGD, {"rank": 0}, "rank must be a positive integer"),
    (PowerSGD, {"start_step": -1}, "start_step must be 0 or a positive integer"),
    (PowerSGD, {"min_compression_rate": 0.0}, "min_compression_rate must be positive"),
    (ErrorFeedback, {"decay": 0.0}, r"decay must be in \(0, 1\]"),
    (ErrorFeedback, {"compressor": "qsg"}, "unknown compressor 'qsg'; did you mean 'qsgd'"),
    (ErrorFeedback, {"compressor": {"bits": 3}}, "needs the compressor's name under 'compressor'"),
    (EF21, {"momentum": 1.0}, r"momentum must be in \[0, 1\)"),
    (SignSGD, {"momentum": -0.1}, r"momentum must be in \[0, 1\)"),
    (EF21, {"compressor": None}, "compressor must be a compressor such as"),
    (
        Partition,
        {"rules": (("layer.*",),)},
        r"rules\[0\] must be a list of 2",
    ),
    (Partition, {"rules": (("@vectors", QSGD()),)}, "did you mean '@vector'"),
    (WarmUp, {"steps": 0}, "steps must be a positive integer"),
    (
        WarmUp,
        {"first": Dense},
        "first must be a compressor such as .* got <class",
    ),
    (LoCo, {"bits": 1}, "or codebook='fitted'"),
    (LoCo, {"bits": 5, "codebook": "fitted"}, "bits must be an integer from 1 to 4 with codebook='fitted'"),
    (LoCo, {"bits": 4, "codebook": "ternary_unit_gain"}, "bits must be 2 with codebook='ternary_unit_gain'"),
    (LoCo, {"bits": 3, "codebook": "e2m1"}, "bits must be 4 with codebook='e2m1'"),
    (
        LoCo,
        {"codebook": "gaussian"},
        "codebook must be 'uniform', 'e2m1', 'fitted', 'unit_gain' or 'ternary_unit_gain'",
    ),
    (LoCo, {"beta": 1.0}, r"beta must be in \[0, 1\)"),
    (LoCo, {"high_precision_bits": 9}, "high_precision_bits must be an integer from 2 to 8"),
    (LoCo, {"return_bits": 1}, "return_bits must be an integer from 2 to 8"),
    (
        LoCo,
        {"return_codebook": "ternary_unit_gain"},
        "return_bits must be 2 with return_codebook='ternary_unit_gain', got 4",
    ),
    (LoCo, {"return_block_size": 48}, "block_size must be a power of two"),
    (
        LoCo,
        {"return_codebook": "fitted", "return_bits": 8},
        "return_bits must be an integer from 1 to 4 with return_co",
    ),
    (LoCo, {"return_bits": 3}, "return_bits must be at least bits, 4, got 3"),
    (GradiVeQ, {"slice_size": 60}, "slice_size must be a multiple of ratio"),
    (SketchedSGD, {"rows": 0}, "rows must be a positive integer"),
    (DEFT, {"density": 0.0}, "density must be in"),
    (ACPSGD, {"rank": 0}, "rank must be a positive integer"),
    (ATOMO, {"min_compression_rate": 0.0}, "min_compression_rate must be positive"),
    (ThreeLC, {"sparsity": 2.0}, "sparsity must be in"),
]


@pytest.mark.parametrize(("kind", "options", "message"), WRONG)
def test_wrong_options_name_what_to_change(kind: type[Compressor], options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        kind(**options)


def test_a_rank_larger_than_every_matrix_is_refused() -> None:
    with pytest.raises(
        ValueError, match="rank 65 is larger than every matrix of this model: choose a rank of at most 64"
    ):
        OneTensor(PowerSGD(rank=65), (64, 200), 1)
    with pytest.raises(ValueError, match="larger than every matrix"):  # also when it would start only later
        OneTensor(WarmUp(compressor=PowerSGD(rank=65), steps=10), (64, 200), 1)


def test_a_rank_larger_than_some_matrix_leaves_that_one_dense() -> None:
    assignment = PowerSGD(rank=8).assign(TensorSpec("narrow", (4, 4000)))
    assert assignment.kind == "exempt"
    assert "would not make it much smaller" in assignment.reason


def test_powersgd_starts_dense() -> None:
    compressor = PowerSGD(rank=2, start_step=3)
    ranks = OneTensor(compressor, (64, 64), 1)
    sync: GradientSync = ranks.syncs[0]
    assert isinstance(compressor.phase(2), Dense)
    assert sync.state.assignments["p"].method == Dense().method(sync.specs["p"])


def test_files_nest_compressors() -> None:
    warm_up = from_options("warmup", {"steps": 5, "first": "dense", "compressor": {"compressor": "loco", "bits": 3}})
    assert warm_up == WarmUp(steps=5, first=Dense(), compressor=LoCo(bits=3))
    partition = from_options(
        "partition", {"rules": [["a.*", "qsgd"], ["b.*", {"compressor": "topk"}]], "exempt": ["c"]}
    )
    assert isinstance(partition, Partition)
    assert partition.rules == (("a.*", PRESETS["qsgd"]), ("b.*", PRESETS["topk"]))
    assert partition.exempt == ("c",)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"compressor": {"bits": 3}}, "needs the compressor's name under 'compressor'"),
        ({"compressor": "locoo"}, "did you mean 'loco"),
        ({"compressor": {"compressor": "loco", "bit": 3}}, "did you mean 'bits'"),
        ({"compressor": 3}, "compressor must be a compressor such as"),
    ],
)
def test_wrong_files_name_what_to_change(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        from_options("warmup", options)


def test_every_configuration_is_exported() -> None:
    for compressor in PRESETS.values():
        name = type(compressor).__name__
        assert getattr(lowbit_strategy, name) is type(compressor)
        assert name in lowbit_strategy.__all__


@pytest.mark.parametrize(("name", "bits"), [("loco", 4.125), ("loco2", 2.25), ("loco_ternary", 1.875), ("loco1", 1.5)])
def test_bits_of_loco_with_scales(name: str, bits: float) -> None:
    compressor = PRESETS[name]
    assert isinstance(compressor, LoCo)
    assert compressor.fmt.bits_per_element == bits


def test_presets_below_4_bits_never_forget_their_residual() -> None:
    low = [preset for preset in PRESETS.values() if isinstance(preset, LoCo) and preset.bits < 4]
    assert len(low) == 4
    assert all(preset.reset_steps is None for preset in low)


def test_presets_are_hashable_and_equal_to_themselves() -> None:
    """Engines compare phases and handshakes compare their text."""
    for name, known in PRESETS.items():
        assert from_options(name, {}) == known
        assert hash(known) == hash(from_options(name, {}))
        assert name == name.lower()


def test_an_option_that_does_nothing_is_not_taken() -> None:
    with pytest.raises(ValueError, match="gspar has no option 'residual'"):
        from_options("gspar", {"residual": "float32"})


@pytest.mark.parametrize("name", ["gradiveq", "topk", "powersgd", "naturalcompression", "dense", "partition", "ef21"])
def test_high_precision_is_an_option_only_where_there_is_one(name: str) -> None:
    with pytest.raises(ValueError, match=f"{name} has no option 'high_precision'"):
        from_options(name, {"high_precision": ("@head",)})
