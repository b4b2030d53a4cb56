"""Devices, processes and precision through Accelerate, and the network and optimiser made ready for them."""

from __future__ import annotations

import importlib.util
import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.optim import AdamW, Optimizer

from ..config.build import lay_out
from ..config.schema import Config, OptimConfig, TrainingConfig
from ..utils.device import best_device, check_compiler, resolve_precision
from .sharding import shard

# The devices whose AdamW is one kernel in every supported version of torch.
FUSED = {"cuda", "cpu", "xpu"}


# Accelerate's names of one process, and of several that each hold the whole network.
ENGINES = ("NO", "MULTI_CPU", "MULTI_GPU", "MULTI_XPU")


def build_accelerator(config: TrainingConfig, folder: Path) -> Any:
    """The Accelerator of this process; the device is the best there is."""
    try:
        from accelerate import Accelerator, DistributedDataParallelKwargs
    except ImportError as error:
        raise ImportError('training needs accelerate: pip install "scalelong[train]"') from error
    check_trackers(config.trackers)
    device = best_device()
    if config.compile:
        check_compiler(device)
    precision = resolve_precision(config.precision, device)
    forget_other_precision(precision)
    accelerator = Accelerator(
        cpu=device == "cpu",
        mixed_precision=precision,
        gradient_accumulation_steps=config.grad_accumulation,
        log_with=list(config.trackers) or None,
        project_dir=folder,
        # The processes compute the same buffers; sending them around at every step would be waste.
        kwargs_handlers=[DistributedDataParallelKwargs(broadcast_buffers=False, gradient_as_bucket_view=True)],
    )
    check_engine(str(accelerator.distributed_type.value))
    return accelerator


def forget_other_precision(precision: str) -> None:
    """Let an Accelerator have another precision than those before it in this process, which share one state.

    Device and processes stay as they are.
    """
    from accelerate.state import AcceleratorState

    if AcceleratorState._shared_state.get("_mixed_precision", precision) != precision:
        AcceleratorState._reset_state()


def check_engine(kind: str) -> None:
    """Raise where Accelerate would wrap the network in a way that checkpoints and averages do not know."""
    if kind == "FSDP":
        raise ValueError("accelerate's own FSDP is not used: launch without it, and set training.parallel=fsdp")
    if kind not in ENGINES:
        raise ValueError(f"training in the mode {kind} of accelerate is not supported; use one of {', '.join(ENGINES)}")


def check_trackers(trackers: Sequence[str]) -> None:
    """Accelerate drops a tracker that is not installed without a word."""
    for tracker in trackers:
        if importlib.util.find_spec(tracker) is None:
            extra = "'scalelong[train]'" if tracker == "tensorboard" else tracker
            raise ImportError(f"training.trackers: {tracker} is not installed: pip install {extra}")


def place(network: nn.Module, config: TrainingConfig, accelerator: Any) -> nn.Module:
    """The network on its device, in its memory layout, compiled and sharded as the recipe says; the same object."""
    sharded = uses_fsdp(config, accelerator)
    if not sharded:
        # Shards are rows of the plain layout; convolutions follow the layout of the images then.
        lay_out(network, config, accelerator.device)
    if config.compile:
        # In place, so that the names of parameters stay; skips are scaled by now, hooks are traced with the network.
        network.compile()
    return shard(network, accelerator.device, accelerator.mixed_precision) if sharded else network


def uses_fsdp(config: TrainingConfig, accelerator: Any) -> bool:
    """Whether each process holds only a part of the weights."""
    return config.parallel == "fsdp" and accelerator.num_processes > 1


def wrap(network: nn.Module, optimizer: Optimizer, config: TrainingConfig, accelerator: Any) -> tuple[nn.Module, Any]:
    """The network as the training step calls it, in its precision and among its processes, and the optimiser."""
    # A sharded network exchanges gradients by itself.
    alone = uses_fsdp(config, accelerator)
    with warnings.catch_warnings():
        # Newer versions of torch have another name for this option of theirs, older ones do not know it.
        warnings.filterwarnings("ignore", message=".*broadcast_buffers", category=FutureWarning)
        model = accelerator.prepare_model(network, device_placement=False, evaluation_mode=alone)
    return model, accelerator.prepare_optimizer(optimizer, device_placement=False)


def build_optimizer(network: nn.Module, config: OptimConfig, device: torch.device) -> Optimizer:
    fused = device.type in FUSED
    parameters = [parameter for parameter in network.parameters() if parameter.requires_grad]
    return AdamW(
        parameters,
        lr=config.lr,
        betas=config.betas,
        weight_decay=config.weight_decay,
        fused=fused,
        foreach=None if fused else True,
    )


def learning_rate(config: OptimConfig, step: int) -> float:
    """The rate of a step, counted from 0: a linear warm-up that reaches the full rate, then constant.

    >>> config = OptimConfig(lr=1.0, warmup_steps=4)
    >>> [learning_rate(config, step) for step in range(5)]
    [0.25, 0.5, 0.75, 1.0, 1.0]
    """
    return config.lr * min(1.0, (step + 1) / max(1, config.warmup_steps))


def check_batch_divides(config: Config, processes: int) -> None:
    """Raise if the global batch cannot be shared evenly, so that no process's mean weighs more than another's."""
    parts = config.training.grad_accumulation
    if config.training.batch_size % (processes * parts):
        raise ValueError(
            f"training.batch_size={config.training.batch_size} cannot be shared evenly by {processes} processes in "
            f"{parts} accumulated parts: make it a multiple of {processes * parts}"
        )
