"""Language models: blocks of tokens, loss and perplexity, models of several types, what a sample costs, mistakes."""

import json
import math
import random
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from tokenizers import Tokenizer, models, pre_tokenizers

import samestep
from samestep.data.types import Batch
from samestep.errors import UserError
from samestep.jobfile import load
from samestep.layout import ModelShape
from samestep.parallel.exact.float64 import in_float64
from samestep.recipe import Recipe
from samestep.tasks.base import call
from samestep.tasks.causal_lm import CausalLM
from samestep.tasks.registry import resolve

TINY = {"layers": 2, "hidden": 24, "heads": 4, "feed_forward": 40}
WORDS = [f"word{number}" for number in range(30)]
EXAMPLES = Path(__file__).parent.parent / "examples"


@pytest.fixture
def source(tmp_path: Path) -> Path:
    """A folder of three texts of different lengths, some 70 kB."""
    folder = tmp_path / "texts"
    folder.mkdir()
    draw = random.Random(5)
    for number, lines in enumerate((300, 200, 101)):
        text = "".join(" ".join(draw.choices(WORDS, k=1 + n % 9)) + "\n" for n in range(lines))
        (folder / f"{number}.txt").write_text(text, encoding="utf-8")
    return folder


def recipe(source: Path | str, model: dict[str, Any] | None = None, data: Any = None, **rest: Any) -> Recipe:
    wanted = {"source": str(source), "length": 11, **(data or {})}
    if "tokenizer" not in wanted and "folder" not in (model or {}):
        wanted.setdefault("vocabulary", 300)
    return Recipe(task="causal-lm", data=wanted, model=TINY if model is None else model, **rest)


def task(source: Path | str, model: dict[str, Any] | None = None, **data: Any) -> CausalLM:
    made = resolve(recipe(source, model, data))
    assert isinstance(made, CausalLM)
    return made


def mistake(source: Path | str, model: dict[str, Any] | None = None, **data: Any) -> str:
    with pytest.raises(UserError) as caught:
        task(source, model, **data).check()
    return str(caught.value)


def seeded_model(made: CausalLM, seed: int = 0) -> Any:
    torch.manual_seed(seed)
    return made.model()


def batch_of(made: CausalLM, *indices: int) -> Batch:
    return made.collate([made.train_set()[index] for index in indices])


def word_tokenizer(path: Path, *special: str) -> Path:
    """A tokenizer.json of whole words behind these special tokens."""
    vocabulary = {token: number for number, token in enumerate([*special, "[UNK]", *WORDS])}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="[UNK]"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()  # pyright: ignore[reportAttributeAccessIssue]
    tokenizer.save(str(path))
    return path


@pytest.mark.parametrize(
    "model",
    [
        pytest.param({"type": "llama", "key_value_heads": 2}, id="llama"),
        pytest.param({"type": "gpt2", "tied": True, "dropout": 0.3}, id="gpt2", marks=pytest.mark.slow),
    ],
)
def test_two_ranks_take_the_same_step(source: Path, model: dict[str, Any]) -> None:
    job = recipe(
        source,
        TINY | model,
        {"held_out": 0.2},
        batch=7,
        optimizer=samestep.AdamW(lr=0.01, betas=(0.9, 0.95), weight_decay=0.1),
        clip=0.3,
    )
    proof = samestep.verify(job, layout="dp2", steps=4, micro_batch=2)
    assert max(proof.max_relative_difference.values()) < 1e-10
    assert set(proof.max_relative_difference) == {"loss", "grad_norm", "parameters", "metrics"}


@pytest.mark.parametrize("length", [2, 11, 100, 100_000])
def test_blocks_predict_every_token_but_the_first_once(source: Path, tmp_path: Path, length: int) -> None:
    path = word_tokenizer(tmp_path / "tokenizer.json", "<pad>", "</s>")
    made = task(source, tokenizer=str(path), held_out=0, length=length)
    stream = []
    for number in range(3):
        text = (source / f"{number}.txt").read_text(encoding="utf-8")
        stream += [2 + 1 + WORDS.index(word) for word in text.split()] + [1]  # </s> behind each
    blocks = made.train_set()
    samples = [blocks[index] for index in range(len(blocks))]
    assert {len(part) for sample in samples for part in sample} == {length}
    inputs = [int(token) for sample, _ in samples for token in sample]
    targets = [int(token) for _, sample in samples for token in sample]
    known = len(stream) - 1
    assert inputs[:known] == stream[:-1]
    assert targets[:known] == stream[1:]
    assert set(inputs[known:]) <= {0}
    assert set(targets[known:]) <= {-100}
    assert len(inputs) - known < length
    with pytest.raises(IndexError):
        blocks[len(blocks)]


def test_padding_does_not_change_the_loss(source: Path) -> None:
    made = task(source, held_out=0, length=100)
    model = seeded_model(made).double().eval()
    last = len(made.train_set()) - 1
    whole = batch_of(made, 0, last)
    assert (whole.targets == -100).any()
    known = int((whole.targets[1] != -100).sum())
    cut = {"input_ids": whole.inputs["input_ids"][1:, :known]}
    first, second = (
        made.loss(call(model, inputs), Batch(inputs, targets))
        for inputs, targets in (
            ({"input_ids": whole.inputs["input_ids"][:1]}, whole.targets[:1]),
            (cut, whole.targets[1:, :known]),
        )
    )
    summed, count = made.loss(call(model, whole.inputs), whole)
    assert int(count) == int(first[1]) + int(second[1]) == 100 + known
    torch.testing.assert_close(summed, first[0] + second[0], rtol=1e-12, atol=0)


def test_a_token_sees_none_behind_it(source: Path) -> None:
    for kind in ("llama", "gpt2", "qwen2", "mistral"):
        made = task(source, {**TINY, "type": kind})
        model = seeded_model(made).double().eval()
        ids = batch_of(made, 0).inputs["input_ids"]
        other = ids.clone()
        other[0, 6:] = 9
        one, two = (model(input_ids=each).logits[0] for each in (ids, other))
        torch.testing.assert_close(one[:6], two[:6], rtol=1e-12, atol=1e-12)
        assert not torch.allclose(one[6], two[6])


def test_perplexity_is_that_of_the_formula_under_two_ranks(source: Path, tmp_path: Path) -> None:
    job = recipe(source, data={"held_out": 0.3}, batch=8, steps=2, precision="fp64")
    result = samestep.train(job, layout="dp2", folder=tmp_path / "run")
    made = task(source, held_out=0.3)
    model = seeded_model(made).double().eval()
    model.load_state_dict(load_file(result.model_file))
    held_out = made.eval_set()
    assert held_out is not None
    losses = []
    for index in range(len(held_out)):
        inputs, targets = (torch.from_numpy(part) for part in held_out[index])
        with in_float64():
            logits = model(input_ids=inputs[None]).logits[0]
        probabilities = logits.exp() / logits.exp().sum(-1, keepdim=True)
        losses += [-math.log(p[t]) for p, t in zip(probabilities.tolist(), targets.tolist(), strict=True) if t >= 0]
    mean = math.fsum(losses) / len(losses)
    assert result.metrics["token_loss"] == pytest.approx(mean, rel=1e-12)
    assert result.metrics["perplexity"] == pytest.approx(math.exp(mean), rel=1e-12)
    report = json.loads((result.folder / "report.json").read_text(encoding="utf-8"))
    assert report["tokens_per_second"] == pytest.approx(11 * result.samples_per_second)
    assert report["model_flops_utilisation"] == report["flops_per_second"] / report["measured_peak_flops"]
    assert report["measured_peak_flops"] > 1e8


def test_scores_are_two_numbers_a_sample_and_losses_are_wide(source: Path) -> None:
    made = task(source, held_out=0)
    batch = batch_of(made, 0, 1, len(made.train_set()) - 1)
    logits = torch.randn(3, 11, 304, dtype=torch.bfloat16)
    sums, counts = made.scores(logits, batch)
    assert sums.shape == counts.shape == (3,)
    assert counts.tolist()[:2] == [11, 11]
    assert sums.dtype == torch.float64
    summed, count = made.loss(logits, batch)
    assert summed.dtype == torch.float32
    assert int(count) == int(counts.sum())
    assert summed.item() == pytest.approx(sums.sum().item(), rel=1e-6)


def test_the_vocabulary_of_the_model_is_a_multiple_of_8(source: Path) -> None:
    for vocabulary, rows in ((296, 296), (297, 304), (303, 304)):
        made = task(source, vocabulary=vocabulary)
        made.check()
        assert seeded_model(made).get_input_embeddings().num_embeddings == rows


@pytest.mark.parametrize(
    ("model", "shape"),
    [
        (
            {"type": "llama", "key_value_heads": 2},
            ModelShape(heads=4, key_value_heads=2, layers=2, sequence_length=11),
        ),
        ({"type": "mistral"}, ModelShape(heads=4, key_value_heads=4, layers=2, sequence_length=11)),
        ({"type": "qwen3"}, ModelShape(heads=4, key_value_heads=4, layers=2, sequence_length=11)),
        ({"type": "gpt2"}, ModelShape(heads=4, layers=2, sequence_length=11)),
        ({"type": "gpt_neox"}, ModelShape(heads=4, layers=2, sequence_length=11)),
    ],
    ids=lambda value: value["type"] if isinstance(value, dict) else "",
)
def test_model_types_have_the_sizes_that_were_asked_for(
    source: Path, model: dict[str, Any], shape: ModelShape
) -> None:
    made = task(source, {**TINY, **model, "dropout": 0.25})
    made.check()
    assert made.shape() == shape
    built = seeded_model(made)
    assert built.config._attn_implementation == "sdpa"
    assert built.get_output_embeddings().weight.shape == (304, 24)
    assert {p.shape[0] for p in built.parameters() if p.ndim == 2} & {40, 96} == {40}  # no multiple of hidden
    assert {p.dtype for p in built.parameters()} == {torch.float32}
    assert call(built, batch_of(made, 0, 1).inputs).logits.shape == (2, 11, 304)


def test_tied_embeddings_are_one_table(source: Path) -> None:
    for tied in (False, True):
        built = seeded_model(task(source, {**TINY, "tied": tied}))
        one, other = built.get_input_embeddings().weight, built.get_output_embeddings().weight
        assert (one is other) == tied


def test_further_keys_reach_the_model(source: Path) -> None:
    made = task(source, {**TINY, "config": {"rms_norm_eps": 0.5}})
    made.check()
    norms = [module for name, module in seeded_model(made).named_modules() if name.endswith("norm")]
    assert [norm.variance_epsilon for norm in norms] == [0.5] * 5


@pytest.mark.parametrize("tied", [False, True])
def test_the_operations_of_a_sample_are_those_of_its_matrix_products(source: Path, tied: bool) -> None:
    """Counted by PyTorch for forward and backward, where attention is a plain product of matrices."""
    from torch.utils.flop_counter import FlopCounterMode

    made = task(source, {**TINY, "key_value_heads": 2, "tied": tied})
    work = made.work()
    assert work.tokens == 11
    assert work.flops is not None
    model = seeded_model(made)
    model.set_attn_implementation("eager")
    batch = batch_of(made, 0)
    with FlopCounterMode(display=False) as counter:
        made.loss(call(model, batch.inputs), batch)[0].backward()
    # Norms, 5 of 24 numbers, are parameters of no matrix product. The counter has 2 of a product's 3 passes for
    # rotary positions, whose 1 x 3 x 11 products have no parameters: 2 x 33 more.
    assert work.flops == pytest.approx(counter.get_total_flops() + 6 * 5 * 24 * 11, abs=200)


def test_a_tokenizer_without_padding_gets_a_new_token(source: Path, tmp_path: Path) -> None:
    path = word_tokenizer(tmp_path / "tokenizer.json", "</s>")  # 32 tokens
    made = task(source, tokenizer=str(path), held_out=0)
    made.check()
    last = batch_of(made, len(made.train_set()) - 1)
    assert last.inputs["input_ids"][last.targets == -100].tolist().count(32) >= 1
    assert seeded_model(made).get_input_embeddings().num_embeddings == 40


@pytest.fixture
def pretrained(tmp_path: Path) -> Path:
    """A folder with a tiny decoder and its tokenizer, which has no padding token."""
    from transformers import GPT2Config, GPT2LMHeadModel, PreTrainedTokenizerFast

    folder = tmp_path / "pretrained"
    torch.manual_seed(5)
    config = GPT2Config(vocab_size=32, n_embd=16, n_layer=2, n_head=4, n_positions=20, bos_token_id=0, eos_token_id=0)
    GPT2LMHeadModel(config).save_pretrained(folder)
    tokenizer = Tokenizer.from_file(str(word_tokenizer(tmp_path / "words.json", "</s>")))
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="</s>", unk_token="[UNK]").save_pretrained(folder)
    return folder


def test_a_pretrained_model_brings_its_sizes_and_its_tokenizer(
    source: Path, pretrained: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    weights = load_file(pretrained / "model.safetensors")
    capfd.readouterr()
    made = task(source, {"folder": str(pretrained)})
    made.check()
    built = seeded_model(made)
    assert capfd.readouterr() == ("", "")
    assert all(torch.equal(built.state_dict()[name], value) for name, value in weights.items())
    assert built.training
    assert made.shape() == ModelShape(heads=4, layers=2, sequence_length=11)
    assert made.train_set()[0][0].max() < 32


def test_pretrained_models_that_do_not_fit(source: Path, pretrained: Path, tmp_path: Path) -> None:
    folder = {"folder": str(pretrained)}
    assert mistake(source, folder, length=21) == (
        "recipe.data.length is 21, but the model has positions for 20 tokens; use 20 or less"
    )
    larger = word_tokenizer(tmp_path / "larger.json", "<pad>", "</s>")
    assert mistake(source, folder, tokenizer=str(larger)) == (
        "recipe.data.tokenizer: its token ids go up to 32, but the model has 32 embeddings; use the tokenizer that "
        "belongs to the model, or a vocab_size of 33"
    )
    said = mistake(source, {**folder, "config": {"n_layer": 3}})
    assert said.startswith(f"recipe.model.folder: {pretrained} lacks fitting weights for 12 parameters, such as ")
    (pretrained / "model.safetensors").unlink()
    assert mistake(source, folder).startswith(f"recipe.model.folder: {pretrained} can't be loaded: ")
    (pretrained / "tokenizer.json").unlink()
    assert mistake(source, folder).startswith("recipe.data.tokenizer is missing, and recipe.model.folder has no")


@pytest.mark.parametrize(
    ("model", "said"),
    [
        ({"hidden": 30, "heads": 4}, "recipe.model: hidden is 30 and heads is 4, which doesn't divide it; use heads"),
        (
            {"heads": 4, "key_value_heads": 3},
            "recipe.model: heads is 4 and key_value_heads is 3, which doesn't divide it; use "
            "key_value_heads of 1, 2, 4",
        ),
        (
            {"type": "lama"},
            'recipe.model.type is "lama"; did you mean "llama"? use llama, mistral, qwen2, qwen3, gpt2 or gpt_neox',
        ),
        ({"type": "bert"}, 'recipe.model.type is "bert"; '),  # an encoder: it would look at the next token
        (
            {"type": "gpt2", "key_value_heads": 2},
            'recipe.model.type "gpt2" takes no key_value_heads; use llama, mistral',
        ),
        ({"layers": 0}, "recipe.model.layers is 0; it should be greater than 0"),
        ({"heads": True}, "recipe.model.heads is true; it should be a number"),
        ({"layer": 2}, 'unknown key "recipe.model.layer"; did you mean "layers"?'),
        ({"dropout": 1}, "recipe.model.dropout is 1; it should be less than 1"),
        ({"tied": "sometimes"}, "recipe.model.tied is 'sometimes'; it should be true or false"),
        ({"config": {"rope": 1}}, 'unknown key "recipe.model.config.rope"; '),
        ({"config": {"hidden_act": 5}}, 'recipe.model: "llama" refuses its configuration: '),
        ({"config": {"hidden_act": "none"}}, 'recipe.model: "llama" can\'t be built as a language model: '),
        ({"folder": "nowhere"}, "recipe.model.folder is nowhere: there is no such folder; use a folder written by"),
        ({"folder": "x", "tied": True}, "recipe.model: folder and tied are both given; tied comes with the model"),
    ],
)
def test_mistakes_in_the_model(source: Path, model: dict[str, Any], said: str) -> None:
    assert mistake(source, model).startswith(said)


@pytest.mark.parametrize(
    ("data", "said"),
    [
        ({"length": 1}, "recipe.data.length is 1; it should be greater than or equal to 2"),
        ({"vocabulary": 257}, "recipe.data.vocabulary is 257; it should be greater than or equal to 258"),
        ({"held_out": 1}, "recipe.data.held_out is 1; it should be less than 1"),
        ({"lengths": 5}, 'unknown key "recipe.data.lengths"; did you mean "length"?'),
        (
            {"tokenizer": "x", "vocabulary": 300},
            "recipe.data: tokenizer and vocabulary are both given; vocabulary is",
        ),
        ({"tokenizer": "nowhere.json"}, "recipe.data.tokenizer: no file or folder nowhere.json"),
        ({"eval_source": "x", "held_out": 0.1}, "recipe.data: eval_source and held_out are both given; held_out is"),
    ],
)
def test_mistakes_in_the_data_section(source: Path, data: dict[str, Any], said: str) -> None:
    assert mistake(source, **data).startswith(said)


def test_a_text_of_one_token_is_too_short(tmp_path: Path) -> None:
    path = tmp_path / "short.txt"
    path.write_text("word1", encoding="utf-8")
    tokenizer = word_tokenizer(tmp_path / "tokenizer.json", "<pad>")  # no end: one token in all
    said = mistake(path, tokenizer=str(tokenizer), held_out=0)
    assert said == f"{path} has fewer than two tokens to train on; use a longer text"


def test_the_example_is_a_job() -> None:
    job = load(EXAMPLES / "language.yaml").job
    assert isinstance(resolve(job.recipe), CausalLM)
    assert job.run.layout == "dp2"
