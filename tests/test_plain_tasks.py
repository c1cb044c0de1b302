"""Every task that ships takes the steps of a textbook's loop, whose loss is a formula.

The reference of `samestep verify` is the engine in one process: a mistake in both would not be seen there.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import chat_jobs
import handed_models
import plain_loop
import pytest
import torch
from chat_jobs import chat_recipe, say
from safetensors.torch import load_file
from torch import Tensor

import samestep
from samestep import jobfile
from samestep.tasks import TASKS
from samestep.tasks.registry import resolve

PROOFS = Path(__file__).resolve().parent.parent / "examples/proof"
IGNORED = -100


def of_classes(logits: Tensor, targets: Tensor) -> Tensor:
    """Cross entropy by its formula, over the targets that count. Logits: [..., classes]."""
    logits, targets = logits.reshape(-1, logits.shape[-1]), targets.flatten()
    kept = targets != IGNORED
    chosen = logits[kept].gather(1, targets[kept][:, None])
    return (logits[kept].exp().sum(dim=1).log() - chosen[:, 0]).mean()


def squares(output: Tensor, targets: Tensor) -> Tensor:
    return ((output - targets) ** 2).sum(dim=1).mean()


BETA = 0.5


def preferred(output: Any, targets: Any) -> Tensor:
    """DPO's loss by its formula (Rafailov et al. 2023, equation 7). Logits: [pairs, tokens, vocabulary]."""
    kept = targets["labels"] != IGNORED
    chosen = output.logits.log_softmax(-1).gather(-1, targets["labels"].clamp(min=0)[..., None])[..., 0]
    margin = (chosen * kept * targets["sides"]).sum(dim=1) - targets["reference"]
    return (1 + (-BETA * margin).exp()).log().mean()


def of_the_model(output: Any, targets: Any) -> Tensor:
    """The mean that a model of transformers makes of a whole batch itself."""
    return output.loss


@dataclass(frozen=True, kw_only=True)
class Shipped:
    """A recipe, and its mean loss by a formula."""

    recipe: samestep.Recipe
    mean_loss: Callable[[Any, Any], Tensor]
    relative: float = 1e-10  # more where the model casts to float32 in its forward, which the engine keeps in float64


def proof(name: str, **changed: Any) -> samestep.Recipe:
    recipe = jobfile.load(PROOFS / f"{name}.yaml").job.recipe
    return replace(recipe, precision="fp64", dropout=False, steps=4, **changed)


def of_chat(task: str, place: Path, rows: Sequence[Mapping[str, Any]], **args: Any) -> samestep.Recipe:
    """A recipe of a task on conversations, with a tiny model that is saved into a folder."""
    place.mkdir()
    named = chat_recipe(chat_jobs.save_model(place / "model"), chat_jobs.write_rows(place / "rows.jsonl", rows))
    return replace(named, task=task, args=args, precision="fp64", dropout=False, steps=4, clip=1.0)


def pair(name: str) -> dict[str, Any]:
    return {
        "prompt": [say("user", f"Say hello to {name} in French.")],
        "chosen": [say("assistant", f"Bonjour, {name}!")],
        "rejected": [say("assistant", f"Hallo, hallo, {name}!")],
    }


NAMES = ("Ada", "Alan", "Grace", "Emmy", "Kurt", "Sofia", "Leonhard")


def of_handed(build: Callable[[], Any], collator: Any) -> samestep.Recipe:
    task = handed_models.handed(build, handed_models.texts(), collator)
    return samestep.Recipe(task=task, batch=10, steps=4, precision="fp64", dropout=False, clip=1.0)


def logits_of_classes(output: Any, targets: Tensor) -> Tensor:
    return of_classes(getattr(output, "logits", output), targets)


SHIPPED: dict[str, Callable[[Path], Shipped]] = {
    "text-classification": lambda place: Shipped(recipe=proof("text"), mean_loss=logits_of_classes),
    "causal-lm": lambda place: Shipped(
        recipe=proof("language"), mean_loss=logits_of_classes, relative=1e-8
    ),  # a Llama
    "causal-lm, GPT-2": lambda place: Shipped(
        recipe=proof("language", model={"type": "gpt2", "layers": 2, "hidden": 32, "heads": 4}),
        mean_loss=logits_of_classes,
    ),
    "image-classification": lambda place: Shipped(recipe=proof("images"), mean_loss=logits_of_classes),
    "image-classification, batch norm": lambda place: Shipped(
        recipe=proof("images", model={"type": "resnet18", "width": 8, "norm": "batch"}), mean_loss=logits_of_classes
    ),
    "regression": lambda place: Shipped(recipe=proof("regression"), mean_loss=squares),
    "chat": lambda place: Shipped(
        recipe=of_chat(
            "chat", place, [{"messages": [*pair(name)["prompt"], *pair(name)["chosen"]]} for name in NAMES]
        ),
        mean_loss=logits_of_classes,
        relative=1e-6,
    ),
    "preference": lambda place: Shipped(
        recipe=of_chat("preference", place, [pair(name) for name in NAMES], beta=BETA),
        mean_loss=preferred,
        relative=1e-6,
    ),
    "a classifier of transformers": lambda place: Shipped(
        recipe=of_handed(handed_models.bert, handed_models.classes), mean_loss=of_the_model
    ),
    "a language model of transformers": lambda place: Shipped(
        recipe=of_handed(handed_models.gpt2, handed_models.next_words), mean_loss=of_the_model, relative=1e-6
    ),
}


def test_no_shipped_task_is_left_out() -> None:
    assert set(TASKS) <= set(SHIPPED)


@pytest.mark.parametrize("name", SHIPPED)
def test_a_shipped_task_takes_the_steps_of_a_plain_loop(tmp_path: Path, name: str) -> None:
    shipped = SHIPPED[name](tmp_path / "data")
    recipe = shipped.recipe
    expected = plain_loop.train(recipe, resolve(recipe), mean_loss=shipped.mean_loss)
    micro_batch = None if "batch norm" in name else 3
    result = samestep.train(recipe, micro_batch=micro_batch, folder=tmp_path / "run", device="cpu", bind="none")
    assert result.losses == pytest.approx(expected.losses, rel=shipped.relative)
    # Of all weights together: Adam takes a full step by a gradient that is next to nothing, whichever way it points.
    weights, wanted = flat(load_file(result.model_file)), flat(expected.weights)
    assert (weights - wanted).norm() <= 100 * shipped.relative * wanted.norm()


def flat(weights: Mapping[str, Tensor]) -> Tensor:
    return torch.cat([weights[name].double().flatten() for name in sorted(weights)])
