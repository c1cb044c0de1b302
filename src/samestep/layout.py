"""Layout: how a training is spread over processes. Its text form, its sizes, and every rule about them."""

import difflib
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields, replace
from typing import Literal, get_args

from samestep.errors import LayoutError
from samestep.limits import MOST_LAYERS, MOST_RANKS, divisors, in_words, read_whole

Schedule = Literal["gpipe", "1f1b", "interleaved-1f1b", "interleaved-zero-bubble", "zbv-zero-bubble"]
Recompute = Literal["none", "selective", "full"]
Offload = Literal["none", "activations", "optimizer", "optimizer-disk", "parameters", "parameters-disk"]
SequenceOption = Literal["whole", "split"]
AttentionOption = Literal["ulysses", "ring"]
Balance = Literal["speed", "memory"]

# Mesh axes, outermost first: the axis with the most communication gets the nearest ranks.
MESH_AXES = ("pipeline", "replicate", "shard", "expert", "context", "tensor")

# How an axis is written in a layout's text.
_LETTERS = {
    "pp": "pipeline",
    "dp": "replicate",
    "fsdp": "shard",
    "ep": "expert",
    "cp": "context",
    "tp": "tensor",
}
_SHORT = {name: letters for letters, name in _LETTERS.items()}
_OPTIONS: Mapping[str, tuple[str, ...]] = {
    "schedule": get_args(Schedule),
    "recompute": get_args(Recompute),
    "offload": get_args(Offload),
    "sequence": get_args(SequenceOption),
    "attention": get_args(AttentionOption),
    "balance": get_args(Balance),
}

# Schedules that are made for several stages a rank.
_FEWEST_STAGES: Mapping[str, int] = {"interleaved-1f1b": 2, "zbv-zero-bubble": 2}

# Offloads that go together. Parameters take the optimizer's state along.
_OFFLOADS_TOGETHER = [["activations", other] for other in get_args(Offload) if other not in ("none", "activations")]

# An order need not name ep, whose ranks then stand within those of fsdp.
DEFAULT_ORDER = ".".join(_SHORT[name] for name in MESH_AXES if name != "expert")

# Orders with a name, as SageMaker's placement_strategy has them: a model's ranks side by side, or replicas.
PLACEMENTS: Mapping[str, str] = {"cluster": "dp.fsdp.pp.cp.tp", "spread": "cp.tp.pp.dp.fsdp"}

# A preset is a layout with an axis of unknown size, which takes the processes that are left.
PRESETS: Mapping[str, str] = {
    "single": "",
    "ddp": "dp",
    "fsdp": "fsdp",
    "zero1": "zero1x",
    "zero2": "zero2x",
    "zero3": "fsdp",
    "hsdp": "dp2 fsdp",
    "3d": "pp2 dp tp2",
}

_LONGEST = 400  # characters of a layout's text

_SIZED = re.compile(r"(pp|dp|fsdp|ep|cp|tp)([0-9]*)")
_ZERO = re.compile(r"zero([123])x([0-9]*)")
_EXAMPLES = "write parts such as pp2 dp2 fsdp2 ep2 cp2 tp2 zero1x4, or one of " + ", ".join(PRESETS)


@dataclass(frozen=True, kw_only=True)
class ModelShape:
    """The sizes of a model that a layout must divide; None where the model has no such thing."""

    heads: int | None = None
    key_value_heads: int | None = None
    layers: int | None = None
    sequence_length: int | None = None


@dataclass(frozen=True, kw_only=True)
class Layout:
    """The size of each mesh axis, and the options of the layout."""

    pipeline: int = 1
    replicate: int = 1
    shard: int = 1
    expert: int = 1  # data ranks that share out the experts of a mixture
    context: int = 1
    tensor: int = 1
    zero: int = 0  # what is sharded over `shard`: 1 optimizer state, 2 + gradients, 3 + parameters
    schedule: Schedule = "1f1b"
    stages: int = 1  # pipeline stages a rank holds, where the schedule is not made for more
    recompute: Recompute = "none"
    offload: str = "none"  # an Offload, or several that go together: activations+optimizer
    sequence: SequenceOption = "whole"  # split: between its slices tensor parallel also splits the tokens
    # How tokens that context parallel splits meet: ranks exchange heads for tokens, or pass on keys and values.
    attention: AttentionOption = "ulysses"
    balance: Balance = "speed"  # what is equal for pipeline stages: the time they take, or the memory they fill
    order: str = DEFAULT_ORDER  # of the mesh axes over the ranks, outermost first; or a name in PLACEMENTS

    def __post_init__(self) -> None:
        """Raise LayoutError for sizes and options that no layout has; none of this depends on a model."""
        for name in (*MESH_AXES, "stages"):
            if getattr(self, name) < 1:
                raise LayoutError(f"layout: {name} is {getattr(self, name)}; it must be 1 or more")
        if self.stages > MOST_LAYERS:
            raise LayoutError(f"layout: stages is {self.stages}; it must be {MOST_LAYERS:,} or less")
        if self.size > MOST_RANKS:
            raise LayoutError(f"layout: its sizes make {self.size:,} processes; use {MOST_RANKS:,} or fewer")
        for name in _OPTIONS:
            if wrong := _wrong_choice(name, getattr(self, name)):
                raise LayoutError(f"layout: {name} is {getattr(self, name)!r}; {wrong}")
        object.__setattr__(self, "order", PLACEMENTS.get(self.order, self.order))
        if sorted(_whole_order(self.order)) != sorted(_LETTERS):
            named = ", ".join(letters for letters in _LETTERS if letters != "ep")
            raise LayoutError(
                f"layout: order is {self.order!r}; it can be {', '.join(PLACEMENTS)}, or name each of "
                f"{named} once, outermost first, such as {DEFAULT_ORDER}"
            )
        if self.zero not in (0, 1, 2, 3):
            raise LayoutError(f"layout: zero is {self.zero}; it can be 0, 1, 2 or 3")
        if self.shard > 1 and not self.zero:
            raise LayoutError(f"layout: shard is {self.shard} and zero is 0; zero must be 1, 2 or 3")
        if self.shard == 1 and self.zero:
            object.__setattr__(self, "zero", 0)  # nothing to shard over: the same as no sharding

    @classmethod
    def parse(cls, text: str, processes: int | None = None) -> "Layout":
        """Read a layout such as "pp2 dp2 tp2", "zero1x4 recompute=full" or "ddp".

        A part without a size ("ddp", "dp tp2") takes the processes that are left over by the others.
        Raises LayoutError where the text can't be read or the sizes don't fit `processes`.
        """
        values, unsized = _read(text)
        _check_options(text, values, unsized)
        if unsized is not None:
            if processes is None:
                raise LayoutError(
                    f'layout "{text}": {axis_in_words(unsized)} has no size and the number of processes is not '
                    f"known; write a size, such as {_SHORT[unsized]}2, or give the number of processes"
                )
            values[unsized] = _left_over(text, values, processes)
        layout = cls(**values)  # type: ignore[arg-type]
        if processes is not None:
            layout.check_processes(processes, text)
        return layout

    @property
    def size(self) -> int:
        """Processes that the layout needs."""
        return self.pipeline * self.replicate * self.shard * self.expert * self.context * self.tensor

    @property
    def cuts_model(self) -> bool:
        """Whether ranks hold parts of the model's own computation, and not just of its parameters."""
        return self.pipeline * self.context * self.tensor > 1

    @property
    def stages_a_rank(self) -> int:
        """Pipeline stages that a rank holds: at least as many as the schedule is made for."""
        return max(self.stages, _FEWEST_STAGES.get(self.schedule, 1))

    @property
    def data_ranks(self) -> int:
        """Ranks that see different samples: replicas, shards and those that share out experts."""
        return self.replicate * self.shard * self.expert

    def offloads(self, what: Offload) -> bool:
        """Whether this is one of the things that are moved away from the device."""
        return what in self.offload.split("+")

    @property
    def offloads_parameters(self) -> bool:
        """Whether parameters are kept away from the device, in the host's memory or on disk."""
        return self.offloads("parameters") or self.offloads("parameters-disk")

    def mesh_shape(self) -> tuple[int, ...]:
        return tuple(getattr(self, name) for name in MESH_AXES)

    @property
    def placement(self) -> tuple[str, ...]:
        """The mesh axes in the order in which ranks are numbered, outermost first."""
        return tuple(_LETTERS[letters] for letters in _whole_order(self.order))

    def split_axes(self) -> tuple[str, ...]:
        return tuple(name for name in MESH_AXES if getattr(self, name) > 1)

    def __str__(self) -> str:
        """The text that `parse` reads back to the same layout; sizes of 1 and defaults are left out."""
        parts = []
        for letters, name in _LETTERS.items():
            size = getattr(self, name)
            if size > 1:
                parts.append(f"zero{self.zero}x{size}" if name == "shard" and self.zero < 3 else f"{letters}{size}")
        plain = {field.name: field.default for field in fields(self)}
        parts += [
            f"{name}={getattr(self, name)}"
            for name in ("schedule", "stages", "recompute", "offload", "sequence", "attention", "balance", "order")
            if getattr(self, name) != plain[name]
        ]
        return " ".join(parts) or "single"

    def check_processes(self, processes: int, text: str | None = None) -> None:
        """Raise LayoutError unless the layout needs exactly this many processes."""
        if self.size == processes:
            return
        need = f'layout "{text or self}" needs {_processes(self.size)}, not {processes}'
        rest = self.size // self.replicate
        if processes >= 1 and processes % rest == 0:
            fix = f'"{replace(self, replicate=processes // rest)}" would use {_processes(processes)}'
        else:
            fix = f"ask for {_processes(self.size)}"
        raise LayoutError(f"{need}; {fix}")

    def check_batch(self, batch: int, micro_batch: int | None) -> None:
        """Raise LayoutError where a global batch of `batch` samples can't be cut as the layout needs.

        Data ranks take slices of any length, so only too small a batch is refused there; a pipeline
        wants at least one micro-batch a stage.
        """
        if batch < self.data_ranks:
            raise LayoutError(
                f'layout "{self}": a batch of {batch} leaves some of its {self.data_ranks} data ranks without a '
                f"sample; use a batch of {self.data_ranks} or more"
            )
        if self.pipeline > 1 and micro_batch is not None:
            per_rank = -(-batch // self.data_ranks)
            count = -(-per_rank // micro_batch)
            if count < self.pipeline:
                largest = -(-per_rank // (self.pipeline - 1)) - 1  # of which a rank's samples fill every stage
                fix = (
                    f"use a micro_batch of {largest} or less"
                    if largest
                    else f"use a batch of {self.pipeline * self.data_ranks} or more in micro-batches of 1"
                )
                raise LayoutError(
                    f'layout "{self}": {per_rank} samples a rank in micro-batches of {micro_batch} make {count}, '
                    f"fewer than the {self.pipeline} pipeline ranks; {fix}"
                )

    def check_model(self, shape: ModelShape) -> None:
        """Raise LayoutError where the model's sizes are not divisible as the layout needs.

        Of fewer key-value heads than ranks several ranks keep the same one.
        """
        self._check_divides("tensor", shape.heads, "attention heads", shape.heads)
        stages = self.pipeline * self.stages_a_rank
        if shape.layers is not None and self.pipeline > 1 and shape.layers < stages:
            raise LayoutError(
                f'layout "{self}": {stages} pipeline stages for {shape.layers} layers; use '
                f"{shape.layers} stages or fewer"
            )

    def _check_divides(self, axis: str, total: int | None, what: str, divisible: int | None) -> None:
        """Refuse an axis that doesn't divide `total`; the error names parts that divide `divisible`."""
        parts, letters = getattr(self, axis), _SHORT[axis]
        if total is None or divisible is None or total % parts == 0:
            return
        nearest = sorted(sorted(divisors(divisible), key=lambda n: abs(n - parts))[:6])
        fitting = _either([f"{letters}{n}" for n in nearest])
        raise LayoutError(f'layout "{letters}{parts}": {total} {what} are not divisible by {parts}; use {fitting}')


def _whole_order(order: str) -> list[str]:
    """The letters of an order, with ep after fsdp where it is not named."""
    letters = order.split(".")
    if "ep" not in letters and "fsdp" in letters:
        letters.insert(letters.index("fsdp") + 1, "ep")
    return letters


def _processes(count: int) -> str:
    return f"{count} process{'' if count == 1 else 'es'}"


def _either(choices: Sequence[str]) -> str:
    return " or ".join([", ".join(choices[:-1]), choices[-1]] if len(choices) > 1 else choices)


def axis_in_words(axis: str) -> str:
    """A mesh axis by its letters in a layout and its name: fsdp (shard)."""
    return f"{_SHORT[axis]} ({axis})"


def unsized(text: str) -> bool:
    """Whether a layout's text leaves a size to be filled in from the number of processes."""
    return _read(text)[1] is not None


def _read(text: str) -> tuple[dict[str, int | str], str | None]:
    """The values in a layout's text, and the axis that has no size there."""
    if len(text) > _LONGEST:
        raise LayoutError(f'layout "{text[:40]}..." has {len(text):,} characters; use {_LONGEST} or fewer')
    values: dict[str, int | str] = {}
    without_size: str | None = None
    for part in _expand(text.split()):
        axis, size = _read_part(text, part, values)
        if axis is None:
            continue
        if axis in values or axis == without_size:
            also = " (zero and fsdp are two ways to write it)" if axis == "shard" else ""
            raise LayoutError(f'layout "{text}": {axis_in_words(axis)} is given twice; give it once{also}')
        if size is not None:
            values[axis] = size
        elif without_size is None:
            without_size = axis
        else:
            raise LayoutError(
                f'layout "{text}": {axis_in_words(without_size)} and {axis_in_words(axis)} both have no size; '
                f"give one of them a size, such as {_SHORT[axis]}2"
            )
    return values, without_size


_OF_PIPELINES = ("schedule", "stages", "balance")


def _check_options(text: str, values: Mapping[str, int | str], unsized: str | None) -> None:
    """Raise LayoutError for an option of pipelines in a text without one: it would do nothing.

    What needs the tensor or the context axis is refused with the engine's other limits.
    """
    if "pipeline" in values or unsized == "pipeline":
        return
    plain = {field.name: field.default for field in fields(Layout)}
    for option in _OF_PIPELINES:
        if values.get(option, plain[option]) != plain[option]:
            raise LayoutError(
                f'layout "{text}": {option}={values[option]} is of {axis_in_words("pipeline")}, and the layout has '
                f"none; write such as pp2 beside it, or leave {option}= out"
            )


def _near(part: str) -> str:
    """Suggest the part that a mistyped one is closest to: "dpp2" is dp2."""
    match = re.fullmatch(r"([a-z]+)(\d+)", part)
    near = difflib.get_close_matches(match[1], _LETTERS, n=1) if match else []
    return f'did you mean "{near[0]}{match[2]}"? ' if match and near else ""


def _expand(parts: Sequence[str]) -> list[str]:
    """Replace presets by the parts that they stand for."""
    return [part for word in parts for part in (PRESETS[word].split() if word in PRESETS else [word])]


def _read_part(text: str, part: str, values: dict[str, int | str]) -> tuple[str | None, int | None]:
    """The axis and size of one part; adds an option to `values` and returns (None, None)."""
    if "=" in part:
        name, _, value = part.partition("=")
        if name in values:
            raise LayoutError(f'layout "{text}": {name}= is given twice; give it once')
        values[name] = _read_option(text, name, value)
        return None, None
    if match := _ZERO.fullmatch(part):
        values["zero"] = int(match[1])
        axis, digits = "shard", match[2]
    elif match := _SIZED.fullmatch(part):
        axis, digits = _LETTERS[match[1]], match[2]
        if axis == "shard":
            values["zero"] = 3
    else:
        raise LayoutError(f'layout "{text}": "{part}" is not a part of a layout; {_near(part)}{_EXAMPLES}')
    size = read_whole(digits)
    if digits and (size is None or not 1 <= size <= MOST_RANKS):
        raise LayoutError(f'layout "{text}": "{part}" has size {digits}; it must be {in_words(1, MOST_RANKS)}')
    return axis, size


def _read_option(text: str, name: str, value: str) -> int | str:
    """The value of an option of a layout's text. Raises LayoutError for an unknown one."""
    if name == "stages":
        stages = read_whole(value)
        if stages is not None and 1 <= stages <= MOST_LAYERS:
            return stages
        raise LayoutError(f'layout "{text}": stages={value}; it must be {in_words(1, MOST_LAYERS)}')
    if name == "order":
        return value
    if name not in _OPTIONS:
        raise LayoutError(f'layout "{text}": no option "{name}"; there are stages, order, {", ".join(_OPTIONS)}')
    if wrong := _wrong_choice(name, value):
        raise LayoutError(f'layout "{text}": {name}={value}; {wrong}')
    return value


def _wrong_choice(name: str, value: str) -> str | None:
    """What to use instead of an option's value; None where it is right."""
    if name == "offload" and "+" in value:
        parts = value.split("+")
        if sorted(parts) in _OFFLOADS_TOGETHER:
            return None
        return f"together there are {_either(['+'.join(pair) for pair in _OFFLOADS_TOGETHER])}"
    return None if value in _OPTIONS[name] else f"it can be {', '.join(_OPTIONS[name])}"


def _left_over(text: str, values: Mapping[str, int | str], processes: int) -> int:
    """Processes that are left for the part without a size. Raises LayoutError where they don't divide."""
    taken = 1
    for name in MESH_AXES:
        taken *= int(values.get(name, 1))
    if processes < 1 or processes % taken:
        why = "" if taken == 1 else f", which is no multiple of the {taken} that its sized parts take"
        raise LayoutError(
            f'layout "{text}" was given {_processes(processes)}{why}; use '
            f"{_either([str(taken * n) for n in (1, 2, 3)])}"
        )
    return processes // taken
