"""A model as its folder publishes it: built by transformers on the CPU in float32, with its tokenizer.

The folder is one of Hugging Face's, one of PEFT's beside its base, or a run of samestep, which is exported first.
Nothing of a folder is run: no code of a model's own, and no pickle that names more than tensors.
"""

import json
import warnings
from collections import Counter
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, cast

import torch
from torch import Tensor, nn

from samestep.convert import adapters
from samestep.convert.convert import convert
from samestep.convert.formats import FORMATS, format_of
from samestep.errors import UserError
from samestep.extras import need
from samestep.tasks.transformers_model import load


@dataclass(frozen=True, kw_only=True)
class Published:
    """What a folder holds."""

    folder: Path
    model: nn.Module
    config: Any
    dtypes: Mapping[str, torch.dtype]  # of the tensors in its files
    absent: tuple[str, ...]  # tensors of the model that its files don't have
    tokenizer: Any = None
    base: Mapping[str, Tensor] | None = None  # weights without the adapters that were merged into them

    def dtype_of(self, name: str) -> torch.dtype | None:
        """The type of a weight in the files; transformers gives some weights other names there, or stacks them."""
        usual = Counter(dtype for dtype in self.dtypes.values() if dtype.is_floating_point).most_common(1)
        return self.dtypes.get(name, usual[0][0] if usual else None)


@contextmanager
def published(folder: Path) -> Iterator[Published]:
    """The model of a folder. Raises UserError where it can't be built from it."""
    need("verify --against", "transformers")
    if not folder.is_dir():
        raise UserError(f"{folder}: there is no such folder")
    form = format_of(folder)
    if form == "samestep":
        with TemporaryDirectory(prefix="samestep-export-") as scratch:
            convert(folder, Path(scratch) / "model", to="hugging-face")
            yield replace(_hugging_face(Path(scratch) / "model"), folder=folder)
    elif form == "peft":
        yield _with_adapters(folder)
    elif (folder / "config.json").is_file():
        yield _hugging_face(folder)
    else:
        raise UserError(f"{folder} has no config.json; use a folder of save_pretrained, or a run of samestep")


def _hugging_face(folder: Path) -> Published:
    import transformers

    config = _config(folder)
    name = next(iter(config.architectures or ()), None)
    kind = getattr(transformers, name, None) if name is not None else None
    if kind is None:
        raise UserError(
            f"{folder}/config.json: architectures is {config.architectures}, and this transformers "
            "has no such class; write the name of the model's class there"
        )
    with FORMATS["hugging-face"].open(folder) as weights:
        dtypes = {name: entry.dtype for name, entry in weights.entries.items()}
    model, absent = load(kind, folder, config, named_by="")
    return Published(
        folder=folder,
        model=model.eval(),
        config=config,
        dtypes=dtypes,
        absent=tuple(absent),
        tokenizer=_tokenizer(folder),
    )


def _with_adapters(folder: Path) -> Published:
    """A base with the adapters of a folder merged into it."""
    need("a folder of PEFT's", "peft")
    from peft import PeftConfig, get_peft_model, set_peft_model_state_dict
    from safetensors.torch import load_file

    settings = json.loads((folder / adapters.CONFIG).read_text(encoding="utf-8"))
    base = Path(str(settings.get("base_model_name_or_path")))
    if not (base / "config.json").is_file():
        raise UserError(
            f"{folder}/{adapters.CONFIG}: base_model_name_or_path is {base}, and there is no model; write the "
            "folder of the base there"
        )
    plain = _hugging_face(base)
    before = {name: value.clone() for name, value in plain.model.state_dict().items()}
    with warnings.catch_warnings(action="ignore", category=FutureWarning):  # of PEFT's own calls
        wrapped: Any = get_peft_model(cast(Any, plain.model), PeftConfig.from_peft_type(**settings))
        set_peft_model_state_dict(wrapped, load_file(folder / adapters.FILE))
        merged: nn.Module = wrapped.merge_and_unload()
    tokenizer = _tokenizer(folder) or plain.tokenizer
    return replace(plain, folder=folder, model=merged.eval(), base=before, tokenizer=tokenizer)


def _config(folder: Path) -> Any:
    from transformers import AutoConfig

    try:
        return AutoConfig.from_pretrained(folder, local_files_only=True, trust_remote_code=False)
    except (OSError, ValueError, KeyError, TypeError) as error:
        reason = str(error).strip().partition("\n")[0]
        raise UserError(
            f"{folder}/config.json can't be read: {reason}; use a type of model that transformers has"
        ) from error


def _tokenizer(folder: Path) -> Any:
    """The folder's tokenizer; None where it has none."""
    from transformers import AutoTokenizer

    if not any(folder.glob("tokenizer*")):
        return None
    try:
        return AutoTokenizer.from_pretrained(folder, local_files_only=True, trust_remote_code=False)
    except (OSError, ValueError, KeyError) as error:
        reason = str(error).strip().partition("\n")[0]
        raise UserError(
            f"{folder}: its tokenizer can't be loaded: {reason}; remove its files, or mend them"
        ) from error
