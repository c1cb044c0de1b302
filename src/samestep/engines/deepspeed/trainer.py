"""The trainer on a DeepSpeed engine: its backward, ZeRO, clipping and optimizer, and the loss of one process."""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from samestep.comm.mesh import Mesh
from samestep.data.loader import MicroBatch, StepBatch, to_device
from samestep.engines.base import Loss, StepReport, Trainer, scale_to_mean
from samestep.engines.deepspeed.gradients import SameOrder, gradients_of
from samestep.engines.deepspeed.initialize import at_work, quietly, without_deprecations
from samestep.errors import UserError, index_errors_explained
from samestep.layout import Layout
from samestep.parallel.exact.buffers import RepeatedForwards, Versions, check_buffers, versions
from samestep.parallel.exact.forward_context import ForwardContext
from samestep.parallel.holdings import Holdings, state_tensors
from samestep.tasks.base import call, sum_and_count

Masters = Mapping[nn.Parameter, Tensor]


def masters_of(engine: Any) -> Masters:
    """The float32 master weight of each parameter, for replicas in 16 bits.

    Empty in float32 and under ZeRO, which shards the master weights (see `whole`).
    """
    low, exact = (getattr(engine.optimizer, name, ()) for name in ("fp16_groups", "fp32_groups"))
    return {own: master for pair in zip(low, exact, strict=False) for own, master in zip(*pair, strict=True)}


def undo_first_step(engine: Any) -> None:
    """Undo the step with zero gradients by which DeepSpeed (0.19) initializes the optimizer state of master weights.

    AdamW decays the weights in it, and would count it in the bias correction of all later steps.
    """
    masters = masters_of(engine)
    with torch.no_grad():
        for parameter, master in masters.items():
            master.copy_(parameter)
    if masters:
        engine.basic_optimizer.state.clear()


def whole_parameters(
    model: nn.Module, package: Any, dtype: torch.dtype, masters: Masters
) -> Iterator[tuple[str, Tensor]]:
    """Every parameter, whole and in `dtype`; every rank must ask."""
    for name, parameter in model.named_parameters():
        with without_deprecations():
            value = whole(masters.get(parameter, parameter), package, dtype)
        yield name, value


def whole_state(model: nn.Module, package: Any, dtype: torch.dtype, masters: Masters) -> dict[str, Tensor]:
    """The whole model's state dict on the CPU of every rank; every rank must ask."""

    def value_of(value: Tensor) -> Tensor:
        if isinstance(value, nn.Parameter):
            return whole(masters.get(value, value), package, dtype)
        return value.detach()

    with without_deprecations():
        return {name: value_of(value).cpu().clone() for name, value in model.state_dict(keep_vars=True).items()}


def whole(parameter: Tensor, package: Any, dtype: torch.dtype) -> Tensor:
    """Gather a parameter that DeepSpeed may have sharded; every rank that has a shard must ask."""
    if parameter.dtype != dtype and parameter.requires_grad and hasattr(parameter, "_hp_mapping"):
        # ZeRO keeps a float32 copy of parameters that are in 16 bits for the forward.
        exact = package.utils.safe_get_full_fp32_param(parameter)
        if exact is not None:
            return exact.detach().to(dtype)
    if not hasattr(parameter, "ds_id"):
        return parameter.detach().to(dtype)
    if parameter.dtype != dtype and parameter.requires_grad:
        return package.utils.safe_get_full_fp32_param(parameter).detach().to(dtype)
    with package.zero.GatheredParameters([parameter]):
        return parameter.detach().clone().to(dtype)


def whole_optimizer_state(parameter: Any, key: str, optimizer: Any, package: Any) -> Tensor:
    """Gather a parameter's optimizer state under `key`; every rank that has a part of it must ask."""
    if parameter in optimizer.state:
        return optimizer.state[parameter][key].detach()
    if hasattr(parameter, "ds_id"):
        return package.utils.safe_get_full_optimizer_state(parameter, key).detach()
    # ZeRO-1 and 2 flatten the parameters of a group, and a rank keeps the state of a part of that.
    values = torch.zeros(parameter.numel(), device=parameter.device)
    mapping = parameter._hp_mapping  # None where all of it is in other ranks' parts
    if mapping is not None:
        (flat,) = optimizer.param_groups[mapping.param_group_index]["params"]
        here, there = mapping.lp_fragment_address, mapping.hp_fragment_address
        values[here.start : here.start + here.numel] = optimizer.state[flat][key][
            there.start : there.start + there.numel
        ]
    dist.all_reduce(values, group=parameter._dp_group)
    return values.view(parameter.shape)


def holdings(engine: Any, layout: Layout) -> Holdings:
    """What this rank holds between two steps; DeepSpeed lets go of the gradients in each."""
    counted: set[int] = set()
    model: nn.Module = engine.module
    parameters = _once((getattr(p, "ds_tensor", p).detach() for p in model.parameters()), counted)
    gradients = _once((p.grad for p in model.parameters() if p.grad is not None), counted)
    state = _once(_optimizer_tensors(engine), counted)
    host: list[Tensor] = []
    if engine.zero_use_cpu_optimizer():  # on disk too: it steps in the host's memory
        host, state = [*gradients, *state], []
        gradients = []
    if layout.offloads_parameters:
        host, parameters = [*host, *parameters], []
    return Holdings(
        parameters=parameters, gradients=gradients, optimizer_state=state, host=host, disk=list(_on_disk(engine))
    )


def _on_disk(engine: Any) -> Iterator[Tensor]:
    """Meta tensors with the sizes of the state that is offloaded to files."""
    swapper = getattr(engine.optimizer, "optimizer_swapper", None)
    if swapper is not None:
        for info in swapper.swap_params_info.values():
            yield torch.empty(info.num_tensors(), info.numel(), dtype=info.dtype(), device="meta")


def _optimizer_tensors(engine: Any) -> Iterator[Tensor]:
    """The optimizer's state, and DeepSpeed's float32 copies of its parameters and gradients."""
    for group in engine.basic_optimizer.param_groups:
        yield from (p.detach() for p in group["params"])
        yield from (p.grad for p in group["params"] if p.grad is not None)
    yield from state_tensors(engine.basic_optimizer)


def _once(tensors: Iterable[Tensor], counted: set[int]) -> list[Tensor]:
    """The tensors whose memory has not been counted yet."""
    new = []
    for tensor in tensors:
        place = tensor.data_ptr()
        if tensor.numel() and place not in counted:
            counted.add(place)
            new.append(tensor)
    return new


class DeepSpeedTrainer(Trainer):
    """Takes steps with a DeepSpeed engine, and saves and loads its checkpoints."""

    def __init__(
        self,
        *,
        engine: Any,
        package: Any,
        model: nn.Module,
        layout: Layout,
        mesh: Mesh,
        device: torch.device,
        forward_context: ForwardContext,
        place: Any = None,  # keeps the folder of what is on disk
        order: SameOrder | None = None,  # where all ranks must run the same layers
    ) -> None:
        self.engine = engine
        self._place = place
        self._order = order
        self.model = model
        self._package = package
        self._layout = layout
        self._mesh = mesh
        self._device = device
        self._forward_context = forward_context
        self._dtype = _compute_dtype(engine)
        self._whole_dtype = torch.float32
        self._gradients = gradients_of(engine, mesh)
        self._masters = masters_of(engine)
        self._buffers_before: Versions | None = None
        self._buffers_checked = False
        self._repeated = RepeatedForwards(engine.module)

    def step(self, batch: StepBatch, loss: Loss) -> StepReport:
        """Backward over the micro-batches, the factor for the count, DeepSpeed's step."""
        if not self.model.training:
            self.engine.train()
        with at_work(self._device), index_errors_explained(f"step {batch.step}", batch.samples):
            totals = self._begin()
            self._backward(batch, loss, totals)
            self._settle(batch, totals)
            return self._update(batch, totals)

    def _begin(self) -> Tensor:
        """Zeros for [loss sum, count, parameters that a rank did not use] over all ranks."""
        self._buffers_before = None if self._buffers_checked else versions(self.engine.module)
        return torch.zeros(3, dtype=torch.float64, device=self._device)

    def _update(self, batch: StepBatch, totals: Tensor) -> StepReport:
        """Let DeepSpeed clip, step the optimizer and advance the schedule."""
        lr = self.engine.get_lr()[0]
        # What DeepSpeed counts samples by, for its monitors. It counts whole batches, and the last may be shorter.
        before = self.engine.global_samples
        self.engine.step()
        self.engine.global_samples = before + batch.global_samples
        return self._report(totals, lr)

    def _report(self, totals: Tensor, lr: float) -> StepReport:
        """Loss over the count of all ranks, and the norm as DeepSpeed took it."""
        norm = self._gradients.norm_after_step()
        return StepReport(
            loss=totals[0] / totals[1],
            grad_norm=torch.as_tensor(norm, dtype=torch.float64, device=self._device),
            lr=lr,
        )

    def _backward(self, batch: StepBatch, loss: Loss, totals: Tensor) -> None:
        """Run forward and backward of all micro-batches, and add this rank's loss sums and counts to `totals`."""
        for number, micro_batch in enumerate(batch.micro_batches, 1):
            last = number == len(batch.micro_batches)
            self.engine.set_gradient_accumulation_boundary(last)
            with self._forward_context.at(micro_batch.moment):
                with self._in_order(training=True), self._repeated.watched() if number > 1 else nullcontext():
                    output = call(self.engine, self._as_computed(micro_batch.batch.inputs))
                term = self._term(output, micro_batch, loss, totals)
            weighed = term * self._scale(batch)
            self._gradients.check_before_backward(weighed, last=last)
            self.engine.backward(self._gradients.scaled(weighed), scale_wrt_gas=False)

    def _in_order(self, *, training: bool) -> AbstractContextManager[None]:
        return nullcontext() if self._order is None else self._order.forward(training=training)

    def _term(self, output: Any, micro_batch: MicroBatch, loss: Loss, totals: Tensor) -> Tensor:
        """The weighted loss sum of a micro-batch; adds it and its count to `totals`."""
        with self._autocast():
            loss_sum, count = sum_and_count(loss(output, micro_batch.batch))
        totals[0] += loss_sum.detach() * micro_batch.weight
        totals[1] += count * micro_batch.weight
        return loss_sum * micro_batch.weight

    def _scale(self, batch: StepBatch) -> float:
        """The factor of a loss sum."""
        return scale_to_mean(self._mesh, batch)

    def _settle(self, batch: StepBatch, totals: Tensor) -> None:
        """Sum the totals over all ranks, and rescale the gradient from sum / samples to sum / count."""
        totals[2] = self._gradients.unused()
        dist.all_reduce(totals, group=self._mesh.loss_group)
        if self._buffers_before is not None:
            self._buffers_checked = True
            self._repeated.check(f"a step of this rank runs {len(batch.micro_batches)} forwards")
            check_buffers(self.engine.module, self._buffers_before, self._mesh.data_group)
        if totals[2]:
            raise UserError(
                f"engine deepspeed: a step left {int(totals[2])} parameters (counted over all ranks) unused, and "
                "ZeRO takes their gradient for zero, by which AdamW still moves them; use layout dp, or a model that "
                "uses all its parameters in every step"
            )
        # A batch without terms (every token masked) has a zero gradient; 0 / 0 would turn the weights into NaN.
        totals[1].clamp_(min=1)
        self._gradients.settle(batch.global_samples / totals[1].item())

    def _autocast(self) -> torch.autocast:
        """Autocast for the loss of a model in 16 bits, so that operators that need float32 run in it."""
        low = self._dtype != torch.float32
        return torch.autocast(self._device.type, self._dtype if low else None, enabled=low)

    def _as_computed(self, inputs: Any) -> Any:
        return inputs if self._dtype == torch.float32 else to_device(inputs, self._device, self._dtype)

    def predict(self, inputs: Any) -> Any:
        """The output in evaluation mode. ZeRO-3 gathers parameters: all ranks call, in the same order."""
        if self.model.training:
            self.engine.eval()
        with torch.no_grad(), at_work(self._device), self._in_order(training=False):
            return call(self.engine.module, self._as_computed(inputs))

    def parameters(self) -> Iterator[tuple[str, Tensor]]:
        return whole_parameters(self.model, self._package, self._whole_dtype, self._masters)

    def optimizer_state(self, keys: Sequence[str]) -> Iterator[tuple[str, str, Tensor]]:
        """(name, key, tensor) of whole parameters, in float32, gathered by DeepSpeed's own functions."""
        optimizer = self.engine.basic_optimizer
        kept = set().union(*(state for state in optimizer.state.values()))
        for name, trained_parameter in self.model.named_parameters():
            parameter = self._masters.get(trained_parameter, trained_parameter)
            for key in keys:
                sharded = hasattr(parameter, "ds_id") or hasattr(parameter, "_hp_mapping")
                stepped = sharded or parameter in optimizer.state
                if not parameter.requires_grad or key not in kept or not stepped:
                    continue
                with without_deprecations():
                    yield name, key, whole_optimizer_state(parameter, key, optimizer, self._package).float()

    def state(self) -> dict[str, Tensor]:
        return whole_state(self.model, self._package, self._whole_dtype, self._masters)

    def holdings(self) -> Holdings:
        return holdings(self.engine, self._layout)

    def save_checkpoint(
        self, folder: str | Path, *, tag: str | None = None, client_state: Mapping[str, Any] | None = None
    ) -> None:
        """Write DeepSpeed's checkpoint into a folder, with whatever else is to come back; every rank must call."""
        with quietly(self._device):
            self.engine.save_checkpoint(str(folder), tag=tag, client_state=dict(client_state or {}))

    def load_checkpoint(self, folder: str | Path, *, tag: str | None = None, trusted: bool = False) -> dict[str, Any]:
        """Go on from a checkpoint: the latest, or the one of a tag. Returns its client state. Every rank must call.

        `trusted`: DeepSpeed may unpickle its files, by which they can run any code in every rank. Raises UserError
        without it, and where there is no checkpoint.
        """
        if not trusted:
            raise UserError(
                f"{folder}: DeepSpeed reads its checkpoints by pickle, so whoever wrote these files can run code in "
                "every rank; use load_checkpoint(..., trusted=True) for files that your own training wrote, or "
                "`samestep checkpoint convert`, which runs none, for the weights of others"
            )
        named = Path(folder) / tag if tag is not None else Path(folder) / "latest"
        if not named.exists():
            raise UserError(
                f"{folder} holds no DeepSpeed checkpoint{f' {tag}' if tag else ''} ({named} is missing); use "
                "a folder that save_checkpoint wrote"
            )
        with quietly(self._device):
            _, client_state = self.engine.load_checkpoint(str(folder), tag=tag)
        return client_state or {}


def _compute_dtype(engine: Any) -> torch.dtype:
    """The dtype in which DeepSpeed runs the model."""
    if engine.bfloat16_enabled():
        return torch.bfloat16
    return torch.float16 if engine.fp16_enabled() else torch.float32


def trained(model: nn.Module) -> Sequence[nn.Parameter]:
    return [parameter for parameter in model.parameters() if parameter.requires_grad]
