"""The metrics of a language model: the mean loss of a token, and its exponential."""

from torch import Tensor

from samestep.tasks.metric import Metric, Ratio


class TokenLoss(Ratio):
    """The mean over all tokens. Updated with loss sums and token counts of samples, both [samples]."""

    def update(self, loss_sums: Tensor, tokens: Tensor) -> None:
        self.add(loss_sums, tokens.sum())


class Perplexity(TokenLoss):
    """exp of the mean loss: among how many tokens, equally likely, a model seems to choose."""

    def compute(self) -> Tensor:
        return super().compute().exp()


def language_metrics() -> dict[str, Metric]:
    return {"perplexity": Perplexity(), "token_loss": TokenLoss()}
