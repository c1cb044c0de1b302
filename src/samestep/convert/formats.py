"""The formats in which model weights are kept: an entry each, and nothing elsewhere asks for one by its name."""

from collections.abc import Mapping

from samestep.convert import (
    accelerate_folder,
    deepspeed,
    fsdp,
    hugging_face,
    own,
    peft_folder,
    safetensors,
    state_dict,
)
from samestep.convert.base import Format, never

FORMATS: Mapping[str, Format] = {
    "samestep": Format(
        title="a checkpoint of samestep",
        is_folder=True,
        recognises=own.recognises,
        fits=own.fits,
        open=own.open_,
        write=own.write,
        holds="both",
    ),
    "state-dict": Format(
        title="a state dict of torch.save",
        is_folder=False,
        recognises=state_dict.recognises,
        fits=state_dict.fits,
        open=state_dict.open_,
        write=state_dict.write,
        holds="both",
    ),
    "ddp": Format(
        title="a state dict of DDP (module.)",
        is_folder=False,
        recognises=state_dict.recognises_ddp,
        fits=never,
        open=state_dict.open_ddp,
        write=state_dict.write_ddp,
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
        recognises=peft_folder.recognises,
        fits=never,
        open=peft_folder.open_,
        write=peft_folder.write,
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
        recognises=accelerate_folder.recognises,
        fits=never,
        open=accelerate_folder.open_,
        write=accelerate_folder.write,
    ),
    "fsdp": Format(
        title="a folder of FSDP (torch.distributed.checkpoint)",
        is_folder=True,
        recognises=fsdp.recognises,
        fits=fsdp.fits,
        open=fsdp.open_,
        write=fsdp.write,
    ),
}
