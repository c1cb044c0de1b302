"""Refuses proofs that can't fail: one process compared with itself.

The reference is the native engine in one process, in float64, with the whole batch in one forward. A job of one
process is compared with it only where it computes something otherwise.
"""

from samestep.engines import registry as engines
from samestep.errors import LayoutError
from samestep.job import Job, Run
from samestep.launch.device import device_of
from samestep.layout import Layout
from samestep.ranks import DeviceChoice

# Keys of a job's run with which one process computes its step otherwise than the reference.
_KEYS = ("engine_config", "reduction", "compile", "loss_chunk")
_OPTIONS = ("recompute", "offload")  # of a layout, likewise


def check_other_side(
    job: Job, layout: Layout, *, text: str, precision: str | None, reference_device: DeviceChoice
) -> None:
    """Raise LayoutError where a proof of a layout, given as `text`, would compare one process with itself."""
    run = job.run
    differs = (
        type(engines.resolve(run.engine)) is not type(engines.resolve(Run().engine))
        or any(getattr(run, key) != getattr(Run(), key) for key in _KEYS)
        or (run.micro_batch is not None and run.micro_batch < job.recipe.batch)
        or precision not in (None, "fp64")
        or (reference_device == "cpu" and device_of(0, run.device).type != "cpu")
    )
    if not differs:
        check_layout_splits(layout, text)


def check_layout_splits(layout: Layout, text: str) -> None:
    """Raise LayoutError for a layout under which one process computes the step as it does without one."""
    plain = Layout()
    if layout.size == 1 and all(getattr(layout, name) == getattr(plain, name) for name in _OPTIONS):
        raise LayoutError(
            f'layout "{text}" is one process here, which would be compared with itself; name the layout to prove, '
            'such as --layout dp2 or --layout fsdp2 (layout="dp2" in Python)'
        )
