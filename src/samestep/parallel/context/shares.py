"""Which tokens of a sequence each rank has, and the messages that gather them, split them and add them up.

Parts are of one length, as an exchange wants them: the last ones are filled up with zeros, which are cut off when
tokens are put together. `Shares.of(tokens)` is the split that `parallel.collectives` takes.
"""

from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn import functional as F

from samestep.comm.messages import all_gather, reduce_scatter_uneven
from samestep.parallel.exact.forward_context import Positions

# The fewest tokens of a part: attention takes a lone query for one that is decoded after others.
_FEWEST = 2


@dataclass(frozen=True, kw_only=True)
class Shares:
    """Which tokens each rank of a group has: consecutive ones, or two pieces that balance causal attention.

    With `zigzag` the tokens are cut in 2 x ranks pieces, of which rank r has number r and number 2 x ranks - 1 - r:
    an early one, which sees few tokens before it, and a late one (Llama 3's report, arXiv 2407.21783, section 3.3.2).
    """

    group: dist.ProcessGroup
    zigzag: bool = False

    @property
    def ranks(self) -> int:
        return dist.get_world_size(self.group)

    @property
    def rank(self) -> int:
        return dist.get_rank(self.group)

    def pieces(self, rank: int) -> tuple[int, ...]:
        """The numbers of a rank's pieces, in the order in which it has them."""
        return (rank, 2 * self.ranks - 1 - rank) if self.zigzag else (rank,)

    def piece_length(self, tokens: int) -> int:
        """Tokens of a piece; the last pieces are filled up."""
        if self.zigzag:
            return max(-(-tokens // (2 * self.ranks)), 1)
        return max(-(-tokens // self.ranks), min(_FEWEST, tokens))

    def length(self, tokens: int) -> int:
        """The number of tokens of each rank's part, including padding."""
        return self.piece_length(tokens) * (2 if self.zigzag else 1)

    def filled(self, rank: int, tokens: int) -> int:
        """The number of tokens of a rank's part without padding; they come first."""
        length = self.piece_length(tokens)
        return sum(min(max(tokens - piece * length, 0), length) for piece in self.pieces(rank))

    def positions(self, tokens: int, device: torch.device) -> Positions:
        """The positions of this rank's tokens in the sequence."""
        length = self.piece_length(tokens)
        firsts = [piece * length for piece in self.pieces(self.rank)]
        if len(firsts) == 1:
            return firsts[0]
        return torch.cat([torch.arange(first, first + length, device=device) for first in firsts])

    def of(self, tokens: int) -> "SharedTokens":
        """The split of a sequence of so many tokens."""
        return SharedTokens(shares=self, tokens=tokens)


@dataclass(frozen=True, kw_only=True)
class SharedTokens:
    """`collectives.Split` of a sequence's tokens by `Shares`."""

    shares: Shares
    tokens: int

    def own(self, whole: Tensor, dim: int, *, view: bool = True) -> Tensor:
        part = own_part(whole, self.shares, dim)
        return part if view or self.shares.zigzag else part.clone()  # two pieces are no view

    def gathered(self, part: Tensor, dim: int) -> Tensor:
        """The ranks' parts in the order of tokens, without padding."""
        whole = all_gather(part, self.shares.group, dim)  # ranks' parts in the order of ranks
        if self.shares.zigzag:
            length = part.shape[dim] // 2
            ranks = range(self.shares.ranks)
            # Rank r's two pieces stand at 2r and 2r + 1. [2 x ranks pieces]
            places = [*(2 * rank for rank in ranks), *(2 * rank + 1 for rank in reversed(ranks))]
            firsts = range(0, self.tokens, length)
            return torch.cat(
                [
                    whole.narrow(dim, place * length, min(length, self.tokens - first))
                    for place, first in zip(places, firsts, strict=False)
                ],
                dim,
            )
        # Cloned, since FSDP2 puts hooks on the tensors that a module returns, which must not be views.
        return whole if whole.shape[dim] == self.tokens else whole.narrow(dim, 0, self.tokens).clone()

    def summed(self, whole: Tensor, dim: int) -> Tensor:
        shares, length = self.shares, self.shares.piece_length(self.tokens)
        numbers = [number for rank in range(shares.ranks) for number in shares.pieces(rank)]
        # In the order of ranks and their pieces, as the reduce-scatter hands them out.
        in_turn = torch.cat([_piece(whole, number * length, length, dim) for number in numbers], dim)
        return reduce_scatter_uneven(in_turn, shares.group, [shares.length(self.tokens)] * shares.ranks, dim)


def own_part(whole: Tensor, shares: Shares, dim: int = 1) -> Tensor:
    """This rank's part of a tensor that every rank has, for tensors without gradients."""
    length = shares.piece_length(whole.shape[dim])
    pieces = [_piece(whole, number * length, length, dim) for number in shares.pieces(shares.rank)]
    return pieces[0] if len(pieces) == 1 else torch.cat(pieces, dim)


def _piece(whole: Tensor, first: int, length: int, dim: int) -> Tensor:
    """A piece of the tokens, padded with zeros at the end."""
    first = min(first, whole.shape[dim])
    # Tokens [first, first + length) of the whole, fewer at its end, none behind it.
    piece = whole.narrow(dim, first, min(length, whole.shape[dim] - first))
    missing = length - piece.shape[dim]
    return F.pad(piece, [0, 0] * (whole.ndim - 1 - dim) + [0, missing]) if missing else piece
