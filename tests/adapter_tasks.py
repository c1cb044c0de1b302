"""Tasks on models with adapters of their own: PEFT's, and modules beside frozen linear layers."""

from typing import Any

from model_tasks import NextWord
from torch import Tensor, nn


class PeftNextWord(NextWord):
    """The same language models with PEFT's adapters."""

    def __init__(self, *, targets: str = "all-linear", **values: Any) -> None:
        super().__init__(**values)
        self.wanted = targets

    def model(self) -> nn.Module:
        from peft import LoraConfig, get_peft_model

        of_gpt2 = self.kind == "gpt2"  # whose weights are [inputs, outputs]
        config = LoraConfig(r=3, lora_alpha=9, lora_dropout=0.2, target_modules=self.wanted, fan_in_fan_out=of_gpt2)
        return get_peft_model(super().model(), config)  # pyright: ignore[reportArgumentType]


class Beside(nn.Module):
    """A frozen linear layer, and two small ones that are trained."""

    def __init__(self, layer: nn.Linear) -> None:
        super().__init__()
        self.layer = layer.requires_grad_(False)
        self.first = nn.Linear(layer.in_features, 2, bias=False)
        self.second = nn.Linear(2, layer.out_features, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(x) + self.second(self.first(x))


class OwnAdapters(NextWord):
    """The same language models with such modules in the place of some layers."""

    def model(self) -> nn.Module:
        model = super().model().requires_grad_(False)
        wanted = ("q_proj", "v_proj", "up_proj", "down_proj")
        for name, module in list(model.named_modules()):
            path, _, own = name.rpartition(".")
            if own in wanted:
                assert isinstance(module, nn.Linear)
                setattr(model.get_submodule(path), own, Beside(module))
        return model
