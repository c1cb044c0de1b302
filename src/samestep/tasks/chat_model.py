"""A pretrained decoder for conversations: from a folder or a hub, with its tokenizer, template and new tokens."""

from collections.abc import Mapping
from copy import deepcopy
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from pydantic import Field
from pydantic.dataclasses import dataclass

from samestep.data.conversations import put_template
from samestep.data.package_files import locate
from samestep.data.tokenizer import why_not_loaded
from samestep.errors import UserError, one_line
from samestep.field_types import STRICT
from samestep.input_files import parse_json
from samestep.tasks import transformers_model
from samestep.tasks.transformers_model import Pretrained

if TYPE_CHECKING:
    from torch import nn
    from transformers import PreTrainedConfig, PreTrainedModel, PreTrainedTokenizerBase

_NAME = "recipe.model.name"
_TEMPLATE = "recipe.data.chat_template"
_ROWS = 8  # a table that grows gets a multiple of it, which matrix units like, and ranks can share

# Keys and values of earlier tokens are kept for writing text alone; padding stands behind a row, where nothing looks
# back at it, so that it needs no mask, for the lack of which models warn.
_FOR_TRAINING = {"use_cache": False, "pad_token_id": None}

# What a hub's folder needs here: no weights of other frameworks, no code.
_WANTED_FILES = ("*.json", "*.safetensors", "*.jinja", "*.model", "*.txt")


@dataclass(frozen=True, kw_only=True, config=STRICT)
class ChatModel:
    """A pretrained decoder."""

    name: str  # a folder of a saved model, package:NAME/FOLDER inside an installed package, or a hub's name
    revision: str | None = None  # of a hub's model
    attention: Literal["sdpa", "eager", "flash_attention_2", "flash_attention_3", "flex_attention"] | None = None
    new_tokens: tuple[str, ...] = ()  # special tokens that are added; the tables grow to a multiple of 8
    config: dict[str, Any] = Field(default_factory=dict)  # keys of the model's configuration to be changed


def folder_of(model: ChatModel) -> Path:
    """The folder of a model: one that is there, or what a hub's name stands for, fetched where it isn't kept yet.

    Raises UserError where there is neither.
    """
    path = locate(model.name, _NAME)
    if path.is_dir():
        if model.revision is not None:
            raise UserError(f"{_NAME} is {model.name}, a folder, which has no revisions; leave out model.revision")
        if not (path / "config.json").is_file():
            raise UserError(f"{_NAME} is {model.name}: it has no config.json; use a folder of save_pretrained")
        return path
    if path.is_absolute() or model.name.startswith((".", "~", "package:")) or model.name.count("/") > 1:
        raise UserError(f"{_NAME} is {model.name}: there is no such folder")
    return _fetched(model)


def _fetched(model: ChatModel) -> Path:
    """The folder in which huggingface_hub keeps a model of a hub. A whole one that is kept is taken as it is."""
    import huggingface_hub

    fetch: Any = partial(
        huggingface_hub.snapshot_download, model.name, revision=model.revision, allow_patterns=list(_WANTED_FILES)
    )
    try:
        kept = Path(fetch(local_files_only=True))
        if (kept / "config.json").is_file() and any(kept.glob("*.safetensors")):
            return kept
    except Exception:  # it isn't kept, or is none of the names that a hub has, which the next call says
        pass
    try:
        return Path(fetch())
    except Exception as error:  # of the library, of the network, of the hub
        raise UserError(
            f"{_NAME} is {model.name}: there is no such folder, and from the hub it can't be fetched "
            f"({type(error).__name__}: {one_line(error)[:300]}); use a folder of save_pretrained, or a name that the "
            "hub has"
        ) from None


def tokenizer_of(model: ChatModel, template: str | None) -> "PreTrainedTokenizerBase":
    """The tokenizer of a model's folder, with new tokens and the template that the job names."""
    from transformers import AutoTokenizer

    folder = folder_of(model)
    try:
        tokenizer = AutoTokenizer.from_pretrained(folder, local_files_only=True, trust_remote_code=False)
    except Exception as error:  # the libraries raise whatever a broken file makes them trip over
        raise UserError(
            f"{_NAME}: {folder} has no tokenizer that can be loaded: {why_not_loaded(error)}; save one there by "
            "save_pretrained"
        ) from error
    if not tokenizer.is_fast:
        raise UserError(f"{_NAME}: {folder} has a tokenizer without tokenizer.json; save a fast one there")
    put_template(tokenizer, template, _TEMPLATE)
    vocabulary = tokenizer.get_vocab()
    tokenizer.add_tokens([token for token in model.new_tokens if token not in vocabulary], special_tokens=True)
    return tokenizer


def configure(model: ChatModel, others: Mapping[str, Any] = _FOR_TRAINING) -> Any:
    """The configuration of a model, with `others` and the job's keys laid over it."""
    return transformers_model.config_of_folder(folder_of(model), model.config, others)


def build(model: ChatModel, rows: int) -> "PreTrainedModel":
    """Build the model with the folder's weights, and tables of at least `rows` rows.

    New rows begin as the mean of the others. Raises UserError where the folder lacks weights.
    """
    from transformers import AutoModelForCausalLM

    folder, config = folder_of(model), configure(model)
    if model.attention is not None:
        config._attn_implementation = model.attention
    try:
        built, lacking = transformers_model.load(AutoModelForCausalLM, folder, config, named_by=f"{_NAME}: ")
    except (ImportError, ValueError, RuntimeError) as error:
        raise UserError(f"{_NAME}: {folder} can't be built: {one_line(error)}") from error
    if lacking:
        raise UserError(
            f"{_NAME}: {folder} lacks fitting weights for {len(lacking)} parameters, such as {lacking[0]}; use a "
            "folder written by save_pretrained, and no config that changes sizes"
        )
    _grow(built, rows)
    return built


def _grow(model: "PreTrainedModel", rows: int) -> None:
    """Give the tables of tokens at least so many rows, in place."""
    import torch

    ways: Any = (model.get_input_embeddings, model.get_output_embeddings)
    before = ways[0]().weight.shape[0]
    if rows <= before:
        return
    model.resize_token_embeddings(grown(rows), mean_resizing=False)
    tables: dict[int, Any] = {id(each.weight): each for way in ways if (each := way()) is not None}
    with torch.no_grad():
        for table in tables.values():
            table.weight[before:] = table.weight[:before].mean(dim=0)


def grown(rows: int) -> int:
    """How many rows a table gets that needs so many."""
    return -(-rows // _ROWS) * _ROWS


def exported(model: ChatModel, tokenizer: "PreTrainedTokenizerBase", rows: int) -> Pretrained:
    """What accompanies the trained weights: configuration, tokenizer with its template, settings of generation."""
    from transformers import AutoModelForCausalLM, GenerationConfig

    folder = folder_of(model)
    config: Any = deepcopy(configure(model, {}))
    config.vocab_size = max(config.vocab_size, rows)
    file = folder / "generation_config.json"
    if file.is_file():
        generation = GenerationConfig(**parse_json(file.read_text(encoding="utf-8")))
    else:
        generation = GenerationConfig.from_model_config(config)
    ends = generation.eos_token_id
    listed = ends if isinstance(ends, list) else [] if ends is None else [ends]
    if tokenizer.eos_token_id is not None and tokenizer.eos_token_id not in listed:
        # The token behind a message ends an answer, too.
        generation.eos_token_id = [*listed, tokenizer.eos_token_id]
    if generation.pad_token_id is None:
        generation.pad_token_id = tokenizer.pad_token_id
    return Pretrained(build=AutoModelForCausalLM.from_config, config=config, processors=[tokenizer, generation])


def rows_of_table(config: "PreTrainedConfig", tokenizer: "PreTrainedTokenizerBase", *, grows: bool) -> int:
    """The rows that the table of tokens has, or gets where the job adds tokens."""
    rows: int = config.get_text_config().vocab_size  # pyright: ignore[reportAttributeAccessIssue]
    needed = max(tokenizer.get_vocab().values()) + 1
    return grown(needed) if grows and needed > rows else rows


def check_positions(built: "nn.Module", length: int) -> None:
    """Raise UserError where a model has fewer positions than a row may have tokens."""
    most = transformers_model.positions(built)
    if most is not None and length > most:
        raise UserError(
            f"recipe.data.length is {length}, but the model has positions for {most} tokens; use {most} or less"
        )
