"""Operators of a layer and of the head, and their times: matrix products by tiles and waves, others by bytes.

The time of an operator follows the roofline model with two corrections. A matrix product is computed in tiles that
are distributed over the processors in waves, the last of which may be partly filled (NVIDIA, "Matrix multiplication
background user's guide", sections "tile quantization" and "wave quantization"). Every kernel takes a fixed time to
start and to drain.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from math import ceil

from samestep.planning.hardware import Device
from samestep.planning.shapes import Transformer
from samestep.planning.software import Software

# Tile sizes of the matrix product libraries for these devices.
_TILES = ((256, 128), (128, 256), (128, 128), (128, 64), (64, 128), (64, 64))
_TILE_FILL = 64  # cost of filling and draining a tile's pipeline, in elements of the inner dimension
_TILE_REUSE = 20.0  # multiplications per loaded element at which loading takes as long as multiplying
_SPLITS = (1, 2, 4, 8)  # parts of the inner dimension, on different processors
_SHORTEST_SPLIT = 512
# Megatron-LM's fused softmax needs heads x samples to be a multiple of four (batches per block in
# fused_kernels/scaled_upper_triang_masked_softmax.h); else the cast to fp32, the scale, the mask, the softmax and the
# cast back are a kernel each.
_FUSED_SOFTMAX = 4
_ALIGNED = 8  # elements: 16 bytes, which tensor cores' loads need (NVIDIA, "Matrix multiplication user's guide")
_UNALIGNED_RATE = (
    0.4  # of the rate of aligned products: nanoGPT's step took 25 % longer with a vocabulary of 50,257 than 50,304
)
_SMOOTH = 3

# The fraction of peak FLOPs that attention kernels reach: forward and backward.
_ATTENTION_RATES = {
    # "30-50 % of the theoretical maximum in the forward, 25-35 % in the backward" (arXiv 2307.08691, section 1).
    ("flash-1", "a100"): (0.40, 0.30),
    # 225 TFLOP/s of 312 in training (arXiv 2307.08691, figures 5 and 6, head dimension 128).
    ("flash-2", "a100"): (0.62, 0.53),
    # 35 % on H100 (arXiv 2407.08608, abstract).
    ("flash-1", "hopper"): (0.25, 0.20),
    ("flash-2", "hopper"): (0.37, 0.32),
    # 600 TFLOP/s forward at head dimension 128 without a mask, less with one (arXiv 2407.08608, figures 5 and 6).
    ("cudnn", "hopper"): (0.55, 0.45),
    ("cudnn", "blackwell"): (0.55, 0.45),
    ("cudnn", "a100"): (0.62, 0.53),
}
_OTHER_ATTENTION = (0.35, 0.28)


@dataclass(frozen=True, kw_only=True, slots=True)
class Operator:
    """One kernel, or a group of equal ones: its FLOPs and memory traffic on one device."""

    name: str
    matmul: tuple[int, int, int, int] | None = None  # rows, columns, inner dimension, batch size
    attention_flops: float = 0.0
    backward: bool = False  # for attention: whether its backward rate applies
    traffic: float = 0.0  # bytes read and written, besides those of a matrix product
    low_precision: bool = False  # computed in fp8 or fp4 if that is the job's precision
    launches: float = 1.0  # operators that the host launches for it
    of_weight: bool = False  # it computes a weight gradient

    @property
    def flops(self) -> float:
        """Multiplications and additions."""
        if self.matmul is None:
            return self.attention_flops
        rows, columns, inner, count = self.matmul
        return 2.0 * rows * columns * inner * count


@dataclass(frozen=True, kw_only=True)
class DevicePart:
    """One device's part of a micro-batch: `tokens` of each sample's tokens, and 1 / `tensor` of the weights."""

    micro_batch: int
    tokens: int  # per sample on this device, after context parallel
    tensor: int = 1
    split: bool = False  # sequence parallel: tokens are split over the tensor axis between products
    expert: int = 1  # size of the expert axis


def layer_forward(model: Transformer, part: DevicePart, software: Software) -> list[Operator]:
    """Operators of one layer's forward on one device. Activations have 2 bytes per element."""
    rows, hidden, tensor = _rows(part), model.hidden, part.tensor
    whole = 2.0 * rows * hidden / (tensor if part.split else 1)  # bytes of the hidden state
    qkv, heads = _slice(model.qkv_width, tensor), _slice(model.attention_width, tensor)
    wide = 2.0 * rows * model.active_experts * _slice(model.ffn, tensor)
    routed, here = _routed(model, part)
    add = (3.5 if model.dropout else 3) * whole  # residual, branch, sum, and dropout's mask of one byte
    return [
        Operator(name="norm", traffic=2 * whole),
        _product("qkv", rows, qkv, hidden),
        *([] if model.positions else [Operator(name="rotary", traffic=2 * 2.0 * rows * qkv, launches=2)]),
        *_attention(model, part, software, backward=False),
        _product("projection", rows, hidden, heads),
        Operator(name="add", traffic=add),
        Operator(name="norm", traffic=2 * whole),
        *_routing(model, part, whole),
        _product("ffn in", routed, _slice(model.ffn_in_width, tensor), hidden, count=here),
        Operator(name="activation", traffic=(3 if model.gated else 2) * wide),
        _product("ffn out", routed, hidden, _slice(model.ffn, tensor), count=here),
        Operator(name="add", traffic=add),
    ]


def layer_recomputation(model: Transformer, part: DevicePart, software: Software, how: str) -> list[Operator]:
    """Operators that are recomputed before a layer's backward.

    PyTorch's checkpoint stops once every saved tensor is recomputed (`set_checkpoint_early_stop`), before the last
    product, whose result is not saved. Selective recomputation repeats unfused attention (arXiv 2205.05198, section
    5); where attention is one kernel, it repeats all that is neither a matrix product nor attention.
    """
    forward = layer_forward(model, part, software)
    if how == "full":
        stops = software.recompute_stops_early
        return [operator for operator in forward[:-1] if not (stops and operator.name == "ffn out")]
    if how == "none":
        return []
    if software.attention == "unfused":
        return _attention(model, part, software, backward=False)
    return [operator for operator in forward if operator.matmul is None and not operator.attention_flops]


def layer_backward(model: Transformer, part: DevicePart, software: Software) -> list[Operator]:
    """Operators of one layer's backward on one device; weight gradients accumulate over micro-batches.

    Frozen weights have no gradient. Adapters are far smaller than the frozen weights, and are not counted.
    """
    return [
        operator_
        for operator_ in _layer_backward(model, part, software)
        if not (model.adapter and operator_.of_weight)
    ]


def _layer_backward(model: Transformer, part: DevicePart, software: Software) -> list[Operator]:
    """The kernels of a layer's backward, last operator of the forward first.

    `traffic` is in bytes, with 16 bits per number (hence the factor 2.0 of `whole` and `wide`). Each matrix product
    has two in backward, for the gradients of its input and of its weight. Elementwise kernels count one pass over a
    tensor for each time that they read or write it.
    """
    rows, hidden, tensor = _rows(part), model.hidden, part.tensor
    whole = 2.0 * rows * hidden / (tensor if part.split else 1)
    qkv, heads = _slice(model.qkv_width, tensor), _slice(model.attention_width, tensor)
    wide = 2.0 * rows * model.active_experts * _slice(model.ffn, tensor)
    routed, here = _routed(model, part)
    add = (2.5 if model.dropout else 0) * whole
    return [
        Operator(name="add", traffic=add),
        *_product_backward("ffn out", routed, hidden, _slice(model.ffn, tensor), count=here),
        Operator(name="activation", traffic=(5 if model.gated else 3) * wide),
        *_product_backward("ffn in", routed, _slice(model.ffn_in_width, tensor), hidden, count=here),
        *_routing(model, part, whole),
        Operator(name="norm", traffic=3 * whole, launches=2),
        Operator(name="add", traffic=3 * whole + add),
        *_product_backward("projection", rows, hidden, heads),
        *_attention(model, part, software, backward=True),
        *([] if model.positions else [Operator(name="rotary", traffic=2 * 2.0 * rows * qkv, launches=2)]),
        *_product_backward("qkv", rows, qkv, hidden),
        Operator(name="norm", traffic=3 * whole, launches=2),
        Operator(name="add", traffic=3 * whole),
    ]


def head_forward(model: Transformer, part: DevicePart, software: Software) -> list[Operator]:
    """The kernels of the last norm, the output layer and the loss."""
    rows, vocab = _rows(part), _slice(model.vocab, part.tensor)
    whole = 2.0 * rows * model.hidden / (part.tensor if part.split else 1)
    return [
        Operator(name="norm", traffic=2 * whole),
        _product("head", rows, vocab, model.hidden, low_precision=False),
        Operator(name="loss", traffic=0.65 * software.loss_bytes * rows * vocab, launches=10),
    ]


def head_backward(model: Transformer, part: DevicePart, software: Software) -> list[Operator]:
    """The backward's kernels of loss, output layer and last norm; with adapters, no weight gradient."""
    rows, vocab = _rows(part), _slice(model.vocab, part.tensor)
    whole = 2.0 * rows * model.hidden / (part.tensor if part.split else 1)
    operators = [
        Operator(name="loss", traffic=0.35 * software.loss_bytes * rows * vocab, launches=5),
        *_product_backward("head", rows, vocab, model.hidden, low_precision=False),
        Operator(name="norm", traffic=3 * whole, launches=2),
    ]
    return [operator_ for operator_ in operators if not (model.adapter and operator_.of_weight)]


def embedding(model: Transformer, part: DevicePart) -> list[Operator]:
    """The kernels of the embedding's forward and backward (rows read, written, added), and of the batch's masks."""
    rows = _rows(part)
    whole = 2.0 * rows * model.hidden / (part.tensor if part.split else 1)
    return [Operator(name="embedding", traffic=(8 if model.dropout else 5) * whole, launches=50)]


def _attention(model: Transformer, part: DevicePart, software: Software, *, backward: bool) -> list[Operator]:
    """Kernels of scores, softmax and context. A flash kernel skips the masked half of a causal model's scores."""
    heads = _slice(model.heads, part.tensor)
    keys, dim = model.seq, model.head_dim
    count = part.micro_batch * heads
    if software.attention != "unfused":
        flops = 4.0 * count * part.tokens * keys * dim * (0.5 if model.causal else 1.0)
        return [
            Operator(
                name="attention",
                attention_flops=flops * (2.5 if backward else 1),  # the backward recomputes the scores
                backward=backward,
                traffic=2.0 * count * part.tokens * dim * (8 if backward else 4),
                launches=4 if backward else 2,
            )
        ]
    scores = 2.0 * count * part.tokens * keys  # bytes
    passes, issued_more = (2.0, 0) if count % _FUSED_SOFTMAX == 0 else (11.0, 8)
    drop = 2.5 * scores if model.dropout else 0.0
    copies = 2 * 2.0 * count * part.tokens * dim * 3
    if not backward:
        return [
            Operator(name="copies", traffic=copies, launches=4),
            _product("scores", part.tokens, keys, dim, count=count, low_precision=False),
            Operator(name="softmax", traffic=passes * scores, launches=1 + issued_more),
            Operator(name="dropout", traffic=drop, launches=2 if model.dropout else 0),
            _product("context", part.tokens, dim, keys, count=count, low_precision=False),
            Operator(name="copies", traffic=copies / 3, launches=2),
        ]
    return [
        Operator(name="copies", traffic=copies / 3, launches=2),
        _product("probabilities'", part.tokens, keys, dim, count=count, low_precision=False),
        _product("values'", keys, dim, part.tokens, count=count, low_precision=False),
        Operator(name="dropout", traffic=drop, launches=2 if model.dropout else 0),
        Operator(name="softmax", traffic=1.5 * passes * scores, launches=1 + issued_more),
        _product("queries'", part.tokens, dim, keys, count=count, low_precision=False),
        _product("keys'", keys, dim, part.tokens, count=count, low_precision=False),
        Operator(name="copies", traffic=copies, launches=4),
    ]


def _product(
    name: str, rows: int, columns: int, inner: int, *, count: int = 1, low_precision: bool = True
) -> Operator:
    """A batch of `count` matrix products, [rows, inner] x [inner, columns]."""
    return Operator(name=name, matmul=(rows, columns, inner, count), low_precision=low_precision, launches=2)


def _product_backward(
    name: str, rows: int, columns: int, inner: int, *, count: int = 1, low_precision: bool = True
) -> Iterable[Operator]:
    """The products for the gradients of input and weight; the latter is added to that of earlier micro-batches."""
    yield _product(f"{name} input'", rows, inner, columns, count=count, low_precision=low_precision)
    yield Operator(
        name=f"{name} weight'",
        matmul=(inner, columns, rows, count),
        traffic=2.0 * inner * columns * 2 * count,
        low_precision=low_precision,
        launches=3,
        of_weight=True,
    )


def _routed(model: Transformer, part: DevicePart) -> tuple[int, int]:
    """Tokens per expert on this device, and its number of experts, if all experts are chosen equally often."""
    if model.experts == 1:
        return _rows(part), 1
    here = max(model.experts // part.expert, 1)
    return max(1, _rows(part) * model.active_experts // here), here


def _routing(model: Transformer, part: DevicePart, whole: float) -> list[Operator]:
    """The kernels that choose experts, put tokens in expert order, and put them back."""
    if model.experts == 1:
        return []
    router = _product("router", _rows(part), model.experts, model.hidden, low_precision=False)
    return [router, Operator(name="routing", traffic=8 * model.active_experts * whole, launches=12)]


def _rows(part: DevicePart) -> int:
    return part.micro_batch * part.tokens


def _slice(total: int, parts: int) -> int:
    return -(-total // parts)


@dataclass(frozen=True, kw_only=True, slots=True)
class OperatorTimes:
    """Time of operators on a device, by the resource that limits them, and their FLOPs."""

    seconds: float = 0.0  # on the device: the sum of the next three
    matmul_seconds: float = 0.0
    attention_seconds: float = 0.0
    memory_seconds: float = 0.0
    host_seconds: float = 0.0  # to launch them
    flops: float = 0.0

    def __add__(self, other: "OperatorTimes") -> "OperatorTimes":
        return self.combined(other, 1)

    def combined(self, other: "OperatorTimes", times: float) -> "OperatorTimes":
        """This work plus `times` times another."""
        return OperatorTimes(
            seconds=self.seconds + times * other.seconds,
            matmul_seconds=self.matmul_seconds + times * other.matmul_seconds,
            attention_seconds=self.attention_seconds + times * other.attention_seconds,
            memory_seconds=self.memory_seconds + times * other.memory_seconds,
            host_seconds=self.host_seconds + times * other.host_seconds,
            flops=self.flops + times * other.flops,
        )


def issued(device_seconds: float, host_seconds: float) -> float:
    """Seconds in which the host launches operators and the device runs them.

    The host runs ahead while the device is the slower of the two, and the device waits while the host is. Every layer
    has both kinds of parts, so near the balance the total exceeds the larger of the two: it is a norm of both, as in
    smooth roofline models.
    """
    return (device_seconds**_SMOOTH + host_seconds**_SMOOTH) ** (1 / _SMOOTH)


def work_of(operators: Sequence[Operator], device: Device, software: Software, precision: str) -> OperatorTimes:
    """Sum the times of operators that run one after the other."""
    matmul = attention = memory = launches = flops = 0.0
    efficiency = device.efficiency
    for operator in operators:
        launches += operator.launches
        flops += operator.flops
        if operator.matmul is not None:
            used = precision if operator.low_precision else _plain(precision)
            matmul += matmul_seconds(operator.matmul, device, used) + operator.traffic / (
                efficiency.bandwidth * device.bandwidth
            )
            matmul += efficiency.kernel_seconds
        elif operator.attention_flops:
            forward, backward = _ATTENTION_RATES.get((software.attention, device.kind), _OTHER_ATTENTION)
            rate = (backward if operator.backward else forward) * device.flops[_plain(precision)]
            attention += operator.attention_flops / rate + efficiency.kernel_seconds
        elif operator.traffic:
            memory += operator.traffic / (efficiency.bandwidth * device.bandwidth) + efficiency.kernel_seconds
    return OperatorTimes(
        seconds=matmul + attention + memory,
        matmul_seconds=matmul,
        attention_seconds=attention,
        memory_seconds=memory,
        host_seconds=launches * software.launches * efficiency.launch_seconds,
        flops=flops,
    )


def _plain(precision: str) -> str:
    """The precision of operators that are not computed in fp8 or fp4."""
    return "bf16" if precision in ("fp8", "fp4") else precision


@lru_cache(maxsize=65536)
def matmul_seconds(sizes: tuple[int, int, int, int], device: Device, precision: str) -> float:
    """Seconds of `count` products of (rows, inner) by (inner, columns), without the kernel's start.

    Uses the tile and the split of the inner dimension that take the least time, as libraries would choose.
    """
    rows, columns, inner, count = sizes
    efficiency = device.efficiency
    low = precision in ("fp8", "fp4")
    peak = device.flops[precision] * (
        (efficiency.low_precision_matmul or efficiency.matmul) if low else efficiency.matmul
    )
    processor_peak = peak / device.processors
    reuse_of_largest = _reuse(*_TILES[0])
    best = float("inf")
    for height, width in _TILES:
        rate = processor_peak * _reuse(height, width) / reuse_of_largest
        tiles = ceil(rows / height) * ceil(columns / width) * count
        for split in _SPLITS:
            depth = inner / split
            if split > 1 and depth < _SHORTEST_SPLIT:
                break
            waves = ceil(tiles * split / device.processors)
            seconds = waves * 2.0 * height * width * (depth + _TILE_FILL) / rate
            if split > 1:
                seconds += 8.0 * rows * columns * count / (efficiency.bandwidth * device.bandwidth)
            best = min(best, seconds)
    if any(side % _ALIGNED for side in (rows, columns, inner) if side >= _SHORTEST_SPLIT):
        best /= _UNALIGNED_RATE
    element = {"fp32": 4, "fp8": 1, "fp4": 0.5}.get(precision, 2)
    moved = count * (element * (rows * inner + inner * columns) + 2.0 * rows * columns)
    return issued(best, moved / (efficiency.bandwidth * device.bandwidth))


def _reuse(height: int, width: int) -> float:
    """The fraction of a tile's time spent computing, by how often a loaded element is used."""
    reuse = height * width / (height + width)
    return reuse / (reuse + _TILE_REUSE)
