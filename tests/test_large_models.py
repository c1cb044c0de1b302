"""A model too large for one process is tried with two layers of its configuration, and the facts are the same."""

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import transformers
from handed_models import VOCABULARY, Table, next_words, reversed_words, texts
from torch import nn

import samestep
from samestep.tasks import memory_budget

_SIZES: dict[str, Any] = {"hidden_size": 256, "intermediate_size": 512, "num_attention_heads": 4}
_WORDS: dict[str, Any] = {"vocab_size": VOCABULARY, "num_key_value_heads": 2, "max_position_embeddings": 24}
BUDGET = 16 * 2**20  # bytes; twelve layers take twice as many


def llama(layers: int = 12) -> nn.Module:
    return transformers.LlamaForCausalLM(transformers.LlamaConfig(**_SIZES, **_WORDS, num_hidden_layers=layers))


def qwen(layers: int = 12) -> nn.Module:
    """Its configuration has a list with an entry a layer, which has to be as long as they are many."""
    config = transformers.Qwen3Config(**_SIZES, **_WORDS, head_dim=64, num_hidden_layers=layers)
    assert len(config.layer_types or ()) == layers
    return transformers.Qwen3ForCausalLM(config)


def gpt2() -> nn.Module:
    """Its configuration has another name for the number of layers."""
    sizes: dict[str, Any] = {"n_embd": 256, "n_layer": 12, "n_head": 4, "n_positions": 24, "vocab_size": VOCABULARY}
    return transformers.GPT2LMHeadModel(transformers.GPT2Config(**sizes, bos_token_id=1, eos_token_id=2))


def t5() -> nn.Module:
    sizes: dict[str, Any] = {"d_model": 256, "d_kv": 64, "d_ff": 512, "num_heads": 4, "vocab_size": VOCABULARY}
    sizes |= {"num_layers": 6, "num_decoder_layers": 5, "decoder_start_token_id": 0}
    config = transformers.T5Config(**sizes)
    return transformers.T5ForConditionalGeneration(config)


def task_of(build: Callable[[], nn.Module], collator: Any = next_words) -> samestep.tasks.HuggingFace:
    return samestep.tasks.HuggingFace(model=build, data=Table(texts()), collator=collator)


@pytest.mark.parametrize(
    ("build", "collator"), [(llama, next_words), (qwen, next_words), (gpt2, next_words), (t5, reversed_words)]
)
def test_two_layers_tell_what_all_tell(
    build: Callable[[], nn.Module], collator: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole = task_of(build, collator).tried_facts()
    monkeypatch.setattr(memory_budget, "available_memory", lambda: 4 * BUDGET)
    with pytest.raises(memory_budget.TooLargeError), memory_budget.Budget():
        build()
    assert task_of(build, collator).tried_facts() == whole


class Deep(nn.Module):
    """A model without a configuration."""

    def __init__(self) -> None:
        super().__init__()
        self.whole = llama()

    def forward(self, input_ids: Any, attention_mask: Any, labels: Any) -> Any:
        return self.whole(input_ids=input_ids, attention_mask=attention_mask, labels=labels)


@pytest.mark.parametrize(
    ("build", "most", "message"),
    [
        (Deep, BUDGET, "the model takes more than 16 MiB, .* no configuration by which it could be tried with fewer"),
        (llama, 2**20, "the model takes more than 1 MiB, .* with 2 layers, too; use a host with more memory"),
        (partial(llama, 2), 2**20, "no configuration by which it could be tried with fewer layers"),
    ],
)
def test_one_that_can_not_be_made_smaller_is_refused_until_there_is_memory(
    build: Callable[[], nn.Module], most: int, message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as little:
        little.setattr(memory_budget, "available_memory", lambda: 4 * most)
        with pytest.raises(samestep.UserError, match=message):
            task_of(build).tried_facts()
    assert task_of(build).tried_facts().terms is not None
