"""The tasks that ship with samestep: one file and one line here each; and HuggingFace, which takes objects.

Read `base` first (what a task is), then `regression`, the smallest. `registry` builds a recipe's task.

- `text_classification`, `causal_lm`, `chat` with `chat_model`, `preference`, `image_classification`;
  `transformers_model` and `metrics` are what they share, `reading` how they read their samples, `prediction` what
  they make of them.
- `huggingface`: a model with its own loss; `model_facts` and `model_loss` find out by trying what it takes and how
  its loss counts, on the rows that `first_rows` chooses, among the kinds of `loss_terms`; `weighted_terms` has
  losses that are sums of such, `contrastive` those of two towers. `memory_budget`: models too large for one process.
- Kinds of losses: `losses` (of samples that are compared, of several terms), `turns` (steps in turns).
"""

from collections.abc import Mapping
from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from samestep.tasks.huggingface import HuggingFace

TASKS = {
    "causal-lm": "samestep.tasks.causal_lm:CausalLM",
    "chat": "samestep.tasks.chat:Chat",
    "image-classification": "samestep.tasks.image_classification:ImageClassification",
    "preference": "samestep.tasks.preference:Preference",
    "regression": "samestep.tasks.regression:Regression",
    "text-classification": "samestep.tasks.text_classification:TextClassification",
}

# Packages that tasks need besides those of samestep itself.
_OF_TEXT = ("transformers", "tokenizers")
PACKAGES: Mapping[str, tuple[str, ...]] = {
    "causal-lm": _OF_TEXT,
    "chat": _OF_TEXT,
    "preference": _OF_TEXT,
    "text-classification": _OF_TEXT,
}

__all__ = ["PACKAGES", "TASKS", "HuggingFace"]


def __getattr__(name: str) -> Any:
    # Imported when it is first used, so that `samestep --help` doesn't wait for torch.
    if name != "HuggingFace":
        raise AttributeError(f"module 'samestep.tasks' has no attribute {name!r}")
    return import_module("samestep.tasks.huggingface").HuggingFace
