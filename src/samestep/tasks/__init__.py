"""The tasks that ship with samestep: one file and one line here each; and HuggingFace, which takes objects."""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from samestep.tasks.huggingface import HuggingFace

TASKS = {
    "causal-lm": "samestep.tasks.causal_lm:CausalLM",
    "image-classification": "samestep.tasks.image_classification:ImageClassification",
    "regression": "samestep.tasks.regression:Regression",
    "text-classification": "samestep.tasks.text_classification:TextClassification",
}

__all__ = ["TASKS", "HuggingFace"]


def __getattr__(name: str) -> Any:
    # Imported when it is first used, so that `samestep --help` doesn't wait for torch.
    if name != "HuggingFace":
        raise AttributeError(f"module 'samestep.tasks' has no attribute {name!r}")
    return import_module("samestep.tasks.huggingface").HuggingFace
