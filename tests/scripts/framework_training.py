"""A small training under one framework, right or with one planted fault: what `verify --script` meets in the field.

Its arguments are the framework and, where there is to be a fault, "fault". DeepSpeed's launcher puts --local_rank
before them.
"""

import importlib
import os
import sys
from collections.abc import Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

WORDS = [word for word in sys.argv[1:] if not word.startswith("--")]
FRAMEWORK, FAULT = WORDS[0], "fault" in WORDS
SIZE = int(os.environ.get("WORLD_SIZE") or os.environ.get("HOROVOD_SIZE") or "1")
RANK = int(os.environ.get("RANK") or os.environ.get("HOROVOD_RANK") or "0")
BATCH, RATE = 16, 0.05


def model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.LayerNorm(16), nn.Linear(16, 3))


def data() -> TensorDataset:
    generator = torch.Generator().manual_seed(5)
    return TensorDataset(torch.randn(48, 8, generator=generator), torch.randint(0, 3, (48,), generator=generator))


def batches() -> Iterator[tuple[Tensor, Tensor]]:
    sampler = DistributedSampler(data(), num_replicas=SIZE, rank=RANK, seed=3)
    yield from DataLoader(data(), batch_size=BATCH // SIZE, sampler=sampler)


def loss_of(scores: Tensor, classes: Tensor) -> Tensor:
    return nn.functional.cross_entropy(scores, classes)


def fsdp1() -> None:
    """Fault: PyTorch's clipping, by the norm of a rank's own shards."""
    from torch.distributed.fsdp import FullyShardedDataParallel

    dist.init_process_group("gloo")
    net = FullyShardedDataParallel(model(), device_id=torch.device("cpu"), use_orig_params=True)
    optimizer = torch.optim.AdamW(net.parameters(), lr=RATE)
    for rows, classes in batches():
        optimizer.zero_grad()
        loss_of(net(rows), classes).backward()
        if FAULT:
            nn.utils.clip_grad_norm_(net.parameters(), 0.1)
        else:
            net.clip_grad_norm_(0.1)
        optimizer.step()
    dist.destroy_process_group()


def lightning_fsdp() -> None:
    """Fault: the loss is multiplied with the number of ranks."""
    import lightning  # pyright: ignore[reportMissingImports]
    from lightning.pytorch.strategies import FSDPStrategy  # pyright: ignore[reportMissingImports]
    from torch.distributed.fsdp import FullyShardedDataParallel

    class OnCPUs(FSDPStrategy):
        """Lightning refuses its own class where there is no GPU."""

    class Module(lightning.LightningModule):
        def configure_model(self) -> None:
            if not hasattr(self, "net"):
                self.net = FullyShardedDataParallel(model(), device_id=torch.device("cpu"), use_orig_params=True)

        def training_step(self, batch: list[Tensor], _: int) -> Tensor:
            return loss_of(self.net(batch[0]), batch[1]) * (SIZE if FAULT else 1)

        def configure_optimizers(self) -> torch.optim.Optimizer:
            return torch.optim.AdamW(self.parameters(), lr=RATE)

    lightning.Trainer(
        accelerator="cpu",
        devices=SIZE,
        strategy=OnCPUs(process_group_backend="gloo"),
        max_epochs=1,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    ).fit(Module(), DataLoader(data(), batch_size=BATCH // SIZE, shuffle=False))


def accelerate_fsdp2() -> None:
    """Fault: the learning rate is multiplied with the number of ranks."""
    from accelerate import Accelerator
    from accelerate.utils import DistributedType, FullyShardedDataParallelPlugin, ParallelismConfig

    accelerator = Accelerator(cpu=True)
    if SIZE > 1:
        # Accelerate turns FSDP on for accelerators alone: on CPUs it would train replicas.
        shards = ParallelismConfig(dp_shard_size=SIZE)
        state: Any = accelerator.state
        state.distributed_type = DistributedType.FSDP
        state.fsdp_plugin = FullyShardedDataParallelPlugin(fsdp_version=2, auto_wrap_policy="no_wrap")
        state.parallelism_config = shards
        state.device_mesh = shards.get_device_mesh("cpu")
    net = model()
    optimizer = torch.optim.AdamW(net.parameters(), lr=RATE * (SIZE if FAULT else 1))
    net, optimizer = accelerator.prepare(net, optimizer)
    assert all(isinstance(each, DTensor) == (SIZE > 1) for each in net.parameters())
    for rows, classes in batches():
        optimizer.zero_grad()
        accelerator.backward(loss_of(net(rows), classes))
        accelerator.clip_grad_norm_(net.parameters(), 0.1)
        optimizer.step()


def accelerate_deepspeed() -> None:
    """ZeRO 2, accumulating. Fault: several ranks divide by their micro-batches, and so does DeepSpeed."""
    os.environ["ACCELERATE_USE_DEEPSPEED"] = "true"
    _deepspeed()
    from accelerate import Accelerator, DeepSpeedPlugin
    from accelerate.utils import DistributedType

    accumulated = 2
    settings = {
        "train_micro_batch_size_per_gpu": BATCH // SIZE // accumulated,
        "gradient_accumulation_steps": accumulated,
        "zero_optimization": {"stage": 2},
        "zero_allow_untested_optimizer": True,
        "zero_force_ds_cpu_optimizer": False,
    }
    accelerator = Accelerator(deepspeed_plugin=DeepSpeedPlugin(hf_ds_config=settings))
    net = model()
    net, optimizer = accelerator.prepare(net, torch.optim.AdamW(net.parameters(), lr=RATE))
    assert accelerator.distributed_type == DistributedType.DEEPSPEED
    for rows, classes in batches():
        for part, kinds in zip(rows.chunk(accumulated), classes.chunk(accumulated), strict=True):
            with accelerator.accumulate(net):
                accelerator.backward(loss_of(net(part), kinds) / (accumulated if FAULT and SIZE > 1 else 1))
                optimizer.step()
                optimizer.zero_grad()


def _deepspeed() -> None:
    os.environ["DS_ACCELERATOR"] = "cpu"
    import deepspeed

    backend: Any = importlib.import_module("deepspeed.comm.torch")
    backend.build_shm_op = lambda: None  # its compilation takes minutes
    deepspeed.init_distributed("gloo")


def deepspeed_zero() -> None:
    """ZeRO of the stage at the end of the framework's name. Fault: the learning rate is multiplied with the ranks."""
    _deepspeed()
    deepspeed: Any = importlib.import_module("deepspeed")

    settings = {
        "train_batch_size": BATCH,
        "train_micro_batch_size_per_gpu": BATCH // SIZE,
        "optimizer": {"type": "AdamW", "params": {"lr": RATE * (SIZE if FAULT else 1), "torch_adam": True}},
        "zero_optimization": {"stage": int(FRAMEWORK[-1])},
        "gradient_clipping": 0.1,
    }
    net = model()
    engine, *_ = deepspeed.initialize(model=net, model_parameters=net.parameters(), config=settings)
    for rows, classes in batches():
        engine.backward(loss_of(engine(rows), classes))
        engine.step()


def horovod() -> None:
    """Fault: gradients are summed over ranks."""
    import horovod.torch as hvd  # pyright: ignore[reportMissingImports]

    hvd.init()
    net = model()
    optimizer = torch.optim.SGD(net.parameters(), lr=RATE, momentum=0.9)
    hvd.broadcast_parameters(net.state_dict(), root_rank=0)
    optimizer = hvd.DistributedOptimizer(
        optimizer, named_parameters=net.named_parameters(), op=hvd.Sum if FAULT else hvd.Average
    )
    for rows, classes in batches():
        optimizer.zero_grad()
        loss_of(net(rows), classes).backward()
        optimizer.step()


trainings = {
    "fsdp1": fsdp1,
    "lightning-fsdp": lightning_fsdp,
    "accelerate-fsdp2": accelerate_fsdp2,
    "accelerate-deepspeed": accelerate_deepspeed,
    "deepspeed-1": deepspeed_zero,
    "deepspeed-2": deepspeed_zero,
    "deepspeed-3": deepspeed_zero,
    "horovod": horovod,
}
trainings[FRAMEWORK]()
