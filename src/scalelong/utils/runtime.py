"""What every package asks: about this process and its device, about tensors and modules; and random numbers."""

from __future__ import annotations

import atexit
import hashlib
import os
import platform
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import cache, partial
from importlib import metadata
from pathlib import Path
from typing import Any, NoReturn

import torch
from torch import Generator, Tensor, nn

POLL_SECONDS = 0.2
PACKAGES = ("scalelong", "torch", "diffusers", "datasets", "numpy", "safetensors")


@dataclass(frozen=True)
class Rank:
    """One process of `world`: its part of some work is what has the number `index` modulo `world`."""

    index: int = 0
    world: int = 1

    @classmethod
    def here(cls) -> Rank:
        """That of this process, as torchrun and accelerate say it."""
        return cls(int(os.environ.get("RANK", "0")), int(os.environ.get("WORLD_SIZE", "1")))

    # A `Team` of several processes overrides these: it notices those that are lost.

    def wait(self, what: str, condition: Callable[[], bool]) -> None:
        """Wait until what another process does is there; `what` says what it is."""
        while not condition():
            time.sleep(POLL_SECONDS)

    def meet(self, what: str, said: str = "") -> list[str]:
        """Wait until all processes are here; what each of them said, by rank."""
        return [said]

    def failure(self) -> str:
        """How another process has ended before its time, if one did."""
        return ""


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


def software() -> dict[str, Any]:
    """What is the same for all that this machine does with this checkout."""
    found = {"python": platform.python_version(), **versions()}
    return {"versions": found, "commit": git_commit(Path(__file__).parent), "platform": platform.platform()}


@cache
def versions() -> dict[str, str]:
    found = {}
    for package in PACKAGES:
        try:
            found[package] = metadata.version(package)
        except metadata.PackageNotFoundError:
            continue
    return found


@cache  # A long process runs the code that it began with.
def git_commit(folder: Path) -> str | None:
    """The commit of the checkout that a folder lies in, with `-dirty` if files differ from it; None outside of one."""
    command = ["git", "-C", str(folder), "describe", "--always", "--dirty", "--abbrev=40", "--exclude=*"]
    try:
        return subprocess.run(command, capture_output=True, text=True, check=True, timeout=10).stdout.strip() or None
    except (OSError, subprocess.SubprocessError):
        return None


def is_sharded(tensor: Tensor) -> bool:
    # Not by class, which lives in a package that takes long to import and is needed by sharded runs only.
    return hasattr(tensor, "full_tensor")


def local(tensor: Tensor) -> Tensor:
    """This process's part, sharing its memory; a tensor that is not sharded itself."""
    return tensor.to_local() if is_sharded(tensor) else tensor  # pyright: ignore[reportAttributeAccessIssue]


def whole(tensor: Tensor) -> Tensor:
    """All parts together; every process must ask at the same time."""
    return tensor.full_tensor() if is_sharded(tensor) else tensor  # pyright: ignore[reportAttributeAccessIssue]


def tensors_in(value: Any) -> Iterator[Tensor]:
    """Every tensor in nested tuples, lists and dicts."""
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, (tuple, list, Mapping)):
        for item in value.values() if isinstance(value, Mapping) else value:
            yield from tensors_in(item)


def tensors_of(model: nn.Module) -> dict[str, Tensor]:
    """Parameters and buffers by name, each tensor once, under its first name."""
    found: dict[int, tuple[str, Tensor]] = {}
    # One walk instead of those of named_parameters and named_buffers: this runs at every step.
    for path, module in model.named_modules():
        prefix = f"{path}." if path else ""
        for name, tensor in (*module._parameters.items(), *module._buffers.items()):
            if tensor is not None:
                found.setdefault(id(tensor), (prefix + name, tensor))
    return dict(found.values())


def first_names(model: nn.Module) -> dict[str, str]:
    """For every tensor of the state_dict, the first name of the same tensor: tied weights share one."""
    first: dict[int, str] = {}
    state = {name: value for name, value in model.state_dict(keep_vars=True).items() if isinstance(value, Tensor)}
    return {name: first.setdefault(id(value), name) for name, value in state.items()}


def is_averaged(tensor: Tensor) -> bool:
    return isinstance(tensor, nn.Parameter) and (tensor.is_floating_point() or tensor.is_complex())


def blocks_of(network: nn.Module, prefix: str = "") -> dict[str, nn.Module]:
    """The network's parts that have weights, by path; of a list or a dict of modules its entries."""
    blocks: dict[str, nn.Module] = {}
    for name, child in network.named_children():
        path = f"{prefix}{name}"
        if isinstance(child, nn.ModuleList | nn.ModuleDict):
            blocks |= blocks_of(child, f"{path}.")
        elif next(child.parameters(), None) is not None:
            blocks[path] = child
    return blocks


class Hook:
    """A hook that a copy of the model does not take along: copies are not monitored."""

    def __init__(self, function: Callable[..., Any]) -> None:
        self.function = function

    def __call__(self, *args: Any) -> Any:
        # A pass without gradients is an evaluation, a sample or a probe, not the step that is read.
        return self.function(*args) if torch.is_grad_enabled() else None

    def __reduce__(self) -> tuple[Any, ...]:
        return partial, (ignore,)


def ignore(*args: Any) -> None:
    """What a hook becomes in a copy."""


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
