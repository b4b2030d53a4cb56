"""Methods as they are named on the command line and in tables: cs, or ls:ratio=4:activation=elu."""

from __future__ import annotations

import difflib
import inspect
import math
import re
from collections.abc import Mapping
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

    @classmethod
    def parse(cls, text: str) -> Method:
        name, *options = re.sub(r"\s*([:=])\s*", r"\1", text.strip()).split(":")
        if name not in METHODS:
            close = difflib.get_close_matches(name, METHODS, n=1)
            hint = f"did you mean {close[0]!r}? " if close else ""
            raise PlanError(f"there is no method {name!r}; {hint}Methods: {', '.join(METHODS)}")
        if not all(re.fullmatch(r"[^=]+=.+", option) for option in options):
            raise PlanError(f"--methods {text!r}: write options as {name}:option=value, for instance cs:kappa=0.5")
        return cls(name, tuple(options))

    @property
    def overrides(self) -> tuple[str, ...]:
        return (f"scaling.method={self.name}", *(f"scaling.{option}" for option in self.given))

    @property
    def id(self) -> str:
        """Safe as a folder's name.

        >>> Method.parse("cs:kappa=0.5").id
        'cs-kappa0.5'
        """
        return safe("-".join([self.name, *(option.replace("=", "", 1) for option in self.given)]))

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
        return " ".join([LABELS.get(self.name, self.name), *shown])


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
