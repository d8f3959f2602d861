"""A module's parameters as methods see them: stable names, shapes, roles, and this rank's part of each."""

from __future__ import annotations

import contextlib
import functools
import re
import weakref
from collections.abc import Container, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor
from torch.nn.parameter import is_lazy
from torch.utils.weak import WeakIdKeyDictionary

from lowbit_strategy.collectives.layout import Role, TensorSpec

_WRAPPER = "(?:_orig_mod|_checkpoint_wrapped_module|_fsdp_wrapped_module|_forward_module)"
_DTYPES = (torch.float32, torch.bfloat16, torch.float16)
_HEAD_NAMES = ("lm_head", "output_projection", "classifier", "score", "head")


# A parameter's name without additions by wrappers (compile, activation checkpointing): the key of its state.
canonical_name = functools.partial(re.compile(rf"^(?:{_WRAPPER}(?:\.|$))+|\.{_WRAPPER}(?=\.|$)").sub, "")


def is_float(param: torch.Tensor) -> bool:
    """Whether `param` has a dtype that can be coded."""
    return param.dtype in _DTYPES


_first_names: weakref.WeakKeyDictionary[nn.Module, WeakIdKeyDictionary] = weakref.WeakKeyDictionary()


def keep_names(module: nn.Module) -> None:
    """Fix the names that `named_parameters` returns from now on: the present ones, or those of an earlier set-up."""
    first = _first_names.setdefault(module, WeakIdKeyDictionary())
    records = shard_records(module)
    for name, param in named_parameters(module):
        first[records.get(id(param), param)] = name


def named_parameters(module: nn.Module) -> list[tuple[str, nn.Parameter]]:
    """All parameters by canonical name, in registration order, tied ones only once.

    A parameter keeps the name that it had when `module` was set up, even if pruning, a parametrization or a wrapper
    moves it, because the optimizer and the hooks know the object. A mark distinguishes a new parameter whose place has
    a name that belongs to a different one.
    """
    first: Mapping[object, str] = _first_names.get(module) or {}
    records = shard_records(module)
    paths = (*module.named_parameters(), *((path, param) for path, param, *_ in replaced_by_ddp(module)))
    held = [(canonical_name(path), param, records.get(id(param), param)) for path, param in paths]
    taken = {first[record] for *_, record in held if record in first}
    found = []
    for name, param, record in held:
        if record in first:
            name = first[record]
        else:
            while name in taken:
                name += "'"
            taken.add(name)
        found.append((name, param))
    return found


def param_groups(module: FSDPModule) -> list[Any]:
    """FSDP2's records of the parameters that a module gathers and reduces together, one for each of their meshes."""
    state: Any = module._get_fsdp_state()
    if hasattr(state, "_fsdp_param_groups"):  # since torch 2.13
        return list(state._fsdp_param_groups)
    return [] if state._fsdp_param_group is None else [state._fsdp_param_group]


def shard_records(module: nn.Module) -> dict[int, Any]:
    """FSDP2's records of the parameters, by the identity of the shard and of the gathered tensor."""
    groups = [group for child in module.modules() if isinstance(child, FSDPModule) for group in param_groups(child)]
    records = [record for group in groups for record in group.fsdp_params]
    gathered = {id(record._unsharded_param): record for record in records if hasattr(record, "_unsharded_param")}
    return {id(record.sharded_param): record for record in records} | gathered


def trainable_parameters(module: nn.Module) -> dict[str, nn.Parameter]:
    """Parameters that get gradients, by canonical name, tied ones only once."""
    return {name: param for name, param in named_parameters(module) if param.requires_grad}


def device_of(module: nn.Module, device: torch.device | None) -> torch.device:
    """The given device or that of the trainable parameters, with the index that futures and streams need.

    Raises:
        ValueError: The parameters have no memory yet.
    """
    if device is None:
        name, param = next(iter(trainable_parameters(module).items()))
        if param.is_meta:
            raise ValueError(
                f"{name} is on the meta device: give the model memory and values (to_empty, then initialize or load)"
                " before compression is attached"
            )
        device = param.device
    if device.type == "cuda" and device.index is None:
        device = torch.device("cuda", torch.cuda.current_device())
    return device


def replaced_by_ddp(module: nn.Module) -> list[tuple[str, nn.Parameter, nn.Module, str]]:
    """Parameters whose local part DDP with ``device_mesh=`` reduces. The module's first forward pass replaced them by
    `DTensor`s made from them. They are returned with their paths and original attributes.
    """
    found = []
    for path, child in module.named_modules():
        for attribute, value in vars(child).items():
            if isinstance(value, DTensor) and value.grad_fn is not None:
                param: Any = getattr(value.grad_fn.next_functions[0][0], "variable", None)
                if hasattr(param, "_st_info"):
                    found.append((f"{path}.{attribute}" if path else attribute, param, child, attribute))
    return found


def bring_back(module: nn.Module) -> None:
    """Restore the parameters that DDP with ``device_mesh=`` has replaced, until the next forward pass."""
    for _, param, holder, attribute in replaced_by_ddp(module):
        delattr(holder, attribute)
        holder.register_parameter(attribute, param)


def describe_parameters(module: nn.Module, also: Container[str] = ()) -> list[TensorSpec]:
    """Specs of all parameters that are trainable or named in `also`, in registration order.

    A shape is that of this rank's part along all mesh dims that are not data-parallel; FSDP2 shards this part.

    Raises:
        ValueError: A parameter's dtype cannot be reduced, or the parameter belongs to a lazy module and has no shape
            yet.
    """
    for name, param in module.named_parameters():
        if is_lazy(param):
            raise ValueError(
                f"parameter {name} has no shape yet: run one forward pass of the model before it is set up"
            )
    roles, unsharded = _roles(module), _unsharded_shapes(module)
    specs = []
    for name, param in named_parameters(module):
        if not param.requires_grad and name not in also:
            continue
        if param.dtype not in _DTYPES:
            raise ValueError(
                f"parameter {name} is {param.dtype}: gradients are reduced as float32, bfloat16 or float16."
                " Convert it, train with a different precision, or freeze it"
            )
        order = None if param.is_contiguous() else _memory_order(param)
        shape = unsharded.get(id(param)) or tuple(local_part(param).shape)
        specs.append(TensorSpec(name, shape, roles.get(id(param), "other"), order))
    return specs


def _unsharded_shapes(module: nn.Module) -> dict[int, tuple[int, ...]]:
    """The tensor that FSDP2 shards for each of its parameters, by the identity of the shard."""
    return {id(record.sharded_param): tuple(record._orig_size) for record in shard_records(module).values()}


def _memory_order(param: nn.Parameter) -> tuple[int, ...] | None:
    """The memory order of the gradient of `param` in DDP's buckets."""
    if not torch.ops.aten.is_non_overlapping_and_dense(param):
        return None
    strides: Sequence[int] = param.stride()
    return tuple(sorted(range(param.ndim), key=lambda dim: -strides[dim]))


def refuse_sparse_gradients(module: nn.Module) -> None:
    """Raise a ValueError if an embedding makes sparse gradients, which do not fit into buckets."""
    for name, table in module.named_modules():
        if not isinstance(table, (nn.Embedding, nn.EmbeddingBag)) or not table.sparse:
            continue
        if any(param.requires_grad for param in table.parameters()):
            raise ValueError(
                f"{canonical_name(name) or 'the model'} is an {type(table).__name__} with sparse=True, whose sparse"
                " gradients cannot be compressed: make it with sparse=False (its gradient then travels at the"
                " compressor's bits), freeze it, or use the framework's own DDP"
            )


def _roles(module: nn.Module) -> dict[int, Role]:
    """The roles of parameters.

    | role | which |
    |---|---|
    | embedding | tables of ``nn.Embedding`` and ``nn.EmbeddingBag``; a weight tied to one is an embedding |
    | head | the result of a submodule's ``get_output_embeddings()`` (transformers) or ``get_classifier()`` (timm) |
    | head | the last linear layer, if it is as wide as an embedding has entries: it predicts the vocabulary |
    | head | linear layers called ``lm_head``, ``output_projection``, ``classifier``, ``score`` or ``head`` |
    """
    linears: list[nn.Linear] = []
    tables: list[nn.Embedding | nn.EmbeddingBag] = []
    heads: list[nn.Linear] = []
    for name, child in module.named_modules():
        if isinstance(child, nn.Linear):
            linears.append(child)
            if canonical_name(name).rsplit(".", 1)[-1] in _HEAD_NAMES:
                heads.append(child)
        elif isinstance(child, (nn.Embedding, nn.EmbeddingBag)):
            tables.append(child)
        for accessor in ("get_output_embeddings", "get_classifier"):
            if callable(method := getattr(child, accessor, None)):
                with contextlib.suppress(NotImplementedError, AttributeError, TypeError):  # may be unimplemented
                    if isinstance(head := method(), nn.Linear):
                        heads.append(head)
    for table in tables:
        if linears and isinstance(table, nn.Embedding) and table.num_embeddings == linears[-1].out_features:
            heads.append(linears[-1])
    # Never by `.weight`: if it is parametrized, as by spectral_norm, reading it computes it and changes buffers.
    of: tuple[tuple[Role, Sequence[nn.Module]], ...] = (("head", heads), ("embedding", tables))
    return {
        id(param): role for role, modules in of for each in modules for param in each.parameters() if param.ndim > 1
    }


def local_part(tensor: Tensor) -> Tensor:
    """This rank's part of a tensor, sharing its memory."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor.detach()


def shaped(part_N: Tensor, spec: TensorSpec) -> Tensor:
    """Give flat elements of a parameter, or of this rank's part, the parameter's shape, as gradients have it."""
    if spec.memory_order is None:
        return part_N.view(spec.shape)
    values = part_N.view([spec.shape[dim] for dim in spec.memory_order])
    return values.permute([spec.memory_order.index(dim) for dim in range(spec.ndim)])


def sharded_parameters(module: nn.Module) -> dict[str, nn.Parameter]:
    """All parameters by name, as shards if FSDP2 has gathered them."""
    shards = {at: record.sharded_param for at, record in shard_records(module).items()}
    return {name: shards.get(id(param), param) for name, param in named_parameters(module)}
