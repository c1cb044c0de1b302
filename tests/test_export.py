"""Weights out: what any task with a model of transformers exports, `from_pretrained` loads, with its processors."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import Whitespace
from torch import Tensor, nn
from transformers.data.data_collator import DataCollatorWithPadding

import samestep
from samestep.tasks import HuggingFace

WORDS = ["[PAD]", "[UNK]", *(f"word{number}" for number in range(30))]
ROWS = [{"input_ids": [2 + (3 * row + place) % 30 for place in range(8)], "labels": row % 3} for row in range(24)]
IDS = torch.tensor([row["input_ids"] for row in ROWS[:4]])  # [samples, tokens]


def bert() -> transformers.BertForSequenceClassification:
    config = transformers.BertConfig(
        vocab_size=len(WORDS),
        hidden_size=16,
        num_hidden_layers=2,
        num_attention_heads=2,
        intermediate_size=24,
        max_position_embeddings=16,
        num_labels=3,  # pyright: ignore[reportCallIssue]
    )
    return transformers.BertForSequenceClassification(config)


def with_another_head() -> nn.Module:
    model = bert()
    model.classifier = nn.Sequential(nn.Linear(16, 8), nn.Linear(8, 3))  # pyright: ignore[reportAttributeAccessIssue]
    return model


class Plain(nn.Module):
    """A model of nobody's library, with a loss of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(len(WORDS), 3)

    def forward(self, input_ids: Tensor, labels: Tensor) -> dict[str, Tensor]:
        logits = self.table(input_ids).mean(1)
        return {"loss": nn.functional.cross_entropy(logits, labels), "logits": logits}


class Own(samestep.Task):
    """A task of one's own, whose model is one of transformers."""

    def model(self) -> nn.Module:
        return bert()

    def train_set(self) -> samestep.Samples:
        return [(torch.tensor(row["input_ids"]), row["labels"]) for row in ROWS]

    def loss(self, output: Any, batch: samestep.Batch) -> tuple[Tensor, int]:
        return nn.functional.cross_entropy(output.logits, batch.targets, reduction="sum"), len(batch.targets)


def tokenizer() -> transformers.PreTrainedTokenizerFast:
    rules = Tokenizer(WordLevel({word: number for number, word in enumerate(WORDS)}, unk_token="[UNK]"))
    rules.pre_tokenizer = Whitespace()
    return transformers.PreTrainedTokenizerFast(tokenizer_object=rules, pad_token="[PAD]", unk_token="[UNK]")


def recipe_of(task: samestep.Task, **values: Any) -> samestep.Recipe:
    return samestep.Recipe(task=task, batch=8, steps=3, optimizer=samestep.AdamW(lr=1e-2), **values)


def handed_over(model: Callable[[], nn.Module] = bert) -> samestep.Task:
    return HuggingFace(model=model, data=ROWS, collator=DataCollatorWithPadding(tokenizer()))


def trained(recipe: samestep.Recipe, folder: Path, layout: str = "single") -> samestep.TrainResult:
    return samestep.train(recipe, layout=layout, folder=folder, threads=1, device="cpu", log=())


def logits_of(model: nn.Module) -> Tensor:
    with torch.no_grad():
        return model.eval()(input_ids=IDS).logits


@pytest.mark.parametrize("layout", ["fsdp2", pytest.param("pp2", marks=pytest.mark.slow)])
def test_what_is_exported_gives_the_trained_models_logits(layout: str, tmp_path: Path) -> None:
    recipe = recipe_of(handed_over())
    result = trained(recipe, tmp_path / "run", layout)
    assert result.model_file is not None
    folder = samestep.export_model(recipe, result.model_file, tmp_path / "exported")
    loaded = transformers.AutoModelForSequenceClassification.from_pretrained(folder)
    assert torch.equal(logits_of(loaded), logits_of(samestep.load_model(recipe, result.model_file)))
    assert not torch.equal(logits_of(loaded), logits_of(bert()))
    words = transformers.AutoTokenizer.from_pretrained(folder)("word3 word6 nothing", return_tensors="pt")
    assert words["input_ids"].tolist() == [[5, 8, 1]]


def test_a_task_of_ones_own_exports_its_model(tmp_path: Path) -> None:
    recipe = recipe_of(Own())
    result = trained(recipe, tmp_path / "run")
    assert result.model_file is not None
    folder = samestep.export_model(recipe, result.model_file, tmp_path / "exported", dtype="bfloat16")
    loaded = transformers.AutoModelForSequenceClassification.from_pretrained(folder, dtype="auto")
    assert loaded.dtype == torch.bfloat16
    expected = samestep.load_model(recipe, result.model_file).to(torch.bfloat16)
    assert torch.equal(logits_of(loaded), logits_of(expected))


def test_adapters_are_merged(tmp_path: Path) -> None:
    recipe = recipe_of(handed_over(), adapter=samestep.LoRA(rank=2))
    result = trained(recipe, tmp_path / "run")
    assert result.model_file is not None
    folder = samestep.export_model(recipe, result.model_file, tmp_path / "exported", merge=True)
    loaded = transformers.AutoModelForSequenceClassification.from_pretrained(folder)
    expected = logits_of(samestep.load_model(recipe, result.model_file))
    assert torch.allclose(logits_of(loaded), expected, rtol=0, atol=1e-5 * expected.abs().max().item())


def refusal(recipe: samestep.Recipe, folder: Path) -> str:
    torch.save(recipe_model(recipe).state_dict(), folder / "weights.pt")
    with pytest.raises(samestep.UserError) as refused:
        samestep.export_model(recipe, folder / "weights.pt", folder / "exported")
    assert not (folder / "exported").exists()
    return str(refused.value)


def recipe_model(recipe: samestep.Recipe) -> nn.Module:
    assert isinstance(recipe.task, samestep.Task)
    return recipe.task.model()


def test_a_model_that_its_configuration_does_not_describe_is_refused(tmp_path: Path) -> None:
    said = refusal(recipe_of(handed_over(with_another_head)), tmp_path)
    assert "classifier.0.weight: the model has one of shape [8, 16]" in said
    assert "the BertForSequenceClassification of its configuration no such tensor" in said
    recipe = recipe_of(handed_over(with_another_head))
    safetensors = samestep.export_model(recipe, tmp_path / "weights.pt", tmp_path / "w.safetensors", to="safetensors")
    assert safetensors.is_file()  # the format that the message names


def test_a_model_of_another_library_is_refused(tmp_path: Path) -> None:
    said = refusal(recipe_of(HuggingFace(model=Plain, data=ROWS)), tmp_path)
    assert "none of transformers', so it has no Hugging Face folder" in said


def test_a_processor_that_can_not_be_saved_is_refused() -> None:
    with pytest.raises(samestep.UserError, match="processor= is a str; use what has save_pretrained"):
        HuggingFace(model=bert, data=ROWS, processor="bert-base")
