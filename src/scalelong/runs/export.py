"""A trained run as others read it: a diffusers pipeline, or weights for the public U-ViT code.

Constants are folded into the weights where that is exact. Where it is not, the weights are those of the unscaled
network, the scaling lies in a file beside them, and the model card has the lines that put it back.
"""

from __future__ import annotations

import importlib
import os
import shutil
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from torch import nn

from ..config.build import build_process, count_parameters
from ..config.schema import Config, UViTConfig, Weights
from ..diffusion import DiffusionProcess
from ..skips import fuse_skips, unscale_skips
from ..utils.atomic import import_safetensors
from .choice import choose_checkpoint
from .model import read_network
from .model_card import Card, write_card
from .run_dir import Run, RunError

Target = Literal["diffusers", "uvit"]

PREDICTIONS = {"epsilon": "epsilon", "x0": "sample", "v": "v_prediction"}
SCALING_FILE = "skip_scaling.safetensors"
UVIT_FILE = "nnet.safetensors"


@dataclass(frozen=True)
class Export:
    """What was written, and whether the scaling is in the weights; if not, `reason` says why."""

    folder: Path
    fused: bool
    reason: str | None = None


def export_run(
    folder: str | Path,
    to: Target,
    out: str | Path | None = None,
    *,
    weights: Weights = "ema",
    checkpoint: str | int = "last",
) -> Export:
    """Write a checkpoint of a run (last, best or a step) for another library; the folder is complete or absent."""
    run = Run(Path(folder))
    config = run.config()
    check_target(config, to)
    chosen = choose_checkpoint(run, checkpoint)
    target = Path(out) if out is not None else run.folder / f"{to}-step-{chosen.step:06d}"
    if target.exists():
        raise RunError(f"{target} exists already: choose another --out, or remove it first")
    network = read_network(config, chosen, weights)
    parameters = count_parameters(network)
    scaling = dict(network.get_submodule("skip_scaling").state_dict()) if has_scaling(network) else {}
    reason = fold_or_remove_scaling(network)
    card = Card(config, run.folder, chosen.step, weights, to, parameters, reason)

    def fill(place: Path) -> None:
        WRITERS[to](network, config, place)
        if reason is not None:
            save_tensors(scaling, place / SCALING_FILE)
        write_card(card, place / "README.md")

    write_once(target, fill)
    return Export(target, reason is None, reason)


def check_target(config: Config, to: str) -> None:
    """Raise where a network is not of the kind that was asked for, or its times are not those of a scheduler."""
    if to not in WRITERS:
        raise ValueError(f"--to is one of {', '.join(WRITERS)}, not {to!r}")
    is_uvit = isinstance(config.model, UViTConfig)
    if is_uvit != (to == "uvit"):
        fitting = "uvit" if is_uvit else "diffusers"
        raise ValueError(f"the network of this run is a {config.model.kind}: use --to {fitting}")
    if to == "diffusers" and config.diffusion.time == "continuous":
        raise ValueError("diffusers' schedulers count whole steps, but this run was trained in continuous time")


def has_scaling(network: nn.Module) -> bool:
    return "skip_scaling" in dict(network.named_children())


def fold_or_remove_scaling(network: nn.Module) -> str | None:
    """Fold the scaling into the weights, or take it away; returns why it could not be folded."""
    if not has_scaling(network):
        return None
    try:
        fuse_skips(network)
    except ValueError as error:
        unscale_skips(network)
        return str(error).partition(". ")[0]
    return None


def write_diffusers(network: Any, config: Config, place: Path) -> None:
    """A folder for DDPMPipeline; a network that takes a condition is not its, and is written by itself."""
    scheduler = build_scheduler(build_process(config.diffusion))
    if config.conditional:
        network.save_pretrained(place / "unet")
        scheduler.save_pretrained(place / "scheduler")
    else:
        pipeline = importlib.import_module("diffusers").DDPMPipeline(unet=network, scheduler=scheduler)
        pipeline.save_pretrained(place)


def build_scheduler(process: DiffusionProcess) -> Any:
    """DDPM's scheduler with the process's own betas, which the names of diffusers' schedules give only nearly."""
    betas = process.schedule.betas.tolist()
    return importlib.import_module("diffusers").DDPMScheduler(
        num_train_timesteps=len(betas), trained_betas=betas, prediction_type=PREDICTIONS[process.prediction]
    )


def write_uvit(network: nn.Module, config: Config, place: Path) -> None:
    """The state_dict of the public U-ViT code, by its own names."""
    save_tensors(network.state_dict(), place / UVIT_FILE)


WRITERS: dict[str, Callable[[Any, Config, Path], None]] = {"diffusers": write_diffusers, "uvit": write_uvit}


def save_tensors(tensors: Any, path: Path) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    plain = {name: tensor.contiguous() for name, tensor in tensors.items()}
    import_safetensors().torch.save_file(plain, path)


def write_once(target: Path, fill: Callable[[Path], None]) -> None:
    """Fill a folder under a temporary name, then give it its name."""
    temporary = target.with_name(f".tmp-{target.name}-{os.getpid()}")
    try:
        temporary.mkdir(parents=True)
        fill(temporary)
        os.rename(temporary, target)
    finally:
        shutil.rmtree(temporary, ignore_errors=True)


def push(folder: Path, repository: str, *, private: bool = False) -> str:
    """Upload an exported folder to the Hugging Face hub; returns its address."""
    from huggingface_hub import HfApi

    hub = HfApi()
    hub.create_repo(repository, private=private, exist_ok=True)
    hub.upload_folder(repo_id=repository, folder_path=folder)
    return f"https://huggingface.co/{repository}"
