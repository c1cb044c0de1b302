"""Applies tensor parallel to a model: slices parameters, replaces forwards, compares the output.

How a wrong slice is found. After slicing, every rank runs the example and compares its output, and on the way the
output of every module, with the whole model's (`compare.Comparison`). All ranks of the context and tensor axes agree
on the result, so that either all continue or all undo the slicing: parameters, forwards and the shard table are
restored (`Attributes`), the modules at fault stay whole, and a new plan is made. This ends, as each try adds at least
one module to those that stay whole.
"""

import sys
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from fnmatch import fnmatchcase
from functools import cached_property
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from samestep.comm.mesh import Mesh
from samestep.data.order import bounds
from samestep.errors import LayoutError
from samestep.layout import Layout
from samestep.parallel import collectives
from samestep.parallel.attributes import Attributes, wrap_forward
from samestep.parallel.blocks import are_of_one_kind, with_forward
from samestep.parallel.calls import Call, Seen, Trace, seen_in
from samestep.parallel.exact.forward_context import ForwardContext, Portion
from samestep.parallel.loss.vocabulary import Vocabulary, agree
from samestep.parallel.parallel_model import Findings, WholeModules
from samestep.parallel.sharding import Part, ShardTable, Slice
from samestep.parallel.tensor import layers, sequence_parallel
from samestep.parallel.tensor.compare import Output, SliceComparison, SliceDeparture, output_of, without_graph
from samestep.parallel.tensor.gradients import Digests, can_compare, digests_of, keeping_graph
from samestep.parallel.tensor.layers import InputMessage, Message, UnitRegion, multihead
from samestep.parallel.tensor.modules import divide, outputs_dim, pattern_of
from samestep.parallel.tensor.pairs import Unit
from samestep.parallel.tensor.plan import TensorPlan, make_plan, vocabulary_ranges
from samestep.parallel.tensor.regions import Regions, find_regions, holder_of
from samestep.parallel.tensor.sequence_parallel import Key, Stream, find_lists, token_dim
from samestep.parallel.variation import varied
from samestep.torch_internals import pytree


def slice_tensors(
    model: nn.Module,
    blocks: Sequence[nn.Module],
    seen: Trace,
    parts: ShardTable,
    mesh: Mesh,
    forward_context: ForwardContext,
    *,
    example: Any,
    roles: Mapping[str, str] | None,
    findings: Findings | None = None,
    apart: Collection[str] = (),
) -> Vocabulary:
    """Slice a model in place over the tensor axis, and record the slices in `parts`.

    `seen` is the trace of the model's forward of the example. `roles` is a user's plan: name or pattern of modules ->
    role. `apart`: modules whose tokens are split over other ranks. The sliced model's output for the example is
    compared with the whole one's. A module at fault is left whole and the rest is sliced again, which is reported on
    standard error. Raises LayoutError if nothing is left to slice, and if a module fails in the role that `roles`
    gives it.
    """
    layout = parts.layout
    slicing = _Slicing(
        model=model,
        repeated=_repeated(model, blocks),
        seen=seen,
        parts=parts,
        mesh=mesh,
        forward_context=forward_context,
        example=example,
        given=roles,
        known={} if findings is None else findings.slices,
        apart=apart,
    )
    if layout.sequence != "split":
        vocabulary, plan = slicing.apply([])
    else:
        try:
            # Its errors are raised before those about tokens that can't be split.
            make_plan(model, seen, slicing.repeated, layout.tensor, roles=roles, tokens_split=True)
            vocabulary, plan, lists = slicing.apply_to_lists()
            _tell_split(model, slicing.repeated, lists, layout)
        except LayoutError as error:
            vocabulary, plan = slicing.apply_token_wise(error)
            _tell(
                layout, f"tokens are split in {', '.join(dict.fromkeys(map(pattern_of, slicing.token_wise)))} alone"
            )
    if plan.left_whole:
        _tell(layout, _said(plan.left_whole))
    return vocabulary


def _tell(layout: Layout, text: str) -> None:
    """Tell the user something about the layout, from one rank."""
    if dist.get_rank() == 0:
        print(f'samestep: layout "{layout}": {text}', file=sys.stderr, flush=True)


def _tell_split(model: nn.Module, repeated: Sequence[str], lists: Sequence[Sequence[str]], layout: Layout) -> None:
    """Report where tokens are split, unless they are in all repeated layers."""
    split = {name for names in lists for name in names}
    all_layers = [model.get_submodule(name) for name in repeated]
    if any(model.get_submodule(name) not in all_layers for name in split) | (len(split) < len(repeated)):
        where = ", ".join(dict.fromkeys(f"{name.rpartition('.')[0]}.*" for name in split))
        _tell(layout, f"tokens are split in {where} alone")


@dataclass(frozen=True, kw_only=True)
class _Slicing:
    """Slices a model, with tokens split in some lists of its blocks."""

    model: nn.Module
    repeated: Sequence[str]
    seen: Trace
    parts: ShardTable
    mesh: Mesh
    forward_context: ForwardContext
    example: Any
    given: Mapping[str, str] | None
    apart: Collection[str]  # modules whose tokens are split over other ranks
    known: dict[Sequence[Any], WholeModules]  # findings of other rehearsed ranks, by the lists of blocks
    token_wise: list[str] = field(default_factory=list)  # the modules that got a part of the tokens each by itself

    @cached_property
    def _expected(self) -> tuple[Output, Digests | None]:
        """The unsliced model's output for the example, computed once for all tries, and its gradients.

        None: they can't be compared, since they have no values or the model fails where gradients are kept.
        """
        output: Output | None = None
        gradients: Digests | None = None
        if can_compare(self.model):
            # A model's own code may raise anything where it is in evaluation mode and gradients are kept.
            with suppress(Exception), keeping_graph(self.model, self._recomputed):
                output = output_of(self.model, self.example)
                gradients = digests_of(self.model, output.numbers)
            device, everyone = next(self.model.parameters()).device, self.mesh.group("context", "tensor")
            gradients = gradients if agree(gradients is not None, everyone, device) else None
        if output is None:
            with torch.no_grad():
                output = output_of(self.model, self.example)
        return without_graph(output), gradients

    @property
    def _recomputed(self) -> list[nn.Module]:
        """The blocks whose activations the layout doesn't keep either."""
        if self.parts.layout.recompute == "none":
            return []
        return with_forward([self.model.get_submodule(name) for name in self.repeated])

    def apply_to_lists(self) -> tuple[Vocabulary, TensorPlan, Sequence[Sequence[str]]]:
        """Slice the model, with tokens split in as many lists of its blocks as possible; also returns these.

        Raises LayoutError if there are none.
        """
        lists = find_lists(self.model, self.repeated, self.seen, str(self.parts.layout))
        try:
            return *self.apply(lists), lists
        except LayoutError:
            able = [names for names in lists if len(lists) > 1 and self.can_have([names])]
            if not able:
                raise
            return *self.apply(able), able

    def apply_token_wise(self, refused: LayoutError) -> tuple[Vocabulary, TensorPlan]:
        """Slice the model, with tokens split in the modules outside of the slices that take each token by itself.

        Raises `refused`, why the lists of blocks can't be split, if there are no such modules.
        """
        before, table = Attributes(self.model), dict(self.parts.table)
        try:
            applied = self.apply([], token_wise=True)
        except LayoutError:
            raise refused from None
        if not self.token_wise:
            self._take_back(before, table)
            raise refused
        return applied

    def can_have(self, lists: Sequence[Sequence[str]]) -> bool:
        """Whether the model can be sliced with the tokens of these lists split; leaves the model unchanged."""
        before, table = Attributes(self.model), dict(self.parts.table)
        try:
            self.apply(lists)
        except LayoutError:
            return False
        self._take_back(before, table)
        return True

    def apply(self, lists: Sequence[Sequence[str]], *, token_wise: bool = False) -> tuple[Vocabulary, TensorPlan]:
        """Slice all modules that can be sliced, with tokens split in `lists`.

        `token_wise`: and in the modules outside of the slices that take each token by itself.

        A rehearsed rank (meta tensors) takes another rank's findings (`known`) and compares nothing. If nothing is
        left to slice, restores the model and raises LayoutError.
        """
        with varied(self.model):
            return self._apply(lists, token_wise)

    def _apply(self, lists: Sequence[Sequence[str]], token_wise: bool) -> tuple[Vocabulary, TensorPlan]:
        model, layout, group = self.model, self.parts.layout, self.mesh.group("tensor")
        # Ranks that run one forward together: all of them must make the same decision.
        everyone = self.mesh.group("context", "tensor")
        before, table = Attributes(self.model), dict(self.parts.table)
        key = (*map(tuple, lists), *([token_wise] if token_wise else []))
        known_modules = self.known.get(key)
        expected, gradients = self._expected if known_modules is None else (None, None)
        whole: dict[str, str] = {} if known_modules is None else dict(known_modules.whole)
        # Columns that are sliced head by head after slicing them matrix by matrix gave a wrong output.
        by_head: set[str] = set() if known_modules is None else set(known_modules.by_head)
        # Parameters' patterns, with the number of the way to cut them that is next.
        tried: dict[str, int] = {} if known_modules is None else dict(known_modules.tried)
        departure: SliceDeparture | None = None
        # One try per iteration, until it returns or no further module can be left whole (LayoutError).
        while True:
            try:
                plan = make_plan(
                    model,
                    self.seen,
                    self.repeated,
                    layout.tensor,
                    roles=self.given,
                    left_whole=whole,
                    by_head=by_head,
                    tokens_split=bool(lists),
                )
            except LayoutError:
                if departure is None or not lists:
                    raise
                raise LayoutError(f"{departure.sentence.rpartition(';')[0]}; use sequence=whole") from None
            uneven = plan.uneven(model)
            streams = self._streams(lists, plan)
            regions = find_regions(model, self.seen, plan, streams, tried)
            if regions.refused:
                self._check_roles(regions.refused)
                whole |= regions.refused
                continue
            vocabulary = Vocabulary(self.mesh.grid["tensor"])
            slicer = _Slicer(model, plan, regions, self.seen, streams, group, self.forward_context, vocabulary)
            failed = self._slice(slicer)
            if token_wise:
                self._split_token_wise()
            if known_modules is not None or expected is None:
                vocabulary.able = known_modules is not None and known_modules.able
                return vocabulary, plan
            comparison = SliceComparison(
                model, layout, plan, self.seen, streams, group, everyone, self.given, self.parts, self._recomputed
            )
            # A module may also fail for the number of tokens of some ranks only.
            departure = comparison.hold(
                self.example, expected, gradients, vocabulary, failed, rehearse=uneven or bool(lists)
            )
            if departure is None:
                self.known[key] = WholeModules(whole=whole, by_head=by_head, tried=tried, able=vocabulary.able)
                return vocabulary, plan
            self._take_back(before, table)
            blamed = _leave_whole(departure, plan, everyone)
            if regions.try_next(blamed, tried):
                continue
            others = _with_columns_by_head(plan, blamed) - by_head
            if others:
                by_head |= others
                tried.clear()
                continue
            more = {name: departure.why for name in blamed if name not in whole}
            if not more or (self.given and not departure.of_ours):
                raise LayoutError(departure.sentence)
            whole |= more

    def _streams(self, lists: Sequence[Sequence[str]], plan: TensorPlan) -> list[Stream]:
        """The split tokens of each list of blocks, with the modules in it that gather all tokens.

        Raises LayoutError if such a module shares a parameter with one outside of it.
        """
        layout, group = self.parts.layout, self.mesh.group("tensor")
        streams = [Stream(names, self.seen, group, token_dim(self.model, names), str(layout)) for names in lists]
        slices = [name for unit in plan.units if unit.heads is not None for name in unit.members]
        for stream in streams:
            stream.find_gathered(self.seen, [*slices, *plan.multiheads])
            outside = self.seen.used_outside(self.model, [call.name for call in stream.gathered])
            if outside is not None:
                raise LayoutError(
                    f'layout "{layout}": {outside} is used by a module that needs all tokens, and outside of it; '
                    "use sequence=whole"
                )
        return streams

    def _slice(self, slicer: "_Slicer") -> Exception | None:
        """Slice the model; return the error on this rank, if any, since other ranks with other slices may succeed."""
        try:
            slicer.slice(self.parts)
        except LayoutError:
            raise
        except Exception as error:
            return error
        return None

    def _split_token_wise(self) -> None:
        """Give each rank a part of the tokens in modules whose parameters, and their gradients, are whole on it."""
        # They import torch._dynamo, which commands that only check a job don't need.
        from samestep.parallel.context.shares import Shares
        from samestep.parallel.context.token_wise import find_token_wise, split_run

        group = self.mesh.group("tensor")
        names = {parameter: name for name, parameter in self.model.named_parameters()}

        def is_whole(module: str, _: Sequence[Call]) -> bool:
            held = [self.parts.part(names[p]) for p in self.model.get_submodule(module).parameters()]
            return bool(held) and all(part.slice is None and group not in part.sum_over for part in held)

        modules = find_token_wise(self.model, [""], self.seen, self.apart, is_whole)
        self.token_wise[:] = [token_wise.name for token_wise in modules]
        for token_wise in modules:
            split_run(self.model, [token_wise], Shares(group=group), self.forward_context)
            for parameter in self.model.get_submodule(token_wise.name).parameters():
                self.parts.add_sum(names[parameter], group)

    def _check_roles(self, refused: Mapping[str, str]) -> None:
        """Raise LayoutError if the user's plan gives a role to a module that can't be sliced."""
        for name, why in refused.items():
            if any(fnmatchcase(name, pattern) for pattern in self.given or {}):
                kind = type(self.model.get_submodule(name)).__name__
                plan = {**(self.given or {}), **dict.fromkeys(map(pattern_of, refused), "whole")}
                fix = ", ".join(f'"{pattern}": {role}' for pattern, role in plan.items())
                raise LayoutError(
                    f'layout "{self.parts.layout}": {name} ({kind}) can\'t be sliced, since it {why}; use '
                    f"run.tensor_plan: {{{fix}}}"
                )

    def _take_back(self, before: Attributes, table: Mapping[str, Part]) -> None:
        """Restore the model and the table to their state before a try."""
        before.restore()
        self.parts.table.clear()
        self.parts.table.update(table)


def _leave_whole(departure: SliceDeparture, plan: TensorPlan, group: dist.ProcessGroup) -> list[str]:
    """The modules that any rank of the group would leave whole; if there are none, all attentions and pairs."""
    everyone: list[Any] = [None] * dist.get_world_size(group)
    # Ranks hold different slices, so each may blame a different module; the union is in rank order.
    dist.all_gather_object(everyone, departure.to_leave_whole, group=group)
    units = list(dict.fromkeys(name for names in everyone for name in names))
    return units or [*plan.multiheads, *(name for unit in plan.units for name in unit.members), *plan.gathered]


def _with_columns_by_head(plan: TensorPlan, names: Collection[str]) -> set[str]:
    """The columns that may fuse queries, keys and values head by head, of the units with a member in `names`."""
    return {
        unit.columns[0]
        for unit in plan.units
        if not {*unit.members}.isdisjoint(names) and unit.laid_by_head(plan.parts) is not None
    }


def _said(left_whole: Mapping[str, str]) -> str:
    """Describe which modules are whole on every rank and why; those of repeated layers are merged."""
    whys: dict[str, list[str]] = {}
    for name, why in left_whole.items():
        names = whys.setdefault(why, [])
        pattern = pattern_of(name)
        if pattern not in names:
            names.append(pattern)
    return "; ".join(f"every rank has all of {', '.join(names)}, since it {why}" for why, names in whys.items())


class _Slicer:
    """Slices the parameters of a plan and replaces the forwards of its layers."""

    def __init__(
        self,
        model: nn.Module,
        plan: TensorPlan,
        regions: Regions,
        seen: Trace,
        streams: Sequence[Stream],
        group: dist.ProcessGroup,
        forward_context: ForwardContext,
        vocabulary: Vocabulary,
    ) -> None:
        self._model = model
        self._plan = plan
        self._regions = regions
        self._seen = seen
        self._streams = streams
        self._group = group
        self._vocabulary = vocabulary
        self._forward_context = forward_context

    def slice(self, parts: ShardTable) -> None:
        """Slice all parameters of the plan, then replace forwards, which read the sizes of the slices."""
        for unit in self._plan.units:
            if unit.heads is not None and unit.owner is not None:
                rank = dist.get_rank(self._group)
                divide(self._model.get_submodule(unit.owner), unit.heads, unit.width, rank, self._plan.parts)
        self._cut(parts)
        layers.no_fast_path(self._model)
        for unit in self._plan.units:
            self._slice_unit(unit)
        for name in self._plan.multiheads:
            self._slice_multihead(name)
        for name in self._plan.tables:
            self._slice_table(name)
        for name in self._plan.outputs:
            rows = parts.state[f"{name}.weight"].shape[0]
            lengths = [last - first for ((first, last),) in vocabulary_ranges(rows, self._plan.parts)]
            self._vocabulary.output(self._model.get_submodule(name), lengths)
        for name in self._plan.gathered:
            self._gather_outputs(name)
        for stream in self._streams:
            stream.attach(self._model, self._forward_context)

    def _cut(self, parts: ShardTable) -> None:
        """Replace the parameters by this rank's slices; tied parameters are sliced once and stay tied."""
        cuts = {**self._plan.cuts(self._model), **self._regions.cuts}
        in_parts = self._plan.in_parts(self._model)
        by_name = _all_names(self._model)
        # By identity of the parameter: tied ones have one slice, whichever of their names has the cut.
        slices = {
            id(self._model.get_parameter(name)): Slice(group=self._group, dim=dim, ranges=ranges)
            for name, (dim, ranges) in cuts.items()
        }
        held = {
            id(p): nn.Parameter(slices[id(p)].take(p.detach()).contiguous(), p.requires_grad)
            for p in self._model.parameters()
            if id(p) in slices
        }
        for name, parameter in by_name:
            path, _, own = name.rpartition(".")
            if id(parameter) in slices:
                parts.table[name] = replace(parts.part(name), slice=slices[id(parameter)])
                setattr(self._model.get_submodule(path), own, held[id(parameter)])
            # The parameter is whole on every rank, but a rank's gradient comes from its heads, features or tokens
            # only: `sum_gradients` sums them.
            elif path in in_parts or name in self._regions.summed or self._stream_of(path) is not None:
                parts.add_sum(name, self._group)

    def _stream_of(self, name: str) -> Stream | None:
        return next((stream for stream in self._streams if stream.holds(name)), None)

    def _slice_unit(self, unit: Unit) -> None:
        """Replace a unit's forwards: columns with the collective at their input, and the row layer with the sum."""
        region = self._region(unit.row, unit.width, unit.heads.queries if unit.heads is not None else 0)
        gathered = self._gather_for_owner(unit)
        identities = [self._input(name) for name in unit.columns]
        entries: dict[int | None, InputMessage] = {}
        for name, identity in zip(unit.columns, identities, strict=True):
            if identity not in entries:
                # Already gathered for the whole attention, so the projection needs no collective of its own.
                entered = identity in gathered or unit.row in self._regions.entered
                message = _as_it_is if entered else self._enter(name, identity)
                entries[identity] = InputMessage(message, identities.count(identity))
            first = name == unit.columns[0]
            linear, entry = self._model.get_submodule(name), entries[identity]
            if name in unit.shared_columns(self._plan.parts):
                layers.shared_column(linear, entry, region, self._features(unit, name), begins=first)
            else:
                layers.column(linear, entry, region, begins=first)
        layers.row(self._model.get_submodule(unit.row), region)
        if unit.heads is not None and unit.owner is not None:
            self._slice_biases(unit.owner, unit.heads.queries, {*identities})
        if unit.row in self._regions.copied:
            self._copy_arguments(holder_of(unit), self._regions.copied[unit.row])

    def _slice_biases(self, owner: str, heads: int, hidden: Collection[int | None]) -> None:
        """Pass an attention this rank's heads of the biases in its arguments, such as ALiBi's (Press et al. 2022).

        A bias is [batch or 1, heads, queries, keys], or the same with the first two dimensions flattened; a bias that
        sliced modules computed has this rank's heads only, and is passed unchanged. `hidden`: the trace's identities
        of the columns' inputs, [batch, tokens, features].
        """
        call = self._seen.of(owner)[0]
        passed: list[tuple[Key, Any]] = [*enumerate(call.arguments), *call.keywords.items()]
        seen = {key: seen_as for key, seen_as in passed if isinstance(seen_as, Seen)}
        samples = next((key for key, seen_as in seen.items() if seen_as.identity in hidden), None)
        others = [
            key for key, seen_as in seen.items() if seen_as.identity not in hidden and len(seen_as.shape) in (3, 4)
        ]
        if samples is None or not others or heads == 1:
            return
        module = self._model.get_submodule(owner)
        first, last = bounds(heads, dist.get_rank(self._group), self._plan.parts)

        def own_heads(value: Tensor, batch: int) -> Tensor:
            apart = value.ndim == 4 and value.shape[1] == heads
            # A first dimension of the batch size may be one row per sample, not heads.
            folded = value.ndim == 3 and value.shape[0] in {batch * heads, heads} - {batch}
            if not (apart or folded):
                return value
            if apart:
                return value[:, first:last]
            return value.unflatten(0, (-1, heads))[:, first:last].flatten(0, 1)

        def with_own_heads(inner: Callable[..., Any], *arguments: Any, **keywords: Any) -> Any:
            batch = len(sequence_parallel.argument(arguments, keywords, samples))
            for key in others:
                value = sequence_parallel.argument(arguments, keywords, key)
                if isinstance(value, Tensor):
                    own = own_heads(value, batch)
                    arguments, keywords = sequence_parallel.replaced(arguments, keywords, key, own)
            return inner(*arguments, **keywords)

        wrap_forward(module, with_own_heads)

    def _copy_arguments(self, holder: str, places: Collection[Any]) -> None:
        """Sum the gradients of a module's arguments at these pytree paths, which it uses for its own part only."""
        group = self._group

        def copied(inner: Callable[..., Any], *arguments: Any, **keywords: Any) -> Any:
            done: dict[int, Tensor] = {}

            def copy(path: Any, leaf: Any) -> Any:
                if path not in places or not isinstance(leaf, Tensor) or not leaf.requires_grad:
                    return leaf
                # One all-reduce per tensor, also where it is passed several times; columns compare by identity.
                return done.setdefault(id(leaf), collectives.copy_to_region(leaf, group))

            if torch.is_grad_enabled():
                arguments, keywords = pytree.tree_map_with_path(copy, (arguments, keywords))
            return inner(*arguments, **keywords)

        wrap_forward(self._model.get_submodule(holder), copied)

    def _features(self, unit: Unit, name: str) -> Tensor:
        """Indices [n] of the outputs that this rank needs of a column that may fuse queries, keys and values."""
        assert unit.heads is not None
        rank, ranks = dist.get_rank(self._group), self._plan.parts
        queries = range(*bounds(unit.heads.queries, rank, ranks))
        keys = unit.heads.keys_of(rank, ranks)
        width = unit.width // unit.heads.queries  # features per head
        features: list[int] = []
        start = 0
        pieces = unit.pieces[unit.columns.index(name)]
        for number, heads in enumerate(pieces):
            held = queries if len(pieces) == 3 and number == 0 else keys
            # Row indices of the whole column's output.
            features += [start + head * width + feature for head in held for feature in range(width)]
            start += heads * width
        return torch.tensor(features)

    def _gather_outputs(self, name: str) -> None:
        """Make a layer compute its slice of the outputs, [..., outputs / ranks], and gather them right after."""
        module, group = self._model.get_submodule(name), self._group
        dim = outputs_dim(module)
        whole = self._seen.of(name)[0].outputs()[0].shape[dim]  # the module may not say how many it has
        slices = collectives.Slices.even(whole, group)
        layers.gathered(
            module,
            lambda x: collectives.copy_to_region(x, group),
            lambda x: collectives.gather_from_region(x, slices, dim),
        )

    def _slice_multihead(self, name: str) -> None:
        """Slice an nn.MultiheadAttention by heads. Query, key and value may be one tensor or several."""
        attention = self._model.get_submodule(name)
        assert isinstance(attention, nn.MultiheadAttention)
        arguments = self._seen.of(name)
        entries: dict[str, Message] = {}
        for position, argument in enumerate(("query", "key", "value")):
            identity = None
            if arguments:
                call = arguments[0]
                held = call.arguments[position] if position < len(call.arguments) else call.keywords.get(argument)
                identity = next((seen.identity for seen in seen_in(held)), None)
            entries[argument] = self._enter(name, identity)
        # A trained bias may be a mask. A stream of split tokens sums the gradients of what blocks hold and are given.
        mask = self._copy if self._stream_of(name) is None else _as_it_is
        entries |= dict.fromkeys(("attn_mask", "key_padding_mask"), mask)
        region = self._region(name, attention.embed_dim, attention.num_heads)
        multihead(attention, entries, region, self._group)

    def _slice_table(self, name: str) -> None:
        """Slice an embedding by rows: each rank looks up its own ids, and the sum over ranks has all of them."""
        embedding = self._model.get_submodule(name)
        assert isinstance(embedding, nn.Embedding)
        ((first, _),) = vocabulary_ranges(embedding.num_embeddings, self._plan.parts)[dist.get_rank(self._group)]
        layers.table(embedding, first, self._reduce)

    def _enter(self, name: str, identity: int | None) -> Message:
        """The collective at the input of a sliced layer."""
        stream = self._stream_of(name)
        if stream is not None and not stream.is_outside(name, identity):
            return stream.gather
        if stream is not None and stream.is_summed(name, identity):
            return _as_it_is
        return self._copy

    def _copy(self, x: Tensor) -> Tensor:
        return collectives.copy_to_region(x, self._group)

    def _reduce(self, x: Tensor) -> Tensor:
        return collectives.reduce_from_region(x, self._group)

    def _region(self, row: str, width: int, heads: int) -> UnitRegion:
        """The region between a unit's columns and its row layer, which takes `width` features over all ranks."""
        stream = self._stream_of(row)
        rank, ranks = dist.get_rank(self._group), self._plan.parts
        # Where this rank's features begin in the last dimension, and its heads in [batch, heads, queries, keys].
        part = Portion(activations={-1: bounds(width, rank, ranks)[0]}, attention={1: bounds(heads, rank, ranks)[0]})
        leave = stream.reduce_scatter if stream is not None else self._reduce
        return UnitRegion(leave, self._forward_context, part, all_tokens=stream is not None)

    def _gather_for_owner(self, unit: Unit) -> set[int | None]:
        """Gather all tokens for an attention module, which may also read their number.

        Returns the trace's identities of the gathered inputs.
        """
        stream = self._stream_of(unit.row)
        if stream is None or unit.owner is None:
            return set()
        inputs = {self._input(name) for name in unit.columns}
        split = {identity for identity in inputs if not stream.is_outside(unit.owner, identity)}
        call = self._seen.of(unit.owner)[0]
        keys = [(identity, sequence_parallel.keys_of(call, identity)) for identity in split]
        owner = self._model.get_submodule(unit.owner)
        inner: Callable[..., Any] = owner.forward
        # Without the identities, whose values the compiler would guard, and so recompile for each block.
        all_places = [places for _, places in keys]

        def forward(*arguments: Any, **keywords: Any) -> Any:
            for places in all_places:
                gathered: Tensor | None = None
                for key in places:
                    if gathered is None:
                        gathered = stream.gather(sequence_parallel.argument(arguments, keywords, key))
                    arguments, keywords = sequence_parallel.replaced(arguments, keywords, key, gathered)
            return inner(*arguments, **keywords)

        owner.forward = forward
        return {identity for identity, places in keys if places}

    def _input(self, name: str) -> int | None:
        """The identity of the tensor that a layer was given in the trace."""
        seen = self._seen.of(name)[0].inputs()
        return seen[0].identity if seen else None


def _repeated(model: nn.Module, blocks: Sequence[nn.Module]) -> list[str]:
    """The names of the repeated layers; empty if the model's blocks are just its parts, without repetition."""
    names = {id(module): name for name, module in model.named_modules()}
    lists: dict[str, list[nn.Module]] = {}
    for block in blocks:
        lists.setdefault(names[id(block)].rpartition(".")[0], []).append(block)
    return [
        names[id(block)]
        for like in lists.values()
        if len(like) > 1 and are_of_one_kind(like) and any(True for _ in like[0].children())
        for block in like
    ]


def _as_it_is(x: Tensor) -> Tensor:
    return x


def _all_names(model: nn.Module) -> list[tuple[str, nn.Parameter]]:
    """All names of each parameter; tied parameters have several."""
    return list(model.named_parameters(remove_duplicate=False))
