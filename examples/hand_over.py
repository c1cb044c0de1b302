"""Models of transformers with their own losses, handed over with their rows and a collator: five lines for each.

python examples/hand_over.py
"""

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from transformers import (
    BartConfig,
    BartForConditionalGeneration,
    GPT2Config,
    GPT2LMHeadModel,
    ViTConfig,
    ViTForImageClassification,
)

import samestep

WORDS = 40
TEXT: dict[str, Any] = {"vocab_size": WORDS, "bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0}


def sentences(count: int = 100) -> list[dict[str, list[int]]]:
    """Random sentences of 4 to 11 words, as rows of token ids."""
    generator = torch.Generator().manual_seed(0)
    lengths = torch.randint(4, 12, (count,), generator=generator).tolist()
    return [{"input_ids": torch.randint(3, WORDS, (n,), generator=generator).tolist()} for n in lengths]


def images(count: int = 100) -> list[dict[str, Any]]:
    """Random images in two classes."""
    pixels = torch.randn(count, 3, 16, 16, generator=torch.Generator().manual_seed(0))
    return [{"pixel_values": image, "labels": int(image.mean() > 0)} for image in pixels]


def padded(sequences: Sequence[Sequence[int]], value: int) -> Tensor:  # [sequences, longest]
    return nn.utils.rnn.pad_sequence([torch.tensor(s) for s in sequences], batch_first=True, padding_value=value)


def next_word(rows: Sequence[Mapping[str, list[int]]]) -> dict[str, Tensor]:
    """A collator: padding is masked by -100, and the model shifts the labels itself."""
    ids = [row["input_ids"] for row in rows]
    inputs = padded(ids, 0)
    return {"input_ids": inputs, "attention_mask": (inputs != 0).long(), "labels": padded(ids, -100)}


def backwards(rows: Sequence[Mapping[str, list[int]]]) -> dict[str, Tensor]:
    """A collator: say the sentence backwards."""
    return {**next_word(rows), "labels": padded([row["input_ids"][::-1] for row in rows], -100)}


if __name__ == "__main__":
    sizes: dict[str, Any] = {"encoder_attention_heads": 4, "decoder_attention_heads": 4, "decoder_start_token_id": 2}
    sizes |= {"d_model": 32, "encoder_layers": 2, "decoder_layers": 2, "encoder_ffn_dim": 64, "decoder_ffn_dim": 64}
    adamw = samestep.AdamW(lr=1e-3)

    # Next words
    model = GPT2LMHeadModel(GPT2Config(n_embd=32, n_layer=2, n_head=4, n_positions=16, **TEXT))
    task = samestep.tasks.HuggingFace(model=model, data=sentences(), collator=next_word)
    recipe = samestep.Recipe(task=task, batch=8, steps=20, optimizer=adamw)
    proof = samestep.verify(recipe, layout="dp2")
    print("GPT-2: same step:", proof.same_step)

    # From a text to a text
    model = BartForConditionalGeneration(BartConfig(**TEXT, **sizes))
    task = samestep.tasks.HuggingFace(model=model, data=sentences(), collator=backwards)
    recipe = samestep.Recipe(task=task, batch=8, steps=20, optimizer=adamw)
    proof = samestep.verify(recipe, layout="fsdp2")
    print("BART: same step:", proof.same_step)

    # Images, stacked without a collator
    model = ViTForImageClassification(ViTConfig(image_size=16, patch_size=4, hidden_size=32, num_hidden_layers=2))
    task = samestep.tasks.HuggingFace(model=model, data=images(), eval_data=images(20))
    recipe = samestep.Recipe(task=task, batch=8, steps=20, optimizer=adamw)
    proof = samestep.verify(recipe, layout="dp2")
    print("ViT: same step:", proof.same_step)
