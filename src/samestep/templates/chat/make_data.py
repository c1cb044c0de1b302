"""Makes conversations, data/chats.jsonl, and an untrained model, model/. Delete it once your own are there."""

import json
import random
from pathlib import Path

CHATS = 400
LANGUAGES = {"French": "Bonjour", "German": "Hallo", "Spanish": "Hola", "Italian": "Ciao", "Dutch": "Hoi"}
NAMES = ["Ada", "Alan", "Grace", "Emmy", "Kurt", "Sofia", "Carl", "Rosa", "Nils", "Marie", "Hugo", "Edith"]
TEMPLATE = """{%- for message in messages -%}
{{- '<|im_start|>' + message['role'] + '\\n' + message['content'] + '<|im_end|>' + '\\n' -}}
{%- endfor -%}
{%- if add_generation_prompt -%}{{- '<|im_start|>assistant\\n' -}}{%- endif -%}
"""


def chats() -> list[dict[str, list[dict[str, str]]]]:
    """Conversations of one to three turns, the same at every call."""
    draw = random.Random(0)
    rows = []
    for _ in range(CHATS):
        name = draw.choice(NAMES)
        messages = [{"role": "system", "content": "You greet people."}]
        for turn, language in enumerate(draw.sample(sorted(LANGUAGES), draw.randint(1, 3))):
            asked = f"And in {language}?" if turn else f"Say hello to {name} in {language}."
            messages.append({"role": "user", "content": asked})
            messages.append({"role": "assistant", "content": f"{LANGUAGES[language]}, {name}!"})
        rows.append({"messages": messages})
    return rows


def save_model(texts: list[str], folder: Path) -> None:
    """Save a model of random weights and a tokenizer that is trained on the texts."""
    import torch
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

    rules = Tokenizer(models.BPE())
    rules.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    rules.decoder = decoders.ByteLevel()
    special = ["<|pad|>", "<|im_start|>", "<|im_end|>"]
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    trainer = trainers.BpeTrainer(
        vocab_size=384, special_tokens=special, initial_alphabet=alphabet, show_progress=False
    )
    rules.train_from_iterator(texts, trainer)
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=rules, pad_token=special[0], eos_token=special[2])
    tokenizer.chat_template = TEMPLATE
    tokenizer.save_pretrained(folder)
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=384,
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=256,
        bos_token_id=None,
        eos_token_id=rules.token_to_id(special[2]),
        pad_token_id=rules.token_to_id(special[0]),
    )
    LlamaForCausalLM(config).save_pretrained(folder)


def main() -> None:
    """Write both next to this script."""
    here = Path(__file__).parent
    rows = chats()
    file = here / "data" / "chats.jsonl"
    file.parent.mkdir(exist_ok=True)
    file.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    save_model([message["content"] for row in rows for message in row["messages"]], here / "model")


if __name__ == "__main__":
    main()
