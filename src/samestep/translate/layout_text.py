"""The text of a layout from the sizes that another tool's configuration gives; some of them may not be known."""

from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from typing import get_args

from samestep.layout import Layout, Offload

# What shares out the data, by what ZeRO shards, and its text where the size is not known.
_DATA = {0: "dp{}", 1: "zero1x{}", 2: "zero2x{}", 3: "fsdp{}"}
_ORDER_OF_OFFLOADS = get_args(Offload)


@dataclass(frozen=True, kw_only=True)
class Sizes:
    """Sizes of the mesh; one of `data` and `replicas` may be None: what the others leave of the processes."""

    pipeline: int = 1
    replicas: int | None = 1  # of the shards, where both are asked for
    data: int | None = None  # ranks that share out the data: shards, or replicas where zero is 0
    zero: int = 0
    context: int = 1
    tensor: int = 1
    offload: Collection[str] = ()
    options: Mapping[str, str] = field(default_factory=dict)

    @property
    def model(self) -> int:
        """Ranks that work on the same samples."""
        return self.pipeline * self.context * self.tensor


def text_of(sizes: Sizes) -> str:
    """The layout as text, as short as it can be."""
    named = {"pp{}": sizes.pipeline, "dp{}": sizes.replicas, _DATA[sizes.zero]: sizes.data}
    named |= {"cp{}": sizes.context, "tp{}": sizes.tensor}
    parts = [part.format(size or "") for part, size in named.items() if size != 1]
    options = dict(sizes.options)
    if offloads := _together(sizes.offload):
        options["offload"] = "+".join(offloads)
    text = " ".join([*parts, *(f"{name}={value}" for name, value in options.items())]) or "single"
    return text if None in (sizes.data, sizes.replicas) else str(Layout.parse(text))


def _together(offloads: Collection[str]) -> list[str]:
    """Parameters take the optimizer's state along, and a disk what memory would have held."""
    wanted = set(offloads)
    if "parameters-disk" in wanted:
        wanted -= {"parameters"}
    if {"parameters", "parameters-disk"} & wanted:
        wanted -= {"optimizer", "optimizer-disk"}
    if "optimizer-disk" in wanted:
        wanted -= {"optimizer"}
    return [name for name in _ORDER_OF_OFFLOADS if name in wanted]
