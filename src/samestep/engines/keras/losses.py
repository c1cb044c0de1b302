"""The TensorFlow counterpart of each shipped task's loss: one line a loss."""

from collections.abc import Callable, Mapping
from typing import Any

from samestep.engines.base import Loss
from samestep.errors import UserError
from samestep.tasks.image_classification import ImageClassification
from samestep.tasks.regression import Regression

# From TensorFlow, a model's output and the targets to each sample's part of the loss sum: [samples].
LossOf = Callable[[Any, Any, Any], Any]


def _squared_error(tf: Any, output: Any, targets: Any) -> Any:
    squares = tf.math.squared_difference(output, targets)  # [samples, ...]
    return tf.reduce_sum(tf.reshape(squares, [tf.shape(squares)[0], -1]), axis=1)


def _cross_entropy(tf: Any, output: Any, targets: Any) -> Any:
    return tf.nn.sparse_softmax_cross_entropy_with_logits(labels=targets, logits=output)


# By the function of a task that it stands for. All of them count samples.
_LOSSES: Mapping[Any, LossOf] = {
    ImageClassification.loss: _cross_entropy,
    Regression.loss: _squared_error,
}


def counterpart(loss: Loss) -> LossOf:
    """The counterpart of a task's loss. Raises UserError where it has none."""
    function = getattr(loss, "__func__", loss)  # also of a class that inherits it
    if function not in _LOSSES:
        owner = type(getattr(loss, "__self__", loss)).__name__
        there = ", ".join(sorted(each.__qualname__.partition(".")[0] for each in _LOSSES))
        raise UserError(
            f"the loss of {owner} has no TensorFlow counterpart; a task that inherits the loss of one of these would "
            f"do: {there}; or engine native"
        )
    return _LOSSES[function]
