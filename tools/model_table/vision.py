"""Models of transformers that see images, with their own losses."""

from collections.abc import Mapping
from functools import partial
from typing import Any

import torch
import transformers
from torch import nn

from model_table.decoders import VOCABULARY
from model_table.entry import OF_IMAGES, Entry, Row, numbers, stacked, words

_PATCHES = {
    "hidden_size": 24,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "intermediate_size": 38,
    "image_size": 12,
    "patch_size": 4,
    "num_labels": 3,
}
_CONFIGURATIONS: Mapping[str, tuple[str, Mapping[str, Any]]] = {
    "vit": ("ViT", _PATCHES),
    "deit": ("DeiT", _PATCHES),
    "beit": ("Beit", {**_PATCHES, "use_relative_position_bias": True, "drop_path_rate": 0.0}),
    "swin": (
        "Swin",
        {
            "image_size": 16,
            "patch_size": 2,
            "embed_dim": 12,
            "depths": [2, 2],
            "num_heads": [2, 4],
            "window_size": 4,
            "num_labels": 3,
            "drop_path_rate": 0.0,
        },
    ),
    "convnext": (
        "ConvNext",
        {
            "image_size": 16,
            "patch_size": 2,
            "num_stages": 2,
            "hidden_sizes": [12, 20],
            "depths": [2, 2],
            "num_labels": 3,
        },
    ),
}
_TOWER = {"hidden_size": 24, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 38}


def _model(name: str) -> nn.Module:
    kind, values = _CONFIGURATIONS[name]
    config = getattr(transformers, f"{kind}Config")(**values)
    return getattr(transformers, f"{kind}ForImageClassification")(config)


def _image(index: int, size: int) -> Row:
    return {"pixel_values": numbers(index, 3, size, size), "labels": torch.tensor(index % 3)}


def _clip() -> nn.Module:
    text = {**_TOWER, "vocab_size": VOCABULARY, "max_position_embeddings": 12, "eos_token_id": 2, "bos_token_id": 1}
    image = {**_TOWER, "image_size": 12, "patch_size": 4}
    return transformers.CLIPModel(
        transformers.CLIPConfig(text_config=text, vision_config=image, projection_dim=10)  # pyright: ignore
    )


def _pair(index: int) -> Row:
    text = torch.cat([words(index, 8, VOCABULARY, 3), torch.tensor([2])])
    return {"pixel_values": numbers(index, 3, 12, 12), "input_ids": text}


def _pairs(rows: list[Row]) -> Mapping[str, Any]:
    return {**stacked(rows), "return_loss": True}


def entries() -> list[Entry]:
    found = [
        Entry(
            name=name,
            kind="vision",
            model=partial(_model, name),
            row=partial(_image, size=values["image_size"]),
            collate=stacked,
            impossible=OF_IMAGES if name == "convnext" else {},
        )
        for name, (_, values) in _CONFIGURATIONS.items()
    ]
    return [*found, Entry(name="clip", kind="vision", model=_clip, row=_pair, collate=_pairs)]
