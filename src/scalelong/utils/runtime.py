"""This process: its rank, what it computes on, random numbers that need no state, and how it ends."""

from __future__ import annotations

import atexit
import hashlib
import os
import shutil
import sys
from dataclasses import dataclass
from typing import NoReturn

import torch
from torch import Generator


@dataclass(frozen=True)
class Rank:
    """One process of `world`: its part of some work is what has the number `index` modulo `world`."""

    index: int = 0
    world: int = 1

    @classmethod
    def here(cls) -> Rank:
        """That of this process, as torchrun and accelerate say it."""
        return cls(int(os.environ.get("RANK", "0")), int(os.environ.get("WORLD_SIZE", "1")))


SINGLE = Rank()


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


def training_memory(sharded: bool = False) -> int:
    """Bytes that a network may take in training: of this process's GPU, or of all of them, or of the machine."""
    if torch.cuda.is_available():
        return torch.cuda.get_device_properties(own_device()).total_memory * (Rank.here().world if sharded else 1)
    return machine_memory()


def machine_memory() -> int:
    """Bytes of memory that the machine has, used or not."""
    import psutil

    return psutil.virtual_memory().total


def has_bf16(device: str) -> bool:
    """Whether the device multiplies matrices of bf16 by itself, and so faster than those of float32."""
    if device == "cuda":
        return torch.cuda.is_bf16_supported(including_emulation=False)
    # Not in every supported version of torch, which emulates bf16 on other processors.
    asked = (getattr(torch.cpu, name, None) for name in ("_is_avx512_bf16_supported", "_is_amx_tile_supported"))
    return device == "cpu" and any(supported is not None and supported() for supported in asked)


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


def check_compiler(device: str) -> None:
    """Raise where torch has no compiler for the code of a CPU; on Windows it looks for one in its own way."""
    compiler = os.environ.get("CXX", "clang++" if sys.platform == "darwin" else "g++")
    if device == "cpu" and sys.platform != "win32" and shutil.which(compiler) is None:
        raise ValueError(f"to compile, torch needs {compiler}, which is not there: install it, or do not compile")


def process_exists(number: int) -> bool:
    """Whether a process of this number runs here; Windows is not asked, where the question would end it."""
    try:
        return os.name == "nt" or number < 1 or os.kill(number, 0) is None
    except ProcessLookupError:
        return False
    except OSError:  # It is another user's.
        return True


def keyed_generator(seed: int, purpose: str, number: int) -> Generator:
    """A generator whose stream is a function of the key; neighbouring keys give unrelated streams."""
    digest = hashlib.blake2b(f"{seed}/{purpose}/{number}".encode(), digest_size=8).digest()
    return Generator().manual_seed(int.from_bytes(digest, "little"))


def end_process(code: int) -> NoReturn:
    """End the process after its exit handlers, but without taking Python apart.

    The threads in which torch sends tensors between processes on CPUs (gloo) outlive the end of their group, to which
    torch itself keeps references. Where one of them lets go of its last tensor just when Python is taken apart, it
    aborts the process ("terminate called without an active exception"), although all of its work was done.
    """
    atexit._run_exitfuncs()
    for stream in (sys.stdout, sys.stderr):
        stream.flush()
    os._exit(code)
