"""Adapters merged into their base: the weights of a model without adapters that gives the same output."""

from collections.abc import Callable, Mapping
from dataclasses import replace

from torch import Tensor, nn

from samestep.convert.base import Weights
from samestep.convert.peft_folder import PREFIX, without_adapter_name
from samestep.errors import CheckpointError
from samestep.parallel.low_rank import Adapted, adapted_layers
from samestep.parallel.sharding import Entry
from samestep.parallel.tensor.modules import in_dim

Read = Callable[[str], Tensor]


def merged(weights: Weights, model: nn.Module) -> Weights:
    """The merged weights; `model` is the job's, with adapters and with its base as the task builds it.

    A layer's weight [outputs, inputs] becomes weight + scaling * up @ down (Hu et al. 2021, section 4.1). Raises
    CheckpointError where the weights are not those of this model's adapters.
    """
    layers = adapted_layers(model)
    state = model.state_dict()
    known = weights.names()
    tied = _tied(model)
    if not layers:
        raise CheckpointError(
            "--merge: the job's model has no adapters to merge; use the job that trained them, or no --merge"
        )
    _check(layers, known, tied)
    for name in known:
        if name not in state:
            raise CheckpointError(f"--merge: the weights hold {name}, and the job's model has none")
    adapter = weights.base.adapter_name if weights.base is not None else ""

    def held(name: str) -> Tensor:
        return weights.read(known[name]) if name in known else state[name].detach().cpu()

    reads: dict[str, Callable[[], Tensor]] = {}
    entries: dict[str, Entry] = {}
    for name, value in state.items():
        layer = next((each for each in layers if name.startswith(f"{each}.")), None)
        if layer is not None and name[len(layer) + 1 :].startswith("lora_"):
            continue
        if name in tied or ".original_module." in name:  # PEFT keeps it beside the one that is trained
            continue
        plain = _plain_name(name, layer, layers, adapter)
        if layer is not None and name.endswith("weight"):
            reads[plain] = _Merge(name, layer, layers[layer], model, held)
        else:
            reads[plain] = lambda name=name: held(name)
        dtype = weights.entries[known[name]].dtype if name in known else value.dtype
        entries[plain] = Entry(shape=value.shape, dtype=dtype)
    plain_tied = {
        _plain_name(other, None, layers, adapter): _plain_name(name, None, layers, adapter)
        for other, name in tied.items()
    }
    return replace(weights, entries=entries, read=lambda name: reads[name](), tied=plain_tied, base=None)


class _Merge:
    """Computes one merged weight when it is asked for."""

    def __init__(self, name: str, layer: str, parts: Adapted, model: nn.Module, held: Read) -> None:
        self._name, self._layer, self._parts, self._held = name, layer, parts, held
        self._transposed = in_dim(model.get_submodule(layer)) == 0  # [inputs, outputs], as GPT-2's layers have it

    def __call__(self) -> Tensor:
        weight = self._held(self._name)
        total = weight.double()
        for update in self._parts.updates:
            down = self._held(f"{self._layer}.{update.down}.weight").double()  # [rank, inputs]
            up = self._held(f"{self._layer}.{update.up}.weight").double()  # [outputs, rank]
            product = up @ down * update.scaling
            total = total + (product.t() if self._transposed else product)
        return total.to(weight.dtype)


def _tied(model: nn.Module) -> dict[str, str]:
    """Further names of a model's parameters -> their first ones."""
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    every_name = model.named_parameters(remove_duplicate=False)
    return {name: names[id(parameter)] for name, parameter in every_name if names[id(parameter)] != name}


def _check(layers: Mapping[str, Adapted], known: Mapping[str, str], tied: Mapping[str, str]) -> None:
    for layer, parts in layers.items():
        weight = ".".join(filter(None, (layer, parts.base, "weight")))
        if weight in tied or weight in tied.values():
            raise CheckpointError(
                f"--merge: {weight} is also another module's weight, which has no adapter, so a merged weight would "
                "change that module as well; use --to peft"
            )
        for update in parts.updates:
            for half in (update.down, update.up):
                if f"{layer}.{half}.weight" not in known:
                    raise CheckpointError(
                        f"--merge: the weights have no {layer}.{half}.weight, and the job's model has; use the job "
                        "that trained these adapters"
                    )


def _plain_name(name: str, layer: str | None, layers: Mapping[str, Adapted], adapter: str) -> str:
    """A tensor's name in the model without adapters."""
    if layer is not None and layers[layer].base:
        name = layer + name[len(layer) + 1 + len(layers[layer].base) :]
    return without_adapter_name(name, adapter).replace(".base_layer.", ".") if name.startswith(PREFIX) else name
