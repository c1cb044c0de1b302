"""What the keys of a ds_config.json mean: its ZeRO stage, precision, batch sizes, offload and optimizer.

The engine reads a job's values from them here, and `translate` a job. Where versions of DeepSpeed have several forms
of a key, the older ones are read as DeepSpeed itself reads them.
"""

from collections.abc import Callable, Container, Mapping
from math import prod
from typing import Any

from samestep.engines.config_file import switch_of
from samestep.errors import UserError
from samestep.recipe import SGD, AdamW

SIZES = ("train_batch_size", "train_micro_batch_size_per_gpu", "gradient_accumulation_steps")

# The sections of offload, and the switches that stood for them in older versions.
OFFLOADS = {"offload_optimizer": "cpu_offload", "offload_param": "cpu_offload_param"}


def value_of(section: Mapping[str, Any], name: str) -> Any:
    """A value of the configuration; None if it is missing or "auto"."""
    value = section.get(name)
    return None if value == "auto" else value


def has_auto(section: Any) -> bool:
    """Whether a section has a value "auto", which the program that starts DeepSpeed must fill in."""
    if isinstance(section, Mapping):
        return any(has_auto(value) for value in section.values())
    return section == "auto"


def zero_of(config: Mapping[str, Any]) -> Mapping[str, Any]:
    """The section `zero_optimization` in today's form: true is stage 1, and `cpu_offload: true` is a section."""
    section = value_of(config, "zero_optimization")
    if isinstance(section, bool):
        size = {"allgather_bucket_size": config["allgather_size"]} if section and "allgather_size" in config else {}
        return {"stage": int(section), **size}
    if section is None:
        return {}
    if not isinstance(section, Mapping):  # the caller reports that a section is wanted
        return section
    zero = dict(section)
    for new, old in OFFLOADS.items():
        if old in zero and new not in zero and (on := switch_of(zero[old])) is not None:
            del zero[old]
            zero |= {new: {"device": "cpu"}} if on else {}
    return zero


def stage_of(config: Mapping[str, Any]) -> int | None:
    """The ZeRO stage that a configuration asks for; None where it leaves it open."""
    stage = value_of(zero_of(config), "stage")
    if stage is not None and stage not in (0, 1, 2, 3):
        raise UserError(f"the DeepSpeed configuration has zero_optimization.stage {stage!r}; it can be 0, 1, 2 or 3")
    return stage


def offload_of(config: Mapping[str, Any], name: str) -> str | None:
    """The device of one of the sections of `OFFLOADS`: none, cpu or nvme; None where it is left open."""
    return value_of(zero_of(config).get(name) or {}, "device")


def bf16_key(keys: Container[str]) -> str:
    """The name of the bf16 section: DeepSpeed reads the older name, `bfloat16`, only if there is no `bf16`."""
    return "bf16" if "bf16" in keys else "bfloat16"


def precision_of(config: Mapping[str, Any]) -> str | None:
    """The precision that a configuration asks for; None where it leaves it open."""
    sections = {"fp16": "fp16", "bf16": bf16_key(config)}
    enabled_by_name = {name: switch_of(config.get(key, {}).get("enabled")) for name, key in sections.items()}
    if all(enabled_by_name.values()):
        raise UserError("the DeepSpeed configuration enables fp16 and bf16; use one of them")
    for name, enabled in enabled_by_name.items():
        if enabled:
            return name
    return "fp32" if False in enabled_by_name.values() else None


def clip_of(config: Mapping[str, Any]) -> float | None:
    return value_of(config, "gradient_clipping") or None


# The error of sizes that contradict each other: batch, micro-batch, accumulation, data ranks; None for what is open.
Differ = Callable[[int, int | None, int | None, int | None], UserError]


def solved(
    batch: int | None, micro: int | None, accumulation: int | None, ranks: int | None, differ: Differ
) -> tuple[int | None, int | None, int | None, int | None]:
    """The four sizes, with the one that was left open: batch = micro-batch x accumulation x data ranks.

    Where more are open they are returned as they are. Raises `differ`'s error for sizes that contradict this.
    """
    factors = [micro, accumulation, ranks]
    product = prod(factor for factor in factors if factor is not None)
    left_open = factors.count(None)
    if batch is None:
        return (product if not left_open else None), micro, accumulation, ranks
    if left_open == 0 and batch != product:
        raise differ(batch, micro, accumulation, ranks)
    if left_open == 1:
        if batch % product:
            raise differ(batch, micro, accumulation, ranks)
        factors[factors.index(None)] = batch // product
    return batch, factors[0], factors[1], factors[2]


# By the name of the `optimizer` section in small letters; all others are DeepSpeed's alone.
OPTIMIZERS: dict[str, type[AdamW] | type[SGD]] = {"adam": AdamW, "adamw": AdamW, "sgd": SGD}
DEFAULT_LR = 1e-3  # of an optimizer whose section says none
_PYTORCH_DECAY = 0.01  # of torch.optim.AdamW; DeepSpeed's own have none

# Parameters that recipes don't have, at the value at which they change no number.
NEUTRAL: dict[str, Any] = {"amsgrad": False, "bias_correction": True, "maximize": False, "dampening": 0}


def schema_of(section: Mapping[str, Any]) -> type[AdamW] | type[SGD] | None:
    """The recipe's optimizer of an `optimizer` section; None if recipes have none."""
    return OPTIMIZERS.get(str(section.get("type", "")).lower())


def adds_decay_to_gradient(section: Mapping[str, Any]) -> bool:
    """Whether weight decay is added to the gradient (Adam, Kingma & Ba 2015), not to the parameter (AdamW)."""
    return str(section["type"]).lower() == "adam" and section.get("params", {}).get("adam_w_mode", True) is False


def default_decay(section: Mapping[str, Any]) -> float:
    """The weight decay if an `optimizer` section has none: the default of the optimizer that DeepSpeed makes."""
    torch_decays = bool(section.get("params", {}).get("torch_adam")) and not adds_decay_to_gradient(section)
    return _PYTORCH_DECAY if torch_decays else 0.0
