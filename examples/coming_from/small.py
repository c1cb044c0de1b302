"""The model and the data of the pairs in this folder: 32 points, and 32 sentences, in two classes each.

A batch is all of the data, so that the order, which each library deals out differently, does not matter.
"""

import os
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from torch.utils.data import TensorDataset

POINTS = 32


def points() -> TensorDataset:
    """Pairs of a point (4,) and its class (), the same on every rank."""
    inputs = torch.randn(POINTS, 4, generator=torch.Generator().manual_seed(0))
    return TensorDataset(inputs, (inputs[:, 0] * inputs[:, 1] > 0).long())


def net() -> nn.Module:
    """The model, with the same initial weights on every rank."""
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 16), nn.Tanh(), nn.Linear(16, 2))


def loss(output: Tensor, targets: Tensor) -> Tensor:
    """The mean over the samples."""
    return cross_entropy(output, targets)


def sentences() -> list[dict[str, Any]]:
    """Rows of 8 token ids; a row's class is whether its first token is an even one."""
    ids = torch.randint(32, (POINTS, 8), generator=torch.Generator().manual_seed(0))
    return [{"input_ids": row, "labels": int(row[0] % 2)} for row in ids]


def bert() -> nn.Module:
    """A small model of transformers that computes its own loss."""
    from transformers import BertConfig, BertForSequenceClassification

    torch.manual_seed(0)
    config = BertConfig(
        vocab_size=32,
        hidden_size=32,
        num_hidden_layers=2,
        num_attention_heads=4,
        intermediate_size=64,
        hidden_dropout_prob=0.0,
        attention_probs_dropout_prob=0.0,
    )
    return BertForSequenceClassification(config)


def tell(model: nn.Module) -> None:
    """Print the loss over all of the data, on the first rank; every rank must call, since shards are put together."""
    with torch.no_grad():
        value = _loss_of(model.eval()).item()
    if os.environ.get("RANK", "0") == "0":
        print(f"final loss {value:.7f}", flush=True)


def _loss_of(model: nn.Module) -> Tensor:
    if isinstance(model, nn.Sequential):
        inputs, targets = points().tensors
        return loss(model(inputs), targets)
    rows: Sequence[dict[str, Any]] = sentences()
    ids = torch.stack([row["input_ids"] for row in rows])
    return model(input_ids=ids, labels=torch.tensor([row["labels"] for row in rows])).loss
