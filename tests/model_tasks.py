"""Tasks on tiny models as they come: transformers' own classes with random weights, and nets of plain PyTorch."""

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torchmetrics import Metric
from torchmetrics.classification import MulticlassAccuracy

import samestep

WORDS = 37
CLASSES = 3


class Sentences(samestep.Task):
    """Sentences of 3 to 9 words, of random numbers; a class a sentence, or the next word as target of each."""

    next_word = False

    def __init__(self, *, kind: str = "bert", samples: int = 90, layers: int = 4, dropout: float = 0.1) -> None:
        generator = torch.Generator().manual_seed(3)
        lengths = torch.randint(3, 10, (samples + 23,), generator=generator).tolist()
        sentences = [torch.randint(1, WORDS, (length,), generator=generator) for length in lengths]
        self.kind, self.layers, self.dropout = kind, layers, dropout
        labelled = [(words, int(words.sum()) % CLASSES) for words in sentences]
        self.samples, self.held_out = labelled[:samples], labelled[samples:]

    def model(self) -> nn.Module:
        return CLASSIFIERS[self.kind](self.layers, self.dropout)

    def train_set(self) -> samestep.Samples:
        return self.samples

    def eval_set(self) -> samestep.Samples:
        return self.held_out

    def collate(self, samples: Sequence[Any]) -> samestep.Batch:
        words = nn.utils.rnn.pad_sequence([words for words, _ in samples], batch_first=True)  # [samples, words]
        inputs = {"input_ids": words, "attention_mask": (words != 0).long()}
        return samestep.Batch(inputs, self.targets(words, samples))

    def targets(self, words: Tensor, samples: Sequence[Any]) -> Tensor:
        return torch.tensor([label for _, label in samples])

    def loss(self, output: Any, batch: samestep.Batch) -> tuple[Tensor, Tensor | int]:
        return nn.functional.cross_entropy(output.logits, batch.targets, reduction="sum"), len(batch.targets)

    def metrics(self) -> Mapping[str, Metric]:
        return {"accuracy": MulticlassAccuracy(CLASSES, average="micro")}

    def scores(self, output: Any, batch: samestep.Batch) -> tuple[Tensor, Tensor]:
        return output.logits, batch.targets


class NextWord(Sentences):
    """A language model: the loss is a sum over the words that have a next one, as many as the sentence is long."""

    def model(self) -> nn.Module:
        return LANGUAGE_MODELS[self.kind](self.layers, self.dropout)

    def targets(self, words: Tensor, samples: Sequence[Any]) -> Tensor:
        following = torch.zeros_like(words)
        following[:, :-1] = words[:, 1:]
        return following.masked_fill(following == 0, -100)

    def loss(self, output: Any, batch: samestep.Batch) -> tuple[Tensor, Tensor]:
        flat = output.logits.flatten(0, 1)  # [samples x words, vocabulary]
        loss = nn.functional.cross_entropy(flat, batch.targets.flatten(), reduction="sum", ignore_index=-100)
        return loss, (batch.targets != -100).sum()

    def metrics(self) -> Mapping[str, Metric]:
        return {"accuracy": MulticlassAccuracy(WORDS, average="micro", ignore_index=-100)}

    def scores(self, output: Any, batch: samestep.Batch) -> tuple[Tensor, Tensor]:
        return output.logits.flatten(0, 1), batch.targets.flatten()


def _config(name: str, layers: int, **values: Any) -> Any:
    import transformers

    sizes: dict[str, Any] = {
        "vocab_size": WORDS,
        "hidden_size": 24,
        "num_hidden_layers": layers,
        "num_attention_heads": 4,
        "intermediate_size": 20,
        "max_position_embeddings": 16,
        "bos_token_id": None,
        "eos_token_id": None,
        "pad_token_id": 0,
        "num_labels": CLASSES,
    }
    return getattr(transformers, f"{name}Config")(**{**sizes, **values})


def _bert(layers: int, dropout: float) -> nn.Module:
    from transformers import BertForSequenceClassification

    return BertForSequenceClassification(_config("Bert", layers, hidden_dropout_prob=dropout))


def _distilbert(layers: int, dropout: float) -> nn.Module:
    from transformers import DistilBertForSequenceClassification

    config = _config("DistilBert", layers, dim=24, n_layers=layers, n_heads=4, hidden_dim=20, dropout=dropout)
    return DistilBertForSequenceClassification(config)


def _causal(name: str, **values: Any) -> Callable[[int, float], nn.Module]:
    def make(layers: int, dropout: float) -> nn.Module:
        from transformers import AutoModelForCausalLM

        return AutoModelForCausalLM.from_config(_config(name, layers, **values))

    return make


def _gpt2(layers: int, dropout: float, inner: int | None = None) -> nn.Module:
    from transformers import GPT2Config, GPT2LMHeadModel

    words: dict[str, Any] = {"vocab_size": WORDS, "bos_token_id": None, "eos_token_id": None}
    return GPT2LMHeadModel(GPT2Config(**words, n_embd=24, n_layer=layers, n_head=4, n_positions=16, n_inner=inner))


CLASSIFIERS: Mapping[str, Callable[[int, float], nn.Module]] = {"bert": _bert, "distilbert": _distilbert}
LANGUAGE_MODELS: Mapping[str, Callable[[int, float], nn.Module]] = {
    "gpt2": _gpt2,  # its embedding is its head too
    "odd-gpt2": partial(_gpt2, inner=97),  # no two slices of its inner layers are of the same size
    "llama": _causal("Llama", num_key_value_heads=2),
    "tied-llama": _causal("Llama", num_key_value_heads=2, tie_word_embeddings=True),
    "qwen2": _causal("Qwen2", num_key_value_heads=2),
    "mistral": _causal("Mistral", num_key_value_heads=2, sliding_window=4),
}
