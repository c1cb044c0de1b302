"""The native engine: which layouts and options it takes, and how it spreads a model and its optimizer over ranks."""

from typing import ClassVar, get_args

from torch import nn

from samestep.display.page import Words
from samestep.engines.base import Abilities, Engine, Preparation
from samestep.engines.native.trainer import NativeTrainer
from samestep.engines.precision import Precision, parameter_dtype
from samestep.engines.setup import TrainerSetup, spread_as
from samestep.layout import AttentionOption, Layout, Offload
from samestep.parallel.layout_failure import LayoutFailures
from samestep.parallel.optimizer.spread import spread_optimizer


class Native(Engine):
    """Engine with samestep's own optimizer step, on PyTorch's DDP, FSDP2, ZeRO-1 and pipeline schedules."""

    name = "native"
    abilities: ClassVar[Abilities] = Abilities(
        about=Words("samestep on `torch.distributed`", "samestep，基于 `torch.distributed`"),
        axes=frozenset({"pipeline", "replicate", "shard", "expert", "context", "tensor"}),
        precisions=frozenset({"fp64", "fp32", "bf16", "fp16"}),
        recompute=frozenset({"none", "selective", "full"}),
        offload=frozenset(get_args(Offload)),
        attention=frozenset(get_args(AttentionOption)),
        checkpoints=True,
        batch_buffers=True,
        complex_parameters=True,
        compiles=True,
        chunks_loss=True,
        profiles=True,
        buckets=True,
        shared_memory=True,
        sparse_rows=True,
        shares_replicas=True,
        ordered=True,
        skips=True,
        sends_less=True,
        adapters=True,
        own_optimizers=True,
        averages=True,
        master_weights=True,
        attention_dropout=True,
        gathers=True,
        several_losses=True,
        turns=True,
    )
    trainer_class: type[NativeTrainer] = NativeTrainer

    def can_fill(self, layout: Layout) -> bool:
        """Whether the model may be built on the meta device; `spread` then fills in the parts that a rank holds."""
        # Tensor and expert parallel compare the sliced model's output with the whole model's, which needs its values.
        return layout.tensor == layout.expert == 1 and (layout.zero >= 2 or layout.pipeline > 1)

    def prepare(self, model: nn.Module, how: Preparation) -> NativeTrainer:
        """Spread model and optimizer. Errors of PyTorch are raised as LayoutError with the name of the module."""
        failures = LayoutFailures(model, how.layout)
        with failures.explained():
            return self._prepare(model, how, failures)

    def _prepare(self, model: nn.Module, how: Preparation, failures: LayoutFailures) -> NativeTrainer:
        """Make the trainer that the job's options select: one of three special ones, or the native one."""
        if how.options.communication is not None:
            from samestep.engines.native.less_communication import prepare

            return prepare(model, how, how.options.communication, failures)
        if how.options.virtual_ranks is not None:
            from samestep.engines.native.ordered import prepare as prepare_ordered

            return prepare_ordered(model, how, failures)
        if how.options.share_replicas and how.layout.size > 1:
            from samestep.engines.native.shared_replicas import prepare as prepare_shared

            return prepare_shared(model, how, failures)
        in_precision = Precision(how.options.precision, how.device)
        spread_model = spread_as(model, how, in_precision)
        optimizer = spread_optimizer(
            how.optimizer_of(model.named_parameters()),
            how.layout,
            how.mesh,
            how.device,
            spread_model=spread_model,
            offload_folder=how.options.offload_folder,
            master_dtype=parameter_dtype(how.options.precision) if how.options.master_weights else None,
        )
        setup = TrainerSetup.of(model, how, spread_model, optimizer, in_precision, failures=failures)
        return self.trainer_class(setup)
