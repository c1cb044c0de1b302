"""Transformer sizes, from which FLOPs and memory are computed, and a table of known models."""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from itertools import product

from samestep.errors import UserError, closest
from samestep.limits import MOST_WIDTH, check_whole

_MOST_OF_A_SIZE = 10**8  # far above any published, and few enough for what is counted of them
_NEAR = 0.03  # a published count of parameters is rounded to two digits or more


@dataclass(frozen=True, kw_only=True)
class Transformer:
    """A transformer of equal layers: attention and a feed-forward part, each after a norm.

    `ffn` is the width inside the feed-forward part; `gated` has three matrices there instead of two (SwiGLU).
    """

    name: str
    layers: int
    hidden: int
    heads: int
    kv_heads: int
    ffn: int
    vocab: int
    seq: int  # tokens of a sample
    gated: bool = False
    tied: bool = True  # the output layer shares the embedding's weights
    positions: int = 0  # learned position embeddings; 0: rotary, or none
    causal: bool = True
    dropout: bool = False
    head_size: int | None = None  # None: hidden / heads
    experts: int = 1  # per layer, of which each token uses `active_experts`; 1: a dense model
    active_experts: int = 1
    adapter: int = 0  # rank of the LoRA adapters, which alone are trained; 0: all weights are trained
    source: str = ""

    def __post_init__(self) -> None:
        for name in ("layers", "hidden", "heads", "kv_heads", "ffn", "vocab", "seq"):
            check_whole(f"model {self.name}: {name}", getattr(self, name), most=_MOST_OF_A_SIZE)
        if self.head_size is None and self.hidden % self.heads:
            raise UserError(
                f"model {self.name}: hidden is {self.hidden}, no multiple of its {self.heads} heads; "
                "use one that is, or give head_size"
            )

    @property
    def head_dim(self) -> int:
        return self.head_size or self.hidden // self.heads

    @property
    def attention_width(self) -> int:
        """Columns of the queries and of attention's output."""
        return self.heads * self.head_dim

    @property
    def qkv_width(self) -> int:
        """Columns of the fused projection to queries, keys and values."""
        return (self.heads + 2 * self.kv_heads) * self.head_dim

    @property
    def ffn_in_width(self) -> int:
        """Columns of the feed-forward part's first projection, including a gate."""
        return self.ffn * (2 if self.gated else 1)

    @property
    def layer_matrix_parameters(self) -> int:
        """Weights in a layer's matrix products, including all experts."""
        return self.shared_matrix_parameters + self.experts * self.expert_parameters

    @property
    def expert_parameters(self) -> int:
        """Weights of one expert, or of a dense layer's feed-forward part."""
        return self.hidden * (self.ffn_in_width + self.ffn)

    @property
    def shared_matrix_parameters(self) -> int:
        """Weights of a layer's attention and of its router."""
        router = self.hidden * self.experts if self.experts > 1 else 0
        return self.hidden * self.qkv_width + self.attention_width * self.hidden + router

    @property
    def layer_parameters(self) -> int:
        """Weights of a layer: its matrices and two norms (biases are below a thousandth)."""
        return self.layer_matrix_parameters + 2 * self.hidden

    @property
    def embedding_parameters(self) -> int:
        return self.hidden * (self.vocab + self.positions)

    @property
    def head_parameters(self) -> int:
        """Weights of the output layer; 0 if it shares the embedding's."""
        return 0 if self.tied else self.hidden * self.vocab

    @property
    def adapter_parameters(self) -> int:
        """Weights of the LoRA adapters of all layers' projections (Hu et al., arXiv 2106.09685)."""
        attention = 3 * self.hidden + self.qkv_width + self.attention_width + self.hidden
        wide = (2 if self.gated else 1) * self.hidden + self.ffn_in_width + self.ffn + self.hidden
        return self.layers * self.adapter * (attention + self.experts * wide)

    @property
    def trained(self) -> float:
        """The fraction of the weights that are trained, and so have gradients and optimizer state."""
        return self.adapter_parameters / self.parameters if self.adapter else 1.0

    @property
    def parameters(self) -> int:
        return self.layers * self.layer_parameters + self.embedding_parameters + self.head_parameters + self.hidden

    def model_flops(self, tokens: float, *, whole_attention: bool = False) -> float:
        """FLOPs of forward and backward for `tokens` tokens, as model FLOPs utilisation counts them.

        Each token counts 6 FLOPs per weight of the matrix products that it uses, and 12 · layers · hidden · seq in
        attention (PaLM, arXiv 2204.02311, appendix B), half of that if it is causal. Recomputation is not counted.
        Frozen weights have no gradient, so a model with adapters counts 4 FLOPs per weight. `whole_attention` counts
        a causal model's attention in full, as many published figures do.
        """
        layer = self.shared_matrix_parameters + self.active_experts * self.expert_parameters
        weights = self.layers * layer + self.hidden * self.vocab
        attention = 12 * self.layers * self.attention_width * self.seq
        if self.causal and not whole_attention:
            attention /= 2
        return tokens * ((4.0 if self.adapter else 6.0) * weights + attention)


def _llama(name: str, layers: int, hidden: int, heads: int, ffn: int, source: str, kv_heads: int = 8) -> Transformer:
    """A model of Llama 3's family: grouped-query attention, gated feed-forward, rotary positions, untied output."""
    return Transformer(
        name=name, layers=layers, hidden=hidden, heads=heads, kv_heads=kv_heads, ffn=ffn, vocab=128256, seq=8192,
        gated=True, tied=False, source=source,
    )  # fmt: skip


def _gpt(name: str, layers: int, hidden: int, heads: int, source: str, vocab: int = 51200) -> Transformer:
    """A model of GPT-3's family: learned positions, dropout, a feed-forward of four times the width."""
    return Transformer(
        name=name, layers=layers, hidden=hidden, heads=heads, kv_heads=heads, ffn=4 * hidden, vocab=vocab, seq=2048,
        positions=2048, dropout=True, source=source,
    )  # fmt: skip


def _mpt(name: str, layers: int, hidden: int, heads: int) -> Transformer:
    """A model of MPT's family: a GPT without dropout."""
    source = "mosaicml/llm-foundry scripts/train/yamls/pretrain"
    return replace(_gpt(name, layers, hidden, heads, source, vocab=50368), dropout=False)


_LLAMA3 = "arXiv 2407.21783, table 3"
_MEGATRON_2021 = "arXiv 2104.04473, table 1"
_MEGATRON_2022 = "arXiv 2205.05198, table 3"
_BERT = "arXiv 1810.04805, section 3; google-bert's config.json"

KNOWN: Mapping[str, Transformer] = {
    model.name: model
    for model in (
        _llama("llama-3-8b", 32, 4096, 32, 14336, _LLAMA3),
        _llama("llama-3-70b", 80, 8192, 64, 28672, _LLAMA3),
        _llama("llama-3-405b", 126, 16384, 128, 53248, _LLAMA3),
        Transformer(
            name="llama-2-7b", layers=32, hidden=4096, heads=32, kv_heads=32, ffn=11008, vocab=32000, seq=4096,
            gated=True, tied=False, source="arXiv 2307.09288, table 1; meta-llama's config.json",
        ),
        Transformer(
            name="llama-2-70b", layers=80, hidden=8192, heads=64, kv_heads=8, ffn=28672, vocab=32000, seq=4096,
            gated=True, tied=False, source="arXiv 2307.09288, table 1; meta-llama's config.json",
        ),
        Transformer(
            name="mistral-7b", layers=32, hidden=4096, heads=32, kv_heads=8, ffn=14336, vocab=32000, seq=8192,
            gated=True, tied=False, source="arXiv 2310.06825, table 1",
        ),
        Transformer(
            name="mixtral-8x7b", layers=32, hidden=4096, heads=32, kv_heads=8, ffn=14336, vocab=32000, seq=8192,
            gated=True, tied=False, experts=8, active_experts=2, source="arXiv 2401.04088, table 1",
        ),
        Transformer(
            name="nemotron-15b", layers=32, hidden=6144, heads=48, kv_heads=8, ffn=24576, vocab=256000, seq=4096,
            tied=False, source="arXiv 2402.16819, table 1",
        ),
        Transformer(
            name="nemotron-340b", layers=96, hidden=18432, heads=96, kv_heads=8, ffn=73728, vocab=256000, seq=4096,
            tied=False, source="arXiv 2406.11704, table 1",
        ),
        _mpt("mpt-125m", 12, 768, 12),
        _mpt("mpt-1b", 24, 2048, 16),
        _mpt("mpt-7b", 32, 4096, 32),
        _mpt("mpt-30b", 48, 7168, 56),
        _gpt("gpt-1.7b", 24, 2304, 24, _MEGATRON_2021),
        _gpt("gpt-18b", 40, 6144, 48, _MEGATRON_2021),
        _gpt("gpt-145b", 80, 12288, 96, _MEGATRON_2021),
        _gpt("gpt-1t", 128, 25600, 160, _MEGATRON_2021),
        _gpt("gpt-22b", 48, 6144, 64, _MEGATRON_2022),
        _gpt("gpt-175b", 96, 12288, 96, _MEGATRON_2022),
        _gpt("gpt-530b", 105, 20480, 128, _MEGATRON_2022),
        replace(
            _gpt("gpt2-small", 12, 768, 12, "openai-community/gpt2's config.json", vocab=50257),
            seq=1024, positions=1024,
        ),
        Transformer(
            name="bert-base", layers=12, hidden=768, heads=12, kv_heads=12, ffn=3072, vocab=30522, seq=512,
            positions=512, causal=False, dropout=True, source=_BERT,
        ),
        Transformer(
            name="bert-large", layers=24, hidden=1024, heads=16, kv_heads=16, ffn=4096, vocab=30522, seq=512,
            positions=512, causal=False, dropout=True, source=_BERT,
        ),
    )
}  # fmt: skip


def known_model(name: str, *, seq: int | None = None, adapter: int = 0) -> Transformer:
    """Look up a known model, with samples of `seq` tokens if given, and LoRA adapters of rank `adapter` if not 0.

    Raises UserError for an unknown name or a negative rank.
    """
    model = KNOWN.get(name.lower())
    if model is None:
        raise UserError(f'--model is "{name}"; {closest(name, KNOWN)}')
    check_whole("--adapter", adapter, least=0, most=MOST_WIDTH)  # 0: every weight is trained
    model = replace(model, adapter=adapter)
    if seq is None:
        return model
    return replace(model, seq=seq, positions=max(model.positions, seq) if model.positions else 0)


def with_parameters(model: Transformer, parameters: float) -> Transformer:
    """Set `gated` and `tied` of a model so that it fits a published count of parameters.

    Published tables give the count but not these two. Chooses the nearest of the four combinations, and leaves the
    model unchanged if none is within 3 %.
    """
    forms = [replace(model, gated=gated, tied=tied) for gated, tied in product((False, True), repeat=2)]
    nearest = min(forms, key=lambda form: abs(form.parameters - parameters))
    return nearest if abs(nearest.parameters - parameters) <= _NEAR * parameters else model
