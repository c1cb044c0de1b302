"""The state of schedules of the learning rate and of loss scaling."""

from typing import Any

from torch import Tensor
from torch.amp.grad_scaler import GradScaler
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler


def take_step(schedule: LRScheduler, step: int) -> None:
    """Set the learning rates of a step's number, whatever steps were taken before.

    `_step_count` is what PyTorch warns by of a schedule that is stepped before its optimizer.
    """
    schedule.last_epoch = step - 1
    schedule._step_count = step + 1
    schedule.step()


def overflowed(scaler: GradScaler, optimizer: Optimizer) -> dict[Any, Tensor]:
    """By device, 1 if a gradient has overflowed, else 0; the scaler's own dictionary, which its step reads.

    Valid after `unscale_`. A device without gradients is missing.
    """
    return scaler._found_inf_per_device(optimizer)
