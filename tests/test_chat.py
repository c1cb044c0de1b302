"""Task chat from the data to the answer: what is shown, trained, exported and loaded, new tokens, a hub's models."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from chat_jobs import chat_task, save_model, say, template, write_rows

from samestep import jobfile
from samestep.cli.main import main
from samestep.errors import UserError
from samestep.inference import load_model


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_model(tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="module")
def rows(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_rows(tmp_path_factory.mktemp("rows") / "chats.jsonl", template().chats()[:64])


def job_file(folder: Path, model: Path, rows: Path, **recipe: Any) -> Path:
    values = {
        "recipe": {
            "task": "chat",
            "data": {"source": str(rows), "length": 192, "packing": True, "held_out": 0.1},
            "model": {"name": str(model)},
            "batch": 8,
            "steps": 3,
            "optimizer": {"name": "adamw", "lr": 0.01},
            **recipe,
        },
        "run": {
            "layout": "single",
            "folder": str(folder / "run"),
            "checkpoint": {},
            "device": "cpu",
            "threads": 1,
            "log": [],
        },
    }
    file = folder / "job.yaml"
    file.write_text(json.dumps(values), encoding="utf-8")
    return file


def exported_logits(folder: Path, asked: str) -> tuple[Any, torch.Tensor, Any]:
    """What transformers alone makes of an exported folder: the tokenizer, logits for a question, and an answer."""
    from transformers import AutoModelForCausalLM, AutoTokenizer

    tokenizer: Any = AutoTokenizer.from_pretrained(folder)
    net: Any = AutoModelForCausalLM.from_pretrained(folder, dtype="auto").eval()
    given = tokenizer.apply_chat_template([say("user", asked)], add_generation_prompt=True, return_tensors="pt")
    ids = given["input_ids"]
    with torch.inference_mode():
        written = net.generate(ids, max_new_tokens=8, do_sample=False)[0, ids.shape[1] :]
        return tokenizer, net(ids).logits, tokenizer.decode(written, skip_special_tokens=True)


@pytest.mark.timeout(120)
@pytest.mark.parametrize(
    "adapter", [None, pytest.param({"rank": 4, "alpha": 8}, marks=pytest.mark.slow)], ids=["full", "lora"]
)
def test_trained_exported_loaded_and_asked(
    adapter: Any, model: Path, rows: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    file = job_file(tmp_path, model, rows, **({} if adapter is None else {"adapter": adapter}))
    assert main(["train", str(file), "--progress", "1h"]) == 0
    assert "rows 64, format conversations (messages), counts assistant, cut 0" in capfd.readouterr().err
    folder, run = tmp_path / "exported", tmp_path / "run"
    merge = [] if adapter is None else ["--merge"]
    assert main(["checkpoint", "export", str(run), str(folder), "--to", "hugging-face", *merge]) == 0
    tokenizer, logits, answer = exported_logits(folder, "Say hello to Ada in French.")
    assert tokenizer.chat_template.strip() == template().TEMPLATE.strip()
    generation = json.loads((folder / "generation_config.json").read_text(encoding="utf-8"))
    assert generation["eos_token_id"] == tokenizer.eos_token_id
    net = load_model(jobfile.load(file).job.recipe, run)
    ids = tokenizer.apply_chat_template(
        [say("user", "Say hello to Ada in French.")], add_generation_prompt=True, return_tensors="pt"
    )["input_ids"]
    with torch.inference_mode():
        torch.testing.assert_close(net(input_ids=ids).logits, logits, rtol=0, atol=0 if adapter is None else 1e-5)
    capfd.readouterr()
    assert main(["chat", str(run), "--once", "Say hello to Ada in French.", "--new-tokens", "8"]) == 0
    assert capfd.readouterr().out == answer + "\n"


def test_data_are_shown_as_they_are_trained_on(
    model: Path, rows: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = job_file(tmp_path, model, rows)
    report = tmp_path / "data.json"
    assert main(["data", str(file), "--show", "2", "--json", str(report)]) == 0
    printed = capsys.readouterr().out
    assert "format: conversations (messages)" in printed
    assert "counts: assistant" in printed
    assert sum(line.startswith("counts ") and line.endswith("<|im_end|>") for line in printed.splitlines()) > 2
    values = json.loads(report.read_text(encoding="utf-8"))
    task = chat_task(model, rows, length=192, packing=True, held_out=0.1)
    for sample in values["samples"]:
        inputs, targets, _ = task.train_set()[sample["sample"]]
        documents: list[list[Any]] = []
        for piece in sample["pieces"]:
            documents += [[]] if piece["begins"] else []
            documents[-1] += [(token, piece["counts"]) for token in piece["tokens"]]
        assert [token for row in documents for token, _ in row[:-1]] == inputs.tolist()
        assert [token if counts else -100 for row in documents for token, counts in row[1:]] == targets.tolist()
    assert main(["data", str(file), "--from", "5000"]) == 2
    assert "--from is 5000, and there are" in capsys.readouterr().err


def test_new_tokens_grow_the_tables_to_a_multiple_of_eight(model: Path, tmp_path: Path) -> None:
    source = write_rows(tmp_path / "rows.jsonl", [{"text": "a <think> b"}])
    tokens = [f"<n{number}>" for number in range(20)] + ["<think>"]
    task = chat_task(model, source, named={"new_tokens": tokens})
    task.check()
    table = task.model().get_input_embeddings().weight
    before = chat_task(model, source).model().get_input_embeddings().weight
    assert table.shape[0] == 392  # 370 of the tokenizer and 21, in a multiple of 8
    assert torch.equal(table[:384], before)
    torch.testing.assert_close(table[384:], before.mean(dim=0).expand(8, -1))
    pretrained = task.pretrained()
    assert pretrained.config.vocab_size == 392
    assert pretrained.processors[0].convert_tokens_to_ids("<think>") == 390


def test_a_hubs_model_is_taken_from_where_it_is_kept(
    model: Path, rows: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    kept = tmp_path / "hub" / "models--someone--small"
    (kept / "refs").mkdir(parents=True)
    (kept / "refs" / "main").write_text("abc123", encoding="utf-8")
    (kept / "snapshots").mkdir()
    (kept / "snapshots" / "abc123").symlink_to(model)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path / "hub"))
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    from huggingface_hub import snapshot_download

    monkeypatch.setattr(
        "huggingface_hub.snapshot_download",
        lambda name, **options: snapshot_download(name, cache_dir=tmp_path / "hub", **options),
    )
    chat_task(Path("someone/small"), rows, length=192).check()
    with pytest.raises(UserError, match=r"recipe.model.name is someone/other: there is no such folder, and from the"):
        chat_task(Path("someone/other"), rows, length=192).check()
    with pytest.raises(UserError, match=r"there is no such folder$"):
        chat_task(tmp_path / "nowhere", rows).check()


def test_what_has_no_conversations_is_told(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    job = tmp_path / "job.yaml"
    job.write_text("recipe: {task: regression, batch: 4, steps: 1}\n", encoding="utf-8")
    assert main(["chat", str(tmp_path), "--job", str(job), "--once", "hello"]) == 2
    assert "task regression has no conversations" in capsys.readouterr().err
    assert main(["chat", str(tmp_path), "--job", str(job), "--once", " "]) == 2
    assert main(["data", str(job)]) == 2
    assert "task regression doesn't say how it reads its samples" in capsys.readouterr().err
