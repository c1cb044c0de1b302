"""Encoders, encoder-decoders and speech models of transformers, with their own losses."""

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import torch
import transformers
from torch import nn

from model_table.decoders import SIZES, VOCABULARY, padded, row
from model_table.entry import Entry, Row, numbers, stacked, words

_TEXT = {key: value for key, value in SIZES.items() if key != "num_key_value_heads"}
_CLASSES = {**_TEXT, "num_labels": 3}


def _build(auto: str, config: str, values: Mapping[str, Any]) -> nn.Module:
    made = getattr(transformers, f"{config}Config")(**values)
    return getattr(transformers, f"AutoModelFor{auto}").from_config(made)


_TOKENS = "TokenClassification"
_TEXTS = "SequenceClassification"
_DISTIL = {"vocab_size": VOCABULARY, "dim": 24, "n_layers": 4, "n_heads": 4, "hidden_dim": 38, "num_labels": 3}
_ENCODERS: Mapping[str, tuple[str, str, Mapping[str, Any]]] = {
    "bert": ("MaskedLM", "Bert", _TEXT),
    "roberta": (_TEXTS, "Roberta", {**_CLASSES, "max_position_embeddings": 26}),
    "distilbert": (_TEXTS, "DistilBert", {**_DISTIL, "max_position_embeddings": 24}),
    "albert": (_TOKENS, "Albert", {**_CLASSES, "embedding_size": 10}),
    "electra": (_TOKENS, "Electra", {**_CLASSES, "embedding_size": 10}),
    "deberta-v2": (
        _TEXTS,
        "DebertaV2",
        {
            **_CLASSES,
            "relative_attention": True,
            "position_buckets": 8,
            "pos_att_type": ["p2c", "c2p"],
            "norm_rel_ebd": "layer_norm",
            "share_att_key": True,
        },
    ),
}


def _with_classes(rows: list[Row], *, of: str) -> Mapping[str, Any]:
    """Padded texts, with a class of each text or of each token."""
    found = dict(padded(rows))
    if of == _TEXTS:
        found["labels"] = torch.tensor([int(row["input_ids"].sum()) % 3 for row in rows])
    if of == _TOKENS:
        found["labels"] = torch.where(found["labels"] == -100, -100, found["labels"] % 3)
    return found


_SEQ2SEQ = {
    "vocab_size": VOCABULARY,
    "d_model": 24,
    "encoder_layers": 2,
    "decoder_layers": 2,
    "encoder_attention_heads": 4,
    "decoder_attention_heads": 4,
    "encoder_ffn_dim": 38,
    "decoder_ffn_dim": 38,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "decoder_start_token_id": 2,
    "forced_eos_token_id": None,
}
_T5 = {"vocab_size": VOCABULARY, "d_model": 24, "d_kv": 6, "d_ff": 38, "num_layers": 2, "num_heads": 4}
_ENCODER_DECODERS: Mapping[str, tuple[str, Mapping[str, Any]]] = {
    "t5": ("T5", {**_T5, "decoder_start_token_id": 0}),
    "bart": ("Bart", {**_SEQ2SEQ, "max_position_embeddings": 24}),
    "pegasus": ("Pegasus", {**_SEQ2SEQ, "max_position_embeddings": 24}),
}


def _both(rows: list[Row]) -> Mapping[str, Any]:
    """Padded texts, and as labels other ones of other lengths."""
    given = padded(rows)
    wanted: list[Row] = [
        {"input_ids": words(int(row["input_ids"].sum()), 5 + len(row["input_ids"]) % 4, 50, 3)} for row in rows
    ]
    return {**given, "labels": padded(wanted)["labels"]}


_WHISPER = {**_SEQ2SEQ, "num_mel_bins": 6, "max_source_positions": 10, "max_target_positions": 12}


def _sound(index: int) -> Row:
    return {"input_features": numbers(index, 6, 20), "labels": words(index, 7, VOCABULARY, 3)}


_WAVES = {
    "vocab_size": 12,
    "hidden_size": 24,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "intermediate_size": 38,
    "conv_dim": [8, 8],
    "conv_stride": [3, 2],
    "conv_kernel": [5, 3],
    "num_feat_extract_layers": 2,
    "num_conv_pos_embeddings": 4,
    "num_conv_pos_embedding_groups": 2,
    "num_labels": 3,
    "classifier_proj_size": 10,
    "apply_spec_augment": False,
    "layerdrop": 0.0,
}


def _wave(index: int) -> Row:
    return {"input_values": numbers(index, 67), "labels": torch.tensor(index % 3)}


def entries() -> list[Entry]:
    found = [
        Entry(
            name=name,
            kind="encoder",
            model=partial(_build, auto, config, values),
            row=row,
            collate=partial(_with_classes, of=auto),
        )
        for name, (auto, config, values) in _ENCODERS.items()
    ]
    one_layer = "one layer is called four times, and a stage would hold all of its weights"
    found = [
        Entry(**{**vars(each), "impossible": {"pp": one_layer}}) if each.name == "albert" else each for each in found
    ]
    found += [
        Entry(
            name=name,
            kind="encoder-decoder",
            model=partial(_build, "Seq2SeqLM", config, values),
            row=row,
            collate=_both,
        )
        for name, (config, values) in _ENCODER_DECODERS.items()
    ]
    speech: list[tuple[str, Callable[[], nn.Module], Callable[[int], Row]]] = [
        ("whisper", partial(_build, "SpeechSeq2Seq", "Whisper", _WHISPER), _sound),
        ("wav2vec2", partial(_build, "AudioClassification", "Wav2Vec2", _WAVES), _wave),
    ]
    return found + [
        Entry(name=name, kind="speech", model=model, row=made, collate=stacked) for name, model, made in speech
    ]
