"""The named numbers of a reading: sums over a step and its processes, and the table of the last readings."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

WRAPPERS = ("DistributedDataParallel", "DataParallel", "FullyShardedDataParallel")

OF_SKIP = ("feature", "gradient", "share", "coefficient")
"""The series of a skip, each with an oscillation index of its own."""
OF_BLOCK = ("feature", "gradient", "update")
"""The series of a block."""
SPREAD = ("coefficient_std", "coefficient_low", "coefficient_median", "coefficient_high")
QUANTILES = (0.05, 0.5, 0.95)
OF_MODEL = ("robustness", "robustness_max")

ENOUGH = 5
"""Readings before there is an oscillation index."""
FROM_SUMS: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "feature": lambda energy, images: (energy / images).sqrt(),
    "share": lambda skip, joined: skip / joined,
    "gradient": lambda energy, _: energy.sqrt(),
}
"""How a number is made of its first two sums, by the last part of its name."""


@dataclass(frozen=True)
class Processes:
    """Every process must call `sum` and `gather` at the same time; with one process they change nothing."""

    rank: int = 0
    size: int = 1
    group: Any = None
    """The process group; None = all processes."""

    @classmethod
    def of(cls, model: nn.Module) -> Processes:
        """Those of DDP or FSDP; a bare network is trained by one process."""
        group: Any = getattr(model, "process_group", None) if type(model).__name__ in WRAPPERS else None
        # What `fully_shard` makes of a module has this method, and parameters that know their processes.
        if group is None and hasattr(model, "set_requires_gradient_sync"):
            mesh: Any = next(model.parameters()).device_mesh  # type: ignore[attr-defined]
            group = mesh.get_group() if mesh.ndim == 1 else None
        elif group is None:
            return cls()
        return cls(torch.distributed.get_rank(group), torch.distributed.get_world_size(group), group)

    def sum(self, values: Tensor) -> Tensor:
        """The sum over the processes. Shape: any."""
        if self.size == 1:
            return values
        total = values.clone()
        torch.distributed.all_reduce(total, group=self.group)
        return total

    def gather(self, parts: Sequence[Tensor]) -> list[Tensor]:
        """Each vector with those of the other processes behind it, which may be longer or shorter. Shape: (n,) each."""
        if self.size == 1 or not parts:
            return list(parts)
        sizes = self._gather(parts[0].new_tensor([len(part) for part in parts])).long()
        own, longest = torch.cat(list(parts)), int(sizes.sum(dim=1).max())
        rows = self._gather(nn.functional.pad(own, (0, longest - len(own))))
        split = [row[: int(size.sum())].split(size.tolist()) for row, size in zip(rows, sizes, strict=True)]
        return [torch.cat(vectors) for vectors in zip(*split, strict=True)]

    def _gather(self, row: Tensor) -> Tensor:
        """Shape: (n,) → (processes, n)."""
        rows = [torch.empty_like(row) for _ in range(self.size)]
        torch.distributed.all_gather(rows, row.contiguous(), group=self.group)
        return torch.stack(rows)


def unwrapped(model: nn.Module) -> nn.Module:
    """The network inside DDP, DataParallel or FSDP."""
    while type(model).__name__ in WRAPPERS:
        model = model.get_submodule("module")
    return model


class Sums:
    """Up to three sums for each number of a step, and the coefficients of each skip; all stay on the device."""

    def __init__(self) -> None:
        self.sums: dict[str, Tensor] = {}
        self.coefficients: dict[int, list[Tensor]] = {}

    def add(self, name: str, *amounts: Tensor) -> None:
        """Count a micro-batch. Shape: () each."""
        missing = [amounts[0].new_zeros(())] * (3 - len(amounts))
        row = torch.stack([*amounts, *missing])
        self.sums[name] = self.sums[name] + row if name in self.sums else row

    def add_features(self, name: str, energies: Tensor) -> None:
        """Count the squared norms of some images' features. Shape: (B,)."""
        self.add(name, energies.sum(), energies.new_full((), len(energies)), energies.square().sum())

    def values(self, names: Sequence[str], processes: Processes) -> dict[str, Tensor]:
        """The numbers of the whole batch, the same in every process; NaN for what was not seen. Shape: () each."""
        missing = torch.full_like(next(iter(self.sums.values())), torch.nan)
        # A network may be spread over several devices.
        sums = processes.sum(torch.stack([self.sums.get(name, missing).to(missing.device) for name in names]))
        values: dict[str, Tensor] = {}
        for name, (amount, beside, squares) in zip(names, sums, strict=True):
            kind = name.rpartition("/")[2]
            values[name] = FROM_SUMS[kind](amount, beside)
            if kind == "feature":
                # How far the root of the mean energy moves from one batch to another: its relative standard error,
                # from the spread of the images' energies; NaN for a single image.
                variance = (squares * beside / amount.square() - 1).clamp_min(0)
                values[f"{name}_noise"] = (variance / (beside - 1)).sqrt() / 2
        skips = sorted(self.coefficients)
        gathered = processes.gather([torch.cat(self.coefficients[skip]) for skip in skips])
        for skip, coefficients in zip(skips, gathered, strict=True):
            values |= spread(f"skip{skip}", coefficients)
        return values


def spread(skip: str, values: Tensor) -> dict[str, Tensor]:
    """Mean, standard deviation and quantiles of the coefficients of a skip. Shape: (n,) → () each."""
    numbers = (values.mean(), values.std(correction=0), *torch.quantile(values, values.new_tensor(QUANTILES)).unbind())
    return {f"{skip}/{name}": number for name, number in zip(("coefficient", *SPREAD), numbers, strict=True)}


class Table:
    """The last `window` readings: a row each, a column for each of `names`; NaN for what could not be read.

    Of the `series` there is an oscillation index. The order of the columns is that of the rows in checkpoints.
    """

    def __init__(self, skips: Iterable[int], blocks: Iterable[str], window: int) -> None:
        of_skips, of_blocks = [f"skip{index}" for index in skips], [f"block/{name}" for name in blocks]
        self.series = [f"{skip}/{name}" for skip in of_skips for name in OF_SKIP]
        self.series += [f"{block}/{name}" for block in of_blocks for name in OF_BLOCK]
        owners = (*of_skips, *of_blocks)
        self.features = [self.series.index(f"{owner}/feature") for owner in owners]
        noise = [f"{owner}/feature_noise" for owner in owners]
        spreads = [f"{skip}/{name}" for skip in of_skips for name in SPREAD]
        self.names = [*self.series, *noise, *spreads, *OF_MODEL]
        self.rows: deque[Tensor] = deque(maxlen=window)

    def row(self, values: Mapping[str, Tensor]) -> Tensor:
        """The numbers of a reading as one vector on their device. Shape: (names,), float32."""
        device = next(iter(values.values())).device
        missing = torch.full((), torch.nan, device=device)
        return torch.stack([values.get(name, missing).to(device, torch.float32) for name in self.names])

    def oscillation(self) -> Tensor:
        """The oscillation index of each series; NaN as long as there are too few readings. Shape: (series,)."""
        index = oscillation_index(torch.stack(list(self.rows))[:, : len(self.series)])
        enough = len(self.rows) >= min(ENOUGH, self.rows.maxlen or ENOUGH)
        return index if enough else torch.full_like(index, torch.nan)


def oscillation_index(series: Tensor) -> Tensor:
    """Relative total variation per reading: the mean of |x_{k+1} − x_k| over the mean of |x_k|. Shape: (n, S) → (S,).

    0 for a constant, and 1 for a series that jumps between 1 and 3. A series of zeros has 0, one with a value that is
    missing or not finite has NaN.

    >>> oscillation_index(torch.tensor([[1.0, 1.0], [3.0, 2.0], [1.0, 3.0], [3.0, 4.0]])).tolist()
    [1.0, 0.4...]
    """
    variation = series.diff(dim=0).abs().sum(dim=0)
    if len(series) < 2:
        return torch.full_like(variation, torch.nan)
    size = series.abs().mean(dim=0) * (len(series) - 1)
    index = torch.where(size == 0, variation, variation / size)
    return index.where(series.isfinite().all(dim=0), torch.nan)


def named(names: Iterable[str], values: Tensor) -> dict[str, float]:
    """The numbers that could be read, by name.

    >>> named(["skip1/feature", "skip1/share"], torch.tensor([2.0, torch.nan]))
    {'skip1/feature': 2.0}
    """
    return {name: value for name, value in zip(names, values.tolist(), strict=True) if not math.isnan(value)}


def with_nulls(value: Any) -> Any:
    """The value with null in place of what JSON has no number for."""
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, Mapping):
        return {key: with_nulls(item) for key, item in value.items()}
    if isinstance(value, Sequence) and not isinstance(value, str):
        return [with_nulls(item) for item in value]
    return value
