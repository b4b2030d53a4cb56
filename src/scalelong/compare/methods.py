"""Methods as they are named on the command line and in tables: cs, or ls:ratio=4:activation=elu."""

from __future__ import annotations

import difflib
import inspect
import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from ..skips import METHODS

LABELS = {"cs": "CS", "cs-reversed": "CS reversed", "ls": "LS", "ls-individual": "LS individual", "ie": "IE"}
LABELS |= {"learned-kappa": "learned κ"}
SYMBOLS = {"kappa": "κ=", "value": "", "where": ""}


class PlanError(ValueError):
    """A comparison that cannot be made as asked; the message says what to change."""


@dataclass(frozen=True)
class Method:
    """A method with the options that the user gave it.

    >>> Method.parse("ls:ratio=4:activation=elu").overrides
    ('scaling.method=ls', 'scaling.ratio=4', 'scaling.activation=elu')
    """

    name: str
    given: tuple[str, ...] = ()
    rate: float | None = None
    """The learning rate of its own, which is no option of the scaling: cs:kappa=0.5:lr=8e-3."""

    @classmethod
    def parse(cls, text: str) -> Method:
        name, *options = re.sub(r"\s*([:=])\s*", r"\1", text.strip()).split(":")
        if name not in METHODS:
            close = difflib.get_close_matches(name, METHODS, n=1)
            hint = f"did you mean {close[0]!r}? " if close else ""
            raise PlanError(f"there is no method {name!r}; {hint}Methods: {', '.join(METHODS)}")
        if not all(re.fullmatch(r"[^=]+=.+", option) for option in options):
            raise PlanError(f"--methods {text!r}: write options as {name}:option=value, for instance cs:kappa=0.5")
        rates = [number_or_text(option.removeprefix("lr=")) for option in options if option.startswith("lr=")]
        if any(isinstance(rate, str) for rate in rates) or len(rates) > 1:
            raise PlanError(f"--methods {text!r}: write one learning rate as {name}:lr=8e-3")
        given = tuple(option for option in options if not option.startswith("lr="))
        return cls(name, given, *map(float, rates))

    @property
    def overrides(self) -> tuple[str, ...]:
        rate = () if self.rate is None else (f"optim.lr={self.rate!r}",)
        return (f"scaling.method={self.name}", *(f"scaling.{option}" for option in self.given), *rate)

    @property
    def id(self) -> str:
        """Safe as a folder's name.

        >>> Method.parse("cs:kappa=0.5").id
        'cs-kappa0.5'
        """
        rate = [] if self.rate is None else [f"lr{self.rate:g}"]
        return safe("-".join([self.name, *(option.replace("=", "", 1) for option in self.given), *rate]))

    @property
    def constants(self) -> dict[str, Any]:
        """The constants that it takes if none are given."""
        kind = METHODS[self.name]
        defaults = {} if kind is None else inspect.signature(kind).parameters
        return {name: defaults[name].default for name in ("kappa", "value") if name in defaults}

    @property
    def options(self) -> dict[str, Any]:
        """Those that were given, as `scale_skips` takes them.

        >>> Method.parse("cs:kappa=0.5:where=after-norm").options
        {'kappa': 0.5, 'where': 'after-norm'}
        """
        pairs = (option.split("=", 1) for option in self.given)
        return {name: int(text) if text.isdigit() else number_or_text(text) for name, text in pairs}

    def label(self, options: Mapping[str, Any]) -> str:
        """The method for people, with these options."""
        shown = [f"{SYMBOLS.get(key, f'{key} ')}{constant(value)}" for key, value in options.items()]
        rate = [] if self.rate is None else [f"at {self.rate:g}"]
        return " ".join([LABELS.get(self.name, self.name), *shown, *rate])


def check_rates(methods: Sequence[Method], rates: Sequence[float]) -> None:
    """Raise unless learning rates are given once: for all methods, or for each its own."""
    own = [method for method in methods if method.rate is not None]
    if own and (rates or len(own) < len(methods)):
        raise PlanError(f"--methods gives {own[0].id} a learning rate of its own: give every method one, and no --lr")


def number_or_text(text: str) -> float | str:
    try:
        return float(text)
    except ValueError:
        return text


def constant(value: Any) -> str:
    """
    >>> constant(2**-0.5), constant(0.7), constant("elu")
    ('1/√2', '0.7', 'elu')
    """
    if isinstance(value, float) and math.isclose(value, 2**-0.5):
        return "1/√2"
    return f"{value:g}" if isinstance(value, float) else str(value)


def safe(name: str) -> str:
    """A name without what folders or shells take for something else."""
    return "".join(letter if letter.isalnum() or letter in "-._" else "_" for letter in name)
