"""No key-value cache in training: it keeps every layer's keys and values, and a recomputed layer would add to it."""

import copy
from typing import Any

from torch import nn


def keep_no_cache(model: nn.Module) -> None:
    """Make a transformers model keep no keys and values of a forward, which are for generating text.

    A task may make its next model of the same configuration, so the modules get a copy of it.
    """
    copies: dict[int, Any] = {}
    for module in model.modules():
        config = vars(module).get("config")
        if getattr(config, "use_cache", False) is True:
            if id(config) not in copies:
                copies[id(config)] = copy.copy(config)
                copies[id(config)].use_cache = False
            vars(module)["config"] = copies[id(config)]
