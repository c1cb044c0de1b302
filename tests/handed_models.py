"""Tiny models of transformers with their own losses, rows and collators: what people hand over."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
import transformers
from torch import Tensor, nn
from torch.nn import functional as F
from transformers.modeling_outputs import SequenceClassifierOutput
from transformers.models.yolos.configuration_yolos import YolosConfig
from transformers.models.yolos.modeling_yolos import YolosForObjectDetection

import samestep

VOCABULARY = 40
CLASSES = 3
_SIZES: dict[str, Any] = {
    "vocab_size": VOCABULARY,
    "hidden_size": 24,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "intermediate_size": 40,
    "max_position_embeddings": 24,
}
_SEQUENCES: dict[str, Any] = {
    "vocab_size": VOCABULARY,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "decoder_start_token_id": 2,
    "forced_eos_token_id": None,
    "d_model": 24,
    "encoder_layers": 2,
    "decoder_layers": 2,
    "encoder_attention_heads": 4,
    "decoder_attention_heads": 4,
    "encoder_ffn_dim": 40,
    "decoder_ffn_dim": 40,
    "max_position_embeddings": 24,
}


class Table:
    """Rows by number, with a length, as Hugging Face's data sets have them: columns, mappings, many at once."""

    def __init__(self, rows: Sequence[Mapping[str, Any]]) -> None:
        self._columns = {key: [row[key] for row in rows] for key in rows[0]}

    def __len__(self) -> int:
        return len(next(iter(self._columns.values())))

    def __getitem__(self, index: int) -> dict[str, Any]:
        if not -len(self) <= index < len(self):
            raise IndexError(f"Invalid key: {index} is out of bounds for size {len(self)}")
        return {key: values[index] for key, values in self._columns.items()}

    def __getitems__(self, indices: Sequence[int]) -> list[dict[str, Any]]:
        return [self[index] for index in indices]


def texts(count: int = 30) -> list[dict[str, Any]]:
    """Rows of 4 to 11 ids, each a list, with a class."""
    generator = torch.Generator().manual_seed(0)
    lengths = torch.randint(4, 12, (count,), generator=generator).tolist()
    ids = [torch.randint(3, VOCABULARY, (length,), generator=generator).tolist() for length in lengths]
    return [{"input_ids": each, "label": sum(each) % CLASSES} for each in ids]


def pictures(count: int = 30) -> list[dict[str, Any]]:
    generator = torch.Generator().manual_seed(0)
    pixels = torch.randn(count, 3, 16, 16, generator=generator)
    return [{"pixel_values": each, "label": int(each.sum() > 0)} for each in pixels]


def padded(rows: Sequence[Mapping[str, Any]]) -> dict[str, Tensor]:
    ids = nn.utils.rnn.pad_sequence([torch.tensor(row["input_ids"]) for row in rows], batch_first=True)
    return {"input_ids": ids, "attention_mask": (ids != 0).long()}  # both [rows, longest]


def next_words(rows: Sequence[Mapping[str, Any]]) -> transformers.BatchEncoding:
    """Every third row is masked but for its last two words, as a prompt is."""
    batch = padded(rows)
    labels = batch["input_ids"].masked_fill(batch["attention_mask"] == 0, -100)
    for row, given in zip(labels, rows, strict=True):
        if given["label"] == 0:
            row[: len(given["input_ids"]) - 2] = -100
    return transformers.BatchEncoding({**batch, "labels": labels})


def all_masked(rows: Sequence[Mapping[str, Any]]) -> dict[str, Tensor]:
    """Rows of class 0 count no word at all."""
    batch = dict(next_words(rows))
    for labels, row in zip(batch["labels"], rows, strict=True):
        if row["label"] == 0:
            labels[:] = -100
    return batch


def words_of_classes(rows: Sequence[Mapping[str, Any]]) -> dict[str, Tensor]:
    batch = padded(rows)
    return {**batch, "labels": (batch["input_ids"] % CLASSES).masked_fill(batch["attention_mask"] == 0, -100)}


def classes(rows: Sequence[Mapping[str, Any]]) -> dict[str, Tensor]:
    return {**padded(rows), "labels": torch.tensor([row["label"] for row in rows])}


def numbers(rows: Sequence[Mapping[str, Any]]) -> dict[str, Tensor]:
    return {**padded(rows), "labels": torch.tensor([sum(row["input_ids"]) / 100 for row in rows])}


def several(rows: Sequence[Mapping[str, Any]]) -> dict[str, Tensor]:
    return {**padded(rows), "labels": torch.tensor([[float(i % 2) for i in row["input_ids"][:3]] for row in rows])}


def answers(rows: Sequence[Mapping[str, Any]]) -> dict[str, Tensor]:
    """The answers of rows of class 0 are behind their texts."""
    ends = [len(row["input_ids"]) - 1 if row["label"] else 500 for row in rows]
    starts = [1 if row["label"] else 500 for row in rows]
    return {**padded(rows), "start_positions": torch.tensor(starts), "end_positions": torch.tensor(ends)}


def reversed_words(rows: Sequence[Mapping[str, Any]]) -> dict[str, Tensor]:
    """The words from the end: as many as the first word says."""
    targets = [torch.tensor(row["input_ids"][::-1][: 2 + row["input_ids"][0] % 5]) for row in rows]
    return {**padded(rows), "labels": nn.utils.rnn.pad_sequence(targets, batch_first=True, padding_value=-100)}


def real_or_not(rows: Sequence[Mapping[str, Any]]) -> dict[str, Tensor]:
    batch = padded(rows)
    return {**batch, "labels": batch["input_ids"] % 2}


def llama() -> nn.Module:
    return transformers.LlamaForCausalLM(transformers.LlamaConfig(**_SIZES, num_key_value_heads=2))


def gpt2() -> nn.Module:
    sizes: dict[str, Any] = {"n_embd": 24, "n_layer": 2, "n_head": 4, "n_positions": 24, "vocab_size": VOCABULARY}
    return transformers.GPT2LMHeadModel(transformers.GPT2Config(**sizes, bos_token_id=1, eos_token_id=2))


def mixtral(**options: Any) -> nn.Module:
    config = transformers.MixtralConfig(**_SIZES, num_key_value_heads=2, num_local_experts=4, **options)
    return transformers.MixtralForCausalLM(config)


def bart() -> nn.Module:
    return transformers.BartForConditionalGeneration(transformers.BartConfig(**_SEQUENCES))


def t5() -> nn.Module:
    sizes: dict[str, Any] = {"d_model": 24, "d_kv": 6, "d_ff": 40, "num_layers": 2, "num_heads": 4}
    sizes |= {"vocab_size": VOCABULARY, "decoder_start_token_id": 0}
    return transformers.T5ForConditionalGeneration(transformers.T5Config(**sizes))


def vit() -> nn.Module:
    sizes = {key: value for key, value in _SIZES.items() if key not in ("vocab_size", "max_position_embeddings")}
    sizes |= {"image_size": 16, "patch_size": 4, "num_labels": CLASSES}
    return transformers.ViTForImageClassification(transformers.ViTConfig(**sizes))


def bert(head: Any = transformers.BertForSequenceClassification, **options: Any) -> nn.Module:
    return head(transformers.BertConfig(**_SIZES, **{"num_labels": CLASSES, **options}))


def electra() -> nn.Module:
    return transformers.ElectraForPreTraining(transformers.ElectraConfig(**_SIZES, embedding_size=24))


def seeded(build: Callable[[], nn.Module]) -> nn.Module:
    torch.manual_seed(1)
    return build()


def handed(build: Callable[[], nn.Module], rows: Any, collator: Any = None, **more: Any) -> Any:
    """A model with values of its own, as one that was loaded, and its data as a table, held-out rows among them."""
    more = {"eval_data": Table(rows[:7]), **more}
    return samestep.tasks.HuggingFace(model=seeded(build), data=Table(rows), collator=collator, **more)


class ShiftedAndMasked(nn.Module):
    """Its loss is a mean over labels that have a token before them, and that a mask keeps, as Qwen2-Audio's is."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(VOCABULARY, 8)
        self.head = nn.Linear(8, VOCABULARY)

    def forward(self, input_ids: Tensor, attention_mask: Tensor, labels: Tensor) -> SequenceClassifierOutput:
        logits = self.head(self.table(input_ids))
        kept = attention_mask[:, 1:] != 0
        loss = F.cross_entropy(logits[:, :-1][kept], labels[:, 1:][kept])
        return SequenceClassifierOutput(loss=loss, logits=logits)


def labelled_padding(rows: Sequence[Mapping[str, Any]]) -> dict[str, Tensor]:
    """Padding has labels, and the mask alone keeps it out."""
    batch = padded(rows)
    return {**batch, "labels": batch["input_ids"].clone()}


class OfPatches(nn.Module):
    """Takes the patches of all images in one tensor, as Qwen2-VL does, and how many each image has."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, CLASSES)

    def forward(self, patches: Tensor, sizes: Tensor, labels: Tensor) -> SequenceClassifierOutput:
        parts = torch.stack([part.mean(0) for part in self.layer(patches).tanh().split(sizes.tolist())])
        return SequenceClassifierOutput(loss=F.cross_entropy(parts, labels), logits=parts)


def patch_rows(count: int = 30) -> list[dict[str, Any]]:
    generator = torch.Generator().manual_seed(0)
    return [{"patches": torch.randn(2 + i % 3, 4, generator=generator), "label": i % CLASSES} for i in range(count)]


def joined(rows: Sequence[Mapping[str, Any]]) -> dict[str, Tensor]:
    """[patches of all rows, 4], with the number of each row's."""
    return {
        "patches": torch.cat([row["patches"] for row in rows]),
        "sizes": torch.tensor([len(row["patches"]) for row in rows]),
        "labels": torch.tensor([row["label"] for row in rows]),
    }


class Detector(nn.Module):
    """Its labels are a list of mappings, and its loss is a mean over boxes, as Conditional DETR's is."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(12, 4)

    def forward(self, pixel_values: Tensor, labels: Sequence[Mapping[str, Tensor]]) -> dict[str, Tensor]:
        places = self.layer(pixel_values[:, :, :2, :2].flatten(1))  # [samples, 4]
        apart = [(each["boxes"] - place).abs().sum() for place, each in zip(places, labels, strict=True)]
        return {"loss": torch.stack(apart).sum() / sum(len(each["boxes"]) for each in labels), "places": places}


def box_rows(count: int = 30) -> list[dict[str, Any]]:
    generator = torch.Generator().manual_seed(1)
    boxes = [torch.rand(1 + i % 3, 4, generator=generator) for i in range(count)]
    return [{**row, "boxes": each} for row, each in zip(pictures(count), boxes, strict=True)]


def box_mappings(rows: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    pixels = torch.stack([row["pixel_values"] for row in rows])
    return {"pixel_values": pixels, "labels": [{"boxes": row["boxes"]} for row in rows]}


def yolos() -> nn.Module:
    """Its loss is a cross-entropy over queries, where those without an object weigh a tenth, and two over boxes."""
    config = YolosConfig(
        hidden_size=16,
        num_hidden_layers=2,
        num_attention_heads=2,
        intermediate_size=24,
        image_size=[32, 32],
        patch_size=16,
        num_detection_tokens=5,
        hidden_dropout_prob=0.0,
        attention_probs_dropout_prob=0.0,
    )
    config.num_labels = CLASSES
    return YolosForObjectDetection(config)


def object_rows(count: int = 30) -> list[dict[str, Any]]:
    generator = torch.Generator().manual_seed(1)
    rows: list[dict[str, Any]] = []
    for index in range(count):
        objects = 1 + index % 3
        centres, sizes = torch.rand(2, objects, 2, generator=generator)
        boxes = torch.cat([0.3 + 0.4 * centres, 0.1 + 0.2 * sizes], dim=1)
        classes_of = torch.randint(CLASSES, (objects,), generator=generator)
        pixels = torch.randn(3, 32, 32, generator=generator)
        rows.append({"pixel_values": pixels, "class_labels": classes_of, "boxes": boxes})
    return rows


def object_mappings(rows: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    labels = [{name: row[name] for name in ("class_labels", "boxes")} for row in rows]
    return {"pixel_values": torch.stack([row["pixel_values"] for row in rows]), "labels": labels}


class WordsAndScores(nn.Module):
    """Its loss is a mean over labels and a tenth of one over samples, which its output has in a mapping.

    `coupled`: the second is divided by the samples' spread, so that it is no mean over anything.
    """

    def __init__(self, *, coupled: bool = False) -> None:
        super().__init__()
        self.table = nn.Embedding(VOCABULARY, 8)
        self.words, self.score = nn.Linear(8, VOCABULARY), nn.Linear(8, 1)
        self.coupled = coupled

    def forward(self, input_ids: Tensor, scores: Tensor, labels: Tensor) -> dict[str, Any]:
        hidden = self.table(input_ids)
        predicted = self.score(hidden[:, 0])[:, 0]
        terms = {
            "words": F.cross_entropy(self.words(hidden).flatten(0, 1), labels.flatten()),
            "scores": F.mse_loss(predicted, scores) / (predicted.std() + 0.1 if self.coupled else 1.0),
        }
        return {"loss": terms["words"] + 0.1 * terms["scores"], "terms": terms}


def words_and_scores(rows: Sequence[Mapping[str, Any]]) -> dict[str, Tensor]:
    collated = all_masked(rows)
    scores = torch.tensor([float(len(row["input_ids"])) for row in rows])
    kept = collated["labels"].clone()
    kept[:, 0] = collated["input_ids"][:, 0]  # every row has a label that counts
    return {"input_ids": collated["input_ids"], "labels": kept, "scores": scores}


class MaskedPatches(nn.Module):
    """Its loss is a mean over masked patches, divided by a trifle more than their number, as ViT's and Swin's are."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(12, 12)

    def forward(self, patches: Tensor, bool_masked_pos: Tensor) -> dict[str, Tensor]:
        apart = (self.layer(patches * ~bool_masked_pos[..., None]) - patches).abs().mean(-1)  # [samples, patches]
        return {"loss": (apart * bool_masked_pos).sum() / (bool_masked_pos.sum() + 1e-5)}


def masked_patches(rows: Sequence[Mapping[str, Any]]) -> dict[str, Tensor]:
    patches = torch.stack([row["pixel_values"].reshape(-1, 12)[:16] for row in rows])
    masks = [torch.arange(16) % (2 + 3 * row["label"]) == 0 for row in rows]
    return {"patches": patches, "bool_masked_pos": torch.stack(masks)}


class Denoiser(nn.Module):
    """Gives no loss, as the models of diffusers: what it takes for the noise in a sample."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(6, 12), nn.Tanh(), nn.Linear(12, 6))
        self.time = nn.Embedding(10, 6)

    def forward(self, sample: Tensor, timestep: Tensor) -> dict[str, Tensor]:
        return {"sample": self.layers(sample + self.time(timestep))}


def noisy_rows(count: int = 30) -> list[dict[str, Any]]:
    generator = torch.Generator().manual_seed(0)
    return [
        {
            "sample": torch.randn(6, generator=generator),
            "timestep": i % 10,
            "noise": torch.randn(6, generator=generator),
        }
        for i in range(count)
    ]


def noise_sum(output: Mapping[str, Tensor], batch: Mapping[str, Tensor]) -> tuple[Tensor, int]:
    return F.mse_loss(output["sample"], batch["noise"], reduction="sum"), batch["noise"].numel()


def several_sums(output: Mapping[str, Tensor], batch: Mapping[str, Tensor]) -> dict[str, tuple[Tensor, int]]:
    """Terms of unlike counts: the noise's elements, and the samples of the first five times."""
    early = batch["timestep"] < 5
    return {"noise": noise_sum(output, batch), "early": (output["sample"][early].square().sum(), int(early.sum()))}
