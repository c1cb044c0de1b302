"""Models of transformers, of any kind: their configurations, the folders that they are saved in, and their checks."""

import logging
import pickle
import sys
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from copy import deepcopy
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from samestep.data.package_files import locate
from samestep.data.tokenizer import why_not_loaded
from samestep.errors import UserError, closest

if TYPE_CHECKING:
    import torch
    from tokenizers import Tokenizer
    from torch import nn
    from transformers import PreTrainedConfig, PreTrainedModel, PreTrainedTokenizerBase

_T = TypeVar("_T")  # a kind of tokenizer

FOLDER = "recipe.model.folder"
TOKENIZER = "recipe.data.tokenizer"

# What each size is called in the configurations of transformers' model types.
_SIZE_KEYS = {
    "layers": ("num_hidden_layers",),
    "hidden": ("hidden_size",),
    "heads": ("num_attention_heads",),
    "key_value_heads": ("num_key_value_heads",),
    "feed_forward": ("intermediate_size", "hidden_dim", "n_inner", "d_inner"),
}


@dataclass(frozen=True, kw_only=True)
class Pretrained:
    """What accompanies weights for transformers' `from_pretrained`."""

    build: "Callable[[PreTrainedConfig], nn.Module]"  # the model of a configuration, with random weights
    config: "PreTrainedConfig"
    processors: Sequence[Any] = ()  # a tokenizer, an image processor: what has save_pretrained

    def tensors(self) -> "list[tuple[list[str], torch.Size]]":
        """Every tensor of the model's state dict: all names that it has, the one that others are tied to first."""
        tensors: dict[int, tuple[list[str], torch.Size]] = {}
        for name, value in self._model().state_dict(keep_vars=True).items():
            tensors.setdefault(id(value), ([], value.shape))[0].append(name)
        return list(tensors.values())

    def save(self, folder: Path) -> None:
        """Write config.json, and the files of the tokenizer and of other processors."""
        config = deepcopy(self.config)
        config.architectures = [type(self._model()).__name__]
        config.save_pretrained(folder)
        for processor in self.processors:
            processor.save_pretrained(folder)

    def _model(self) -> "nn.Module":
        import torch

        with torch.device("meta"):
            return self.build(self.config)


def pretrained_of(model: "nn.Module", processors: Sequence[Any] = ()) -> Pretrained | None:
    """What accompanies the weights of a model that was built by somebody's code; None where it isn't transformers'.

    Raises UserError where the configuration doesn't describe the model, so that `from_pretrained` couldn't load it.
    """
    transformers: Any = sys.modules.get("transformers")  # imported by whoever has made a model of it
    if transformers is None or not isinstance(model, transformers.PreTrainedModel):
        return None
    model_class: Any = type(model)
    config: Any = model.config
    pretrained = Pretrained(build=model_class._from_config, config=config, processors=processors)
    here = model.state_dict(keep_vars=True)
    described = pretrained._model().state_dict(keep_vars=True)
    for name in [*here, *described]:
        shapes = [None if name not in side else list(side[name].shape) for side in (here, described)]
        if shapes[0] != shapes[1]:
            has = ["no such tensor" if shape is None else f"one of shape {shape}" for shape in shapes]
            raise UserError(
                f"{name}: the model has {has[0]}, and the {type(model).__name__} of its configuration {has[1]}, so "
                "from_pretrained could not load a folder of it; change the configuration before the model is built, "
                "or use another format, such as safetensors"
            )
    return pretrained


# What transformers calls special tokens, and the names under which tokenizers usually have them.
_SPECIAL_TOKENS = {
    "unk_token": ("[UNK]", "<unk>"),
    "cls_token": ("[CLS]",),
    "sep_token": ("[SEP]",),
    "mask_token": ("[MASK]", "<mask>"),
}


def tokenizer_of(
    tokenizer: "Tokenizer", folder: Path | None, *, padding: int | None, end: int | None, length: int
) -> "PreTrainedTokenizerBase":
    """A tokenizer as transformers has them: a folder's as it is, or else these rules with their special tokens."""
    from tokenizers import Tokenizer as Rules
    from transformers import AutoTokenizer, PreTrainedTokenizerFast

    if folder is not None:
        return AutoTokenizer.from_pretrained(folder, local_files_only=True, trust_remote_code=False)
    rules = Rules.from_str(tokenizer.to_str())
    rules.no_truncation()
    rules.no_padding()
    names = {
        kind: name for kind, names in _SPECIAL_TOKENS.items() for name in names if rules.token_to_id(name) is not None
    }
    for kind, number in (("pad_token", padding), ("eos_token", end)):
        if number is not None and (name := rules.id_to_token(number)) is not None:
            names[kind] = name
    # Its default gives kinds of tokens as well, which most models don't take.
    inputs = ["input_ids", "attention_mask"]
    return PreTrainedTokenizerFast(tokenizer_object=rules, model_max_length=length, model_input_names=inputs, **names)


def folder_of(folder: str | None) -> Path | None:
    """The folder of a pretrained model; None for a new one. Raises UserError where it is not there."""
    if folder is None:
        return None
    path = locate(folder, FOLDER)
    if not (path / "config.json").is_file():
        there = "it has no config.json" if path.is_dir() else "there is no such folder"
        raise UserError(f"{FOLDER} is {folder}: {there}; use a folder written by save_pretrained")
    return path


def loaded_tokenizer(load: Callable[[Path, str], _T], name: str | None, model_folder: str | None) -> _T | None:
    """The tokenizer of a file or folder, or else of the model's folder; None where one is to be trained.

    Raises UserError where it can't be loaded.
    """
    folder = folder_of(model_folder)
    if name is not None:
        return load(locate(name, TOKENIZER), TOKENIZER)
    if folder is not None:
        # The weights of a pretrained model mean nothing under the ids of another tokenizer.
        return load(folder, f"{TOKENIZER} is missing, and {FOLDER} has no usable one")
    return None


def default_config(model_type: str, model_types: Collection[str], known_to_fit: str) -> "PreTrainedConfig":
    """The configuration of a model type as it comes. Raises UserError where it is none of the known types."""
    from transformers import AutoConfig

    if model_type not in model_types:
        hint = closest(model_type, model_types).partition("known:")[0]
        raise UserError(f'recipe.model.type is "{model_type}"; {hint}use {known_to_fit}')
    return AutoConfig.for_model(model_type)


def sized(plain: "PreTrainedConfig", own_sizes: Mapping[str, int], known_to_fit: str) -> dict[str, int]:
    """The wanted sizes under the keys that this model type has for them.

    Raises UserError where it has none for one of them.
    """
    sizes: dict[str, int] = {}
    for size, value in own_sizes.items():
        there = [key for key in _SIZE_KEYS[size] if hasattr(plain, key)]
        if not there:
            raise UserError(f'recipe.model.type "{plain.model_type}" takes no {size}; use {known_to_fit}')
        sizes |= dict.fromkeys(there, value)
    return sizes


def check_keys(further: Mapping[str, Any], plain: "PreTrainedConfig") -> None:
    """A configuration takes any key and ignores most: a misspelt one would silently do nothing."""
    for key in further:
        if not hasattr(plain, key):
            raise UserError(f'unknown key "recipe.model.config.{key}"; {closest(key, plain.to_dict())}')


def made(config_class: type["PreTrainedConfig"], values: dict[str, Any]) -> "PreTrainedConfig":
    """A configuration with these values. Raises UserError where its class refuses them."""
    from huggingface_hub.errors import StrictDataclassError

    try:
        return config_class(**values)
    except (StrictDataclassError, ValueError, TypeError, NotImplementedError) as error:
        reason = " ".join(str(error).split())
        raise UserError(f'recipe.model: "{config_class.model_type}" refuses its configuration: {reason}') from error


def config_of_folder(folder: Path, further: Mapping[str, Any], others: Mapping[str, Any]) -> Any:
    """A folder's configuration, with `others` and then the user's further keys laid over it."""
    from transformers import AutoConfig

    try:
        plain = AutoConfig.from_pretrained(folder, local_files_only=True, trust_remote_code=False)
    except Exception as error:  # the library raises whatever a broken file makes it trip over
        reason = why_not_loaded(error)
        raise UserError(
            f"{FOLDER}: {folder}/config.json can't be read: {reason}; use a folder written by save_pretrained, of a "
            "type that transformers has, or build the model in a task of your own"
        ) from error
    check_keys(further, plain)
    return made(type(plain), {**plain.to_dict(), **others, **further})


def trial(
    build: "Callable[[], PreTrainedModel]", *, name: str, is_new: bool, kind: str, known_to_fit: str
) -> "PreTrainedModel":
    """Build a model for inspection; a new one on the meta device.

    Raises UserError if it can't be built, with `kind` for what it should have become.
    """
    import torch

    try:
        with torch.device("meta" if is_new else "cpu"):
            return build()
    except UserError:
        raise
    except Exception as error:  # each model type has checks of its own
        reason = str(error).strip().partition("\n")[0]
        raise UserError(f'recipe.model: "{name}" can\'t be built as {kind}: {reason}; use {known_to_fit}') from error


def check_size(model: "nn.Module", rows: int, vocabulary: int, length: int, length_key: str) -> None:
    """Raise UserError where a model has too few embeddings for the token ids, or positions for the length."""
    if vocabulary > rows:
        raise UserError(
            f"recipe.data.tokenizer: its token ids go up to {vocabulary - 1}, but the model has {rows} embeddings; "
            f"use the tokenizer that belongs to the model, or a vocab_size of {vocabulary}"
        )
    most = positions(model)
    if most is not None and length > most:
        raise UserError(
            f"{length_key} is {length}, but the model has positions for {most} tokens; use {most} or less"
        )


def positions(model: "nn.Module") -> int | None:
    """The most tokens that a model has positions for; None where it has no table of positions."""
    from torch import nn

    for name, module in model.named_modules():
        if name.endswith(("position_embeddings", "wpe")) and isinstance(module, nn.Embedding):
            # RoBERTa and its kin count from the row behind padding's.
            unused = 0 if module.padding_idx is None else module.padding_idx + 1
            return module.num_embeddings - unused
    return None


def load(
    model_class: Any, folder: Path, config: "PreTrainedConfig", *, named_by: str = f"{FOLDER}: "
) -> "tuple[PreTrainedModel, list[str]]":
    """A folder's model in float32, and the parameters for which it holds no weights that fit.

    Raises UserError where the folder can't be loaded; its message begins with what names the folder.
    """
    import torch

    try:
        with _no_load_report():
            built, report = model_class.from_pretrained(
                folder,
                config=config,
                local_files_only=True,
                trust_remote_code=False,
                weights_only=True,
                dtype=torch.float32,
                ignore_mismatched_sizes=True,
                output_loading_info=True,
            )
    except (OSError, pickle.UnpicklingError) as error:
        raise UserError(f"{named_by}{folder} can't be loaded: {why_not_loaded(error)}") from error
    mismatched = [key[0] if isinstance(key, tuple) else key for key in report["mismatched_keys"]]
    return built.train(), sorted([*report["missing_keys"], *mismatched])


@contextmanager
def _no_load_report() -> Iterator[None]:
    """Silence the table of new parameters and the progress bar, for as long as it loads."""
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
