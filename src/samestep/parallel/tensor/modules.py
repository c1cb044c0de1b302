"""Which modules can be sliced and along which dimension, attention heads, and the roles that a user gives."""

import copy
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import Any, TypeGuard, get_args

import torch
import torch.nn.functional as F
from torch import nn
from torch.nn.parameter import UninitializedParameter
from torch.nn.utils.parametrize import is_parametrized
from torch.overrides import TorchFunctionMode

from samestep.errors import LayoutError
from samestep.job import TensorRole
from samestep.parallel.attributes import Attributes
from samestep.parallel.low_rank import Adapted, adapted, base_of, is_conv1d
from samestep.torch_internals.modules import own_parameters


def is_linear(module: nn.Module) -> bool:
    """Whether a module is a linear layer of PyTorch, transformers or the user, perhaps with low-rank adapters.

    One with its own forward is if that does nothing but call `F.linear` with the weight and the bias.
    """
    if adapted(module) is not None:
        return True
    # `layers` replaces the forward by the product, so the forward may do nothing else.
    plain = isinstance(module, nn.Linear) and type(module).forward is nn.Linear.forward
    return (plain or is_conv1d(module) or _is_a_product(module)) and _holds(module, "weight", "bias")


class _Products(TorchFunctionMode):
    """Records the calls of functions within the block, and what they return."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: list[tuple[Any, Sequence[Any], Mapping[str, Any], Any]] = []

    def __torch_function__(
        self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        result = func(*args, **(kwargs or {}))
        self.calls.append((func, args, kwargs or {}, result))
        return result


def _is_a_product(module: nn.Module) -> bool:
    """Whether a class of the user or of a library has a forward that returns `F.linear` of its input, and no more.

    The forward is tried on a row; one that fails, or that calls another function of PyTorch, is another layer.
    """
    own, forward = own_parameters(module), type(module).forward
    weight, bias = own.get("weight"), own.get("bias")
    if weight is None or not set(own) <= {"weight", "bias"} or any(True for _ in module.children()):
        return False
    if forward is nn.Linear.forward or isinstance(module, nn.Embedding) or isinstance(weight, UninitializedParameter):
        return False
    if weight.ndim != 2 or (bias is not None and bias.shape != weight.shape[:1]):
        return False
    row, before, products = torch.zeros_like(weight[:1]), Attributes(module), _Products()
    try:
        with torch.no_grad(), products:
            output = forward(module, row)
    except Exception:  # another layer's forward, which may raise anything
        return False
    finally:
        before.restore()
    # Of a subclass the forward may call nn.Linear's, which is F.linear as well.
    calls = [call for call in products.calls if getattr(call[0], "__name__", "") != "__get__"]
    if len(calls) != 1 or calls[0][0] is not F.linear or calls[0][3] is not output:
        return False
    _, arguments, keywords, _ = calls[0]
    operands = dict(zip(("input", "weight", "bias"), arguments, strict=False)) | dict(keywords)
    return operands.get("input") is row and operands.get("weight") is weight and operands.get("bias") is bias


def is_embedding(module: nn.Module) -> bool:
    """Whether a module is an embedding whose rows, and their gradients, can be on different ranks."""
    return (
        isinstance(module, nn.Embedding)
        and type(module).forward is nn.Embedding.forward
        and _holds(module, "weight")
        and module.max_norm is None
        and not module.scale_grad_by_freq
        and not module.sparse
    )


def is_multihead(module: nn.Module) -> bool:
    """Whether a module is nn.MultiheadAttention with its own forward, and its projections are plain parameters."""
    return (
        isinstance(module, nn.MultiheadAttention)
        and type(module).forward is nn.MultiheadAttention.forward
        and _holds(module, "in_proj_weight", "in_proj_bias", "q_proj_weight")
        and _holds(module.out_proj, "weight", "bias")
    )


def _holds(module: nn.Module, *names: str) -> bool:
    """Whether a module's attributes are its own parameters (or None), not computed from others before each use."""
    return all(name in own_parameters(module) for name in names) and not is_parametrized(module)


def computes_weight(module: nn.Module) -> bool:
    """Whether a linear layer or an embedding computes its weight from other parameters before each use."""
    return isinstance(module, (nn.Linear, nn.Embedding)) and not _holds(module, "weight")


def gathered_dims(module: nn.Module) -> dict[str, int] | None:
    """The output dimension of each parameter, by name, of a layer whose outputs can be computed in slices.

    For a parametrized layer (weight_norm), the original parameters, if each has a row per output; comparing the
    layer's output tells whether the weight is computed row by row. None for any other module.
    """
    if (layer := adapted(module)) is not None:
        return None if is_conv1d(base_of(module)) else _dims_of_adapted(module, layer)
    if _is_a_product(module):
        plain, dim = True, 0
    elif isinstance(module, _TRANSPOSED):
        plain, dim = _is_plain(module, _TRANSPOSED), 1
    else:
        plain, dim = _is_plain(module, (nn.Linear, *_CONVOLUTIONS)), 0
    if not plain or getattr(module, "groups", 1) != 1:
        return None
    outputs = outputs_of(module)
    dims = {name: dim if name == "weight" else 0 for name, _ in module.named_parameters()}
    fits = all(
        not parameter.is_complex() and parameter.ndim > dims[name] and parameter.shape[dims[name]] == outputs
        for name, parameter in module.named_parameters()
    )
    return dims if fits and dims else None


def _dims_of_adapted(module: nn.Module, layer: Adapted) -> dict[str, int]:
    """The output dimensions of a linear layer with adapters; each rank's slice takes the whole of `down`."""
    own = (name for name, _ in base_of(module).named_parameters(recurse=False))
    return {".".join(filter(None, (layer.base, name))): 0 for name in own} | {
        f"{update.up}.weight": 0 for update in layer.updates
    }


def computes_own_weight(module: nn.Module) -> bool:
    """Whether a layer computes its weight from its own other parameters, as with weight_norm and spectral_norm."""
    return adapted(module) is None and any(name not in ("weight", "bias") for name, _ in module.named_parameters())


def outputs_of(module: nn.Module) -> int:
    """The output features of a linear layer, or the output channels of a convolution."""
    if _is_a_product(module):
        return module.get_parameter("weight").shape[0]
    return getattr(module, "out_features", None) or module.out_channels  # pyright: ignore


def outputs_dim(module: nn.Module) -> int:
    """The output dimension in the result of a linear layer or a convolution, counted from the end."""
    return -1 - len(getattr(module, "kernel_size", ()))


def _is_plain(module: nn.Module, kinds: tuple[type[nn.Module], ...]) -> bool:
    return any(isinstance(module, kind) and type(module).forward is kind.forward for kind in kinds)


_CONVOLUTIONS = (nn.Conv1d, nn.Conv2d, nn.Conv3d)
_TRANSPOSED = (nn.ConvTranspose1d, nn.ConvTranspose2d, nn.ConvTranspose3d)


def in_features(linear: nn.Module) -> int:
    return _weight_shape(linear)[in_dim(linear)]


def out_features(linear: nn.Module) -> int:
    return _weight_shape(linear)[out_dim(linear)]


def in_dim(linear: nn.Module) -> int:
    """The dimension of the weight that is its input features."""
    return 0 if is_conv1d(base_of(linear)) else 1


def out_dim(linear: nn.Module) -> int:
    return 1 if is_conv1d(base_of(linear)) else 0


def _weight_shape(linear: nn.Module) -> tuple[int, ...]:
    return tuple(base_of(linear).get_parameter("weight").shape)


def has_own_parameters(module: nn.Module) -> bool:
    """Whether a module computes with parameters itself; a parametrized module has them in a module inside it."""
    return (
        is_parametrized(module) or adapted(module) is not None or any(True for _ in module.parameters(recurse=False))
    )


_HEADS = ("num_attention_heads", "num_heads", "n_heads", "n_head", "heads")
_KEY_VALUE_HEADS = ("num_key_value_heads", "num_kv_heads", "n_kv_heads")
_GROUPS = ("num_key_value_groups", "num_kv_groups", "n_rep")  # query heads per key-value head
# The width of all heads together, by which forwards reshape and split.
_WIDTHS = ("all_head_size", "inner_dim", "split_size")


@dataclass(frozen=True, kw_only=True)
class Heads:
    """The number of an attention's query heads and of its key-value heads (Ainslie et al. 2023)."""

    queries: int
    keys: int

    def pieces(self, columns: Sequence[int], row: int) -> list[list[int]] | None:
        """The number of heads of each matrix that the columns fuse, from the columns' widths and the row layer's.

        Queries, keys and values may be in separate linear layers or one after the other in one. None if the widths
        are not those of queries, keys and values.
        """
        head, rest = divmod(row, self.queries)
        if rest:
            return None
        # Queries alone, keys or values alone, keys with values, or all three.
        choices = [[self.queries], [self.keys], [self.keys] * 2, [self.queries, self.keys, self.keys]]
        heads = [next((c for c in choices if sum(c) * head == width), None) for width in columns]
        pieces = [piece for piece in heads if piece is not None]
        whole = len(pieces) == len(columns) and sum(map(sum, pieces)) == self.queries + 2 * self.keys
        return pieces if whole else None

    def why_whole(self, parts: int) -> str | None:
        """The reason why heads can't be divided over ranks; None if they can, perhaps with shared keys and values."""
        if self.queries % parts == 0 and (self.keys % parts == 0 or self.queries % self.keys == 0):
            return None
        what = f"{self.queries} heads" + (f" and {self.keys} key-value heads" * (self.keys != self.queries))
        return f"has {what}, which {parts} ranks can't share out"

    def shares_keys(self, parts: int) -> bool:
        """Whether several ranks need the same key-value heads, since there are too few to divide over the ranks."""
        return self.keys % parts != 0

    def keys_of(self, rank: int, parts: int) -> list[int]:
        """The key-value heads that a rank's queries attend to, each for the same number of consecutive queries."""
        count = self.queries // parts
        # Query head q uses key-value head q * keys // queries: consecutive queries share one.
        needed = [query * self.keys // self.queries for query in range(rank * count, (rank + 1) * count)]
        keys = list(dict.fromkeys(needed))
        # If a key-value head's queries are on two ranks, the heads here have unequal numbers of queries; then each
        # query gets a key-value head of its own.
        even = count % len(keys) == 0 and [head for head in keys for _ in range(count // len(keys))] == needed
        return keys if even else needed


def heads_of(module: nn.Module) -> Heads | None:
    """The heads of an attention module; None for any other module."""
    own = _first(module, _HEADS)
    config = getattr(module, "config", None)
    if own is None and "attention" not in type(module).__name__.lower():
        return None
    queries = own or _first(config, _HEADS)
    if queries is None:
        return None
    keys = _first(module, _KEY_VALUE_HEADS) or _first(config, _KEY_VALUE_HEADS) or queries
    return Heads(queries=queries, keys=keys)


def divide(module: nn.Module, heads: Heads, width: int, rank: int, parts: int) -> None:
    """Set an attention module's attributes to one rank's number of heads; `width` is that of all heads together."""
    queries = heads.queries // parts
    keys = len(heads.keys_of(rank, parts)) if heads.shares_keys(parts) else heads.keys // parts
    local = {
        **dict.fromkeys(_HEADS, (heads.queries, queries)),
        **dict.fromkeys(_KEY_VALUE_HEADS, (heads.keys, keys)),
        **dict.fromkeys(_GROUPS, (heads.queries // heads.keys, queries // keys)),
        **dict.fromkeys(_WIDTHS, (width, width // parts)),
    }
    for name, (whole, sliced) in local.items():
        # Change only attributes with exactly the whole number: others of the same name may mean something else.
        if vars(module).get(name) == whole:
            setattr(module, name, sliced)
    config = vars(module).get("config")
    if config is not None:
        # Some forwards read the configuration, which other modules share.
        config = copy.copy(config)
        for name in (_HEADS[0], _KEY_VALUE_HEADS[0]):
            whole, sliced = local[name]
            if getattr(config, name, None) == whole:
                setattr(config, name, sliced)
        vars(module)["config"] = config


def _first(holder: Any, names: Sequence[str]) -> int | None:
    """The first of some attributes that is an integer."""
    values = (getattr(holder, name, None) for name in names)
    return next((value for value in values if isinstance(value, int) and not isinstance(value, bool)), None)


Role = TensorRole

# transformers' names of the roles. Its other names are for modules that it does not slice or that are not linear.
_TRANSFORMERS: Mapping[str, Role] = {
    "colwise": "column",
    "rowwise": "row",
    "colwise_gather_output": "vocabulary",
    "embedding_rowwise": "vocabulary",
}


def named(model: nn.Module, patterns: Mapping[str, str]) -> dict[str, Role]:
    """The roles that a user's plan (name or pattern -> role) gives to modules.

    Raises LayoutError for a pattern that matches no module, an unknown role, and a role that the module can't have.
    """
    roles: dict[str, Role] = {}
    for pattern, role in patterns.items():
        if not _is_role(role):
            raise LayoutError(f'run.tensor_plan: {pattern} is "{role}"; it can be {", ".join(get_args(Role))}')
        matches = {name: can_be(module) for name, module in model.named_modules() if fnmatchcase(name, pattern)}
        fitting = [name for name, able in matches.items() if role in able]
        if not any(matches.values()):
            raise LayoutError(
                f'run.tensor_plan: the model has no linear layer, table or attention called "{pattern}"; '
                f"it has {', '.join(_some_names(model))}"
            )
        if not fitting:
            name, able = next((name, able) for name, able in matches.items() if able)
            kind = type(model.get_submodule(name)).__name__
            raise LayoutError(f'run.tensor_plan: {name} ({kind}) can\'t be "{role}"; it can be {", ".join(able)}')
        for name in fitting:
            roles[name] = role
    return roles


def of_transformers(model: nn.Module, vocabulary: int | None) -> dict[str, Role]:
    """The roles in a transformers model's own plan; empty for models without one."""
    plan = getattr(model, "tp_plan", None)
    if not isinstance(plan, Mapping):
        return {}
    roles: dict[str, Role] = {}
    for name, module in model.named_modules():
        styles = [style for pattern, style in plan.items() if fnmatchcase(name, pattern)]
        role = _TRANSFORMERS.get(styles[-1]) if styles else None
        if role == "vocabulary" and is_linear(module) and out_features(module) != vocabulary:
            role = None  # a projection whose output is gathered right after
        if role is not None and role in can_be(module):
            roles[name] = role
    return roles


def can_be(module: nn.Module) -> tuple[Role, ...]:
    """The roles that a module can have; empty if it has no weight to slice."""
    if adapted(module) is not None:
        return ("column", "row", "whole")
    if is_linear(module):
        return get_args(Role)
    if is_embedding(module):
        return ("vocabulary", "whole")
    if is_multihead(module):
        return ("column", "whole")
    return ()


def _is_role(value: str) -> TypeGuard[Role]:
    return value in get_args(Role)


def pattern_of(name: str) -> str:
    """A module's or parameter's name with a star in place of its layer's number."""
    return re.sub(r"(?<=\.)\d+(?=\.)", "*", name)


def _some_names(model: nn.Module) -> list[str]:
    """A few names of modules that can be sliced, for a message."""
    names = [name for name, module in model.named_modules() if can_be(module)]
    return [*names[:5], *(["..."] if len(names) > 5 else [])]
