"""Text classification: tokens, batches, loss, metrics, the models of several types, pretrained ones, mistakes."""

import hashlib
import json
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from tokenizers import Tokenizer, models, pre_tokenizers, processors
from unsafe import trapped_state

from samestep.data.types import Batch
from samestep.errors import UserError
from samestep.jobfile import load
from samestep.layout import ModelShape
from samestep.recipe import Recipe
from samestep.tasks.base import call
from samestep.tasks.registry import resolve
from samestep.tasks.text_classification import TextClassification

WORDS = [f"word{number}" for number in range(30)]
TINY = {"layers": 3, "hidden": 16, "heads": 2}
EXAMPLES = Path(__file__).parent.parent / "examples"


@pytest.fixture
def source(tmp_path: Path) -> Path:
    path = tmp_path / "data.jsonl"
    rows = [
        {"text": " ".join(WORDS[(n * k) % 30] for k in range(1, 2 + n % 9)), "label": "abc"[n % 3]} for n in range(60)
    ]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return path


def task(source: Path, model: dict[str, Any] | None = None, **data: Any) -> TextClassification:
    wanted = {"source": str(source), "max_length": 16, **data}
    if "tokenizer" not in wanted and "folder" not in (model or {}):
        wanted.setdefault("vocabulary", 200)
    made = resolve(Recipe(task="text-classification", data=wanted, model=TINY if model is None else model))
    assert isinstance(made, TextClassification)
    return made


def mistake(source: Path, model: dict[str, Any] | None = None, **data: Any) -> str:
    with pytest.raises(UserError) as caught:
        task(source, model, **data).check()
    return str(caught.value)


def batch_of(made: TextClassification, *indices: int) -> Batch:
    return made.collate([made.train_set()[index] for index in indices])


def seeded_model(made: TextClassification, seed: int = 0) -> Any:
    torch.manual_seed(seed)
    return made.model()


def word_tokenizer(padding: str | None = "[PAD]", template: bool = True) -> Tokenizer:
    special = [padding, "[UNK]", "[CLS]", "[SEP]"] if padding else ["[UNK]", "[CLS]", "[SEP]"]
    vocabulary = {token: number for number, token in enumerate([*special, *WORDS])}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="[UNK]"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()  # pyright: ignore[reportAttributeAccessIssue]
    if template:
        tokenizer.post_processor = processors.TemplateProcessing(  # pyright: ignore[reportAttributeAccessIssue]
            single="[CLS] $A [SEP]", special_tokens=[(name, vocabulary[name]) for name in ("[CLS]", "[SEP]")]
        )
    return tokenizer


@pytest.fixture
def pretrained(tmp_path: Path) -> Path:
    """A folder with a tiny encoder without a head, and its tokenizer."""
    from transformers import BertConfig, BertModel, PreTrainedTokenizerFast

    folder = tmp_path / "pretrained"
    config = BertConfig(
        vocab_size=34,
        hidden_size=16,
        num_hidden_layers=2,
        num_attention_heads=4,
        intermediate_size=32,
        max_position_embeddings=20,
    )
    torch.manual_seed(5)
    BertModel(config).save_pretrained(folder)
    names = {"pad_token": "[PAD]", "unk_token": "[UNK]", "cls_token": "[CLS]", "sep_token": "[SEP]"}
    PreTrainedTokenizerFast(tokenizer_object=word_tokenizer(), **names).save_pretrained(folder)
    return folder


IDS = """
import hashlib, sys
from samestep.recipe import Recipe
from samestep.tasks.registry import resolve
task = resolve(Recipe(task="text-classification", data={"source": sys.argv[1], "vocabulary": int(sys.argv[2])}))
digest = hashlib.sha256()
for samples in (task.train_set(), task.eval_set()):
    for index in range(len(samples)):
        digest.update(samples[index][0].tobytes())
print(digest.hexdigest())
"""


@pytest.mark.parametrize("vocabulary", [40, 2000])
def test_every_process_trains_the_same_tokenizer(tmp_path: Path, vocabulary: int) -> None:
    path = tmp_path / "data.jsonl"
    # Many characters and pairs of equal frequency: what a trainer that breaks ties at random trips over.
    texts = [
        hashlib.sha256(bytes([n, k])).hexdigest() + chr(0x4E00 + 7 * n + k) for n in range(100) for k in range(4)
    ]
    rows = [json.dumps({"text": text[: 20 + n % 9] + text[-1], "label": n % 2}) for n, text in enumerate(texts)]
    path.write_text("\n".join(rows), encoding="utf-8")
    command = [sys.executable, "-c", IDS, str(path), str(vocabulary)]
    running = [subprocess.Popen(command, stdout=subprocess.PIPE, text=True) for _ in range(3)]
    found = [process.communicate(timeout=60)[0] for process in running]
    assert [process.returncode for process in running] == [0, 0, 0]
    assert len(set(found)) == 1


def test_texts_become_tokens_between_start_and_end_and_are_cut(source: Path) -> None:
    made = task(source, max_length=5)
    for index in range(len(made.train_set())):
        ids, label = made.train_set()[index]
        assert (ids[0], ids[-1]) == (2, 3)
        assert 3 <= len(ids) <= 5
        assert 0 <= label <= 2
    with pytest.raises(IndexError):
        made.train_set()[len(made.train_set())]


def test_a_batch_is_padded_to_its_longest_sample(source: Path) -> None:
    made = task(source)
    samples = [made.train_set()[index] for index in range(6)]
    inputs, targets = made.collate(samples)
    longest = max(len(ids) for ids, _ in samples)
    assert inputs["input_ids"].shape == inputs["attention_mask"].shape == (6, longest)
    assert inputs["attention_mask"].sum(1).tolist() == [len(ids) for ids, _ in samples]
    assert (inputs["input_ids"][inputs["attention_mask"] == 0] == 0).all()
    assert targets.tolist() == [label for _, label in samples]
    assert targets.dtype == inputs["input_ids"].dtype == torch.int64


@pytest.mark.parametrize("kind", ["bert", "roberta", "distilbert", "electra"])
def test_padding_does_not_change_the_loss(source: Path, kind: str) -> None:
    made = task(source, {**TINY, "type": kind})
    model = seeded_model(made).double().eval()
    alone = [made.loss(call(model, one.inputs), one) for one in (batch_of(made, index) for index in range(8))]
    together = batch_of(made, *range(8))
    assert together.inputs["attention_mask"].min() == 0
    summed, count = made.loss(call(model, together.inputs), together)
    assert count == 8
    assert summed.dtype == torch.float64
    torch.testing.assert_close(summed, torch.stack([term for term, _ in alone]).sum(), rtol=1e-12, atol=0)
    wider = {name: torch.nn.functional.pad(part, (0, 3)) for name, part in together.inputs.items()}
    torch.testing.assert_close(made.loss(call(model, wider), together)[0], summed, rtol=1e-12, atol=0)


def test_the_loss_is_at_least_float32_and_takes_plain_logits(source: Path) -> None:
    made = task(source)
    batch = Batch({}, torch.tensor([0, 2]))
    logits = torch.tensor([[2.0, 0.0, -1.0], [0.5, 0.25, 1.0]], dtype=torch.bfloat16)
    summed, count = made.loss(logits, batch)
    assert (summed.dtype, count) == (torch.float32, 2)
    expected = -logits.float().log_softmax(-1)[[0, 1], [0, 2]].sum()
    torch.testing.assert_close(summed, expected)
    probabilities, targets = made.scores(logits.double(), batch)
    assert probabilities.dtype == torch.float32
    torch.testing.assert_close(probabilities.sum(-1), torch.ones(2))
    assert targets is batch.targets


def test_metrics_are_of_all_samples_and_by_class(source: Path) -> None:
    made = task(source)
    metrics = made.metrics()
    names = ["accuracy", "precision", "recall", "f1", "support", "confusion_matrix", "precision_recall_curve"]
    assert list(metrics) == names
    logits = torch.eye(3)[[0, 0, 1, 2, 1]]
    found = {}
    for name, metric in metrics.items():
        metric.update(*made.scores(logits, Batch({}, torch.tensor([0, 0, 1, 2, 2]))))
        found[name] = metric.compute()
    assert found["accuracy"].item() == pytest.approx(0.8)
    assert found["precision"].tolist() == pytest.approx([1, 0.5, 1])
    assert found["recall"].tolist() == pytest.approx([1, 1, 0.5])
    assert found["f1"].tolist() == pytest.approx([1, 2 / 3, 2 / 3])
    assert found["support"].tolist() == found["confusion_matrix"].sum(1).tolist() == [2, 1, 2]
    assert [len(part) for part in found["precision_recall_curve"].values()] == [3, 3, 3]
    assert made.class_names() == ("a", "b", "c")


@pytest.mark.parametrize("kind", ["bert", "roberta", "distilbert", "electra", "albert"])
def test_model_types_have_the_sizes_that_were_asked_for(source: Path, kind: str) -> None:
    sizes = {"layers": 3, "hidden": 24, "heads": 4, "feed_forward": 40, "dropout": 0.25}
    made = task(source, {**sizes, "type": kind})
    made.check()
    model = seeded_model(made).eval()
    assert made.shape() == ModelShape(heads=4, layers=3, sequence_length=16)
    assert model.config._attn_implementation == "sdpa"
    numbers = {int(found[1]) for name, _ in model.named_parameters() if (found := re.search(r"layer\.(\d+)\.", name))}
    # albert's layers share their weights: one feed-forward, which runs once a layer.
    assert numbers == (set() if kind == "albert" else {0, 1, 2})
    wide = [m for m in model.modules() if isinstance(m, torch.nn.Linear) and m.out_features == 40]
    assert len(wide) == (1 if kind == "albert" else 3)
    runs: list[torch.nn.Module] = []
    for module in wide:
        module.register_forward_hook(lambda module, *_: runs.append(module))
    linear = {(m.in_features, m.out_features) for m in model.modules() if isinstance(m, torch.nn.Linear)}
    assert {(24, 24), (24, 40), (40, 24), (24, 3)} <= linear
    assert {m.p for m in model.modules() if isinstance(m, torch.nn.Dropout)} == {0.25}
    assert model.get_input_embeddings().num_embeddings == 200
    assert call(model, batch_of(made, 0, 1).inputs).logits.shape == (2, 3)
    assert len(runs) == 3
    assert {parameter.dtype for parameter in model.parameters()} == {torch.float32}


def test_a_model_without_sizes_has_the_default_ones(source: Path) -> None:
    made = task(source, {})
    assert made.shape() == ModelShape(heads=4, layers=4, sequence_length=16)
    model = seeded_model(made)
    assert (model.config.hidden_size, model.config.intermediate_size) == (256, 1024)


def test_the_weights_follow_the_seed_and_the_classes_have_names(source: Path) -> None:
    made = task(source)
    one, same, other = (seeded_model(made, seed).state_dict() for seed in (0, 0, 1))
    assert all(torch.equal(one[name], same[name]) for name in one)
    assert not torch.equal(one["classifier.weight"], other["classifier.weight"])
    assert seeded_model(made).config.id2label == {0: "a", 1: "b", 2: "c"}


def test_further_keys_of_the_configuration_reach_the_model(source: Path) -> None:
    made = task(source, {**TINY, "config": {"hidden_act": "relu", "max_position_embeddings": 33}})
    made.check()
    config = seeded_model(made).config
    assert (config.hidden_act, config.max_position_embeddings) == ("relu", 33)


def test_long_texts_get_positions(source: Path) -> None:
    for kind in ("bert", "roberta"):
        made = task(source, {**TINY, "type": kind}, max_length=600)
        made.check()
        ids = torch.full((1, 600), 4)
        assert seeded_model(made)(ids, torch.ones_like(ids)).logits.shape == (1, 3)


@pytest.mark.parametrize(
    ("model", "said"),
    [
        (
            {"hidden": 30, "heads": 4},
            "recipe.model: hidden is 30 and heads is 4, which doesn't divide it; use heads of 1, 2, 3, 5, "
            "6, 10, 15, 30",
        ),
        (
            {"type": "brt"},
            'recipe.model.type is "brt"; did you mean "bert"? use bert, roberta, distilbert, electra or albert',
        ),
        ({"type": "vit"}, 'recipe.model.type is "vit"; use bert, roberta, distilbert, electra or albert'),
        (
            {"type": "fnet"},
            'recipe.model.type "fnet" takes no heads; use bert, roberta, distilbert, electra or albert',
        ),
        ({"type": "funnel"}, 'recipe.model: "funnel" refuses its configuration: This model does not support'),
        ({"layers": 0}, "recipe.model.layers is 0; it should be greater than 0"),
        ({"layer": 2}, 'unknown key "recipe.model.layer"; did you mean "layers"?'),
        ({"dropout": 1}, "recipe.model.dropout is 1; it should be less than 1"),
        (
            {"config": {"hiden_act": "relu"}},
            'unknown key "recipe.model.config.hiden_act"; did you mean "hidden_act"?',
        ),
        (
            {"config": {"hidden_act": 5}},
            "recipe.model: \"bert\" refuses its configuration: Validation error for field 'hidden_act'",
        ),
        (
            {"config": {"hidden_act": "none"}},
            'recipe.model: "bert" can\'t be built as a text classifier: ',
        ),
        (
            {"config": {"max_position_embeddings": 8}},
            "recipe.data.max_length is 16, but the model has positions for 8 tokens; use 8 or less",
        ),
        (
            {"type": "roberta", "config": {"max_position_embeddings": 16}},
            "recipe.data.max_length is 16, but the model has positions for 15 tokens; use 15 or less",
        ),
        (
            {"folder": "nowhere"},
            "recipe.model.folder is nowhere: there is no such folder; use a folder written by save_pretrained",
        ),
        (
            {"folder": "nowhere", "layers": 2},
            "recipe.model: folder and layers are both given; layers comes with the model in the folder",
        ),
        (
            {"folder": "package:not_there/model"},
            'recipe.model.folder is "package:not_there/model": package not_there is not installed; '
            "install what pip offers with a module not_there in it, which may have another name there",
        ),
    ],
)
def test_mistakes_in_the_model(source: Path, model: dict[str, Any], said: str) -> None:
    assert mistake(source, model).startswith(said)


@pytest.mark.parametrize(
    ("data", "said"),
    [
        ({"max_length": 2}, "recipe.data.max_length is 2; it should be greater than or equal to 3"),
        ({"vocabulary": 5}, "recipe.data.vocabulary is 5; it should be greater than or equal to 32"),
        ({"held_out": 1}, "recipe.data.held_out is 1; it should be less than 1"),
        ({"limit": 1}, "recipe.data.limit is 1; it should be greater than or equal to 2"),
        ({"sources": "x"}, 'unknown key "recipe.data.sources"; did you mean "source"?'),
        (
            {"tokenizer": "x", "vocabulary": 100},
            "recipe.data: tokenizer and vocabulary are both given; vocabulary is for a tokenizer trained on the "
            "texts",
        ),
        ({"tokenizer": "nowhere.json"}, "recipe.data.tokenizer: no file or folder nowhere.json"),
    ],
)
def test_mistakes_in_the_data_section(source: Path, data: dict[str, Any], said: str) -> None:
    assert mistake(source, **data).startswith(said)


def test_tokenizers_from_a_file_and_a_folder(source: Path, tmp_path: Path, pretrained: Path) -> None:
    path = tmp_path / "tokenizer.json"
    word_tokenizer().save(str(path))
    from_file, from_folder = (task(source, tokenizer=str(where)) for where in (path, pretrained))
    for made in (from_file, from_folder):
        made.check()
        assert made.train_set()[0][0].tolist()[0] == 2
        assert seeded_model(made).get_input_embeddings().num_embeddings == 34
        assert batch_of(made, *range(9)).inputs["input_ids"].min() == 0
    assert batch_of(from_file, 1, 2).inputs["input_ids"].equal(batch_of(from_folder, 1, 2).inputs["input_ids"])


def test_tokenizers_that_will_not_do(source: Path, tmp_path: Path) -> None:
    path = tmp_path / "tokenizer.json"
    word_tokenizer(padding=None).save(str(path))
    assert mistake(source, tokenizer=str(path)) == (
        f"recipe.data.tokenizer: the tokenizer in {path} has no padding token; use one with [PAD] or <pad> or "
        "<|pad|> or <|padding|>"
    )
    path.write_text("{}", encoding="utf-8")
    said = mistake(source, tokenizer=str(path))
    assert said.startswith(f"recipe.data.tokenizer: {path} can't be loaded as a tokenizer: ")
    assert said.endswith("; use a tokenizer.json, or a folder with one")
    assert mistake(source, tokenizer=str(tmp_path)).startswith(
        f"recipe.data.tokenizer: {tmp_path} can't be loaded as"
    )


def test_a_text_without_tokens(tmp_path: Path) -> None:
    source, path = tmp_path / "data.csv", tmp_path / "tokenizer.json"
    source.write_text("text,label\nword1,a\n\u00a0\u200b,b\n", encoding="utf-8")
    tokenizer = word_tokenizer(template=False)
    tokenizer.pre_tokenizer = pre_tokenizers.Split("\u200b", "removed")  # pyright: ignore[reportAttributeAccessIssue]
    tokenizer.save(str(path))
    source.write_text("text,label\nword1,a\n\u200b,b\n", encoding="utf-8")
    with pytest.raises(UserError, match=r'it gives no tokens for the text "\u200b"; remove that text'):
        task(source, tokenizer=str(path), held_out=0).train_set()


def test_a_pretrained_encoder_gets_a_new_head_and_says_nothing(
    source: Path, pretrained: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    from transformers import BertModel

    weights = BertModel.from_pretrained(pretrained).state_dict()
    capfd.readouterr()
    made = task(source, {"folder": str(pretrained)})
    made.check()
    one, same, other = (seeded_model(made, seed).state_dict() for seed in (0, 0, 1))
    assert capfd.readouterr() == ("", "")
    assert all(torch.equal(one[f"bert.{name}"], value) for name, value in weights.items())
    assert torch.equal(one["classifier.weight"], same["classifier.weight"])
    assert one["classifier.weight"].shape == (3, 16)
    assert not torch.equal(one["classifier.weight"], other["classifier.weight"])
    assert made.shape() == ModelShape(heads=4, layers=2, sequence_length=16)
    assert made.train_set()[0][0].tolist()[0] == 2  # the folder's own tokenizer
    assert made.model().training


def test_a_pretrained_classifier_of_other_classes_gets_a_new_head(
    source: Path, pretrained: Path, tmp_path: Path
) -> None:
    folder = tmp_path / "classifier"
    seeded_model(task(source, {"folder": str(pretrained)})).save_pretrained(folder)
    made = task(source, {"folder": str(folder)}, tokenizer=str(pretrained), labels=["a", "b", "c", "d", "e"])
    made.check()
    assert seeded_model(made).classifier.weight.shape == (5, 16)


def test_pretrained_models_that_do_not_fit(source: Path, pretrained: Path, tmp_path: Path) -> None:
    folder = {"folder": str(pretrained)}
    assert mistake(source, folder, max_length=21) == (
        "recipe.data.max_length is 21, but the model has positions for 20 tokens; use 20 or less"
    )
    path = tmp_path / "tokenizer.json"
    larger = word_tokenizer()
    larger.add_tokens(["more", "words"])
    larger.save(str(path))
    assert mistake(source, folder, tokenizer=str(path)) == (
        "recipe.data.tokenizer: its token ids go up to 35, but the model has 34 embeddings; use the tokenizer that "
        "belongs to the model, or a vocab_size of 36"
    )
    said = mistake(source, {**folder, "config": {"num_hidden_layers": 3}})
    assert said.startswith(
        f"recipe.model.folder: {pretrained} lacks fitting weights for 16 parameters of the encoder"
    )
    assert mistake(source, {**folder, "config": {"intermediate_size": 33}}).startswith(
        f"recipe.model.folder: {pretrained} lacks fitting weights for 6 parameters of the encoder"
    )


def test_broken_folders_of_a_pretrained_model(source: Path, pretrained: Path) -> None:
    folder = {"folder": str(pretrained)}
    tokenizer = pretrained / "tokenizer.json"
    tokenizer.rename(pretrained / "kept")
    assert mistake(source, folder).startswith(
        "recipe.data.tokenizer is missing, and recipe.model.folder has no usable one: "
    )
    (pretrained / "kept").rename(tokenizer)
    weights = pretrained / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:500])
    assert mistake(source, folder).startswith("recipe.model")
    weights.unlink()
    assert mistake(source, folder).startswith(f"recipe.model.folder: {pretrained} can't be loaded: ")
    (pretrained / "config.json").write_text("{", encoding="utf-8")
    assert mistake(source, folder, tokenizer=str(tokenizer)).startswith(
        f"recipe.model.folder: {pretrained}/config.json can't be read: "
    )
    (pretrained / "config.json").unlink()
    assert mistake(source, folder, tokenizer=str(tokenizer)) == (
        f"recipe.model.folder is {pretrained}: it has no config.json; use a folder written by save_pretrained"
    )


def test_no_code_of_a_pretrained_folder_is_run(source: Path, pretrained: Path, tmp_path: Path) -> None:
    trace, folder = tmp_path / "trace", {"folder": str(pretrained)}
    (pretrained / "model.safetensors").unlink()
    torch.save(trapped_state(trace), pretrained / "pytorch_model.bin")
    assert mistake(source, folder) == (
        f"recipe.model.folder: {pretrained} can't be loaded: its weights are a pickle that names more than tensors, "
        "and could run code"
    )
    code = f"import os\nos.mkdir({str(trace)!r})\nclass Own: pass\n"
    (pretrained / "own.py").write_text(code, encoding="utf-8")
    config = pretrained / "config.json"
    values = {**json.loads(config.read_text(encoding="utf-8")), "model_type": "own"}
    config.write_text(json.dumps({**values, "auto_map": {"AutoConfig": "own.Own"}}), encoding="utf-8")
    said = mistake(source, folder, tokenizer=str(pretrained / "tokenizer.json"))
    assert "it needs Python code that comes with it, which is not run; use a folder" in said
    (pretrained / "tokenizer_config.json").write_text(
        json.dumps({"auto_map": {"AutoTokenizer": ["own.Own", None]}, "tokenizer_class": "Own"}), encoding="utf-8"
    )
    said = mistake(source, {}, tokenizer=str(pretrained))
    assert said.startswith(f"recipe.data.tokenizer: {pretrained} can't be loaded as a tokenizer: ")
    assert not trace.exists()


@pytest.mark.parametrize("name", ["reviews.yaml", "packages.yaml"])
def test_the_examples_are_jobs(name: str) -> None:
    job = load(EXAMPLES / name).job
    assert isinstance(resolve(job.recipe), TextClassification)
    assert job.run.layout == "dp2"
