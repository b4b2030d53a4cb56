"""What the processes of a run decide alike."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import Any

import torch

from .run import RunError


def in_any(accelerator: Any, flag: bool) -> bool:
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
            in_any(accelerator, True)
        raise
    if in_any(accelerator, False):
        raise RunError("another process of this run failed, and says why; this one stops with it")
