"""A folder of PEFT's: adapter_config.json and adapter_model.safetensors, as `PeftModel.from_pretrained` reads them.

PEFT keeps a tensor of an adapter under the name of its layer: base_model.model.<layer>.lora_A.weight.
"""

import json
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

from samestep.checkpoint.base import Base
from samestep.convert import safetensors
from samestep.convert.base import OutputOptions, Weights
from samestep.errors import CheckpointError
from samestep.parallel.low_rank import DOWN, UP

CONFIG = "adapter_config.json"
FILE = "adapter_model.safetensors"
PREFIX = "base_model.model."


def recognises(path: Path) -> bool:
    return (path / CONFIG).is_file() and (path / FILE).is_file()


@contextmanager
def open_(path: Path) -> Iterator[Weights]:
    """The adapters of a folder under their names in a model that `recipe.adapter` gave them."""
    if not recognises(path):
        raise CheckpointError(f"{path} has no {CONFIG} and {FILE}; use a folder of PEFT's save_pretrained")
    try:
        config = json.loads((path / CONFIG).read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise CheckpointError(f"{path / CONFIG} can't be read: {error}") from None
    if not isinstance(config, dict) or config.get("peft_type") != "LORA":
        kind = config.get("peft_type") if isinstance(config, dict) else None
        raise CheckpointError(f"{path / CONFIG} is of peft_type {kind}; use a folder of LORA")
    with safetensors.open_(path / FILE) as weights:
        names = {name.removeprefix(PREFIX): name for name in weights.entries}
        yield replace(
            weights,
            entries={name: weights.entries[known] for name, known in names.items()},
            read=lambda name: weights.read(names[name]),
            base=Base(left_out=(), fingerprint="", adapter=config),
        )


def write(into: Path, _: str, weights: Weights, asked: OutputOptions) -> None:
    """Write the adapters, and what is trained whole beside them. Raises CheckpointError where there are none."""
    base = weights.base
    if base is None or not base.adapter:
        raise CheckpointError(
            "these weights are not those of adapters alone, so there is no folder of PEFT's to write; use the "
            "checkpoint of a training with recipe.adapter or with PEFT's modules"
        )
    names = _names(weights, base)
    safetensors.write_as(into, FILE.removesuffix(safetensors.SUFFIX), names, weights, 1 << 62)
    text = json.dumps({**base.adapter, "inference_mode": True}, indent=2, ensure_ascii=False)
    (into / CONFIG).write_text(text + "\n", encoding="utf-8")


def _names(weights: Weights, base: Base) -> dict[str, str]:
    """PEFT's names of the adapters' tensors -> those of the weights."""
    found: dict[str, str] = {}
    whole = _modules_to_save(base.adapter)
    for name in weights.entries:
        theirs = without_adapter_name(name, base.adapter_name)
        of_adapter = any(f".{half}." in theirs for half in (DOWN, UP)) or ".lora_" in theirs
        if of_adapter or any(theirs.startswith(f"{each}.") or f".{each}." in theirs for each in whole):
            found[PREFIX + theirs] = name
    return found


def without_adapter_name(name: str, adapter: str) -> str:
    """The name of a tensor of PEFT's modules as its files have it, without the prefix."""
    name = name.removeprefix(PREFIX)
    if adapter:
        name = name.replace(f".modules_to_save.{adapter}.", ".")
        name = name.removesuffix(f".{adapter}").replace(f".{adapter}.", ".") if ".lora_" in name else name
    return name


def _modules_to_save(config: Mapping[str, Any]) -> list[str]:
    return [str(name) for name in config.get("modules_to_save") or []]
