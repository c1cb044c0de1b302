"""`--tiny`: models of transformers with two layers, and the notes that say so."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from script_records import Record, Step, runs, weights
from transformers import GPT2Config, LlamaConfig, PreTrainedModel, T5Config
from transformers.models.gemma2 import Gemma2Config, Gemma2ForCausalLM
from transformers.models.gpt2.modeling_gpt2 import GPT2Model
from transformers.models.t5.modeling_t5 import T5Model

from samestep.recording.store import EVENTS
from samestep.script_proof import tiny
from samestep.script_proof.compare import Verdict, compare_runs, prove
from samestep.script_proof.forked import forking
from samestep.script_proof.runs import ScriptProof
from samestep.script_proof.settings import SETTINGS, RecordSettings
from samestep.script_proof.torchrun import by_torchrun


def test_models_get_two_layers_however_a_configuration_has_them(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(PreTrainedModel, "__init__", PreTrainedModel.__init__)  # given back afterwards
    noted: list[tuple[str, str, int]] = []
    tiny.install(lambda *what: noted.append(what))
    sizes: dict[str, Any] = {"vocab_size": 20, "hidden_size": 8, "intermediate_size": 8, "head_dim": 4}
    gemma = Gemma2ForCausalLM(
        Gemma2Config(**sizes, num_hidden_layers=6, num_attention_heads=2, num_key_value_heads=2)
    )
    gpt = GPT2Model(GPT2Config(vocab_size=20, n_embd=8, n_head=2, n_layer=5, n_positions=8))
    t5 = T5Model(T5Config(vocab_size=20, d_model=8, d_ff=8, d_kv=4, num_heads=2, num_layers=4, num_decoder_layers=3))
    assert [len(each) for each in (gemma.model.layers, gpt.h, t5.encoder.block, t5.decoder.block)] == [2, 2, 2, 2]
    assert noted == [
        ("Gemma2Config", "num_hidden_layers", 6),
        ("GPT2Config", "n_layer", 5),
        ("T5Config", "num_layers", 4),
        ("T5Config", "num_decoder_layers", 3),
    ]
    tokens = torch.zeros(1, 4, dtype=torch.long)
    assert gemma(tokens).logits.shape == (1, 4, 20)


def test_a_configuration_of_two_layers_stays() -> None:
    config = LlamaConfig(num_hidden_layers=2)
    before = config.to_dict()
    assert list(tiny.shrink(config)) == []
    assert config.to_dict() == before


def judged(folder: Path, shrunk: bool) -> Verdict:
    record = Record(steps=[Step(rows=["a"], gradients=weights(1), after=weights(2))], before=weights(0))
    place = runs(folder, alone=record, split=[record])
    for name in ("alone", "split"):
        RecordSettings(folder="", steps=1, tiny=True).write(place / name / SETTINGS)
    if shrunk:
        event = {"event": "shrunk", "config": "LlamaConfig", "key": "num_hidden_layers", "layers": 32}
        with (place / "split" / "rank-0" / EVENTS).open("a", encoding="utf-8") as file:
            file.write(f"{json.dumps(event)}\n")
    return compare_runs(place)


@pytest.mark.parametrize(
    ("shrunk", "note"),
    [
        (True, "with 2 layers, instead of: LlamaConfig num_hidden_layers 32"),
        (False, "--tiny changed nothing: no model of transformers with more than 2 layers was made"),
    ],
)
def test_the_notes_say_what_was_made_smaller(tmp_path: Path, shrunk: bool, note: str) -> None:
    verdict = judged(tmp_path, shrunk)
    assert any(note in each.en for each in verdict.notes), verdict.notes
    assert any(each.en == "layers that --tiny left out" for each in verdict.not_compared)


SCRIPT = """
import torch
import torch.distributed as dist
from transformers import AutoConfig, AutoModelForCausalLM

dist.init_process_group("gloo")
rank, count = dist.get_rank(), dist.get_world_size()
torch.manual_seed(0)
sizes = dict(hidden_size=8, intermediate_size=8, num_attention_heads=2, vocab_size=20, num_hidden_layers=12)
model = AutoModelForCausalLM.from_config(AutoConfig.for_model("llama", **sizes))
assert len(model.model.layers) == 2
model = torch.nn.parallel.DistributedDataParallel(model)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
generator = torch.Generator().manual_seed(0)
for _ in range(2):
    rows = torch.randint(20, (4, 6), generator=generator)[rank * 4 // count : (rank + 1) * 4 // count]
    optimizer.zero_grad()
    model(input_ids=rows, labels=rows).loss.backward()
    optimizer.step()
"""


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_a_script_is_proved_with_two_layers(tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.write_text(SCRIPT, encoding="utf-8")
    proof = ScriptProof(script=(str(script),), device="cpu", steps=2, tiny=True)
    with forking(proof, by_torchrun) as starter:
        verdict = prove(proof, tmp_path / "runs", starter)
    assert verdict.same_step
    assert any("LlamaConfig num_hidden_layers 12" in each.en for each in verdict.notes)
