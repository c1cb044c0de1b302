"""The model of an image classification: its section of a job, and the network that it asks for."""

from typing import TYPE_CHECKING, Any, Literal

from pydantic import model_validator
from pydantic.dataclasses import dataclass

from samestep.errors import UserError
from samestep.recipe import STRICT, Positive

if TYPE_CHECKING:
    from torch import nn

_WIDTHS = {"small": 16, "resnet18": 64}
GROUPS = 8  # of a group norm: channels are divided into so many
_LARGEST_FOR_SMALL_STEM = 64  # pixels


@dataclass(frozen=True, kw_only=True, config=STRICT)
class ImageModel:
    """A network for images, with random weights."""

    type: Literal["small", "resnet18"] = "small"
    width: Positive | None = None  # channels of the first convolution; None: 16 of small, 64 of resnet18
    norm: Literal["group", "batch", "none"] = "group"
    stem: Literal["small", "large"] | None = None  # of resnet18; None: small for images up to 64 pixels

    @model_validator(mode="after")
    def _fits_together(self) -> "ImageModel":
        if self.stem is not None and self.type != "resnet18":
            raise ValueError(f'stem is given, but type is "{self.type}"; stem is for resnet18')
        if self.norm == "group" and self.width is not None and self.width % GROUPS:
            raise ValueError(
                f"width is {self.width} and norm is group, of {GROUPS} groups; a multiple of {GROUPS}, or another "
                f"norm, would do"
            )
        return self


def build(model: ImageModel, *, channels: int, size: tuple[int, int], classes: int) -> "nn.Module":
    """Build the network with random weights under torch's seed, for images [channels, *size]."""
    from samestep.tasks.image_nets import NORMS, ResNet18, small_net

    shared: dict[str, Any] = {
        "channels": channels,
        "classes": classes,
        "width": model.width or _WIDTHS[model.type],
        "norm": NORMS[model.norm],
    }
    if model.type == "small":
        return small_net(size=size, **shared)
    stem = model.stem or ("small" if max(size) <= _LARGEST_FOR_SMALL_STEM else "large")
    return ResNet18(small_stem=stem == "small", **shared)


def check(model: ImageModel, size: tuple[int, int]) -> None:
    """Raise UserError where the images are too small for the network."""
    if model.type == "small" and min(size) < 4:
        raise UserError(
            f"the images have {size[1]} x {size[0]} pixels, and the small network halves them twice; "
            f"recipe.data.size of 4 or more would do"
        )
