"""Models of images, waves and patches as people write them."""

import math
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.utils import parametrizations

from model_table.entry import OF_IMAGES, OF_VECTORS, Entry, Row, numbers, stacked


def _squares(output: Tensor, target: Tensor) -> tuple[Tensor, int]:
    """Squared error of every number; the count is of samples."""
    return (output - target).square().flatten(1).mean(1).sum(), len(output)


def _classes(output: Tensor, target: Tensor) -> tuple[Tensor, int]:
    return F.cross_entropy(output, target, reduction="sum"), len(output)


class Double(nn.Module):
    """Two convolutions with group norm."""

    def __init__(self, given: int, made: int) -> None:
        super().__init__()
        self.one, self.two = nn.Conv2d(given, made, 3, padding=1), nn.Conv2d(made, made, 3, padding=1)
        self.norm_one, self.norm_two = nn.GroupNorm(2, made), nn.GroupNorm(2, made)

    def forward(self, image: Tensor) -> Tensor:
        return F.silu(self.norm_two(self.two(F.silu(self.norm_one(self.one(image))))))


class UNet(nn.Module):
    """Two levels down, two up, with skip connections (Ronneberger et al. 2015)."""

    def __init__(self) -> None:
        super().__init__()
        self.down_one, self.down_two, self.middle = Double(2, 6), Double(6, 10), Double(10, 14)
        self.rise_two, self.rise_one = (
            nn.ConvTranspose2d(14, 10, 2, stride=2),
            nn.ConvTranspose2d(10, 6, 2, stride=2),
        )
        self.up_two, self.up_one = Double(20, 10), Double(12, 6)
        self.head = nn.Conv2d(6, 2, 1)

    def forward(self, image: Tensor) -> Tensor:
        one = self.down_one(image)
        two = self.down_two(F.max_pool2d(one, 2))
        middle = self.middle(F.max_pool2d(two, 2))
        hidden = self.up_two(torch.cat([self.rise_two(middle), two], 1))
        return self.head(self.up_one(torch.cat([self.rise_one(hidden), one], 1)))


def _image_to_image(index: int) -> Row:
    image = numbers(index, 2, 8, 8)
    return {"image": image, "target": image.roll(1, -1).abs()}


class TimedBlock(nn.Module):
    """A residual block of two convolutions that is told the time by a shift of every channel."""

    def __init__(self, given: int, made: int, time: int) -> None:
        super().__init__()
        self.norm, self.conv = nn.GroupNorm(2, given), nn.Conv2d(given, made, 3, padding=1)
        self.time = nn.Linear(time, made)
        self.second, self.out = nn.GroupNorm(2, made), nn.Conv2d(made, made, 3, padding=1)
        self.skip = nn.Conv2d(given, made, 1)

    def forward(self, image: Tensor, time: Tensor) -> Tensor:
        hidden = self.conv(F.silu(self.norm(image))) + self.time(time)[:, :, None, None]
        return self.skip(image) + self.out(F.silu(self.second(hidden)))


class Diffusion(nn.Module):
    """A U-Net that is told how noisy its image is (Ho et al. 2020)."""

    def __init__(self) -> None:
        super().__init__()
        self.time = nn.Sequential(nn.Linear(8, 20), nn.SiLU(), nn.Linear(20, 20))
        self.enter = nn.Conv2d(2, 8, 3, padding=1)
        self.down = nn.ModuleList([TimedBlock(8, 8, 20), TimedBlock(8, 12, 20)])
        self.middle = TimedBlock(12, 12, 20)
        self.up = nn.ModuleList([TimedBlock(24, 8, 20), TimedBlock(16, 8, 20)])
        self.leave = nn.Conv2d(8, 2, 3, padding=1)

    def forward(self, image: Tensor, time: Tensor) -> Tensor:
        rates = torch.exp(-math.log(100.0) * torch.arange(4, dtype=image.dtype) / 4)
        angles = time[:, None].to(image.dtype) * rates
        told = self.time(torch.cat([angles.sin(), angles.cos()], 1))  # [batch, 20]
        hidden, skips = self.enter(image), []
        for block in self.down:
            hidden = block(hidden, told)
            skips.append(hidden)
            hidden = F.avg_pool2d(hidden, 2)
        hidden = self.middle(hidden, told)
        for block in self.up:
            hidden = F.interpolate(hidden, scale_factor=2.0)
            hidden = block(torch.cat([hidden, skips.pop()], 1), told)
        return self.leave(hidden)


def _noisy(index: int) -> Row:
    noise, time = numbers(index + 500, 2, 8, 8), index % 10
    image = numbers(index, 2, 8, 8) * math.cos(time / 8) + noise * math.sin(time / 8)
    return {"image": image, "time": torch.tensor(time), "target": noise}


class Detector(nn.Module):
    """A backbone with batch norm, and heads for the classes and corners of a fixed number of boxes."""

    def __init__(self) -> None:
        super().__init__()
        widths = (3, 8, 10, 12, 12)
        self.stages = nn.ModuleList(
            nn.Sequential(nn.Conv2d(a, b, 3, padding=1, bias=False), nn.BatchNorm2d(b), nn.ReLU())
            for a, b in pairwise(widths)
        )
        self.classes, self.boxes = nn.Conv2d(12, 4, 1), nn.Conv2d(12, 4, 1)

    def forward(self, image: Tensor) -> dict[str, Tensor]:
        for number, stage in enumerate(self.stages):
            image = stage(image)
            if number < 2:
                image = F.max_pool2d(image, 2)
        return {"classes": self.classes(image).flatten(2), "boxes": self.boxes(image).flatten(2).sigmoid()}


def _boxed(index: int) -> Row:
    return {"image": numbers(index, 3, 8, 8), "target": (numbers(index, 4, 4) > 0).float()}


def _detection(output: Any, target: Tensor) -> tuple[Tensor, int]:
    """Classes by cross-entropy, corners by a smooth distance. Both [batch, 4, boxes]"""
    classes = F.cross_entropy(output["classes"], target.sum(1).long() % 4, reduction="sum")
    return classes + F.smooth_l1_loss(output["boxes"], target, reduction="sum"), len(target)


class Autoencoder(nn.Module):
    """A variational autoencoder whose draws are inputs, made with the data (Kingma and Welling 2014)."""

    def __init__(self) -> None:
        super().__init__()
        self.encoder = nn.Sequential(nn.Linear(30, 22), nn.ReLU(), nn.Linear(22, 18), nn.ReLU())
        self.mean, self.spread = nn.Linear(18, 5), nn.Linear(18, 5)
        self.decoder = nn.Sequential(nn.Linear(5, 18), nn.ReLU(), nn.Linear(18, 22), nn.ReLU(), nn.Linear(22, 30))

    def forward(self, given: Tensor, noise: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        hidden = self.encoder(given)
        mean, spread = self.mean(hidden), self.spread(hidden)
        return self.decoder(mean + noise * torch.exp(0.5 * spread)), mean, spread


def _encoded(index: int) -> Row:
    given = numbers(index, 30)
    return {"given": given, "noise": numbers(index + 300, 5), "target": given}


def _elbo(output: tuple[Tensor, Tensor, Tensor], target: Tensor) -> tuple[Tensor, int]:
    made, mean, spread = output
    divergence = -0.5 * (1 + spread - mean.square() - spread.exp()).sum()
    return (made - target).square().sum() + divergence, len(target)


class MixerBlock(nn.Module):
    """A perceptron over patches, and one over channels (Tolstikhin et al. 2021)."""

    def __init__(self, patches: int, width: int) -> None:
        super().__init__()
        self.norm, self.second = nn.LayerNorm(width), nn.LayerNorm(width)
        self.patches = nn.Sequential(nn.Linear(patches, 14), nn.GELU(), nn.Linear(14, patches))
        self.channels = nn.Sequential(nn.Linear(width, 34), nn.GELU(), nn.Linear(34, width))

    def forward(self, hidden: Tensor) -> Tensor:
        hidden = hidden + self.patches(self.norm(hidden).transpose(1, 2)).transpose(1, 2)
        return hidden + self.channels(self.second(hidden))


class Mixer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.patch = nn.Conv2d(3, 18, 4, stride=4)
        self.blocks = nn.Sequential(*(MixerBlock(9, 18) for _ in range(4)))
        self.norm, self.head = nn.LayerNorm(18), nn.Linear(18, 3)

    def forward(self, image: Tensor) -> Tensor:
        hidden = self.patch(image).flatten(2).transpose(1, 2)  # [batch, patches, channels]
        return self.head(self.norm(self.blocks(hidden)).mean(1))


def _seen(index: int) -> Row:
    return {"image": numbers(index, 3, 12, 12), "target": torch.tensor(index % 3)}


class WaveBlock(nn.Module):
    """A dilated causal convolution with weight norm and a gate (van den Oord et al. 2016)."""

    def __init__(self, dilation: int) -> None:
        super().__init__()
        self.dilation = dilation
        self.conv = parametrizations.weight_norm(nn.Conv1d(12, 24, 2, dilation=dilation))
        self.out = parametrizations.weight_norm(nn.Conv1d(12, 12, 1))

    def forward(self, wave: Tensor) -> Tensor:
        filtered, gate = self.conv(F.pad(wave, (self.dilation, 0))).chunk(2, 1)
        return wave + self.out(filtered.tanh() * gate.sigmoid())


class Wave(nn.Module):
    """Predicts the next value of a wave."""

    def __init__(self) -> None:
        super().__init__()
        self.enter = parametrizations.weight_norm(nn.Conv1d(1, 12, 1))
        self.blocks = nn.ModuleList(WaveBlock(2**depth) for depth in range(4))
        self.mix = parametrizations.weight_norm(nn.Linear(12, 16))
        self.head = parametrizations.weight_norm(nn.Linear(16, 1))

    def forward(self, wave: Tensor) -> Tensor:
        hidden = self.enter(wave[:, None])
        for block in self.blocks:
            hidden = block(hidden)
        return self.head(F.relu(self.mix(hidden.transpose(1, 2)))).squeeze(-1)


def _wave(index: int) -> Row:
    wave = torch.sin(torch.arange(22) * (0.2 + 0.05 * index))
    return {"wave": wave[:-1], "target": wave[1:]}


def entries() -> list[Entry]:
    return [
        Entry(
            name="u-net",
            kind="image to image",
            model=UNet,
            row=_image_to_image,
            collate=stacked,
            loss=_squares,
            impossible=OF_IMAGES,
        ),
        Entry(
            name="diffusion",
            kind="diffusion",
            model=Diffusion,
            row=_noisy,
            collate=stacked,
            loss=_squares,
            impossible=OF_IMAGES,
        ),
        Entry(
            name="detector",
            kind="detection",
            model=Detector,
            row=_boxed,
            collate=stacked,
            loss=_detection,
            impossible=OF_IMAGES,
        ),
        Entry(
            name="autoencoder",
            kind="autoencoder",
            model=Autoencoder,
            row=_encoded,
            collate=stacked,
            loss=_elbo,
            impossible=OF_VECTORS,
        ),
        Entry(name="mixer", kind="vision", model=Mixer, row=_seen, collate=stacked, loss=_classes),
        Entry(
            name="wave",
            kind="parametrized convolutions",
            model=Wave,
            row=_wave,
            collate=stacked,
            loss=_squares,
            impossible={"tokens": "its blocks mix neighbouring positions by convolutions, not between sliced layers"},
        ),
    ]
