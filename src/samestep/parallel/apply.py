"""A layout applied to a model, in ten steps.

1 split tokens, 2 slice tensors, 3 cut pipeline stages, 4 share experts, 5 take logits in chunks, 6 make the forward
that of the whole batch (random numbers, batch norm, buffers), 7 recompute, 8 offload activations, 9 compile,
10 shard or replicate. What changes the modules comes first, what wraps their forwards next, and what takes over the
parameters last.

Why this order. A step that changes modules (1 to 5) needs the forward as the trace of the untouched model saw it, so
all of them come before anything wraps a forward. Tokens are split first: what checks the split holds its output
against that of the untouched model, and what checks the slices holds theirs against that of the model with split
tokens. Stages are cut after slicing, so that a stage takes the sliced modules with
it. Random numbers and batch norm (6) come before recomputation (7): what is run again in backward must find the same
random numbers, which it can only where they are answered inside the recomputed forward. FSDP2 and
DistributedDataParallel (10) come last, because they register hooks on the parameters that are left by then, and a
parameter that is replaced later would never be reduced.

Who holds what afterwards: with mesh axes [pipeline, replicate, shard, expert, context, tensor], ranks that differ
along `replicate` hold the same numbers; along `shard` the same (ZeRO-1) or different shards (ZeRO-2 and above); along
`context` the same parameters and other tokens; along `pipeline`, `expert` and `tensor` different parameters.
`ShardTable` writes that down for each name.
"""

import sys
from collections.abc import Sequence
from contextlib import nullcontext
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import FSDPModule

from samestep.comm.mesh import Mesh
from samestep.errors import UserError
from samestep.layout import Layout
from samestep.options import Options
from samestep.parallel.blocks import find_blocks, with_forward
from samestep.parallel.calls import Trace
from samestep.parallel.checks import check_asking, check_hooks
from samestep.parallel.compile import check_compile, compile_blocks
from samestep.parallel.complex_parameters import check_complex
from samestep.parallel.ddp import GradientExchange, replicate
from samestep.parallel.exact.batch_buffers import BatchBuffers, find_batch_buffers
from samestep.parallel.exact.batch_norm import first_batch_norm, global_batch_norm, without_sync
from samestep.parallel.exact.buffers import keep_no_cache
from samestep.parallel.exact.dropout import same_dropout
from samestep.parallel.exact.float64 import in_float64
from samestep.parallel.exact.forward_context import ForwardContext
from samestep.parallel.experts.find import Experts, find_experts
from samestep.parallel.experts.share import SharedExperts, share_experts
from samestep.parallel.fsdp import agreed_units, shard, without_messages
from samestep.parallel.loss.chunked_logits import SharedLogits, chunk_logits, share_logits
from samestep.parallel.loss.vocabulary import Vocabulary
from samestep.parallel.offload.activations import offload_activations
from samestep.parallel.offload.memory import HostMemory, MappedFile
from samestep.parallel.offload.parameters import empty_in, move_parameters
from samestep.parallel.optimizer.late import LateParameters
from samestep.parallel.parallel_model import Context, Findings, ModelDetails, ParallelModel, WholeModel
from samestep.parallel.pipeline.blanks import without_numbers
from samestep.parallel.pipeline.runner import Pipeline
from samestep.parallel.pipeline.stage import StagedModel, cut
from samestep.parallel.recompute import in_graph, recompute
from samestep.parallel.sharding import ShardTable
from samestep.parallel.sparse_rows import SMALLEST, Choice, RowExchange, Table, find_tables
from samestep.parallel.tensor.apply import slice_tensors
from samestep.parallel.trace import follow, trace
from samestep.parallel.unused_parameters import (
    UnusedParameters,
    UnusedParametersAlone,
    UnusedParametersOfReplicas,
    UnusedParametersOfShards,
)
from samestep.parallel.zero1 import BUCKET_BYTES, Owners


def spread(
    model: nn.Module,
    layout: Layout,
    mesh: Mesh,
    device: torch.device,
    *,
    options: Options,
    autocast: Context,
    details: ModelDetails,
    exchange: GradientExchange | None = None,
) -> ParallelModel:
    """Spread a model as its layout says, and fill what of it is on the meta device with its initial values.

    `exchange`: what plain replicas do with their gradients; None: they average them as they are.
    Raises LayoutError where it could not take the same step then.
    """
    spreading = _Spreading(
        model, layout, mesh, device, options=options, autocast=autocast, details=details, exchange=exchange
    )
    spreading.split_tokens()  # 1
    spreading.slice_tensors()  # 2
    spreading.cut_stages()  # 3
    spreading.share_experts()  # 4
    spreading.chunk_logits()  # 5
    spreading.make_exact()  # 6
    spreading.recompute()  # 7
    spreading.offload_activations()  # 8
    spreading.compile()  # 9
    return spreading.sharded() if layout.zero >= 2 else spreading.replicated()  # 10


class _Spreading:
    """Applies a layout to a model. Each method is one step, and does nothing if the layout doesn't need it."""

    def __init__(
        self,
        model: nn.Module,
        layout: Layout,
        mesh: Mesh,
        device: torch.device,
        *,
        options: Options,
        autocast: Context,
        details: ModelDetails,
        exchange: GradientExchange | None,
    ) -> None:
        """Check the model, and trace its forward before anything is changed."""
        self.model = model
        self.layout = layout
        self.mesh = mesh
        self.device = device
        self.options = options
        self.autocast = autocast
        self.details = details
        self.exchange = exchange
        # Checks and preparations for all steps below; none of them depends on other ranks.
        keep_no_cache(model)
        without_sync(model)  # a model with them could not be followed on a CPU
        check_complex(model, layout, options.precision)
        if layout.zero >= 2 or layout.tensor > 1 or layout.pipeline > 1 or layout.expert > 1:
            check_hooks(model, layout)
        if layout.cuts_model or layout.zero or layout.expert > 1:
            _make_contiguous(model)
        self.joins = find_batch_buffers(model, details.batch_buffers, layout)
        # The table is made of the whole model, whose shapes and names checkpoints and proofs refer to.
        self.parts = ShardTable.of(model, layout, mesh)
        if layout.zero == 1 and exchange is None:
            self.parts.owners = Owners(mesh)
        # One ForwardContext for the model. All wrappers below share it, so that setting the running micro-batch once
        # reaches dropout, batch norm, recomputation and the collectives of split tokens.
        self.host, self.forward_context = HostMemory(device), ForwardContext()
        # The context of fp64, which also applies when the model is traced and compared.
        self.throughout = partial(in_float64, options.precision == "fp64")
        with self.throughout():
            self.seen = _look(model, layout, details)
            self.experts = _experts(model, layout, details, options)
        # Experts are separate FSDP units: ranks of the expert axis hold different ones, and a block that contained
        # them would be gathered over the wrong group.
        self.blocks = find_blocks(model, apart=[model.get_submodule(expert.name) for expert in self.experts])
        self.initial = details.initial  # None: nothing of the model is on the meta device any more
        self.own_tokens: Sequence[str] = ()  # modules that work on this rank's tokens
        self.vocabulary: Vocabulary | None = None  # where the output layer is sliced
        self.compiler_recomputes = False  # selectively, as a part of what it compiles
        self.shared_logits: SharedLogits | None = None  # where ranks share out the rows of the output layer
        # What pipeline stages are cut by: the shapes of the whole model.
        self.unsliced = without_numbers(model) if layout.pipeline > 1 else model
        self.stages: StagedModel | None = None  # this rank's pipeline stages
        self.norm: str | None = None  # the batch norm for which a pipeline's step is one micro-batch
        self.shared: SharedExperts | None = None  # what is left of the experts here

    def split_tokens(self) -> None:
        """Step 1: blocks that treat tokens alike get this rank's tokens only; attention is over the context axis."""
        if self.seen is not None and self.layout.context > 1:
            # PyTorch's biases of attention import torch._dynamo, which commands that only check a job don't need.
            from samestep.parallel.context.split import split_tokens

            initial = self.initial
            fill = partial(initial.fill, self.model, self.device) if initial is not None else lambda: None
            self.own_tokens = split_tokens(
                self.model,
                self.blocks,
                self.seen,
                self.mesh,
                self.parts,
                self.forward_context,
                example=self.details.example,
                fill=fill,
                precisely=self.throughout,
            )
            # Splitting tokens compares outputs of the whole model with those of the split one, for which it fills the
            # model.
            if not any(parameter.is_meta for parameter in self.model.parameters()):
                self.initial = None

    def slice_tensors(self) -> None:
        """Step 2: columns and rows of matrices over the tensor axis; writes each slice into the table."""
        if self.seen is not None and self.layout.tensor > 1:
            with self.throughout():
                self.vocabulary = slice_tensors(
                    self.model,
                    self.blocks,
                    self.seen,
                    self.parts,
                    self.mesh,
                    self.forward_context,
                    example=self.details.example,
                    roles=self.options.tensor_plan,
                    findings=self.details.findings,
                    apart=self.own_tokens,
                )

    def cut_stages(self) -> None:
        """Step 3: keep this rank's stages, with blanks for the rest. Blocks are then those of its own stages."""
        if self.seen is not None and self.layout.pipeline > 1:
            self.norm = first_batch_norm(self.model)
            self.stages = cut(
                self.model,
                self.unsliced,
                self.layout,
                self.mesh,
                self.seen,
                self.parts,
                self.options.cut_at or (),
                self.device,
                self.forward_context,
            )
            self.blocks = self.stages.blocks
            self._tell_one_micro_batch()

    def _tell_one_micro_batch(self) -> None:
        """Report that stages wait for one another where there is batch norm."""
        if self.norm is not None and self.options.micro_batch is None and dist.get_rank() == 0:
            reason = (
                f"{self.norm} takes its statistics from the whole batch, so a step is one micro-batch, and one stage "
                "computes at a time"
            )
            print(f'samestep: layout "{self.layout}": {reason}', file=sys.stderr, flush=True)

    def share_experts(self) -> None:
        """Step 4: keep this rank's experts; tokens travel to them over the expert axis."""
        with self.throughout():
            self.shared = share_experts(
                self.model, self.experts, self.parts, self.mesh, self.forward_context, self.device
            )

    def chunk_logits(self) -> None:
        """Step 5: compute logits a few rows at a time, or each context rank those of its own tokens."""
        group = self.mesh.group("context") if self.layout.context > 1 else None
        if self.options.loss_chunk is not None:
            chunk_logits(self.model, self.options.loss_chunk, group)
        # Logits of split tokens can stay split, as the loss is a sum over tokens; where tensor ranks hold slices of
        # the vocabulary, `loss.vocabulary` has its own way.
        elif group is not None and self.seen is not None and self.layout.tensor == 1:  # whose ranks have some words
            self.shared_logits = share_logits(self.model, self.seen, group, self.own_tokens)
        self.blocks = with_forward(self.blocks)

    def make_exact(self) -> None:
        """What makes a forward of some samples that of the whole batch: random numbers, batch norm, buffers."""
        if self.options.compile:
            check_compile(self.layout)
        else:
            same_dropout(self.model, self.forward_context, attention=self.options.attention_dropout)
        global_batch_norm(self.model, self.mesh.data_group, self.forward_context)
        self.buffers = BatchBuffers(self.model, self.joins, self.mesh.data_group, self.forward_context)

    def recompute(self) -> None:
        """Step 7: keep a block's inputs, and run its forward again in backward (Chen et al. 2016)."""
        self.compiler_recomputes = self.options.compile and in_graph(self.blocks, self.layout)
        if self.layout.recompute != "none" and not self.compiler_recomputes:
            # The whole of a compiled block: PyTorch's selective checkpoint fails where a piece is compiled in forward
            # alone, or in backward alone, since it looks for each operator of the one in the other.
            recompute(self.blocks, "full" if self.options.compile else self.layout.recompute, self.forward_context)

    def offload_activations(self) -> None:
        """Step 8: keep what backward needs of a block in the host's memory meanwhile."""
        if self.layout.offloads("activations"):
            offload_activations(self.blocks, self.host)

    def compile(self) -> None:
        """Step 9: what a block computes itself, inside of what the steps before put around it."""
        if self.options.compile:
            compile_blocks(self.blocks, recomputing=self.compiler_recomputes)

    def sharded(self) -> ParallelModel:
        """ZeRO-2, ZeRO-3 or FSDP: each rank holds a part of every parameter, of its stages where there are some."""
        layout, model, initial = self.layout, self.model, self.initial
        assert self.shared is not None
        root = self.stages or model
        # Gathers are collectives of the data ranks: all must have found the same units, or they would wait for one
        # another.
        units = agreed_units(model, self.blocks, self.seen, self.mesh.data_group)
        if units.writing and dist.get_rank() == 0:
            what = f"{', '.join(units.writing)}: changes what it is given in place, so it is gathered with the model"
            print(f'samestep: layout "{layout}": {what}', file=sys.stderr, flush=True)
        shard(
            root,
            units.modules,
            layout,
            self.mesh,
            self.options.precision,
            self.forward_context,
            experts=self.shared.units,
            compiled=self.options.compile,
        )
        disk = MappedFile(self.options.offload_folder) if layout.offloads("parameters-disk") else None
        # Filled after sharding: at no time does a rank hold more than its shards and one whole parameter.
        if initial is not None:
            memory = torch.device("cpu") if layout.offloads_parameters else self.device
            initial.fill(model, memory, empty_like=partial(empty_in, disk) if disk is not None else None)
        elif disk is not None:
            move_parameters(model, disk)
        assert isinstance(root, FSDPModule)
        if self.stages is not None:
            of_stages = UnusedParametersOfShards(self.stages, self.mesh.data_group, may_differ=units.may_differ)
            return self._pipeline(self.stages, disk, of_stages)
        used = UnusedParametersOfShards(
            model, self.mesh.data_group, may_differ=units.may_differ, names=self.parts.parameters
        )
        accumulating = partial(without_messages, root, keep_gathered=layout.zero == 2)
        return WholeModel(module=root, accumulating=accumulating, used=used, disk=disk, **self._common())

    def replicated(self) -> ParallelModel:
        """One rank, or replicas that average their gradients; under ZeRO-1 each steps a part of the parameters."""
        layout, model, exchange = self.layout, self.model, self.exchange
        if self.stages is not None:
            if self.initial is not None:
                self.initial.fill(model, self.device)
            return self._pipeline(self.stages, None, None)
        watched = self.options.compile or layout.recompute != "none" or layout.cuts_model or layout.expert > 1
        whole = partial(WholeModel, repeatable=not watched and not layout.offloads("activations"), **self._common())
        # The engine sums gradients itself (Horovod, parameter servers, ordered sums): no wrapper that would do it
        # first.
        if exchange is not None and exchange.hook is None:
            return whole(module=model, accumulating=nullcontext, used=exchange.used(model))
        if layout.data_ranks == 1:
            return whole(module=model, accumulating=nullcontext, used=UnusedParametersAlone())
        assert self.shared is not None
        group, owners = self.mesh.data_group, self.parts.owners
        # Rows of an embedding's gradient are sent apart from DDP's buckets. An owner (ZeRO-1) needs the whole
        # gradient, and so does an engine's own exchange.
        tables = _tables(model, self.options.sparse_rows, self.device) if owners is None and exchange is None else []
        rows = RowExchange(tables, group) if tables else None
        late = self._late() if owners is not None else None
        used = UnusedParametersOfReplicas(model, group, self.parts.parameters)
        apart = {*(table.parameter for table in tables), *self.shared.parameters}
        # DistributedDataParallel refuses a module without a parameter to reduce.
        if rows is not None and all(p in apart for p in model.parameters() if p.requires_grad):
            return whole(module=model, accumulating=nullcontext, used=used, rows=rows)
        replicated = replicate(model, group, self.device, owners, exchange, apart, self.options.bucket_mb)
        return whole(module=replicated, accumulating=replicated.no_sync, used=used, rows=rows, late=late)

    def _late(self) -> LateParameters | None:
        """Let ZeRO-1's broadcasts overlap with the next forward; None: a step waits for them."""
        if not self.options.late_parameters:
            return None
        units = agreed_units(self.model, self.blocks, self.seen, self.mesh.data_group)
        # The first unit of a lot waits for it; if samples decide which units run, that unit may not run.
        if units.may_differ or not units.modules:
            return None
        megabytes = self.options.bucket_mb
        message = BUCKET_BYTES if megabytes is None else int(megabytes * 2**20)
        lot_bytes = message * self.mesh.size("shard")  # one message from each owner
        return LateParameters(units.modules, lot_bytes, compiled=self.options.compile)

    def _pipeline(self, stages: StagedModel, disk: MappedFile | None, used: UnusedParameters | None) -> Pipeline:
        """The model as a pipeline of this rank's stages; `disk` is where their offloaded parameters lie, if any."""
        return Pipeline(
            cut=stages,
            layout=self.layout,
            mesh=self.mesh,
            device=self.device,
            disk=disk,
            bucket_mb=self.options.bucket_mb,
            undivided=self.norm,
            used=used,
            **self._common(),
        )

    def _common(self) -> dict[str, Any]:
        """Arguments that all kinds of ParallelModel share."""
        return {
            "model": self.model,
            "parts": self.parts,
            "forward_context": self.forward_context,
            "autocast": self.autocast,
            "vocabulary": self.vocabulary,
            "shared_logits": self.shared_logits,
            "host": self.host,
            "buffers": self.buffers,
        }


def _tables(model: nn.Module, choice: Choice, device: torch.device) -> list[Table]:
    """The embeddings with sparse gradient exchange. Raises UserError if it is on and there are none."""
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


def _experts(model: nn.Module, layout: Layout, details: ModelDetails, options: Options) -> list[Experts]:
    """Find the experts that are distributed over the expert axis."""
    if layout.expert == 1:
        return []
    if details.example is None:
        raise _no_example(layout)
    return find_experts(model, details.example, layout, options.expert_plan)


def _no_example(layout: Layout) -> UserError:
    """The error for a session without an `example` with which to trace the forward."""
    return UserError(
        f'layout "{layout}" cuts the model itself, for which its forward must be followed once; use '
        "session.prepare(model, optimizer, example=inputs) with the inputs of a few samples"
    )


def _look(model: nn.Module, layout: Layout, details: ModelDetails) -> Trace | None:
    """Trace the model's forward; None if the layout needs no trace."""
    example, findings = details.example, details.findings or Findings()
    if example is None and layout.cuts_model:
        raise _no_example(layout)
    if example is None or not (layout.cuts_model or layout.zero):
        return None
    if not findings.followed:
        findings.followed.append(follow(model, example))
    if not layout.cuts_model:
        return findings.followed[0]
    if not findings.traces:
        findings.traces.append(trace(model, example, findings.followed[0]))
    check_asking(model, layout, findings.traces[0])
    return findings.traces[0]


def _make_contiguous(model: nn.Module) -> None:
    """Make all parameters contiguous, as slicing, sharding and broadcasts require."""
    for parameter in model.parameters():
        if not parameter.is_contiguous():
            parameter.data = parameter.data.contiguous()
