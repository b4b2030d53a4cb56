"""A trained run as others read it, with a model card: a diffusers pipeline, weights for the public U-ViT code, or the
weights and the code of a network of the user's own.

Constants are folded into the weights where that is exact. Where it is not, the scaling is among the weights, and what
does not know it refuses the folder: without it the network would draw other images, and nobody would be told.
"""

from __future__ import annotations

import glob
import os
import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, get_args

from torch import nn

from ..config.build import build_process, count_parameters
from ..config.own import keep_code
from ..config.schema import Config, PythonConfig, UViTConfig
from ..config.sections import Weights
from ..data.sources import import_extra
from ..models.mup import fold_multiplier
from ..skips import fuse_skips
from ..skips.pretrained import CONFIG, OWN_CLASS, from_pretrained, push, read_json, save_pretrained, to_text
from ..utils.atomic import Files, open_to_umask, publish, remove_left_behind, replace_text, system_errors, writing
from .card import UVIT_FILE, write_card
from .model import choose_checkpoint, read_network
from .run_dir import Run, RunError

__all__ = ["Export", "export_run", "load_pipeline", "push"]

Target = Literal["diffusers", "uvit", "safetensors"]

FITTING: dict[str, Target] = {"uvit": "uvit", "unet": "diffusers", "python": "safetensors"}
PREDICTIONS = {"epsilon": "epsilon", "x0": "sample", "v": "v_prediction"}


@dataclass(frozen=True)
class Export:
    """What was written; `reason` says why the scaling could not be folded into the weights, None if it was."""

    folder: Path
    reason: str | None = None

    @property
    def fused(self) -> bool:
        return self.reason is None


def export_run(
    folder: str | Path,
    to: Target,
    out: str | Path | None = None,
    *,
    weights: Weights = "ema",
    checkpoint: str | int = "last",
    allow_code: bool = False,
) -> Export:
    """Write a checkpoint of a run (last, best or a step) for another library; the folder is complete or absent.

    `allow_code` lets the run bring the code of its network, which is copied beside the weights.
    """
    run = Run(Path(folder))
    config = run.config(allow_code=allow_code)
    check_target(config, to)
    chosen = choose_checkpoint(run, checkpoint)
    target = Path(out) if out is not None else run.folder / f"{to}-step-{chosen.step:06d}"
    if target.exists():
        raise RunError(f"{target} exists already: choose another --out, or remove it first")
    network = read_network(config, chosen, weights)
    parameters = count_parameters(network)
    fold_multiplier(network)
    reason = fold_scaling(network)
    temporary = target.with_name(f".tmp-{os.getpid()}-{target.name}")
    remove_left_behind(target.parent, f".tmp-*-{glob.escape(target.name)}")
    try:
        with writing(target), system_errors(target):
            Files().make_folder(temporary)
            if isinstance(config.model, PythonConfig):
                save_pretrained(network, temporary)
                keep_code(config.model, temporary)
            elif to == "uvit":
                Files().write_tensors(temporary / UVIT_FILE, network.state_dict())
            else:
                write_diffusers(network, config, temporary)
            write_card(temporary / "README.md", run, config, chosen.step, weights, parameters, reason)
            for file in temporary.rglob("*.safetensors"):
                open_to_umask(file)
            publish(temporary, target)
    finally:
        shutil.rmtree(temporary, ignore_errors=True)
    return Export(target, reason)


def check_target(config: Config, to: str) -> None:
    """Raise where a network is not of the kind that was asked for, or its times are not those of a scheduler."""
    if to not in get_args(Target):
        raise ValueError(f"--to is one of {', '.join(get_args(Target))}, not {to!r}")
    fitting = FITTING[config.model.kind]
    if to != fitting:
        raise ValueError(f"the network of this run is a {config.model.kind}: use --to {fitting}")
    if config.model.self_conditioning:
        raise ValueError(
            f"what reads --to {to} knows no model.self_conditioning and would lose it: sample the run with scalelong, "
            "or save its network with scalelong.save_pretrained"
        )
    if isinstance(config.model, UViTConfig) and not config.model.is_public:
        raise ValueError(
            "the public U-ViT code knows no qk_norm, skip_norm or concat_balance: sample it with scalelong"
        )
    if to == "diffusers" and config.diffusion.time == "continuous":
        raise ValueError("diffusers' schedulers count whole steps, but this run was trained in continuous time")


def fold_scaling(network: nn.Module) -> str | None:
    """Fold the scaling into the weights; returns why it could not be folded, and then leaves it."""
    try:
        if hasattr(network, "skip_scaling"):
            fuse_skips(network)
    except ValueError as error:
        return str(error).partition(". ")[0]
    return None


def write_diffusers(network: Any, config: Config, folder: Path) -> None:
    """A folder for DDPMPipeline; a network that takes a condition is not its, and is written by itself."""
    diffusers = import_extra("diffusers", "--to diffusers")
    process = build_process(config.diffusion)
    # The process's own betas, which the names of diffusers' schedules give only nearly.
    betas = process.schedule.betas.tolist()
    scheduler = diffusers.DDPMScheduler(
        num_train_timesteps=len(betas), trained_betas=betas, prediction_type=PREDICTIONS[process.prediction]
    )
    scheduler.save_pretrained(folder / "scheduler")
    save_pretrained(network, folder / "unet")
    if not config.conditional:
        diffusers.DDPMPipeline(unet=network, scheduler=scheduler).save_config(folder)
        claim_pipeline(folder)


def claim_pipeline(folder: Path) -> None:
    """Let a pipeline's index name the class of the network as its own folder does."""
    index, kind = folder / "model_index.json", read_json(folder / "unet" / CONFIG)["_class_name"]
    if kind.startswith(OWN_CLASS):
        replace_text(index, to_text(read_json(index) | {"unet": ["scalelong", kind]}))


def load_pipeline(folder: str | Path) -> Any:
    """The DDPMPipeline of a folder that was exported for diffusers, its skips scaled as they were in training.

    Of a network that takes labels or text, which that pipeline does not give it, use the parts `unet` and `scheduler`.
    """
    diffusers, place = import_extra("diffusers", "an exported pipeline"), Path(folder).expanduser() / "unet"
    if not (place / CONFIG).is_file():
        raise RunError(f"{folder} has no unet/config.json: it was not written by scalelong export --to diffusers")
    name = str(read_json(place / CONFIG).get("_class_name")).removeprefix(OWN_CLASS)
    kind = getattr(diffusers, name, None)
    if not (isinstance(kind, type) and issubclass(kind, nn.Module)):
        raise RunError(f"{place / CONFIG} names {name!r}, which is no network of diffusers")
    scheduler = diffusers.DDPMScheduler.from_pretrained(place.with_name("scheduler"))
    return diffusers.DDPMPipeline(from_pretrained(kind, place).eval(), scheduler)
