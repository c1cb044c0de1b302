"""samestep.tasks.HuggingFace: a model with its own loss, a data set and a collator, as they are handed over."""

import math
import pickle
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from itertools import pairwise
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import transformers
from call_counts import CallCounts
from handed_models import (
    CLASSES,
    VOCABULARY,
    Denoiser,
    Detector,
    MaskedPatches,
    OfPatches,
    ShiftedAndMasked,
    Table,
    WordsAndScores,
    all_masked,
    answers,
    bart,
    bert,
    box_mappings,
    box_rows,
    classes,
    electra,
    gpt2,
    handed,
    joined,
    labelled_padding,
    llama,
    masked_patches,
    mixtral,
    next_words,
    noise_sum,
    noisy_rows,
    numbers,
    object_mappings,
    object_rows,
    padded,
    patch_rows,
    pictures,
    real_or_not,
    reversed_words,
    seeded,
    several,
    several_sums,
    t5,
    texts,
    vit,
    words_and_scores,
    words_of_classes,
    yolos,
)
from proving import Case, prove, same
from shown_pages import is_shown
from small_tasks import Points
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.utils.parametrizations import weight_norm
from torch.utils.data import DataLoader, Dataset, IterableDataset
from transformers import BertForMaskedLM, BertForQuestionAnswering, BertForTokenClassification
from transformers.modeling_outputs import SequenceClassifierOutput

import samestep
from samestep.contract.check import check_contract
from samestep.layout import Layout
from samestep.verification.proof import Proof

HuggingFace = samestep.tasks.HuggingFace


def next_word_sum(output: Any, inputs: Mapping[str, Any]) -> tuple[Tensor, int]:
    logits, labels = output.logits[:, :-1].flatten(0, 1), inputs["labels"][:, 1:].flatten()
    return F.cross_entropy(logits, labels, reduction="sum"), int((labels != -100).sum())


def word_sum(output: Any, inputs: Mapping[str, Any]) -> tuple[Tensor, int]:
    labels = inputs["labels"].flatten()
    return F.cross_entropy(output.logits.flatten(0, 1), labels, reduction="sum"), int((labels != -100).sum())


def class_sum(output: Any, inputs: Mapping[str, Any]) -> tuple[Tensor, int]:
    return F.cross_entropy(output.logits, inputs["labels"], reduction="sum"), len(inputs["labels"])


def number_sum(output: Any, inputs: Mapping[str, Any]) -> tuple[Tensor, int]:
    return (output.logits[:, 0] - inputs["labels"]).square().sum(), len(inputs["labels"])


def several_sum(output: Any, inputs: Mapping[str, Any]) -> tuple[Tensor, int]:
    """A mean over all elements is one over samples, of the mean of each."""
    each = F.binary_cross_entropy_with_logits(output.logits, inputs["labels"], reduction="none")
    return each.mean(dim=1).sum(), len(each)


def answer_sum(output: Any, inputs: Mapping[str, Any]) -> tuple[Tensor, int]:
    there = inputs["start_positions"] < inputs["input_ids"].shape[1]
    first = F.cross_entropy(output.start_logits[there], inputs["start_positions"][there], reduction="sum")
    last = F.cross_entropy(output.end_logits[there], inputs["end_positions"][there], reduction="sum")
    return (first + last) / 2, int(there.sum())


def real_sum(output: Any, inputs: Mapping[str, Any]) -> tuple[Tensor, int]:
    mask = inputs["attention_mask"] == 1
    each = F.binary_cross_entropy_with_logits(output.logits[mask], inputs["labels"][mask].float(), reduction="sum")
    return each, int(mask.sum())


def next_kept_sum(output: Any, inputs: Mapping[str, Any]) -> tuple[Tensor, int]:
    mask = inputs["attention_mask"][:, 1:] == 1
    return F.cross_entropy(output.logits[:, :-1][mask], inputs["labels"][:, 1:][mask], reduction="sum"), int(
        mask.sum()
    )


def box_sum(output: Any, inputs: Mapping[str, Any]) -> tuple[Tensor, int]:
    pairs = [
        (place, box) for place, each in zip(output["places"], inputs["labels"], strict=True) for box in each["boxes"]
    ]
    return torch.stack([(box - place).abs().sum() for place, box in pairs]).sum(), len(pairs)


# The model, its rows, the collator, and the sum and the count of its loss as we compute them.
KINDS: Mapping[str, tuple[Callable[[], nn.Module], Any, Any, Callable[..., tuple[Tensor, int]]]] = {
    "next word": (llama, texts(), next_words, next_word_sum),
    "next word, experts": (mixtral, texts(), next_words, next_word_sum),
    "masked words": (partial(bert, BertForMaskedLM), texts(), next_words, word_sum),
    "classes of words": (partial(bert, BertForTokenClassification), texts(), words_of_classes, word_sum),
    "classes of texts": (bert, texts(), classes, class_sum),
    "classes of images": (vit, pictures(), None, class_sum),
    "a number": (partial(bert, num_labels=1), texts(), numbers, number_sum),
    "several classes": (partial(bert, problem_type="multi_label_classification"), texts(), several, several_sum),
    "answers": (partial(bert, BertForQuestionAnswering, num_labels=2), texts(), answers, answer_sum),
    "another text": (bart, texts(), reversed_words, word_sum),
    "every word": (electra, texts(), real_or_not, real_sum),
    "next word, masked": (ShiftedAndMasked, texts(), labelled_padding, next_kept_sum),
    "patches of all images in one tensor": (OfPatches, patch_rows(), joined, class_sum),
    "boxes in mappings": (Detector, box_rows(), box_mappings, box_sum),
}


@pytest.mark.parametrize("kind", KINDS)
def test_a_models_own_mean_becomes_the_sum_and_the_count_that_it_is_made_of(kind: str) -> None:
    build, rows, collator, expected = KINDS[kind]
    task = handed(build, rows, collator)
    task.check()
    model = task.model().eval()
    for some in (rows[:5], rows[5:12], rows[12:13]):
        batch = task.collate(some)
        output = model(**batch.inputs)
        found, count = task.loss(output, batch)
        expected_sum, expected_count = expected(output, batch.inputs)
        assert count == expected_count
        torch.testing.assert_close(found, expected_sum, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("split", [(0, 4, 9), (0, 1, 9), (0, 8, 30)])
@pytest.mark.parametrize(
    ("build", "rows", "collator"),
    [(yolos, object_rows(), object_mappings), (WordsAndScores, texts(), words_and_scores)],
    ids=["yolos", "two"],
)
def test_the_terms_of_a_weighted_sum_are_put_together_from_parts(
    build: Callable[[], nn.Module], rows: Any, collator: Any, split: Sequence[int]
) -> None:
    task = handed(build, rows, collator)
    task.check()
    model = task.model().eval()
    sums: dict[str, tuple[float, int]] = {}
    with torch.no_grad():
        for begin, end in pairwise(split):
            batch = task.collate(rows[begin:end])
            for name, (total, count) in task.loss(model(**batch.inputs), batch).items():
                before, counted = sums.get(name, (0.0, 0))
                sums[name] = before + float(total), counted + count
        together = model(**task.collate(rows[split[0] : split[-1]]).inputs)
    expected = float(together["loss"])
    joined_loss = sum(task.loss_weights[name] * total / count for name, (total, count) in sums.items())
    assert joined_loss == pytest.approx(expected, rel=1e-5)


class WantsLabels(nn.Module):
    """Takes no row without a label; its token of padding is no label that it leaves out."""

    def __init__(self) -> None:
        super().__init__()
        self.table, self.head = nn.Embedding(VOCABULARY, 8), nn.Linear(8, VOCABULARY)
        self.config = SimpleNamespace(pad_token_id=0)

    def forward(self, input_ids: Tensor, labels: Tensor) -> SequenceClassifierOutput:
        if not bool((labels != -100).any(1).all()):
            raise ValueError("a row has no label")
        logits = self.head(self.table(input_ids))
        loss = F.cross_entropy(logits.flatten(0, 1), labels.flatten())
        return SequenceClassifierOutput(loss=loss, logits=logits)


def two_labels(rows: Sequence[Mapping[str, Any]]) -> dict[str, Tensor]:
    """Rows of five words with two labels each, so that all words are as many for each label."""
    ids = torch.tensor([[*row["input_ids"][:3], 5, 6] for row in rows])
    return {"input_ids": ids, "labels": ids.masked_fill(torch.arange(5) < 3, -100)}


def test_labels_that_are_left_out_are_no_classes() -> None:
    task = handed(WantsLabels, texts(), two_labels)
    task.check()
    batch = task.collate(texts()[:5])
    assert batch.targets["count"] in (10, 25)  # so many labels or words: a step is the same by either


class LeavesPaddingOut(WantsLabels):
    """Its loss leaves out the label of padding."""

    def forward(self, input_ids: Tensor, labels: Tensor) -> SequenceClassifierOutput:
        logits = self.head(self.table(input_ids))[:, 0, :CLASSES]
        return SequenceClassifierOutput(loss=F.cross_entropy(logits, labels, ignore_index=0), logits=logits)


def with_one_of_padding(label: int) -> list[dict[str, Any]]:
    """Rows of which one has the label that is padding's token, and none of those that a model is tried on."""
    rows = [{**row, "label": (label + 1 + row["label"] % 2) % CLASSES} for row in texts()]
    sizes = sorted(range(len(rows)), key=lambda index: len(rows[index]["input_ids"]))
    rows[next(index for index in sizes[8:] if index > 7)]["label"] = label
    return rows


def words_of_one_class(rows: Sequence[Mapping[str, Any]]) -> dict[str, Tensor]:
    """Each word has its row's class."""
    batch = padded(rows)
    labels = torch.tensor([[row["label"]] for row in rows]).expand_as(batch["input_ids"])
    return {**batch, "labels": labels.masked_fill(batch["attention_mask"] == 0, -100)}


@pytest.mark.parametrize(
    ("build", "rows", "collator", "forwards"),
    [
        (bert, texts(), classes, 5),
        (gpt2, texts(), next_words, 5),
        (partial(bert, transformers.BertForTokenClassification), texts(), words_of_classes, 5),
        (bert, with_one_of_padding(0), classes, 6),
    ],
)
def test_a_model_is_called_six_times_at_most_before_ranks_start(
    build: Callable[[], nn.Module], rows: Any, collator: Any, forwards: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two or three times to find what its loss is a mean over, and three times, with backwards, for the contract."""
    counts = CallCounts(monkeypatch)
    task = handed(lambda: counts.of(build()), rows, collator, eval_data=None)
    job = samestep.Job(recipe=samestep.Recipe(task=task, batch=8, optimizer=samestep.AdamW(lr=0.01)))
    task.check()
    check_contract(job, Layout(), task)
    assert counts == {"forward": forwards, "backward": 3}


@pytest.mark.parametrize(
    ("build", "collator", "padding", "counts"),
    [
        (bert, classes, 0, True),
        (partial(bert, pad_token_id=2), classes, 2, True),
        (partial(bert, transformers.BertForTokenClassification), words_of_one_class, 0, True),
        (LeavesPaddingOut, classes, 0, False),
    ],
)
def test_a_class_may_have_the_number_of_paddings_token(
    build: Callable[[], nn.Module], collator: Any, padding: int, counts: bool
) -> None:
    rows = with_one_of_padding(padding)
    task = handed(build, rows, collator)
    task.check()
    (row,) = [row for row in rows if row["label"] == padding]
    words = len(row["input_ids"]) if collator is words_of_one_class else 1
    assert task.collate([row]).targets["count"] == (words if counts else 0)


def test_what_a_model_adds_to_the_number_that_it_divides_by_is_found() -> None:
    task = handed(MaskedPatches, pictures(), masked_patches)
    assert task.tried_facts().slack == pytest.approx(1e-5, rel=1e-4)
    batch = task.collate(pictures()[:4])
    model = task.model()
    total, count = task.loss(model(**batch.inputs), batch)
    masked = batch.inputs["bool_masked_pos"]
    assert count == int(masked.sum())
    apart = model.layer(batch.inputs["patches"] * ~masked[..., None]) - batch.inputs["patches"]
    torch.testing.assert_close(total, (apart.abs().mean(-1) * masked).sum(), rtol=1e-6, atol=0.0)


def test_what_the_terms_of_a_detection_loss_are_means_over() -> None:
    """DETR's (Carion et al., 2020, section 3.1): boxes, and queries, where those without object weigh 0.1."""
    task = handed(yolos, object_rows(), object_mappings)
    assert task.loss_weights == {"loss_ce": 1.0, "loss_bbox": 5.0, "loss_giou": 2.0}
    counts = task.collate(object_rows()[:4]).targets["count"]  # of 1, 2, 3 and 1 objects, with 5 queries each
    assert counts["loss_bbox"] == counts["loss_giou"] == 7
    assert counts["loss_ce"] * 0.1 == pytest.approx(7 + 0.1 * (4 * 5 - 7))


def test_a_weighted_sum_with_a_term_that_couples_samples_is_refused() -> None:
    task = handed(partial(WordsAndScores, coupled=True), texts(), words_and_scores)
    with pytest.raises(samestep.UserError, match=r"it is made up of words, scores, each with a count of its own"):
        task.check()


def unmasked(collator: Callable[..., Mapping[str, Any]], rows: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    return {name: value for name, value in collator(rows).items() if name != "attention_mask"}


def of_one_length(collator: Callable[..., Mapping[str, Any]], rows: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    return unmasked(collator, [{**row, "input_ids": row["input_ids"][:4]} for row in rows])


@pytest.mark.parametrize(
    ("build", "collator", "output"),
    [
        (partial(bert, initializer_range=0.5), classes, "logits"),
        (partial(bert, BertForMaskedLM, initializer_range=0.5), next_words, "logits"),
    ],
    ids=["classes", "words"],
)
def test_a_model_in_which_padding_counts_is_told_and_what_to_do_helps(
    build: Callable[[], nn.Module], collator: Any, output: str
) -> None:
    with pytest.raises(samestep.UserError) as refusal:
        handed(build, texts(), partial(unmasked, collator)).check()
    assert re.search(rf"its {output} for \d rows are others where these are padded", str(refusal.value))
    assert "pads all rows to one length, or pass attention_mask where that keeps padding out" in str(refusal.value)
    handed(build, texts(), collator).check()
    handed(build, texts(), partial(of_one_length, collator)).check()


class DrawsPoints(nn.Module):
    """Its own loss looks at some of the numbers, drawn at random, as that of Mask2Former does."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(12, 12)

    def forward(self, pixel_values: Tensor, labels: Tensor | None = None) -> dict[str, Tensor]:
        logits = self.layer(pixel_values[:, :, :2, :2].flatten(1))  # [samples, 12]
        if labels is None:
            return {"logits": logits}
        points = torch.randint(12, (4,))
        return {"loss": (logits - labels[:, None])[:, points].abs().mean(), "logits": logits}


def under_another_name(rows: Sequence[Mapping[str, Any]]) -> dict[str, Tensor]:
    batch = of_pictures(rows)
    return {"pixel_values": batch["pixel_values"], "classes": batch["labels"]}


def of_pictures(rows: Sequence[Mapping[str, Any]]) -> dict[str, Tensor]:
    labels = torch.tensor([row["label"] for row in rows])
    return {"pixel_values": torch.stack([row["pixel_values"] for row in rows]), "labels": labels}


def whole_distance(output: Any, batch: Mapping[str, Tensor]) -> tuple[Tensor, int]:
    return (output["logits"] - batch["classes"][:, None]).abs().mean(1).sum(), len(batch["classes"])


def test_a_loss_that_draws_is_told_and_one_of_ones_own_helps() -> None:
    with pytest.raises(
        samestep.UserError, match=r"the own loss of DrawsPoints draws .* without labels does not; use"
    ):
        handed(DrawsPoints, pictures(), of_pictures).check()
    handed(DrawsPoints, pictures(), under_another_name, loss=whole_distance).check()


def test_a_batch_in_which_nothing_counts_has_no_loss_and_no_gradient() -> None:
    task = handed(gpt2, texts(), all_masked)
    masked = [row for row in texts() if row["label"] == 0][:3]
    batch = task.collate(masked)
    model = task.model()
    output = model(**batch.inputs)
    assert output.loss.isnan()
    loss, count = task.loss(output, batch)
    loss.backward()
    assert (loss.item(), count) == (0.0, 0)
    assert all(p.grad is not None and not p.grad.any() for p in model.parameters())


LAYOUTS = ("dp2", "fsdp2", "tp2", "pp2")
# The model, its rows, the collator, the layouts that fast tests prove, and those of the slow one.
PROVED: Mapping[str, tuple[Callable[[], nn.Module], Any, Any, Sequence[str], Sequence[str]]] = {
    "vit": (vit, pictures(), None, (), LAYOUTS),
    "bart": (bart, texts(), reversed_words, (), LAYOUTS),
    "t5": (t5, texts(), reversed_words, (), ("dp2", "fsdp2", "tp2")),
    "bert": (bert, texts(), classes, ("fsdp2",), ("dp2", "tp2", "pp2")),
    "llama": (llama, texts(), next_words, (), LAYOUTS),
    "gpt2": (gpt2, texts(), all_masked, ("dp2",), ("fsdp2", "tp2", "pp2")),
    "boxes": (Detector, box_rows(), box_mappings, (), ("dp2",)),
    "yolos": (yolos, object_rows(), object_mappings, ("pp2",), ("dp2", "fsdp2", "tp2")),
    "masked patches": (MaskedPatches, pictures(), masked_patches, ("dp2",), ()),
    "two terms of its own": (WordsAndScores, texts(), words_and_scores, ("dp2",), ()),
    "patches": (OfPatches, patch_rows(), joined, (), ("fsdp2",)),
}
FAST = [name for name, (*_, few, _) in PROVED.items() if few]


class Lazy(Points):
    """Its layers get their sizes from the first samples."""

    def model(self) -> nn.Module:
        return nn.Sequential(nn.LazyLinear(6), nn.LazyBatchNorm1d(), nn.Dropout(0.1), nn.Tanh(), nn.LazyLinear(3))


@pytest.fixture(scope="module")
def proofs() -> Mapping[str, Proof | str]:
    return prove(cases_of({name: few for name, (*_, few, _) in PROVED.items()}, lazy=("fsdp2",), own=OWN), steps=2)


def own_losses() -> dict[str, Any]:
    """A model without a loss, with one of the user's, of one term and of two."""
    weights = {"noise": 1.0, "early": 0.5}
    return {
        "one term": handed(Denoiser, noisy_rows(), loss=noise_sum),
        "two terms": handed(Denoiser, noisy_rows(), loss=several_sums, loss_weights=weights),
    }


OWN = {"two terms": ("dp2",)}
MORE_OWN = {"one term": ("pp2",)}


def cases_of(
    layouts: Mapping[str, Sequence[str]], *, lazy: Sequence[str], own: Mapping[str, Sequence[str]] = {}
) -> dict[str, Case]:
    """Proofs of models under layouts, of the lazy one, and of those with a loss of the user's."""
    tasks = {name: handed(*PROVED[name][:3]) for name in layouts}
    tasks["lazy"] = Lazy(samples=20, held_out=5)
    tasks |= {name: task for name, task in own_losses().items() if name in own}
    recipes = {name: samestep.Recipe(task=task, batch=9, steps=3) for name, task in tasks.items()}
    wanted = {**layouts, "lazy": lazy, **own}
    return {f"{name} {layout}": (recipes[name], layout, {}) for name in wanted for layout in wanted[name]}


@pytest.mark.slow
@pytest.mark.parametrize("name", [*FAST, "lazy", *OWN])
def test_a_model_that_is_handed_over_takes_one_processs_steps(name: str, proofs: Mapping[str, Proof | str]) -> None:
    mine = [case for case in proofs if case.rpartition(" ")[0] == name]
    assert mine
    assert same(proofs, mine) == {}


@pytest.mark.slow
@pytest.mark.timeout(400)
def test_a_model_that_is_handed_over_takes_one_processs_steps_under_more_layouts() -> None:
    cases = cases_of({name: more for name, (*_, more) in PROVED.items()}, lazy=("dp2",), own=MORE_OWN)
    assert same(prove(cases, steps=2), list(cases)) == {}


def test_metrics_are_those_of_each_row_alone() -> None:
    rows = texts(10)
    task = handed(partial(bert, BertForTokenClassification), rows, words_of_classes, eval_data=rows)
    model = task.model().eval()
    metrics = task.metrics()
    with torch.no_grad():
        for some in (rows[:4], rows[4:]):
            batch = task.collate(some)
            for metric in metrics.values():
                metric.update(*task.scores(model(**batch.inputs), batch))
        alone = [(model(**batch), batch) for batch in (words_of_classes([row]) for row in rows)]
    sums, counts = zip(*[word_sum(output, batch) for output, batch in alone], strict=True)
    right = sum(int((output.logits.argmax(-1) == batch["labels"]).sum()) for output, batch in alone)
    assert metrics["loss"].compute().item() == pytest.approx(sum(map(float, sums)) / sum(counts), rel=1e-5)
    assert metrics["accuracy"].compute().item() == pytest.approx(right / sum(counts))


def test_predictions_are_the_classes_by_their_names() -> None:
    task = handed(bert, texts(), classes)
    batch = task.collate(texts()[:3])
    output = task.model().eval()(**batch.inputs)
    found = task.predictions(output, batch)
    powers = [[math.exp(logit) for logit in row] for row in output.logits.tolist()]
    assert found == [
        {
            "class": f"LABEL_{row.index(max(row))}",
            "probability": pytest.approx(max(row) / sum(row), rel=1e-6),
            "target": f"LABEL_{each['label']}",
        }
        for row, each in zip(powers, texts()[:3], strict=True)
    ]


def test_each_model_is_a_copy_and_the_one_handed_over_stays_as_it_was() -> None:
    model = seeded(gpt2).eval()
    before = {name: value.clone() for name, value in model.state_dict().items()}
    task = HuggingFace(model=model, data=texts(), collator=next_words)
    task.check()
    first, second = task.model(), task.model()
    nn.init.zeros_(next(first.parameters()))
    for name, value in before.items():
        assert torch.equal(model.state_dict()[name], value)
        assert torch.equal(second.state_dict()[name], value)
    assert second.get_parameter("lm_head.weight") is second.get_parameter("transformer.wte.weight")
    assert not model.training


class Normed(nn.Module):
    """A model of one's own with its own loss, and a parametrized layer."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = weight_norm(nn.Linear(12, CLASSES))

    def forward(self, pixel_values: Tensor, labels: Tensor) -> dict[str, Tensor]:
        logits = self.layer(pixel_values[:, :, :2, :2].flatten(1))
        return {"loss": F.cross_entropy(logits, labels), "logits": logits}


def test_a_parametrized_model_is_copied_and_is_sent_as_a_function() -> None:
    task = HuggingFace(model=Normed(), data=pictures())
    task.check()
    assert torch.equal(task.model().layer.weight, task.model().layer.weight)  # pyright: ignore
    with pytest.raises(samestep.UserError, match="use a function that builds it"):
        pickle.dumps(task)
    pickle.dumps(HuggingFace(model=Normed, data=pictures()))


def test_what_was_found_goes_to_the_ranks_with_the_task() -> None:
    calls = []
    task = HuggingFace(model=bert, data=texts(), collator=classes)
    task.check()
    sent: Any = pickle.loads(pickle.dumps(task))
    sent._model = lambda: calls.append(1)
    assert sent.collate(texts()[:2]).targets["count"] == 2
    assert calls == []


def test_a_count_of_ones_own_is_used_and_held_against_the_loss() -> None:
    task = handed(bert, texts(), classes, count=lambda batch: 3 * len(batch["labels"]))  # as good: a factor of both
    assert task.collate(texts()[:5]).targets["count"] == 15
    with pytest.raises(samestep.UserError, match="count=: the loss of LlamaForCausalLM is no mean over as many"):
        handed(llama, texts(), next_words, count=lambda batch: len(batch["labels"])).check()


class Rows(Dataset[Any]):
    def __len__(self) -> int:
        return 12

    def __getitem__(self, index: int) -> dict[str, Any]:
        return texts()[index]


@pytest.mark.parametrize("data", [texts(), Table(texts()), Rows(), tuple(texts())])
def test_rows_are_taken_as_people_have_them(data: Any, tmp_path: Any) -> None:
    task = HuggingFace(model=bert, data=data, collator=classes, eval_data=data)
    recipe = samestep.Recipe(task=task, batch=5, steps=2)
    result = samestep.train(recipe, layout="single", device="cpu", folder=tmp_path / "run")
    assert set(result.metrics) == {"loss", "accuracy"}


class Stream(IterableDataset[Any]):
    def __iter__(self) -> Iterator[Any]:
        yield from texts()


class Contrasting(nn.Module):
    """Holds each sample against the others of its batch."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(12, 5)

    def forward(self, pixel_values: Tensor, labels: Tensor) -> Any:
        found = self.layer(pixel_values[:, :, :2, :2].flatten(1))
        loss = F.cross_entropy(found @ found.T, torch.arange(len(found)))
        return SequenceClassifierOutput(loss=loss)


class ContrastingInFloat32(Contrasting):
    """Its loss is NaN in float64, where a mask of the lowest number, added twice, is infinite."""

    def forward(self, pixel_values: Tensor, labels: Tensor) -> Any:
        output = super().forward(pixel_values, labels)
        return SequenceClassifierOutput(loss=output.loss * (math.nan if pixel_values.dtype == torch.float64 else 1))


class Noisy(Normed):
    def forward(self, pixel_values: Tensor, labels: Tensor) -> dict[str, Tensor]:
        return super().forward(pixel_values + torch.randn(pixel_values.shape), labels)


class Summed(Normed):
    def forward(self, pixel_values: Tensor, labels: Tensor) -> dict[str, Tensor]:
        found = super().forward(pixel_values, labels)
        return {**found, "loss": found["loss"] * len(labels)}


def drawn(rows: Sequence[Mapping[str, Any]]) -> dict[str, Tensor]:
    batch = padded(rows)
    return {**batch, "labels": batch["input_ids"].masked_fill(torch.rand(batch["input_ids"].shape) < 0.5, -100)}


def without_labels(rows: Sequence[Mapping[str, Any]]) -> dict[str, Tensor]:
    return padded(rows)


def as_lists(rows: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    return {key: value.tolist() for key, value in classes(rows).items()}


def half_answered(rows: Sequence[Mapping[str, Any]]) -> dict[str, Tensor]:
    return {**answers(rows), "end_positions": torch.tensor([500] * len(rows))}


def relabelled(number: int, label: int) -> list[dict[str, Any]]:
    rows = texts()
    rows[number]["label"] = label
    return rows


WRONG: Mapping[str, tuple[Mapping[str, Any], str]] = {
    "model: a name": ({"model": "gpt2"}, r'model= is a str; use an nn.Module, such as .*from_pretrained\("gpt2"\)'),
    "model: a class": ({"model": BertForMaskedLM}, r"BertForMaskedLM, which needs config; use"),
    "model: a configuration": ({"model": transformers.BertConfig()}, r"model= is a BertConfig; use an nn.Module"),
    "model: None": ({"model": None}, r"model= is None"),
    "model: a function of None": ({"model": lambda: None}, r"model= gave a NoneType; use a function that returns"),
    "model: without a head": (
        {"model": lambda: transformers.BertModel(transformers.BertConfig(num_hidden_layers=1))},
        r"BertModel gives no loss for input_ids, attention_mask; use a model with a head",
    ),
    "data: a loader": (
        {"data": DataLoader(Rows())},
        r"data=: a DataLoader.*use data=loader.dataset, collator=loader.collate_fn",
    ),
    "data: a stream": ({"data": Stream()}, r"data=: a Stream can only be read from front to back.*use list\(...\)"),
    "data: a generator": ({"data": (row for row in texts())}, r"data=: a generator can only be read"),
    "data: splits": ({"data": {"train": texts()}}, r"data=: a dict is not numbered from 0"),
    "data: None": ({"data": None}, r"data=: None holds no samples"),
    "data: empty": ({"data": []}, r"data=: the data set is empty"),
    "data: pairs": ({"data": [(1, 2)] * 5, "collator": None}, r"a row is a tuple, and a model takes names"),
    "data: unlike keys": (
        {"data": [*texts(5), {"input_ids": [3]}]},
        r"data= row 5 has the keys input_ids, and row 0 has input_ids, label",
    ),
    "data: unlike lengths": ({"collator": None}, r"the rows can't be stacked .*DataCollatorWithPadding"),
    "data: a label too high": (
        {"data": relabelled(20, 7)},
        r"data= row 20: label 7 is out of range: the model has classes 0 to 2; .*num_labels=8",
    ),
    "data: a label below 0": ({"eval_data": relabelled(3, -1)}, r"eval_data= row 3: label -1 is out of range"),
    "data: a first label too high": ({"data": relabelled(0, 7)}, r"data= row 0: label 7 is out of range"),
    "held-out data: a loader": ({"eval_data": DataLoader(Rows())}, r"use eval_data=loader.dataset"),
    "collator: no function": ({"collator": "pad"}, r"collator= is a str; use a function"),
    "collator: a tuple": ({"collator": lambda rows: tuple(rows)}, r"the collator gave a tuple; use one that gives a"),
    "collator: lists": ({"collator": as_lists}, r'gave a list as input_ids; use tensors .*return_tensors="pt"'),
    "collator: it fails": (
        {"collator": lambda rows: rows[0]["text"]},
        r"the collator fails .*\(KeyError: 'text', at",
    ),
    "collator: it draws": ({"collator": drawn}, r"the collator \(drawn\) gives another batch .*draws at random"),
    "labels: none": ({"collator": without_labels}, r"gives no loss for .*use rows or a collator with labels"),
    "labels: one end of an answer": (
        {"model": partial(bert, BertForQuestionAnswering, num_labels=2), "collator": half_answered},
        r"BertForQuestionAnswering gives a loss of nan|one of start_positions and end_positions",
    ),
    "ids: out of range": (
        {"data": [{"input_ids": [99], "label": 0}] * 4},
        r"a label or an id is out of range \(index out of range in self\)",
    ),
    "loss: contrastive": (
        {"model": Contrasting, "data": pictures(), "collator": None},
        r"the loss of Contrasting is no mean over its samples",
    ),
    "loss: not finite in float64": (
        {"model": ContrastingInFloat32, "data": pictures(), "collator": None},
        r"the loss of ContrastingInFloat32 is no mean over its samples.*no count= fits",
    ),
    "loss: of experts too": (
        {"model": partial(mixtral, output_router_logits=True), "collator": next_words},
        r"balances experts over a batch.*use output_router_logits=False",
    ),
    "loss: noisy": ({"model": Noisy(), "data": pictures(), "collator": None}, r"it draws at random"),
    "loss: a sum": ({"model": Summed(), "data": pictures(), "collator": None}, r"use a mean, since this is a sum"),
    "loss: on the meta device": ({"model": lambda: nn.Linear(3, 3, device="meta")}, r"weight is on the meta device"),
    "count: no function": ({"count": 3}, r"count= is a int; use a function"),
}


# Those whose message docs/own-tasks.md shows.
SHOWN = (
    "data: a loader",
    "data: a label too high",
    "collator: it draws",
    "labels: none",
    "loss: contrastive",
    "loss: of experts too",
)


@pytest.mark.parametrize("name", WRONG)
def test_a_wrong_hand_over_is_one_sentence(name: str) -> None:
    given, sentence = WRONG[name]
    with pytest.raises(samestep.UserError, match=sentence) as found:
        HuggingFace(**{"model": bert, "data": texts(), "collator": classes, **given}).check()
    assert "\n" not in str(found.value)
    assert "Traceback" not in str(found.value)
    assert name not in SHOWN or is_shown("docs/own-tasks.md", str(found.value))


def test_a_model_that_keeps_what_it_has_computed_is_copied() -> None:
    model: Any = seeded(gpt2)
    rows = texts()
    model.kept = [model(**next_words(rows)).logits]  # of a graph, as the states of RecurrentGemma are
    task = HuggingFace(model=model, data=rows, collator=next_words)
    task.check()
    for copied in (task.model(), pickle.loads(pickle.dumps(task)).model()):
        assert copied is not model
        (kept,) = vars(copied)["kept"]
        assert torch.equal(copied.get_parameter("lm_head.weight"), model.lm_head.weight)
        assert torch.equal(kept, model.kept[0])
        assert not kept.requires_grad
