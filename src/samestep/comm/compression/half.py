"""bf16 and fp16: gradients are rounded to 16 bits, averaged, and rounded back, while backward still runs.

PyTorch's own hooks do the same; its one for bfloat16 refuses gloo and CPUs, which sum bfloat16 well.
"""

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.futures import Future

from samestep.comm.compression.base import Hook, Method
from samestep.comm.compression.wire import Wire
from samestep.torch_internals.operators import DisableTorchFunction

_DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16}


class Half(Method):
    """Exchanges gradients in 16 bits, bucket by bucket."""

    @classmethod
    def hook(cls, options: Any) -> Hook:
        """The communication hook that DDP calls for each bucket whose gradients are ready."""
        dtype = _DTYPES[options.kind]

        def hook(wire: Wire, bucket: dist.GradBucket) -> Future[Tensor]:  # PyTorch looks at these names
            with DisableTorchFunction():  # under fp64 what is cast to fewer digits would stay float64
                return average_in(wire, bucket, dtype)

        return hook

    def exchange(self) -> bool:
        return True  # the hook has

    def update(self, weight: float) -> None:
        self.replica.optimizer.step()


def average_in(wire: Wire, bucket: dist.GradBucket, dtype: torch.dtype) -> Future[Tensor]:
    """Average a bucket over the ranks in `dtype`.

    The bucket is divided before it is sent, as in PyTorch's hooks, since the sum could overflow.
    """
    buffer = bucket.buffer()
    message = (buffer / wire.ranks).to(dtype)
    work = wire.sum(message, asynchronous=True)
    assert work is not None

    def give_back(_: Future[Any]) -> Tensor:
        return buffer.copy_(message)

    return work.get_future().then(give_back)
