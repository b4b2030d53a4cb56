"""What is read in a step, as sums: over the parts of an accumulated batch, and over the processes that share it."""

from __future__ import annotations

from collections.abc import Callable, Iterable

import torch
from torch import Tensor

from .team import Team

QUANTILES = (0.05, 0.5, 0.95)

FINISH: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "feature": lambda energy, images: (energy / images).sqrt(),
    "share": lambda skip, joined: skip / joined,
    "gradient": lambda energy, _: energy.sqrt(),
}
"""How a number is made of its two sums, by the last part of its name."""


class Tally:
    """Sums for each number of the step, and the coefficients of each skip; all stay on the device."""

    def __init__(self) -> None:
        self.sums: dict[str, Tensor] = {}
        self.coefficients: dict[int, list[Tensor]] = {}

    def clear(self) -> None:
        self.sums, self.coefficients = {}, {}

    def add(self, name: str, *amounts: Tensor) -> None:
        """Count a part of the batch; a number has up to three sums. Shape: () each."""
        missing = [amounts[0].new_zeros(())] * (3 - len(amounts))
        row = torch.stack([*amounts, *missing])
        self.sums[name] = self.sums[name] + row if name in self.sums else row

    def add_features(self, name: str, energies: Tensor) -> None:
        """Count the squared norms of some images' features. Shape: (B,)."""
        self.add(name, energies.sum(), energies.new_full((), len(energies)), energies.square().sum())

    def add_coefficients(self, skip: int, values: Tensor) -> None:
        """Shape: (n,)."""
        self.coefficients.setdefault(skip, []).append(values)

    def values(self, names: Iterable[str], team: Team) -> dict[str, Tensor]:
        """The numbers of the whole batch, the same in every process; NaN for what was not seen. Shape: () each."""
        missing = torch.full_like(next(iter(self.sums.values())), torch.nan)
        wanted = list(names)
        # A network may be spread over several devices.
        sums = team.sum(torch.stack([self.sums.get(name, missing).to(missing.device) for name in wanted]))
        found: dict[str, Tensor] = {}
        for name, (amount, beside, squares) in zip(wanted, sums, strict=True):
            kind = name.rpartition("/")[2]
            found[name] = FINISH[kind](amount, beside)
            if kind == "feature":
                found[f"{name}_noise"] = noise(amount, beside, squares)
        skips = sorted(self.coefficients)
        gathered = team.gather([torch.cat(self.coefficients[skip]) for skip in skips])
        for skip, values in zip(skips, gathered, strict=True):
            found |= spread(f"skip{skip}/coefficient", values)
        return found


def noise(energy: Tensor, images: Tensor, squares: Tensor) -> Tensor:
    """How far the root of the mean energy moves from one draw of images to another: its relative standard error.

    From the spread of the images' energies; NaN for a single image. Shape: () each.
    """
    variance = (squares * images / energy.square() - 1).clamp_min(0)
    return (variance / (images - 1)).sqrt() / 2


def spread(name: str, values: Tensor) -> dict[str, Tensor]:
    """Mean, standard deviation and quantiles of the coefficients of a skip. Shape: (n,) → () each."""
    levels = torch.quantile(values, values.new_tensor(QUANTILES))
    found = {name: values.mean(), f"{name}_std": values.std(correction=0)}
    return found | dict(zip((f"{name}_{level}" for level in ("low", "median", "high")), levels.unbind(), strict=True))
