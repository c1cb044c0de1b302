"""An exported or converted model beside the trained one: the first module whose output departs, and why.

What an export may do is done to the trained model as well before they are compared: adapters are merged, and weights
are rounded to the types in the exported files. What remains is the rounding of a sum.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from samestep.convert.published import Published, published
from samestep.errors import UserError
from samestep.tasks.transformers_model import positions

TOLERANCE = 1e-5  # of a module's output, relative to its norm
_ROWS, _LENGTH = 2, 64
_TEXTS = (
    "The quick brown fox jumps over 13 lazy dogs.",
    "  Zwei Wörter,\n\tund 中文字符 – naïve café 😀",
    "def f(x): return {'a': x**2}",
)
_CHAT = (
    {"role": "user", "content": "What is 2 + 2?"},
    {"role": "assistant", "content": "4."},
    {"role": "user", "content": "And 3 + 3?"},
)
# Keys of a configuration that say where it comes from, not what is computed.
_NOT_COMPUTED = {"_name_or_path", "transformers_version", "dtype", "torch_dtype", "use_cache", "architectures"}


@dataclass(frozen=True, kw_only=True)
class Departure:
    """The first thing in which the exported model is another one."""

    kind: str  # missing-weights, other-class, adapters-not-merged, forward-differs, tokenizer, chat-template
    module: str | None
    relative: float | None  # of the module's output
    reason: str

    @property
    def line(self) -> str:
        where = f"{self.module}: " if self.module is not None else ""
        apart = f" (apart by {self.relative:.2g} of its output)" if self.relative is not None else ""
        return f"{where}{self.reason}{apart} [{self.kind}]"


@dataclass(frozen=True, kw_only=True)
class Beside:
    """The verdict on an exported model."""

    trained: Path
    exported: Path
    departure: Departure | None
    logits: float | None  # how far the results are apart, relative
    modules: int  # whose outputs were compared
    notes: tuple[str, ...] = ()

    @property
    def same(self) -> bool:
        return self.departure is None

    def to_json(self) -> dict[str, Any]:
        departure = self.departure
        return {
            "same_model": self.same,
            "trained": str(self.trained),
            "exported": str(self.exported),
            "kind": departure.kind if departure is not None else None,
            "module": departure.module if departure is not None else None,
            "relative": departure.relative if departure is not None else None,
            "reason": departure.reason if departure is not None else None,
            "logits": self.logits,
            "modules": self.modules,
            "notes": list(self.notes),
        }


def compare(trained: Path, exported: Path) -> Beside:
    """Compare two folders' models on the same inputs. Raises UserError where one can't be built or called."""
    with published(trained) as trained_model, published(exported) as exported_model, torch.no_grad():
        return _compared(trained_model, exported_model)


def _compared(trained: Published, other: Published) -> Beside:
    notes: list[str] = []
    departure = _other_class(trained, other) or _missing(other) or _not_merged(trained, other)
    logits, modules = None, 0
    if departure is None:
        inputs = _inputs(trained)
        exact = _results(_call(trained, inputs))
        notes += _rounded(trained, other)
        expected, results = _outputs(trained, inputs)
        got, other_results = _outputs(other, inputs)
        logits, modules = _apart(results, other_results), len(expected)
        departure = _first(expected, got, trained, other) or _of_results(logits, trained, other)
        if departure is None and notes:
            notes.append(f"by that rounding the results move by {_apart(exact, results):.2g}")
    departure = departure or _tokenized(trained, other) or _templated(trained, other)
    return Beside(
        trained=trained.folder,
        exported=other.folder,
        departure=departure,
        logits=logits,
        modules=modules,
        notes=tuple(notes),
    )


def _other_class(trained: Published, other: Published) -> Departure | None:
    ours, theirs = type(trained.model).__name__, type(other.model).__name__
    if ours == theirs:
        return None
    return Departure(
        kind="other-class",
        module=None,
        relative=None,
        reason=f"the exported model is a {theirs}, the trained a {ours}",
    )


def _missing(other: Published) -> Departure | None:
    """Tensors that the exported files lack, or have in another shape: they are drawn anew when it is loaded."""
    if not other.absent:
        return None
    first, *others = other.absent
    more = f" and {len(others)} more" if others else ""
    return Departure(
        kind="missing-weights",
        module=first.rpartition(".")[0],
        relative=None,
        reason=f"the files have no {first}{more} of the model's shape, so it is drawn at random",
    )


def _not_merged(trained: Published, other: Published) -> Departure | None:
    """Adapters that the export left out: its weights are the base's, where the adapters change them."""
    if trained.base is None:
        return None
    theirs = other.model.state_dict()
    changed = [
        name
        for name, value in trained.model.state_dict().items()
        if name in trained.base and name in theirs and not torch.equal(_as_stored(value, name, other), theirs[name])
    ]
    left = [name for name in changed if torch.equal(_as_stored(trained.base[name], name, other), theirs[name])]
    left = [name for name in left if not torch.equal(trained.base[name], trained.model.state_dict()[name])]
    if not left:
        return None
    return Departure(
        kind="adapters-not-merged",
        module=left[0].rpartition(".")[0],
        relative=None,
        reason=f"{left[0]} is the base's: the adapters are not merged into {len(left)} weights",
    )


def _as_stored(value: Tensor, name: str, other: Published) -> Tensor:
    """A weight, rounded as the exported file rounds it."""
    dtype = other.dtype_of(name)
    if dtype is None or not (value.is_floating_point() and dtype.is_floating_point):
        return value
    return value.to(dtype).to(value.dtype)


def _rounded(trained: Published, other: Published) -> list[str]:
    """Round the trained weights to the types in the exported files; what was done."""
    count: dict[tuple[torch.dtype, torch.dtype], int] = {}
    for name, value in trained.model.state_dict().items():
        before, after = trained.dtype_of(name), other.dtype_of(name)
        if before is None or after is None or before == after or not value.is_floating_point():
            continue
        if after.is_floating_point and torch.finfo(after).eps > torch.finfo(before).eps:
            value.copy_(_as_stored(value, name, other))
            count[before, after] = count.get((before, after), 0) + 1
    return [
        f"{number} tensors are {_name(after)} in the files, and were trained as {_name(before)}"
        for (before, after), number in count.items()
    ]


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _inputs(trained: Published) -> dict[str, Tensor]:
    """The same random inputs for both models. Raises UserError for a model that takes neither tokens nor images."""
    config, generator = trained.config.get_text_config(), torch.Generator().manual_seed(0)
    main_input = getattr(trained.model, "main_input_name", None)
    if main_input == "pixel_values" and isinstance(getattr(trained.config, "image_size", None), int):
        size, channels = trained.config.image_size, getattr(trained.config, "num_channels", 3)
        return {"pixel_values": torch.randn(_ROWS, channels, size, size, generator=generator)}
    if main_input != "input_ids" or not isinstance(getattr(config, "vocab_size", None), int):
        raise UserError(
            f"{trained.folder}: {type(trained.model).__name__} takes {main_input}, and verify --against makes token "
            "ids and images only; compare such a model by a script of its own"
        )
    most = positions(trained.model) or getattr(config, "max_position_embeddings", None) or _LENGTH
    length = min(_LENGTH, most)
    tokens = torch.randint(config.vocab_size, (_ROWS, length), generator=generator)
    if getattr(trained.config, "is_encoder_decoder", False):
        return {"input_ids": tokens, "decoder_input_ids": tokens.flip(1)}
    return {"input_ids": tokens}


def _call(side: Published, inputs: Mapping[str, Tensor]) -> Any:
    """The model's result. Raises UserError where it needs other inputs, or can't be computed."""
    try:
        return side.model(**inputs)
    except Exception as error:  # each model has checks of its own
        reason = " ".join(str(error).split()) or type(error).__name__
        raise UserError(
            f"{side.folder}: {type(side.model).__name__} can't be called with {', '.join(inputs)} alone: {reason}; "
            "compare such a model by a script of its own"
        ) from error


def _outputs(side: Published, inputs: Mapping[str, Tensor]) -> tuple[list[tuple[str, Tensor]], Tensor]:
    """Each module's output in the order in which modules end, and the model's own."""
    outputs: list[tuple[str, Tensor]] = []

    def note(name: str, result: Any) -> None:
        if (value := next(_tensors(result), None)) is not None:
            outputs.append((name, value.detach().float().clone()))

    handles = [
        module.register_forward_hook(lambda _module, _inputs, result, name=name: note(name, result))
        for name, module in side.model.named_modules()
        if name
    ]
    try:
        result = _call(side, inputs)
    finally:
        for handle in handles:
            handle.remove()
    return outputs, _results(result)


def _results(result: Any) -> Tensor:
    return next(_tensors(result)).detach().float()


def _tensors(result: Any) -> Iterator[Tensor]:
    """The tensors of numbers in a module's result."""
    if isinstance(result, Tensor):
        if result.is_floating_point():
            yield result
    elif isinstance(result, Mapping):
        for value in result.values():
            yield from _tensors(value)
    elif isinstance(result, list | tuple):
        for value in result:
            yield from _tensors(value)


def _apart(expected: Tensor, got: Tensor) -> float:
    """The distance of two outputs, relative to the first; infinite where they can't be compared."""
    if expected.shape != got.shape:
        return float("inf")
    size = expected.double().norm().item()
    distance = (expected.double() - got.double()).norm().item()
    return distance / size if size else distance


def _first(
    expected: list[tuple[str, Tensor]], got: list[tuple[str, Tensor]], trained: Published, other: Published
) -> Departure | None:
    """The first module whose output departs by more than rounding, and what of it is another."""
    limit = _tolerance(trained, other)
    for (name, value), (other_name, other_value) in zip(expected, got, strict=False):
        relative = _apart(value, other_value) if name == other_name else float("inf")
        if relative <= limit:
            continue
        return Departure(kind="forward-differs", module=name, relative=relative, reason=_reason(name, trained, other))
    if len(expected) != len(got):
        reason = f"the exported model calls {len(got)} modules, the trained {len(expected)}"
        return Departure(kind="forward-differs", module=None, relative=None, reason=reason)
    return None


def _of_results(apart: float, trained: Published, other: Published) -> Departure | None:
    """Results that depart though no module's output does, as by a factor that the model's own forward applies."""
    if apart <= _tolerance(trained, other):
        return None
    settings = _other_settings(trained.config.to_dict(), other.config.to_dict())
    reason = "; ".join(settings[:4]) or "the results differ, and no module's output"
    return Departure(kind="forward-differs", module=None, relative=apart, reason=reason)


def _tolerance(trained: Published, other: Published) -> float:
    """What counts as rounding. A merge in a type of few bits may round a weight to the number beside."""
    coarse = max((torch.finfo(dtype).eps for dtype in other.dtypes.values() if dtype.is_floating_point), default=0.0)
    return max(TOLERANCE, 2 * coarse if trained.base is not None and coarse > 1e-6 else 0.0)


def _reason(name: str, trained: Published, other: Published) -> str:
    """What is another one in the module that departs first: weights, the configuration, or else its buffers."""
    ours, theirs = (side.model.get_submodule(name) for side in (trained, other))
    reasons = _other_tensors(name, dict(ours.named_parameters()), dict(theirs.named_parameters()))
    reasons += _other_settings(trained.config.to_dict(), other.config.to_dict())
    reasons = reasons or _other_tensors(name, dict(ours.named_buffers()), dict(theirs.named_buffers()))
    return "; ".join(reasons[:4]) or "gives other results for equal weights and settings"


def _other_tensors(name: str, ours: Mapping[str, Tensor], theirs: Mapping[str, Tensor]) -> list[str]:
    return [
        f"{name}.{tensor_name} {how}"
        for tensor_name, value in ours.items()
        if (how := _how(value, theirs.get(tensor_name)))
    ]


def _how(value: Tensor, other: Tensor | None) -> str | None:
    """How a tensor differs from the trained one; None where it doesn't."""
    if other is None:
        return "is not there"
    if value.shape != other.shape:
        return f"has shape {list(other.shape)} instead of {list(value.shape)}"
    apart = _apart(value, other)
    if apart <= TOLERANCE:
        return None
    for dtype in (torch.bfloat16, torch.float16):
        if torch.equal(value.to(dtype).float(), other):
            return f"has been rounded to {_name(dtype)}"
    flat, other_flat = value.double().flatten(), other.double().flatten()
    ratio = (flat @ other_flat / (flat @ flat)).item() if flat.any() else 0.0
    if ratio and (other_flat - ratio * flat).norm() <= TOLERANCE * other_flat.norm():
        return f"is {ratio:.4g} times the trained one"
    if value.dim() == 2 and value.shape[0] == value.shape[1] and _apart(value.T, other) <= TOLERANCE:
        return "is transposed"
    if value.dim() and _apart(_rows_in_order(value), _rows_in_order(other)) <= TOLERANCE:
        return "has the trained rows in another order, as between two layouts of rotary embeddings"
    return f"is apart by {apart:.2g}"


def _rows_in_order(value: Tensor) -> Tensor:
    rows = value.reshape(value.shape[0], -1).double()
    key = rows @ torch.cos(1.7 * torch.arange(rows.shape[1], dtype=torch.float64))
    return rows[key.argsort()]


def _other_settings(ours: Mapping[str, Any], theirs: Mapping[str, Any], prefix: str = "") -> list[str]:
    """Keys of the configuration that have other values, as far as they are computed with."""
    lines: list[str] = []
    for key in sorted({*ours, *theirs} - _NOT_COMPUTED):
        value, other = ours.get(key), theirs.get(key)
        if isinstance(value, Mapping) and isinstance(other, Mapping):
            lines += _other_settings(value, other, f"{prefix}{key}.")
        elif value != other:
            lines.append(f"config.json has {prefix}{key} {other} instead of {value}")
    return lines


def _tokenized(trained: Published, other: Published) -> Departure | None:
    """A text that the exported tokenizer cuts otherwise."""
    if trained.tokenizer is None:
        return None
    if other.tokenizer is None:
        return Departure(kind="tokenizer", module=None, relative=None, reason="the exported folder has no tokenizer")
    for text in _TEXTS:
        ours, theirs = list(trained.tokenizer(text)["input_ids"]), list(other.tokenizer(text)["input_ids"])
        if ours != theirs:
            at = next((at for at, pair in enumerate(zip(ours, theirs, strict=False)) if pair[0] != pair[1]), None)
            at = min(len(ours), len(theirs)) if at is None else at
            near = f"{theirs[at : at + 3]} instead of {ours[at : at + 3]}"
            reason = f"{text!r} becomes other ids from token {at + 1} on: {near}"
            return Departure(kind="tokenizer", module=None, relative=None, reason=reason)
    return None


def _templated(trained: Published, other: Published) -> Departure | None:
    """A chat that the exported template writes otherwise."""
    ours, theirs = (getattr(side.tokenizer, "chat_template", None) for side in (trained, other))
    if ours is None and theirs is None:
        return None
    if ours is None or theirs is None:
        has, lacks = ("trained", "exported") if theirs is None else ("exported", "trained")
        reason = f"the {has} model has a chat template, the {lacks} has none"
        return Departure(kind="chat-template", module=None, relative=None, reason=reason)
    texts = [_chat(side.tokenizer) for side in (trained, other)]
    if texts[0] == texts[1]:
        return None
    at = next((at for at, pair in enumerate(zip(*texts, strict=False)) if pair[0] != pair[1]), min(map(len, texts)))
    near = [text[max(0, at - 10) : at + 20] for text in texts]
    reason = f"a chat is written otherwise from character {at + 1} on: {near[1]!r} instead of {near[0]!r}"
    return Departure(kind="chat-template", module=None, relative=None, reason=reason)


def _chat(tokenizer: Any) -> str:
    from jinja2 import TemplateError

    try:
        return tokenizer.apply_chat_template(list(_CHAT), tokenize=False, add_generation_prompt=True)
    except TemplateError as error:
        return f"the template fails: {error}"
