"""Feedback, EF21, rotation."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import numpy as np
import pytest
import torch

from lowbit_strategy.codecs.base import StatefulCodec
from lowbit_strategy.codecs.block import BlockCodec
from lowbit_strategy.collectives.layout import TensorSpec
from lowbit_strategy.engine.bucket import BucketLayout
from lowbit_strategy.methods._base.codec_pair import CodecPair
from lowbit_strategy.methods._base.compressor import Compressor
from lowbit_strategy.methods.efsignsgd import EFSignSGD
from lowbit_strategy.methods.loco import LoCo
from lowbit_strategy.methods.powersgd import PowerSGD
from lowbit_strategy.methods.qsgd import QSGD
from lowbit_strategy.methods.randomk import RandomK
from lowbit_strategy.methods.topk import TopK
from lowbit_strategy.methods.zoo.ef21 import EF21, MarkovCodec
from lowbit_strategy.methods.zoo.errorfeedback import ErrorFeedback, FeedbackReducer
from lowbit_strategy.methods.zoo.feedback import FeedbackCodec
from lowbit_strategy.methods.zoo.natural import NaturalCompression
from lowbit_strategy.methods.zoo.rotate import Rotate
from lowbit_strategy.methods.zoo.rotated import RotatedCodec
from lowbit_strategy.methods.zoo.sharedscale import SharedScale, TernGrad
from testing.sign_blocks import blocks, scaled_sign
from testing.worlds.one_tensor import OneTensor, gaussian

MATRIX = TensorSpec("layer.weight", (64, 64))
VECTOR = TensorSpec("layer.bias", (64,))
EMBEDDING = TensorSpec("embedding.weight", (64, 64), "embedding")


def mean_of(compressor: Compressor, steps: int, world_size: int = 2) -> float:
    """Relative error of the average of `steps` results for constant gradients."""
    ranks = OneTensor(compressor, (32, 64), world_size)
    g = [gaussian((32, 64), rank) for rank in range(world_size)]
    average = sum(ranks.step(g) for _ in range(steps)) / steps
    mean = torch.stack(g).mean(0).reshape(-1)
    return float((average - mean).norm() / mean.norm())


@pytest.mark.parametrize("inner", [QSGD(bits=3), TernGrad(), SharedScale(bits=3)])
def test_feedback_makes_errors_vanish_as_one_over_steps(inner: Compressor) -> None:
    plain, fed_back = mean_of(inner, 40), mean_of(ErrorFeedback(compressor=inner), 40)
    assert fed_back < 0.5 * plain


def test_feedback_with_loco_rule_equals_the_fused_kernel() -> None:
    """The general codec with LoCo's beta and codec does what the kernel does, step by step."""
    loco = LoCo(bits=4, block_size=64, residual="float32", reset_steps=None, return_beta=0.8)
    pair = loco.method(MATRIX)
    stateful = FeedbackCodec(codec=BlockCodec(pair.uplink.fmt), beta=0.8)  # type: ignore[attr-defined]
    fused, general = OneTensor(loco, (16, 64), 2), OneTensor(_Fixed(stateful=stateful), (16, 64), 2)
    for step in range(5):
        g = [gaussian((16, 64), 10 * step + rank) for rank in range(2)]
        assert torch.allclose(fused.step(g), general.step(g), atol=1e-6)


@dataclass(frozen=True, kw_only=True, slots=True)
class _Fixed(Compressor):
    """The same codec as uplink and downlink of every tensor."""

    name: ClassVar[str] = "fixed"

    stateful: FeedbackCodec
    exempt: tuple[str, ...] = ()

    def method(self, spec: TensorSpec) -> CodecPair:
        return CodecPair(self.stateful, self.stateful)


def test_decay_forgets() -> None:
    """Nothing but noise once the gradient is small: a decaying residual dies out, a full one is sent in the end."""
    totals = {}
    for decay in (1.0, 0.5):
        ranks = OneTensor(ErrorFeedback(compressor=QSGD(bits=2), decay=decay), (32, 64), 1)
        totals[decay] = ranks.step([gaussian((32, 64), 0)])
        residual = ranks.state(0)["uplink.residual"]
        assert residual.norm() > 0
        for _ in range(8):
            totals[decay] = totals[decay] + ranks.step([torch.full((32, 64), 1e-6)])
    target = gaussian((32, 64), 0).reshape(-1)
    assert (totals[1.0] - target).norm() < (totals[0.5] - target).norm()


def test_feedback_in_8_bits_costs_a_quarter_and_does_nearly_as_well() -> None:
    wide, narrow = (ErrorFeedback(compressor=QSGD(bits=3), residual=r) for r in ("float32", "int8"))
    memory = [OneTensor(c, (32, 64), 2).syncs[0].state.nbytes for c in (wide, narrow)]
    assert memory[1] < 0.27 * memory[0]
    assert mean_of(narrow, 40) < 2 * mean_of(wide, 40)


@pytest.mark.parametrize("compressor", [LoCo(), EFSignSGD(), PowerSGD(rank=1)])
def test_feedback_twice_is_refused(compressor: Compressor) -> None:
    with pytest.raises(ValueError, match=r"cannot be given error feedback|has its own error feedback"):
        ErrorFeedback(compressor=compressor).assign(MATRIX)


def test_feedback_leaves_exempt_parameters_dense() -> None:
    assert ErrorFeedback(compressor=QSGD()).assign(VECTOR).kind == "exempt"
    assert ErrorFeedback(compressor=QSGD()).assign(EMBEDDING).kind == "high_precision"
    assert ErrorFeedback(compressor=QSGD(), exempt=("layer.*",)).assign(MATRIX).kind == "exempt"


def test_feedback_wraps_reducers() -> None:
    assert isinstance(ErrorFeedback(compressor=TernGrad()).method(MATRIX), FeedbackReducer)
    with pytest.raises(ValueError, match="leave residual='float32'"):
        ErrorFeedback(compressor=TernGrad(), residual="int8").method(MATRIX)


def test_ef21_is_its_definition() -> None:
    """``c = C(g - ghat)``, ``ghat += c``, ``G = mean ghat``; the same once more for the downlink. In NumPy."""
    ranks = OneTensor(EF21(compressor=EFSignSGD(block_size=64)), (16, 64), 2)
    ghat, gt = np.zeros((2, 1024), np.float32), np.zeros(1024, np.float32)
    for step in range(6):
        g = [gaussian((16, 64), 10 * step + rank) for rank in range(2)]
        for rank in range(2):
            ghat[rank] += scaled_signs(g[rank].reshape(-1).numpy() - ghat[rank])
        gt += scaled_signs(ghat.sum(0) * np.float32(0.5) - gt)
        assert np.allclose(ranks.step(g).numpy(), gt, atol=1e-6)


def scaled_signs(x: np.ndarray) -> np.ndarray:
    return np.concatenate([scaled_sign(block) for block in blocks(x)])


def test_ef21_error_vanishes_for_a_constant_gradient() -> None:
    """Not only on average: each single result approaches the mean, where feedback keeps oscillating."""
    ranks = OneTensor(EF21(), (32, 64), 3)
    g = [gaussian((32, 64), rank) for rank in range(3)]
    mean = torch.stack(g).mean(0).reshape(-1)
    for _ in range(150):
        result = ranks.step(g)
    assert (result - mean).norm() < 0.05 * mean.norm()


@pytest.mark.parametrize(
    "inner",
    [NaturalCompression(bits=2), QSGD(bits=2), LoCo(bits=1, codebook="fitted")],
)
def test_feedback_and_ef21_converge_whatever_the_code(inner: Compressor) -> None:
    """A constant gradient: the residual stays a few gradients, and EF21's single results approach it."""
    g, mean = [gaussian((32, 64), 0)], gaussian((32, 64), 0).reshape(-1)
    if not isinstance(inner, LoCo):  # which has feedback of its own
        ranks = OneTensor(ErrorFeedback(compressor=inner), (32, 64), 1)
        for _ in range(200):
            ranks.step(g)
        assert ranks.state(0)["uplink.residual"].norm() < 15 * mean.norm()
    ranks = OneTensor(EF21(compressor=inner), (32, 64), 1)
    for _ in range(200):
        result = ranks.step(g)
    assert (result - mean).norm() < 0.1 * mean.norm()


@pytest.mark.parametrize(
    ("kind", "inner"),
    [
        (ErrorFeedback, RandomK(scale=True)),
        (EF21, LoCo(bits=2, codebook="fitted", block_size=512)),
        (EF21, Rotate(compressor=LoCo(bits=2, codebook="fitted", block_size=512))),
    ],
)
def test_codes_that_do_not_shrink_are_refused_at_once(kind: type[Compressor], inner: Compressor) -> None:
    with pytest.raises(ValueError, match="can err by more than its input, so what has not been sent would grow"):
        kind(compressor=inner)  # type: ignore[call-arg]


def test_what_cannot_be_wrapped_is_refused_at_once() -> None:
    for kind in (EF21, Rotate):
        with pytest.raises(ValueError, match="needs a quantizer"):
            kind(compressor=PowerSGD(rank=1))
    with pytest.raises(ValueError, match="has its own error feedback"):
        ErrorFeedback(compressor=TopK())


def test_ef21_with_momentum_is_its_definition() -> None:
    """``v = m v + (1 - m) g``, at first g; then EF21 of v. The owner's mean is not averaged again. In NumPy."""
    ranks = OneTensor(EF21(compressor=EFSignSGD(block_size=64), momentum=0.75), (16, 64), 2)
    v, ghat, gt = np.zeros((2, 1024), np.float32), np.zeros((2, 1024), np.float32), np.zeros(1024, np.float32)
    for step in range(6):
        g = [gaussian((16, 64), 10 * step + rank) for rank in range(2)]
        for rank in range(2):
            flat = g[rank].reshape(-1).numpy()
            v[rank] = flat if step == 0 else np.float32(0.75) * v[rank] + np.float32(0.25) * flat
            ghat[rank] += scaled_signs(v[rank] - ghat[rank])
        gt += scaled_signs(ghat.sum(0) * np.float32(0.5) - gt)
        assert np.allclose(ranks.step(g).numpy(), gt, atol=1e-6)


def test_ef21_with_momentum_sees_through_noise() -> None:
    """Signal-to-noise 0.5: without momentum the differences never shrink, with it the result finds the signal."""
    signal = gaussian((32, 64), 0)
    errors = {}
    for momentum in (0.0, 0.9):
        ranks = OneTensor(EF21(momentum=momentum), (32, 64), 1)
        results = [ranks.step([signal + 2.0 * gaussian((32, 64), step + 1)]) for step in range(150)]
        errors[momentum] = sum(float((each - signal.reshape(-1)).norm() / signal.norm()) for each in results[50:]) / 100
    assert errors[0.9] < 0.5 * errors[0.0]


def test_ef21_momentum_passes_nan_on_and_recovers() -> None:
    ranks = OneTensor(EF21(compressor=QSGD(), momentum=0.5), (32, 64), 2)
    g = gaussian((32, 64), 0)
    ranks.step([g, g])
    bad = [torch.full((2048,), torch.nan), g.reshape(-1).clone()]
    ranks.world.reduce(ranks.syncs, BucketLayout((("p", 0),)), bad, bad)
    assert bad[0].isnan().all()
    assert bad[1].isnan().all()
    for _ in range(60):
        result = ranks.step([g, g])
    assert torch.allclose(result, g.reshape(-1), atol=1e-2)


def test_ef21_takes_only_quantizers() -> None:
    assert isinstance(EF21(compressor=LoCo()).method(MATRIX).uplink, MarkovCodec)  # type: ignore[union-attr]
    with pytest.raises(ValueError, match="EF21 needs a quantizer"):
        EF21(compressor=PowerSGD(rank=1)).assign(MATRIX)


def test_rotate_keeps_the_rule_and_turns_the_codec() -> None:
    for inner in (QSGD(), LoCo(), ErrorFeedback(compressor=QSGD()), EF21()):
        pair = Rotate(compressor=inner).method(MATRIX)
        assert isinstance(pair, CodecPair)
        codec = pair.uplink.codec if isinstance(pair.uplink, StatefulCodec) else pair.uplink
        assert isinstance(codec, RotatedCodec)
    with pytest.raises(ValueError, match="Rotate needs a quantizer"):
        Rotate(compressor=PowerSGD(rank=1)).assign(MATRIX)
    with pytest.raises(ValueError, match="power of two that divides"):
        Rotate(compressor=QSGD(), size=96).assign(MATRIX)
