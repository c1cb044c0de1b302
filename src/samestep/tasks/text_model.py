"""The model of a text classification: an encoder and a classifier head, new or from a folder."""

from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from annotated_types import Ge, Lt
from pydantic import Field, model_validator
from pydantic.dataclasses import dataclass

from samestep.errors import UserError
from samestep.recipe import STRICT, Positive
from samestep.tasks import transformers_model
from samestep.tasks.sections import check_heads, refuse_together

if TYPE_CHECKING:
    from transformers import PreTrainedConfig, PreTrainedModel

_KNOWN_TO_FIT = "bert, roberta, distilbert, electra or albert"

_DROPOUT_KEYS = (
    "hidden_dropout_prob",
    "attention_probs_dropout_prob",
    "dropout",
    "attention_dropout",
    "seq_classif_dropout",
    "classifier_dropout_prob",
    "summary_last_dropout",
)


@dataclass(frozen=True, kw_only=True, config=STRICT)
class TextModel:
    """An encoder with a classifier head: of these sizes with random weights, or loaded from a folder."""

    folder: str | None = None  # of a saved model, or package:NAME/FOLDER inside an installed package
    type: str = "bert"  # a model type of transformers
    layers: Positive = 4
    hidden: Positive = 256
    heads: Positive = 4
    feed_forward: Positive | None = None  # None: 4 x hidden
    dropout: Annotated[float, Ge(0), Lt(1)] = 0.1
    config: dict[str, Any] = Field(default_factory=dict)  # any further key of the model type's configuration

    @model_validator(mode="before")
    @classmethod
    def _sizes_come_with_a_folder(cls, given: Any) -> Any:
        sizes = ("type", "layers", "hidden", "heads", "feed_forward", "dropout")
        return refuse_together(given, "folder", sizes, "comes with the model in the folder; config changes it")

    @model_validator(mode="after")
    def _heads_divide_hidden(self) -> "TextModel":
        check_heads(self.hidden, self.heads)
        return self


def folder_of(model: TextModel) -> Path | None:
    """The folder of a pretrained model; None for a new one. Raises UserError where it is not there."""
    return transformers_model.folder_of(model.folder)


def configure(model: TextModel, *, names: Sequence[str], vocabulary: int, padding: int, length: int) -> Any:
    """The configuration of a model that tells `names` apart, for ids below `vocabulary` and `length` tokens.

    Raises UserError for an unknown model type, a key or value that it doesn't take.
    """
    from transformers.models.auto.modeling_auto import MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING_NAMES as CLASSIFIERS

    labels = {"id2label": dict(enumerate(names)), "label2id": {name: number for number, name in enumerate(names)}}
    folder = folder_of(model)
    if folder is not None:
        return transformers_model.config_of_folder(folder, model.config, labels)
    plain = transformers_model.default_config(model.type, CLASSIFIERS, _KNOWN_TO_FIT)
    sizes = _sizes(model, plain)
    positions = getattr(plain, "max_position_embeddings", None)
    if positions is not None:
        # Some types count positions from the padding token's id + 1.
        sizes["max_position_embeddings"] = max(positions, length + padding + 1)
    others = [f"{name}_token_id" for name in ("bos", "eos", "cls", "sep")]
    unused = {key: None for key in others if isinstance(getattr(plain, key, None), int)}
    tokens = {"vocab_size": vocabulary, "pad_token_id": padding, **unused}
    transformers_model.check_keys(model.config, plain)
    return transformers_model.made(type(plain), {**sizes, **tokens, **labels, **model.config})


def build(model: TextModel, config: "PreTrainedConfig") -> "PreTrainedModel":
    """Build the model: random weights under torch's seed, or those of the folder and a new head under the seed.

    Raises UserError where the folder holds no weights for the encoder.
    """
    from transformers import AutoModelForSequenceClassification

    folder = folder_of(model)
    if folder is None:
        return AutoModelForSequenceClassification.from_config(config)
    built, lacking = transformers_model.load(AutoModelForSequenceClassification, folder, config)
    # A head is new where the classes are others; an encoder is not.
    encoder = [key for key in lacking if key.startswith(f"{built.base_model_prefix}.") and ".pooler." not in key]
    if encoder:
        raise UserError(
            f"{transformers_model.FOLDER}: {folder} lacks fitting weights for {len(encoder)} parameters of the "
            f"encoder, such as {encoder[0]}; a folder written by save_pretrained, and no config that changes sizes, "
            f"would do"
        )
    return built


def check(model: TextModel, config: "PreTrainedConfig", vocabulary: int, length: int) -> None:
    """Raise UserError where the model can't be built, or is too small for the token ids or the length."""
    built = transformers_model.trial(
        partial(build, model, config),
        name=model.folder or model.type,
        is_new=model.folder is None,
        kind="a text classifier",
        known_to_fit=_KNOWN_TO_FIT,
    )
    transformers_model.check_size(built, config.vocab_size, vocabulary, length, "recipe.data.max_length")


def _sizes(model: TextModel, plain: "PreTrainedConfig") -> dict[str, Any]:
    """The sizes under the keys that this model type has for them."""
    wanted = {
        "layers": model.layers,
        "hidden": model.hidden,
        "heads": model.heads,
        "feed_forward": model.feed_forward or 4 * model.hidden,
    }
    dropout = {key: model.dropout for key in _DROPOUT_KEYS if hasattr(plain, key)}
    return dropout | transformers_model.sized(plain, wanted, _KNOWN_TO_FIT)
