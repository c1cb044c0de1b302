"""Dropout and all other random draws of a forward, the same under every layout.

Whether an element is dropped is a function of its sample and its place only (see counter_rng.py), so every rank
computes it for its samples and its part of the model. Attention with dropout materializes its weights, tokens x
tokens, since kernels that don't, such as flash attention, draw random numbers themselves.
`recipe.attention_dropout: false` disables this dropout, and these kernels run.

How a number is found: sample key = f(seed, step, number of the sample in the data set); site key = the module's name
and the running number of its draw in this forward; position = the element's indices in the whole tensor, behind the
sample. `ForwardContext.part` says where the rank's part of a tensor begins in the whole, so a tensor-parallel rank
draws for its heads, and a context-parallel rank for its tokens, what one process draws for them.

Why a mode and not modules of our own: models call F.dropout, torch.rand and attention with `dropout_p` in the middle
of their forwards, and other libraries do so as well. A TorchFunctionMode sees all of these calls.
"""

import inspect
import math
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial, wraps
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from samestep.data.loader import Moment
from samestep.errors import UserError, place_here
from samestep.parallel.exact.counter_rng import columns, draw, key_of, split, threshold
from samestep.parallel.exact.draws import Draw, body_of, draw_of, without_override
from samestep.parallel.exact.forward_context import ForwardContext, Positions
from samestep.parallel.exact.sample_dims import dims_of, parts_of, samples_back, samples_first
from samestep.torch_internals.autograd import is_in_backward
from samestep.torch_internals.modules import AnyDropout
from samestep.torch_internals.operators import without_function_modes


def explicit_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
    *,
    drop: Callable[[Tensor], Tensor],
) -> Tensor:
    """What `F.scaled_dot_product_attention` gives, with `drop` applied to the probabilities.

    Shapes: query [..., heads, queries, head_dim], key and value [..., heads, keys, head_dim]; with `enable_gqa`
    keys may have fewer heads, each for as many consecutive ones of the queries. Memory grows with queries x keys.
    (Vaswani et al. 2017, section 3.2.1; grouped queries: Ainslie et al. 2023.)
    """
    if enable_gqa:
        key = key.repeat_interleave(query.size(-3) // key.size(-3), -3)  # [..., query heads, keys, head_dim]
        value = value.repeat_interleave(query.size(-3) // value.size(-3), -3)
    if is_causal:
        attn_mask = torch.ones(query.size(-2), key.size(-2), dtype=torch.bool, device=query.device).tril()
    scores = query @ key.transpose(-2, -1) * (1 / math.sqrt(query.size(-1)) if scale is None else scale)
    if attn_mask is None:
        return drop(scores.softmax(-1)) @ value  # [..., heads, queries, head_dim]
    if attn_mask.dtype == torch.bool:
        nothing = ~attn_mask.any(-1, keepdim=True)  # a query that may see no key
        scores = scores.masked_fill(~(attn_mask | nothing), -math.inf)
    else:
        nothing = (attn_mask == -math.inf).all(-1, keepdim=True)  # [..., queries, 1]
        scores = scores + attn_mask.masked_fill(nothing, 0.0)
    # A softmax over nothing is not a number; PyTorch's attention has zeros there.
    return drop(scores.softmax(-1).masked_fill(nothing, 0.0)) @ value


_SWITCH_OFF = "use recipe.dropout: false"
_SAY = "where they are another, say which: samestep.draws_along(module, dim)"
_SPLIT = "where it joins the rows of samples, give samestep.Batch a split with the number of each sample's rows"


def same_dropout(model: nn.Module, forward_context: ForwardContext, *, attention: bool = True) -> "Dropout":
    """Make all dropout and random draws of a model independent of the layout, in training steps.

    The model must still be whole. `attention`: whether attention applies its dropout.
    Raises UserError for a module whose dropout can't be drawn by sample.
    """
    dims = dims_of(model)
    _check(model, dims)
    dropout = Dropout(forward_context, attention=attention, dims=dims)
    for name, module in model.named_modules():
        if _may_drop(module):
            module.forward = dropout.within(name, module.forward)
    return dropout


@contextmanager
def undrawn() -> Iterator[None]:
    """Context of a forward that only infers shapes: dropout is PyTorch's own, and its sites are not counted."""
    with without_function_modes(Dropout), torch.random.fork_rng(devices=[]):
        yield


def _may_drop(module: nn.Module) -> bool:
    """Whether a module's own forward may apply dropout; false for PyTorch's leaf modules other than dropout."""
    plain_layer = type(module).__module__.startswith("torch.nn.") and not any(True for _ in module.children())
    return not plain_layer or isinstance(module, AnyDropout)


def _check(model: nn.Module, dims: Mapping[str, int]) -> None:
    """Raise UserError for modules that draw random numbers in a kernel, or whose first dimension isn't samples.

    `dims`: where the samples are, by module.
    """
    for name, module in model.named_modules():
        if isinstance(module, nn.RNNBase) and module.dropout and module.num_layers > 1:
            raise UserError(
                f"{name or 'the model'} ({type(module).__name__}) draws its dropout inside PyTorch's kernel, where "
                "it can't be the same for every layout; layers of one level with dropout between them, or "
                f"{_SWITCH_OFF}"
            )
        if isinstance(module, (nn.TransformerEncoderLayer, nn.TransformerDecoderLayer)):
            attention = module.self_attn
            first = isinstance(attention, nn.MultiheadAttention) and not attention.batch_first  # tokens
            if module.dropout.p and first and dims.get(name) != 1:
                raise UserError(
                    f"{name or 'the model'} ({type(module).__name__}) drops elements of [tokens, batch, features], "
                    "in which a sample is hard to find; batch_first=True, samestep.draws_along(module, 1) for this "
                    f"module or one around it, or {_SWITCH_OFF}"
                )


class Dropout(TorchFunctionMode):
    """A mode that replaces calls of dropout and random functions in a training forward."""

    def __init__(
        self, forward_context: ForwardContext, *, attention: bool = True, dims: Mapping[str, int] | None = None
    ) -> None:
        super().__init__()
        self.forward_context = forward_context
        self._dims = dims or {}  # of samples, where it isn't 0, by module
        self._attends = attention
        self._printed = False  # whether the message about attention was printed
        self.answered: list[tuple[str, str]] = []  # module and function of each draw, if `notes`
        self.notes = False
        self._name = ""  # of the innermost module whose forward runs
        self._active = False
        self._samples_lead = False  # whether PyTorch's own code runs, in which samples are the first dimension
        self._sites: dict[tuple[str, int], int] = {}
        self._folded: set[tuple[str, int]] = set()  # sites at which samples are the outer index of a first dimension
        self._tables: dict[tuple[int, int, torch.device], tuple[Tensor, Tensor]] = {}
        self._keys: tuple[Moment, Tensor] | None = None

    def within(self, name: str, forward: Callable[..., Any]) -> Callable[..., Any]:
        """Wrap a module's forward to run under this mode in training steps."""

        @wraps(forward)
        def run(*arguments: Any, **keywords: Any) -> Any:
            # Outside of training steps nothing is drawn by sample. A forward in backward without a moment is the
            # model's own checkpointing, for which `_moment` raises.
            if not self.forward_context.watches or (self.forward_context.moment is None and not is_in_backward()):
                return forward(*arguments, **keywords)
            before, self._name = self._name, name
            try:
                if self._active:
                    return forward(*arguments, **keywords)
                self._active = True
                try:
                    with self:
                        return forward(*arguments, **keywords)
                finally:
                    self._active = False
            finally:
                self._name = before

        return run

    def __torch_function__(
        self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        keywords = kwargs or {}
        if func is F.scaled_dot_product_attention:
            return self._attention(func, *args, **keywords)
        if func is F.multi_head_attention_forward:
            if not self._attends and draws_in(func, args, keywords):
                self.forward_context.count(self._name)  # as if it drew: what follows keeps its numbers
                bound = _MULTI_HEAD.bind(*args, **keywords)
                bound.arguments["dropout_p"] = 0.0
                args, keywords = bound.args, bound.kwargs
            self._samples_lead = True
            # PyTorch switches a mode off while its __torch_function__ runs; it is entered again, so that it sees the
            # dropout in this function's body.
            try:
                with self:
                    return _MULTI_HEAD_ATTENTION(*args, **keywords)
            finally:
                self._samples_lead = False
        kind = _KINDS.get(func)
        if kind is None:
            return self._answer(func, args, keywords)
        call = kind.signature.bind(*args, **keywords)
        call.apply_defaults()
        bound, probability, training, *rest = call.arguments.values()
        if not training or not 0 < probability <= 1 or bound.numel() == 0:
            # PyTorch's own function raises where the probability is wrong.
            return func(*args, **keywords)  # nothing to drop, or an error of its own
        return self._drop(bound, probability, kind, in_place=kind.in_place or any(rest))

    def _answer(self, func: Any, args: Sequence[Any], keywords: Mapping[str, Any]) -> Any:
        """Call a function other than dropout, with its random numbers drawn by sample number."""
        body = body_of(func)
        if body is not None:
            with self:
                return body(*args, **keywords)
        drawn = draw_of(func, args, keywords)
        if drawn is None or 0 in drawn.shape:
            return func(*args, **keywords)
        what = getattr(func, "__name__", str(func))
        parts = self.forward_context.part.activations
        values = drawn.make(
            *(self._bits(drawn, what, parts) for _ in range(drawn.streams)),
        )
        if drawn.into is None:
            return values.requires_grad_(bool(keywords.get("requires_grad", False)))
        with torch.no_grad():
            return drawn.into.copy_(values)

    def _bits(self, drawn: Draw, what: str, parts: Mapping[int, Positions]) -> Tensor:
        """Uniform int32 numbers of a draw's shape, by sample, or by step for a scalar."""
        moment = self._moment("draw")
        dim = self._dim(drawn.shape, what) if drawn.shape else 0
        shape, samples = samples_first(drawn.shape, dim), len(moment.samples)
        parts = parts_of(parts, shape, dim)
        of_step = len(shape) == 0
        joined = not of_step and _split_of(shape, moment) is not None
        of_samples = joined or (not of_step and shape[0] % samples == 0 and (shape[0] == samples or shape[0] > 1))
        if not of_step and not of_samples:
            place = f" at {line}" if (line := place_here()) else ""
            raise UserError(
                f"{self._name or 'the model'}: {what} of shape {list(drawn.shape)}{place}, in which the {samples} "
                f"samples of a micro-batch are not {_ordinal(dim)}, so each number's sample is unknown; draw numbers "
                "of shape [samples, ...], or torch.rand(()) for one number that is the whole step's; "
                f"{_SAY}"
            )
        # Positions along dimensions of which this rank has a part; others begin at 0. A dimension of one element is
        # broadcast over other ranks' parts as well.
        spread = {dim: at for dim, at in parts.items() if shape and shape[dim] > 1} if _within(parts, shape) else {}
        numbers = self._numbers(shape, spread, drawn.device, moment, what, of_step=of_step)
        return samples_back(numbers.reshape(shape), dim)

    def _dim(self, shape: Sequence[int], what: str) -> int:
        """The dimension of samples of what the running module draws. Raises UserError for one that isn't there."""
        dim = 0 if self._samples_lead else self._dims.get(self._name, 0)
        if dim >= len(shape) > 0:
            raise UserError(
                f"{self._name or 'the model'}: {what} of shape {list(shape)}, of which samestep.draws_along says "
                f"that samples are dimension {dim}, which it doesn't have; say it of the modules alone that have it"
            )
        return dim

    def _attention(
        self,
        func: Any,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attn_mask: Tensor | None = None,
        dropout_p: float = 0.0,
        is_causal: bool = False,
        **options: Any,  # scale, enable_gqa
    ) -> Tensor:
        """F.scaled_dot_product_attention: written out where it drops, else PyTorch's kernel."""
        nothing_to_drop = not 0 < dropout_p <= 1
        if nothing_to_drop or (is_causal and attn_mask is not None):  # an error of PyTorch's
            return func(query, key, value, attn_mask, dropout_p, is_causal, **options)
        if not self._attends:
            self.forward_context.count(self._name)  # as if it drew: what follows keeps its numbers
            return func(query, key, value, attn_mask, 0.0, is_causal, **options)
        self._tell(query.device)
        drop = partial(self._drop_weights, probability=dropout_p)
        return explicit_attention(query, key, value, attn_mask, is_causal, **options, drop=drop)

    def _tell(self, device: torch.device) -> None:
        """Print once, on accelerators, that dropout of attention weights rules out flash attention."""
        if device.type == "cpu" or self._printed:
            return
        self._printed = True
        if not dist.is_initialized() or dist.get_rank() == 0:
            print(
                f"samestep: {self._name or 'the model'}: attention drops weights, for which it writes them out, "
                "tokens x tokens, without flash attention; recipe.attention_dropout: false leaves that dropout out",
                file=sys.stderr,
            )

    def _drop_weights(self, weights: Tensor, probability: float) -> Tensor:
        """Dropout of probabilities [samples, heads, queries, keys], by the rank's heads or queries."""
        parts = self.forward_context.part.attention if weights.ndim == 4 else {}
        noise = self._noise(weights, weights.shape, probability, parts, 0)
        return weights * noise.mul_(_scale(probability))

    def _drop(self, input_: Tensor, probability: float, kind: "_Kind", *, in_place: bool) -> Tensor:
        """Apply one of F's dropout functions to a tensor [samples, ...]."""
        shape, dim = input_.shape, self._dim(input_.shape, "dropout")
        if kind.features:  # a channel is dropped as a whole
            shape = (*shape[:2], *(1 for _ in shape[2:]))
        noise = self._noise(input_, shape, probability, self.forward_context.part.activations, dim)
        if kind.alpha:
            factor, shift = _alpha(noise, probability)
            return input_.mul_(factor).add_(shift) if in_place else input_ * factor + shift
        # Inverted dropout: what is kept is divided by 1 - p, so that evaluation needs no factor (Srivastava et al.
        # 2014).
        noise.mul_(_scale(probability))
        return input_.mul_(noise) if in_place else input_ * noise

    def _noise(
        self, like: Tensor, shape: Sequence[int], probability: float, parts: Mapping[int, Positions], dim: int
    ) -> Tensor:
        """A mask [*shape] of the dtype of `like`: 1 for kept elements, 0 for dropped ones. `dim`: of samples."""
        first, parts = samples_first(shape, dim), parts_of(parts, shape, dim)
        numbers = self._numbers(first, parts, like.device, self._moment("dropout"), "dropout", dim=dim)
        noise = torch.empty(numbers.shape, dtype=like.dtype, device=like.device)
        return samples_back(torch.ge(numbers, threshold(probability), out=noise).view(first), dim)

    def _moment(self, what: str) -> Moment:
        """The samples of the running forward. Raises UserError in a recomputation by the model itself."""
        if self.forward_context.moment is None:
            raise UserError(
                f"{self._name or 'the model'}: the model recomputes this {what} in backward by itself, where "
                'its sample is unknown; use the layout option "recompute=full" in place of its own checkpointing'
            )
        return self.forward_context.moment

    def _numbers(
        self,
        shape: Sequence[int],
        parts: Mapping[int, Positions],
        device: torch.device,
        moment: Moment,
        what: str,
        *,
        of_step: bool = False,
        dim: int = 0,
    ) -> Tensor:
        """Uniform int32 numbers [samples, ...], each a function of its sample, its site and its position.

        `of_step`: one number [1], a function of the step and the site only. `dim`: where samples were before.
        """
        self.forward_context.drew = True
        if self.notes:
            self.answered.append((self._name, what))
        site = (self._name, self.forward_context.count(self._name))
        # The key is a hash computed in Python, so it is cached for each site.
        if site not in self._sites:
            self._sites[site] = key_of(*site)
        place = self._sites[site]
        if of_step:
            step = torch.full([1], key_of("step", moment.seed, moment.step), device=device)
            return draw(split(step, place), [], self._table(0, 1, device)[1])
        # [samples] int64, of step, sample and site.
        keys = split(self._sample_keys(moment, device), place)
        split_by = _split_of(shape, moment)
        if split_by is not None:
            keys, cut = _keys_of_rows(keys, split_by), shape
        else:
            cut = self._by_sample(shape, len(moment.samples), site, dim)
        # For every dimension after the samples its positions in the whole tensor; negative keys of `parts` count from
        # the end.
        rest = [
            self._table(parts.get(dim, parts.get(dim - len(cut), 0)), size, device)
            for dim, size in enumerate(cut)
            if dim
        ]
        *outer, (_, row) = rest or [self._table(0, 1, device)]
        return draw(keys, [positions for positions, _ in outer], row)

    def _by_sample(self, shape: Sequence[int], samples: int, site: tuple[str, int], dim: int) -> Sequence[int]:
        """Unfold a shape [samples x tokens, ...] to [samples, tokens, ...]; raises UserError for other shapes.

        `dim`: where the samples were, if it was said, before they were moved to the front.
        """
        if len(shape) and shape[0] == samples:
            return shape
        # [tokens, samples, ...], or by chance as many samples as tokens: what is square is attention's weights, and
        # samples that were once elsewhere than second are never second.
        second = len(shape) > 2 and shape[1] == samples
        unsaid = not dim and site not in self._folded and not self._samples_lead
        doubtful = second and shape[2] != samples and unsaid
        if len(shape) and shape[0] % samples == 0 and not doubtful:
            # A model may fold tokens (or heads) into the first dimension, with samples as the outer index.
            if not second:
                self._folded.add(site)
            return samples, shape[0] // samples, *shape[1:]
        raise UserError(
            f"{self._name or 'the model'}: dropout of a tensor of shape "
            f"{list(samples_first(shape, len(shape) - dim))}, in which the {samples} samples of a micro-batch are "
            f"not {_ordinal(dim)}, so each element's sample is unknown; {_SAY}; {_SPLIT}; or {_SWITCH_OFF}"
        )

    def _sample_keys(self, moment: Moment, device: torch.device) -> Tensor:
        """A key for each sample of a micro-batch: [samples], int64."""
        # The same for all draws of a micro-batch's forward.
        if self._keys is None or self._keys[0] is not moment or self._keys[1].device != device:
            step = key_of("dropout", moment.seed, moment.step)
            samples = moment.samples if device.type == "cpu" else moment.samples.pin_memory()
            self._keys = moment, split(step, samples.to(device, non_blocking=True))
        return self._keys[1]

    def _table(self, positions: Positions, size: int, device: torch.device) -> tuple[Tensor, Tensor]:
        """The positions of a dimension's elements in the whole tensor, and their `columns`."""
        if isinstance(positions, Tensor):
            positions = positions.to(device)
            return positions, columns(positions)
        key = (positions, size, device)
        if key not in self._tables:
            positions_of = torch.arange(positions, positions + size, device=device)
            self._tables[key] = positions_of, columns(positions_of)
        return self._tables[key]


def draws_in(func: Any, args: Sequence[Any], keywords: Mapping[str, Any]) -> int:
    """The number of draws that `Dropout` counts for a call of a function."""
    if func is F.multi_head_attention_forward:
        bound = _MULTI_HEAD.bind(*args, **keywords)
        bound.apply_defaults()
        return int(bool(bound.arguments["training"]) and bound.arguments["dropout_p"] > 0)
    if func is F.scaled_dot_product_attention:
        probability = args[4] if len(args) > 4 else keywords.get("dropout_p", 0.0)
        return int(0 < probability <= 1)
    kind = _KINDS.get(func)
    if kind is not None:
        call = kind.signature.bind(*args, **keywords)
        call.apply_defaults()
        bound, probability, training, *_ = call.arguments.values()
        return int(bool(training) and 0 < probability <= 1 and bound.numel() > 0)
    if body_of(func) is not None:
        return 1  # of the function's own body
    drawn = draw_of(func, args, keywords)
    return 0 if drawn is None or 0 in drawn.shape else drawn.streams


def _split_of(shape: Sequence[int], moment: Moment) -> tuple[int, ...] | None:
    """How many rows of a tensor each sample has, where its first dimension joins them; None where it doesn't."""
    if len(shape) == 0 or shape[0] == len(moment.samples):  # the latter: one row for each
        return None
    return next((split for split in moment.splits if sum(split) == shape[0]), None)


def _keys_of_rows(keys: Tensor, split_by: Sequence[int]) -> Tensor:
    """A key for each row of samples with so many rows. [rows], int64

    A sample's first row has the sample's own key, as where each sample has one row and none are joined.
    """
    numbers = torch.tensor(split_by, device=keys.device)
    ends = numbers.cumsum(0)
    row = torch.arange(sum(split_by), device=keys.device) - (ends - numbers).repeat_interleave(numbers)
    own = keys.repeat_interleave(numbers)
    return torch.where(row == 0, own, split(own, row))


def _within(parts: Mapping[int, Positions], shape: Sequence[int]) -> bool:
    """Whether a tensor of this shape has all dimensions in `parts`."""
    return all(-len(shape) <= dim < len(shape) for dim in parts)


def _ordinal(dim: int) -> str:
    return f"dimension {dim}, as samestep.draws_along says" if dim else "the first dimension"


def _scale(probability: float) -> float:
    return 1 / (1 - probability) if probability < 1 else 0.0


def _alpha(kept: Tensor, probability: float) -> tuple[Tensor, Tensor]:
    """Factor and shift of alpha dropout, which keeps mean and variance (Klambauer et al. 2017, section 3)."""
    if probability == 1:
        return kept * 0, kept * 0
    saturation = -1.7580993408473766  # of SELU: -lambda * alpha
    slope = ((1 - probability) * (1 + probability * saturation**2)) ** -0.5
    return kept * slope, (1 - kept).mul_(slope * saturation).sub_(slope * saturation * probability)


class _Kind(NamedTuple):
    """Properties of a dropout function, whose first arguments are input, p and training."""

    signature: inspect.Signature
    features: bool = False
    alpha: bool = False
    in_place: bool = False


def _bare(input: Tensor, p: float, train: bool) -> None:
    """The arguments of PyTorch's builtin dropout functions, which show none."""


_BARE = inspect.signature(_bare)
_KINDS: dict[Any, _Kind] = {
    F.dropout: _Kind(inspect.signature(F.dropout)),
    F.dropout1d: _Kind(inspect.signature(F.dropout1d), features=True),
    F.dropout2d: _Kind(inspect.signature(F.dropout2d), features=True),
    F.dropout3d: _Kind(inspect.signature(F.dropout3d), features=True),
    F.alpha_dropout: _Kind(inspect.signature(F.alpha_dropout), alpha=True),
    F.feature_alpha_dropout: _Kind(inspect.signature(F.feature_alpha_dropout), features=True, alpha=True),
    torch.dropout: _Kind(_BARE),
    torch.dropout_: _Kind(_BARE, in_place=True),
    torch.feature_dropout: _Kind(_BARE, features=True),
    torch.feature_dropout_: _Kind(_BARE, features=True, in_place=True),
    torch.alpha_dropout: _Kind(_BARE, alpha=True),
    torch.alpha_dropout_: _Kind(_BARE, alpha=True, in_place=True),
    torch.feature_alpha_dropout: _Kind(_BARE, features=True, alpha=True),
    torch.feature_alpha_dropout_: _Kind(_BARE, features=True, alpha=True, in_place=True),
}
_MULTI_HEAD_ATTENTION = without_override(F.multi_head_attention_forward)
_MULTI_HEAD = inspect.signature(F.multi_head_attention_forward)
