"""Readout: a step's values on their way from the device to the host."""

from collections.abc import Mapping

import torch

from samestep.engines.base import StepReport


class Readout:
    """The numbers of a report, copied behind the step that computes them.

    To read a tensor, the host waits until the device has done all that it was asked to do by then, which is the next
    step too where a report is read one step late. The copy is asked for before that step is, and reading it waits for
    its own place in the order alone.
    """

    def __init__(self, report: StepReport) -> None:
        self.lr = report.lr
        self.sent = report.sent
        self._names = tuple(report.terms)
        values = [report.loss, report.grad_norm, *report.terms.values()]
        device = report.loss.device
        self._done = None
        if device.type == "cpu":
            self._values = values
            return
        numbers = torch.stack([value.detach().to(device, torch.float64) for value in values])
        there = torch.empty(numbers.shape, dtype=torch.float64, pin_memory=True)
        there.copy_(numbers, non_blocking=True)
        self._values = there.unbind()
        self._done = torch.get_device_module(device).Event()
        self._done.record()

    def values(self) -> tuple[float, float, Mapping[str, float]]:
        """Loss, norm of the gradient, and the loss's terms by name; waits until they are there."""
        if self._done is not None:
            self._done.synchronize()
        loss, grad_norm, *terms = (value.item() for value in self._values)
        return loss, grad_norm, dict(zip(self._names, terms, strict=True))
