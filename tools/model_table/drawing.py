"""Which types of transformers the random half of the table has: drawn from transformers' own registries by a seed.

A type stands in the first of the strata below in one of whose registries it has a class, so that each is counted
once; types that share a class are one type. Which of its heads in that stratum is tried is drawn too. A stratum's
share of the draw is its share of all types, but at least a few, and its results are weighted by how many types it
stands for.
"""

import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache

from transformers.models.auto import modeling_auto

SEED, DRAWN, AT_LEAST = 20261128, 60, 3

# Registries of heads that have a loss (MODEL_FOR_..._MAPPING_NAMES of transformers.models.auto.modeling_auto).
STRATA: Mapping[str, Sequence[str]] = {
    "time series": ("TIME_SERIES_PREDICTION", "TIME_SERIES_REGRESSION", "TIME_SERIES_CLASSIFICATION"),
    "video": ("VIDEO_CLASSIFICATION",),
    "speech": ("CTC", "AUDIO_CLASSIFICATION", "AUDIO_FRAME_CLASSIFICATION", "SPEECH_SEQ_2_SEQ", "RNNT"),
    "detection": (
        "OBJECT_DETECTION",
        "SEMANTIC_SEGMENTATION",
        "UNIVERSAL_SEGMENTATION",
        "INSTANCE_SEGMENTATION",
        "ZERO_SHOT_OBJECT_DETECTION",
    ),
    "vision": ("IMAGE_CLASSIFICATION", "MASKED_IMAGE_MODELING"),
    "vision and text": (
        "IMAGE_TEXT_TO_TEXT",
        "MULTIMODAL_LM",
        "VISUAL_QUESTION_ANSWERING",
        "ZERO_SHOT_IMAGE_CLASSIFICATION",
    ),
    "encoder-decoder": ("SEQ_TO_SEQ_CAUSAL_LM",),
    "encoder": (
        "MASKED_LM",
        "TOKEN_CLASSIFICATION",
        "QUESTION_ANSWERING",
        "SEQUENCE_CLASSIFICATION",
        "MULTIPLE_CHOICE",
        "NEXT_SENTENCE_PREDICTION",
    ),
    "decoder": ("CAUSAL_LM",),
}
# What decides, in this order: a type that can fill in masked words is an encoder, also where it can write the next.
_DECIDING: Sequence[tuple[str, Sequence[str]]] = (
    *((name, registries) for name, registries in STRATA.items() if name not in ("encoder", "decoder")),
    ("encoder", ("MASKED_LM",)),
    ("decoder", STRATA["decoder"]),
    ("encoder", STRATA["encoder"]),
)

# Types of the table's other half, for which samestep was written and mended.
# fmt: off
KNOWN = frozenset((
    "llama", "mistral", "qwen2", "qwen3", "gemma", "gemma2", "gemma3", "gemma3_text", "gpt_neox", "opt", "phi",
    "phi3", "stablelm", "cohere", "mixtral", "qwen2_moe", "gpt2", "gptj", "bloom", "falcon", "mpt", "mamba",
    "mamba2", "rwkv", "bert", "roberta", "distilbert", "albert", "electra", "deberta-v2", "t5", "bart",
    "pegasus", "whisper", "wav2vec2", "vit", "deit", "beit", "swin", "convnext", "clip",
))
# fmt: on


@dataclass(frozen=True, kw_only=True)
class Drawn:
    """A type of transformers that was drawn, and the head that is tried."""

    type: str  # its model_type
    stratum: str
    registry: str
    head: str  # the model's class
    stands_for: float  # how many types of its stratum


@cache
def population() -> Mapping[str, Mapping[str, Mapping[str, str]]]:
    """All types that have a head with a loss: stratum -> type -> registry -> class."""
    types: dict[str, dict[str, Mapping[str, str]]] = {name: {} for name in STRATA}
    taken: set[str] = set(KNOWN)
    for stratum, deciding in _DECIDING:
        of_stratum = sorted({kind for registry in deciding for kind in _registry(registry)} - taken)
        classes: set[str] = set()
        for kind in of_stratum:
            known = {registry: _registry(registry) for registry in STRATA[stratum]}
            heads = {registry: names[kind] for registry, names in known.items() if kind in names}
            if not classes & {*heads.values()}:  # otherwise it is another name of a type
                types[stratum][kind] = heads
            classes |= {*heads.values()}
        taken |= {*of_stratum}
    return types


def _registry(name: str) -> Mapping[str, str]:
    """Type -> class."""
    names = getattr(modeling_auto, f"MODEL_FOR_{name}_MAPPING_NAMES")
    return {kind: head if isinstance(head, str) else head[0] for kind, head in names.items()}


@cache
def drawn(seed: int = SEED, count: int = DRAWN) -> Sequence[Drawn]:
    """The types of a draw, by stratum."""
    types = population()
    total = sum(map(len, types.values()))
    generator = random.Random(seed)
    result: list[Drawn] = []
    free = count - AT_LEAST * len(types)
    shares = _rounded({name: free * len(each) / total for name, each in types.items()}, free)
    for stratum, of_stratum in types.items():
        number = min(AT_LEAST + shares[stratum], len(of_stratum))
        for kind in sorted(generator.sample(sorted(of_stratum), number)):
            registry = generator.choice(sorted(of_stratum[kind]))
            head = of_stratum[kind][registry]
            stands_for = len(of_stratum) / number
            result.append(Drawn(type=kind, stratum=stratum, registry=registry, head=head, stands_for=stands_for))
    return result


def _rounded(shares: Mapping[str, float], total: int) -> Mapping[str, int]:
    """Whole numbers with a sum, the nearest to some shares (largest remainder)."""
    whole = {name: int(share) for name, share in shares.items()}
    largest = sorted(shares, key=lambda name: whole[name] - shares[name])
    for name in largest[: total - sum(whole.values())]:
        whole[name] += 1
    return whole
