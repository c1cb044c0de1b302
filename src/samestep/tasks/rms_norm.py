"""Root mean square norms that keep float64, in place of those of transformers' decoders, which cast to float32."""

from typing import TypeVar

from torch import Tensor, nn
from torch.nn import functional as F

Model = TypeVar("Model", bound=nn.Module)


class WideRMSNorm(nn.RMSNorm):
    """x / rms(x) * weight (Zhang & Sennrich 2019), computed in float32 at least, given in the type of x."""

    def forward(self, x: Tensor) -> Tensor:
        wide = x.float() if x.element_size() < 4 else x
        normed = F.rms_norm(wide, self.normalized_shape, None, self.eps)
        return self.weight * normed.to(x.dtype)


def widen_norms(model: Model) -> Model:
    """Replace the norms of Llama and its kin, with their weights, and return the model.

    In float64 theirs would round to float32: a difference in the sixteenth digit may then become one in the
    eighth, and two layouts could not be told apart from a mistake.
    """
    for parent in list(model.modules()):
        for name, norm in list(parent.named_children()):
            # Norms of another kind, such as Gemma's 1 + weight, call the number that they add otherwise.
            if type(norm).__name__.endswith(("RMSNorm", "T5LayerNorm")) and hasattr(norm, "variance_epsilon"):
                weight = norm.get_parameter("weight")
                wide = WideRMSNorm(len(weight), eps=norm.variance_epsilon)  # pyright: ignore[reportArgumentType]
                wide.weight = weight
                setattr(parent, name, wide)
    return model
