"""The recorder of one rank: notes what went into the model, the loss, the gradients, and what the optimizer made.

It changes nothing of the run but what its settings ask for: it draws no random number, sends nothing to other ranks
and handles no error. What it notes of a step stands in one event, written when the step is over.
"""

import fnmatch
import math
import threading
import weakref
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from samestep.errors import users_line_here
from samestep.recording import shards
from samestep.recording.activations import Activations
from samestep.recording.calls import Call, ModelCalls
from samestep.recording.samples import address_of, named_tensors, random_state, rows_of
from samestep.recording.store import RecordWriter
from samestep.script_proof import children, interception
from samestep.script_proof.batches import Batches
from samestep.script_proof.devices import place_outside
from samestep.script_proof.draws import Draws, Now, rank_folders
from samestep.script_proof.fetching import Fetching
from samestep.script_proof.given import GivenBatches
from samestep.script_proof.halves import Halves
from samestep.script_proof.held import Changes, HeldWeights
from samestep.script_proof.own_gradients import STEPS, OwnGradients
from samestep.script_proof.settings import RecordSettings
from samestep.script_proof.states import states_of
from samestep.torch_internals.sharded import DTensor, local_part
from samestep.torch_internals.tensors import version_of


class RecordingEnd(SystemExit):
    """Raised after the last recorded step; derives from SystemExit, so that error handlers let it pass."""


class ScriptRecorder:
    """Listens to the functions of `interception`, and writes what a rank does."""

    def __init__(
        self,
        settings: RecordSettings,
        *,
        rank: int,
        world_size: int,
        follow: Callable[..., Call],
        place: str | None = None,
    ) -> None:
        """`follow`: makes of what a process is to call what installs a recorder there first."""
        self._follow = follow
        self._settings = settings
        self._is_child = place is not None
        self._writer = RecordWriter(Path(settings.folder) / (place if place is not None else f"rank-{rank}"))
        self._thread = threading.get_ident()
        self._roots: dict[str, nn.Module] = {}  # prefix of names -> model that was called
        self._sharers: dict[str, int] = {}  # model -> number of ranks that train on one sample together
        self._optimizers: list[Any] = []
        self._counts: list[int] = []  # steps of each optimizer
        self._stepping: list[Any] = []  # optimizers with a step in progress, nested
        self._calls = ModelCalls(self._enter, self._leave)
        self._halves = Halves(self._halved)
        self._held, self._changes = HeldWeights(), Changes()
        self._own = OwnGradients()
        self._evaluating = False  # whether the last forward was one of an evaluation
        self._scaler: Any = None  # the last one of gradients that stepped
        self._forward: dict[str, Any] | None = None  # the training forward that was called last
        self._in_backward = False
        self._step = _Noted()
        self._seen = 0  # batches that DataLoaders gave
        followed = Path(settings.follow) if settings.follow is not None else None
        self._fetching = Fetching(self._writer)
        self._given = GivenBatches()
        self._batches = Batches(
            self._writer,
            from_run=followed,
            times=settings.times,
            made=settings.widened,
            number_of=self._fetching.number_of,
            together=settings.together,
        )
        redrawn = Path(settings.redraw) if settings.redraw is not None else None
        together = settings.together or (len(rank_folders(redrawn)) if redrawn is not None else 1)
        self._draws = Draws(self._writer, from_run=redrawn, together=together, notes=settings.draws)
        self._processes = 0
        self._buffers: dict[str, tuple[int, int, dict[str, Any]]] = {}
        self._moved = False  # whether the variant's change was made
        self._made: list[weakref.ref[Tensor]] = []  # weak references to what models returned
        self._placed: set[str] = set()
        self._writer.event("start", rank=rank, world_size=world_size, variant=settings.variant)

    def begin(self, place: str) -> None:
        """Begin anew in another folder: in a fork, where the functions that are listened to call this object."""
        self.__init__(self._settings, rank=0, world_size=1, follow=self._follow, place=place)

    def install(self) -> None:
        """From here on the script is noted."""
        interception.install(self, dropout=self._settings.dropout)

    def end(self, how: str) -> None:
        """Write how the script ended."""
        self._writer.event("end", how=how, processes=self._processes, batches=self._seen, open=self._step.forwards)
        self._writer.close()

    def _place(self, what: str) -> None:
        """The script's line of the first call of a kind: there a fault of it is shown."""
        if what in self._placed:
            return
        self._placed.add(what)
        if (place := users_line_here()) is not None:
            self._writer.event("place", what=what, file=place[0], line=place[1])

    # Forward

    def module_called(self, call: Call, module: nn.Module, args: Any, kwargs: Any) -> Any:
        """A module's forward: noted if it is the outermost of the script's own thread, outside of backward."""
        if self._in_backward or self._stepping_without_closure() or threading.get_ident() != self._thread:
            return call(module, *args, **kwargs)
        if self._settings.variant == "halves":
            return self._calls.called(partial(self._in_halves, call), module, args, kwargs)
        return self._calls.called(call, module, args, kwargs)

    def _in_halves(self, call: Call, module: nn.Module, *args: Any, **kwargs: Any) -> Any:
        return self._halves.called(call, module, args, kwargs)

    def _halved(self) -> None:
        """Record, once, that a forward was split in two halves."""
        if not self._moved:
            self._moved = True
            self._writer.event("halved")

    def _stepping_without_closure(self) -> bool:
        return bool(self._stepping) and not self._step.in_closure

    def _enter(self, module: nn.Module, args: Any, kwargs: Any) -> bool:
        """Record the start of a forward; a module without parameters is no model."""
        if next(module.parameters(), None) is None:
            return False
        root = self._root(module)
        made = {address_of(tensor) for reference in self._made if (tensor := reference()) is not None} - {None}
        rows = rows_of(args, kwargs, made)
        # A wrapper may be in another mode than the wrapped model.
        training = torch.is_grad_enabled() and shards.unwrapped(module).training
        noted = {
            "model": root,
            "batch": rows.batch if rows else None,
            "rows": {**(rows.hashes if rows else {}), **self._given.columns(rows, training=training)},
            "counts": dict(rows.counts) if rows else {},
            "shapes": dict(rows.shapes) if rows else {},
            "sharers": self._sharers.setdefault(root, shards.ranks_of_a_sample(module)),
        }
        self._place("forward" if training else "evaluation")
        if not training:
            self._writer.event("evaluation", after=sum(self._counts), **noted)
            self._forward = None
            self._evaluating = True
            self._batches.evaluated()
            return True
        self._batches.trained()
        self._evaluating = False
        self._disturb(module)
        if self._settings.ranks > 1 and not any(self._counts):
            self._own.listen(shards.unwrapped(module))
        self._halves.begin(module, rows.batch if rows else 0)
        noted["random"] = random_state()
        self._step.forwards.append(noted)
        self._forward = noted
        self._step.targets = 0
        if rows is not None and self._whole_step():
            self._calls.activations = Activations(module, root, rows.batch)
        return True

    def _leave(self, result: Any) -> None:
        """Record the end of a forward: its modules' outputs and its results."""
        self._made = [reference for reference in self._made if reference() is not None]
        self._made += [weakref.ref(value) for _, value in named_tensors(result)]
        if self._forward is not None:
            _note_use(self._forward, result)
        activations = self._calls.take_activations()
        if activations is None:
            return
        forward = self._step.forwards[-1]
        forward["activations"] = activations
        forward["returned_loss"] = next(
            (
                value.detach().float().item()
                for name, value in named_tensors(result, depth=1)
                if name == "loss" and value.numel() == 1
            ),
            None,
        )

    def _root(self, module: nn.Module) -> str:
        """Return the prefix of a model's names; a wrapper shares that of its model."""
        inner = shards.unwrapped(module)
        for name, root in self._roots.items():
            if root is module or shards.unwrapped(root) is inner:
                return name
        same = [name for name in self._roots if name.partition("#")[0] == type(inner).__name__]
        name = type(inner).__name__ + (f"#{len(same) + 1}" if same else "")
        self._roots[name] = module
        if not self._settings.dropout:
            self._without_recurrent_dropout(module)
        return name

    def _without_recurrent_dropout(self, module: nn.Module) -> None:
        """That of LSTM and its like is applied in C++, past the functions that are listened to."""
        for submodule in module.modules():
            if isinstance(submodule, nn.RNNBase) and submodule.dropout > 0:
                submodule.dropout = 0.0

    def _named(self) -> dict[str, nn.Module]:
        """The models by what their parameters' names begin with: nothing where there is one."""
        if len(self._roots) == 1:
            return {"": next(iter(self._roots.values()))}
        return dict(self._roots)

    def _disturb(self, module: nn.Module) -> None:
        """Perturb the initial weights to measure noise, if no batch could be reversed."""
        if self._moved or self._settings.variant in ("as-is", "halves"):
            return
        if self._settings.variant == "moved" or not self._seen:
            self._moved = True
            shards.moved_by_one_unit(list(module.parameters()))
            self._writer.event("moved")

    def loader_length(self, loader: Any, value: int) -> int:
        return self._batches.length(loader, value)

    def loader_made(self, loader: Any) -> None:
        self._place("samples")
        self._batches.loader_made(loader)

    def iterator_made(self, indices: Any, loader: Any) -> Any:
        return self._batches.iterator_made(indices, loader)

    def batch_seen(self, indices: Any, batch: Any) -> Any:
        """A DataLoader's batch on its way to the script, whose rows one variant turns round."""
        self._seen += 1
        samples = self._batches.given(indices)
        turned = reversed_rows(batch) if self._settings.variant == "reversed" else batch
        if samples is not None:
            self._given.add(samples if turned is batch else samples[::-1], turned)
        return turned

    def exhausted(self) -> None:
        if not self._evaluating:
            self._writer.event("exhausted", after=sum(self._counts))

    def emptied(self, module: nn.Module) -> None:
        """A module has memory that nothing was written to: any numbers may stand there, so those that show it."""
        self._writer.event("emptied")
        with torch.no_grad():
            for value in (*module.parameters(), *module.buffers()):
                if value.is_floating_point() and not value.is_meta:
                    local_part(value).fill_(math.nan)

    def pass_begun(self, dataset: Any) -> None:
        self._fetching.begun(dataset)

    def fetcher_made(self) -> None:
        self._fetching.fetcher_made()

    def sample(self, dataset: Any, number: Any, get: Call) -> Any:
        return self._fetching.sample(dataset, number, get)

    def drawn(self, name: str, result: Any) -> None:
        """The script has drawn random numbers, outside of a data set's samples."""
        if self._fetching.inside or threading.get_ident() != self._thread:
            return
        backwards = len(self._step.losses) - self._in_backward
        training = bool(self._seen or self._roots)
        now = Now(step=sum(self._counts), backwards=backwards, in_backward=self._in_backward, training=training)
        self._draws.drawn(name, result, now)

    def masked(self) -> None:
        """Numbers were dropped by a mask that no draw shows."""
        self._writer.event("masked", after=sum(self._counts))

    def dropout_seen(self) -> None:
        if self._calls.inside and not self._in_backward:
            self._step.dropout = True

    def targets_seen(self, count: float) -> None:
        """So many targets count in a loss: what its mean divides by."""
        if not self._in_backward and torch.is_grad_enabled():
            self._step.targets += count

    def sent(self, value: Any) -> None:
        """Record that a forward communicates: its ranks may share the same samples; and numbers of an evaluation."""
        if self._evaluating:
            small = isinstance(value, Tensor) and not isinstance(value, DTensor) and value.numel() <= _FEW
            self._writer.event("reduced", after=sum(self._counts), values=_few(value) if small else [])
        if self._calls.inside and not self._in_backward and self._step.forwards:
            self._step.forwards[-1]["sends"] = True

    # Backward and clipping

    def backward_called(self, call: Call, tensors: Any, args: Any, kwargs: Any) -> Any:
        """A backward: its losses and the targets since the last one."""
        self._place("gradient")
        roots = [tensors] if isinstance(tensors, Tensor) else list(tensors)
        values = [_number(root) for root in roots]
        step = self._step
        step.losses.append({"value": math.fsum(values), "targets": step.targets, "after": len(step.forwards)})
        step.targets = 0
        self._in_backward = True
        try:
            return call(tensors, *args, **kwargs)
        finally:
            self._in_backward = False
            if not self._counts:
                self._note_opened()

    def _note_opened(self) -> None:
        """A backward before any optimizer has stepped: it may be that none ever does on this rank."""
        losses = self._step.losses
        begun = losses[-2]["after"] if len(losses) > 1 else 0
        self._writer.event("opened", forwards=self._step.forwards[begun:], loss=losses[-1])

    def clip_called(self, call: Call, parameters: Any, limit: Any, args: Any, kwargs: Any) -> Any:
        """A clip: the norm before it, and the limit."""
        self._place("clip")
        norm = call(parameters, limit, *args, **kwargs)
        told = isinstance(norm, Tensor) and not isinstance(norm, DTensor)  # a rank alone can't add a DTensor up
        self._step.clips.append(
            {"norm": _number(norm) if told else None, "limit": float(limit), "after": len(self._step.losses)}
        )
        return norm

    # The optimizer

    def before_step(self, optimizer: Any, args: Any, kwargs: Any) -> Any:
        """An optimizer's step begins: gradients are noted before it changes them. Inner steps don't count.

        But for an optimizer that sums over ranks in its step: its gradients are noted as the step inside begins.
        """
        self._stepping.append(optimizer)
        if len(self._stepping) > 1:
            if len(self._stepping) == 2 and optimizer is self._stepping[0] and _sums_in_step(optimizer):
                self._note_gradients(optimizer)
            return None
        self._place("step")
        if not any(other is optimizer for other in self._optimizers):
            self._optimizers.append(optimizer)
            self._counts.append(0)
        # The first argument is the optimizer itself.
        closure = kwargs.get("closure", args[1] if len(args) > 1 else None)
        if _sums_in_step(optimizer):
            return None
        if closure is None:
            self._note_gradients(optimizer)
            return None
        return self._with_closure(optimizer, closure, args, kwargs)

    def _with_closure(self, optimizer: Any, closure: Call, args: Any, kwargs: Any) -> tuple[Any, Any]:
        """The same arguments, with a closure after which the gradients are there; its first call is noted."""

        def noted() -> Any:
            self._step.in_closure = True
            try:
                result = closure()
            finally:
                self._step.in_closure = False
            if self._step.tensors is None:
                self._note_gradients(optimizer)
            return result

        if "closure" in kwargs:
            return args, {**kwargs, "closure": noted}
        return (*args[:1], noted, *args[2:]), kwargs

    def _note_gradients(self, optimizer: Any) -> None:
        """Gradients, before the first step also weights, and the groups' settings."""
        step, number = self._step, self._number(optimizer)
        step.parts = shards.parts_of(self._named())
        step.groups = [self._group(number, group, at) for at, group in enumerate(optimizer.param_groups)]
        step.tensors = {}
        step.scale = self._scaler.get_scale() if self._scaler is not None else None
        if not self._whole_step():
            return
        self._note_held(optimizer)
        first = self._counts[number] == 0
        for parameter, parts in self._parameters(optimizer):
            for part in parts:
                # Later those that the script has changed since the last step, such as to the ranks' average.
                if first or part.name in step.changed:
                    self._add("before", part, parameter)
                if parameter.grad is not None:
                    self._add("gradient", part, parameter.grad)
                if (own := self._own.of(parameter)) is not None:
                    self._add("own", part, own)

    def _note_held(self, optimizer: Any) -> None:
        """Copies of the weights that no optimizer has, and weights that were changed since the last step."""
        assert self._step.tensors is not None
        named = [(part.name, parameter) for parameter, parts in self._parameters(optimizer) for part in parts]
        self._step.changed = self._changes.since(named)
        if not self._held.looks(sum(self._counts)):
            return
        for tensor in self._held.find(self._named(), self._optimizers):
            place = {"name": tensor.name, "whole": list(tensor.value.shape), "start": None, "offset": None}
            self._step.tensors.setdefault("held", []).append({**place, **self._writer.tensor(tensor.value)})

    def scaled(self, scaler: Any) -> None:
        """A scaler of gradients lets an optimizer step."""
        self._scaler = scaler

    def after_step(self, optimizer: Any, args: Any, kwargs: Any) -> None:
        """A step has ended: weights and buffers, one event. Raises RecordingEnd after the last step asked for."""
        self._stepping.pop()
        if self._stepping:
            return
        step, number = self._step, self._number(optimizer)
        if self._ended():  # the script has handled what stops it, and goes on
            raise RecordingEnd(0)
        if step.tensors is None:  # a closure that was never called
            self._note_gradients(optimizer)
        if self._whole_step():
            for parameter, parts in self._parameters(optimizer):
                for part in parts:
                    self._add("after", part, parameter)
            self._note_buffers()
            self._note_states()
            self._changes.noted([parameter for parameter, _ in self._parameters(optimizer)])
        self._counts[number] += 1
        self._own.zeroed()
        if sum(self._counts) >= STEPS:
            self._own.stop()
        self._writer.event("step", **step.to_json(), optimizer=number, number=self._counts[number])
        self._step = _Noted()
        if number == 0 and self._ended():
            raise RecordingEnd(0)

    def _ended(self) -> bool:
        """Whether the last step that is to be noted was taken."""
        return self._settings.steps is not None and self._counts[0] >= self._settings.steps

    def zeroed(self) -> None:
        """Gradients were set to zero: those of earlier forwards are lost, if no step has used them."""
        if not self._stepping:
            self._own.zeroed()
            for event in (*self._step.forwards, *self._step.losses):
                if event.get("used", True):  # a backward has reached it
                    event["zeroed"] = True

    def _number(self, optimizer: Any) -> int:
        return next(number for number, other in enumerate(self._optimizers) if other is optimizer)

    def _whole_step(self) -> bool:
        """Whether the tensors of this step are written."""
        return (self._counts[0] if self._counts else 0) % self._settings.every == 0

    def _parameters(self, optimizer: Any) -> Iterator[tuple[Tensor, list[shards.TensorPart]]]:
        """The optimizer's parameters, each with the parts of the user's parameters that it holds."""
        number = self._number(optimizer)
        for at, group in enumerate(optimizer.param_groups):
            for place, parameter in enumerate(group["params"]):
                yield parameter, self._parts(number, at, place, parameter)

    def _parts(self, number: int, group: int, place: int, parameter: Tensor) -> list[shards.TensorPart]:
        """One in no model that was called has the name of its place in the optimizer."""
        parts = self._step.parts.get(id(parameter))
        name = f"optimizer{number}.group{group}.{place}"
        return parts if parts is not None else [shards.TensorPart(name=name, shape=tuple(parameter.shape))]

    def _group(self, number: int, group: Mapping[str, Any], at: int) -> dict[str, Any]:
        """The names in a group and its settings."""
        names = [
            part.name
            for place, parameter in enumerate(group["params"])
            for part in self._parts(number, at, place, parameter)
        ]
        return {"names": names, "options": dict(_options(group))}

    def _add(self, kind: str, part: shards.TensorPart, tensor: Tensor) -> None:
        """Record a tensor's values, with their place in the whole tensor."""
        if self._settings.modules is not None and not fnmatch.fnmatch(part.name, self._settings.modules):
            return
        assert self._step.tensors is not None
        place = {**part.to_json(), **shards.still_to_be_reduced(tensor), **self._writer.tensor(part.of(tensor))}
        self._step.tensors.setdefault(kind, []).append(place)

    def _note_buffers(self) -> None:
        """Those that have changed since they were last written."""
        assert self._step.tensors is not None
        for name, buffer in shards.buffers_of(self._named()):
            if isinstance(buffer, DTensor) or buffer.is_meta:
                continue
            noted = self._buffers.get(name)
            if noted is None or noted[:2] != (id(buffer), version_of(buffer)):
                place = {"name": name, "whole": list(buffer.shape), "start": None, "offset": None}
                noted = (id(buffer), version_of(buffer), {**place, **self._writer.tensor(buffer)})
                self._buffers[name] = noted
            self._step.tensors.setdefault("buffer", []).append(noted[2])

    def _note_states(self) -> None:
        assert self._step.tensors is not None
        if not self._held.looks(sum(self._counts)):
            return
        for name, value in states_of(self._named()):
            place = {"name": name, "whole": list(value.shape), "start": None, "offset": None}
            self._step.tensors.setdefault("state", []).append({**place, **self._writer.tensor(value)})

    # The rest

    def state_loaded(self) -> None:
        self._writer.event("loaded", after=sum(self._counts))

    def turned(self, what: str, place: str) -> None:
        """What the script asks of an accelerator, and gets of another device."""
        self._writer.event("turned", what=what, place=place)

    def shrunk(self, config: str, key: str, layers: int) -> None:
        """A configuration got two layers in place of so many."""
        self._writer.event("shrunk", config=config, key=key, layers=layers)

    def join(self, call: Call, args: Any, kwargs: Any) -> Any:
        """A process group: of a rank that the script has started itself the number is known from here on."""
        if self._is_child:
            args, kwargs, count = children.limited(call, args, kwargs, self._settings.ranks)
            if count is not None:
                self._writer.event("fewer", given=count, ranks=self._settings.ranks, argument=False)
        result = call(*args, **kwargs)
        self._writer.event("joined", rank=dist.get_rank(), world_size=dist.get_world_size())
        return result

    def copies_made(self) -> None:
        """DataParallel without accelerators, of which nothing runs."""
        self._writer.event("copies", place=place_outside())

    def ranks_start(self, args: tuple[Any, ...], count: int) -> tuple[tuple[Any, ...], int]:
        """Of several ranks that are started together as many as the run has; also the argument that says how many."""
        ranks = self._settings.ranks
        if count <= ranks:
            return args, count
        numbers = [at for at, value in enumerate(args) if type(value) is int and value == count]
        if len(numbers) == 1:
            args = (*args[: numbers[0]], ranks, *args[numbers[0] + 1 :])
        self._writer.event("fewer", given=count, ranks=ranks, argument=len(numbers) == 1)
        return args, ranks

    def process_starts(self, process: Any) -> None:
        """A process that may be a rank is followed: the recorder goes with it."""
        if not children.is_followed(process):
            return
        self._processes += 1
        # A run that is ended by its time limit has no end that could say it; and a fork may find nothing unwritten.
        self._writer.event("process", after=sum(self._counts))
        process._target = self._follow(process._target, self._settings, self)

    def gathered(self, passed: Any, kept: Any) -> None:
        """Rows before and after what filled the last batch up was dropped."""
        sizes = [
            next((value.shape[0] for _, value in named_tensors(arguments) if value.dim() > 0), None)
            for arguments in (passed, kept)
        ]
        self._writer.event("gathered", after=sum(self._counts), given=sizes[0], kept=sizes[1])


class _Noted:
    """Records of the current step."""

    def __init__(self) -> None:
        self.forwards: list[dict[str, Any]] = []
        self.losses: list[dict[str, Any]] = []
        self.clips: list[dict[str, Any]] = []
        self.groups: list[dict[str, Any]] = []
        self.parts: dict[int, list[shards.TensorPart]] = {}
        self.tensors: dict[str, list[dict[str, Any]]] | None = None
        self.targets: float = 0  # of mean losses since the last forward began
        self.dropout = False
        self.in_closure = False
        self.changed: list[str] = []  # parameters that the script has changed since the last step
        self.scale: float | None = None  # of gradients

    def to_json(self) -> dict[str, Any]:
        """The step as its event has it."""
        return {
            "forwards": self.forwards,
            "losses": self.losses,
            "clips": self.clips,
            "groups": self.groups,
            "tensors": self.tensors or {},
            "dropout": self.dropout,
            "changed": self.changed,
            "scale": self.scale,
        }


_FEW = 4  # numbers of an evaluation, such as a sum and a count


def _few(value: Tensor) -> list[float]:
    return value.detach().double().reshape(-1).tolist()


def _note_use(forward: dict[str, Any], result: Any) -> None:
    """Note in a forward whether a backward reaches one of its results."""

    def used(gradient: Tensor) -> None:
        forward["used"] = True

    for _, value in named_tensors(result):
        if value.requires_grad and value.grad_fn is not None:
            forward.setdefault("used", False)
            value.register_hook(used)


def _sums_in_step(optimizer: Any) -> bool:
    """Whether an optimizer's step reduces gradients before it calls the base class's step, as Horovod's does."""
    return hasattr(optimizer, "skip_synchronize")


def _number(tensor: Tensor) -> float:
    """The sum of a tensor's own values, in float64."""
    value = local_part(tensor)
    return value.detach().double().sum().item()


def _options(group: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
    """The settings of a parameter group that are numbers: lr, weight_decay, betas, ..."""
    for name, value in group.items():
        if isinstance(value, Tensor) and value.numel() == 1:
            yield name, value.item()
        elif isinstance(value, (bool, int, float)) or (
            isinstance(value, (tuple, list))
            and name != "params"
            and all(isinstance(setting, (int, float)) for setting in value)
        ):
            yield name, value


def reversed_rows(value: Any) -> Any:
    """A batch with the rows of all its tensors in the opposite order; one of unlike many rows is left as it is."""
    sizes = {tensor.shape[0] for _, tensor in named_tensors(value) if tensor.dim() > 0}
    return _flipped(value) if len(sizes) == 1 else value


def _flipped(value: Any) -> Any:
    """A nest with the rows of every tensor in the opposite order."""
    if isinstance(value, Tensor):
        return value.flip(0) if value.dim() > 0 else value
    if isinstance(value, dict):
        return type(value)({name: _flipped(item) for name, item in value.items()})
    if isinstance(value, Mapping) and hasattr(value, "data"):  # transformers' BatchEncoding
        for name in list(value):
            value[name] = _flipped(value[name])  # pyright: ignore[reportIndexIssue]
        return value
    if isinstance(value, tuple) and hasattr(value, "_fields"):
        return type(value)(*(_flipped(item) for item in value))
    if isinstance(value, (list, tuple)):
        return type(value)(_flipped(item) for item in value)
    return value
