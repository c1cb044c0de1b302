"""Pipeline replicas: overlap the averaging of gradients over replicas with the backwards of the last micro-batches.

A parameter's gradient is final when the last backward of the last stage that uses it has reached it. Parameters are
in buckets, stage by stage in the order in which backward reaches them, and a bucket is sent as soon as it and all
before it are final, so that every replica sends the same messages in the same order. Gradients that are not final
after their stage's last backward, since no sample used the parameter, are sent then.

Within a backward a gradient is final after one accumulation. Parameters with several accumulations in the first step
(a model's own checkpoint with use_reentrant=True runs backwards within backward) wait for the end of the backward,
and so do all parameters in the first step.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import nn

from samestep.comm.mesh import Mesh
from samestep.comm.messages import largest
from samestep.parallel.pipeline.schedule import Action
from samestep.parallel.sharding import GradientMessage
from samestep.parallel.zero1 import BUCKET_BYTES, Owners, buckets
from samestep.torch_internals import foreach


@dataclass(kw_only=True)
class _Bucket:
    """Parameters whose gradients are sent together, in one message for each dtype; final after the same backward."""

    parameters: Sequence[nn.Parameter]
    stage: int
    missing: set[nn.Parameter]  # not final yet in this step


class EarlyGradients:
    """Averages one rank's gradients over its replicas during a step.

    All replicas of a stage (ranks of one pipeline coordinate along the data axes) call `begin`, `before`, `after` and
    `finish` with the same actions, so their buckets, and hence their messages, are the same. They may differ in
    unused parameters, for which a rank sends zeros; `finish` then finds out whether any rank used one.
    """

    def __init__(
        self,
        parameters: Sequence[nn.Parameter],
        of_stages: Mapping[int, Sequence[nn.Parameter]],
        *,
        mesh: Mesh,
        owners: Owners | None,
        bucket_mb: float | None,
    ) -> None:
        """`parameters`: whose gradients are averaged. `of_stages`: the parameters that each stage of this rank uses.

        `owners`: given under ZeRO-1, where gradients are reduced to one rank.
        """
        self._parameters = [parameter for parameter in parameters if parameter.requires_grad]
        self._of_stages = of_stages
        self._mesh = mesh
        self._owners = owners
        self._bytes = BUCKET_BYTES if bucket_mb is None else int(bucket_mb * 2**20)
        self._ends: dict[int, int] = {}  # number of the last backward of each stage, in the order of actions
        self._order: tuple[Action, ...] = ()
        self._buckets: list[_Bucket] = []
        self._next = 0  # the index of the first bucket that is not sent
        self._of: dict[nn.Parameter, _Bucket] = {}
        self._running: int | None = None  # the stage whose last backward is running
        self._times: dict[nn.Parameter, int] = {}  # number of accumulations in the first step's last backward
        self._late: set[nn.Parameter] | None = None  # parameters with more than one; None: not known yet
        self._unused: set[nn.Parameter] = set()  # on this rank, in this step
        self._sent: list[GradientMessage] = []  # pending messages, in the order of sending
        for parameter in self._parameters:
            parameter.register_post_accumulate_grad_hook(self._added)

    def begin(self, actions: Sequence[Action]) -> None:
        """Prepare a step with these actions on this rank."""
        if self._order != tuple(actions):
            self._order = tuple(actions)
            self._plan(actions)
        self._next, self._unused = 0, set()
        for bucket in self._buckets:
            bucket.missing = set(bucket.parameters)

    def before(self, number: int, action: Action) -> None:
        """Call before running action `number`."""
        whole = action.kind == "B"  # a separate backward of weights accumulates without hooks
        self._running = action.stage if whole and self._ends.get(action.stage) == number else None

    def after(self, number: int, action: Action) -> None:
        """Call after running action `number`; if it was its stage's last backward, all its gradients are final."""
        self._running = None
        if self._ends.get(action.stage) == number:
            for bucket in self._buckets:
                if bucket.stage == action.stage:
                    bucket.missing = set()
            self._send_what_is_ready()

    def finish(self) -> None:
        """Wait for the sums and divide them; parameters that no rank used get `grad=None`."""
        trained = [parameter for bucket in self._buckets for parameter in bucket.parameters]
        flags = [parameter not in self._unused for parameter in trained]
        if self._late is None:
            flags += [self._times.get(parameter, 0) > 1 for parameter in trained]
        flags = largest(flags, self._mesh.data_group, self._mesh.grid.device_type)
        used, often = flags[: len(trained)], flags[len(trained) :]
        for message in self._sent:
            message.put_back()
        self._sent = []
        if self._owners is not None:
            self._owners.settle()
        for parameter, by_any in zip(trained, used, strict=True):
            if not by_any:
                parameter.grad = None
        if self._owners is not None:
            self._owners.sum_replicas(trained)
        else:
            gradients = [parameter.grad for parameter in trained if parameter.grad is not None]
            if gradients:
                foreach.div_(gradients, self._mesh.data_place.of)
        if self._late is None:
            self._late = {parameter for parameter, more in zip(trained, often, strict=True) if more}

    def _plan(self, actions: Sequence[Action]) -> None:
        """Find each stage's last backward, and assign parameters to buckets."""
        self._ends = {action.stage: number for number, action in enumerate(actions) if action.kind != "F"}
        # In the order in which the stages of this rank finish.
        stages = sorted(self._ends, key=lambda stage: self._ends[stage])
        stage_of = dict.fromkeys(self._parameters, stages[-1])  # also for parameters that no stage uses
        for stage in stages:  # a parameter belongs to the last stage that uses it
            stage_of.update((p, stage) for p in self._of_stages[stage] if p in stage_of)
        self._buckets = []
        for stage in stages:
            # Reversed: backward reaches the last parameters first.
            own = [parameter for parameter in reversed(self._parameters) if stage_of[parameter] == stage]
            self._buckets += [
                _Bucket(parameters=some, stage=stage, missing=set()) for some in buckets(own, self._bytes)
            ]
        self._of = {parameter: bucket for bucket in self._buckets for parameter in bucket.parameters}

    def _added(self, parameter: nn.Parameter) -> None:
        """Hook after a gradient was accumulated."""
        if self._running is None:
            return
        bucket = self._of[parameter]
        if bucket.stage != self._running:
            return
        if self._late is None:
            self._times[parameter] = self._times.get(parameter, 0) + 1
        elif parameter not in self._late:
            if not bucket.missing:
                raise RuntimeError(
                    "a gradient was added to after it was sent: in the first step one backward added to it once, and "
                    "now more often; use a layout without pp, or torch.utils.checkpoint with use_reentrant=False"
                )
            bucket.missing.discard(parameter)
            self._send_what_is_ready()

    def _send_what_is_ready(self) -> None:
        """Send the final buckets in order, up to the first one that isn't final."""
        while self._next < len(self._buckets) and not self._buckets[self._next].missing:
            self._send(self._buckets[self._next].parameters)
            self._next += 1
        # Completed messages are copied back, so that few are held at a time.
        while self._sent and self._sent[0].work.is_completed():
            self._sent.pop(0).put_back()

    def _send(self, parameters: Sequence[nn.Parameter]) -> None:
        """Start to reduce a bucket's gradients: by an all-reduce, or under ZeRO-1 to their owners."""
        self._unused |= {parameter for parameter in parameters if parameter.grad is None}
        if self._owners is None:
            group, device_type = self._mesh.data_group, self._mesh.grid.device_type
            self._sent += [GradientMessage.send(some, group, device_type) for some in _by_dtype(parameters)]
            return
        gradients = []
        for parameter in parameters:
            if parameter.grad is None:
                parameter.grad = torch.zeros_like(parameter)
            gradients.append(parameter.grad.div_(self._mesh.data_place.of))
        self._owners.send(parameters, gradients)


def _by_dtype(parameters: Iterable[nn.Parameter]) -> list[list[nn.Parameter]]:
    by_dtype: dict[torch.dtype, list[nn.Parameter]] = {}
    for parameter in parameters:
        by_dtype.setdefault(parameter.dtype, []).append(parameter)
    return list(by_dtype.values())
