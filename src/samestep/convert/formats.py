"""The formats in which model weights are kept: their table, which of them a path holds, and what is in there.

A format is an entry of `FORMATS`, and nothing elsewhere asks for one by its name.
"""

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any

from samestep.checkpoint import inspect as inspection
from samestep.checkpoint.folder import AT_ONCE
from samestep.checkpoint.info import Info, read_info
from samestep.checkpoint.inspect import UNFINISHED, CheckpointTensor, Verified, held_as, held_in, listed
from samestep.convert import adapters, dcp, deepspeed, hugging_face, safetensors, torch_files
from samestep.convert.base import Format, never
from samestep.errors import UserError
from samestep.progress.bars import Bar
from samestep.run_folder import candidates

FORMATS: Mapping[str, Format] = {
    "samestep": Format(
        title="a checkpoint of samestep",
        is_folder=True,
        recognises=dcp.recognises_own,
        fits=dcp.fits_own,
        open=dcp.open_own,
        write=dcp.write_own,
        holds="both",
    ),
    "state-dict": Format(
        title="a state dict of torch.save",
        is_folder=False,
        recognises=torch_files.recognises,
        fits=torch_files.fits,
        open=torch_files.open_,
        write=torch_files.write,
        holds="both",
    ),
    "ddp": Format(
        title="a state dict of DDP (module.)",
        is_folder=False,
        recognises=torch_files.recognises_ddp,
        fits=never,
        open=torch_files.open_ddp,
        write=torch_files.write_ddp,
    ),
    "safetensors": Format(
        title="a safetensors file",
        is_folder=False,
        recognises=safetensors.recognises,
        fits=safetensors.fits,
        open=safetensors.open_,
        write=safetensors.write,
        holds="both",
    ),
    "hugging-face": Format(
        title="a Hugging Face folder",
        is_folder=True,
        recognises=hugging_face.recognises,
        fits=never,
        open=hugging_face.open_,
        write=hugging_face.write,
    ),
    "peft": Format(
        title="a folder of PEFT's adapters",
        is_folder=True,
        recognises=adapters.recognises,
        fits=never,
        open=adapters.open_,
        write=adapters.write,
        holds="adapters",
    ),
    "deepspeed": Format(
        title="a checkpoint of DeepSpeed",
        is_folder=True,
        recognises=deepspeed.recognises,
        fits=never,
        open=deepspeed.open_,
        write=deepspeed.write,
    ),
    "accelerate": Format(
        title="a folder of Accelerate",
        is_folder=True,
        recognises=torch_files.recognises_accelerate,
        fits=never,
        open=torch_files.open_accelerate,
        write=torch_files.write_accelerate,
    ),
    "fsdp": Format(
        title="a folder of FSDP (torch.distributed.checkpoint)",
        is_folder=True,
        recognises=dcp.recognises_fsdp,
        fits=dcp.fits_fsdp,
        open=dcp.open_fsdp,
        write=dcp.write_fsdp,
    ),
}


def format_of(path: Path) -> str:
    """The format that a path holds. Raises UserError where it is none, or may not be looked at."""
    if not path.exists():
        raise UserError(f"there is no file or folder {path}")
    names = [name for name, form in FORMATS.items() if form.recognises(path)]
    if len(names) == 1:
        return names[0]
    if names:
        raise UserError(f"{path} could be {' or '.join(names)}; --from says which")
    titles = ", ".join(form.title for form in FORMATS.values())
    raise UserError(f"{path} is none of these: {titles}; --from says which it is meant to be ({', '.join(FORMATS)})")


@dataclass(frozen=True, kw_only=True)
class Contents:
    """What a checkpoint holds."""

    path: Path
    format: str
    tensors: Sequence[CheckpointTensor]
    info: Info | None  # of samestep's own
    tied: Mapping[str, str]  # further names of the model's tensors -> those under which they stand

    def bytes_by_kind(self) -> dict[str, int]:
        """Bytes of the model, of each kind of the optimizer's state, and of the rest."""
        sums: defaultdict[str, int] = defaultdict(int)
        for held in self.tensors:
            key = held.name.rpartition(".")[2]
            sums[f"{held.kind} {key}" if held.kind == "optimizer" else held.kind] += held.bytes
        return dict(sums)

    def to_json(self) -> dict[str, Any]:
        """What `samestep checkpoint inspect --json` writes; sizes are in bytes."""
        return {
            "path": str(self.path),
            "format": self.format,
            "bytes": self.bytes_by_kind(),
            "tied": dict(self.tied),
            "info": None if self.info is None else asdict(self.info),
            "tensors": [asdict(held) for held in self.tensors],
        }


def verified(place: Path) -> dict[Path, Verified]:
    """Verify each checkpoint in a path, with a progress bar.

    Raises CheckpointError if there are none.
    """
    paths = [checkpoint.path for checkpoint in listed(place) if checkpoint.state != UNFINISHED]
    sizes = [size for path in paths for size in inspection.sizes_in(path)]
    with Bar("verify", sum(-(-size // AT_ONCE) for size in sizes)) as bar:
        return {path: inspection.verify(path, partial(_advance, bar, path.name)) for path in paths}


def _advance(bar: Bar, name: str, _: int) -> None:
    bar.advance(name)


def inspect(path: Path) -> Contents:
    """Look into a checkpoint of any format, without reading its tensors. Raises UserError for what is none."""
    if paths := candidates(path):  # the newest of them, with the optimizer's state, too
        info = read_info(paths[0])
        return Contents(path=paths[0], format="samestep", tensors=held_in(paths[0]), info=info, tied=info.tied)
    form = format_of(path)
    with FORMATS[form].open(path) as weights:
        tensors = [held_as("model", name, entry) for name, entry in weights.entries.items()]
        return Contents(path=path, format=form, tensors=tensors, info=None, tied=weights.tied)
