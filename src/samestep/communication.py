"""Options of the methods that send less than plain data parallelism, and so take another step: a class each.

They are the values of `recipe.communication`. What each does stands in `samestep.comm.compression`. A method of
another distribution has its options in `options_type` of its class, which an entry point of `samestep.plugins` names.
"""

from collections.abc import Mapping
from typing import Annotated, Any, Literal, get_args

from annotated_types import Gt, Le
from pydantic import Field, TypeAdapter, ValidatorFunctionWrapHandler, WrapValidator, model_validator
from pydantic.dataclasses import dataclass
from pydantic_core import PydanticCustomError

from samestep.errors import UserError
from samestep.field_types import STRICT, Beta, Count, Fraction, Positive, Rate, Whole, broken_rule
from samestep.limits import MOST_WIDTH
from samestep.plugins import COMMUNICATION_PLUGINS
from samestep.validation import check_keys, tells_mistakes


@tells_mistakes
@dataclass(frozen=True, kw_only=True, config=STRICT)
class Bf16:
    """Gradients are averaged in bfloat16: half the bytes of float32, 8 bits of precision."""

    kind: Literal["bf16"] = "bf16"


@tells_mistakes
@dataclass(frozen=True, kw_only=True, config=STRICT)
class Fp16:
    """Gradients are averaged in float16: half the bytes of float32, 11 bits of precision, nothing below 6e-8."""

    kind: Literal["fp16"] = "fp16"


@tells_mistakes
@dataclass(frozen=True, kw_only=True, config=STRICT)
class PowerSGD:
    """Gradients of matrices are averaged as products of two thin ones (Vogels et al. 2019, algorithm 1)."""

    kind: Literal["powersgd"] = "powersgd"
    rank: Annotated[Whole, Gt(0), Le(MOST_WIDTH)] = 2  # columns of the thin matrices
    start: Count = 10  # steps before it, with gradients averaged whole
    error_feedback: bool = True  # what was left out is added to the next gradient


@tells_mistakes
@dataclass(frozen=True, kw_only=True, config=STRICT)
class OneBitAdam:
    """Adam, and after a warm-up its momentum in one bit a number, its variance frozen (Tang et al. 2021)."""

    kind: Literal["one-bit-adam"] = "one-bit-adam"
    warmup: Positive = 100  # steps of plain Adam, in which the variance settles


@tells_mistakes
@dataclass(frozen=True, kw_only=True, config=STRICT)
class ZeroOneAdam:
    """Adam with one bit a number, a variance that is seldom renewed, and local steps (Lu et al. 2022)."""

    kind: Literal["zero-one-adam"] = "zero-one-adam"
    variance_scaler: Positive = 16  # renewals of the variance after which the interval between them doubles
    variance_stop: Positive = 1000  # steps after which it is renewed no more, and local steps begin
    local_scaler: Positive = 1000  # steps after which the number of local steps doubles
    local_most: Positive = 16  # most steps from one message to the next


@tells_mistakes
@dataclass(frozen=True, kw_only=True, config=STRICT)
class LocalSGD:
    """Every rank takes steps of its own, and parameters are averaged (Stich 2019; `start`: Lin et al. 2020)."""

    kind: Literal["local-sgd"] = "local-sgd"
    every: Positive = 10  # steps from one average to the next
    start: Count = 0  # steps before that, with an average after each


@tells_mistakes
@dataclass(frozen=True, kw_only=True, config=STRICT)
class DiLoCo:
    """Local steps, and an outer optimizer with Nesterov momentum on their average (Douillard et al. 2023).

    `fragments`, `overlap`, `mixing` and fewer `bits` are Streaming DiLoCo's (Douillard et al. 2025).
    """

    kind: Literal["diloco"] = "diloco"
    every: Positive = 100  # local steps from one outer step of a parameter to the next
    outer_lr: Rate = 0.7
    outer_momentum: Beta = 0.9
    fragments: Positive = 1  # parts of the model that are sent in turn
    overlap: Count = 0  # steps that go on while a part is on its way
    mixing: Fraction = 0.5  # with an overlap: how much stays of what a rank has reached by itself meanwhile
    bits: Literal[32, 16, 8, 4] = 32  # of each number that is sent: float32, bf16, or integers with a scale for 64

    @model_validator(mode="after")
    def _in_turn(self) -> "DiLoCo":
        """Fragments take turns within a round: no more of them than steps, nor a longer `overlap`."""
        if self.fragments > self.every:
            raise broken_rule(
                "fragments",
                f"fragments is {self.fragments} and every is {self.every}; one is sent in a step, so use at most "
                f"{self.every}",
            )
        if self.overlap >= self.every:
            raise broken_rule(
                "overlap",
                f"overlap is {self.overlap} and every is {self.every}; a part arrives before it is sent again, so "
                f"use at most {self.every - 1}",
            )
        return self


_Shipped = Bf16 | Fp16 | PowerSGD | OneBitAdam | ZeroOneAdam | LocalSGD | DiLoCo
KINDS = tuple(options.kind for options in get_args(_Shipped))


def _shipped_or_added(value: Any, shipped: ValidatorFunctionWrapHandler) -> Any:
    """Check options by the class of their kind, which may be one that another distribution adds."""
    kind = value.get("kind") if isinstance(value, Mapping) else getattr(value, "kind", None)
    if not isinstance(kind, str) or kind in KINDS:
        return shipped(value)
    method = COMMUNICATION_PLUGINS.load(kind)
    if method is None:
        tags = ", ".join(f"'{name}'" for name in (*KINDS, *COMMUNICATION_PLUGINS.names()))
        raise PydanticCustomError(
            "union_tag_invalid",
            "Input should be of another kind",
            {"discriminator": "'kind'", "tag": kind, "expected_tags": tags},
        )
    options_type: Any = getattr(method, "options_type", None)
    if getattr(options_type, "kind", None) != kind:
        raise UserError(
            f'recipe.communication.kind is "{kind}", and {method.__module__}:{method.__qualname__} has no '
            "options_type with this kind; give it a dataclass whose kind has the entry point's name as its default"
        )
    check_keys(value, options_type, "recipe.communication")
    return TypeAdapter(options_type).validate_python(value)


Communication = Annotated[_Shipped, Field(discriminator="kind"), WrapValidator(_shipped_or_added)]
