"""An engine that writes down, rank by rank, what nobody sees from outside."""

from pathlib import Path

import torch
import torch.distributed as dist
from safetensors.torch import save_file
from torch import Tensor, nn
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook
from torch.nn.parallel import DistributedDataParallel

from samestep.engines.base import Preparation
from samestep.engines.native.engine import Native
from samestep.engines.native.trainer import NativeTrainer


class Watching(Native):
    """Writes each rank's first weights, its threads, and a dot for each message of gradients that it sends."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def prepare(self, model: nn.Module, how: Preparation) -> NativeTrainer:
        rank = dist.get_rank()
        self.folder.mkdir(parents=True, exist_ok=True)
        # Before the model is spread, since DistributedDataParallel sends rank 0's weights to all.
        save_file(model.state_dict(), self.folder / f"weights-{rank}.safetensors")
        (self.folder / f"threads-{rank}").write_text(str(torch.get_num_threads()), encoding="utf-8")
        trainer = super().prepare(model, how)
        replicated = getattr(trainer._spread, "module", None)
        if isinstance(replicated, DistributedDataParallel):
            replicated.register_comm_hook(self.folder / f"messages-{rank}", _send)
        return trainer


def _send(file: Path, bucket: dist.GradBucket) -> torch.futures.Future[Tensor]:
    with file.open("a", encoding="utf-8") as messages:
        messages.write(".")
    return allreduce_hook(None, bucket)  # pyright: ignore[reportArgumentType]  (None: all ranks)
