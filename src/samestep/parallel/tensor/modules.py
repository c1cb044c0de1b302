"""Which modules can be sliced, along which dimension, the heads of attention modules, and roles that a user gives."""

import copy
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import Any, TypeGuard, get_args

from torch import nn
from torch.nn.utils.parametrize import is_parametrized

from samestep.errors import LayoutError
from samestep.job import TensorRole
from samestep.parallel.low_rank import Adapted, adapted, base_of


def is_linear(module: nn.Module) -> bool:
    """A linear layer as PyTorch or transformers computes it, perhaps with low-rank adapters.

    A subclass with a forward of its own is none.
    """
    if adapted(module) is not None:
        return True
    # Its product is taken over by `layers`, so nothing else may happen in its forward.
    plain = isinstance(module, nn.Linear) and type(module).forward is nn.Linear.forward
    return (plain or is_conv1d(module)) and _holds(module, "weight", "bias")


def is_conv1d(module: nn.Module) -> bool:
    """GPT-2's linear layer, whose weight is [in, out]."""
    # Only a model that transformers made has one, so there is nothing to import.
    kinds: Any = sys.modules.get("transformers.pytorch_utils")
    return kinds is not None and isinstance(module, kinds.Conv1D)


def is_embedding(module: nn.Module) -> bool:
    """An embedding whose rows, and their gradients, can be on different ranks."""
    return (
        isinstance(module, nn.Embedding)
        and type(module).forward is nn.Embedding.forward
        and _holds(module, "weight")
        and module.max_norm is None
        and not module.scale_grad_by_freq
        and not module.sparse
    )


def is_multihead(module: nn.Module) -> bool:
    """PyTorch's own attention with its own forward, whose projections are plain parameters."""
    return (
        isinstance(module, nn.MultiheadAttention)
        and type(module).forward is nn.MultiheadAttention.forward
        and _holds(module, "in_proj_weight", "in_proj_bias", "q_proj_weight")
        and _holds(module.out_proj, "weight", "bias")
    )


def _holds(module: nn.Module, *names: str) -> bool:
    """Whether a module's weights are parameters of its own (or None), not computed from others before each use."""
    return all(name in module._parameters for name in names) and not is_parametrized(module)


def computes_weight(module: nn.Module) -> bool:
    """Whether a linear layer or a table computes its weight from other parameters before each use."""
    return isinstance(module, (nn.Linear, nn.Embedding)) and not _holds(module, "weight")


def gathered_dims(module: nn.Module) -> dict[str, int] | None:
    """Of a layer whose outputs can be computed in slices: each parameter's name, and the dimension of its outputs.

    Of a parametrized layer (weight_norm) the originals, where each has a row an output: whether its weight is
    computed row by row is for a look at the output to tell. None for any other module.
    """
    if (layer := adapted(module)) is not None:
        return None if is_conv1d(base_of(module)) else _dims_of_adapted(module, layer)
    if isinstance(module, _TRANSPOSED):
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
    """The same of a linear layer with adapters, each rank's slice of which takes all of `down`."""
    own = (name for name, _ in base_of(module).named_parameters(recurse=False))
    return {".".join(filter(None, (layer.base, name))): 0 for name in own} | {
        f"{each.up}.weight": 0 for each in layer.updates
    }


def computes_own_weight(module: nn.Module) -> bool:
    """Whether a layer's weight is computed from other parameters of it, as weight_norm and spectral_norm do."""
    return adapted(module) is None and any(name not in ("weight", "bias") for name, _ in module.named_parameters())


def outputs_of(module: nn.Module) -> int:
    """The output features of a linear layer, or the output channels of a convolution."""
    return getattr(module, "out_features", None) or module.out_channels  # pyright: ignore


def outputs_dim(module: nn.Module) -> int:
    """The dimension of the outputs in what such a layer gives, from the end: convolutions have places behind it."""
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
    """Whether a module computes with parameters itself; those of a parametrized one stand in a module in it."""
    return (
        is_parametrized(module) or adapted(module) is not None or any(True for _ in module.parameters(recurse=False))
    )


_HEADS = ("num_attention_heads", "num_heads", "n_heads", "n_head", "heads")
_KEY_VALUE_HEADS = ("num_key_value_heads", "num_kv_heads", "n_kv_heads")
_GROUPS = ("num_key_value_groups", "num_kv_groups", "n_rep")  # query heads of one key-value head
# What forwards reshape and split by: the width of all heads together.
_WIDTHS = ("all_head_size", "inner_dim", "split_size")


@dataclass(frozen=True, kw_only=True)
class Heads:
    """The number of an attention's query heads and of its key-value heads (Ainslie et al. 2023)."""

    queries: int
    keys: int

    def pieces(self, columns: Sequence[int], row: int) -> list[list[int]] | None:
        """The heads in each fused piece of the columns, of given widths, before a row layer of a given input width.

        Queries, keys and values may be in linears of their own or one after the other in one. None where the
        widths are not those of queries, keys and values.
        """
        head, rest = divmod(row, self.queries)
        if rest:
            return None
        # Queries alone, keys or values alone, keys with values, or all three.
        choices = [[self.queries], [self.keys], [self.keys] * 2, [self.queries, self.keys, self.keys]]
        found = [next((c for c in choices if sum(c) * head == width), None) for width in columns]
        pieces = [piece for piece in found if piece is not None]
        whole = len(pieces) == len(columns) and sum(map(sum, pieces)) == self.queries + 2 * self.keys
        return pieces if whole else None

    def why_whole(self, parts: int) -> str | None:
        """Why ranks can't have heads of their own; None where they can, perhaps with keys and values in common."""
        if self.queries % parts == 0 and (self.keys % parts == 0 or self.queries % self.keys == 0):
            return None
        what = f"{self.queries} heads" + (f" and {self.keys} key-value heads" * (self.keys != self.queries))
        return f"has {what}, which {parts} ranks can't share out"

    def shares_keys(self, parts: int) -> bool:
        """Whether ranks need the same key-value heads, since there are too few of them to share out."""
        return self.keys % parts != 0

    def keys_of(self, rank: int, parts: int) -> list[int]:
        """The key-value heads that a rank's queries attend to, one for as many consecutive queries each."""
        mine = self.queries // parts
        # Query head q uses key-value head q * keys // queries: consecutive queries share one.
        needed = [query * self.keys // self.queries for query in range(rank * mine, (rank + 1) * mine)]
        each = list(dict.fromkeys(needed))
        # Where queries of one head are on two ranks, some heads have fewer queries here; then each query has its own.
        even = mine % len(each) == 0 and [head for head in each for _ in range(mine // len(each))] == needed
        return each if even else needed


def heads_of(module: nn.Module) -> Heads | None:
    """The heads of a module that is an attention; None for any other."""
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
    """Make an attention module know that it has one rank's heads; `width` is that of all ranks' together."""
    queries = heads.queries // parts
    keys = len(heads.keys_of(rank, parts)) if heads.shares_keys(parts) else heads.keys // parts
    local = {
        **dict.fromkeys(_HEADS, (heads.queries, queries)),
        **dict.fromkeys(_KEY_VALUE_HEADS, (heads.keys, keys)),
        **dict.fromkeys(_GROUPS, (heads.queries // heads.keys, queries // keys)),
        **dict.fromkeys(_WIDTHS, (width, width // parts)),
    }
    for name, (whole, mine) in local.items():
        # Only an attribute that has exactly the whole number is one: another of this name may mean something else.
        if vars(module).get(name) == whole:
            setattr(module, name, mine)
    config = vars(module).get("config")
    if config is not None:
        # Some forwards ask the configuration, which other modules share.
        config = copy.copy(config)
        for name in (_HEADS[0], _KEY_VALUE_HEADS[0]):
            whole, mine = local[name]
            if getattr(config, name, None) == whole:
                setattr(config, name, mine)
        vars(module)["config"] = config


def _first(holder: Any, names: Sequence[str]) -> int | None:
    """The first of some attributes that is an integer."""
    values = (getattr(holder, name, None) for name in names)
    return next((value for value in values if isinstance(value, int) and not isinstance(value, bool)), None)


Role = TensorRole

# What transformers calls the roles. Its others are for what it can't slice, or no linear, and say nothing here.
_TRANSFORMERS: Mapping[str, Role] = {
    "colwise": "column",
    "rowwise": "row",
    "colwise_gather_output": "vocabulary",
    "embedding_rowwise": "vocabulary",
}


def named(model: nn.Module, given: Mapping[str, str]) -> dict[str, Role]:
    """The roles that a user's plan (name or pattern -> role) gives to modules.

    Raises LayoutError for a pattern without a module, and for a role that is none or can't be the module's.
    """
    roles: dict[str, Role] = {}
    for pattern, role in given.items():
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
    """The roles in the plan that a transformers model brings; empty for models that bring none."""
    plan = getattr(model, "tp_plan", None)
    if not isinstance(plan, Mapping):
        return {}
    roles: dict[str, Role] = {}
    for name, module in model.named_modules():
        styles = [style for pattern, style in plan.items() if fnmatchcase(name, pattern)]
        role = _TRANSFORMERS.get(styles[-1]) if styles else None
        if role == "vocabulary" and is_linear(module) and out_features(module) != vocabulary:
            role = None  # a projection whose output is gathered at once
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


def _some_names(model: nn.Module) -> list[str]:
    """A few names of modules that can be sliced, for a message."""
    names = [name for name, module in model.named_modules() if can_be(module)]
    return [*names[:5], *(["..."] if len(names) > 5 else [])]
