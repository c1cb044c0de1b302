"""A layout applied to a module, in this order: slice, split, cut, share, recompute, compile, shard or replicate."""

from contextlib import nullcontext
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.distributed.fsdp import FSDPModule

from samestep.comm.mesh import Mesh
from samestep.errors import LayoutError, UserError
from samestep.layout import Layout
from samestep.parallel.asking import check_asking
from samestep.parallel.blocks import find_blocks, with_forward
from samestep.parallel.calls import Trace
from samestep.parallel.chunked_logits import chunk_logits
from samestep.parallel.compile import check_compile, compile_blocks
from samestep.parallel.complex_parameters import check_complex
from samestep.parallel.context.split import split_tokens
from samestep.parallel.ddp import GradientExchange, replicate
from samestep.parallel.exact.batch_buffers import BatchBuffers, find_batch_buffers
from samestep.parallel.exact.batch_norm import global_batch_norm
from samestep.parallel.exact.buffers import keep_no_cache
from samestep.parallel.exact.dropout import same_dropout
from samestep.parallel.exact.float64 import in_float64
from samestep.parallel.exact.forward_context import ForwardContext
from samestep.parallel.experts.find import Experts, find_experts
from samestep.parallel.experts.share import share_experts
from samestep.parallel.fsdp import agreed_units, shard, without_messages
from samestep.parallel.offload.activations import offload_activations
from samestep.parallel.offload.memory import HostMemory, MappedFile
from samestep.parallel.offload.parameters import empty_in, move_parameters
from samestep.parallel.parallel_model import Context, Details, ParallelModel, WholeModel
from samestep.parallel.pipeline.blanks import without_numbers
from samestep.parallel.pipeline.runner import Pipeline
from samestep.parallel.pipeline.stage import cut
from samestep.parallel.recompute import recompute
from samestep.parallel.sharding import ShardTable
from samestep.parallel.sparse_rows import SMALLEST, Choice, RowExchange, Table, find_tables
from samestep.parallel.tensor.apply import slice_tensors
from samestep.parallel.trace import follow, trace
from samestep.parallel.unused_parameters import UsedAlone, UsedByReplicas, UsedByShards
from samestep.parallel.zero1 import Owners


def spread(
    model: nn.Module,
    layout: Layout,
    mesh: Mesh,
    device: torch.device,
    *,
    precision: str,
    autocast: Context,
    details: Details,
    exchange: GradientExchange | None = None,
) -> ParallelModel:
    """Spread a model as its layout says, and fill what of it is on the meta device with its initial values.

    `exchange`: what plain replicas do with their gradients; None: they average them as they are.
    Raises LayoutError where it could not take the same step then.
    """
    keep_no_cache(model)
    check_complex(model, layout, precision)
    if layout.zero >= 2 or layout.tensor > 1 or layout.pipeline > 1 or layout.expert > 1:
        _check_hooks(model, layout)
    if layout.cuts_model or layout.zero or layout.expert > 1:
        _make_contiguous(model)
    if layout.pipeline > 1:
        _check_batch_norm(model, layout)
    joins = find_batch_buffers(model, details.batch_buffers, layout)
    parts = ShardTable.of(model, layout, mesh)
    if layout.zero == 1 and exchange is None:
        parts.owners = Owners(mesh)
    host, now = HostMemory(device), ForwardContext()
    throughout = partial(in_float64, precision == "fp64")  # also where the model is followed and compared
    with throughout():
        seen = _look(model, layout, details.example)  # before anything is changed
        experts = _experts(model, layout, details)
    blocks = find_blocks(model, apart=[model.get_submodule(each.name) for each in experts])
    initial = details.initial
    unsliced = without_numbers(model) if layout.pipeline > 1 else model
    if seen is not None and layout.context > 1:
        fill = partial(initial.fill, model, device) if initial is not None else lambda: None
        split_tokens(model, blocks, seen, mesh, parts, now, example=details.example, fill=fill, precisely=throughout)
        if not any(parameter.is_meta for parameter in model.parameters()):
            initial = None
    vocabulary = None
    if seen is not None and layout.tensor > 1:
        with throughout():
            vocabulary = slice_tensors(
                model, blocks, seen, parts, mesh, now, example=details.example, given=details.tensor_plan
            )
    of_pipeline = None
    if seen is not None and layout.pipeline > 1:
        of_pipeline = cut(model, unsliced, layout, mesh, seen, parts, details.cut_at, device, now)
        blocks = of_pipeline.blocks
    with throughout():
        shared = share_experts(model, experts, parts, mesh, now, device)
    if details.loss_chunk is not None:
        chunk_logits(model, details.loss_chunk, mesh.group("context") if layout.context > 1 else None)
    blocks = with_forward(blocks)
    if details.compile:
        check_compile(layout)
    else:
        same_dropout(model, now)
    global_batch_norm(model, mesh.data_group, now)
    buffers = BatchBuffers(model, joins, mesh.data_group, now)
    if layout.recompute != "none":
        recompute(blocks, layout.recompute, now)
    if layout.offloads("activations"):
        offload_activations(blocks, host)
    if details.compile:
        compile_blocks(blocks)
    common = {
        "model": model,
        "parts": parts,
        "now": now,
        "autocast": autocast,
        "vocabulary": vocabulary,
        "host": host,
        "buffers": buffers,
    }
    if layout.zero >= 2:
        root = of_pipeline or model
        units = agreed_units(model, blocks, seen, mesh.data_group)
        shard(root, units.modules, layout, mesh, precision, now, experts=shared.units)
        disk = common["disk"] = MappedFile(details.offload_folder) if layout.offloads("parameters-disk") else None
        if initial is not None:
            memory = torch.device("cpu") if layout.offloads_parameters else device
            initial.fill(model, memory, empty_like=partial(empty_in, disk) if disk is not None else None)
        elif disk is not None:
            move_parameters(model, disk)
        assert isinstance(root, FSDPModule)
        if of_pipeline is None:
            used = UsedByShards(model, mesh.data_group, may_differ=units.may_differ, names=parts.parameters)
            accumulating = partial(without_messages, root, keep_gathered=layout.zero == 2)
            return WholeModel(module=root, accumulating=accumulating, used=used, **common)
    if of_pipeline is not None:
        if initial is not None and layout.zero < 2:
            initial.fill(model, device)
        return Pipeline(cut=of_pipeline, layout=layout, mesh=mesh, device=device, **common)
    watched = details.compile or layout.recompute != "none" or layout.cuts_model or layout.expert > 1
    common["repeatable"] = not watched and not layout.offloads("activations")
    if exchange is not None and exchange.hook is None:
        return WholeModel(module=model, accumulating=nullcontext, used=exchange.used(model), **common)
    if layout.data_ranks > 1:
        plain = parts.owners is None and exchange is None
        tables = _tables(model, details.sparse_rows, device) if plain else []
        rows = RowExchange(tables, mesh.data_group) if tables else None
        used = UsedByReplicas(model, mesh.data_group, parts.parameters)
        apart = {*(table.parameter for table in tables), *shared.parameters}
        if rows is not None and all(p in apart for p in model.parameters() if p.requires_grad):
            return WholeModel(module=model, accumulating=nullcontext, used=used, rows=rows, **common)
        replicated = replicate(model, mesh.data_group, device, parts.owners, exchange, apart, details.bucket_mb)
        return WholeModel(module=replicated, accumulating=replicated.no_sync, used=used, rows=rows, **common)
    return WholeModel(module=model, accumulating=nullcontext, used=UsedAlone(), **common)


def _tables(model: nn.Module, choice: Choice, device: torch.device) -> list[Table]:
    """The embeddings whose gradients go as rows. Raises UserError where that is asked for and there are none."""
    if choice == "off" or (choice == "auto" and device.type != "cpu"):
        return []
    tables, refused = find_tables(model, smallest=SMALLEST if choice == "auto" else 0)
    if choice == "on" and not tables:
        why = "; ".join(f"{name}: {reason}" for name, reason in refused.items()) or "there is no nn.Embedding"
        raise UserError(
            f"run.sparse_rows is on, and the model has no embedding that only lookups use ({why}); "
            "use sparse_rows: auto"
        )
    return tables


def _experts(model: nn.Module, layout: Layout, details: Details) -> list[Experts]:
    """The experts that the ranks of the expert axis share out."""
    if layout.expert == 1:
        return []
    if details.example is None:
        raise _no_example(layout)
    return find_experts(model, details.example, layout, details.expert_plan)


def _no_example(layout: Layout) -> UserError:
    return UserError(
        f'layout "{layout}" cuts the model itself, for which its forward must be followed once; use '
        "session.prepare(model, optimizer, example=inputs) with the inputs of a few samples"
    )


def _look(model: nn.Module, layout: Layout, example: Any) -> Trace | None:
    """What the model's forward does, where the layout wants to know."""
    if not layout.cuts_model:
        return follow(model, example) if layout.zero >= 2 and example is not None else None
    if example is None:
        raise _no_example(layout)
    seen = trace(model, example)
    check_asking(model, layout, seen)
    return seen


def _make_contiguous(model: nn.Module) -> None:
    """Slices, shards and broadcasts are of parameters whose numbers lie one after the other."""
    for parameter in model.parameters():
        if not parameter.is_contiguous():
            parameter.data = parameter.data.contiguous()


def _check_hooks(model: nn.Module, layout: Layout) -> None:
    """Raise LayoutError for hooks on gradients: here other tensors, or parts of them, take the parameters' place."""
    for name, parameter in model.named_parameters():
        if parameter._backward_hooks or parameter._post_accumulate_grad_hooks:
            raise LayoutError(
                f'layout "{layout}": {name} has a hook on its gradient (register_hook), which would not be called '
                "with the whole of it; use dp or zero1, or change the gradient in the forward, such as by a mask on "
                "the parameter"
            )


def _check_batch_norm(model: nn.Module, layout: Layout) -> None:
    for name, module in model.named_modules():
        if isinstance(module, nn.modules.batchnorm._BatchNorm):
            raise LayoutError(
                f'layout "{layout}": {name} ({type(module).__name__}) would take its statistics from one '
                "micro-batch's samples, which is another step than one process takes; use group norm"
            )
