"""PyTorch's DataParallel: one process whose threads share a batch over the accelerators of this machine."""

import sys
from typing import ClassVar

from torch import nn

from samestep.display.page import Words
from samestep.engines.base import Abilities, Engine, Preparation
from samestep.engines.native.trainer import NativeTrainer
from samestep.engines.precision import Precision
from samestep.engines.setup import TrainerSetup, spread_by_engine
from samestep.errors import UserError
from samestep.launch.device import accelerators
from samestep.parallel.exact.batch_norm import global_batch_norm
from samestep.parallel.exact.buffers import keep_no_cache
from samestep.parallel.exact.dropout import same_dropout
from samestep.parallel.exact.forward_context import ForwardContext
from samestep.parallel.unused_parameters import UnusedParametersAlone
from samestep.torch_internals.modules import AnyBatchNorm


class DataParallel(Engine):
    """Every forward copies the model to each device, cuts the micro-batch, and gathers the outputs on the first.

    The oldest way and the slowest: kept to be compared with. With fewer than two accelerators it runs on one device.
    """

    name = "data-parallel"
    abilities: ClassVar[Abilities] = Abilities(
        about=Words("PyTorch's `nn.DataParallel`", "PyTorch 的 `nn.DataParallel`"),
        axes=frozenset(),
        precisions=frozenset({"fp64", "fp32", "bf16", "fp16"}),
        checkpoints=True,
        complex_parameters=True,
        skips=True,
        own_optimizers=True,
        averages=True,
    )

    def prepare(self, model: nn.Module, how: Preparation) -> NativeTrainer:
        """Wrap the model in nn.DataParallel, unless there are fewer than two accelerators.

        The plain model draws random numbers by sample number, as under other engines. nn.DataParallel splits each
        micro-batch over devices, each of which draws by itself, so dropout differs from one process's.
        """
        keep_no_cache(model)
        devices = accelerators() if how.device.type != "cpu" else 0
        module, forward_context = model, ForwardContext()
        if devices < 2:
            there = f"{devices} accelerator{'' if devices == 1 else 's'}"
            print(
                f"samestep: engine data-parallel: {there} here; it runs on one device, {how.device}", file=sys.stderr
            )
            same_dropout(model, forward_context)
            global_batch_norm(model, how.mesh.data_group, forward_context)  # refuses several micro-batches
        else:
            _check_batch_norm(model, devices)
            module = nn.DataParallel(model)
        in_precision = Precision(how.options.precision, how.device)
        optimizer = how.optimizer_of(model.named_parameters())
        spread_model = spread_by_engine(
            model, how, in_precision, forward_context, module=module, used=UnusedParametersAlone()
        )
        answers_draws = devices < 2  # of several, each device's thread draws for its own part of the batch
        setup = TrainerSetup.of(model, how, spread_model, optimizer, in_precision, answers_draws=answers_draws)
        return NativeTrainer(setup)


def _check_batch_norm(model: nn.Module, devices: int) -> None:
    """Raise UserError: each device's copy would normalise by its own samples."""
    for name, module in model.named_modules():
        if isinstance(module, AnyBatchNorm):
            raise UserError(
                f"engine data-parallel: {name} ({type(module).__name__}) would take its statistics from one device's "
                f"samples, which is another step than one process takes; use layout dp{devices}"
            )
