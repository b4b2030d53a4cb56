"""What is read in a step, as sums: over the parts of an accumulated batch, and over the processes that share it."""

from __future__ import annotations

from collections.abc import Callable, Iterable

import torch
from torch import Tensor

from .team import Team

QUANTILES = (0.05, 0.5, 0.95)

FINISH: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "feature": lambda squares, images: (squares / images).sqrt(),
    "share": lambda skip, joined: skip / joined,
    "gradient": lambda squares, _: squares.sqrt(),
}
"""How a number is made of its two sums, by the last part of its name."""


class Tally:
    """Two sums for each number of the step, and the coefficients of each skip; all stay on the device."""

    def __init__(self) -> None:
        self.sums: dict[str, Tensor] = {}
        self.coefficients: dict[int, list[Tensor]] = {}

    def clear(self) -> None:
        self.sums, self.coefficients = {}, {}

    def add(self, name: str, amount: Tensor, beside: Tensor | float = 0.0) -> None:
        """Count a part of the batch. Shape: ()."""
        other = beside if isinstance(beside, Tensor) else amount.new_full((), beside)
        pair = torch.stack([amount, other])
        self.sums[name] = self.sums[name] + pair if name in self.sums else pair

    def add_coefficients(self, skip: int, values: Tensor) -> None:
        """Shape: (n,)."""
        self.coefficients.setdefault(skip, []).append(values)

    def values(self, names: Iterable[str], team: Team) -> dict[str, Tensor]:
        """The numbers of the whole batch, the same in every process; NaN for what was not seen. Shape: () each."""
        missing = torch.full_like(next(iter(self.sums.values())), torch.nan)
        wanted = list(names)
        sums = team.sum(torch.stack([self.sums.get(name, missing) for name in wanted]))
        found = {name: FINISH[name.rpartition("/")[2]](*row) for name, row in zip(wanted, sums, strict=True)}
        skips = sorted(self.coefficients)
        gathered = team.gather([torch.cat(self.coefficients[skip]) for skip in skips])
        for skip, values in zip(skips, gathered, strict=True):
            found |= spread(f"skip{skip}/coefficient", values)
        return found


def spread(name: str, values: Tensor) -> dict[str, Tensor]:
    """Mean, standard deviation and quantiles of the coefficients of a skip. Shape: (n,) → () each."""
    levels = torch.quantile(values, values.new_tensor(QUANTILES))
    found = {name: values.mean(), f"{name}_std": values.std(correction=0)}
    return found | dict(zip((f"{name}_{level}" for level in ("low", "median", "high")), levels.unbind(), strict=True))
