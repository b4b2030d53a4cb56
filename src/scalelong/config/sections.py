"""What every block of a recipe is made of."""

from __future__ import annotations

from typing import Annotated

from pydantic import BaseModel, ConfigDict, Field, Strict
from pydantic_core import PydanticCustomError

Whole = Annotated[int, Field(ge=1)]
Positive = Annotated[float, Field(gt=0)]
Fraction = Annotated[float, Field(ge=0, lt=1)]
# YAML has lists only; the items stay strict.
Pair = Annotated[tuple[Fraction, Fraction], Strict(False)]
Wholes = Annotated[tuple[Whole, ...], Strict(False)]


def require(condition: bool, key: str, message: str) -> None:
    """A check that involves several keys; `key` is the one the message is put down to."""
    if not condition:
        raise PydanticCustomError("conflict", "{message}", {"message": message, "key": key})


def shape(sizes: tuple[int, ...]) -> str:
    return "×".join(map(str, sizes))


class Section(BaseModel):
    """One block of a recipe."""

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True, allow_inf_nan=False)
