"""Tiny configurations of any type of transformers: each number of the default configuration by what its name says.

No type has code of its own. Sub-configurations are built in the same way, so that widths which must agree (an image
tower's output, the text's embeddings) agree: names of one kind have one size wherever they stand.
"""

import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from transformers import PreTrainedConfig

VOCABULARY, SPECIAL = 103, 30  # the last tokens are left to those with a meaning
WIDTH, HEADS, HEAD_WIDTH, LAYERS, INNER, EXPERTS = 64, 4, 16, 4, 96, 4
LENGTH = 64  # positions
_FIRST_STAGE, _CHANNELS = 16, 128  # of the first and the last stage of a net in stages
_NARROW = 400  # channels of nets that stay as wide as they are


@dataclass(frozen=True, kw_only=True)
class Sizes:
    """What types want in different ways."""

    key_value_heads: int = 2
    experts_unset: bool = False  # whether numbers of experts are given where the default has none
    head_unset: bool = True  # likewise the width of a head
    stages: bool = True  # whether nets in stages are narrower too
    images: bool = True  # whether images are smaller too
    layers: int = LAYERS
    width: int = WIDTH
    head_width: int = HEAD_WIDTH


# The first with which a type can be built is taken.
SIZES = (
    Sizes(),
    Sizes(key_value_heads=HEADS),
    Sizes(experts_unset=True),
    Sizes(head_unset=False),
    Sizes(key_value_heads=HEADS, head_unset=False),
    Sizes(stages=False),
    Sizes(images=False),
    Sizes(stages=False, images=False),
    Sizes(layers=6),
    Sizes(width=256, head_width=64),
)
_EXPERTS_UNSET = {"n_routed_experts": EXPERTS, "num_experts_per_tok": 2, "moe_intermediate_size": 48}


def tiny(kind: type[PreTrainedConfig], sizes: Sizes = SIZES[0], **others: Any) -> PreTrainedConfig:
    """A configuration of a class with everything small. Random draws other than dropout are switched off."""
    default = kind()
    taken = {name: value for name, value in others.items() if name in vars(default)}
    if vars(default).get("is_encoder_decoder") and vars(default).get("decoder_start_token_id") is None:
        taken["decoder_start_token_id"] = _USUAL["eos_token_id"]
    return kind(**{**_values(default, _Whole.of(default, sizes), sizes), **taken})


@dataclass(frozen=True, kw_only=True)
class _Whole:
    """What all parts of a configuration have in common."""

    scale: int  # by how much the channels of a net in stages are divided
    patch: int | None  # side of an image's patches

    @classmethod
    def of(cls, default: PreTrainedConfig, sizes: Sizes) -> "_Whole":
        largest = max(_widths(default), default=0)
        scale = largest // _CHANNELS if sizes.stages and largest > _NARROW else 1
        return cls(scale=scale, patch=number_in(default, "patch_size") if sizes.images else None)

    def side(self, given: int) -> int:
        """Of an image: a few patches."""
        patch = self.patch or 16
        return min(given, patch * max(4, 64 // patch))


def _values(default: PreTrainedConfig, whole: _Whole, sizes: Sizes) -> dict[str, Any]:
    """What a class is given in the place of a default configuration's values."""
    values = {name: value for name, value in vars(default).items() if not name.startswith("_")}
    given = {name: _value(name, value, values, whole, sizes) for name, value in values.items()}
    changed = {name: value for name, value in given.items() if value != values[name]}
    return {**changed, **_tokens(values)}


def _value(name: str, value: Any, values: Mapping[str, Any], whole: _Whole, sizes: Sizes) -> Any:
    if isinstance(value, PreTrainedConfig):
        return type(value)(**_values(value, whole, sizes))
    if value is None:
        return _unset(name, sizes)
    if name in _FREE_LENGTH:
        return _FREE_LENGTH[name]
    if name == "hidden_dim" and "width_coefficient" in values:
        return int(value / max(values["width_coefficient"], 1.0))  # of the last layer, whose width follows from it
    if _RANDOM.search(name) and isinstance(value, (bool, float)):
        return type(value)(0)
    if isinstance(value, bool) or _TOKEN.search(name):
        return value
    if isinstance(value, float) and _COEFFICIENT.search(name):
        return min(value, 1.0)
    if _SIDE.search(name) and sizes.images:
        return _sides(value, whole)
    if isinstance(value, dict) and "mrope_section" in value:
        return {**value, "mrope_section": _sections(value["mrope_section"], sizes.head_width // 2)}
    if isinstance(value, int):
        in_stages = isinstance(values.get("depths"), (list, tuple)) and name == "embed_dim"
        return _FIRST_STAGE if in_stages else _number(name, value, sizes)
    if isinstance(value, (list, tuple)) and value:
        if len(value) == _layers(values) > sizes.layers:
            return _of_layers(name, value, sizes)
        if _LISTS_OF_LAYERS.search(name):
            return _indices(value, values, sizes)
        return _several(name, value, whole, sizes)
    return value


Number = Callable[[int, Sizes], int]


def _same(given: int, _: Sizes) -> int:
    return given


def _to(value: int) -> Number:
    return lambda given, sizes: value


def _at_most(value: int) -> Number:
    return lambda given, sizes: min(given, value)


def _width(given: int, sizes: Sizes) -> int:
    return sizes.width


def _head_width(given: int, sizes: Sizes) -> int:
    return sizes.head_width


_LAYERS = r"layers$|^n_layer$|^depth$|resampler_depth|num_res_blocks"
# The first pattern that a name has decides. What none has stays, and so do 0 and 1, which are switches.
_NUMBERS: Sequence[tuple[str, Number]] = (
    (r"^(type|task_type|segment|language)_vocab_size|^n_langs$|^max_2d|mel|num_labels|max_pos_emb|query_dim", _same),
    (r"codebook_size|^codevectors", _to(64)),  # some ask for a power of two
    (r"vocab_size|^num_embeddings$|group_vocab$", _to(VOCABULARY)),
    (r"d_ssm$", lambda given, sizes: 2 * sizes.width),
    (r"linear_num_key_heads", _to(2)),
    (r"key_value_heads|kv_heads|kv_n_heads", lambda given, sizes: sizes.key_value_heads),
    (r"mamba_(n|num)_heads|n_mamba_heads", _to(8)),
    (r"rope_head_dim|^rotary_dim$", _to(8)),
    (r"^qk_head_dim$", lambda given, sizes: sizes.head_width + 8),
    (r"head_dim|dim_head|d_head$|^d_kv$|head_size$|key_dim|^kv_channels$|query_pre_attn_scalar", _head_width),
    (r"lora_rank|lowrank|laurel_rank|norm_rank", _to(16)),
    (r"experts_per|top_?k$|^moe_k$", _at_most(2)),
    (r"topk_group", _to(1)),
    (r"^n_groups?$|num_expert_group|mamba_n_groups", _at_most(2)),
    (r"shared_experts", _at_most(1)),
    (r"num_experts|local_experts|routed_experts|expert_num", _to(EXPERTS)),
    (r"heads$|^n_head$|_heads_", _to(HEADS)),
    (r"feat_extract_layers|nextn_predict_layers|_every_n_layers|layers_per", _same),
    (r"max_window_layers|first_k_dense|num_dense_layers|num_kv_shared_layers", _at_most(1)),
    (r"^(encoder|decoder)_layers$|num_decoder_layers|lstm_layers", _at_most(2)),
    (_LAYERS, lambda given, sizes: min(given, sizes.layers)),
    (r"moe_\w*intermediate|share_expert_dim|expert_intermediate", _to(48)),
    (
        r"intermediate|ffn_dim|^d_ff$|^dff$|^dim_ff$|mlp_dim|ffn_hidden|^d_inner$|feed_?forward|linear_units",
        _to(INNER),
    ),
    (
        r"input_feat_size|feature_size|input_channels|num_channels|^in_channels$|frame_size|num_input|^input_dim",
        _same,
    ),
    (r"output_dim$|feature_projection_input_dim", _same),
    (r"position|^n_ctx$|max_seq_len|max_length|^seq_len$|max_target|max_source", _at_most(LENGTH)),
    (r"image_seq|num_image_tokens|tokens_per_image", lambda given, sizes: min(given, 16) if sizes.images else given),
    (r"num_queries|num_query_tokens|latents$|latent_query", _at_most(9)),
    (r"image_size|img_size|^input_size$|resolution|crop_size|spec_size", _same),
    (r"n(um)?_filters", _at_most(8)),
    (r"patch_|patch$|merge|kernel|stride|window|scale|factor|rate|sampling|chunk|conv_|bins|buckets", _same),
    (r"frames|block_size|mult$|groups|pool|ratio", _same),
    (r"^context_length$", _at_most(512)),
    (r"coordinate_size|shape_size", _to(8)),
    (r"state_size|d_state", _at_most(16)),
    (r"hidden|d_model|n_embd|embed|emb_dim|width|channels|proj|_dim$|^dim$|units|_size$|filters|pos_feats", _width),
)
_COUNTS = ("num_hidden_layers", "num_layers", "n_layer", "n_layers")
_COEFFICIENT = re.compile(r"^(width|depth)_(coefficient|multiplier|factor|mult)$")
_SIDE = re.compile(r"^(image|img|input|crop|spec|pretrain_image)_size$|resolution$")
_TOKEN = re.compile(r"^(bos|eos|pad|unk|mask|sep|cls)_\w*id$|token_(id|index)$|_(token|bos|eos|pad)_(id|idx|index)$")
_RANDOM = re.compile(
    r"layerdrop|drop_path|stochastic_depth|mask_time_prob|mask_feature_prob|apply_spec_augment|jitter"
)
_FREE_LENGTH = {"axial_pos_embds": False}  # positions that are products ask for rows of that very length
_LISTS_OF_DEPTHS = re.compile(
    r"^depths?$|block_repeats|blocks_per_stage|num_blocks|_of_layers$|block_sizes|attn_blocks"
)
_LISTS_OF_WIDTHS = re.compile(r"hidden_sizes|embed_dim|channels|conv_dim|tdnn_dim|feature_dims|_unit_dims")
_LISTS_OF_LAYERS = re.compile(r"ind(exes|ices)$|hook_ids|feature_layer|target_layers?|extract_layers")


def _number(name: str, value: int, sizes: Sizes) -> int:
    if value <= 1:
        return value
    number = next((number for pattern, number in _NUMBERS if re.search(pattern, name)), _same)
    return number(value, sizes)


def _unset(name: str, sizes: Sizes) -> Any:
    """What is given where the default configuration leaves a number to the rest of it."""
    unset = ({"head_dim": sizes.head_width} if sizes.head_unset else {}) | (
        _EXPERTS_UNSET if sizes.experts_unset else {}
    )
    return unset.get(name)


def _layers(values: Mapping[str, Any]) -> int:
    return next((values[name] for name in _COUNTS if isinstance(values.get(name), int)), 0)


def _of_layers(name: str, values: Sequence[Any], sizes: Sizes) -> Sequence[Any]:
    """Of a list with a value a layer, those of a few layers, among them each kind that there is."""
    names = [str(value) for value in values]
    first = dict.fromkeys(names.index(each) for each in names)  # each kind, then others in order
    kept = sorted(list(dict.fromkeys([*first, *range(len(values))]))[: sizes.layers])
    whole = isinstance(values[0], int) and not isinstance(values[0], bool)
    return _like(values, (_number(name, values[index], sizes) if whole else values[index] for index in kept))


def _indices(given: Sequence[Any], values: Mapping[str, Any], sizes: Sizes) -> Sequence[Any]:
    """Numbers of layers whose outputs are used: of as many of the layers that are left. Those of stages stay."""
    layers = [each for each in given if isinstance(each, int)]
    if (
        len(layers) < len(given)
        or "depths" in values
        or max(layers) < sizes.layers
        or _layers(values) <= sizes.layers
    ):
        return given
    count = min(sizes.layers, len(layers))
    last = sizes.layers if max(layers) == _layers(values) else sizes.layers - 1  # some count the embeddings as one
    return _like(given, range(last + 1 - count, last + 1))


def _several(name: str, values: Sequence[Any], whole: _Whole, sizes: Sizes) -> Sequence[Any]:
    """A list of whole numbers as a tiny configuration has it; another one as it is."""
    if not all(isinstance(value, int) and not isinstance(value, bool) for value in values):
        return values
    if _LISTS_OF_DEPTHS.search(name):
        return _like(values, (min(value, 2) for value in values))
    if "heads" in name:
        ranks = sorted({*values})
        return _like(values, (2 ** (1 + ranks.index(value)) for value in values))
    if _LISTS_OF_WIDTHS.search(name):
        return _like(values, (value if value < 4 else max(4, value // whole.scale) for value in values))
    return values


def _like(given: Sequence[Any], values: Iterable[Any]) -> Sequence[Any]:
    """A list or a tuple, as the given one is."""
    return tuple(values) if isinstance(given, tuple) else list(values)


def _sides(value: Any, whole: _Whole) -> Any:
    if isinstance(value, int):
        return whole.side(value) if value > 1 else value
    whole_numbers = isinstance(value, (list, tuple)) and all(isinstance(each, int) for each in value)
    return type(value)(whole.side(each) for each in value) if whole_numbers else value


def _sections(value: Sequence[int], half: int) -> list[int]:
    """The parts of half a head's width that turn by time, height and width, as many times smaller."""
    total = sum(value)
    parts = [each * half // total for each in value]
    for index in range(half - sum(parts)):
        parts[index] += 1
    return parts


def number_in(config: PreTrainedConfig, name: str) -> int | None:
    """A number of a configuration or of the first of its parts that has it; of a pair the first."""
    value = vars(config).get(name)
    if isinstance(value, (list, tuple)) and value and isinstance(value[0], int):
        value = value[0]
    if isinstance(value, int) and not isinstance(value, bool):
        return value
    parts = [part for part in vars(config).values() if isinstance(part, PreTrainedConfig)]
    return next(filter(None, (number_in(part, name) for part in parts)), None)


def _widths(config: PreTrainedConfig) -> Iterator[int]:
    for name, value in vars(config).items():
        if isinstance(value, PreTrainedConfig):
            yield from _widths(value)
        elif isinstance(value, (list, tuple)) and _LISTS_OF_WIDTHS.search(name):
            yield from (each for each in value if isinstance(each, int))


_USUAL = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2, "sep_token_id": 2, "mask_token_id": 3}


def _tokens(values: Mapping[str, Any]) -> Mapping[str, Any]:
    """Tokens with a meaning: within the vocabulary, each its own; padding is 0."""
    given: dict[str, Any] = {}
    known: dict[Any, int] = {}
    for name, value in sorted(values.items(), key=lambda each: each[0] not in _USUAL):
        token = value[0] if isinstance(value, (list, tuple)) and value else value
        if not _TOKEN.search(name) or isinstance(value, bool) or (isinstance(token, int) and token < 0):
            continue
        if name in _USUAL:
            if value is not None or name == "pad_token_id":
                given[name] = known[token] = _USUAL[name]
        elif isinstance(token, int):
            given[name] = known.setdefault(token, VOCABULARY - 1 - len(known))
    return given
