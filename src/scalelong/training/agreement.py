"""What the processes of a run decide alike, and how they end when one of them fails."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager, suppress
from time import sleep
from typing import Any

import torch
from torch.distributed import DistError

from ..runs.run_dir import RunError

# How long a process that was left alone is silent: the one that left says why, and should be read first.
LEFT_ALONE_SECONDS = 3.0


def any_rank(accelerator: Any, flag: bool) -> bool:
    """Whether it is so in one of the processes; all of them ask at the same time, and wait for each other."""
    if accelerator.num_processes == 1:
        return flag
    flags = torch.tensor(float(flag), device=accelerator.device)
    return bool(accelerator.reduce(flags, "sum").item())


@contextmanager
def all_or_none(accelerator: Any) -> Iterator[None]:
    """For work that one process does while the others wait: if it fails in one, all of them stop."""
    try:
        yield
    except Exception:
        with suppress(RuntimeError):  # Of a process that is gone; why this one failed is what matters.
            any_rank(accelerator, True)
        raise
    if any_rank(accelerator, False):
        raise RunError("another process of this run failed, and says why; this one stops with it")


@contextmanager
def in_contact() -> Iterator[None]:
    """For all that processes do together: one that others have left says so, whatever it waited for them in."""
    try:
        yield
    except RuntimeError as error:
        # The backend of CPUs has no class of errors for it.
        if not isinstance(error, DistError) and "gloo" not in str(error):
            raise
        sleep(LEFT_ALONE_SECONDS)
        raise RunError("another process of this run has ended, so that this one cannot go on") from error
