"""Exported models beside the trained ones: six planted faults are named, and what an export may do is none."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import (
    CLIPConfig,
    CLIPModel,
    LlamaConfig,
    LlamaForCausalLM,
    MixtralConfig,
    MixtralForCausalLM,
    PreTrainedTokenizerFast,
    ViTConfig,
    ViTForImageClassification,
)

from samestep.cli.main import main
from samestep.convert.beside import Beside, compare
from samestep.errors import UserError

pytestmark = pytest.mark.filterwarnings("ignore:.*is_gradient_checkpointing")
CHAT = "{% for m in messages %}<{{ m['role'] }}>{{ m['content'] }}{% endfor %}"


def tokenizer() -> PreTrainedTokenizerFast:
    from tokenizers import Tokenizer, models, pre_tokenizers

    rules = Tokenizer(models.BPE({chr(at + 33): at for at in range(90)}, [], unk_token="!"))
    rules.pre_tokenizer = pre_tokenizers.Whitespace()
    made = PreTrainedTokenizerFast(tokenizer_object=rules, unk_token="!")
    made.chat_template = CHAT
    return made


def config(**others: object) -> LlamaConfig:
    sizes = {"vocab_size": 90, "hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2}
    return LlamaConfig(**{**sizes, "num_attention_heads": 2, "max_position_embeddings": 32, **others})


@pytest.fixture(scope="module")
def model() -> LlamaForCausalLM:
    torch.manual_seed(0)
    return LlamaForCausalLM(config())


@pytest.fixture(scope="module")
def trained(model: LlamaForCausalLM, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return saved(model, tmp_path_factory.mktemp("trained") / "model")


def saved(model: LlamaForCausalLM, folder: Path) -> Path:
    model.save_pretrained(folder)
    tokenizer().save_pretrained(folder)
    return folder


def export(
    model: LlamaForCausalLM, folder: Path, change: Callable[[LlamaForCausalLM], object], **others: object
) -> Path:
    """The model's weights under a configuration with other values, changed."""
    made = LlamaForCausalLM(config(**others))
    made.load_state_dict(model.state_dict())
    change(made)
    return saved(made, folder)


def edited(folder: Path, file: str, **values: object) -> Path:
    path = folder / file
    path.write_text(json.dumps({**json.loads(path.read_text(encoding="utf-8")), **values}), encoding="utf-8")
    return folder


def nothing(_: object) -> None:
    pass


def departing(beside: Beside, kind: str, module: str | None, *words: str) -> None:
    assert not beside.same
    assert beside.departure is not None
    assert (beside.departure.kind, beside.departure.module) == (kind, module)
    for word in words:
        assert word in beside.departure.line, beside.departure.line


def test_an_equal_export_is_the_same_model(
    model: LlamaForCausalLM, trained: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    other = export(model, tmp_path / "out", nothing)
    assert main(["verify", str(trained), "--against", str(other), "--json", str(tmp_path / "a.json")]) == 0
    assert f"{other}: the same model as {trained}\nresults apart by 0, outputs of " in capsys.readouterr().out
    assert json.loads((tmp_path / "a.json").read_text(encoding="utf-8"))["same_model"] is True


def test_rounding_to_the_type_of_the_files_is_no_fault_and_is_said(
    model: LlamaForCausalLM, trained: Path, tmp_path: Path
) -> None:
    beside = compare(trained, export(model, tmp_path / "out", lambda made: made.bfloat16()))
    assert beside.same
    assert beside.logits == 0
    assert beside.notes[0] == "21 tensors are bfloat16 in the files, and were trained as float32"
    assert float(beside.notes[1].rpartition(" ")[2]) == pytest.approx(moved_by(model), rel=0.02)


def moved_by(model: LlamaForCausalLM) -> float:
    """How far logits move by the rounding of weights, computed here."""
    rounded = LlamaForCausalLM(config()).eval()
    rounded.load_state_dict({name: value.bfloat16().float() for name, value in model.state_dict().items()})
    tokens = torch.randint(90, (2, 32), generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        exact, moved = model.eval()(tokens).logits, rounded(tokens).logits
    return ((exact - moved).norm() / exact.norm()).item()


def test_rotary_embeddings_of_another_base_as_the_page_shows_it(
    model: LlamaForCausalLM,
    trained: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    rope = {"rope_type": "default", "rope_theta": 500.0}
    export(model, tmp_path / "exported", nothing, rope_parameters=rope)
    (tmp_path / "reviews-model").symlink_to(trained)
    monkeypatch.chdir(tmp_path)
    capsys.readouterr()
    assert main(["verify", "reviews-model", "--against", "exported"]) == 1
    printed = capsys.readouterr().out
    assert "model.rotary_emb" in printed
    shown = (Path(__file__).resolve().parents[1] / "docs/convert.md").read_text(encoding="utf-8")
    assert f"```text\n{printed}```" in shown, printed


def without_head(folder: Path) -> Path:
    weights = load_file(folder / "model.safetensors")
    del weights["lm_head.weight"]
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    return folder


def test_a_head_that_is_tied_though_it_was_not(model: LlamaForCausalLM, trained: Path, tmp_path: Path) -> None:
    other = edited(without_head(export(model, tmp_path / "out", nothing)), "config.json", tie_word_embeddings=True)
    departing(compare(trained, other), "forward-differs", "lm_head", "tie_word_embeddings True instead of False")


def test_a_head_that_the_files_lack(model: LlamaForCausalLM, trained: Path, tmp_path: Path) -> None:
    other = without_head(export(model, tmp_path / "out", nothing))
    departing(compare(trained, other), "missing-weights", "lm_head", "drawn at random")


def test_queries_in_another_layout(model: LlamaForCausalLM, trained: Path, tmp_path: Path) -> None:
    def interleave(made: LlamaForCausalLM) -> None:
        weight = made.get_parameter("model.layers.1.self_attn.q_proj.weight")
        weight.data = weight.data.view(2, 2, 4, 16).transpose(1, 2).reshape(16, 16).clone()

    other = export(model, tmp_path / "out", interleave)
    departing(compare(trained, other), "forward-differs", "model.layers.1.self_attn.q_proj", "rows in another order")


def test_weights_that_were_rounded_on_their_way(model: LlamaForCausalLM, trained: Path, tmp_path: Path) -> None:
    other = export(model, tmp_path / "out", lambda made: made.get_submodule("model.layers.0.mlp").half().float())
    departing(compare(trained, other), "forward-differs", "model.layers.0.mlp.gate_proj", "rounded to float16")


def test_a_chat_that_is_written_otherwise(trained: Path, model: LlamaForCausalLM, tmp_path: Path) -> None:
    other = export(model, tmp_path / "out", nothing)
    (other / "chat_template.jinja").write_text(CHAT.replace("}}{%", "}}\n{%"), encoding="utf-8")
    departing(compare(trained, other), "chat-template", None, "from character 21 on")


def test_a_text_that_is_cut_otherwise(trained: Path, model: LlamaForCausalLM, tmp_path: Path) -> None:
    other = export(model, tmp_path / "out", nothing)
    rules = json.loads((other / "tokenizer.json").read_text(encoding="utf-8"))
    edited(other, "tokenizer.json", normalizer={"type": "Lowercase"}, model=rules["model"])
    departing(compare(trained, other), "tokenizer", None, "becomes other ids from token 1 on")


@pytest.fixture(scope="module")
def adapted(trained: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder of PEFT's whose adapters change the model."""
    from peft import LoraConfig, get_peft_model

    torch.manual_seed(1)
    adapters = LoraConfig(r=2, lora_alpha=4, target_modules=["q_proj", "down_proj"], init_lora_weights=False)
    folder = tmp_path_factory.mktemp("adapted") / "adapter"
    get_peft_model(LlamaForCausalLM.from_pretrained(trained), adapters).save_pretrained(str(folder))
    return folder


def merged(adapted: Path, trained: Path, folder: Path, dtype: torch.dtype, factor: float = 1.0) -> Path:
    """The adapters added to their weights here, by their product."""
    made = LlamaForCausalLM.from_pretrained(trained)
    parts = load_file(adapted / "adapter_model.safetensors")
    for name, down in parts.items():
        if ".lora_A." in name:
            layer = name.removeprefix("base_model.model.").partition(".lora_A.")[0]
            product = parts[name.replace("lora_A", "lora_B")] @ down
            made.get_parameter(f"{layer}.weight").data += factor * 2 * product  # alpha 4 over rank 2
    return saved(made.bfloat16() if dtype == torch.bfloat16 else made, folder)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_merged_adapters_are_the_same_model(adapted: Path, trained: Path, tmp_path: Path, dtype: torch.dtype) -> None:
    beside = compare(adapted, merged(adapted, trained, tmp_path / "out", dtype))
    assert beside.same, beside.departure


def test_adapters_that_were_not_merged(adapted: Path, trained: Path) -> None:
    departing(compare(adapted, trained), "adapters-not-merged", "model.layers.0.self_attn.q_proj", "into 4 weights")


def test_adapters_of_another_scale(adapted: Path, trained: Path, tmp_path: Path) -> None:
    other = merged(adapted, trained, tmp_path / "out", torch.float32, factor=2.0)
    departing(compare(adapted, other), "forward-differs", "model.layers.0.self_attn.q_proj", "is apart by")


def test_a_pickle_that_names_a_function_is_refused(trained: Path, model: LlamaForCausalLM, tmp_path: Path) -> None:
    import os

    class Running:
        def __reduce__(self) -> tuple[object, ...]:
            return os.mkdir, (str(tmp_path / "was-run"),)

    other = export(model, tmp_path / "out", nothing)
    (other / "model.safetensors").unlink()
    torch.save({"lm_head.weight": Running()}, other / "pytorch_model.bin")
    with pytest.raises(UserError, match="mkdir"):
        compare(trained, other)
    assert not (tmp_path / "was-run").exists()


SIZES: dict[str, Any] = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2}


def test_weights_that_the_files_name_otherwise_are_rounded_as_the_files_are(tmp_path: Path) -> None:
    vision = ViTForImageClassification(ViTConfig(**SIZES, image_size=16, patch_size=8))
    experts = MixtralForCausalLM(MixtralConfig(**SIZES, vocab_size=50, num_key_value_heads=1, num_local_experts=2))
    for model in (vision, experts):
        place = tmp_path / type(model).__name__
        model.save_pretrained(place / "trained")
        model.bfloat16().save_pretrained(place / "exported")
        beside = compare(place / "trained", place / "exported")
        assert beside.same, beside.departure


def test_a_model_that_needs_more_than_token_ids_is_refused(tmp_path: Path) -> None:
    vision = {**SIZES, "image_size": 16, "patch_size": 8}
    text = {**SIZES, "vocab_size": 50, "bos_token_id": 1, "eos_token_id": 2}
    model = CLIPModel(CLIPConfig(text_config=text, vision_config=vision))
    model.save_pretrained(tmp_path / "model")
    with pytest.raises(UserError, match="CLIPModel can't be called with input_ids alone"):
        compare(tmp_path / "model", tmp_path / "model")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--against", "out"], "name its folder: samestep verify FOLDER --against out"),
        (["job.yaml", "--against", "out"], "job.yaml is no folder"),
        ([".", "--against", "out", "--layouts", "all"], "--layouts goes with a job file"),
        ([".", "--against", "out", "--seed", "1"], "--seed goes with --script"),
        ([".", "--against", "out", "--script", "train.py"], "leave one of them out"),
    ],
)
def test_what_does_not_go_with_it_is_refused(
    arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["verify", *arguments]) == 2
    assert message in capsys.readouterr().err
