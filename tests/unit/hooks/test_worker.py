"""The thread that reduces DDP's buckets: its order, its results, and what happens when a bucket fails."""

from __future__ import annotations

import logging
import queue
import threading
import weakref
from collections.abc import Iterator, Sequence

import pytest
import torch
import torch.distributed as dist
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from lowbit_strategy.collectives.comm import GroupComm
from lowbit_strategy.engine.bucket_schedule import TURN, TURN_AFTER, BucketSchedule
from lowbit_strategy.engine.engine import GradientSync
from lowbit_strategy.hooks.ddp import DDPHook
from lowbit_strategy.hooks.runners import BucketWorker, SideStream
from lowbit_strategy.methods.loco import LoCo
from lowbit_strategy.model.parameters import describe_parameters
from lowbit_strategy.ranks.ranks import Ranks
from testing.processes.ranks import run_ranks

LIMIT_S = 30.0  # a worker that hangs fails its test instead of stopping all of them


class Travel:
    """Bytes under way: `wait` logs whose they are, once they may arrive."""

    def __init__(self, name: str, log: list[str], may_arrive: threading.Event | None = None) -> None:
        self.name, self.log, self.may_arrive = name, log, may_arrive

    def wait(self) -> None:
        if self.may_arrive is not None:
            assert self.may_arrive.wait(LIMIT_S)
        self.log.append(f"arrived {self.name}")


def stages(name: str, log: list[str], exchanges: int = 2, gate: threading.Event | None = None) -> Iterator[Travel]:
    log.append(f"start {name}")
    for exchange in range(exchanges):
        yield Travel(f"{name}{exchange}", log, gate)
    log.append(f"end {name}")


def finished(future: torch.futures.Future[Tensor]) -> Tensor:
    """The future's value, or its error, once it is there: `Future.wait` has no limit of its own."""
    done: queue.SimpleQueue[None] = queue.SimpleQueue()
    future.add_done_callback(lambda _: done.put(None))
    done.get(timeout=LIMIT_S)
    return future.value()


@pytest.fixture
def worker() -> Iterator[BucketWorker]:
    made = BucketWorker()
    yield made
    made.close()


def test_a_new_bucket_starts_before_older_ones_advance(worker: BucketWorker) -> None:
    log: list[str] = []
    results = [torch.tensor(float(i)) for i in range(3)]
    futures = [worker.submit(stages(name, log), result=results[i], last=i == 2) for i, name in enumerate("abc")]
    assert [finished(future) for future in futures] == results
    assert log == [
        *("start a",),
        *("start b", "arrived a0"),
        *("start c", "arrived a1", "end a", "arrived b0"),
        *("arrived b1", "end b", "arrived c0"),  # the step has no more buckets: oldest first until all are done
        *("arrived c1", "end c"),
    ]


def test_a_result_is_there_only_when_its_bucket_is_done(worker: BucketWorker) -> None:
    log: list[str] = []
    gate = threading.Event()
    future = worker.submit(stages("a", log, gate=gate), result=torch.ones(3), last=True)
    assert not future.done()
    gate.set()
    assert finished(future).sum() == 3
    assert log[-1] == "end a"


def test_a_bucket_that_waits_for_the_others_of_its_step_is_advanced_again(worker: BucketWorker) -> None:
    """Whole-model methods yield None until the step's last bucket has arrived."""
    complete: list[str] = []

    def waiting() -> Iterator[None]:
        while not complete:
            yield None

    def last() -> Iterator[None]:
        complete.append("last")
        yield None

    early = worker.submit(waiting(), result=torch.zeros(1), last=False)
    late = worker.submit(last(), result=torch.ones(1), last=True)
    assert (finished(early).item(), finished(late).item()) == (0.0, 1.0)


class FarTravel(Travel):
    is_far = True


def over_two_levels(name: str, log: list[str]) -> Iterator[Travel]:
    """An exact sum inside a node, two messages to far ranks, and an exact gather."""
    for what, kind in (("sum", Travel), ("rows", FarTravel), ("mean", FarTravel), ("gather", Travel)):
        log.append(f"sent {name} {what}")
        yield kind(f"{name} {what}", log)


def test_the_last_far_message_leaves_before_any_is_waited_for(worker: BucketWorker) -> None:
    """The last bucket's waits for a sum inside its node, which must not come after the way of the others' messages."""
    log: list[str] = []
    futures = [worker.submit(over_two_levels(name, log), result=torch.ones(1), last=name == "c") for name in "abc"]
    for future in futures:
        finished(future)
    for hop in ("rows", "mean"):
        first = min(log.index(f"arrived {name} {hop}") for name in "abc")
        assert all(f"sent {name} {hop}" in log[:first] for name in "abc")


def test_after_an_error_nothing_of_the_failed_pass_goes_on() -> None:
    """A loop may catch the error and continue: the old pass must not send, nor write to memory that is reused."""
    log: list[str] = []
    schedule, first = BucketSchedule(), torch.futures.Future[Tensor]()

    def failing() -> Iterator[Travel]:
        raise RuntimeError("out of memory")
        yield

    schedule.start([stages("old", log)], torch.zeros(1), first, last=False)
    with pytest.raises(RuntimeError, match="out of memory"):
        schedule.start([failing()], torch.zeros(1), torch.futures.Future(), last=False)
    assert first.done()
    log.clear()
    schedule.start([stages("new", log, 1)], torch.zeros(1), torch.futures.Future(), last=True)
    assert log == ["start new", "arrived new0", "end new"]


def test_a_bucket_fails_whose_other_pieces_have_not_begun() -> None:
    schedule, future = BucketSchedule(), torch.futures.Future[Tensor]()

    def failing() -> Iterator[Travel]:
        yield Travel("old", [])
        raise RuntimeError("out of memory")

    schedule.start([failing()], torch.zeros(1), torch.futures.Future(), last=False)
    with pytest.raises(RuntimeError, match="out of memory"):
        schedule.start([iter(()), stages("new", [])], torch.zeros(1), future, last=False)
    assert future.done()


def test_nothing_of_a_bucket_is_kept_once_it_is_done(worker: BucketWorker) -> None:
    """DDP's first bucket may be the whole gradient; while it lay in the thread's hands, the next step held two."""
    finished(worker.submit(stages("a", []), result=torch.zeros(1), last=True))
    bucket = torch.ones(3)
    gone = threading.Event()
    weakref.finalize(bucket, gone.set)
    finished(worker.submit(stages("b", []), result=bucket, last=True))
    del bucket
    assert gone.wait(LIMIT_S / 10)


def issued(exchanges: Sequence[int]) -> list[str]:
    """What one step's buckets do, in order, when all of them are there before the thread looks at the first."""
    log: list[str] = []
    worker, gate = BucketWorker(), threading.Event()
    worker.submit(stages("held", [], 1, gate), result=torch.zeros(1), last=True)
    futures = [
        worker.submit(stages(f"{i}.", log, count), result=torch.zeros(1), last=i == len(exchanges) - 1)
        for i, count in enumerate(exchanges)
    ]
    gate.set()
    for future in futures:
        finished(future)
    worker.close()
    return log


def inside_the_node(exchanges: Sequence[int], travel: type[Travel], turn_after: int | None) -> list[str]:
    """What one step's buckets exchange inside the node, in order, on the rank whose parts take so many exchanges."""
    log: list[str] = []

    def two_levels(name: str, count: int) -> Iterator[Travel]:
        log.append(f"sum {name}")
        yield Travel(name, [])
        for _ in range(count):
            yield travel(name, [])
        yield TURN  # type: ignore[misc]
        log.append(f"gather {name}")
        yield Travel(name, [])

    schedule = BucketSchedule(turn_after)
    for i, count in enumerate(exchanges):
        future: torch.futures.Future[Tensor] = torch.futures.Future()
        schedule.start([two_levels(f"{i}", count)], torch.zeros(1), future, last=i == len(exchanges) - 1)
    return log


@given(st.lists(st.tuples(st.integers(0, 6), st.integers(0, 6)), min_size=1, max_size=9), st.booleans())
def test_parts_of_other_sizes_meet_inside_the_node(exchanges: list[tuple[int, int]], far: bool) -> None:
    """A rank whose part of a bucket is empty sends nothing to other nodes, and is in its node's exchanges earlier."""
    travel, turn_after = (FarTravel, None) if far else (Travel, TURN_AFTER)
    orders = [inside_the_node(counts, travel, turn_after) for counts in zip(*exchanges, strict=True)]
    assert orders[0] == orders[1]
    assert len(orders[0]) == 2 * len(exchanges)


@given(st.lists(st.integers(0, 3), min_size=1, max_size=6))
def test_every_bucket_runs_all_its_stages_in_order(exchanges: list[int]) -> None:
    log = issued(exchanges)
    for i, count in enumerate(exchanges):
        own = [line for line in log if line.split()[1].startswith(f"{i}.")]
        assert own == [f"start {i}.", *(f"arrived {i}.{exchange}" for exchange in range(count)), f"end {i}."]


@given(st.lists(st.integers(0, 3), min_size=1, max_size=6))
def test_the_schedule_does_not_depend_on_when_buckets_come(exchanges: list[int]) -> None:
    """Ranks issue their collectives in the same order, however fast their backward passes are."""
    order = issued(exchanges)
    worker, log = BucketWorker(), []
    for i, count in enumerate(exchanges):
        started = threading.Event()

        def announced(i: int = i, count: int = count, started: threading.Event = started) -> Iterator[Travel]:
            started.set()
            yield from stages(f"{i}.", log, count)

        future = worker.submit(announced(), result=torch.zeros(1), last=i == len(exchanges) - 1)
        assert started.wait(LIMIT_S)  # a slow backward: the next bucket comes when this one is already under way
    finished(future)
    worker.close()
    assert log == order


def test_an_error_fails_all_buckets_under_way_and_is_logged_with_its_traceback(
    worker: BucketWorker, caplog: pytest.LogCaptureFixture
) -> None:
    def failing() -> Iterator[Travel]:
        yield Travel("b", [])
        raise ValueError("the third block is missing")

    with caplog.at_level(logging.ERROR, logger="lowbit_strategy"):
        first = worker.submit(stages("a", [], 5), result=torch.zeros(1), last=False)
        second = worker.submit(failing(), result=torch.zeros(1), last=True)
        for future in (first, second):
            with pytest.raises(Exception, match="the third block is missing"):
                finished(future)
    (record,) = caplog.records
    assert record.exc_info is not None
    assert "in failing" in caplog.text  # torch hands on the text of the error alone


def test_a_worker_goes_on_after_an_error(worker: BucketWorker) -> None:
    """A script may catch the error of one backward and go on, as with any other."""

    def failing() -> Iterator[Travel]:
        raise ValueError("once")
        yield

    log: list[str] = []
    with pytest.raises(Exception, match="once"):
        finished(worker.submit(failing(), result=torch.zeros(1), last=True))
    assert finished(worker.submit(stages("a", log), result=torch.ones(1), last=True)).item() == 1.0
    assert log == ["start a", "arrived a0", "arrived a1", "end a"]


def test_close_ends_the_thread_after_what_was_submitted() -> None:
    log: list[str] = []
    worker = BucketWorker()
    before = {thread.name for thread in threading.enumerate()}
    future = worker.submit(stages("a", log), result=torch.zeros(1), last=True)
    worker.close()
    assert future.done()
    assert log[-1] == "end a"
    assert "lowbit-buckets" in before
    assert not worker._thread.is_alive()


def _fail_in_backward(rank: int, world_size: int) -> list[str]:
    """A compressed DDP whose reduction fails in the second step, on every rank alike; what each backward did."""
    model = DistributedDataParallel(nn.Sequential(nn.Linear(64, 64), nn.Linear(64, 64)))
    sync = GradientSync(
        LoCo(),
        describe_parameters(model.module),
        Ranks.flat(GroupComm(dist.new_group())),
        torch.device("cpu"),
        sharded=False,
    )
    hook = DDPHook(model, sync)
    reduce, outcomes = sync.reduce, []

    def failing(*args: object) -> Iterator[object]:
        yield from reduce(*args)  # type: ignore[arg-type]
        raise ValueError("the disk of residuals is full")

    for step in range(3):
        sync.reduce = failing if step == 1 else reduce  # type: ignore[method-assign]
        sync.begin_step()
        try:
            model(torch.ones(2, 64)).sum().backward()
            outcomes.append("reduced")
        except RuntimeError as error:
            outcomes.append(str(error))
        sync.end_step()
    hook.close()
    return outcomes


def test_backward_raises_what_the_worker_raised() -> None:
    for outcomes in run_ranks(_fail_in_backward, 2):
        assert outcomes[0] == "reduced"
        assert "the disk of residuals is full" in outcomes[1]


def test_a_side_stream_knows_the_index_of_its_device(monkeypatch: pytest.MonkeyPatch) -> None:
    """``torch.device("cuda")`` has none, and a future takes no device without; without a GPU no stream can be made."""
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 3)
    monkeypatch.setattr(torch.cuda, "Stream", lambda device, priority: (device, priority))
    for name, wanted in (("cuda", 3), ("cuda:1", 1)):
        side = SideStream(torch.device(name))
        assert side._device == torch.device("cuda", wanted)
        assert side._stream == (torch.device("cuda", wanted), -1)  # before backward's own kernels
