"""A model that is handed over by its class's name, and notes each of its forwards in a file."""

import os
from pathlib import Path
from typing import Any

import handed_models
import torch
import transformers

from samestep.tasks import HuggingFace

BESIDES = ".besides"  # the ending of the file with what is no forward


class Noting(transformers.GPT2LMHeadModel):
    """Notes the process, and whether it trains, and with a graph; in another file when it is built, and backwards."""

    file = Path()

    def __init__(self, config: transformers.GPT2Config) -> None:
        super().__init__(config)
        self._note(BESIDES, "built")

    def forward(self, *arguments: Any, **keywords: Any) -> Any:
        kind = "train" if self.training else "evaluate"
        self._note("", f"{kind} {'graph' if torch.is_grad_enabled() else 'none'}")
        output = super().forward(*arguments, **keywords)
        logits: Any = output.logits
        if logits.requires_grad:
            logits.register_hook(lambda _: self._note(BESIDES, "backward"))
        return output

    def _note(self, ending: str, text: str) -> None:
        with Path(f"{self.file}{ending}").open("a") as notes:
            notes.write(f"{os.getpid()} {text}\n")


class Tried(HuggingFace):
    """Texts of one length, whose labels are all there (`even`), or of unlike ones."""

    def __init__(self, *, notes: str, even: bool = False, held_out: bool = True) -> None:
        rows = handed_models.texts(20)
        if even:
            rows = [{"input_ids": (row["input_ids"] * 3)[:6], "label": 1} for row in rows]

        def build() -> Noting:
            Noting.file = Path(notes)
            sizes: dict[str, Any] = {"n_embd": 8, "n_layer": 1, "n_head": 2, "n_positions": 24}
            config = transformers.GPT2Config(**sizes, vocab_size=handed_models.VOCABULARY, eos_token_id=2)
            return Noting(config)

        others = rows[14:] if held_out else None
        super().__init__(model=build, data=rows[:14], collator=handed_models.next_words, eval_data=others)
