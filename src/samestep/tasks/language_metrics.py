"""The metrics of a language model: the mean loss of a token, and its exponential."""

import torch
from torch import Tensor
from torchmetrics import Metric


class TokenLoss(Metric):
    """The mean over all tokens. Updated with loss sums and token counts of samples, both [samples]; in float64."""

    loss_sum: Tensor
    tokens: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.add_state("loss_sum", torch.zeros((), dtype=torch.float64), dist_reduce_fx="sum")
        self.add_state("tokens", torch.zeros((), dtype=torch.int64), dist_reduce_fx="sum")

    def update(self, loss_sums: Tensor, tokens: Tensor) -> None:
        self.loss_sum += loss_sums.double().sum()
        self.tokens += tokens.sum()

    def compute(self) -> Tensor:
        return self.loss_sum / self.tokens


class Perplexity(TokenLoss):
    """exp of the mean loss: among how many tokens, equally likely, a model seems to choose."""

    def compute(self) -> Tensor:
        return super().compute().exp()


def language_metrics() -> dict[str, Metric]:
    return {"perplexity": Perplexity(), "token_loss": TokenLoss()}
