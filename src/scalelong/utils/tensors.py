"""Safetensors files: what goes in comes out to the bit, and names that share a tensor share it again."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor


def write_tensors(path: Path, tensors: Mapping[str, Tensor]) -> None:
    """Write one file; names that share a tensor share its bytes. Raises OSError when the disk refuses."""
    library = import_safetensors()
    kept, aliases = without_aliases(tensors)
    try:
        # The library's own save_model names tied weights in the metadata the same way: alias to kept.
        library.torch.save_file(kept, path, metadata=aliases or None)
    except library.SafetensorError as error:
        # The library reports the system's error number in its text only.
        found = re.search(r"os error (\d+)", str(error))
        if found is None:
            raise OSError(str(error)) from error
        raise OSError(int(found[1]), os.strerror(int(found[1])), str(path)) from error


def read_tensors(path: Path) -> dict[str, Tensor]:
    """The tensors of a file, in memory of their own: the file may be removed afterwards."""
    with import_safetensors().safe_open(path, framework="pt") as file:
        # Without the clone a tensor would stay mapped to the file, and a file system that goes away takes it along.
        tensors = {name: file.get_tensor(name).clone() for name in file.keys()}  # noqa: SIM118 (not a mapping)
        aliases = file.metadata() or {}
    return tensors | {alias: tensors[kept] for alias, kept in aliases.items() if kept in tensors}


def without_aliases(tensors: Mapping[str, Tensor]) -> tuple[dict[str, Tensor], dict[str, str]]:
    """What safetensors accepts: one contiguous CPU tensor for each piece of memory, and the names left out."""
    first_with: dict[tuple[Any, ...], str] = {}
    kept: dict[str, Tensor] = {}
    aliases: dict[str, str] = {}
    storages: set[int] = set()
    for name, tensor in tensors.items():
        # Equal for two names of the same values in the same memory; an empty tensor has no memory to share.
        same = (tensor.device, tensor.data_ptr(), tensor.dtype, tensor.shape, tensor.stride())
        first = first_with.setdefault(same if tensor.numel() else (name,), name)
        if first != name:
            aliases[name] = first
            continue
        plain = tensor.detach().cpu().contiguous()
        storage = plain.untyped_storage().data_ptr()
        # Two views that only overlap are two tensors: each is written whole.
        kept[name] = plain.clone() if storage in storages else plain
        storages.add(storage)
    return kept, aliases


def check_tensor(name: str, tensor: Tensor) -> None:
    """Raise, by name, if a tensor is not one that a file keeps whole."""
    if hasattr(tensor, "full_tensor"):
        raise ValueError(
            f"{name} is one process's shard of a tensor. Gather it on every process first, e.g. with "
            "get_model_state_dict(model, options=StateDictOptions(full_state_dict=True, cpu_offload=True))."
        )
    if tensor.layout is not torch.strided or tensor.is_meta:
        raise ValueError(f"{name} is a {tensor.layout} tensor on {tensor.device}; only dense ones hold values to keep")


def import_safetensors() -> Any:
    try:
        import safetensors
        import safetensors.torch
    except ImportError as error:
        raise ImportError('checkpoints and prepared data need safetensors: pip install "scalelong[train]"') from error
    return safetensors
