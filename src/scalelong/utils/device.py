"""What this process computes on."""

from __future__ import annotations

import os
import shutil
import sys

import torch


def best_device() -> str:
    if torch.cuda.is_available():
        return "cuda"
    return "mps" if torch.backends.mps.is_available() else "cpu"


def own_device() -> str:
    """The best device; of several GPUs that of this process."""
    device = best_device()
    if device != "cuda":
        return device
    return f"cuda:{int(os.environ.get('LOCAL_RANK', '0')) % torch.cuda.device_count()}"


def has_bf16(device: str) -> bool:
    """Whether the device multiplies matrices of bf16 by itself, and so faster than those of float32."""
    if device == "cuda":
        return torch.cuda.is_bf16_supported(including_emulation=False)
    # Not in every supported version of torch, which emulates bf16 on other processors.
    asked = (getattr(torch.cpu, name, None) for name in ("_is_avx512_bf16_supported", "_is_amx_tile_supported"))
    return device == "cpu" and any(supported is not None and supported() for supported in asked)


def check_compiler(device: str) -> None:
    """Raise where torch has no compiler for the code of a CPU; on Windows it looks for one in its own way."""
    compiler = os.environ.get("CXX", "clang++" if sys.platform == "darwin" else "g++")
    if device == "cpu" and sys.platform != "win32" and shutil.which(compiler) is None:
        raise ValueError(f"to compile, torch needs {compiler}, which is not there: install it, or do not compile")


def resolve_precision(precision: str, device: str) -> str:
    """The precision that a recipe's means on a device: fp32, bf16 or fp16.

    >>> resolve_precision("fp32", "cpu"), resolve_precision("bf16", "cpu")
    ('fp32', 'bf16')
    """
    if precision == "fp16" and device == "cpu":
        raise ValueError("training.precision: fp16 needs a GPU; on the CPU use fp32 or bf16")
    if precision == "auto":
        return "bf16" if has_bf16(device) else "fp32"
    return precision
