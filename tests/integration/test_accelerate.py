"""Compression in Accelerate scripts: the plugin attached in code, DDP and FSDP2, two real processes."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
import torch
from accelerate import Accelerator
from accelerate.utils import DDPCommunicationHookType, DistributedDataParallelKwargs
from torch import Tensor, nn

from lowbit_strategy import LoCo, TopK
from lowbit_strategy.accelerate import LowBitPlugin, binding_of
from lowbit_strategy.methods.registry import as_compressor
from testing.counting.traffic import count_exchanges
from testing.log import listen
from testing.processes.scenarios import Facts, all_but, raised, scenarios
from testing.training.accelerated import (
    Job,
    Kind,
    facts_of,
    fresh_state,
    fsdp_plugin,
    loss_of,
    make,
    prepared,
    state_folder,
    train,
)
from testing.training.comparing import fingerprint, full
from testing.training.regression import mlp

KINDS = ("ddp", "fsdp")
PLUGIN = LowBitPlugin(LoCo(bits=4))


# -- training ---------------------------------------------------------------------------------------------------------


def compressed_and_not(folder: Path, kind: Kind) -> Facts:
    jobs = {}
    for name, plugin in (("compressed", PLUGIN), ("uncompressed", None)):
        jobs[name] = prepared(make(kind, plugin), lr=2e-3)
        train(jobs[name], 10)
    return {name: facts_of(job) for name, job in jobs.items()} | {"type": type(jobs["compressed"].model).__name__}


@scenarios(compressed_and_not, kind=KINDS, slow=all_but(kind="fsdp"))
def test_training_ends_at_the_same_loss(facts: list[Facts]) -> None:
    for rank in facts:
        compressed, uncompressed = rank["compressed"], rank["uncompressed"]
        assert compressed["loss"] == pytest.approx(uncompressed["loss"], rel=0.005)
        assert compressed["loss"] < compressed["losses"][0] - 0.5  # it has learned something
        assert compressed["bits"] != uncompressed["bits"]
        assert compressed["steps"] == 10
        assert compressed["sent"] == pytest.approx(10 * compressed["account"], rel=0.01)  # headers
        if rank["type"] == "DistributedDataParallel":
            assert "DDPHook.reduce" in compressed["record"]
            assert not uncompressed["record"]
        else:
            assert rank["type"] == "FSDPGPT"
            assert compressed["record"] == "CompressedReduceScatter"
    assert facts[0]["compressed"]["bits"] == facts[1]["compressed"]["bits"]


def one_bit(folder: Path, kind: Kind) -> Facts:
    energies = {}
    compressor = as_compressor("loco1")
    for name, plugin in (
        ("uncompressed", None),
        ("without", LowBitPlugin(compressor, second_moment=False)),
        ("with", LowBitPlugin(compressor, second_moment=True)),
    ):
        job = prepared(make(kind, plugin), lr=1e-5)
        train(job, 12)
        state = job.optimizer.optimizer.state
        matrices = [param for param in job.model.parameters() if param.ndim == 2]
        energies[name] = sum(full(state[param]["exp_avg_sq"]).sum().item() for param in matrices)
    return energies


@scenarios(one_bit, kind=KINDS, slow=all_but(kind="ddp"))
def test_the_second_moment_is_as_large_as_without_compression(facts: list[Facts]) -> None:
    for each in facts:
        off = {name: abs(each[name] / each["uncompressed"] - 1) for name in ("with", "without")}
        assert off["with"] < 0.2
        assert off["with"] < off["without"] / 2


def attached_in_two_lines(folder: Path) -> Facts:
    fresh_state()
    accelerator = Accelerator()
    binding = PLUGIN.attach(accelerator)
    job = prepared(accelerator)
    train(job, 4)
    again = prepared(make("ddp", PLUGIN))
    train(again, 4)
    return {"same": facts_of(job) == facts_of(again), "binding": binding_of(accelerator) is binding}


@scenarios(attached_in_two_lines)
def test_the_plugin_and_the_accelerator_that_takes_it_are_the_same(facts: list[Facts]) -> None:
    assert facts == [{"same": True, "binding": True}] * 2


def accumulation(folder: Path, kind: Kind) -> Facts:
    job = prepared(make(kind, PLUGIN, accumulate=4))
    with count_exchanges() as sizes:
        train(job, 8)
    return facts_of(job) | {"exchanges": len(sizes)}


@scenarios(accumulation, kind=KINDS)
def test_accumulated_gradients_are_compressed_once_a_step(facts: list[Facts]) -> None:
    for rank in facts:
        assert rank["steps"] == 2
        assert rank["sent"] == pytest.approx(2 * rank["account"], rel=0.01)  # headers
    assert facts[0]["bits"] == facts[1]["bits"]


def clipping_and_bf16(folder: Path, kind: Kind) -> Facts:
    job = prepared(make(kind, PLUGIN, mixed_precision="bf16"))
    train(job, 6, clip=0.5)
    plain = prepared(make(kind, None, mixed_precision="bf16"))
    train(plain, 6, clip=0.5)
    return facts_of(job) | {"plain": facts_of(plain)["loss"]}


@scenarios(clipping_and_bf16, kind=KINDS, slow=all_but(kind="ddp"))
def test_clipping_and_mixed_precision(facts: list[Facts]) -> None:
    for rank in facts:
        assert rank["loss"] == pytest.approx(rank["plain"], rel=0.005)
        assert rank["steps"] == 6
    assert facts[0]["bits"] == facts[1]["bits"]


def sparse_clipping(folder: Path, kind: Kind) -> Facts:
    with listen() as logged:
        train(prepared(make(kind, LowBitPlugin(TopK(density=0.1)))), 2, clip=0.5)
    return {"warned": [line for line in logged if "clips the sparse mean gradient" in line]}


@scenarios(sparse_clipping, kind=KINDS)
def test_clipping_what_a_sparse_method_has_sent_is_warned_of_once(facts: list[Facts]) -> None:
    assert [line.partition(" ")[0] for line in facts[0]["warned"]] == ["max_norm=0.5"]
    assert facts[1]["warned"] == []


def overflow(folder: Path, kind: Kind) -> Facts:
    """A loss scaler, which Accelerate makes on GPUs only: put in by hand. Rank 1 overflows in the second step."""
    accelerator = make(kind, PLUGIN)
    accelerator.scaler = torch.amp.GradScaler("cpu", init_scale=1024.0, growth_interval=1000)
    job = prepared(accelerator)
    train(job, 1)
    before = [tensor.clone() for tensor in job.sync.state.all_tensors()]
    bits = fingerprint(job.model)
    batch = next(iter(job.batches))
    factor = float("inf") if accelerator.process_index == 1 else 1.0
    accelerator.backward(loss_of(job.model, batch) * factor)
    everywhere = all(not bool(torch.isfinite(param.grad).all()) for param in list(job.model.parameters())[-1:])
    job.optimizer.step()
    job.optimizer.zero_grad()
    after = job.sync.state.all_tensors()
    skipped = {
        "skipped": job.sync.num_skipped,
        "optimizer skipped": job.optimizer.step_was_skipped,
        "scale": accelerator.scaler.get_scale(),
        "residuals kept": all(torch.equal(a, b) for a, b in zip(before, after, strict=True)),
        "model kept": fingerprint(job.model) == bits,
        "everywhere": everywhere,
    }
    train(job, 4, skip=2)
    return facts_of(job) | skipped | {"scale in use": job.sync.loss_scale}


@scenarios(overflow, kind=KINDS)
def test_a_step_that_overflows_is_taken_back(facts: list[Facts]) -> None:
    for rank in facts:
        assert rank["optimizer skipped"]
        assert rank["skipped"] == 1
        assert rank["residuals kept"]
        assert rank["model kept"]
        assert rank["scale"] == rank["scale in use"] == 512.0
        assert rank["steps"] == 3
    assert facts[0]["bits"] == facts[1]["bits"]


# -- more of Accelerate -----------------------------------------------------------------------------------------------


def two_models(folder: Path) -> Facts:
    accelerator = make("ddp", PLUGIN)
    torch.manual_seed(0)
    models = [mlp(), mlp()]
    optimizers = [torch.optim.SGD(model.parameters(), lr=0.1) for model in models]
    first, second, optimizer, other = accelerator.prepare(*models, *optimizers)
    torch.manual_seed(accelerator.process_index)
    for step in range(6):
        x = torch.randn(4, 16)
        accelerator.backward(first(x).square().mean())
        optimizer.step()
        optimizer.zero_grad()
        if step % 3 == 0:
            accelerator.backward(second(x).square().mean())
            other.step()
            other.zero_grad()
    binding = binding_of(accelerator)
    assert binding is not None
    accelerator.save_state(state_folder(folder))
    train_on = [session.sync.step_index for session in binding.sessions]
    accelerator.load_state(state_folder(folder))
    return {
        "steps": train_on,
        "bits": [fingerprint(first), fingerprint(second)],
        "folders": sorted(path.name for path in (folder / "state").glob("*.lowbit")),
    }


@scenarios(two_models)
def test_two_models_with_an_optimizer_each(facts: list[Facts]) -> None:
    assert facts[0]["steps"] == [6, 2]
    assert facts[0]["folders"] == ["residuals.lowbit", "residuals_1.lowbit"]
    assert facts[0] == facts[1]


def prepared_again(folder: Path, outer: str | None) -> Facts:
    """A layer is trained later: the model is prepared again, and what it had learned of residuals goes on."""
    accelerator = make("ddp", LowBitPlugin(LoCo(block_size=32), outer=outer))
    torch.manual_seed(0)
    net = mlp()
    torch.manual_seed(accelerator.process_index)

    def train(model: Any, optimizer: Any) -> int:
        for seed in range(4):
            x = torch.randn(4, 16, generator=torch.Generator().manual_seed(2 * seed + accelerator.process_index))
            accelerator.backward(model(x).square().mean())
            optimizer.step()
            optimizer.zero_grad()
        return fingerprint(net)

    for layer_is_trained in (False, True):
        net[0].requires_grad_(layer_is_trained)
        pair = accelerator.prepare(net, torch.optim.SGD(net.parameters(), lr=0.1))
        train(*pair)
    binding = binding_of(accelerator)
    assert binding is not None
    accelerator.save_state(state_folder(folder))
    straight = train(*pair)
    accelerator.load_state(state_folder(folder))
    resumed = train(*pair)
    accelerator.end_training()
    return {
        "straight": straight,
        "resumed": resumed,
        "steps": [session.sync.step_index for session in binding.sessions],
        "trained": "0.weight" in binding.sessions[0].sync.specs,
        "end": fingerprint(net),
    }


@scenarios(prepared_again, outer=(None, "diloco"), slow=all_but(outer=None))
def test_a_model_with_unfrozen_parameters_is_prepared_again(facts: list[Facts]) -> None:
    assert facts[0]["end"] == facts[1]["end"]
    for rank in facts:
        assert rank["straight"] == rank["resumed"]
        assert rank["steps"] == [12]
        assert rank["trained"]


def two_optimizers_of_one_model(folder: Path) -> Facts:
    accelerator = make("ddp", PLUGIN)
    torch.manual_seed(0)
    model = mlp()
    head = torch.optim.SGD(model[-1].parameters(), lr=0.1)
    body = torch.optim.SGD(model[:-1].parameters(), lr=0.1)
    model, head, body = accelerator.prepare(model, head, body)
    for _ in range(3):
        accelerator.backward(model(torch.randn(4, 16)).square().mean())
        head.step()
        body.step()
        head.zero_grad()
        body.zero_grad()
    binding = binding_of(accelerator)
    assert binding is not None
    assert binding.sync is not None
    return {"steps": binding.sync.step_index, "bits": fingerprint(model)}


@scenarios(two_optimizers_of_one_model)
def test_one_backward_and_two_optimizers_are_one_step(facts: list[Facts]) -> None:
    assert facts[0]["steps"] == 3
    assert facts[0] == facts[1]


class SometimesIdle(nn.Module):
    """One of its layers is not always used."""

    def __init__(self) -> None:
        super().__init__()
        self.used, self.idle = nn.Linear(16, 128), nn.Linear(16, 128)

    def forward(self, x: Tensor, idle: bool) -> Tensor:
        used: Tensor = self.used(x)
        return used if idle else used + self.idle(x)


def unused_parameters(folder: Path) -> Facts:
    handler = DistributedDataParallelKwargs(find_unused_parameters=True, bucket_cap_mb=1)
    accelerator = make("ddp", PLUGIN, kwargs_handlers=[handler])
    torch.manual_seed(0)
    module = SometimesIdle()
    model, optimizer = accelerator.prepare(module, torch.optim.SGD(module.parameters(), lr=0.1))
    torch.manual_seed(accelerator.process_index)
    for step in range(4):
        accelerator.backward(model(torch.randn(4, 16), step % 2 == 0).square().mean())
        optimizer.step()
        optimizer.zero_grad()
    return {"bits": fingerprint(model), "find": model.find_unused_parameters, "cap": model.bucket_bytes_cap}


@scenarios(unused_parameters)
def test_the_user_s_own_ddp_options_stay(facts: list[Facts]) -> None:
    assert facts[0] == facts[1]
    assert facts[0]["find"]
    assert facts[0]["cap"] == 1024 * 1024


def freed(folder: Path, kind: Kind) -> Facts:
    accelerator = make(kind, PLUGIN)
    job = prepared(accelerator)
    train(job, 2)
    accelerator.free_memory()
    binding = binding_of(accelerator)
    assert binding is not None
    released = len(binding.sessions)
    again = prepared(accelerator)
    train(again, 2)
    return facts_of(again) | {"released": released, "attached": len(binding.sessions)}


@scenarios(freed, kind=KINDS)
def test_memory_can_be_freed_and_another_model_prepared(facts: list[Facts]) -> None:
    for rank in facts:
        assert (rank["released"], rank["attached"], rank["steps"]) == (0, 1, 2)
        assert rank["sent"] == pytest.approx(2 * rank["account"], rel=0.01)  # headers


def unfrozen(folder: Path, kind: Kind) -> Facts:
    accelerator = make(kind, PLUGIN, **({"fsdp_plugin": fsdp_plugin(by_block=False)} if kind == "fsdp" else {}))
    torch.manual_seed(0)
    model = mlp()
    model[0].weight.requires_grad_(False)
    model, optimizer = accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
    inner = accelerator.unwrap_model(model)
    job = Job(accelerator, model, optimizer, None, [])

    def step() -> None:
        accelerator.backward(model(torch.randn(4, 16)).square().mean())
        optimizer.step()
        optimizer.zero_grad()

    torch.manual_seed(accelerator.process_index)
    step()
    inner[0].weight.requires_grad_(True)
    error = raised(step)
    covered = "0.weight" in job.sync.specs
    return {"error": error, "covered": covered, "bits": fingerprint(model) if not error else 0}


@scenarios(unfrozen, kind=KINDS)
def test_parameters_that_are_unfrozen(facts: list[Facts]) -> None:
    if facts[0]["covered"]:  # FSDP2 synchronizes them
        assert facts[0] == facts[1]
        assert not facts[0]["error"]
    else:  # DDP does not see them
        for rank in facts:
            assert "0.weight was frozen" in rank["error"]
            assert "accelerator.prepare(module)" in rank["error"]


def compiled(folder: Path) -> Facts:
    from accelerate.utils import TorchDynamoPlugin

    job = prepared(make("ddp", PLUGIN, dynamo_plugin=TorchDynamoPlugin(backend="eager")))
    train(job, 3)
    return {"steps": job.sync.step_index, "sent": job.sync.ranks.peers.sent_nbytes, "bits": fingerprint(job.model)}


@pytest.mark.slow
@scenarios(compiled)
def test_a_compiled_model(facts: list[Facts]) -> None:
    assert facts[0] == facts[1]
    assert facts[0]["steps"] == 3


# -- bad input --------------------------------------------------------------------------------------------------------


def refused(folder: Path) -> Facts:
    errors: dict[str, str] = {}

    def attach(**options: Any) -> Accelerator:
        fresh_state()
        accelerator = Accelerator(**options)
        PLUGIN.attach(accelerator)
        return accelerator

    late = make("ddp", None)
    prepared(late)
    errors["late"] = raised(lambda: PLUGIN.attach(late))
    errors["twice"] = raised(lambda: PLUGIN.attach(attach()))
    errors["not an accelerator"] = raised(lambda: PLUGIN.attach(mlp()))
    errors["fsdp in code"] = raised(lambda: attach(fsdp_plugin=fsdp_plugin()))
    hook = DistributedDataParallelKwargs(comm_hook=DDPCommunicationHookType.FP16)
    errors["hook"] = raised(lambda: prepared(attach(kwargs_handlers=[hook])))
    fresh_state()
    del os.environ["ACCELERATE_USE_CPU"]
    errors["independent"] = raised(lambda: PLUGIN.attach(Accelerator()))
    different = make("ddp", LowBitPlugin(LoCo(bits=4 if int(os.environ["RANK"]) == 0 else 3)))
    errors["different"] = raised(lambda: prepared(different))
    return errors


@scenarios(refused)
def test_bad_input(facts: list[Facts]) -> None:
    for rank in facts:
        assert "has already prepared a model or an optimizer" in rank["late"]
        assert "already has a LowBitPlugin" in rank["twice"]
        assert "needs an accelerate.Accelerator, got Sequential" in rank["not an accelerator"]
        assert "attach(accelerator, fsdp_plugin=plugin)" in rank["fsdp in code"]
        assert "leave comm_hook out" in rank["hook"]
        assert "ACCELERATE_USE_CPU=true" in rank["independent"]
        assert "rank 1 differs from rank 0 in compressor" in rank["different"]
