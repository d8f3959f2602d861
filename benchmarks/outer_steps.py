"""What local steps cost in loss: two small models on Python source, 4 simulated ranks, against synchronous AdamW.

The ranks' weights are rows of stacked tensors, so that one pass computes all ranks and one AdamW steps them all, each
row by itself. Rounds are the product's own: `OuterSync`, its rules and compressors, over communicators that copy and
count. All variants see the same initial weights and the same batches. The learning rate of each, that of synchronous
training included, is tuned on seeds that are used for nothing else.

    python -m benchmarks.outer_steps tune --json tuning.json
    python -m benchmarks.outer_steps final --json outer_steps.json --tuned tuning.json
    python -m benchmarks.outer_steps frontier --json frontier.json     # loss over length of rounds, bits, learning rate
"""

from __future__ import annotations

import itertools
import json
import time
from concurrent.futures import wait
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Annotated, Any

import torch
import typer
from torch.nn import functional as F
from torch.optim import Optimizer

from benchmarks.runs import Runs, warmup_then_cosine
from benchmarks.stacked_models import MODELS, Params, initial
from lowbit_strategy.collectives.layout import Role, TensorSpec
from lowbit_strategy.engine.bucket import BucketLayout
from lowbit_strategy.engine.engine import GradientSync
from lowbit_strategy.local_steps.outer_sync import OuterSync
from lowbit_strategy.local_steps.published import as_outer
from lowbit_strategy.methods.registry import as_compressor
from lowbit_strategy.ranks.ranks import Ranks
from lowbit_strategy.second_moment.mean_moment import MeanMoment
from recipes.text import standard_library
from testing.worlds.threaded import ThreadedWorld


@dataclass(frozen=True, kw_only=True, slots=True)
class Setting:
    """What all runs of one file share."""

    workers: int = 4
    batch: int = 32
    context: int = 32
    steps: int = 3000
    warmup_steps: int = 100
    validation_windows: int = 1024


@dataclass(frozen=True, kw_only=True, slots=True)
class Variant:
    """An outer rule with its compressor, as configuration files write them; None: synchronous AdamW."""

    outer: Any = None
    compressor: Any = None
    beta2: float = 0.95
    second_moment: bool = False


@dataclass(frozen=True, kw_only=True, slots=True)
class Run:
    """A trained model; `configuration` is that of the variant, `bits` per parameter and step on a rank's interface."""

    variant: str
    model: str
    rate: float
    seed: int
    configuration: dict[str, Any]
    validation_loss: float
    train_loss: float
    bits: float
    seconds: float


FOUR_BITS = {"compressor": "loco", "beta": 0.0, "reset_steps": None}
TWO_BITS = FOUR_BITS | {"bits": 2, "codebook": "fitted", "block_size": 64, "high_precision_bits": 4}
VARIANTS = {
    "dense": Variant(),
    "diloco": Variant(outer={"name": "diloco", "every": 30}, compressor=FOUR_BITS),
    "streamingdiloco": Variant(outer={"name": "streamingdiloco", "every": 30}),
    "sparseloco": Variant(outer={"name": "sparseloco", "every": 30}),
}
RATES = (2e-3, 4e-3, 8e-3, 16e-3)
BITS = {
    32: "dense",
    4: FOUR_BITS,
    2: TWO_BITS,
    1: TWO_BITS | {"bits": 1, "high_precision_bits": 2},
}
LENGTHS = (1, 3, 10, 30, 100)


class Synchronous:
    """Every step all ranks get the exact mean of their gradients."""

    bits = 64.0  # two hops of float32

    def __init__(self, params: Params) -> None:
        self.params = params

    def before_step(self) -> None:
        for param in self.params.values():
            assert param.grad is not None
            param.grad.copy_(param.grad.mean(0, keepdim=True).expand_as(param))

    def after_step(self, learning_rate: float) -> None:
        return None

    def finish(self) -> None:
        return None


class Local:
    """Every rank its own `OuterSync`."""

    def __init__(self, variant: Variant, params: Params, optimizer: Optimizer, seed: int) -> None:
        rule = self.rule = as_outer(variant.outer)
        compressor = rule.compressor() if variant.compressor is None else as_compressor(variant.compressor)
        workers = next(iter(params.values())).shape[0]
        specs = [TensorSpec(name, tuple(param.shape[1:]), _role(name)) for name, param in params.items()]
        self.world = ThreadedWorld(workers)
        self.numel = sum(spec.numel for spec in specs)
        self.params, self.optimizer, self.steps = params, optimizer, 0
        self.second_moment = variant.second_moment
        self.syncs = [
            GradientSync(compressor, specs, Ranks.flat(comm), torch.device("cpu"), sharded=False, seed=seed)
            for comm in self.world.comms
        ]
        self.outers: list[OuterSync] = []
        if not rule.synchronous:
            self._start()

    def _start(self) -> None:
        """Steps are local from now on."""
        for rank, sync in enumerate(self.syncs):
            if self.steps:
                sync.forget()
            own = {name: param.data[rank] for name, param in self.params.items()}
            self.outers.append(OuterSync(sync, own, self.rule))

    def before_step(self) -> None:
        """In the synchronous part gradients are reduced, both hops, through the compressor."""
        if self.outers:
            return
        parts = [(name, param.grad) for name, param in self.params.items() if param.grad is not None]
        offsets = itertools.accumulate((grad[0].numel() for _, grad in parts), initial=0)
        layout = BucketLayout(tuple((name, at) for (name, _), at in zip(parts, offsets, strict=False)))
        flat = [torch.cat([grad[rank].reshape(-1) for _, grad in parts]) for rank in range(len(self.syncs))]
        self.world.reduce(self.syncs, layout, flat, flat)
        sizes = [grad[0].numel() for _, grad in parts]
        for rank, mean_N in enumerate(flat):
            for (_, grad), mean in zip(parts, mean_N.split(sizes), strict=True):
                grad[rank].copy_(mean.view_as(grad[rank]))

    def after_step(self, learning_rate: float) -> None:
        self.steps += 1
        if self.outers and self.second_moment:
            MeanMoment(lambda: len(self.outers)).correct_(self.optimizer)
        if self.outers:
            self._together(lambda outer: outer.after_step(learning_rate))
        elif self.rule.is_local(self.steps):
            self._start()

    def finish(self) -> None:
        self._together(lambda outer: outer.finish())
        self.world.close()

    def _together(self, call: Any) -> None:
        futures = [self.world._threads.submit(call, outer) for outer in self.outers]
        wait(futures)
        for future in futures:
            future.result()

    @property
    def bits(self) -> float:
        """Bits on a rank's interface per parameter and optimizer step, counted."""
        sent = sum(comm.sent_nbytes for comm in self.world.comms) / len(self.world.comms)
        return 8 * sent / self.steps / self.numel


def _role(name: str) -> Role:
    return "embedding" if name in ("embedding", "position") else "head" if name == "head" else "other"


def train(model_name: str, variant: Variant, rate: float, seed: int, setting: Setting) -> dict[str, float]:
    """The whole run; deterministic."""
    model, started = MODELS[model_name], time.process_time()
    params = initial(model, setting.workers, setting.context, seed)
    betas = (0.9, variant.beta2)
    optimizer = torch.optim.AdamW(params.values(), lr=rate, betas=betas, weight_decay=0.1, fused=True)
    ranks = Synchronous(params) if variant.outer is None else Local(variant, params, optimizer, seed)
    text = standard_library("train")
    order = torch.Generator().manual_seed(10_000 + seed)
    window = torch.arange(setting.context + 1)
    total = 0.0
    for step in range(setting.steps):
        starts = torch.randint(text.numel() - setting.context - 1, (setting.workers, setting.batch, 1), generator=order)
        tokens = text[starts + window].long()
        logits = model.logits(params, tokens[..., :-1])
        loss = F.cross_entropy(logits.flatten(0, 2), tokens[..., 1:].flatten()) * setting.workers
        optimizer.zero_grad()
        loss.backward()  # type: ignore[no-untyped-call]
        ranks.before_step()
        for group in optimizer.param_groups:
            group["lr"] = rate * warmup_then_cosine(step, setting, floor=0.05)
        optimizer.step()
        ranks.after_step(rate)
        if step >= setting.steps - 200:
            total += loss.item() / setting.workers / 200
    bits = ranks.bits
    ranks.finish()
    return {
        "validation_loss": _validation_loss(model, params, setting),
        "train_loss": total,
        "bits": bits,
        "seconds": time.process_time() - started,
    }


@torch.no_grad()
def _validation_loss(model: Any, params: Params, setting: Setting) -> float:
    text, first = standard_library("validation"), {name: param[:1] for name, param in params.items()}
    starts = torch.arange(setting.validation_windows) * (
        (text.numel() - setting.context - 1) // setting.validation_windows
    )
    losses = []
    for part in starts.split(64):
        tokens = text[part[None, :, None] + torch.arange(setting.context + 1)].long()
        logits = model.logits(first, tokens[..., :-1])
        losses.append(F.cross_entropy(logits.flatten(0, 2), tokens[..., 1:].flatten()).item())
    return sum(losses) / len(losses)


class Results(Runs[Run]):
    """Runs that are trained where they are missing."""

    def run(self, name: str, model: str, variant: Variant, rate: float, seed: int) -> Run:
        found = self.get(variant=name, model=model, rate=rate, seed=seed)
        if found is None:
            trained = train(model, variant, rate, seed, self.setting)
            found = Run(variant=name, model=model, rate=rate, seed=seed, configuration=asdict(variant), **trained)
            self.add(found)
            print(
                f"{name:<24} {model:<12} rate {rate:<8g} seed {seed}: validation {found.validation_loss:.4f},"
                f" training {found.train_loss:.4f}, {found.bits:.4f} bits, {found.seconds:.0f} s",
                flush=True,
            )
        return found


app = typer.Typer(add_completion=False)


@app.command()
def tune(
    json_path: Annotated[Path, typer.Option("--json")],
    variants: Annotated[
        str, typer.Option(help="JSON: name -> {outer, compressor}; default: the four of the study")
    ] = "",
    steps: int = 1000,
    batch: Annotated[int, typer.Option(help="windows per rank and step")] = 32,
    seeds: Annotated[str, typer.Option(help="none of the study's")] = "100",
    models: str = "transformer,recurrent",
    rates: str = ",".join(map(str, RATES)),
) -> None:
    """Loss over learning rates."""
    torch.set_num_threads(1)
    chosen = {name: Variant(**each) for name, each in json.loads(variants).items()} if variants else VARIANTS
    results = Results(json_path, replace(Setting(), steps=steps, batch=batch), Run)
    for model in models.split(","):
        for name, variant in chosen.items():
            for rate in map(float, rates.split(",")):
                for seed in map(int, seeds.split(",")):
                    results.run(name, model, variant, rate, seed)


@app.command()
def final(
    json_path: Annotated[Path, typer.Option("--json")],
    tuned: Annotated[Path, typer.Option(help="results of tune")],
    batch: Annotated[int, typer.Option(help="windows per rank and step")] = 32,
    names: Annotated[str, typer.Option(help="of variants in the tuning's results")] = ",".join(VARIANTS),
    seeds: str = "0,1,2",
    models: str = "transformer,recurrent",
) -> None:
    """The best rate of each, on the seeds of the study."""
    torch.set_num_threads(1)
    tuning, results = json.loads(tuned.read_text())["runs"], Results(json_path, replace(Setting(), batch=batch), Run)
    for seed in map(int, seeds.split(",")):
        for model in models.split(","):
            for name in names.split(","):
                runs = [run for run in tuning if run["variant"] == name and run["model"] == model]
                best = min(runs, key=lambda run: run["validation_loss"])
                results.run(name, model, Variant(**best["configuration"]), best["rate"], seed)


@app.command()
def frontier(
    json_path: Annotated[Path, typer.Option("--json")],
    model: str = "transformer",
    steps: int = 1000,
    batch: Annotated[int, typer.Option(help="windows per rank and step")] = 8,
    rate: float = 8e-3,
    seed: int = 100,
) -> None:
    """The mean of the weights after rounds of several lengths, at several bits; some at other learning rates."""
    torch.set_num_threads(1)
    results = Results(json_path, replace(Setting(), steps=steps, batch=batch), Run)
    chosen = {
        f"{bits} bits every {every}": Variant(outer={"name": "localsgd", "every": every}, compressor=BITS[bits])
        for every in LENGTHS
        for bits in BITS
    }
    for name, variant in {"dense": Variant(), **chosen}.items():
        results.run(name, model, variant, rate, seed)
    for other in (rate / 2, 2 * rate):
        for name in ("dense", "4 bits every 10", "4 bits every 30"):
            results.run(name, model, chosen.get(name, Variant()), other, seed)


if __name__ == "__main__":
    app()
