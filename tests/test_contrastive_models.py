"""Models of transformers that compare the samples of a batch, handed over as they are: CLIP and its kin."""

import pickle
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
import transformers
from handed_models import handed, seeded
from proving import assert_same_steps
from torch import Tensor, nn

import samestep
from samestep import door
from samestep.job import Job, Run
from samestep.tasks.model_loss import loss_of

_TOWER: dict[str, Any] = {
    "hidden_size": 16,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "intermediate_size": 24,
}
_TEXT: dict[str, Any] = {
    **_TOWER,
    "vocab_size": 30,
    "max_position_embeddings": 16,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 1,
}
_IMAGE: dict[str, Any] = {**_TOWER, "image_size": 12, "patch_size": 4}


def clip() -> nn.Module:
    config: Any = transformers.CLIPConfig(text_config=_TEXT, vision_config=_IMAGE, projection_dim=10)
    return transformers.CLIPModel(config)


def siglip() -> nn.Module:
    config: Any = transformers.SiglipConfig(text_config={**_TEXT, "projection_size": 16}, vision_config=_IMAGE)
    return transformers.SiglipModel(config)


def blip() -> nn.Module:
    text = {**_TEXT, "encoder_hidden_size": 16, "sep_token_id": 2}
    config: Any = transformers.BlipConfig(text_config=text, vision_config=_IMAGE, projection_dim=10)
    return transformers.BlipModel(config)


def clap() -> nn.Module:
    sounds = {
        "spec_size": 32,
        "num_mel_bins": 8,
        "window_size": 4,
        "patch_size": 4,
        "patch_stride": [4, 4],
        "patch_embeds_hidden_size": 8,
        "hidden_size": 16,
        "depths": [1, 1],
        "num_attention_heads": [2, 2],
        "enable_fusion": False,
    }
    config: Any = transformers.ClapConfig(text_config=_TEXT, audio_config=sounds, projection_dim=10)
    return transformers.ClapModel(config)


class Towers(nn.Module):
    """One that is not of transformers, with a temperature, and one direction alone."""

    def __init__(self) -> None:
        super().__init__()
        self.words, self.pixels = nn.EmbeddingBag(30, 6), nn.Linear(3 * 12 * 12, 6)
        self.temperature = nn.Parameter(torch.tensor(0.4))

    def forward(self, input_ids: Tensor, pixel_values: Tensor) -> dict[str, Tensor]:
        words, pixels = self.words(input_ids), self.pixels(pixel_values.flatten(1))
        loss = F.cross_entropy(words @ pixels.T / self.temperature, torch.arange(len(words)))
        return {"loss": loss, "words": words, "pixels": pixels}


class Placed(Towers):
    """Its backward needs a buffer: the positions of the words."""

    def __init__(self) -> None:
        super().__init__()
        self.places = nn.Embedding(7, 30)
        self.register_buffer("positions", torch.arange(7)[None])

    def forward(self, input_ids: Tensor, pixel_values: Tensor) -> dict[str, Tensor]:
        pixels = self.pixels(pixel_values.flatten(1))
        words = self.words(input_ids) + self.places(self.positions).mean(1)[:, :6]
        loss = F.cross_entropy(words @ pixels.T / self.temperature, torch.arange(len(words)))
        return {"loss": loss, "words": words, "pixels": pixels}


def pairs(count: int = 24) -> list[dict[str, Any]]:
    generator = torch.Generator().manual_seed(0)
    images = torch.randn(count, 3, 12, 12, generator=generator)
    words = torch.randint(3, 30, (count, 6), generator=generator)
    return [
        {"pixel_values": image, "input_ids": torch.cat([text, torch.tensor([2])])}
        for image, text in zip(images, words, strict=True)
    ]


def sounds(count: int = 24) -> list[dict[str, Any]]:
    generator = torch.Generator().manual_seed(0)
    spectra = torch.randn(count, 1, 32, 8, generator=generator)
    return [
        {"input_features": spectrum, "input_ids": row["input_ids"]}
        for spectrum, row in zip(spectra, pairs(count), strict=True)
    ]


def stacked(rows: Sequence[Mapping[str, Any]]) -> dict[str, Tensor]:
    return {key: torch.stack([row[key] for row in rows]) for key in rows[0]}


def asked_for(rows: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """As transformers' own examples collate pairs."""
    return {**stacked(rows), "return_loss": True}


MODELS: Mapping[str, tuple[Callable[[], nn.Module], list[dict[str, Any]], Any]] = {
    "two directions": (clip, pairs(), asked_for),
    "embeddings that are alike at first": (blip, pairs(), stacked),
    "sigmoids and a bias": (siglip, pairs(), stacked),
    "two scales": (clap, sounds(), asked_for),
    "a temperature": (Towers, pairs(), stacked),
}


MORE = ("embeddings that are alike at first", "two scales")  # of two towers with their means, as CLIP has them


@pytest.mark.parametrize(
    "kind", [pytest.param(kind, marks=pytest.mark.slow if kind in MORE else ()) for kind in MODELS]
)
def test_the_loss_is_the_models_own_of_the_whole_batch(kind: str) -> None:
    build, rows, collator = MODELS[kind]
    task = handed(build, rows, collator)
    task.check()
    own = seeded(build).eval()
    asked = {} if build is Towers else {"return_loss": True}
    task = pickle.loads(pickle.dumps(task))  # as ranks get it
    for some in (rows[:7], rows[7:9], rows[9:10]):
        batch = task.collate(some)
        model = task.model().eval()
        total, count = task.loss(model(**batch.inputs), batch)
        (total / count).backward()
        expected = loss_of(own(**stacked(some), **asked))
        own.zero_grad()
        expected.backward()
        assert count == len(some)
        torch.testing.assert_close(total / count, expected, rtol=1e-5, atol=1e-6)
        for name, parameter in own.named_parameters():
            found = model.get_parameter(name).grad
            if parameter.grad is not None:
                torch.testing.assert_close(found, parameter.grad, rtol=1e-4, atol=1e-6, msg=name)


def test_a_buffer_that_a_backward_needs_is_left_alone() -> None:
    job = Job(recipe=samestep.Recipe(task=handed(Placed, pairs(), stacked), batch=9, steps=3), run=Run(device="cpu"))
    door.hold_contract(door.check(job))


@pytest.mark.slow
@pytest.mark.timeout(180)
def test_clip_as_it_comes_takes_one_processs_steps() -> None:
    recipe = samestep.Recipe(task=handed(clip, pairs(), asked_for), batch=9, steps=3, clip=0.5)
    assert_same_steps([(recipe, "pp2", {}), (recipe, "dp2", {"micro_batch": 2})], steps=2, dropout=True)


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_contrastive_models_take_one_processs_steps() -> None:
    clips = samestep.Recipe(task=handed(clip, pairs(), asked_for), batch=9, steps=3)
    images = samestep.Recipe(task=handed(siglip, pairs(), stacked), batch=9, steps=3)
    heard = samestep.Recipe(task=handed(clap, sounds(), stacked), batch=9, steps=3)
    cases = [(images, layout, {}) for layout in ("dp2", "fsdp2", "pp2")]
    cases += [(heard, layout, {}) for layout in ("dp2", "fsdp2", "pp2")]  # with batch norm of audio
    cases += [(recipe, layout, {}) for recipe in (clips, images) for layout in ("tp2", "cp2")]
    cases.append((clips, "fsdp2", {}))
    assert_same_steps(cases, steps=2)


def test_held_out_samples_find_their_counterparts(tmp_path: Path) -> None:
    rows = pairs()
    task = handed(Towers, rows, stacked)
    recipe = samestep.Recipe(task=task, batch=8, steps=40, optimizer=samestep.AdamW(lr=0.05))
    metrics = samestep.train(recipe, layout="single", device="cpu", folder=tmp_path / "run").metrics
    assert set(metrics) == {"words_to_pixels", "pixels_to_words"}
    assert min(metrics.values()) > 0.8  # by chance a seventh
    model = task.model()
    batch = task.collate(rows[:7])
    with torch.no_grad():
        output = model(**batch.inputs)
    words, pixels = output["words"], output["pixels"]
    for metric, similarity in zip(task.metrics().values(), (words @ pixels.T, pixels @ words.T), strict=True):
        metric.update(*task.scores(output, batch))
        expected = (similarity.argmax(dim=1) == torch.arange(7)).double().mean()
        assert metric.compute() == expected
    assert task.predictions(output, batch)[2] == {"words": words[2].tolist(), "pixels": pixels[2].tolist()}
