"""The model of a text classification: an encoder and a classifier head, new or from a folder."""

import logging
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from annotated_types import Ge, Lt
from pydantic import Field, model_validator
from pydantic.dataclasses import dataclass

from samestep.data.installed import locate
from samestep.errors import UserError
from samestep.recipe import STRICT, Positive
from samestep.tasks.sections import refuse_together
from samestep.validation import closest

if TYPE_CHECKING:
    from torch import nn
    from transformers import PreTrainedConfig, PreTrainedModel

_FOLDER = "recipe.model.folder"
_KNOWN_TO_FIT = "bert, roberta, distilbert, electra or albert"

# What each size is called in the configurations of transformers' model types.
_SIZE_KEYS = {
    "layers": ("num_hidden_layers",),
    "hidden": ("hidden_size",),
    "heads": ("num_attention_heads",),
    "feed_forward": ("intermediate_size", "hidden_dim", "n_inner", "d_inner"),
}
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
        if self.hidden % self.heads:
            fitting = [str(heads) for heads in range(1, self.hidden + 1) if self.hidden % heads == 0]
            raise ValueError(
                f"hidden is {self.hidden} and heads is {self.heads}; hidden must be divisible by heads, so heads of "
                f"{', '.join(fitting)} would do"
            )
        return self


def folder_of(model: TextModel) -> Path | None:
    """The folder of a pretrained model; None for a new one. Raises UserError where it is not there."""
    if model.folder is None:
        return None
    folder = locate(model.folder, _FOLDER)
    if not (folder / "config.json").is_file():
        there = "it has no config.json" if folder.is_dir() else "there is no such folder"
        raise UserError(f"{_FOLDER} is {model.folder}: {there}; a folder written by save_pretrained would do")
    return folder


def configure(model: TextModel, *, names: Sequence[str], vocabulary: int, padding: int, length: int) -> Any:
    """The configuration of a model that tells `names` apart, for ids below `vocabulary` and `length` tokens.

    Raises UserError for an unknown model type, a key or value that it doesn't take.
    """
    labels = {"id2label": dict(enumerate(names)), "label2id": {name: number for number, name in enumerate(names)}}
    folder = folder_of(model)
    if folder is not None:
        return _config_of_folder(folder, model.config, labels)
    plain = _default_config(model.type)
    sizes = _sizes(model, plain)
    positions = getattr(plain, "max_position_embeddings", None)
    if positions is not None:
        # Some types count positions from the padding token's id + 1.
        sizes["max_position_embeddings"] = max(positions, length + padding + 1)
    others = [f"{name}_token_id" for name in ("bos", "eos", "cls", "sep")]
    unused = {key: None for key in others if isinstance(getattr(plain, key, None), int)}
    tokens = {"vocab_size": vocabulary, "pad_token_id": padding, **unused}
    _check_keys(model.config, plain)
    return _made(type(plain), {**sizes, **tokens, **labels, **model.config})


def build(model: TextModel, config: "PreTrainedConfig") -> "PreTrainedModel":
    """Build the model: random weights under torch's seed, or those of the folder and a new head under the seed.

    Raises UserError where the folder holds no weights for the encoder.
    """
    from transformers import AutoModelForSequenceClassification

    folder = folder_of(model)
    if folder is None:
        return AutoModelForSequenceClassification.from_config(config)
    return _load(folder, config)


def check(model: TextModel, config: "PreTrainedConfig", vocabulary: int, length: int) -> None:
    """Raise UserError where the model can't be built, or is too small for the token ids or the length."""
    built = _trial(model, config)
    rows = config.vocab_size
    if vocabulary > rows:
        raise UserError(
            f"recipe.data.tokenizer: its token ids go up to {vocabulary - 1}, but the model has {rows} embeddings; "
            f"the tokenizer that belongs to the model, or a vocab_size of {vocabulary}, would do"
        )
    positions = _positions(built)
    if positions is not None and length > positions:
        raise UserError(
            f"recipe.data.max_length is {length}, but the model has positions for {positions} tokens; "
            f"{positions} or less would do"
        )


def _trial(model: TextModel, config: "PreTrainedConfig") -> "PreTrainedModel":
    """The model, built only to be looked at; a new one without memory for its parameters."""
    import torch

    try:
        with torch.device("cpu" if model.folder else "meta"):
            return build(model, config)
    except UserError:
        raise
    except Exception as error:  # each model type has checks of its own
        reason = str(error).strip().partition("\n")[0]
        raise UserError(
            f'recipe.model: "{model.folder or model.type}" can\'t be built as a text classifier: {reason}; '
            f"{_KNOWN_TO_FIT} would do"
        ) from error


def _positions(model: "nn.Module") -> int | None:
    """The most tokens that a model has positions for; None where it has no table of positions."""
    from torch import nn

    for name, module in model.named_modules():
        if name.endswith(("position_embeddings", "wpe")) and isinstance(module, nn.Embedding):
            # RoBERTa and its kin count from the row behind padding's.
            unused = 0 if module.padding_idx is None else module.padding_idx + 1
            return module.num_embeddings - unused
    return None


def _default_config(model_type: str) -> "PreTrainedConfig":
    from transformers import AutoConfig
    from transformers.models.auto.modeling_auto import MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING_NAMES as CLASSIFIERS

    if model_type not in CLASSIFIERS:
        hint = closest(model_type, CLASSIFIERS).partition("known:")[0]
        raise UserError(f'recipe.model.type is "{model_type}"; {hint}{_KNOWN_TO_FIT} would do')
    return AutoConfig.for_model(model_type)


def _sizes(model: TextModel, plain: "PreTrainedConfig") -> dict[str, Any]:
    """The sizes under the keys that this model type has for them."""
    wanted = {
        "layers": model.layers,
        "hidden": model.hidden,
        "heads": model.heads,
        "feed_forward": model.feed_forward or 4 * model.hidden,
    }
    sizes: dict[str, Any] = {key: model.dropout for key in _DROPOUT_KEYS if hasattr(plain, key)}
    for size, keys in _SIZE_KEYS.items():
        there = [key for key in keys if hasattr(plain, key)]
        if not there:
            raise UserError(f'recipe.model.type "{model.type}" takes no {size}; {_KNOWN_TO_FIT} would do')
        sizes |= dict.fromkeys(there, wanted[size])
    return sizes


def _check_keys(further: dict[str, Any], plain: "PreTrainedConfig") -> None:
    """A configuration takes any key and ignores most: a misspelt one would silently do nothing."""
    for key in further:
        if not hasattr(plain, key):
            raise UserError(f'unknown key "recipe.model.config.{key}"; {closest(key, plain.to_dict())}')


def _made(config_class: type["PreTrainedConfig"], values: dict[str, Any]) -> "PreTrainedConfig":
    from huggingface_hub.errors import StrictDataclassError

    try:
        return config_class(**values)
    except (StrictDataclassError, ValueError, TypeError, NotImplementedError) as error:
        reason = " ".join(str(error).split())
        raise UserError(f'recipe.model: "{config_class.model_type}" refuses its configuration: {reason}') from error


def _config_of_folder(folder: Path, further: dict[str, Any], labels: dict[str, Any]) -> Any:
    from transformers import AutoConfig

    try:
        plain = AutoConfig.from_pretrained(folder, local_files_only=True)
    except Exception as error:  # the library raises whatever a broken file makes it trip over
        reason = str(error).strip().partition("\n")[0]
        raise UserError(f"{_FOLDER}: {folder}/config.json can't be read: {reason}") from error
    _check_keys(further, plain)
    return _made(type(plain), {**plain.to_dict(), **labels, **further})


def _load(folder: Path, config: "PreTrainedConfig") -> "PreTrainedModel":
    import torch
    from transformers import AutoModelForSequenceClassification

    try:
        with _no_load_report():
            built, report = AutoModelForSequenceClassification.from_pretrained(
                folder,
                config=config,
                local_files_only=True,
                dtype=torch.float32,
                ignore_mismatched_sizes=True,  # a head for other classes; an encoder's is refused below
                output_loading_info=True,
            )
    except OSError as error:
        reason = str(error).strip().partition("\n")[0]
        raise UserError(f"{_FOLDER}: {folder} can't be loaded: {reason}") from error
    mismatched = [key[0] if isinstance(key, tuple) else key for key in report["mismatched_keys"]]
    encoder = [
        key
        for key in sorted([*report["missing_keys"], *mismatched])
        if key.startswith(f"{built.base_model_prefix}.") and ".pooler." not in key
    ]
    if encoder:
        raise UserError(
            f"{_FOLDER}: {folder} lacks fitting weights for {len(encoder)} parameters of the encoder, such as "
            f"{encoder[0]}; a folder written by save_pretrained, and no config that changes sizes, would do"
        )
    return built.train()


@contextmanager
def _no_load_report() -> Iterator[None]:
    """Silence the table of new parameters (the head always is new) and the progress bar, for as long as it loads."""
    from transformers.utils import logging as transformers_logging

    logger = logging.getLogger("transformers")
    level, bar = logger.level, transformers_logging.is_progress_bar_enabled()
    logger.setLevel(logging.ERROR)
    transformers_logging.disable_progress_bar()
    try:
        yield
    finally:
        logger.setLevel(level)
        if bar:
            transformers_logging.enable_progress_bar()
