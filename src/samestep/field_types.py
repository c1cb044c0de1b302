"""Types of the fields of a job's sections, and the error for fields that are invalid together."""

from typing import Annotated, Any

from annotated_types import Ge, Gt, Le, Lt
from pydantic import BeforeValidator, ConfigDict
from pydantic_core import PydanticCustomError

STRICT = ConfigDict(extra="forbid", arbitrary_types_allowed=True, allow_inf_nan=False)


def _no_switch(value: Any) -> Any:
    """Refuse true and false (in YAML also yes, no, on, off) for a number: they would count as 1 and 0."""
    if isinstance(value, bool):
        raise PydanticCustomError("number_wanted", "Input should be a number")
    return value


def broken_rule(key: str, message: str) -> PydanticCustomError:
    """Build the error of a validator for values that are invalid in combination; `key` is one of them."""
    return PydanticCustomError("broken_rule", "{message}", {"key": key, "message": message})


Whole = Annotated[int, BeforeValidator(_no_switch)]
Real = Annotated[float, BeforeValidator(_no_switch)]
Positive = Annotated[Whole, Gt(0)]
Fraction = Annotated[Real, Ge(0), Le(1)]
Beta = Annotated[Real, Ge(0), Lt(1)]
