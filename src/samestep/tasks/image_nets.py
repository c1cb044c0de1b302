"""Networks for images: a small convolutional one, and ResNet-18."""

from collections.abc import Callable
from itertools import pairwise

from torch import Tensor, nn

from samestep.tasks.image_model import GROUPS

Norm = Callable[[int], nn.Module]  # from channels to a normalisation

NORMS: dict[str, Norm] = {
    "batch": nn.BatchNorm2d,
    "group": lambda channels: nn.GroupNorm(GROUPS, channels),
    "none": lambda channels: nn.Identity(),
}


def small_net(*, channels: int, size: tuple[int, int], classes: int, width: int, norm: Norm) -> nn.Module:
    """Two stages of convolution, norm and pooling to a quarter of the size, then two dense layers."""
    height, breadth = size[0] // 4, size[1] // 4
    return nn.Sequential(
        _conv(channels, width),
        norm(width),
        nn.ReLU(),
        nn.MaxPool2d(2),  # [batch, width, size / 2, size / 2]
        _conv(width, 2 * width),
        norm(2 * width),
        nn.ReLU(),
        nn.MaxPool2d(2),  # [batch, 2 width, size / 4, size / 4]
        nn.Flatten(),
        nn.Linear(2 * width * height * breadth, 8 * width),
        nn.ReLU(),
        nn.Linear(8 * width, classes),
    )


class ResNet18(nn.Module):
    """Deep residual learning (He et al. 2016, table 1): a stem and eight blocks of two convolutions.

    With `small_stem` one 3 x 3 convolution stands in place of the 7 x 7 one of stride 2 and the pooling, as for
    images of 32 x 32 (section 4.2).
    """

    def __init__(self, *, channels: int, classes: int, width: int, norm: Norm, small_stem: bool) -> None:
        super().__init__()
        stem = _conv(channels, width) if small_stem else nn.Conv2d(channels, width, 7, 2, 3, bias=False)
        pool = nn.Identity() if small_stem else nn.MaxPool2d(3, 2, 1)
        self.stem = nn.Sequential(stem, norm(width), nn.ReLU(), pool)
        widths = [width, width, width, 2 * width, 2 * width, 4 * width, 4 * width, 8 * width, 8 * width]
        self.blocks = nn.Sequential(*(Residual(before, after, norm) for before, after in pairwise(widths)))
        self.head = nn.Linear(8 * width, classes)
        self._initialise()

    def forward(self, images: Tensor) -> Tensor:
        features = self.blocks(self.stem(images))  # [batch, 8 width, size / 8, size / 8]
        return self.head(features.mean(dim=(2, 3)))

    def _initialise(self) -> None:
        """As He et al. 2015, section 2.2, for networks of rectifiers."""
        for module in self.modules():
            if isinstance(module, nn.Conv2d):
                nn.init.kaiming_normal_(module.weight, mode="fan_out", nonlinearity="relu")


class Residual(nn.Module):
    """Two convolutions beside a shortcut; it halves the size where it doubles the channels."""

    def __init__(self, before: int, after: int, norm: Norm) -> None:
        super().__init__()
        stride = 1 if before == after else 2
        self.first = nn.Sequential(_conv(before, after, stride), norm(after), nn.ReLU())
        self.second = nn.Sequential(_conv(after, after), norm(after))
        self.shortcut = (
            nn.Identity()
            if before == after
            else nn.Sequential(nn.Conv2d(before, after, 1, stride, bias=False), norm(after))
        )
        self.activation = nn.ReLU()

    def forward(self, features: Tensor) -> Tensor:
        return self.activation(self.second(self.first(features)) + self.shortcut(features))


def _conv(before: int, after: int, stride: int = 1) -> nn.Conv2d:
    return nn.Conv2d(before, after, 3, stride, 1, bias=False)
