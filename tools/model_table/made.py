"""Rows of made data for any head of transformers, by the names that its forward takes; nothing of it is for one type.

`Style` says how one model's rows look: which names, how large images and sounds are, how many placeholders stand for
an image in a text. `styles` offers those that a head may have, and the first with which its forward gives a finite
loss is taken (`fitting`).
"""

import math
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import product
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedConfig

from model_table.entry import Row, numbers, words
from model_table.tiny import SPECIAL, VOCABULARY, WIDTH, number_in

CLASSES = 3
_TRIED = 3  # rows


@dataclass(frozen=True, kw_only=True)
class Style:
    """How the rows of one model look."""

    registry: str
    names: Sequence[str]
    image: Sequence[int] = ()  # shape of a row's images, or of its patches
    grid: int = 0  # patches along an image's side, where they come in a row
    sound: Sequence[int] = ()  # shape of a row's sound
    frames: int = 0  # of its sound
    media: int = 0  # placeholders in a text for its image or sound
    token: int = 0  # the placeholder
    series: Sequence[int] = ()  # shape of the past of a time series
    future: int = 0
    labels: int = CLASSES

    def row(self, index: int) -> Row:
        return {name: MAKERS[name](self, index) for name in self.names}


def collate(rows: list[Row]) -> Mapping[str, Any]:
    """Rows as their usual collators put them together: texts padded, patches one behind the other, others stacked."""
    collated: dict[str, Any] = {}
    for name in rows[0]:
        values = [row[name] for row in rows]
        if isinstance(values[0], bool):
            collated[name] = values[0]
        elif isinstance(values[0], (Mapping, list)) or (name == "mask_labels" or name == "class_labels"):
            collated[name] = values
        elif name in _PADDED and values[0].ndim == 1:
            collated[name] = nn.utils.rnn.pad_sequence(values, batch_first=True, padding_value=_PADDED[name])
        elif name == "bbox":
            collated[name] = nn.utils.rnn.pad_sequence(values, batch_first=True)
        elif name in _JOINED and values[0].ndim == 2:
            collated[name] = torch.cat(values)
        else:
            collated[name] = torch.stack(values)
    return collated


_PADDED = {
    "input_ids": 0,
    "qformer_input_ids": 0,
    "qformer_attention_mask": 0,
    "attention_mask": 0,
    "labels": -100,
    "token_type_ids": 0,
    "mm_token_type_ids": 0,
}
_JOINED = ("pixel_values", "image_grid_thw")


def _text(style: Style, index: int) -> Tensor:
    """Words, behind the placeholders of an image or a sound. [tokens]"""
    length = 7 + index % 5 if style.registry not in _FIXED else 9
    text = words(index, length, VOCABULARY - SPECIAL, 4)
    return torch.cat([text[:2], torch.full((style.media,), style.token), text[2:]])


_FIXED = ("MULTIPLE_CHOICE", "ZERO_SHOT_IMAGE_CLASSIFICATION", "ZERO_SHOT_OBJECT_DETECTION")


def _words(style: Style, index: int) -> Tensor:
    if style.registry == "MULTIPLE_CHOICE":
        return torch.stack([_text(style, 10 * index + choice) for choice in range(2)])
    if style.registry == "ZERO_SHOT_IMAGE_CLASSIFICATION":
        return torch.cat([_text(style, index), torch.tensor([2])])  # the end, where the text's state is read
    return _text(style, index)


def _mask(style: Style, index: int) -> Tensor:
    """Of a text, or of a sound without one. [tokens] or [frames]"""
    return torch.ones_like(_words(style, index)) if "input_ids" in style.names else torch.ones(style.frames).long()


def _labels(style: Style, index: int) -> Any:
    """The labels of a head, by the registry that it stands in."""
    text = _text(style, index)
    if (
        style.registry in ("CAUSAL_LM", "IMAGE_TEXT_TO_TEXT", "MULTIMODAL_LM", "VISUAL_QUESTION_ANSWERING")
        or style.media
    ):
        return torch.where(text == style.token, -100, text) if style.media else text
    if style.registry == "MASKED_LM":
        return torch.where(torch.arange(len(text)) % 3 == index % 2, text, -100)
    if style.registry == "TOKEN_CLASSIFICATION":
        return text % style.labels
    if style.registry in ("SEQ_TO_SEQ_CAUSAL_LM", "SPEECH_SEQ_2_SEQ"):
        return words(index + 300, 5 + index % 3, VOCABULARY - SPECIAL, 4)
    if style.registry in ("CTC", "RNNT"):
        return words(index, 4, VOCABULARY - SPECIAL, 4)
    if style.registry == "AUDIO_FRAME_CLASSIFICATION":
        return torch.nn.functional.one_hot(words(index, style.media, style.labels, 0), style.labels).float()
    if style.registry in ("OBJECT_DETECTION", "ZERO_SHOT_OBJECT_DETECTION"):
        return {"class_labels": words(index, 2, style.labels, 0), "boxes": _boxes(index)}
    if style.registry == "SEMANTIC_SEGMENTATION":
        return words(index, math.prod(style.image[-2:]), style.labels, 0).reshape(*style.image[-2:])
    if style.registry == "MULTIPLE_CHOICE":
        return torch.tensor(index % 2)
    return torch.tensor(index % style.labels)


def _boxes(index: int) -> Tensor:
    """Centres and sizes of two boxes. [2, 4]"""
    return 0.2 + 0.3 * torch.rand(2, 4, generator=torch.Generator().manual_seed(index))


def _masks(style: Style, index: int) -> Tensor:
    """Of each of two objects, where it is. [2, height, width]"""
    masks = torch.zeros(2, *style.image[-2:])
    half = style.image[-1] // 2
    masks[0, : half + index % 5], masks[1, half + index % 5 :] = 1.0, 1.0
    return masks


def _grid(style: Style, index: int) -> Tensor:
    return torch.tensor([[1, style.grid, style.grid]])


def _size(style: Style, index: int) -> Tensor:
    return torch.tensor(list(style.image[-2:]))


MAKERS: Mapping[str, Callable[[Style, int], Any]] = {
    "input_ids": _words,
    "attention_mask": _mask,
    "bbox": lambda style, index: torch.stack(
        [words(index + k, len(_text(style, index)), 40, 0) + 40 * (k > 1) for k in range(4)], -1
    ),
    "token_type_ids": lambda style, index: (
        (_words(style, index) == style.token).long() if style.media else torch.zeros_like(_words(style, index))
    ),
    "mm_token_type_ids": lambda style, index: (_words(style, index) == style.token).long(),
    "labels": _labels,
    "start_positions": lambda style, index: torch.tensor(1 + index % 3),
    "end_positions": lambda style, index: torch.tensor(3 + index % 3),
    "next_sentence_label": lambda style, index: torch.tensor(index % 2),
    "pixel_values": lambda style, index: numbers(index, *style.image),
    "pixel_values_videos": lambda style, index: numbers(index, *style.image),
    "pixel_mask": lambda style, index: torch.ones(*style.image[-2:], dtype=torch.long),
    "image_grid_thw": _grid,
    "image_sizes": _size,
    "qformer_input_ids": _words,
    "qformer_attention_mask": lambda style, index: torch.ones_like(_words(style, index)),
    "bool_masked_pos": lambda style, index: torch.arange(style.grid**2) % 3 == index % 2,
    "mask_labels": _masks,
    "class_labels": lambda style, index: words(index, 2, style.labels, 0),
    "input_values": lambda style, index: numbers(index, *style.sound),
    "input_features": lambda style, index: numbers(index, *style.sound),
    "input_features_mask": lambda style, index: torch.ones(style.frames, dtype=torch.long),
    "past_values": lambda style, index: numbers(index, *style.series),
    "future_values": lambda style, index: numbers(index + 500, style.future, *style.series[1:]),
    "target_values": lambda style, index: (
        torch.tensor(index % style.labels)
        if style.registry.endswith("CLASSIFICATION")
        else numbers(index + 500, style.labels)
    ),
    "return_loss": lambda style, index: True,
}


def fitting(model: nn.Module, registry: str) -> Style:
    """The first of the styles for which a forward gives a finite loss. Raises ValueError with what it says."""
    said: list[str] = []
    for style in styles(model, registry):
        for _ in range(3):  # the second and third with the number of placeholders that the first was told
            try:
                loss = _loss(model, style)
            except Exception as error:
                said.append(f"{type(error).__name__}: {' '.join(str(error).split())[:200]}")
                media = _told(str(error), style)
                if media is None:
                    break
                style = replace(style, media=media)
                continue
            if loss is not None and math.isfinite(loss):
                return style
            said.append("it gives no loss" if loss is None else f"it gives a loss of {loss}")
            break
    reasons = "; ".join(dict.fromkeys(said))
    raise ValueError(f"{type(model).__name__} takes none of the rows that were made ({reasons})")


def _loss(model: nn.Module, style: Style) -> float | None:
    batch = collate([style.row(index) for index in range(_TRIED)])
    with torch.no_grad():
        output = model.eval()(**batch)
    loss = output.get("loss") if isinstance(output, Mapping) else getattr(output, "loss", None)
    return None if loss is None else float(loss)


def _told(message: str, style: Style) -> int | None:
    """The number of features of an image that a model has for the placeholders of `style`, from its message."""
    told = re.search(r"tokens:? \D*(\d+)\D+features:? \D*(\d+)", message)
    if not style.media or told is None or int(told[1]) % _TRIED or int(told[2]) % _TRIED:
        return None
    media = int(told[2]) // _TRIED
    if media >= 16 * WIDTH and media % WIDTH == 0:
        media //= WIDTH  # some tell the number of all features' values
    return media if media not in (0, style.media) else None


_TEXT = ("input_ids", "attention_mask", "bbox")
_ONE_STYLE: Mapping[str, Sequence[str]] = {
    "QUESTION_ANSWERING": (*_TEXT, "start_positions", "end_positions"),
    "NEXT_SENTENCE_PREDICTION": (*_TEXT, "labels", "next_sentence_label"),
}
_TEXTS = ("CAUSAL_LM", "MASKED_LM", "TOKEN_CLASSIFICATION", "SEQUENCE_CLASSIFICATION", "MULTIPLE_CHOICE")
_VISION_LABELS: Mapping[str, Sequence[str]] = {
    "UNIVERSAL_SEGMENTATION": ("mask_labels", "class_labels"),
    "INSTANCE_SEGMENTATION": ("mask_labels", "class_labels"),
    "ZERO_SHOT_OBJECT_DETECTION": ("input_ids", "attention_mask", "labels"),
    "ZERO_SHOT_IMAGE_CLASSIFICATION": ("input_ids", "attention_mask", "return_loss"),
    "MASKED_IMAGE_MODELING": ("bool_masked_pos",),
}
_OF_SOUND = ("CTC", "AUDIO_CLASSIFICATION", "AUDIO_FRAME_CLASSIFICATION", "SPEECH_SEQ_2_SEQ", "RNNT")


def styles(model: nn.Module, registry: str) -> Iterator[Style]:
    """Styles that a head of a registry may take its rows in, the more usual first."""
    import inspect

    accepted = inspect.signature(model.forward).parameters
    config: PreTrainedConfig = model.config  # pyright: ignore[reportAssignmentType]
    labels = int(getattr(config, "num_labels", None) or CLASSES)
    for style in _offered(config, registry, accepted):
        names = tuple(name for name in style.names if name in accepted)
        yield replace(style, names=names, labels=labels)


def _offered(config: PreTrainedConfig, registry: str, accepted: Mapping[str, Any]) -> Iterator[Style]:
    plain = Style(registry=registry, names=_ONE_STYLE.get(registry, (*_TEXT, "labels")))
    if registry.startswith("TIME_SERIES"):
        yield from _of_series(config, plain)
    elif registry in _OF_SOUND or {"input_features", "input_values"} & {*accepted}:
        yield from _of_sounds(config, plain, accepted)
    elif registry in ("IMAGE_TEXT_TO_TEXT", "MULTIMODAL_LM", "VISUAL_QUESTION_ANSWERING"):
        yield from _of_texts_with_images(config, plain, accepted)
    elif registry in _TEXTS or registry in _ONE_STYLE or not {"pixel_values", "pixel_values_videos"} & {*accepted}:
        yield plain
    else:
        labels = _VISION_LABELS.get(registry, ("labels",))
        yield from _of_images(config, replace(plain, names=("pixel_values", "pixel_values_videos", *labels)))


def _of_images(config: PreTrainedConfig, plain: Style) -> Iterator[Style]:
    channels, side = number_in(config, "num_channels") or 3, image_side(config)
    frames = number_in(config, "num_frames")
    if frames or plain.registry == "VIDEO_CLASSIFICATION":
        yield replace(plain, image=(frames or 4, channels, side, side))
    patch = number_in(config, "patch_size") or 16
    yield replace(plain, image=(channels, side, side), grid=side // patch)
    yield replace(plain, image=(channels, 224, 224), grid=224 // patch)


def _of_sounds(config: PreTrainedConfig, plain: Style, accepted: Mapping[str, Any]) -> Iterator[Style]:
    token = number_in(config, "audio_token_id") or number_in(config, "audio_token_index") or 0
    texts = ("input_ids", "attention_mask") if token else ()
    if "input_features" in accepted:
        frames = 2 * (number_in(config, "max_source_positions") or 64)
        bins = dict.fromkeys(filter(None, (number_in(config, name) for name in _BINS))) or {80: None}
        shapes = [shape for n in bins for shape in ((n, frames), (frames, n), (frames, 2 * n), (frames, 4 * n))]
        masks: Sequence[Sequence[str]] = (("input_features_mask",), ("attention_mask",))
        of_sound = "input_features"
    else:
        frames, shapes, masks, of_sound = 3200, [(3200,), (1, 3200)], ((), ("attention_mask",)), "input_values"
    for mask, sound, media in product(masks, shapes, (8, 0) if token else (0,)):
        names = tuple(dict.fromkeys((*texts, of_sound, *mask, "labels")))
        yield replace(plain, names=names, sound=sound, frames=frames, media=media, token=token)


_BINS = ("num_mel_bins", "input_feat_per_channel", "feature_size", "feature_projection_input_dim", "input_dim")


def _of_texts_with_images(config: PreTrainedConfig, plain: Style, accepted: Mapping[str, Any]) -> Iterator[Style]:
    token = number_in(config, "image_token_id") or number_in(config, "image_token_index") or 0
    side, channels, patch = (
        image_side(config),
        number_in(config, "num_channels") or number_in(config, "in_channels") or 3,
        number_in(config, "patch_size") or 16,
    )
    names = (*_TEXT, "pixel_values", "labels")
    shapes: list[tuple[int, ...]] = [(channels, side, side), (1, channels, side, side), (2, channels, side, side)]
    shapes.append((4, channels, side, side))
    if "image_grid_thw" in accepted:
        depth = number_in(config, "temporal_patch_size") or 1
        yield replace(
            plain,
            names=(*names, "image_grid_thw", "mm_token_type_ids"),
            image=(16, channels * depth * patch**2),
            grid=4,
            media=4,
            token=token,
        )
    extras: list[Sequence[str]] = [
        (),
        ("image_sizes",),
        ("token_type_ids",),
        ("qformer_input_ids", "qformer_attention_mask"),
    ]
    for shape, extra, media in product(shapes, extras, (4, 0)):
        yield replace(plain, names=(*names, *extra), image=shape, media=media if token else 0, token=token)


def _of_series(config: PreTrainedConfig, plain: Style) -> Iterator[Style]:
    length, channels = number_in(config, "context_length") or 32, number_in(config, "num_input_channels") or 1
    future = number_in(config, "prediction_length") or number_in(config, "horizon_length") or 8
    for shape in ((length, channels), (length,)):
        for target in ("target_values", "future_values"):
            yield replace(plain, names=("past_values", target), series=shape, future=future)


def image_side(config: PreTrainedConfig) -> int:
    size = number_in(config, "image_size") or number_in(config, "img_size")
    return size or 64
