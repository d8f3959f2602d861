"""Adam's second moment of ranks' squares: near that of exact gradients, the same on all ranks, counted, saved."""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch.callbacks import Callback
from lightning.pytorch.plugins import MixedPrecision
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

from lowbit_strategy import Dense, DiLoCo, LoCo
from lowbit_strategy.attach.sync_options import SyncOptions
from lowbit_strategy.custom_loop import compress
from lowbit_strategy.fitting.memory import memory_of
from lowbit_strategy.methods.registry import as_compressor
from lowbit_strategy.plan.running import plan_of
from lowbit_strategy.second_moment.exchange_steps import EVERY, steps_until_due, turns
from testing.log import listen
from testing.processes.node_size import nodes_of
from testing.processes.scenarios import Facts, all_but, scenarios
from testing.training.comparing import checksum, fingerprint, full
from testing.training.regression import Kind, Regression, loader, strategy, trainer

ONE_BIT = as_compressor("loco1")
EXACT = LoCo(exempt=("*",))
LAYOUTS: dict[str, tuple[Kind, dict[str, Any]]] = {
    "ddp": ("ddp", {}),
    "ddp, far": ("ddp", {"far_links": True}),
    "fsdp": ("fsdp", {}),
    "fsdp, far": ("fsdp", {"far_links": True}),
    "hsdp": ("hsdp", {}),
    "fsdp, every pass": ("fsdp", {"accumulate": "reduce", "passes": 2}),
}


def is_slow(kind: Kind, **_: Any) -> bool:
    """What holds under FSDP2 holds in other layouts: `test_it_is_near_that_of_exact_gradients` has both."""
    return kind != "fsdp"


class Noise(Regression):
    """Other data in every step and on every rank, which nothing can be learned from."""

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        generator = torch.Generator().manual_seed(
            (2 * self.global_step + batch_idx % self.trainer.accumulate_grad_batches) * 100 + self.global_rank
        )
        x, y = torch.randn(4, 16, generator=generator), torch.randn(4, 8, generator=generator)
        return super().training_step((x, y), batch_idx)


class Sent(Callback):
    """Bytes of gradients by step."""

    def __init__(self) -> None:
        self.counts = [0]

    def on_train_batch_end(self, trainer: Any, *_: Any) -> None:
        self.counts.append(trainer.strategy.sync.ranks.peers.sent_nbytes)


def fitted(
    kind: Kind, compressor: LoCo, steps: int, *, lr: float = 1e-5, ckpt: Path | None = None, **options: Any
) -> Any:
    torch.manual_seed(0)
    sent, model = (
        Sent(),
        Noise(nn.Sequential(nn.Linear(16, 200), nn.Tanh(), nn.Linear(200, 64, False), nn.Linear(64, 8)), lr=lr),
    )
    passes = options.pop("passes", 1)
    made = trainer(
        strategy(kind, compressor, **options), max_steps=steps, callbacks=[sent], accumulate_grad_batches=passes
    )
    made.fit(model, loader(800), ckpt_path=ckpt)
    return made, model, sent.counts


def second_moments(made: Any, model: nn.Module) -> dict[str, Tensor]:
    state = made.optimizers[0].state
    return {name: full(state[param]["exp_avg_sq"]) for name, param in model.named_parameters()}


def errors(found: dict[str, Tensor], exact: dict[str, Tensor]) -> tuple[float, float]:
    """Of what is compressed: how much larger it is in all, and what its roots differ by if that is put right."""
    names = ["net.0.weight", "net.2.weight"]
    mine, true = (torch.cat([each[name].flatten().double() for name in names]) for each in (found, exact))
    size = float(mine.sum() / true.sum())
    return size, float(((mine / size).sqrt() - true.sqrt()).norm() / true.sum().sqrt())


def assert_better(fact: Facts) -> None:
    (size, shape), (plain_size, plain_shape) = fact["error"], fact["plain"]
    assert abs(size - 1) < 0.25 < (plain_size - 1) / 2
    assert shape < 0.8 * plain_shape


def moments(folder: Path, layout: str) -> Facts:
    kind, options = LAYOUTS[layout]
    exact = second_moments(*fitted(kind, EXACT, 40, **options)[:2])
    plain = second_moments(*fitted(kind, ONE_BIT, 40, second_moment=False, **options)[:2])
    made, model, _ = fitted(kind, ONE_BIT, 40, second_moment=True, **options)
    found = second_moments(made, model)
    return {
        "error": errors(found, exact),
        "plain": errors(plain, exact),
        "print": (fingerprint(model), checksum(list(found.values()))),
    }


@scenarios(moments, layout=tuple(LAYOUTS), slow=all_but(layout="ddp"))
def test_it_is_near_that_of_exact_gradients(facts: list[Facts]) -> None:
    for each in facts:
        assert_better(each)
        assert each["print"] == facts[0]["print"]


def unchanged(folder: Path, kind: Kind) -> Facts:
    """At a learning rate of zero."""
    found = []
    for second_moment in (False, True):
        made, model, _ = fitted(kind, ONE_BIT, 12, lr=0.0, second_moment=second_moment)
        sync = made.strategy.sync
        kept = [residual for name in sync.specs if (residual := sync.state.residual(name)) is not None]
        found.append((checksum(kept), checksum([full(param.grad) for param in model.parameters()])))
    return {"without": found[0], "with": found[1]}


@scenarios(unchanged, kind=("ddp", "fsdp", "hsdp"), slow=is_slow)
def test_gradients_and_residuals_are_the_same_with_it_as_without(facts: list[Facts]) -> None:
    for each in facts:
        assert each["with"] == each["without"]


def on_two_nodes(folder: Path) -> Facts:
    with nodes_of(2):
        exact = second_moments(*fitted("fsdp", EXACT, 40)[:2])
        plain = second_moments(*fitted("fsdp", ONE_BIT, 40, second_moment=False)[:2])
        made, model, _ = fitted("fsdp", ONE_BIT, 40, second_moment=True)
        assert made.strategy.sync.ranks.intra_node is not None
        with pytest.raises(ValueError, match="is incompatible with two levels"):
            fitted("ddp", ONE_BIT, 2, second_moment=True)
        return {"error": errors(second_moments(made, model), exact), "plain": errors(plain, exact)}


@scenarios(on_two_nodes, world_size=4, slow=lambda **_: True)
def test_with_two_levels(facts: list[Facts]) -> None:
    for each in facts:
        assert_better(each)


def counted(folder: Path, kind: Kind) -> Facts:
    made, _, counts = fitted(kind, ONE_BIT, 100, second_moment=True)
    plan = plan_of(made.strategy.sync)
    last = (counts[-1] - counts[-1 - EVERY]) / EVERY
    return {"sent": last, "planned": plan.sent_nbytes, "kept": memory_of(plan).extra}


@scenarios(counted, kind=("ddp", "fsdp", "hsdp"), slow=lambda kind, **_: kind != "ddp")
def test_the_plan_counts_it(facts: list[Facts]) -> None:
    for each in facts:
        assert each["planned"] <= each["sent"] < 1.02 * each["planned"] + 600  # headers, padding
        assert each["kept"] > 0


def resumed(folder: Path, kind: Kind) -> Facts:
    made, model, _ = fitted(kind, ONE_BIT, 24, lr=1e-3, second_moment=True)
    whole = checksum(list(second_moments(made, model).values())), fingerprint(model)
    path = folder / f"half-{kind}.ckpt"
    made, model, _ = fitted(kind, ONE_BIT, 12, lr=1e-3, second_moment=True)
    made.save_checkpoint(path)
    made, model, _ = fitted(kind, ONE_BIT, 24, lr=1e-3, second_moment=True, ckpt=path)
    return {"whole": whole, "parts": (checksum(list(second_moments(made, model).values())), fingerprint(model))}


@scenarios(resumed, kind=("ddp", "fsdp", "hsdp"), slow=is_slow)
def test_a_run_that_was_saved_goes_on_alike(facts: list[Facts]) -> None:
    for each in facts:
        assert each["parts"] == each["whole"]


def looked_at(folder: Path, kind: Kind, compressor: str) -> Facts:
    """The same steps with and without a gradient of the input before or after each, which makes FSDP2 reduce zeros."""
    found = []
    for when in ("never", "before", "after"):
        torch.manual_seed(0)
        net: Any = nn.Sequential(nn.Linear(16, 200), nn.Tanh(), nn.Linear(200, 64, False), nn.Linear(64, 8))
        if kind == "fsdp":
            fully_shard(net[0])
            model = fully_shard(net)
        else:
            model = DistributedDataParallel(net)
        optimizer = torch.optim.AdamW(net.parameters(), lr=1e-3)
        session = compress(model, optimizer, compressor)
        for step in range(8):
            generator = torch.Generator().manual_seed(2 * step + torch.distributed.get_rank())
            x, y = torch.randn(4, 16, generator=generator), torch.randn(4, 8, generator=generator)
            if when == "before":
                torch.autograd.grad(model(probe := x.clone().requires_grad_()).sum(), probe)
            (model(x) - y).square().mean().backward()
            if when == "after":
                torch.autograd.grad(model(probe := x.clone().requires_grad_()).sum(), probe)
            optimizer.step()
            optimizer.zero_grad()
        moments = [full(optimizer.state[param]["exp_avg_sq"]) for param in net.parameters()]
        found.append((fingerprint(net), checksum(moments)))
        session.close()
    return {"found": found}


@scenarios(looked_at, kind=("ddp", "fsdp"), compressor=("loco", "loco1"), slow=lambda kind, **_: kind != "fsdp")
def test_a_pass_without_gradients_changes_nothing(facts: list[Facts]) -> None:
    for each in facts:
        assert each["found"] == [each["found"][0]] * 3


def refused(folder: Path) -> Facts:
    messages = []
    for optimizer in ("sgd", "amsgrad"):
        model = Noise(optimizer=optimizer)
        with pytest.raises(ValueError, match="needs an optimizer that keeps exp_avg_sq") as caught:
            trainer(strategy("ddp", ONE_BIT, second_moment=True)).fit(model, loader(800))
        messages.append(str(caught.value))
    return {"messages": messages}


@scenarios(refused)
def test_an_optimizer_without_it_is_refused_before_training(facts: list[Facts]) -> None:
    assert all("leave second_moment out" in message for message in facts[0]["messages"])


def needless(folder: Path) -> Facts:
    found = {}
    for name, compressor in {"dense": Dense(), "exempt": EXACT, "loco1": ONE_BIT}.items():
        with listen() as lines:
            _, _, sent = fitted("ddp", compressor, 2, second_moment=True)
        _, _, without = fitted("ddp", compressor, 2, second_moment=False)
        notices = [line for line in lines if "second_moment=True corrects nothing" in line]
        found[name] = (len(notices), sent[-1] > without[-1])
    return found


@scenarios(needless)
def test_with_nothing_compressed_it_warns_and_sends_nothing(facts: list[Facts]) -> None:
    assert facts[0] == {"dense": (1, False), "exempt": (1, False), "loco1": (0, True)}


def test_options_that_do_not_go_together() -> None:
    with pytest.raises(ValueError, match="second_moment=True is incompatible with two_level=True"):
        SyncOptions(second_moment=True, two_level=True)


def by_default(folder: Path, kind: Kind) -> Facts:
    """Without a word of the user's: two bits, four bits, and an optimizer that has no second moment."""
    two_bits, found = as_compressor("loco2"), {}
    for name, options in {"asked": {"second_moment": True}, "default": {}, "off": {"second_moment": False}}.items():
        with listen() as lines:
            made, model, counts = fitted(kind, two_bits, 12, lr=1e-3, **options)
        report = [line for text in lines for line in text.splitlines() if line.startswith("  second moment: ")]
        found[name] = (fingerprint(model), counts[-1], memory_of(plan_of(made.strategy.sync)).extra > 0, report)
    _, _, four = fitted(kind, LoCo(), 12)
    return found | {"four bits": four[-1] == fitted(kind, LoCo(), 12, second_moment=False)[2][-1]}


@scenarios(by_default, kind=("ddp", "fsdp", "hsdp"), slow=all_but(kind="ddp"))
def test_two_bits_have_it_by_default(facts: list[Facts]) -> None:
    for each in facts:
        assert each["default"][:3] == each["asked"][:3]
        assert each["default"][2]
        assert not each["off"][2]
        assert each["off"][0] != each["default"][0]
        assert each["off"][1] < each["default"][1]
        assert each["four bits"]
    assert "ranks exchange squares" in facts[0]["default"][3][0]
    assert "left as it is" in facts[0]["off"][3][0]


class Lion(torch.optim.SGD):
    """Has betas, and no second moment."""

    def __init__(self, params: Any, lr: float) -> None:
        super().__init__(params, lr=lr, momentum=0.9)
        for group in self.param_groups:
            group["betas"] = (0.9, 0.99)


class Chosen(Noise):
    """With the optimizer that `make` makes."""

    def __init__(self, make: Any) -> None:
        super().__init__(nn.Sequential(nn.Linear(16, 200), nn.Tanh(), nn.Linear(200, 64, False), nn.Linear(64, 8)))
        self.make = make

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return self.make(self.parameters())


MAKERS = {
    "sgd": lambda params: torch.optim.SGD(params, lr=1e-3, momentum=0.9),
    "amsgrad": lambda params: torch.optim.AdamW(params, lr=1e-3, amsgrad=True),
    "lion": lambda params: Lion(params, lr=1e-3),
}


def of_another_kind(folder: Path, kind: Kind) -> Facts:
    found: Facts = {}
    for name, make in MAKERS.items():
        runs = []
        for second_moment in (None, False):
            torch.manual_seed(0)
            sent, model = Sent(), Chosen(make)
            with listen() as lines:
                made = trainer(strategy(kind, ONE_BIT, second_moment=second_moment), max_steps=6, callbacks=[sent])
                made.fit(model, loader(800))
            after_first = sent.counts[-1] - sent.counts[1]
            notices = sum("ranks exchange no squares for it from now on" in line for line in lines)
            runs.append((fingerprint(model), after_first, memory_of(plan_of(made.strategy.sync)).extra, notices))
        found[name] = runs
    return found


@scenarios(of_another_kind, kind=("ddp", "fsdp"), slow=all_but(kind="ddp"))
def test_it_ends_with_the_first_step_of_an_optimizer_of_another_kind(facts: list[Facts]) -> None:
    for rank, each in enumerate(facts):
        for default, off in each.values():
            assert default[:3] == off[:3]
            assert default[2:] == (0, int(rank == 0))
            assert off[3] == 0


def local(folder: Path, kind: Kind) -> Facts:
    """How much smaller it is on gradients of noise alone, in local steps and in synchronous ones."""
    found: Facts = {}
    for name, rule in {"local": DiLoCo(every=8), "synchronous": DiLoCo(every=8, synchronous=60)}.items():
        sizes, sent, prints = [], [], []
        for corrects in (False, True):
            made, model, counts = fitted(kind, ONE_BIT, 60, outer=rule, second_moment=corrects)
            sizes.append(sum(float(each.sum()) for each in second_moments(made, model).values()))
            sent.append(counts[-1])
            prints.append(fingerprint(model))
        found[name] = {"ratio": sizes[1] / sizes[0], "sent": sent, "prints": prints}
    return found


@scenarios(local, kind=("ddp", "hsdp"), slow=lambda kind, **_: kind != "ddp")
def test_of_local_steps_it_is_that_of_mean_gradients_and_sends_nothing(facts: list[Facts]) -> None:
    for each in facts:
        assert each["local"]["ratio"] == pytest.approx(1 / len(facts), rel=0.15)
        assert each["synchronous"]["ratio"] == pytest.approx(1, rel=1e-3)
        for found in each.values():
            assert found["sent"][0] == found["sent"][1]
        assert each["local"]["prints"] == facts[0]["local"]["prints"]
        assert each["local"]["prints"][0] != each["local"]["prints"][1]


class Overflowing(Noise):
    """An optimizer that looks for overflows itself, on a loss that overflows once."""

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        loss = super().training_step(batch, batch_idx)
        return loss * float("inf") if self.global_rank == 1 and self.global_step == 2 else loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=self.lr, fused=True)


class Largest(Callback):
    """Of all second moments, after every step."""

    def __init__(self) -> None:
        self.found: list[float] = []

    def on_train_batch_end(self, trainer: Any, *_: Any) -> None:
        state = trainer.optimizers[0].state.values()
        self.found.append(max([float(each["exp_avg_sq"].max()) for each in state if each], default=0.0))


def overflowing(folder: Path, outer: DiLoCo | None) -> Facts:
    torch.manual_seed(0)
    model = Overflowing(nn.Sequential(nn.Linear(16, 64), nn.Linear(64, 8)))
    precision = MixedPrecision("16-mixed", "cpu", scaler=torch.amp.GradScaler("cpu", init_scale=1024.0))
    used = strategy("ddp", ONE_BIT, outer=outer, second_moment=True)
    largest = Largest()
    made = trainer(used, max_steps=12, plugins=[precision], callbacks=[largest])
    made.fit(model, loader(800))
    return {"scale": precision.scaler.get_scale(), "largest": largest.found, "print": fingerprint(model)}


@scenarios(overflowing, outer=(None, DiLoCo(every=4)))
def test_a_step_that_a_fused_optimizer_skips_teaches_nothing(facts: list[Facts]) -> None:
    assert facts[1]["scale"] == 512.0
    for each in facts:
        assert len(each["largest"]) == 12
        assert all(size < 1.0 for size in each["largest"])  # False of what is no number
        assert each["print"] == facts[0]["print"]


def decaying(folder: Path) -> Facts:
    model = Noise(nn.Linear(16, 8))
    model.configure_optimizers = lambda: torch.optim.Adam(model.parameters(), weight_decay=0.1)  # type: ignore[method-assign]
    with pytest.raises(ValueError, match="use AdamW, or leave second_moment out"):
        trainer(strategy("ddp", ONE_BIT, outer=DiLoCo(every=3), second_moment=True)).fit(model, loader(800))
    return {}


@scenarios(decaying)
def test_a_weight_decay_within_the_gradient_is_refused_before_training(facts: list[Facts]) -> None:
    assert facts == [{}, {}]


def test_exchanges_become_rarer() -> None:
    for turn in set(turns(list(map(str, range(10)))).values()):
        steps = [step for step in range(2000) if steps_until_due(step, turn) == 0]
        gaps = [later - earlier for earlier, later in itertools.pairwise(steps)]
        assert steps[:4] == [0, 1, 2, 3]
        assert max(gaps) < 2 * EVERY
        assert set(gaps[-40:]) == {EVERY}
