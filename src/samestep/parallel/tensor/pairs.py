"""Units: linears that are sliced together, found in a trace. Columns make a width, and one row layer takes it.

What makes a unit: the columns' outputs may only be worked on feature by feature (or head by head) until the row layer
takes them, since between the two a rank sees its own features alone. The trace tells which modules are called in
between, and from what each input is computed; it doesn't see plain functions between modules (a softmax over all
features, say), which is why the sliced model's output is compared with the whole one's in the end (`apply`).
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
_NOT_ELEMENTWISE = ("Softmax", "LogSoftmax", "Softmin", "Softmax2d", "GLU")


@dataclass(frozen=True, kw_only=True)
class Unit:
    """Linear layers that are sliced together: columns, and the row layer that takes their output."""

    columns: tuple[str, ...]
    row: str
    width: int  # what the row layer takes, over all ranks
    pieces: tuple[tuple[int, ...], ...]  # of each column, the sizes of what it fuses, in heads or features
    owner: str | None = None  # the attention module whose heads are sliced
    heads: Heads | None = None
    partial: tuple[str, ...] = ()  # modules in between that stay whole, and whose gradients are then in parts
    head_tables: tuple[str, ...] = ()  # embeddings of one number a head
    by_head: bool = False  # its one column gives [key-value heads, queries of each + 2, head_dim], flattened

    def shared_columns(self, parts: int) -> tuple[str, ...]:
        """Columns that stay whole, since ranks need the same key-value heads of them; each takes what it needs."""
        if self.heads is None or not self.heads.shares_keys(parts):
            return ()
        alone = (self.heads.queries,)
        return tuple(name for name, each in zip(self.columns, self.pieces, strict=True) if each != alone)

    def laid_by_head(self, parts: int) -> "Unit | None":
        """The same with a column that fuses queries, keys and values head by head, as Bloom's and GPT-NeoX's do.

        From the widths alone the two ways can't be told apart. None where the unit has no such column, or ranks would
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
    """Finds the units of a model: attentions first, then pairs of layers with only elementwise work in between."""

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
        self._linears = [  # in the order of calls; of an adapted one not what it consists of
            name for name in self._first if is_linear(self._modules[name]) and name not in self._inner
        ]

    def find(self) -> list[Unit]:
        """The units of the model, each linear in one of them at most."""
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
        """The layer of a unit in a block that takes something else than [batch, tokens, features], and its shape."""
        if self.block_of(unit.row) is None:
            return None
        given = ((name, seen.shape) for name in unit.columns for seen in self._first[name].inputs())
        return next(((name, shape) for name, shape in given if len(shape) != 3), None)

    def _agrees(self, unit: Unit) -> bool:
        """Whether no role that is given for a member says otherwise."""
        return self._forced.get(unit.row, "row") == "row" and all(
            self._forced.get(name, "column") == "column" for name in unit.columns
        )

    def _attention(self, owner: str) -> Unit | None:
        """The unit of an attention module: its projections, its output layer, what works by head in between."""
        module = self._modules[owner]
        heads = heads_of(module)
        if heads is None or is_multihead(module):
            return None
        call = self._first[owner]
        given = {seen.identity for seen in call.inputs()}
        mine = [name for name in self._linears if name.rpartition(".")[0] == owner]
        columns = [name for name in mine if self._input(name) in given]
        rest = [name for name in mine if name not in columns]
        row = self._row_of_attention(call, columns, rest)
        if row is None or self.block_of(row) != self.block_of(owner):
            return None
        width = in_features(self._modules[row])
        pieces = heads.pieces([out_features(self._modules[name]) for name in columns], width)
        if pieces is None:
            return None
        partial, tables = [], []
        for name in self._between(columns, row):
            if not has_own_parameters(self._modules[name]):
                continue
            if self._is_per_head(name, width // heads.queries):
                partial.append(name)
            elif self._is_head_table(name, owner, heads):
                tables.append(name)
            else:
                return None
        return Unit(
            columns=tuple(columns),
            row=row,
            width=width,
            pieces=tuple(map(tuple, pieces)),
            owner=owner,
            heads=heads,
            partial=tuple(partial),
            head_tables=tuple(tables),
        )

    def _row_of_attention(self, call: Call, columns: Sequence[str], rest: Sequence[str]) -> str | None:
        """The one other linear of the attention, or where it has none the one that takes what it gives."""
        if not columns or len(rest) > 1:
            return None
        if rest:
            return rest[0]
        given = {seen.identity for seen in call.outputs()}
        after = [name for name in self._linears if self._first[name].began > call.ended]
        return after[0] if after and self._input(after[0]) in given else None

    def _is_per_head(self, name: str, head: int) -> bool:
        """Whether a module works on one head at a time, as a norm of queries or keys does."""
        shapes = [parameter.shape for parameter in self._modules[name].parameters(recurse=False)]
        if not shapes:  # a parametrized module, whose gradients come together in a module inside
            return False
        seen = [*self._first[name].inputs(), *self._first[name].outputs()]
        return all(shape[-1] == head for shape in shapes) and all(s.shape[-1] == head for s in seen)

    def _is_head_table(self, name: str, owner: str, heads: Heads) -> bool:
        """Whether an embedding gives one number a head, as T5's relative positions do."""
        module = self._modules[name]
        return (
            isinstance(module, nn.Embedding)
            and module.embedding_dim == heads.queries
            and name.rpartition(".")[0] == owner
        )

    def _pair(self, free: Sequence[str]) -> Unit | None:
        """Columns that share an input, and the linear after them, with nothing but elementwise modules between."""
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
        # Where a model has repeated blocks, what lies outside of them is small.
        if self.block_of(row) != self.block_of(columns[0]) or (self._blocks and self.block_of(row) is None):
            return None
        if any(not self._is_harmless(name) for name in self._between(columns, row)):
            return None
        width = in_features(self._modules[row])
        # [columns]: each must make what the row layer takes, or all of them together twice that, as a gated layer
        # does.
        widths = [out_features(self._modules[name]) for name in columns]
        fused = len(columns) == 1 and widths[0] == 2 * width  # gate and up in one
        if not fused and any(w != width for w in widths):
            return None
        pieces = ((width, width),) if fused else ((width,),) * len(columns)
        return Unit(columns=tuple(columns), row=row, width=width, pieces=pieces)

    def _given(self, free: Sequence[str]) -> Unit | None:
        """Columns and the row after them as a plan says: trusted for what can't be seen in a trace."""
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
            partial=tuple(n for n in self._between(columns, row) if has_own_parameters(self._modules[n])),
        )

    def _comes_from(self, row: str, columns: Sequence[str]) -> bool:
        """Whether what a layer takes is computed from what each of some others gives."""
        made = [seen for name in columns for seen in self._first[name].outputs()]
        return all(
            self._trace.computed_from(seen, made) == {each.identity for each in made}
            for seen in self._first[row].inputs()
        )

    def _after(self, columns: Sequence[str]) -> str | None:
        """The first linear that is called after all of the columns have ended."""
        last = max(self._first[name].ended for name in columns)
        return next((name for name in self._linears if self._first[name].began > last), None)

    def _between(self, columns: Sequence[str], row: str) -> Iterator[str]:
        """Modules that are called from the first column's beginning to the row's."""
        began = min(self._first[name].began for name in columns)
        for call in self._trace.calls:
            if call.name in self._inner or call.name in columns:
                continue
            if began < call.began and call.ended < self._first[row].began:
                yield call.name

    def _is_harmless(self, name: str) -> bool:
        """Whether a module is elementwise over features, or only calls other modules."""
        module = self._modules[name]
        if has_own_parameters(module):
            return False
        kind = type(module)
        elementwise = kind.__module__ in _ELEMENTWISE and kind.__name__ not in _NOT_ELEMENTWISE
        return elementwise or isinstance(module, nn.Identity) or any(True for _ in module.children())

    def _input(self, name: str) -> int | None:
        """The identity of a linear layer's input tensor in the trace."""
        seen = self._first[name].inputs()
        return seen[0].identity if seen else None
