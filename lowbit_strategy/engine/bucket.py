"""Buckets of gradients, and how each of their parameters is reduced."""

from __future__ import annotations

import functools
from collections.abc import Iterator, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass

import torch
from torch import Tensor

from lowbit_strategy.codecs.base import StepContext
from lowbit_strategy.collectives.comm import Comm, Pending
from lowbit_strategy.collectives.exchange import CodedGroup, Exchange
from lowbit_strategy.collectives.layout import ParamView, TensorSpec
from lowbit_strategy.collectives.step_flags import StepFlags
from lowbit_strategy.collectives.wire_buffers import WireBuffers
from lowbit_strategy.engine.bucket_schedule import Stages
from lowbit_strategy.engine.carry_over import CarryOver
from lowbit_strategy.engine.collector import Collector
from lowbit_strategy.methods._base.codec_pair import CodecStore
from lowbit_strategy.methods._base.method import Method, MethodStore, ReducerState
from lowbit_strategy.methods._base.reducer import Reducer


@dataclass(frozen=True, slots=True)
class BucketLayout:
    """The parameters in a bucket and their places in it.

    Args:
        entries: Each parameter's name and the offset of its first element (FSDP2: in every row).
        row_numel: FSDP2: elements of one rank's row; the input is ``[W * row_numel]``. None under DDP.
        last: DDP: the last bucket of the backward pass, on which whole-model methods reduce.
        alone: Whole-model methods treat this bucket as a whole model, as they do every bucket of FSDP2.
        names: All parameters, if this rank has no part of some; empty: the parameters of `entries`.
        num_marked: FSDP2: the number of parameters for which ranks tell each other whether they had a gradient.
    """

    entries: tuple[tuple[str, int], ...]
    row_numel: int | None = None
    last: bool = True
    alone: bool = False
    names: tuple[str, ...] = ()
    num_marked: int = 0


@dataclass(frozen=True, kw_only=True, slots=True)
class BucketContext:
    """State that all buckets of a model share until a parameter changes its method.

    Args:
        specs: All parameters.
        methods: The method of each parameter.
        stores: The state of each method.
        comm: Ranks to reduce over.
        flags: Collects overflows and errors that this rank finds.
        carryover: Leftover residuals of replaced methods.
        collector: Collects buckets for whole-model methods; None: there is no such method.
        notes_overflow: Whether to note results that are not finite, for a rollback.
    """

    specs: Mapping[str, TensorSpec]
    methods: Mapping[str, Method]
    stores: Mapping[Method, MethodStore]
    comm: Comm
    device: torch.device
    buffers: WireBuffers
    flags: StepFlags
    carryover: CarryOver
    collector: Collector | None
    notes_overflow: bool


class BucketObserver:
    """Observes every bucket of one step. These methods do nothing; subclasses override those that they need.

    Attributes:
        traces: Whether `trace_residual` and `trace` are called, which needs a decode of each message and a float32 copy
            of the bucket.
    """

    traces: bool = False

    def observe(self, bucket: Bucket, x: Tensor, out: Tensor, stages: Stages) -> Stages:
        """Yield from `stages`; inspect `x` before they start and `out` when they have ended."""
        return stages

    def trace_residual(self, name: str, residual: Tensor | None) -> None:
        """Receive one parameter's residual before it is reduced, float32 ``[numel]``, which must not be kept. None:
        there is none.
        """

    def trace(self, name: str, compensated: Tensor, sent: Tensor) -> None:
        """Receive one parameter's gradient plus residual, and what the others decode from this rank; float32
        ``[numel]``, which must not be kept.

        Blocks whose gradient is all zero wait for another step, and are zero in both.
        """


class Bucket:
    """How one bucket is reduced: by the exchange that its codecs share, and by its reducers. Made once per layout."""

    def __init__(self, context: BucketContext, layout: BucketLayout) -> None:
        self.context = context
        self.layout = layout
        self.last_step = 0  # the last step in which this bucket was reduced
        names = [name for name, _ in layout.entries]
        self.ordered_names, self.names = tuple(names), frozenset(layout.names or names)
        self.params = [self._param(*entry) for entry in layout.entries]
        by_method: dict[Method, list[ParamView]] = {method: [] for method in context.stores if method.whole_model}
        for param in self.params:
            by_method.setdefault(context.methods[param.name], []).append(param)
        self._own_model = layout.alone or layout.row_numel is not None  # whether it waits for no other bucket
        groups: list[CodedGroup] = []
        self._reducers: list[tuple[Reducer, ReducerState, list[ParamView]]] = []
        for method, params in by_method.items():
            store = context.stores[method]
            if isinstance(method, Reducer):
                if params or not self._own_model:
                    self._reducers.append((method, store.state, params))
            elif params:
                assert isinstance(store, CodecStore)
                groups.append(store.group(params))
        self.exchange = (
            Exchange(
                groups,
                context.comm,
                context.device,
                buffers=context.buffers,
                flags=context.flags,
                num_marked=layout.num_marked,
            )
            if groups or layout.num_marked
            else None
        )

    def _param(self, name: str, offset: int) -> ParamView:
        spec, block_size = self.context.specs[name], self.context.methods[name].block_size
        row_numel = spec.row_numel(self.context.comm.world_size, block_size)
        stride = row_numel if self.layout.row_numel is None else self.layout.row_numel
        return ParamView(spec, self.context.comm.world_size, row_numel, offset, stride)

    def run(
        self,
        x: Tensor,
        out: Tensor,
        step: StepContext,
        observers: Sequence[BucketObserver],
        marks: Tensor | None = None,
    ) -> Stages:
        """Reduce `x` into `out`. Yields while bytes travel; yields None while waiting for other buckets of the pass.

        Methods choose the dtypes, even if backward runs inside an autocast region, which would otherwise turn a
        method's matrix products into bfloat16.

        Args:
            x: The bucket, 1-D contiguous.
            out: DDP: receives the mean, has the shape of `x` and may be `x` itself. FSDP2: receives the sum of this
                rank's row, ``[row_numel]``.
            step: Counter and seeds.
            observers: Observers of the step, the innermost first.
            marks: See `Exchange.run`.
        """
        stages = self._stages(x, out, step, [each for each in observers if each.traces], marks)
        for observer in observers:
            stages = observer.observe(self, x, out, stages)
        device_type = self.context.device.type
        return _without_autocast(stages, device_type) if torch.is_autocast_enabled(device_type) else stages

    def _stages(
        self, x: Tensor, out: Tensor, step: StepContext, tracers: Sequence[BucketObserver], marks: Tensor | None
    ) -> Stages:
        if self.context.carryover.waiting:
            for param in self.params:
                self.context.carryover.add_to_(param.within(x, out))
        if self.exchange is not None:
            if tracers:
                yield from self._traced(self.exchange, x, out, step, tracers, marks)
            else:
                yield from self.exchange.run(x, out, step, marks=marks)
        for method, state, params in self._reducers:
            views = [param.within(x, out) for param in params]
            if tracers:
                views = [self._view_to_trace(view, tracers) for view in views]
            if method.whole_model and not self._own_model:
                yield from self._collect(method, state, views, step)
            elif views:
                yield from self._reduce(method.reduce(views, state, self.context.comm, step), views)

    def _traced(
        self,
        exchange: Exchange,
        x: Tensor,
        out: Tensor,
        step: StepContext,
        tracers: Sequence[BucketObserver],
        marks: Tensor | None,
    ) -> Stages:
        params = [param for group in exchange.groups for param in group.params]
        to_send = {
            param.name: self.compensated(param, x, out, self._trace_residual(param, tracers)) for param in params
        }

        def trace(sent: Tensor) -> None:
            for param in params:
                self._trace(tracers, param.name, to_send.pop(param.name), param.within(sent, out).flat())

        yield from exchange.run(x, out, step, trace, marks)

    def _reduce(self, stages: Iterator[Pending], views: Sequence[ParamView]) -> Stages:
        yield from stages
        if self.context.notes_overflow:
            for view in views:
                self.context.flags.note_overflow(view.out)

    def _collect(
        self,
        method: Reducer,
        state: ReducerState,
        views: list[ParamView],
        step: StepContext,
    ) -> Stages:
        """Wait, for a whole-model method, until the last bucket of the pass has reduced for all."""
        collector = self.context.collector
        assert collector is not None
        collector.arrive(method, views)
        if not self.layout.last:
            while collector.waits(method):
                yield None
            return
        while collector.misses(method):
            yield None
        if all_views := collector.views(method):
            yield from self._reduce(method.reduce(all_views, state, self.context.comm, step), all_views)
        collector.finish(method)

    def _view_to_trace(self, view: ParamView, tracers: Sequence[BucketObserver]) -> ParamView:
        self._trace_residual(view, tracers)
        return view._replace(tracer=functools.partial(self._trace, tracers, view.name))

    @staticmethod
    def _trace(tracers: Sequence[BucketObserver], name: str, compensated: Tensor, sent: Tensor) -> None:
        for tracer in tracers:
            tracer.trace(name, compensated, sent)

    def _trace_residual(self, param: ParamView, tracers: Sequence[BucketObserver]) -> Tensor | None:
        residual = self.residual(param)
        for tracer in tracers:
            tracer.trace_residual(param.name, residual)
        return residual

    def residual(self, param: ParamView) -> Tensor | None:
        """A copy of what will be added to a parameter's next gradient, float32 ``[numel]``; None if nothing is kept."""
        return self.context.stores[self.context.methods[param.name]].residual(param.name)

    def compensated(self, param: ParamView, x: Tensor, out: Tensor, residual: Tensor | None) -> Tensor:
        """A copy of the gradient plus the residual, float32 ``[numel]``; zero where the method is idle.

        A method is idle where a block's gradient, or the parameter's, is all zero: nothing is sent, and the residual
        waits. `residual`: what the method `residual` returned; it is overwritten.
        """
        view, method = param.within(x, out), self.context.methods[param.name]
        gradient = view.flat()
        if residual is None or not residual.numel():
            h, leftover = gradient.to(torch.float32, copy=True), self.context.carryover.get(param.name)
            return h if leftover is None else h.add_(leftover)
        blocks_WKB = self._idle_together(view, gradient, method.idle_numel)
        h = residual.add_(gradient)
        if not h.is_cuda and bool(blocks_WKB[..., 0].all()):
            return h  # the usual case, checked first on CPU; on CUDA the host would wait for the answer
        active_WK = blocks_WKB.abs().amax(-1) != 0  # several times faster than `any`; small squares vanish in a norm
        active_WN = active_WK.repeat_interleave(blocks_WKB.shape[-1], dim=1)
        if method.idle_numel is not None:
            active_WN = active_WN[:, : view.row_numel]  # without the padding of blocks
        return torch.where(active_WN.reshape(-1)[: h.numel()], h, 0.0)

    @staticmethod
    def _idle_together(view: ParamView, gradient: Tensor, idle_numel: int | None) -> Tensor:
        """The gradient as ``[W, K, B]``, padded with zeros, or as ``[1, 1, N]``. Blocks of zeros send nothing."""
        if idle_numel is None:
            return gradient.view(1, 1, -1)
        rows_WN = view.rows(gradient)
        if padding := -view.row_numel % idle_numel:
            rows_WN = torch.nn.functional.pad(rows_WN, (0, padding))
        return rows_WN.view(view.world_size, -1, idle_numel)


def _without_autocast(stages: Stages, device_type: str) -> Stages:
    """Run each of the `stages` with autocast off; between stages it is as the caller set it."""
    while True:
        off = torch.autocast(device_type, enabled=False) if torch.is_autocast_enabled(device_type) else nullcontext()
        try:
            with off:
                pending = next(stages)
        except StopIteration:
            return
        yield pending
