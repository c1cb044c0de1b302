"""Preferences: DPO's loss against a plain computation, pairs of texts and of conversations, layouts, mistakes."""

from pathlib import Path
from typing import Any

import pytest
import torch
from chat_jobs import save_model, say, write_rows
from torch.nn import functional as F

import samestep
from samestep.errors import UserError
from samestep.recipe import Recipe
from samestep.tasks.base import call
from samestep.tasks.registry import resolve

NAMES = ("Ada", "Alan", "Grace", "Emmy", "Kurt")
PAIRS = [
    {
        "prompt": [say("user", f"Say hello to {name} in French.")],
        "chosen": [say("assistant", f"Bonjour, {name}!")],
        "rejected": [say("assistant", f"Hallo, hallo, {name}!")],
    }
    for name in NAMES
]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_model(tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_rows(tmp_path_factory.mktemp("rows") / "pairs.jsonl", PAIRS)


def recipe(model: Path, source: Path, **data: Any) -> Recipe:
    return Recipe(
        task="preference",
        data={"source": str(source), "length": 100, **data},
        model={"name": str(model)},
        args={"beta": 0.5},
        batch=4,
        steps=2,
        optimizer=samestep.AdamW(lr=0.01),
    )


def task_of(model: Path, source: Path, **data: Any) -> Any:
    return resolve(recipe(model, source, **data))


def log_probability(net: Any, ids: list[int], first: int) -> torch.Tensor:
    """Of the tokens from `first` on, each given those before it."""
    logits = net(input_ids=torch.tensor([ids]), use_cache=False).logits[0]
    return logits[:-1].log_softmax(-1).gather(1, torch.tensor(ids[1:])[:, None])[first - 1 :].sum()


def test_the_loss_is_that_of_a_plain_computation(model: Path, source: Path) -> None:
    made = task_of(model, source)
    made.check()
    torch.manual_seed(0)
    net, reference = made.model(), made.model().eval()
    with torch.no_grad():
        for parameter in net.parameters():
            parameter.add_(0.02 * torch.randn_like(parameter))
    batch = made.collate([made.train_set()[index] for index in range(len(PAIRS))])
    total, count = made.loss(call(net, batch.inputs), batch)
    expected = torch.zeros(())
    for row in PAIRS:
        margin = torch.zeros(())
        for side, sign in (("chosen", 1), ("rejected", -1)):
            template = made.tokenizer.apply_chat_template
            before = template(row["prompt"], add_generation_prompt=True)["input_ids"]
            text = template([*row["prompt"], *row[side]], tokenize=False).rstrip()  # the newline isn't learnt
            ids = made.tokenizer(text, add_special_tokens=False)["input_ids"]
            with torch.no_grad():
                margin = margin - sign * log_probability(reference, ids, len(before))
            margin = margin + sign * log_probability(net, ids, len(before))
        expected = expected - F.logsigmoid(0.5 * margin)
    assert count == len(PAIRS)
    torch.testing.assert_close(total, expected, rtol=1e-5, atol=0)
    start, _ = made.loss(call(reference, batch.inputs), batch)
    assert start.item() / count == pytest.approx(0.6931, abs=1e-3)  # log 2: no preference yet


def test_whole_conversations_and_texts_are_pairs_too(model: Path, source: Path, tmp_path: Path) -> None:
    whole = [{side: [*row["prompt"], *row[side]] for side in ("chosen", "rejected")} for row in PAIRS]
    one, other = (task_of(model, file) for file in (source, write_rows(tmp_path / "whole.jsonl", whole)))
    for first, second in zip(one.train_set()[2][0], other.train_set()[2][0], strict=True):
        assert (first == second).all()
    texts = write_rows(tmp_path / "texts.jsonl", [{"prompt": "two is ", "chosen": "two", "rejected": "three"}])
    pair = task_of(model, texts).train_set()[0]
    kept = made_text(task_of(model, texts), pair.tokens.targets[pair.sides == 1])
    assert kept == "two<|im_end|>"


def made_text(task: Any, ids: Any) -> str:
    return task.tokenizer.decode(ids.tolist())


def test_mistakes_are_told(model: Path, source: Path, tmp_path: Path) -> None:
    same = write_rows(tmp_path / "same.jsonl", [{"chosen": [say("user", "a")], "rejected": [say("user", "a")]}])
    texts = write_rows(tmp_path / "texts.jsonl", [{"text": "a"}])
    for file, data, told in (
        (same, {}, "chosen and rejected are the same"),
        (texts, {}, "task preference needs the columns chosen and rejected"),
        (source, {"train_on": "all"}, "recipe.data.train_on is all, and of pairs the answers count"),
    ):
        with pytest.raises(UserError, match=told):
            task_of(model, file, **data).check()


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize("layout", ["dp3", "fsdp2", "tp2", "pp2", "cp2 attention=ring", "cp2 attention=ulysses"])
def test_layouts_take_the_same_step(layout: str, model: Path, source: Path) -> None:
    proof = samestep.verify(recipe(model, source), layout=layout, steps=2)
    assert proof.same_step
    assert max(proof.max_relative_difference.values()) < 1e-10
