"""Adapters: folders of PEFT's, and adapters merged into their base.

A folder has adapter_config.json and adapter_model.safetensors, as `PeftModel.from_pretrained` reads them. A tensor of
an adapter has the name of its layer there: base_model.model.<layer>.lora_A.weight. Merged weights are those of a
model without adapters that gives the same output.
"""

import json
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

from torch import Tensor, nn

from samestep.checkpoint.compatibility import Base
from samestep.convert import safetensors
from samestep.convert.base import OutputOptions, Weights
from samestep.errors import CheckpointError, UserError
from samestep.input_files import parse_json, text_of
from samestep.parallel.low_rank import DOWN, UP, Adapted, adapted_layers
from samestep.parallel.sharding import Entry
from samestep.parallel.tensor.modules import in_dim

CONFIG = "adapter_config.json"
FILE = "adapter_model.safetensors"
PREFIX = "base_model.model."


def recognises(path: Path) -> bool:
    """Whether a folder has the two files of PEFT's adapters."""
    return (path / CONFIG).is_file() and (path / FILE).is_file()


@contextmanager
def open_(path: Path) -> Iterator[Weights]:
    """The adapters of a folder under their names in a model that `recipe.adapter` gave them."""
    if not recognises(path):
        raise CheckpointError(f"{path} has no {CONFIG} and {FILE}; use a folder of PEFT's save_pretrained")
    try:
        config = parse_json(text_of(path / CONFIG))
    except (UserError, ValueError) as error:
        raise CheckpointError(f"{path / CONFIG} can't be read: {error}") from None
    if not isinstance(config, dict) or config.get("peft_type") != "LORA":
        kind = config.get("peft_type") if isinstance(config, dict) else None
        raise CheckpointError(f"{path / CONFIG} is of peft_type {kind}; use a folder of LORA")
    with safetensors.open_(path / FILE) as weights:
        names = {name.removeprefix(PREFIX): name for name in weights.entries}
        yield replace(
            weights,
            entries={name: weights.entries[own_name] for name, own_name in names.items()},
            read=lambda name: weights.read(names[name]),
            base=Base(left_out=(), fingerprint="", adapter=config),
        )


def write(into: Path, _: str, weights: Weights, options: OutputOptions) -> None:
    """Write the adapters, and what is trained whole with them. Raises CheckpointError where there are none."""
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
    """Map PEFT's names of the adapters' tensors to the names of the weights."""
    names: dict[str, str] = {}
    whole = _modules_to_save(base.adapter)
    for name in weights.entries:
        theirs = without_adapter_name(name, base.adapter_name)
        of_adapter = any(f".{half}." in theirs for half in (DOWN, UP)) or ".lora_" in theirs
        if of_adapter or any(theirs.startswith(f"{layer}.") or f".{layer}." in theirs for layer in whole):
            names[PREFIX + theirs] = name
    return names


def without_adapter_name(name: str, adapter: str) -> str:
    """The name of a tensor of PEFT's modules as its files have it, without the prefix."""
    name = name.removeprefix(PREFIX)
    if adapter:
        name = name.replace(f".modules_to_save.{adapter}.", ".")
        name = name.removesuffix(f".{adapter}").replace(f".{adapter}.", ".") if ".lora_" in name else name
    return name


def _modules_to_save(config: Mapping[str, Any]) -> list[str]:
    """Return the modules that were trained in full along with the adapters, as PEFT's configuration names them."""
    return [str(name) for name in config.get("modules_to_save") or []]


Read = Callable[[str], Tensor]


def merged(weights: Weights, model: nn.Module) -> Weights:
    """The merged weights; `model` is the job's, with adapters and with its base as the task builds it.

    A layer's weight [outputs, inputs] becomes weight + scaling * up @ down (Hu et al. 2021, section 4.1). Raises
    CheckpointError where the weights are not those of this model's adapters.
    """
    layers = adapted_layers(model)
    state = model.state_dict()
    names = weights.names()
    tied = _tied(model)
    if not layers:
        raise CheckpointError(
            "--merge: the job's model has no adapters to merge; use the job that trained them, or no --merge"
        )
    _check(layers, names, tied)
    for name in names:
        if name not in state:
            raise CheckpointError(f"--merge: the weights hold {name}, and the job's model has none")
    adapter = weights.base.adapter_name if weights.base is not None else ""

    def held(name: str) -> Tensor:
        return weights.read(names[name]) if name in names else state[name].detach().cpu()

    reads: dict[str, Callable[[], Tensor]] = {}
    entries: dict[str, Entry] = {}
    for name, value in state.items():
        layer = next((layer for layer in layers if name.startswith(f"{layer}.")), None)
        if layer is not None and name[len(layer) + 1 :].startswith("lora_"):
            continue
        if name in tied or ".original_module." in name:  # PEFT keeps the original module along with its trained copy
            continue
        plain = _plain_name(name, layer, layers, adapter)
        if layer is not None and name.endswith("weight"):
            reads[plain] = _MergedWeight(name, layer, layers[layer], model, held)
        else:
            reads[plain] = lambda name=name: held(name)
        dtype = weights.entries[names[name]].dtype if name in names else value.dtype
        entries[plain] = Entry(shape=value.shape, dtype=dtype)
    plain_tied = {
        _plain_name(other, None, layers, adapter): _plain_name(name, None, layers, adapter)
        for other, name in tied.items()
    }
    return replace(weights, entries=entries, read=lambda name: reads[name](), tied=plain_tied, base=None)


class _MergedWeight:
    """Computes one merged weight when it is asked for."""

    def __init__(self, name: str, layer: str, parts: Adapted, model: nn.Module, held: Read) -> None:
        self._name, self._layer, self._parts, self._held = name, layer, parts, held
        self._transposed = in_dim(model.get_submodule(layer)) == 0  # [inputs, outputs], as GPT-2's layers have it

    def __call__(self) -> Tensor:
        """W + scaling * up @ down for each adapter, in float64, in W's dtype: [outputs, inputs]."""
        weight = self._held(self._name)
        total = weight.double()
        for update in self._parts.updates:
            down = self._held(f"{self._layer}.{update.down}.weight").double()  # [rank, inputs]
            up = self._held(f"{self._layer}.{update.up}.weight").double()  # [outputs, rank]
            product = up @ down * update.scaling
            total = total + (product.t() if self._transposed else product)
        return total.to(weight.dtype)


def _tied(model: nn.Module) -> dict[str, str]:
    """Map further names of tied parameters to the first name of each."""
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    every_name = model.named_parameters(remove_duplicate=False)
    return {name: names[id(parameter)] for name, parameter in every_name if names[id(parameter)] != name}


def _check(layers: Mapping[str, Adapted], names: Mapping[str, str], tied: Mapping[str, str]) -> None:
    """Raise CheckpointError where an adapter is missing, or its layer shares its weight with another module."""
    for layer, parts in layers.items():
        weight = ".".join(filter(None, (layer, parts.base, "weight")))
        if weight in tied or weight in tied.values():
            raise CheckpointError(
                f"--merge: {weight} is also another module's weight, which has no adapter, so a merged weight would "
                "change that module as well; use --to peft"
            )
        for update in parts.updates:
            for half in (update.down, update.up):
                if f"{layer}.{half}.weight" not in names:
                    raise CheckpointError(
                        f"--merge: the weights have no {layer}.{half}.weight, and the job's model has; use the job "
                        "that trained these adapters"
                    )


def _plain_name(name: str, layer: str | None, layers: Mapping[str, Adapted], adapter: str) -> str:
    """A tensor's name in the model without adapters."""
    if layer is not None and layers[layer].base:
        name = layer + name[len(layer) + 1 + len(layers[layer].base) :]
    return without_adapter_name(name, adapter).replace(".base_layer.", ".") if name.startswith(PREFIX) else name
