"""Linear layers and activations that people write themselves, and layers that only look like them."""

import torch
import torch.nn.functional as F
from torch import Tensor, nn


class Product(nn.Module):
    """A linear layer as libraries write it, without the attributes of PyTorch's."""

    def __init__(self, inputs: int, outputs: int, *, bias: bool = True) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(outputs, inputs) / inputs**0.5)
        self.bias: nn.Parameter | None
        self.register_parameter("bias", nn.Parameter(torch.randn(outputs)) if bias else None)

    def forward(self, given: Tensor) -> Tensor:
        return F.linear(given, self.weight, self.bias)


class Handing(nn.Linear):
    """A subclass whose forward hands its input to PyTorch's."""

    def forward(self, input: Tensor) -> Tensor:
        return super().forward(input)


class Doubled(nn.Linear):
    def forward(self, input: Tensor) -> Tensor:
        return 2 * super().forward(input)


class Shifted(Product):
    """Adds its bias to the inputs."""

    def forward(self, given: Tensor) -> Tensor:
        return F.linear(given + 1, self.weight, self.bias)


class Unbiased(Product):
    def forward(self, given: Tensor) -> Tensor:
        return F.linear(given, self.weight)


class Swish(nn.Module):
    def forward(self, given: Tensor) -> Tensor:
        return given * given.sigmoid()


class Gate(nn.Module):
    """Halves the features."""

    def forward(self, given: Tensor) -> Tensor:
        given, gate = given.chunk(2, dim=-1)
        return given * F.gelu(gate)


class Squared(nn.Module):
    def forward(self, given: Tensor) -> Tensor:
        return F.relu(given) ** 2


class Centred(nn.Module):
    """Of all features together."""

    def forward(self, given: Tensor) -> Tensor:
        return given - given.mean(-1, keepdim=True)
