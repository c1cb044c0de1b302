"""Ring attention: what PyTorch's attention of the whole gives, forward and backward, and what a rank needs for it."""

from typing import Any
from unittest.mock import patch

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F
from torch.utils._python_dispatch import TorchDispatchMode

from samestep.launch import local
from samestep.launch.world import join
from samestep.parallel.collectives import gather_from_region, scatter_to_region
from samestep.parallel.context import block_attention
from samestep.parallel.context.block_attention import Attended, KeyValueBlock
from samestep.parallel.context.ring import ring_attention
from samestep.parallel.context.shares import Shares, own_part

MASKS = ("causal", "none", "padding", "any", "rows of nothing", "of each head", "added")


def masked(kind: str, tokens: int) -> dict[str, Any]:
    """Arguments of attention. [batch 2, heads 6]"""
    if kind == "causal":
        return {"is_causal": True}
    seen = torch.rand(2, 1, tokens, tokens) > 0.6
    masks: dict[str, Tensor | None] = {
        "none": None,
        "padding": (torch.arange(tokens) < max(tokens - 3, 1)).expand(2, 1, 1, tokens),
        "any": seen | torch.eye(tokens, dtype=torch.bool),
        "rows of nothing": seen & (torch.arange(tokens) % 3 > 0)[:, None],
        "of each head": torch.rand(1, 6, tokens, tokens) > 0.5,
        "added": torch.randn(tokens, tokens, dtype=torch.float64),
    }
    return {"attn_mask": masks[kind]}


def _largest_difference(ranks: int, written_out: bool) -> float:
    """Between a ring's outputs and gradients and those of PyTorch's attention, over numbers of tokens and masks."""
    kernel = block_attention._WRITTEN_OUT if written_out else block_attention._FOR_CPU
    apart = 0.0
    with join(device="cpu", threads=1), patch.object(block_attention, "_FOR_CPU", kernel):
        shares = Shares(group=torch.distributed.group.WORLD, zigzag=True)  # pyright: ignore[reportArgumentType]
        for tokens in (1, 2, 5, 2 * ranks, 4 * ranks + 3, 29):
            for kind in MASKS:
                torch.manual_seed(tokens)
                whole = [torch.randn(2, heads, tokens, 8, dtype=torch.float64) for heads in (6, 3, 3)]
                arguments = masked(kind, tokens)
                leaves: list[Any] = [part.requires_grad_() for part in whole]
                expected = F.scaled_dot_product_attention(*leaves, **arguments, enable_gqa=True)
                weights = torch.randn_like(expected)
                gradients = torch.autograd.grad(expected, leaves, weights)
                mask = arguments.pop("attn_mask", None)
                query, key, value = (scatter_to_region(leaf, shares.of(tokens), 2) for leaf in leaves)
                mine = ring_attention(query, key, value, shares, tokens, mask=mask, **arguments)
                found = gather_from_region(mine, shares.of(tokens), 2)
                pairs = zip(
                    (found, *torch.autograd.grad(found, leaves, weights)), (expected, *gradients), strict=True
                )
                apart = max(apart, *(float((a - b).abs().max()) for a, b in pairs))
    return apart


@pytest.mark.slow
@pytest.mark.parametrize(
    ("ranks", "written_out"), [(2, False), (3, True), pytest.param(4, False, marks=pytest.mark.slow)]
)
def test_a_ring_gives_the_attention_of_the_whole(ranks: int, written_out: bool) -> None:
    assert local.start(_largest_difference, (ranks, written_out), ranks) < 1e-12


class Sizes(TorchDispatchMode):
    """Notes the largest tensor that anything gives."""

    def __init__(self) -> None:
        super().__init__()
        self.largest = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        given = func(*args, **(kwargs or {}))
        for each in given if isinstance(given, (tuple, list)) else [given]:
            if isinstance(each, Tensor):
                self.largest = max(self.largest, each.numel())
        return given


def _largest_tensor(tokens: int) -> int:
    with join(device="cpu", threads=1):
        shares = Shares(group=torch.distributed.group.WORLD, zigzag=True)  # pyright: ignore[reportArgumentType]
        query, key, value = (torch.randn(1, 4, tokens // shares.ranks, 8, requires_grad=True) for _ in range(3))
        with Sizes() as sizes:
            ring_attention(query, key, value, shares, tokens, is_causal=True).sum().backward()
        return sizes.largest


def test_what_a_rank_holds_falls_with_the_ranks() -> None:
    """The largest are keys and values on their way: 2 x [1, 4, own tokens, 8]."""
    tokens = 512
    found = {ranks: local.start(_largest_tensor, (tokens,), ranks) for ranks in (2, 4)}
    assert found == {ranks: 2 * 4 * tokens // ranks * 8 for ranks in (2, 4)}


def _shares_of(tokens: int) -> list[list[int]]:
    with join(device="cpu", threads=1) as world:
        shares = Shares(group=torch.distributed.group.WORLD, zigzag=True)  # pyright: ignore[reportArgumentType]
        mine = own_part(torch.arange(tokens), shares, 0)
        assert mine[: shares.filled(world.rank, tokens)].tolist() == [
            place for place in torch.as_tensor(shares.positions(tokens, mine.device)).tolist() if place < tokens
        ]
        given: list[Any] = [None] * shares.ranks
        torch.distributed.all_gather_object(given, mine[: shares.filled(world.rank, tokens)].tolist())
        return given


def test_every_rank_has_an_early_and_a_late_piece() -> None:
    assert local.start(_shares_of, (7,), 2) == [[0, 1, 6], [2, 3, 4, 5]]


def _cut_in_two(dtype: torch.dtype) -> list[KeyValueBlock]:
    """Blocks of the first keys, of the others, and of all."""
    torch.manual_seed(0)
    query, key, value = (torch.randn(2, heads, 6, 8, dtype=dtype) for heads in (4, 2, 2))
    return [
        KeyValueBlock(query=query, key=key[:, :, first:last], value=value[:, :, first:last], scale=0.3)
        for first, last in ((0, 2), (2, 6), (0, 6))
    ]


@pytest.mark.parametrize("kernel", ["_FOR_CPU", "_WRITTEN_OUT"])
@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_blocks_of_keys_put_together_are_all_keys(kernel: str, dtype: torch.dtype) -> None:
    early, late, whole = _cut_in_two(dtype)
    attend, gradients = getattr(block_attention, kernel)
    exact = block_attention.exact_dtype(dtype)
    output, lse = (part.to(exact) for part in attend(early))
    block_attention.merge(output, lse, attend(late))
    expected = attend(whole)
    tolerance: dict[str, Any] = (
        {"rtol": 1e-10, "atol": 1e-10} if dtype == torch.float64 else {"rtol": 0.05, "atol": 0.05}
    )
    torch.testing.assert_close(output, expected.output.to(exact), **tolerance)
    torch.testing.assert_close(lse, expected.lse.to(exact), **tolerance)
    weights = torch.randn_like(expected.output)
    attended = Attended(output.to(dtype), lse)
    (of_query, *of_rest), (more, *of_others) = (gradients(each, weights, attended) for each in (early, late))
    found = [of_query + more, *(torch.cat(pair, 2) for pair in zip(of_rest, of_others, strict=True))]
    for mine, other in zip(found, gradients(whole, weights, expected), strict=True):
        torch.testing.assert_close(mine.to(exact), other.to(exact), **tolerance)


def test_the_kernel_for_accelerators_takes_and_gives_such_shapes() -> None:
    """Without values, which a machine without CUDA can't compute: names and arguments are PyTorch's."""
    query, key, value = (torch.empty(2, heads, 8, 16, dtype=torch.bfloat16, device="meta") for heads in (4, 2, 2))
    block = KeyValueBlock(query=query, key=key, value=value, causal=True, scale=0.25)
    attended = block_attention._FLASH.attend(block)
    assert (attended.output.shape, attended.lse.shape) == ((2, 4, 8, 16), (2, 4, 8))
    found = block_attention._FLASH.gradients(block, torch.empty_like(query), attended)
    assert [each.shape for each in found] == [query.shape, key.shape, value.shape]
