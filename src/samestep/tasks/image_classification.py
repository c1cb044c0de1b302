"""Image classification: a network that tells classes of images apart."""

from collections.abc import Iterator, Mapping, Sequence
from functools import cached_property
from typing import TYPE_CHECKING, Any

import numpy as np

from samestep.data import image_folder
from samestep.tasks import image_data, image_model
from samestep.tasks.base import Batch, Task
from samestep.tasks.image_data import ImageData, ImageSet, Pictures
from samestep.tasks.image_model import ImageModel
from samestep.tasks.prediction import Model, Prediction, ToPredict, of_classes, predict_each

if TYPE_CHECKING:
    from torch import Tensor, nn

    from samestep.tasks.metric import Metric


class ImageClassification(Task):
    """Classify images. Everything is read once, at the first use."""

    predicts_from = "an image, or a folder with images"

    def __init__(self, *, data: ImageData, model: ImageModel) -> None:
        self._data = data
        self._model = model

    def check(self) -> None:
        """Raise UserError for what is wrong with the data, or where model and data don't fit."""
        image_model.check(self._model, self._size)

    def model(self) -> "nn.Module":
        return image_model.build(
            self._model,
            channels=self._pictures.train.pixels.shape[1],
            size=self._size,
            classes=len(self._pictures.names),
        )

    def train_set(self) -> ImageSet:
        return self._pictures.train

    def eval_set(self) -> ImageSet | None:
        return self._pictures.held_out

    def collate(self, samples: Sequence[tuple[Any, int]]) -> Batch:
        """Pixels of mean 0 and deviation 1 over the training images, channel by channel."""
        import torch

        mean, deviation = self._pictures.train.mean_and_deviation
        pixels = np.stack([pixels for pixels, _ in samples]).astype(np.float32)  # [batch, channels, height, width]
        return Batch(torch.from_numpy((pixels - mean) / deviation), torch.tensor([label for _, label in samples]))

    def loss(self, output: "Tensor", batch: Batch) -> "tuple[Tensor, int]":
        """Cross-entropy summed over the samples, and how many they are."""
        from torch.nn import functional as F

        return F.cross_entropy(_wide(output), batch.targets, reduction="sum"), len(batch.targets)

    def metrics(self) -> "Mapping[str, Metric]":
        """Accuracy over all samples, and by class; the rows of the confusion matrix sum to the support."""
        from samestep.tasks.classification import classification_metrics

        return classification_metrics(len(self._pictures.names))

    def scores(self, output: "Tensor", batch: Batch) -> "tuple[Tensor, Tensor]":
        """The probability of each class, [batch, classes], and the true classes."""
        return _wide(output).softmax(dim=-1).float(), batch.targets

    def class_names(self) -> Sequence[str]:
        return self._pictures.names

    def predict(self, model: Model, wanted: ToPredict) -> Iterator[Prediction]:
        """The class of each held-out image, or of each of a folder."""
        if wanted.file is None:
            yield from super().predict(model, wanted)
            return
        files = image_folder.files_of(wanted.file, "--input")
        samples = image_data.like(self._pictures.train, files, self._data)
        for file, found in zip(files, predict_each(self, model, samples, wanted.batch), strict=True):
            yield {"file": str(file), **found}

    def predictions(self, output: Any, batch: Batch) -> Sequence[Prediction]:
        return of_classes(*self.scores(output, batch), self.class_names())

    @property
    def _size(self) -> tuple[int, int]:
        height, width = self._pictures.train.pixels.shape[2:]
        return height, width

    @cached_property
    def _pictures(self) -> Pictures:
        return image_data.read(self._data)


def _wide(logits: "Tensor") -> "Tensor":
    """[batch, classes], in float32 at least."""
    return logits.float() if logits.element_size() < 4 else logits
