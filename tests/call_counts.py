"""Counts forwards of models and backwards, whichever code calls them."""

from collections import Counter
from typing import Any

import pytest
import torch
from torch import nn


class CallCounts(Counter[str]):
    """The numbers of forwards of the models that it was given, and of all backwards."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        super().__init__(forward=0, backward=0)
        backward = torch.Tensor.backward

        def counted(*arguments: Any, **keywords: Any) -> None:
            self["backward"] += 1
            backward(*arguments, **keywords)

        monkeypatch.setattr(torch.Tensor, "backward", counted)

    def of(self, model: nn.Module) -> nn.Module:
        """The model, whose forwards count."""
        model.register_forward_pre_hook(lambda *_: self.update(["forward"]))
        return model
