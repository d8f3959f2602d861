"""Coded weights under FSDP2 on real processes: what is sent when, what training and evaluation see, what is saved."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from lightning.pytorch.callbacks import ModelCheckpoint
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from lowbit_strategy import Exact, LoCo, WeightCode, WeightDelta
from lowbit_strategy.custom_loop import Session, SyncOptions, attach_fsdp, prepare
from lowbit_strategy.methods.weight_codings import WeightCoding
from testing.log import listen
from testing.processes.scenarios import Facts, all_but, raised, scenarios
from testing.training.comparing import fingerprint, full_parameters
from testing.training.ddp_loop import CPU, Loop
from testing.training.regression import ByStep, Regression, fit, loader, mlp, strategy, trainer

WIDTH = 48


class Tokens(nn.Module):
    """A tied head, a frozen layer, a block that is recomputed in backward."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(40, WIDTH)
        self.frozen = nn.Linear(WIDTH, WIDTH)
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.LayerNorm(WIDTH)) for _ in range(3))
        self.head = nn.Linear(WIDTH, 40, bias=False)
        self.head.weight = self.table.weight
        self.frozen.requires_grad_(False)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.frozen(self.table(tokens))
        for block in self.blocks[:2]:
            x = x + block(x)
        x = checkpoint(self.blocks[2], x, use_reentrant=False)
        logits: Tensor = self.head(x)
        return logits


class Run:
    """`Tokens`, sharded and attached, in a training loop of its own."""

    def __init__(
        self,
        weights: Any,
        *,
        reshard: bool | int | None = None,
        dtype: torch.dtype | None = None,
        model: nn.Module | None = None,
    ) -> None:
        torch.manual_seed(0)
        self.model = model or Tokens()
        prepared = prepare(self.model, LoCo(block_size=32), SyncOptions(weights=weights), scatter=True)
        mesh = init_device_mesh("cpu", (dist.get_world_size(),))
        policy = MixedPrecisionPolicy(param_dtype=dtype, reduce_dtype=torch.float32 if dtype else None)
        for block in self.model.blocks:
            fully_shard(block, mesh=mesh, reshard_after_forward=reshard, mp_policy=policy)
        fully_shard(self.model, mesh=mesh, mp_policy=policy)
        self.session: Session = attach_fsdp(self.model, prepared, device=CPU)
        self.optimizer = torch.optim.AdamW([p for p in self.model.parameters() if p.requires_grad], 1e-2)
        self.generator = torch.Generator().manual_seed(dist.get_rank())
        self.losses: list[float] = []

    @property
    def sent(self) -> list[int]:
        assert self.session.sync.weights is not None
        return [module.num_sent for module in self.session.sync.weights.modules.values()]

    def loss(self) -> Tensor:
        tokens = torch.randint(40, (4, 9), generator=self.generator)
        return F.cross_entropy(self.model(tokens[:, :-1]).flatten(0, 1).float(), tokens[:, 1:].flatten())

    def backward(self) -> None:
        loss = self.loss()
        self.losses.append(loss.item())
        self.session.begin_step()
        loss.backward()

    def step(self) -> None:
        self.optimizer.step()
        self.optimizer.zero_grad()
        self.session.end_step()


# -- what is sent when ------------------------------------------------------------------------------------------------


def once_per_step(folder: Path, coding: WeightCoding, reshard: bool | None) -> Facts:
    run = Run(coding, reshard=reshard)
    for _ in range(3):
        run.loss()  # another forward pass
        for last in (False, True):  # micro-batches
            run.model.set_requires_gradient_sync(last)  # type: ignore[operator]
            run.backward()
        run.step()
    return {"sent": run.sent, "losses": run.losses, "step": run.session.sync.weights.step_nbytes}


@scenarios(once_per_step, coding=(WeightCode(), WeightDelta(), Exact(keep="replica")), reshard=(True, False))
def test_weights_travel_once_per_step(facts: list[Facts]) -> None:
    for rank in facts:
        assert rank["sent"] == [3, 3, 3, 3]
        assert rank["step"] > 0


def left_in_step(folder: Path, coding: WeightCoding) -> Facts:
    """FSDP2 leaves weights gathered until the last micro-batch of a step, or does not; with a look at other weights."""
    sent, losses = [], []
    for stays, looks in ((True, False), (False, False), (True, True)):
        run = Run(coding, reshard=False)
        for _ in range(2):
            for last in (False, False, True):
                run.model.set_requires_gradient_sync(last)  # type: ignore[operator]
                run.model.set_reshard_after_backward(last or not stays)  # type: ignore[operator]
                run.backward()
                if looks:
                    look_elsewhere(run)
            run.step()
        sent.append(run.session.sync.weights.step_nbytes)
        losses.append(run.losses)
    return {"times": sent[1] / sent[0], "same": losses[0] == losses[1] == losses[2]}


def look_elsewhere(run: Run) -> None:
    """An evaluation, and a pass with other weights that nothing announces."""
    tokens, block = torch.zeros(1, 4, dtype=torch.long), run.model.blocks[0]
    run.model.eval()
    with torch.no_grad():
        run.model(tokens)
        block.reshard()
        block[0].weight.mul_(2.0)
        run.model.train()
        run.model(tokens)
        block.reshard()
        block[0].weight.mul_(0.5)


@scenarios(left_in_step, coding=(Exact(), WeightCode(keep="nothing")))
def test_weights_that_fsdp_leaves_gathered_in_a_step_are_not_sent_again(facts: list[Facts]) -> None:
    for rank in facts:
        assert rank["times"] == 3.0
        assert rank["same"]


def reduced_each_time(folder: Path, tells: bool) -> Facts:
    """Micro-batches whose gradients are reduced each time."""
    run = Run(WeightCode())
    for _ in range(2):
        for _ in range(2):
            if tells:
                run.session.sync.weights.unchanged()
            run.backward()
        run.step()
    return {"sent": run.sent, "tells": tells}


@scenarios(reduced_each_time, tells=(True, False))
def test_reduced_gradients_mean_other_weights_unless_asked_otherwise(facts: list[Facts]) -> None:
    for rank in facts:
        assert rank["sent"] == ([2, 2, 2, 2] if rank["tells"] else [4, 4, 4, 4])


def second_optimizer(folder: Path) -> Facts:
    """An optimizer that steps between two backward passes of a step, as in manual optimization."""
    run = Run(WeightCode())
    run.backward()
    other = torch.optim.SGD(run.model.blocks[1].parameters(), 0.1)
    other.step()
    run.session.end_step()
    run.backward()
    run.step()
    run.backward()
    return {"sent": run.sent}


@scenarios(second_optimizer)
def test_an_optimizer_s_step_makes_weights_travel_anew(facts: list[Facts]) -> None:
    for rank in facts:
        assert rank["sent"] == [3, 3, 3, 3]  # the model, three blocks


def changed_by_hand(folder: Path, how: str) -> Facts:
    """A forward pass in training, other weights, the next forward pass: nothing tells the other ranks."""
    run = Run(WeightCode())
    with torch.no_grad():
        run.loss()
        double_(run.model.blocks[0][0].weight, how)
    error = raised(run.backward)
    return {"error": error}


def double_(param: Any, how: str) -> None:
    """Ways of changing a sharded parameter that leave its version counters alone, and one that does not."""
    if how == "data":
        param.data.mul_(2.0)
    elif how == "local":
        param.to_local().data.mul_(2.0)
    elif how == "numpy":
        param.to_local().numpy()[:] *= 2.0
    else:
        param.mul_(2.0)


@scenarios(changed_by_hand, how=("data", "local", "numpy", "plain"))
def test_a_change_before_backward_is_no_silent_use_of_old_weights(facts: list[Facts]) -> None:
    for rank in facts:
        assert "parameters of blocks.0 were changed after its weights had been sent" in rank["error"]


def announced_change(folder: Path) -> Facts:
    run = Run(WeightCode())
    with torch.no_grad():
        run.loss()
        run.model.blocks[0][0].weight.mul_(2.0)
    run.session.weights_changed()
    run.backward()
    return {"sent": run.sent}


class ByHand(ByStep):
    """Manual optimization without an optimizer: weights are changed through ``.data``."""

    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False

    def training_step(self, batch: Any, index: int) -> None:
        loss = super().training_step(batch, index)
        self.manual_backward(loss)

    def on_train_batch_end(self, *_: Any) -> None:
        for param in self.parameters():
            param.data.sub_(0.5 * param.grad)
            param.grad = None


def trained_by_hand(folder: Path, weights: str) -> Facts:
    model = ByHand()
    fit("fsdp", model, options={"weights": weights}, max_epochs=2)
    return {"losses": model.losses, "weights": weights}


@scenarios(trained_by_hand, weights=("exact", "code8", "delta4"), slow=all_but(weights="code8"))
def test_updates_through_data_reach_the_model(facts: list[Facts]) -> None:
    for rank in facts:
        assert rank["losses"][-1] < 0.7 * rank["losses"][0]


def with_evaluation(folder: Path, weights: str, how: str) -> Facts:
    """The root group stays gathered after an evaluation, with exact weights; one in training mode gathers again."""
    losses = []
    for evaluates in (False, True):
        run = Run(weights)
        for step in range(4):
            if evaluates and step in (1, 3) and how == "before backward":
                evaluate(run, training=False)
            run.backward()
            if evaluates and step in (1, 3) and how != "before backward":
                evaluate(run, training=how == "in training mode before the step")
            run.step()
        losses.append(run.losses)
    return {"without": losses[0], "with": losses[1]}


@torch.no_grad()
def evaluate(run: Run, *, training: bool) -> None:
    run.model.train(training)
    run.model(torch.zeros(1, 4, dtype=torch.long))
    run.model.train()


@scenarios(
    with_evaluation,
    weights=("exact", "code8", "delta4"),
    how=("before backward", "before the step", "in training mode before the step"),
)
def test_training_is_the_same_with_and_without_evaluation(facts: list[Facts]) -> None:
    for rank in facts:
        assert rank["with"] == rank["without"]


@scenarios(announced_change)
def test_an_announced_change_is_sent(facts: list[Facts]) -> None:
    for rank in facts:
        assert rank["sent"] == [2, 2, 2, 2]


def smaller_groups(folder: Path) -> Facts:
    """``reshard_after_forward`` of one rank: nothing is gathered in backward, from nobody."""
    run, plain = Run(WeightCode(), reshard=1), Run(WeightCode())
    for each in (run, plain):
        for _ in range(2):
            each.backward()
            each.step()
    return {"same": run.losses == plain.losses, "sent": run.sent}


@scenarios(smaller_groups)
def test_resharding_to_smaller_groups(facts: list[Facts]) -> None:
    for rank in facts:
        assert rank["same"]
        assert rank["sent"] == [2, 2, 2, 2]


# -- what training and evaluation see ---------------------------------------------------------------------------------


def sees(folder: Path, coding: WeightCoding, dtype: torch.dtype | None) -> Facts:
    """The weights inside of forward, in training and in evaluation, against the owners' own."""
    run = Run(coding, dtype=dtype)
    seen: list[Tensor] = []
    run.model.blocks[0][0].register_forward_hook(lambda module, *_: seen.append(module.weight.detach().clone()))
    gaps = {}
    for _ in range(3):
        run.backward()
        run.step()
    exact = full_parameters(run.model)["blocks.0.0.weight"].to(dtype or torch.float32)
    for when in ("trained", "evaluated", "trained again"):
        run.model.train(when != "evaluated")
        with torch.no_grad():
            run.loss()
        gaps[when] = float((seen[-1].float() - exact.float()).abs().max())
    others = [torch.empty_like(seen[-1]) for _ in range(dist.get_world_size())]
    dist.all_gather(others, seen[-1])
    agree = all(torch.equal(other, others[0]) for other in others)
    return {**gaps, "agree": agree, "dtype": seen[-1].dtype}


@scenarios(sees, coding=(WeightCode(), WeightDelta()), dtype=(None, torch.bfloat16))
def test_training_sees_decoded_weights_and_evaluation_exact_ones(facts: list[Facts]) -> None:
    for rank in facts:
        assert 0 < rank["trained"] == rank["trained again"] < 0.02
        assert rank["evaluated"] == 0
        assert rank["agree"]


def validated(folder: Path, weights: str) -> Facts:
    """The trainer's own validation in mid-fit, and what is tested afterwards."""
    model = Regression()
    made = fit("fsdp", model, options={"weights": weights}, max_steps=4)
    sync = made.strategy.sync  # type: ignore[attr-defined]
    reference = mlp()
    reference.load_state_dict({name.removeprefix("net."): value for name, value in full_parameters(model).items()})
    tested = made.test(model, loader(), verbose=False)[0]["test_loss"]
    with torch.no_grad():
        losses = [F.mse_loss(reference(x), y).item() for x, y in loader()]
    return {
        "tested": tested,
        "expected": sum(losses) / len(losses),
        "sent": sync.weights.step_nbytes,
        "losses": model.losses,
    }


@scenarios(validated, weights=("exact", "code8", "delta4"), slow=all_but(weights="delta4"))
def test_the_trainer_tests_exact_weights(facts: list[Facts]) -> None:
    for rank in facts:
        assert abs(rank["tested"] / rank["expected"] - 1) < 1e-5


# -- what is saved ----------------------------------------------------------------------------------------------------


def resumed(folder: Path, weights: str) -> Facts:
    whole, again = ByStep(), ByStep()
    saving = {"enable_checkpointing": True, "callbacks": [ModelCheckpoint(folder, "{step}", every_n_train_steps=3)]}
    fit("fsdp", whole, options={"weights": weights}, max_steps=7, **saving)
    saving["callbacks"] = [ModelCheckpoint(folder, "again-{step}", every_n_train_steps=100)]
    made = trainer(strategy("fsdp", weights=weights), max_steps=7)
    made.fit(again, loader(), ckpt_path=folder / "step=6.ckpt")
    return {"whole": whole.losses, "resumed": again.losses, "same": fingerprint(whole) == fingerprint(again)}


@scenarios(resumed, weights=("code8", "delta4"))
def test_resume_is_as_if_never_stopped(facts: list[Facts]) -> None:
    for rank in facts:
        assert rank["resumed"] == rank["whole"][6:]
        assert rank["same"]


# -- what is refused and reported -------------------------------------------------------------------------------------


def refused(folder: Path) -> Facts:
    different = WeightCode(bits=8 if dist.get_rank() else 6)
    return {
        "ddp": raised(lambda: strategy("ddp", weights="code8")),
        "loop": raised(lambda: prepare(mlp(), LoCo(), SyncOptions(weights="delta4"), scatter=False)),  # type: ignore[arg-type]
        "differ": raised(lambda: Run(different)),
        "plain": raised(lambda: Loop(mlp())),
    }


@scenarios(refused)
def test_what_cannot_be_is_refused_on_every_rank(facts: list[Facts]) -> None:
    for rank in facts:
        assert "ValueError: weights=WeightCode(...) is for FSDP2" in rank["ddp"]
        assert "ValueError: weights=WeightDelta(...) is for FSDP2" in rank["loop"]
        assert "RuntimeError: rank 1 differs from rank 0 in weights.bits: 8 instead of 6" in rank["differ"]
        assert rank["plain"] == ""


def reported(folder: Path, half_frozen: bool) -> Facts:
    model = Tokens()
    if half_frozen:
        model.frozen.bfloat16()
    with listen() as lines:
        Run(None, model=model)
    return {"lines": [line.strip() for line in lines], "half_frozen": half_frozen}


@scenarios(reported, half_frozen=(True, False))
def test_the_report_shows_what_every_choice_costs(facts: list[Facts]) -> None:
    lines = facts[0]["lines"]
    assert any(line.startswith("weights: 8-bit codes, kept as codes") for line in lines)
    assert sum(line.startswith("weights take ") for line in lines) == 1
    assert sum(line.startswith("instead: ") for line in lines) == 5
    assert (
        any(line.startswith("not coded: the model (parameters of several types") for line in lines)
        == facts[0]["half_frozen"]
    )
    assert facts[1]["lines"] == []
