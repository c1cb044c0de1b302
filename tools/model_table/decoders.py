"""Decoders of transformers, with their own loss on padded texts."""

from collections.abc import Mapping
from functools import partial
from typing import Any

import torch
import transformers
from torch import nn

from model_table.entry import Entry, Row, words

VOCABULARY = 57
# Four layers, so that four stages can be cut; an odd vocabulary, and widths that no power of two divides.
SIZES: Mapping[str, Any] = {
    "vocab_size": VOCABULARY,
    "hidden_size": 24,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "intermediate_size": 38,
    "max_position_embeddings": 24,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
}
_OLD: Mapping[str, Any] = {"vocab_size": VOCABULARY, "bos_token_id": 1, "eos_token_id": 2}
_GPT: Mapping[str, Any] = {**_OLD, "n_embd": 24, "n_layer": 4, "n_head": 4, "n_positions": 24}
_EXPERTS: Mapping[str, Any] = {"num_experts_per_tok": 2, "moe_intermediate_size": 20}

# The configuration's class, and what it is given beside or in the place of SIZES.
CONFIGURATIONS: Mapping[str, tuple[str, Mapping[str, Any]]] = {
    "llama": ("Llama", {}),
    "mistral": ("Mistral", {"sliding_window": 4}),
    "qwen2": ("Qwen2", {"tie_word_embeddings": True}),
    "qwen3": ("Qwen3", {"head_dim": 6}),
    "gemma": ("Gemma", {"head_dim": 6, "num_key_value_heads": 1}),
    "gemma2": ("Gemma2", {"head_dim": 6, "sliding_window": 4, "query_pre_attn_scalar": 6}),
    "gemma3": ("Gemma3Text", {"head_dim": 6, "sliding_window": 4, "num_key_value_heads": 1}),
    "gpt-neox": ("GPTNeoX", {"rotary_pct": 1.0}),
    "opt": ("OPT", {"ffn_dim": 38, "word_embed_proj_dim": 24}),
    "phi": ("Phi", {"partial_rotary_factor": 1.0}),
    "phi3": ("Phi3", {}),
    "stablelm": ("StableLm", {"partial_rotary_factor": 1.0}),
    "cohere": ("Cohere", {}),
    "mixtral": ("Mixtral", {"intermediate_size": 40, "num_local_experts": 4, "num_experts_per_tok": 2}),
    "qwen2-moe": ("Qwen2Moe", {**_EXPERTS, "num_experts": 4, "shared_expert_intermediate_size": 24}),
}
# Those whose configurations have names of their own for all sizes.
OWN_NAMES: Mapping[str, tuple[str, Mapping[str, Any]]] = {
    "gpt2": ("GPT2", _GPT),
    "gpt-j": ("GPTJ", {**_GPT, "rotary_dim": 6, "tie_word_embeddings": False}),
    "bloom": ("Bloom", {**_OLD, "hidden_size": 24, "n_layer": 4, "n_head": 4}),
    "falcon": (
        "Falcon",
        {**_OLD, "hidden_size": 24, "num_hidden_layers": 4, "num_attention_heads": 4, "multi_query": True},
    ),
    "mpt": ("Mpt", {**_OLD, "d_model": 24, "n_layers": 4, "n_heads": 4, "max_seq_len": 24, "expansion_ratio": 2}),
    "mamba": ("Mamba", {**_OLD, "hidden_size": 24, "num_hidden_layers": 4, "state_size": 4, "time_step_rank": 3}),
    "mamba2": (
        "Mamba2",
        {
            **_OLD,
            "hidden_size": 24,
            "num_hidden_layers": 4,
            "state_size": 4,
            "num_heads": 4,
            "head_dim": 12,
            "n_groups": 2,
            "chunk_size": 8,
        },
    ),
    "rwkv": ("Rwkv", {**_OLD, "hidden_size": 24, "num_hidden_layers": 4, "context_length": 24}),
}
_UNPADDED = ("mamba", "mamba2", "rwkv")  # recurrences, whose states padding on the right does not reach


def model(name: str) -> nn.Module:
    """The causal language model of a name."""
    kind, sizes = OWN_NAMES[name] if name in OWN_NAMES else CONFIGURATIONS[name]
    values = dict(sizes) if name in OWN_NAMES else {**SIZES, **sizes}
    config = getattr(transformers, f"{kind}Config")(**values)
    return transformers.AutoModelForCausalLM.from_config(config)


def row(index: int) -> Row:
    """A text of 7 to 13 tokens."""
    return {"input_ids": words(index, 7 + (3 * index) % 7, VOCABULARY, first=3)}


def padded(rows: list[Row], *, masked: bool = True) -> Mapping[str, Any]:
    """Texts padded on the right to the longest of them, with their labels. [batch, tokens]"""
    ids = nn.utils.rnn.pad_sequence([row["input_ids"] for row in rows], batch_first=True)
    lengths = torch.tensor([len(row["input_ids"]) for row in rows])
    real = torch.arange(ids.shape[1])[None] < lengths[:, None]
    mask = {"attention_mask": real.long()} if masked else {}
    return {"input_ids": ids, **mask, "labels": ids.masked_fill(~real, -100)}


def entries() -> list[Entry]:
    order = [*CONFIGURATIONS, *OWN_NAMES]
    return [
        Entry(
            name=name,
            kind="decoder",
            model=partial(model, name),
            row=row,
            collate=partial(padded, masked=name not in _UNPADDED),
        )
        for name in order
    ]
