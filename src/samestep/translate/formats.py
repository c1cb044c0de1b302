"""The formats that can be read and written, a line each."""

from collections.abc import Mapping

from samestep.translate.base import Reader, Writer
from samestep.translate.read_accelerate import ReadAccelerate
from samestep.translate.read_deepspeed import ReadDeepSpeed
from samestep.translate.read_sagemaker import ReadSageMaker
from samestep.translate.read_torchrun import ReadTorchrun
from samestep.translate.write_accelerate import WriteAccelerate
from samestep.translate.write_deepspeed import WriteDeepSpeed

READERS: Mapping[str, Reader] = {
    "accelerate": ReadAccelerate(),
    "deepspeed": ReadDeepSpeed(),
    "sagemaker": ReadSageMaker(),
    "torchrun": ReadTorchrun(),
}

WRITERS: Mapping[str, Writer] = {
    "accelerate": WriteAccelerate(),
    "deepspeed": WriteDeepSpeed(),
}
