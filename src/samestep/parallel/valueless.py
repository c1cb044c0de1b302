"""Tensors without values: run a step on shapes only, so that nothing is allocated, computed or sent.

Inside `Valueless` a tensor of floating-point numbers is PyTorch's `FakeTensor`: it has a shape, a dtype and a number
of bytes, and no memory. Small tensors of samples, indices and constants keep their values, since models ask for them:
how long a sample is, whether a mask hides anything. A collective of tensors without values sends nothing; one of
tensors with values gives what it would if every rank said what this one says.
"""

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack
from typing import Any, Self

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils.weak import WeakTensorKeyDictionary

from samestep.comm.observer import HostsObservers, decomposes, operands
from samestep.parallel.code_state import imports_alone
from samestep.torch_internals import pytree
from samestep.torch_internals.fakes import FakeTensor, QuickFakeMode, swap_tensor_meta
from samestep.torch_internals.groups import FakeWork
from samestep.torch_internals.operators import DisableTorchFunctionSubclass, schema, unsafe_view, without_modes
from samestep.torch_internals.sharded import local_part

_LARGEST = 1 << 22  # elements of a tensor that keeps its values
_SEND, _RECEIVE = "send", "recv_"
_DEVICE = torch.ops.prim.device.default
_PLAIN = frozenset({int, float, bool, str, type(None), torch.dtype, torch.device, torch.layout, torch.memory_format})
# Operators without values that PyTorch keeps no results of, and others that give the same.
_SAME: Mapping[Any, Any] = {unsafe_view: torch.ops.aten.view.default}


def has_values(tensor: Tensor) -> bool:
    """Whether a tensor has values; false for tensors made inside `Valueless`."""
    local = local_part(tensor)
    return not (isinstance(local, FakeTensor) and isinstance(local.fake_mode, Valueless))


def with_values() -> AbstractContextManager[object]:
    """Context that disables all modes, for code that computes with values inside `Valueless`."""
    return without_modes()


def labelled(tensor: Tensor, exact: Any, like: Any = None) -> Tensor:
    """Label a message's tensor with a unique name, and a key that it shares with similar messages."""
    tensor.samestep_label = (exact, like)  # pyright: ignore[reportAttributeAccessIssue]
    return tensor


def _label(tensor: Tensor) -> tuple[Any, Any]:
    return getattr(tensor, "samestep_label", (None, None))


class NotSentYet(BaseException):
    """Raised if a rank waits for a message that its sender has not sent yet in the rehearsal.

    A BaseException, as a model may catch any Exception.
    """

    def __init__(self, source: int, label: Any) -> None:
        super().__init__(f"rank {source} has not sent {label}")
        self.source = source
        self.label = label


class Mail:
    """Messages with values between ranks that are rehearsed one after the other: headers with shapes of activations.

    `guesses`: a message of a rank that is rehearsed later, or never, is assumed to equal the last one with the same
    key, as the stages of most models pass on the same shapes. `wrong` is set if a guess turns out to be wrong.
    """

    def __init__(self, *, guesses: bool) -> None:
        self.guesses = guesses
        self._sent: dict[Any, Tensor] = {}
        self._like: dict[Any, Tensor] = {}  # by what messages have in common
        self._guessed: dict[Any, Tensor] = {}
        self.wrong = False

    def knows(self, label: Any) -> bool:
        return label in self._sent

    def send(self, tensor: Tensor) -> None:
        exact, like = _label(tensor)
        message = self._sent[exact] = self._like[like] = tensor.clone()
        guess = self._guessed.get(exact)
        self.wrong |= guess is not None and not torch.equal(guess, message)

    def receive(self, tensor: Tensor, source: int) -> None:
        """Receive a message. Raises NotSentYet if it is neither known nor guessed."""
        exact, like = _label(tensor)
        message = self._sent.get(exact)
        if message is None and self.guesses:
            message = self._like.get(like)
            if message is not None:
                self._guessed[exact] = message
        if message is None or message.shape != tensor.shape:
            raise NotSentYet(source, exact)
        tensor.copy_(message)

    @property
    def guessed(self) -> bool:
        return bool(self._guessed)


class Valueless(HostsObservers, QuickFakeMode):
    """A mode in which tensors have no values, except small constants, integers, and tensors computed from those."""

    def __init__(self, mail: Mail | None = None) -> None:
        HostsObservers.__init__(self)
        QuickFakeMode.__init__(self, allow_non_fake_inputs=True)
        self._observed = False  # whether an operator is running; operators within it are not observed
        self._mail = mail or Mail(guesses=True)
        self._replaced: list[Any] = []
        self._importing = ExitStack()
        self._twins: Any = WeakTensorKeyDictionary()

    def __enter__(self) -> Self:
        # `all_gather_object` is replaced, as it reads pickled bytes from tensors, which here have no values.
        self._replaced.append((dist.all_gather_object, swap_tensor_meta(_unseen)))
        dist.all_gather_object = _everyone_says_the_same  # pyright: ignore[reportAttributeAccessIssue]
        self._importing.enter_context(imports_alone())
        return super().__enter__()

    def __exit__(self, *exception: Any) -> None:
        self._importing.close()
        gather, restore_tensor_meta = self._replaced.pop()
        dist.all_gather_object = gather
        restore_tensor_meta()
        super().__exit__(*exception)

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        keywords = kwargs or {}
        if func is _DEVICE and not self.in_kernel_invocation and isinstance(args[0], FakeTensor):
            return args[0].fake_device  # asked for more often than there are operators
        if func.namespace == "prim":  # a fake tensor's own questions
            return self.dispatch(func, types, args, keywords)
        if not self.observers or self._observed:
            return self._run(func, types, args, keywords)
        if decomposes(types):
            return NotImplemented
        self._observed = True
        try:
            for observer in self.observers:
                observer.before(func, args, keywords)
            result = self._run(func, types, args, keywords)
            for observer in self.observers:
                observer.after(func, args, keywords, result)
        finally:
            self._observed = False
        return result

    def _run(self, func: Any, types: Any, args: Sequence[Any], keywords: Mapping[str, Any]) -> Any:
        if func.namespace == "profiler":
            return func(*args, **keywords)
        # What has a tensor without values gives tensors without values, whose shapes PyTorch computes. What has only
        # small tensors with values is run: models branch on the results, on a mask's sum or the longest sample. A
        # large result, such as a table that a model fills when it is built, would take the memory that a rehearsal
        # is there to spare.
        tensors = operands(args, keywords)
        fake = any(isinstance(tensor, FakeTensor) for tensor in tensors)
        if func.namespace == "c10d":
            return self._collective(func, args, keywords, tensors, fake=fake)
        if fake:
            if not all(map(_is_own, tensors)):
                args, keywords = pytree.tree_map_only(Tensor, _as_plain, (args, keywords))
            if not schema(func).is_mutable:
                args = [self._twin(arg) if isinstance(arg, Tensor) else arg for arg in args]
            return self.dispatch(_SAME.get(func, func), types, args, keywords)
        with_values = all(tensor.numel() <= _LARGEST and not tensor.is_meta for tensor in tensors)
        if with_values and (tensors or _makes_few(func, args, keywords)):
            return func(*args, **keywords)
        return self.dispatch(func, types, args, keywords)

    def add_to_key(self, key: list[Any], args: Any, others: tuple[Any, ...]) -> None:
        """Build the key of PyTorch's cache of fake results, faster than PyTorch does.

        Unusual arguments are left to PyTorch's code, which raises for results that it doesn't cache.
        """
        key.append((type(args), len(args)))
        if isinstance(args, dict):
            key.append(tuple(args))
            args = args.values()
        for arg in args:
            kind = type(arg)
            if kind is FakeTensor and arg.fake_mode is self and arg.constant is None and _is_strided(arg):
                key.append(_metadata(arg))
            elif kind in _PLAIN:
                key.append((kind, arg))
            elif kind is list or kind is tuple:
                self.add_to_key(key, arg, others)
            else:
                super().add_to_key(key, (arg,), others)

    def _twin(self, tensor: Tensor) -> Tensor:
        """The fake counterpart of a tensor with values, cached, as PyTorch does not cache mixed calls."""
        if type(tensor) is not Tensor:
            return tensor
        if tensor not in self._twins:
            alone = (
                tensor if tensor.is_leaf else tensor.detach()
            )  # PyTorch would ask for the gradient, with a warning
            self._twins[tensor] = self.from_tensor(alone, static_shapes=True)
        return self._twins[tensor]

    def _collective(
        self, func: Any, args: Sequence[Any], keywords: Mapping[str, Any], tensors: Sequence[Tensor], *, fake: bool
    ) -> Any:
        """Run a collective of the rehearsal: by `Mail` for messages with values, otherwise as a no-op."""
        name = schema(func).name.partition("::")[2]
        if not fake and name in (_SEND, _RECEIVE):
            if name == _SEND:
                self._mail.send(tensors[0])
            else:
                self._mail.receive(tensors[0], dist.get_global_rank(dist.ProcessGroup.unbox(args[1]), args[2]))
        elif tensors and not fake:
            return func(*args, **keywords)
        # A completed work, as no other rank runs.
        work = FakeWork().boxed()
        return work if len(schema(func).returns) == 1 else (args[0], work)


def _is_own(tensor: Tensor) -> bool:
    return isinstance(tensor, (FakeTensor, nn.Parameter)) or type(tensor) is Tensor


def _as_plain(tensor: Tensor) -> Tensor:
    """Strip a tensor's subclass, such as a pipeline's blank, unless it has a dispatch of its own.

    PyTorch's fake tensors can't be mixed with subclasses.
    """
    kind, plain = (getattr(kind_, "__torch_dispatch__", None) for kind_ in (type(tensor), Tensor))
    if _is_own(tensor) or kind is not plain:
        return tensor
    with DisableTorchFunctionSubclass():
        return tensor.as_subclass(Tensor)


def _is_strided(tensor: Tensor) -> bool:
    return tensor.layout is torch.strided


def _metadata(tensor: FakeTensor) -> tuple[Any, ...]:
    """The properties of a tensor on which the metadata of an operator's results depend."""
    flags = (tensor.requires_grad, tensor.is_conj(), tensor.is_neg(), tensor.is_inference(), tensor.is_quantized)
    place = (tensor.fake_device, tensor.storage_offset(), tensor.untyped_storage().nbytes())
    return (tensor.dtype, tensor.shape, tensor.stride(), *place, *flags)


def _unseen(propagate: Callable[..., Any]) -> Callable[..., Any]:
    """Run DTensor's computation of whole shapes without modes, as it is no part of a rank's step."""

    def unseen(propagator: Any, operation: Any) -> Any:
        with without_modes():
            return propagate(propagator, operation)

    return unseen


def _everyone_says_the_same(everyone: list[Any], own: Any, group: dist.ProcessGroup | None = None) -> None:
    everyone[:] = [own] * dist.get_world_size(group)


def _makes_few(func: Any, args: Sequence[Any], keywords: Mapping[str, Any]) -> bool:
    """Whether an operator without tensor arguments makes a small tensor whose values should be kept."""
    try:
        made = func(*args, **{**keywords, "device": torch.device("meta")})
    except (RuntimeError, NotImplementedError, TypeError):
        return False
    if not isinstance(made, Tensor) or made.numel() > _LARGEST:
        return False
    return not (made.is_floating_point() and schema(func).name.startswith(("aten::empty", "aten::rand")))
