"""How a layer computes on its slice. Its forward is replaced, not the module, so that parameters keep their names."""

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext

from torch import Tensor, nn
from torch.nn import functional as F

from samestep.parallel.attributes import replace_forward
from samestep.parallel.low_rank import base_of, updates_of
from samestep.parallel.moment import Now, Portion
from samestep.parallel.tensor.kinds import is_conv1d

Message = Callable[[Tensor], Tensor]
Context = Callable[[], AbstractContextManager[None]]


class Entry:
    """The message at the input of column layers: one for all that take the same tensor."""

    def __init__(self, message: Message, uses: int = 1) -> None:
        self._message = message
        self._uses = uses
        self._left = 0
        self._given: Tensor | None = None
        self._taken: Tensor | None = None

    def __call__(self, x: Tensor) -> Tensor:
        if self._taken is None or self._given is not x:
            self._given, self._taken, self._left = x, self._message(x), self._uses
        taken = self._taken
        self._left -= 1
        if not self._left:  # hold no activation longer than the layers need it
            self._given = self._taken = None
        return taken


class Region:
    """What lies between the columns and the row layer of a unit: there a rank has its own heads or features."""

    def __init__(self, leave: Message, now: Now, part: Portion, *, all_tokens: bool = False) -> None:
        """`all_tokens`: the columns get the tokens of all ranks, of which a rank has some outside."""
        self._leave = leave
        self._now = now
        self._part = part  # which heads and features
        self._all_tokens = all_tokens
        self._outside: Portion | None = None

    def begin(self, training: bool) -> None:
        """Called by the first of the columns, so that dropout knows whose elements it drops."""
        self._outside = self._now.hold(self._part) if training else None

    def at_entry(self) -> AbstractContextManager[None]:
        """What works on the columns' input, of which every rank has all features."""
        if self._outside is None:  # not in training
            return nullcontext()
        return self._now.holding(Portion() if self._all_tokens else self._outside)

    def leave(self, x: Tensor) -> Tensor:
        """The sum over the ranks, of which each made a part."""
        if self._outside is not None:
            self._now.hold(self._outside)
            self._outside = None
        return self._leave(x)


def column(linear: nn.Module, entry: Message, region: Region, *, begins: bool) -> None:
    """Make a linear compute its slice of the outputs. With the first of the columns the region `begins`."""
    product = product_of(linear, region.at_entry)

    def forward(x: Tensor) -> Tensor:
        x = entry(x)
        if begins:
            region.begin(linear.training)
        return with_bias(product(x), linear)

    replace_forward(linear, forward)


def shared_column(linear: nn.Module, entry: Message, region: Region, features: Tensor, *, begins: bool) -> None:
    """Make a whole linear hand on the features [n] that this rank needs, of heads that other ranks need as well."""
    product = product_of(linear, region.at_entry)

    def forward(x: Tensor) -> Tensor:
        x = entry(x)
        if begins:
            region.begin(linear.training)
        return with_bias(product(x), linear).index_select(-1, features.to(x.device))

    replace_forward(linear, forward)


def gathered(module: nn.Module, enter: Message, gather: Message) -> None:
    """Make a layer compute its slice of the outputs, and hand on those of all ranks."""
    inner: Callable[..., Tensor] = module.forward

    def forward(input: Tensor, *arguments: object) -> Tensor:  # the name that PyTorch's layers give it
        return gather(inner(enter(input), *arguments))

    module.forward = forward


def row(linear: nn.Module, region: Region) -> None:
    """Make a linear compute with its slice of the inputs; the bias is added once, to the sum over the ranks."""
    product = product_of(linear)

    def forward(x: Tensor) -> Tensor:
        return with_bias(region.leave(product(x)), linear)

    replace_forward(linear, forward)


def product_of(linear: nn.Module, around_dropout: Context = nullcontext) -> Message:
    """From inputs to what a linear and its adapters make without its bias.

    Where the outputs are in slices, those of the adapters' `up` are too; where the inputs are, those of `down`.
    `around_dropout`: the context in which adapters drop elements of the inputs.
    """
    base = base_of(linear)
    plain = _product_with(base)
    add = updates_of(linear)
    if add is None:
        return plain
    return lambda x: plain(x) + add(x, around_dropout)


def _product_with(base: nn.Module) -> Message:
    if is_conv1d(base):
        # The weight is [in, out].
        return lambda x: F.linear(x, base.get_parameter("weight").t())
    return lambda x: F.linear(x, base.get_parameter("weight"))


def with_bias(x: Tensor, linear: nn.Module) -> Tensor:
    bias = base_of(linear).bias
    # Under autocast the product is in the lower precision, and so is what a whole linear gives.
    return x if bias is None else x + bias.to(x.dtype)  # pyright: ignore[reportCallIssue, reportOperatorIssue]


def table(embedding: nn.Embedding, first: int, sum_over_ranks: Message) -> None:
    """Make an embedding look up the ids of its rows, which begin with id `first`; the sum has each id's row once."""
    padding = embedding.padding_idx
    rows, total = embedding.weight.shape[0], embedding.num_embeddings
    mine = padding is not None and first <= padding < first + rows
    own_padding = padding - first if padding is not None and mine else None

    def forward(input: Tensor) -> Tensor:  # the name that nn.Embedding gives it
        # No rank has the row of an id that is out of range; the sum over ranks would be zeros, without a word.
        if input.device.type == "cpu" and bool(((input < 0) | (input >= total)).any()):
            raise IndexError("index out of range in self")
        local = input - first
        foreign = (local < 0) | (local >= rows)  # [batch, tokens]
        found = F.embedding(local.masked_fill(foreign, 0), embedding.weight, own_padding)
        return sum_over_ranks(found.masked_fill(foreign.unsqueeze(-1), 0))

    replace_forward(embedding, forward)


def no_fast_path(model: nn.Module) -> None:
    """Keep PyTorch's transformer layers from computing with the weights of their parts instead of calling them."""
    for module in model.modules():
        if isinstance(module, nn.TransformerEncoderLayer):
            module.activation_relu_or_gelu = 0
        elif isinstance(module, nn.TransformerEncoder):
            module.use_nested_tensor = False
