"""Types of the fields of a job's sections, and the error for fields that are invalid together.

Every number has an upper limit: those of `limits`, in a type below or next to the field (`tests/test_limits.py`).
"""

from pathlib import Path
from typing import Annotated, Any

from annotated_types import Ge, Gt, Le, Lt
from pydantic import AfterValidator, BeforeValidator, ConfigDict
from pydantic_core import PydanticCustomError

from samestep.input_files import wrong_path
from samestep.limits import LEAST_REAL, MOST, MOST_FACTOR, MOST_LAYERS, MOST_LR, MOST_RANKS, MOST_SEED, MOST_WIDTH

STRICT = ConfigDict(extra="forbid", arbitrary_types_allowed=True, allow_inf_nan=False)


def _no_switch(value: Any) -> Any:
    """Refuse true and false (in YAML also yes, no, on, off) for a number: they would count as 1 and 0."""
    if isinstance(value, bool):
        raise PydanticCustomError("number_wanted", "Input should be a number")
    return value


def _usable(value: Any) -> Any:
    """Refuse a path that no file or folder can have."""
    if wrong := wrong_path(str(value)):
        raise PydanticCustomError("path_wanted", "Input should be another path: {why}", {"why": wrong})
    return value


def _no_null_as_text(value: Any) -> Any:
    """Refuse the word None, with which Python's users mean null: it would be the name of a file."""
    if value == "None":
        raise PydanticCustomError("path_wanted", "Input should be null, or ./None for a file of that name")
    return value


def _of_float32(value: float) -> float:
    """Refuse a number above 0 that float32 takes for 0, or nearly: nothing would be trained, in silence."""
    if 0 < value < LEAST_REAL:
        raise PydanticCustomError(
            "too_small",
            "Input should be at least {least}, which is about the smallest of float32",
            {"least": LEAST_REAL},
        )
    return value


def broken_rule(key: str, message: str) -> PydanticCustomError:
    """Build the error of a validator for values that are invalid in combination; `key` is one of them."""
    return PydanticCustomError("broken_rule", "{message}", {"key": key, "message": message})


FilePath = Annotated[Path, BeforeValidator(_no_null_as_text), AfterValidator(_usable)]
PathText = Annotated[str, AfterValidator(_usable)]  # a path, or a word in its place
Whole = Annotated[int, BeforeValidator(_no_switch)]
Real = Annotated[float, BeforeValidator(_no_switch)]
Positive = Annotated[Whole, Gt(0), Le(MOST)]
Count = Annotated[Whole, Ge(0), Le(MOST)]
Ranks = Annotated[Whole, Gt(0), Le(MOST_RANKS)]
Layers = Annotated[Whole, Gt(0), Le(MOST_LAYERS)]
Width = Annotated[Whole, Gt(0), Le(MOST_WIDTH)]  # of a layer, or heads
Seed = Annotated[Whole, Ge(0), Lt(MOST_SEED + 1)]
Rate = Annotated[Real, Gt(0), Le(MOST_LR), AfterValidator(_of_float32)]
Decay = Annotated[Real, Ge(0), Le(1000)]  # of weights
Factor = Annotated[Real, Gt(0), Le(MOST_FACTOR), AfterValidator(_of_float32)]
Epsilon = Annotated[Real, Gt(0), Le(1), AfterValidator(_of_float32)]
Least = Annotated[Real, Ge(0), Le(MOST_FACTOR)]  # 0 or more
Fraction = Annotated[Real, Ge(0), Le(1)]
Beta = Annotated[Real, Ge(0), Lt(1)]
