"""`--tiny`: models of transformers are made with two layers, whatever their configuration says."""

from collections.abc import Callable, Iterator
from functools import wraps
from types import ModuleType
from typing import Any

from samestep.script_proof.interception import after_import

LAYERS = 2
# Keys under which configurations of transformers have the number of layers, of encoders and decoders as well.
_KEYS = (
    *("num_hidden_layers", "num_layers", "n_layer", "n_layers", "num_encoder_layers", "num_decoder_layers"),
    *("encoder_layers", "decoder_layers", "encoder_num_hidden_layers", "decoder_num_hidden_layers"),
)
Note = Callable[[str, str, int], None]  # of a configuration's class, a key and the number of layers that it had


def install(note: Note) -> None:
    """From here on each model is made with two layers, also if transformers is imported later."""
    after_import("transformers.modeling_utils", lambda module: _shrinking(module, note))


def _shrinking(module: ModuleType, note: Note) -> None:
    """Every model hands its configuration to this class before it makes its layers by it."""
    kind = module.PreTrainedModel
    make = kind.__init__

    @wraps(make)
    def made(self: Any, config: Any, *args: Any, **kwargs: Any) -> None:
        for key, layers in shrink(config):
            note(type(config).__name__, key, layers)
        make(self, config, *args, **kwargs)

    kind.__init__ = made


def shrink(config: Any) -> Iterator[tuple[str, int]]:
    """Give a configuration two layers, and lists with an item for each layer their first two items.

    Yields the keys that were changed, with the layers before.
    """
    values = vars(config)
    for key in _KEYS:
        layers = values.get(key)
        if type(layers) is not int or layers <= LAYERS:
            continue
        for name, value in list(values.items()):
            if type(value) in (list, tuple) and len(value) == layers:
                setattr(config, name, value[:LAYERS])
        setattr(config, key, LAYERS)
        yield key, layers
