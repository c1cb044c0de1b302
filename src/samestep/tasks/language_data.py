"""The data of a language model: which texts, what is held out, and how they become blocks of tokens."""

from pathlib import Path
from typing import Annotated, Any

from annotated_types import Ge, Lt
from pydantic import model_validator
from pydantic.dataclasses import dataclass

from samestep.data import byte_pairs, running_text
from samestep.data.byte_pairs import StreamTokenizer
from samestep.data.installed import locate
from samestep.data.running_text import RunningText
from samestep.recipe import STRICT, Real, Whole
from samestep.tasks.sections import refuse_together

_TOKENIZER = "recipe.data.tokenizer"


@dataclass(frozen=True, kw_only=True, config=STRICT)
class LanguageData:
    """Running text, what of it is held out, and how it becomes blocks of tokens.

    A path may be "package:NAME/FILE", a file inside an installed package.
    """

    source: str = "shakespeare"  # or people-daily, or a .txt file, or a folder of such files
    eval_source: str | None = None  # held-out text in a source of its own
    held_out: Annotated[Real, Ge(0), Lt(1)] = 0.1  # fraction of `source`, in pieces; 0: no evaluation
    length: Annotated[Whole, Ge(2)] = 256  # tokens of a sample
    vocabulary: Annotated[Whole, Ge(byte_pairs.SMALLEST)] = 4096  # of a tokenizer trained on the training text
    tokenizer: str | None = None  # a tokenizer.json or a folder; None: the model folder's, or else a trained one

    @model_validator(mode="before")
    @classmethod
    def _one_way(cls, given: Any) -> Any:
        refuse_together(given, "eval_source", ["held_out"], "is for held-out text taken from source")
        return refuse_together(given, "tokenizer", ["vocabulary"], "is for a tokenizer trained on the text")


def read(data: LanguageData) -> RunningText:
    """Read the texts and hold out what is asked for.

    Raises UserError for a source that can't be read, and where a side of the split is empty.
    """
    documents = running_text.read(data.source, "recipe.data.source")
    if data.eval_source is not None:
        held_out = running_text.read(data.eval_source, "recipe.data.eval_source")
        return RunningText(train=documents, held_out=held_out)
    return running_text.divide(documents, data.held_out, "recipe.data.held_out")


def loaded_tokenizer(data: LanguageData, model_folder: Path | None) -> StreamTokenizer | None:
    """The tokenizer of a file or folder; None where one is to be trained.

    Raises UserError where it can't be loaded.
    """
    if data.tokenizer is not None:
        return byte_pairs.load(locate(data.tokenizer, _TOKENIZER), _TOKENIZER)
    if model_folder is not None:
        # The weights of a pretrained model mean nothing under the ids of another tokenizer.
        return byte_pairs.load(model_folder, f"{_TOKENIZER} is missing, and recipe.model.folder has no usable one")
    return None
