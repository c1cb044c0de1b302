"""Finds units in a trace: linear layers that are sliced together, columns and the row layer that takes their output.

Between its columns and its row layer a unit may only compute feature by feature (or head by head), since a rank has
only its own features there. The trace shows which modules are called in between, and from which tensors each input is
computed. It doesn't show plain functions between modules (a softmax over all features, say), so the sliced model's
output is compared with the whole one's in the end (`apply`).
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

from torch import nn

from samestep.parallel.calls import Call, Trace
from samestep.parallel.low_rank import adapted_layers
from samestep.parallel.tensor.modules import (
    Heads,
    Role,
    has_own_parameters,
    heads_of,
    in_features,
    is_linear,
    is_multihead,
    out_features,
)

_ELEMENTWISE = ("torch.nn.modules.activation", "torch.nn.modules.dropout", "transformers.activations")
# PyTorch's functions and operators of each element alone, and those that split gates.
_OF_ELEMENTS = frozenset(
    {
        *("add", "chunk", "clamp", "div", "dropout", "elu", "erf", "exp", "gelu", "hardswish", "leaky_relu", "mish"),
        *("mul", "neg", "pow", "relu", "relu6", "rsub", "selu", "sigmoid", "silu", "softplus", "square", "sub"),
        *("tanh", "__add__", "__mul__", "__neg__", "__pow__", "__radd__", "__rmul__", "__rsub__", "__sub__"),
        *("__truediv__", "relu_", "silu_", "hardtanh", "log1p", "sqrt", "abs"),
    }
)
_NOT_ELEMENTWISE = ("Softmax", "LogSoftmax", "Softmin", "Softmax2d", "GLU")


@dataclass(frozen=True, kw_only=True)
class Unit:
    """Linear layers that are sliced together: columns, and the row layer that takes their output."""

    columns: tuple[str, ...]
    row: str
    width: int  # input features of the row layer, over all ranks
    pieces: tuple[tuple[int, ...], ...]  # sizes of the matrices that each column fuses, in heads or features
    owner: str | None = None  # the attention module whose heads are sliced
    heads: Heads | None = None
    head_tables: tuple[str, ...] = ()  # embeddings with one number per head
    by_head: bool = False  # its only column returns [key-value heads, queries of each + 2, head_dim], flattened

    def shared_columns(self, parts: int) -> tuple[str, ...]:
        """Columns that stay whole because ranks need the same key-value heads; each rank selects those it needs."""
        if self.heads is None or not self.heads.shares_keys(parts):
            return ()
        alone = (self.heads.queries,)
        return tuple(name for name, pieces in zip(self.columns, self.pieces, strict=True) if pieces != alone)

    def laid_by_head(self, parts: int) -> "Unit | None":
        """The unit with a column that fuses queries, keys and values head by head, as Bloom's and GPT-NeoX's do.

        The widths alone don't tell the two orders apart. None if the unit has no such column, or several ranks would
        need the same key-value heads.
        """
        heads = self.heads
        fuses = heads is not None and len(self.columns) == 1 and sum(self.pieces[0]) == heads.queries + 2 * heads.keys
        if self.by_head or heads is None or not fuses or heads.shares_keys(parts) or heads.queries % heads.keys:
            return None
        return replace(self, pieces=((heads.keys,),), by_head=True)

    @property
    def members(self) -> tuple[str, ...]:
        return (*self.columns, self.row)


class UnitFinder:
    """Finds the units of a model: attentions first, then pairs of layers with only elementwise modules in between."""

    def __init__(self, model: nn.Module, trace: Trace, blocks: Sequence[str], forced: Mapping[str, Role]) -> None:
        self._modules = dict(model.named_modules())
        self._trace = trace
        self._blocks = blocks
        self._forced = forced
        self._first: dict[str, Call] = {}
        for call in trace.calls:
            self._first.setdefault(call.name, call)
        layers = adapted_layers(model)
        self._inner = {name for name in self._first if any(name.startswith(f"{layer}.") for layer in layers)}
        self._linears = [  # in the order of calls, without the linear layers inside adapted ones
            name for name in self._first if is_linear(self._modules[name]) and name not in self._inner
        ]

    def find(self) -> list[Unit]:
        """The units of the model; each linear layer is in at most one."""
        units = [unit for unit in map(self._attention, self._first) if unit is not None and self._agrees(unit)]
        free = [name for name in self._linears if not any(name in unit.members for unit in units)]
        while free:
            unit = self._given(free) or self._pair(free)
            if unit is None:
                del free[0]
            else:
                units.append(unit)
                free = [name for name in free if name not in unit.members]
        return units

    def block_of(self, name: str) -> str | None:
        return next((block for block in self._blocks if name.startswith(block + ".")), None)

    def flat_input(self, unit: Unit) -> tuple[str, Sequence[int]] | None:
        """The column in a block whose input is not [batch, tokens, features], with the input's shape; else None."""
        if self.block_of(unit.row) is None:
            return None
        shapes = ((name, seen.shape) for name in unit.columns for seen in self._first[name].inputs())
        return next(((name, shape) for name, shape in shapes if len(shape) != 3), None)

    def _agrees(self, unit: Unit) -> bool:
        """Whether a unit is consistent with the roles that were given for its members."""
        return self._forced.get(unit.row, "row") == "row" and all(
            self._forced.get(name, "column") == "column" for name in unit.columns
        )

    def _attention(self, owner: str) -> Unit | None:
        """The unit of an attention module: its projections, its output layer, and the per-head modules in between."""
        module = self._modules[owner]
        heads = heads_of(module)
        if heads is None or is_multihead(module):
            return None
        call = self._first[owner]
        inputs = {seen.identity for seen in call.inputs()}
        siblings = [name for name in self._linears if name.rpartition(".")[0] == owner]
        columns = [name for name in siblings if self._input(name) in inputs]
        rest = [name for name in siblings if name not in columns]
        row = self._row_of_attention(call, columns, rest)
        if row is None or self.block_of(row) != self.block_of(owner):
            return None
        width = in_features(self._modules[row])
        pieces = heads.pieces([out_features(self._modules[name]) for name in columns], width)
        if pieces is None:
            return None
        tables: list[str] = []
        for name in self._between(columns, row):
            if not has_own_parameters(self._modules[name]) or _is_parametrization(name):
                continue
            # Between columns and row a rank has some of the heads. A table of numbers for each head is sliced with
            # them; what works on one head at a time, such as a norm of queries, stays whole; others need all heads.
            if self._is_head_table(name, owner, heads):
                tables.append(name)
            elif not self._is_per_head(name, width // heads.queries):
                return None
        return Unit(
            columns=tuple(columns),
            row=row,
            width=width,
            pieces=tuple(map(tuple, pieces)),
            owner=owner,
            heads=heads,
            head_tables=tuple(tables),
        )

    def _row_of_attention(self, call: Call, columns: Sequence[str], rest: Sequence[str]) -> str | None:
        """The attention's only other linear layer or, without one, the linear layer that takes its output."""
        if not columns or len(rest) > 1:
            return None
        if rest:
            return rest[0]
        outputs = {seen.identity for seen in call.outputs()}
        after = [name for name in self._linears if self._first[name].began > call.ended]
        return after[0] if after and self._input(after[0]) in outputs else None

    def _is_per_head(self, name: str, head: int) -> bool:
        """Whether a module computes on one head at a time, as a norm of queries or keys does."""
        shapes = [parameter.shape for parameter in self._modules[name].parameters(recurse=False)]
        # A parametrized module has its parameters in a module inside it.
        if not all(shapes) or not shapes:
            return False
        seen = [*self._first[name].inputs(), *self._first[name].outputs()]
        return all(shape[-1] == head for shape in shapes) and all(s.shape[-1] == head for s in seen)

    def _is_head_table(self, name: str, owner: str, heads: Heads) -> bool:
        """Whether a module is an attention's embedding with one number per head, as T5's relative positions are."""
        module = self._modules[name]
        return (
            isinstance(module, nn.Embedding)
            and module.embedding_dim == heads.queries
            and name.rpartition(".")[0] == owner
        )

    def _pair(self, free: Sequence[str]) -> Unit | None:
        """The unit of columns with a common input and the next linear layer, if all between is elementwise."""
        columns = [free[0]]
        for name in free[1:]:
            if self._input(name) != self._input(free[0]):
                break
            columns.append(name)
        row = self._after(columns)
        if (
            row is None
            or row not in free
            or not self._comes_from(row, columns)
            or any(name in self._forced for name in (*columns, row))
        ):
            return None
        # In a model with repeated blocks, layers outside them are small.
        if self.block_of(row) != self.block_of(columns[0]) or (self._blocks and self.block_of(row) is None):
            return None
        if any(not self._is_harmless(name) for name in self._between(columns, row)):
            return None
        width = in_features(self._modules[row])
        # Widths by column: each is the row layer's input width, or a single column has twice that, as a gated layer
        # has.
        widths = [out_features(self._modules[name]) for name in columns]
        fused = len(columns) == 1 and widths[0] == 2 * width  # gate and up in one
        if not fused and any(w != width for w in widths):
            return None
        pieces = ((width, width),) if fused else ((width,),) * len(columns)
        return Unit(columns=tuple(columns), row=row, width=width, pieces=pieces)

    def _given(self, free: Sequence[str]) -> Unit | None:
        """The unit that given roles describe; what a trace can't show is taken on trust."""
        columns: list[str] = []
        for name in free:
            if self._forced.get(name) != "column":
                break
            columns.append(name)
        row = free[len(columns)] if columns and len(columns) < len(free) else None
        if row is None or self._forced.get(row) != "row":
            return None
        width = in_features(self._modules[row])
        widths = [out_features(self._modules[name]) for name in columns]
        owner = columns[0].rpartition(".")[0]
        heads = heads_of(self._modules[owner])
        pieces = heads.pieces(widths, width) if heads is not None else None
        if heads is not None and pieces is None:
            return None  # not the queries, keys and values of its heads
        if pieces is None:
            pieces = [[width] * (w // width) if w % width == 0 else [w] for w in widths]
        return Unit(
            columns=tuple(columns),
            row=row,
            width=width,
            pieces=tuple(map(tuple, pieces)),
            owner=owner if heads is not None else None,
            heads=heads,
        )

    def _comes_from(self, row: str, columns: Sequence[str]) -> bool:
        """Whether a layer's inputs are computed from the outputs of each of the columns."""
        made = [seen for name in columns for seen in self._first[name].outputs()]
        return all(
            self._trace.computed_from(seen, made) == {value.identity for value in made}
            for seen in self._first[row].inputs()
        )

    def _after(self, columns: Sequence[str]) -> str | None:
        """The first linear layer that is called after all columns have ended."""
        last = max(self._first[name].ended for name in columns)
        return next((name for name in self._linears if self._first[name].began > last), None)

    def _between(self, columns: Sequence[str], row: str) -> Iterator[str]:
        """Modules that are called between the start of the first column and that of the row layer."""
        began = min(self._first[name].began for name in columns)
        for call in self._trace.calls:
            if call.name in self._inner or call.name in columns:
                continue
            if began < call.began and call.ended < self._first[row].began:
                yield call.name

    def _is_harmless(self, name: str) -> bool:
        """Whether a module is elementwise over features, or only calls other modules."""
        module = self._modules[name]
        if _is_parametrization(name):
            return True
        if has_own_parameters(module):
            return False
        kind = type(module)
        elementwise = kind.__module__ in _ELEMENTWISE and kind.__name__ not in _NOT_ELEMENTWISE
        harmless = elementwise or isinstance(module, nn.Identity) or any(True for _ in module.children())
        return harmless or self._is_activation(name)

    def _is_activation(self, name: str) -> bool:
        """Whether a module without parameters calls functions of each element alone, as activations of one's own do.

        It may halve the features, as a gate does. Comparing outputs shows where its numbers are of several features.
        """
        call = self._first[name]
        return bool(call.functions) and set(call.functions) <= _OF_ELEMENTS

    def _input(self, name: str) -> int | None:
        """The identity of a linear layer's input tensor in the trace."""
        seen = self._first[name].inputs()
        return seen[0].identity if seen else None


def _is_parametrization(name: str) -> bool:
    """Whether a module computes a parameter of the module that holds it, which is called for no activations."""
    return ".parametrizations." in name
