"""The model of a language modelling: a decoder of transformers, new or from a folder."""

from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from annotated_types import Ge, Lt
from pydantic import Field, model_validator
from pydantic.dataclasses import dataclass

from samestep.errors import UserError
from samestep.recipe import STRICT, Positive, Real
from samestep.tasks import transformers_model
from samestep.tasks.sections import check_heads, refuse_together

if TYPE_CHECKING:
    from transformers import PreTrainedConfig, PreTrainedModel

_KNOWN_TO_FIT = "llama, mistral, qwen2, qwen3, gpt2 or gpt_neox"
_DROPOUT_KEYS = ("attention_dropout", "hidden_dropout", "attn_pdrop", "embd_pdrop", "resid_pdrop")
_ROWS = 8  # rows of the vocabulary come in multiples of it, which matrix units like, and ranks can share

# Keys and values of earlier tokens are kept for writing text, one token after another. And padding stands behind
# all tokens of a block, where nothing looks back at it: it needs no mask, for the lack of which models warn.
_FOR_TRAINING = {"use_cache": False, "pad_token_id": None}


@dataclass(frozen=True, kw_only=True, config=STRICT)
class DecoderModel:
    """A decoder: of these sizes with random weights, or loaded from a folder."""

    folder: str | None = None  # of a saved model, or package:NAME/FOLDER inside an installed package
    type: str = "llama"  # a model type of transformers
    layers: Positive = 4
    hidden: Positive = 256
    heads: Positive = 4
    key_value_heads: Positive | None = None  # None: as many as heads
    feed_forward: Positive | None = None  # None: 4 x hidden
    tied: bool = False  # one table for the embeddings and the output
    dropout: Annotated[Real, Ge(0), Lt(1)] = 0.0
    config: dict[str, Any] = Field(default_factory=dict)  # any further key of the model type's configuration

    @model_validator(mode="before")
    @classmethod
    def _sizes_come_with_a_folder(cls, given: Any) -> Any:
        sizes = ("type", "layers", "hidden", "heads", "key_value_heads", "feed_forward", "tied", "dropout")
        return refuse_together(given, "folder", sizes, "comes with the model in the folder; config changes it")

    @model_validator(mode="after")
    def _heads_divide(self) -> "DecoderModel":
        check_heads(self.hidden, self.heads)
        if self.key_value_heads and self.heads % self.key_value_heads:
            fitting = [str(count) for count in range(1, self.heads + 1) if self.heads % count == 0]
            raise ValueError(
                f"heads is {self.heads} and key_value_heads is {self.key_value_heads}; heads must be divisible by "
                f"key_value_heads, so key_value_heads of {', '.join(fitting)} would do"
            )
        return self


def folder_of(model: DecoderModel) -> Path | None:
    """The folder of a pretrained model; None for a new one. Raises UserError where it is not there."""
    return transformers_model.folder_of(model.folder)


def configure(model: DecoderModel, *, vocabulary: int, end: int | None, length: int) -> Any:
    """The configuration of a model for ids below `vocabulary`, rounded up to a multiple of 8, and `length` tokens.

    Raises UserError for an unknown model type, a key or value that it doesn't take.
    """
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES as WITH_HEAD
    from transformers.models.auto.modeling_auto import MODEL_FOR_MASKED_LM_MAPPING_NAMES as ENCODERS

    folder = folder_of(model)
    if folder is not None:
        return transformers_model.config_of_folder(folder, model.config, _FOR_TRAINING)
    # Encoders have a head for next tokens too, but they would look at them.
    decoders = WITH_HEAD.keys() - ENCODERS.keys()
    plain = transformers_model.default_config(model.type, decoders, _KNOWN_TO_FIT)
    fixed = {
        "vocab_size": -(-vocabulary // _ROWS) * _ROWS,
        "bos_token_id": None,
        "eos_token_id": end,
        "max_position_embeddings": length,
        "tie_word_embeddings": model.tied,
    }
    transformers_model.check_keys(model.config, plain)
    return transformers_model.made(type(plain), {**_sizes(model, plain), **fixed, **_FOR_TRAINING, **model.config})


def build(model: DecoderModel, config: "PreTrainedConfig") -> "PreTrainedModel":
    """Build the model: random weights under torch's seed, or those of the folder.

    Raises UserError where the folder lacks weights.
    """
    from transformers import AutoModelForCausalLM

    folder = folder_of(model)
    if folder is None:
        return AutoModelForCausalLM.from_config(config)
    built, lacking = transformers_model.load(AutoModelForCausalLM, folder, config)
    if lacking:
        raise UserError(
            f"{transformers_model.FOLDER}: {folder} lacks fitting weights for {len(lacking)} parameters, such as "
            f"{lacking[0]}; a folder written by save_pretrained, and no config that changes sizes, would do"
        )
    return built


def check(model: DecoderModel, config: "PreTrainedConfig", vocabulary: int, length: int) -> None:
    """Raise UserError where the model can't be built, or is too small for the token ids or the length."""
    built = _look_at(model, config)
    transformers_model.check_size(built, config.vocab_size, vocabulary, length, "recipe.data.length")


def flops(model: DecoderModel, config: "PreTrainedConfig", length: int) -> float:
    """Floating-point operations of forward and backward for a sample of `length` tokens.

    6 N + 12 L H Q T for each token, as in the PaLM paper (Chowdhery et al. 2022, appendix B), with N parameters,
    L layers, H heads of size Q, and T tokens in the sequence. N leaves out tables that are only looked up in:
    positions, and embeddings unless they are the output's as well. The mask is not made use of: attention
    counts whole.
    """
    from torch import nn

    built = _look_at(model, config)
    looked_up = {id(module.weight) for module in built.modules() if isinstance(module, nn.Embedding)}
    head = built.get_output_embeddings()
    looked_up -= {id(head.weight)} if head is not None else set()
    parameters = sum(p.numel() for p in built.parameters() if id(p) not in looked_up)
    head_size = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    attention = 12 * config.num_hidden_layers * config.num_attention_heads * head_size * length
    return float((6 * parameters + attention) * length)


def _look_at(model: DecoderModel, config: "PreTrainedConfig") -> "PreTrainedModel":
    return transformers_model.trial(
        partial(build, model, config),
        name=model.folder or model.type,
        is_new=model.folder is None,
        kind="a language model",
        known_to_fit=_KNOWN_TO_FIT,
    )


def _sizes(model: DecoderModel, plain: "PreTrainedConfig") -> dict[str, Any]:
    """The sizes under the keys that this model type has for them."""
    wanted = {
        "layers": model.layers,
        "hidden": model.hidden,
        "heads": model.heads,
        "feed_forward": model.feed_forward or 4 * model.hidden,
    }
    if model.key_value_heads or hasattr(plain, "num_key_value_heads"):
        wanted["key_value_heads"] = model.key_value_heads or model.heads
    sizes: dict[str, Any] = transformers_model.sized(plain, wanted, _KNOWN_TO_FIT)
    if hasattr(plain, "head_dim"):  # in some types a size of its own
        sizes["head_dim"] = model.hidden // model.heads
    return sizes | {key: model.dropout for key in _DROPOUT_KEYS if hasattr(plain, key)}
