"""Few bits a number: the weighted mean of the ranks' vectors, sent as bf16 or as small integers with scales.

Douillard et al. 2025, "Streaming DiLoCo with overlapping communication", section 2.3: what is sent has 4 bits a
number, and is summed in float32. There the 4 bits are a float; here they are an integer, and BLOCK numbers have the
largest of their magnitudes as their scale (Dettmers et al. 2022, "8-bit optimizers via block-wise quantization").

A vector is cut into as many chunks as there are ranks. Every rank sends each chunk to the rank that averages it, and
that one sends the mean to all. What the bits leave out is lost, there and here.
"""

from typing import Any, Literal

import torch
from torch import Tensor

from samestep.comm.compression.wire import Wire, at_least

Bits = Literal[16, 8, 4]

BLOCK = 64  # numbers that have a scale, of float32, in common
_LARGEST = {8: 127, 4: 7}  # integers lie between this and its negative


class FewBitsMean:
    """Weighted mean of the ranks' vectors, in two messages; `asynchronous`: only `wait` waits for the first one."""

    def __init__(self, wire: Wire, values: Tensor, weight: float, bits: Bits, *, asynchronous: bool = False) -> None:
        """`values`: [elements], of one length on all ranks. `weight`: this rank's weight, 0 or more."""
        self._wire = wire
        self._like = values
        self._bits: Bits = bits
        blocks = -(-len(values) // (BLOCK * wire.ranks))
        chunks = values.new_zeros(wire.ranks, blocks * BLOCK)
        chunks.view(-1)[: len(values)] = values
        weights = torch.full((wire.ranks, 1), at_least(weight), dtype=torch.float64, device=values.device)
        message = torch.cat([_bytes(chunks, bits), weights.view(torch.uint8)], dim=1)
        self._received, self._work = wire.start_exchange(message, asynchronous=asynchronous)
        # The bytes that `wait` sends are counted here, in the step that begins the exchange, as for an all-reduce.
        wire.sent += (wire.ranks - 1) * (message.shape[1] - weights.element_size())

    def wait(self) -> Tensor:
        """The mean as one flat tensor; the same bits on every rank."""
        if self._work is not None:
            self._work.wait()
        weights = self._received[:, -8:].contiguous().view(torch.float64).view(-1)
        chunks = _numbers(self._received[:, :-8].contiguous(), self._bits).to(_summed_in(self._like.dtype))
        shares = (weights / weights.sum()).to(chunks.dtype)
        mean = (chunks * shares.view(-1, 1)).sum(0)
        gathered = self._wire.gather(_bytes(mean.view(1, -1), self._bits).view(-1), counted=False)
        return _numbers(gathered, self._bits).view(-1)[: len(self._like)].to(self._like.dtype)


def _summed_in(dtype: torch.dtype) -> torch.dtype:
    return dtype if dtype in (torch.float32, torch.float64) else torch.float32


def _bytes(chunks: Tensor, bits: Bits) -> Tensor:
    """Encode [chunks, elements] as [chunks, bytes]: the elements, then for integers the scales of their blocks."""
    if bits == 16:
        return chunks.to(torch.bfloat16).contiguous().view(torch.uint8)
    blocks = chunks.view(len(chunks), -1, BLOCK)
    scales = (blocks.abs().amax(dim=2, keepdim=True) / _LARGEST[bits]).float()
    # A block of zeros has the scale 0. One with a NaN or an infinity has a scale that makes it NaN again.
    integers = (blocks / torch.where(scales == 0, 1, scales)).nan_to_num_().round_().to(torch.int8)
    codes = integers.view(torch.uint8) if bits == 8 else _paired(integers)
    return torch.cat([codes.reshape(len(chunks), -1), scales.view(len(chunks), -1).view(torch.uint8)], dim=1)


def _numbers(message: Tensor, bits: Bits) -> Tensor:
    """Decode the result of `_bytes` into [chunks, elements], in float32."""
    if bits == 16:
        return message.view(torch.bfloat16).float()
    blocks = message.shape[1] // (BLOCK * bits // 8 + 4)
    codes, scales = message.split([blocks * BLOCK * bits // 8, blocks * 4], dim=1)
    integers = codes.contiguous().view(torch.int8) if bits == 8 else _unpaired(codes)
    scales = scales.contiguous().view(torch.float32).unsqueeze(2)
    return (integers.view(len(message), blocks, BLOCK).float() * scales).view(len(message), -1)


def _paired(integers: Tensor) -> Tensor:
    """Pack two integers from -7 to 7 into each byte."""
    pairs = (integers + 8).to(torch.uint8).view(*integers.shape[:-1], -1, 2)
    return pairs[..., 0] | (pairs[..., 1] << 4)


def _unpaired(codes: Tensor) -> Tensor:
    """[bytes] with two codes of 4 bits each -> [2 * bytes] of int8 in -8 ... 7."""
    pairs: Any = torch.stack([codes & 15, codes >> 4], dim=-1)
    return pairs.to(torch.int8) - 8
