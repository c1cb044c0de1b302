"""The published comparison that the default methods are those of: fine-tuning a Chinese BERT on two GPUs."""

from collections.abc import Sequence
from dataclasses import dataclass

from samestep.comparison.words import Words


@dataclass(frozen=True, kw_only=True)
class Published:
    """A row of it, and our methods that do the same; where there are several, the fastest stands beside it."""

    name: Words
    minutes: float
    methods: Sequence[str]
    fault: Words | None = None


_TWICE = Words("evaluated every sample twice", "每个样本评估了两次")

# fmt: off
PUBLISHED = (
    Published(name=Words("single GPU", "单 GPU"), minutes=2.83, methods=("single",)),
    Published(name=Words("DataParallel", "DataParallel"), minutes=2.03, methods=("data-parallel",)),
    Published(name=Words("DDP", "DDP"), minutes=1.41, methods=("ddp-torchrun", "ddp-launch")),
    Published(name=Words("DDP by spawn", "DDP，spawn 启动"), minutes=1.49, methods=("ddp-spawn",)),
    Published(name=Words("spawn + AMP", "spawn + AMP"), minutes=0.63, methods=("ddp-bf16",)),
    Published(name=Words("Horovod", "Horovod"), minutes=5.12, methods=("horovod",),
              fault=Words("did not learn, and was slower than one GPU", "没有学到东西，比单 GPU 还慢")),
    Published(name=Words("DeepSpeed", "DeepSpeed"), minutes=1.01, fault=_TWICE,
              methods=("deepspeed-zero1", "deepspeed-zero2", "deepspeed-zero3")),
    Published(name=Words("Accelerate", "Accelerate"), minutes=1.37, fault=_TWICE,
              methods=("accelerate-ddp", "accelerate-fsdp2")),
)
# fmt: on


def places(values: Sequence[float | None]) -> list[int | None]:
    """The place of each value from the smallest, 1, on; None stays None."""
    known = sorted(value for value in values if value is not None)
    return [None if value is None else known.index(value) + 1 for value in values]
