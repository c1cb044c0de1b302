"""The tensor parallel plan of a model: which modules are sliced, over how many ranks, and along which dimension.

A cut is (dimension, ranges of each rank): [(first, one past the last), ...] along this dimension of the whole
parameter. A parameter that fuses several matrices has a range in each: of fused [queries; keys; values] with 3 x 64
rows, rank 0 of 2 holds (0, 32), (64, 96) and (128, 160).

A module's role comes from four sources, of which a later one overrides the earlier: transformers' own `tp_plan`,
modules whose parameters other modules use (they stay whole), modules that an earlier try found to be at fault (they
stay whole), and the user's plan.
"""

from collections import Counter
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from torch import nn

from samestep.data.order import bounds
from samestep.errors import LayoutError
from samestep.parallel.calls import Trace
from samestep.parallel.low_rank import Update, adapted, adapted_layers, base_of
from samestep.parallel.sharding import Range
from samestep.parallel.tensor.modules import (
    Heads,
    Role,
    computes_own_weight,
    computes_weight,
    gathered_dims,
    in_dim,
    in_features,
    is_embedding,
    is_linear,
    is_multihead,
    named,
    of_transformers,
    out_dim,
    out_features,
    outputs_of,
)
from samestep.parallel.tensor.pairs import Unit, UnitFinder

Cut = tuple[int, list[list[Range]]]  # a dimension, and each rank's ranges along it


@dataclass(frozen=True, kw_only=True)
class TensorPlan:
    """The modules to slice. All others stay whole on every rank, which is always correct."""

    parts: int
    units: tuple[Unit, ...]
    multiheads: tuple[str, ...]  # nn.MultiheadAttention modules, each of which is a unit of its own
    tables: tuple[str, ...]  # embeddings sliced by the vocabulary
    outputs: tuple[str, ...]  # output layers sliced by the vocabulary
    gathered: tuple[str, ...] = ()  # layers whose outputs are computed in slices and gathered right after
    left_whole: Mapping[str, str] = field(default_factory=dict)  # module that could not be sliced -> reason

    def roles(self) -> dict[str, Role]:
        """The role of every module that is sliced."""
        roles: dict[str, Role] = dict.fromkeys((*self.tables, *self.outputs), "vocabulary")
        roles |= dict.fromkeys(self.multiheads, "column")
        for unit in self.units:
            roles |= {**dict.fromkeys((*unit.columns, *unit.head_tables), "column"), unit.row: "row"}
        return roles

    def cuts(self, model: nn.Module) -> dict[str, Cut]:
        """The cut of each sliced parameter, by its name."""
        cuts: dict[str, Cut] = {}
        for name in (*self.tables, *self.outputs):
            module = model.get_submodule(name)
            for own, parameter in module.named_parameters(recurse=False):
                cuts[f"{name}.{own}"] = (0, vocabulary_ranges(parameter.shape[0], self.parts))
        for name in self.gathered:
            module = model.get_submodule(name)
            ranges = even_ranges([outputs_of(module)], self.parts)
            cuts |= {f"{name}.{own}": (dim, ranges) for own, dim in (gathered_dims(module) or {}).items()}
        for unit in self.units:
            cuts |= dict(self._cuts_of_unit(model, unit))
        for name in self.multiheads:
            cuts |= dict(self._cuts_of_multihead(model, name))
        return cuts

    def in_parts(self, model: nn.Module) -> set[str]:
        """The modules with whole parameters whose gradients on a rank come from its heads or features only.

        Of an adapter, that is the matrix that is not sliced: it feeds this rank's outputs, or reads its inputs.
        """
        names: set[str] = set()
        for unit in self.units:
            for name in unit.columns:
                linear = model.get_submodule(name)
                names |= {f"{name}.{update.down}" for update in _updates(linear)}
                if name in unit.shared_columns(self.parts):
                    names |= {_base_name(name, linear), *(f"{name}.{low_rank.up}" for low_rank in _updates(linear))}
            names |= {f"{unit.row}.{update.up}" for update in _updates(model.get_submodule(unit.row))}
        for name in self.gathered:
            names |= {f"{name}.{update.down}" for update in _updates(model.get_submodule(name))}
        return names

    def _cuts_of_unit(self, model: nn.Module, unit: Unit) -> Iterator[tuple[str, Cut]]:
        """The cuts of a unit's parameters: columns along their outputs, the row layer along its inputs."""
        # The number of rows that must stay on one rank: those of a head, or 1 for features without heads.
        step = unit.width // unit.heads.queries if unit.heads is not None else 1
        # Whole on every rank, so they have no cut; their gradients are summed over the ranks (`in_parts`).
        shared = unit.shared_columns(self.parts)
        for name, pieces in zip(unit.columns, unit.pieces, strict=True):
            if name in shared:
                continue
            linear = model.get_submodule(name)
            of_column = out_features(linear) // sum(pieces) if unit.by_head else step
            ranges = even_ranges(pieces, self.parts, of_column)
            yield f"{_base_name(name, linear)}.weight", (out_dim(linear), ranges)
            if base_of(linear).bias is not None:
                yield f"{_base_name(name, linear)}.bias", (0, ranges)
            for update in _updates(linear):
                yield f"{name}.{update.up}.weight", (0, ranges)
        # The row layer takes the query heads' outputs, whatever the number of key-value heads.
        heads = [unit.heads.queries if unit.heads is not None else unit.width]
        row, ranges = model.get_submodule(unit.row), even_ranges(heads, self.parts, step)
        yield f"{_base_name(unit.row, row)}.weight", (in_dim(row), ranges)
        for update in _updates(row):
            yield f"{unit.row}.{update.down}.weight", (1, ranges)
        for name in unit.head_tables:
            yield f"{name}.weight", (1, even_ranges(heads, self.parts))

    def uneven(self, model: nn.Module) -> bool:
        """Whether the ranks' slices of units differ in size, so that a forward may fail on some ranks only.

        `model` is still whole.
        """
        cuts = [cut for unit in self.units for _, cut in self._cuts_of_unit(model, unit)]
        cuts += [cut for name in self.multiheads for _, cut in self._cuts_of_multihead(model, name)]
        return any(
            len({sum(last - first for first, last in of_rank) for of_rank in ranges}) > 1 for _, ranges in cuts
        )

    def _cuts_of_multihead(self, model: nn.Module, name: str) -> Iterator[tuple[str, Cut]]:
        """The cuts of an nn.MultiheadAttention: projections by heads, out_proj along its inputs."""
        attention = model.get_submodule(name)
        assert isinstance(attention, nn.MultiheadAttention)
        heads, step = attention.num_heads, attention.head_dim
        # in_proj_weight fuses queries, keys and values: [3 * features, features].
        one, three = even_ranges([heads], self.parts, step), even_ranges([heads] * 3, self.parts, step)
        for own in ("in_proj_weight", "in_proj_bias"):
            if getattr(attention, own) is not None:
                yield f"{name}.{own}", (0, three)
        for own in ("q_proj_weight", "k_proj_weight", "v_proj_weight"):
            if getattr(attention, own) is not None:
                yield f"{name}.{own}", (0, one)
        yield f"{name}.out_proj.weight", (1, one)


def make_plan(
    model: nn.Module,
    trace: Trace,
    blocks: Sequence[str],
    parts: int,
    *,
    roles: Mapping[str, str] | None = None,
    left_whole: Mapping[str, str] | None = None,
    by_head: Collection[str] = (),
    tokens_split: bool = False,
) -> TensorPlan:
    """Find the modules that can be sliced over `parts` ranks.

    `blocks` are the names of the repeated layers. `roles` (name or pattern -> role) overrides the plan of a
    transformers model, which overrides what is found here. Modules in `left_whole` (module -> reason) stay whole, and
    so does an attention whose heads can't be divided over the ranks (`Heads.why_whole`). The columns in `by_head`
    fuse queries, keys and values head by head instead of one matrix after the other.

    A model without an attention or a pair of layers to slice computes each layer's outputs in slices. If these fail
    in a model that has only parametrized layers, all of its layers stay whole.

    With `tokens_split`, layers that take flattened samples, [batch * tokens, features], stay whole, since their input
    has no token dimension to gather. Raises LayoutError for a wrong `roles`, and if nothing can be sliced.
    """
    own_roles = named(model, roles or {})
    vocabulary = _vocabulary(model, trace)
    left = dict(left_whole or {})
    stay: dict[str, Role] = dict.fromkeys((*_used_elsewhere(model, trace), *left), "whole")
    forced: dict[str, Role] = {**of_transformers(model, vocabulary), **stay, **own_roles}
    finder = UnitFinder(model, trace, blocks, forced)
    units = [unit for unit in finder.find() if unit.heads is not None or unit.width >= parts]
    units = [(unit.laid_by_head(parts) or unit) if unit.columns[0] in by_head else unit for unit in units]
    candidates = [unit for unit in units if tokens_split and unit.heads is None]
    flat = [(unit, shape) for unit in candidates if (shape := finder.flat_input(unit)) is not None]
    units = [unit for unit in units if all(unit is not other for other, _ in flat)]
    attentions = dict(_multihead_attentions(model, forced))
    undivided = _undivided_attentions(units, attentions, parts)
    left |= undivided
    units = [unit for unit in units if (unit.owner or unit.row) not in left]
    multiheads = [name for name in attentions if name not in undivided]
    in_units = {name for unit in units for name in (*unit.members, *unit.head_tables)}
    large = [
        name
        for name, module in model.named_modules()
        if name not in in_units
        and _divides(_rows(module), parts)
        and forced.get(name, "vocabulary") == "vocabulary"
        and (name in forced or (_rows(module) == vocabulary and finder.block_of(name) is None))
    ]
    large = _tied_alike(model, large, {call.name for call in trace.calls})
    # The last resort is a gather after every layer: it saves memory and computation, but no communication.
    alone = not (units or multiheads)
    able = tuple(_gathered(model, trace, parts, forced, large)) if alone else ()
    gathered = () if tokens_split else able
    plan = TensorPlan(
        parts=parts,
        units=tuple(units),
        multiheads=tuple(multiheads),
        tables=tuple(name for name in large if is_embedding(model.get_submodule(name))),
        outputs=tuple(name for name in large if is_linear(model.get_submodule(name))),
        gathered=gathered,
        left_whole=left,
    )
    _check(plan, model, own_roles, [shape for _, shape in flat], able, tokens_split=tokens_split)
    return plan


def _base_name(name: str, linear: nn.Module) -> str:
    """The name of the module that holds a linear layer's weight and bias: with adapters, its base layer."""
    layer = adapted(linear)
    return f"{name}.{layer.base}" if layer is not None and layer.base else name


def _updates(linear: nn.Module) -> Sequence[Update]:
    """The low-rank updates of a linear layer; empty without adapters."""
    layer = adapted(linear)
    return () if layer is None else layer.updates


def even_ranges(pieces: Sequence[int], parts: int, step: int = 1) -> list[list[Range]]:
    """Each rank's ranges along a dimension of concatenated pieces.

    A piece of n units has n * `step` indices; each rank gets an even share of the units of every piece.
    """
    ranges: list[list[Range]] = [[] for _ in range(parts)]
    start = 0
    for piece in pieces:
        for rank in range(parts):
            first, last = bounds(piece, rank, parts)
            ranges[rank].append((start + first * step, start + last * step))
        start += piece * step
    return ranges


def vocabulary_ranges(rows: int, parts: int) -> list[list[Range]]:
    """Each rank's rows of a vocabulary, split as DTensor splits a dimension: equal but for the last ranks."""
    # ceil(rows / parts) per rank, as torch.chunk has it, since the loss on slices is computed by DTensor.
    size = -(-rows // parts)
    return [[(min(rows, rank * size), min(rows, (rank + 1) * size))] for rank in range(parts)]


def _divides(rows: int, parts: int) -> bool:
    """Whether every rank would get at least one row of a vocabulary."""
    return all(first < last for ranges in vocabulary_ranges(rows, parts) for first, last in ranges)


def _vocabulary(model: nn.Module, trace: Trace) -> int | None:
    """The vocabulary size: the configuration's, or else the rows of the largest embedding that takes model inputs."""
    size = getattr(getattr(model, "config", None), "vocab_size", None)
    if isinstance(size, int):
        return size
    whole = trace.of("")
    inputs = {seen.identity for seen in whole[0].inputs()} if whole else set()
    modules = dict(model.named_modules())
    rows = [
        _rows(modules[call.name])
        for call in trace.calls
        if is_embedding(modules[call.name]) and any(seen.identity in inputs for seen in call.inputs())
    ]
    return max(rows, default=None)


def _rows(module: nn.Module) -> int:
    """Rows of an embedding or an output layer that can be sliced by the vocabulary; 0 for any other module."""
    if isinstance(module, nn.Embedding) and is_embedding(module):
        return module.num_embeddings
    plain = is_linear(module) and adapted(module) is None
    return out_features(module) if plain and out_dim(module) == 0 else 0


def _multihead_attentions(
    model: nn.Module, forced: Mapping[str, Role]
) -> Iterator[tuple[str, nn.MultiheadAttention]]:
    """The nn.MultiheadAttention modules without parameters or keys that span their heads."""
    for name, module in model.named_modules():
        if not isinstance(module, nn.MultiheadAttention) or not is_multihead(module) or forced.get(name) == "whole":
            continue
        if module.bias_k is None and not module.add_zero_attn:
            yield name, module


def _undivided_attentions(
    units: Sequence[Unit], attentions: Mapping[str, nn.MultiheadAttention], parts: int
) -> dict[str, str]:
    """The attentions, found as units or as modules, whose heads can't be divided over the ranks, and why not."""
    heads = {unit.owner or unit.row: unit.heads for unit in units if unit.heads is not None}
    heads |= {name: Heads(queries=module.num_heads, keys=module.num_heads) for name, module in attentions.items()}
    return {name: why for name, module in heads.items() if (why := module.why_whole(parts)) is not None}


def _gathered(
    model: nn.Module, trace: Trace, parts: int, forced: Mapping[str, Role], others: Collection[str]
) -> Iterator[str]:
    """Layers that can compute their outputs in slices, and share no parameter with another module."""
    called = {call.name for call in trace.calls}
    layers = adapted_layers(model)
    holders = Counter(id(parameter) for module in model.modules() for parameter in module.parameters(recurse=False))
    for name, module in model.named_modules():
        whole = name in others or forced.get(name) == "whole"
        if whole or name not in called or gathered_dims(module) is None:
            continue
        if any(name.startswith(f"{layer}.") for layer in layers):  # an adapted layer is sliced with its inner modules
            continue
        # Computing a weight from uneven slices may fail on one rank only, and the others would wait for that rank.
        if computes_own_weight(module) and outputs_of(module) % parts:
            continue
        if outputs_of(module) >= parts and all(holders[id(p)] == 1 for p in module.parameters()):
            yield name


def _tied_alike(model: nn.Module, names: Sequence[str], called: set[str]) -> list[str]:
    """The modules of `names` that are called, and whose parameters are not shared with a module outside `names`."""
    holders: dict[int, list[str]] = {}
    for name, module in model.named_modules():
        for parameter in module.parameters(recurse=False):
            holders.setdefault(id(parameter), []).append(name)

    def alike(name: str) -> bool:
        for parameter in model.get_submodule(name).parameters(recurse=False):
            for other in holders[id(parameter)]:
                # A parent module may also hold its output layer's bias.
                if other not in names and not name.startswith(other + "."):
                    return False
        return True

    def is_called(name: str) -> bool:
        """Whether the module, or another one that holds the same weight, is called."""
        weight = model.get_submodule(name).get_parameter("weight")
        return any(other in called for other in holders[id(weight)])

    return [name for name in names if is_called(name) and alike(name)]


def _used_elsewhere(model: nn.Module, trace: Trace) -> list[str]:
    """Modules with a parameter that another module's forward reads, and so needs whole."""
    names = {parameter: name for name, parameter in model.named_parameters()}
    holders: dict[nn.Parameter, list[str]] = {}
    for module_name, module in model.named_modules():
        for parameter in module.parameters(recurse=False):
            holders.setdefault(parameter, []).append(module_name)
    users: list[str] = []
    for parameter, own in holders.items():
        uses = trace.uses.get(names[parameter], ())
        if any(not set(own) & set(running) for running in uses):
            users += own
    return users


def _check(
    plan: TensorPlan,
    model: nn.Module,
    own_roles: Mapping[str, Role],
    flat: Sequence[tuple[str, Sequence[int]]],
    able: Sequence[str],
    *,
    tokens_split: bool,
) -> None:
    """Raise LayoutError for a given role that is not possible, and if nothing is sliced.

    `flat`: layers whose input has no token dimension, with its shape. `able`: those that could be sliced alone, with
    a gather after each.
    """
    planned = plan.roles()
    for name, role in own_roles.items():
        if role != "whole" and planned.get(name) != role:
            raise LayoutError(
                f'run.tensor_plan: {name} can\'t be "{role}": {_why_not(model.get_submodule(name), role)}'
            )
    if not (planned or plan.gathered) and flat:
        first, shape = flat[0]
        raise LayoutError(
            f'layout "tp{plan.parts} sequence=split": {first} takes {list(shape)}, which is not [samples, tokens, '
            f"features], so there is no dimension of tokens to split; use tp{plan.parts}, which slices it"
        )
    if not (planned or plan.gathered) and tokens_split and able:
        raise LayoutError(
            f'layout "tp{plan.parts} sequence=split": {able[0]} and others of {type(model).__name__} are sliced one '
            "by one, each with a gather of its outputs, and no rank has a part of the tokens between these; use "
            f"tp{plan.parts}"
        )
    # A model that has only parametrized layers is correct with all of them whole; `apply` reports that to the user.
    whole = [model.get_submodule(name) for name in plan.left_whole]
    if not (planned or plan.gathered) and not (whole and all(map(computes_own_weight, whole))):
        computed = next((name for name, module in model.named_modules() if computes_weight(module)), None)
        but = (
            ""
            if computed is None
            else f", and the weight of {computed} ({type(model.get_submodule(computed)).__name__}) is computed from "
            "others before each use, as weight_norm and spectral_norm do"
        )
        layout = f"tp{plan.parts} sequence=split" if tokens_split else f"tp{plan.parts}"
        raise LayoutError(
            f'layout "{layout}": nothing of {type(model).__name__} can be sliced; tensor parallel slices '
            "attentions, pairs of linear layers with only activations in between, and tables of a vocabulary"
            f"{but}; use dp{plan.parts} or fsdp{plan.parts}"
        )


def _why_not(module: nn.Module, role: Role) -> str:
    """The reason why a module can't have the role that a user gave it."""
    if role == "column":
        return "no row layer takes what it makes, or that is not the queries, keys and values of whole heads"
    if role == "row":
        return f"no column layer before it makes the {in_features(module)} features that it takes; name one"
    return f"it has {_rows(module)} rows, and its weight may be another module's too"
