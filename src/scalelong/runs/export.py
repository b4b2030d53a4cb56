"""A trained run as others read it: a diffusers pipeline, or weights for the public U-ViT code, with a model card.

Constants are folded into the weights where that is exact. Where it is not, the scaling is among the weights, and what
does not know it refuses the folder: without it the network would draw other images, and nobody would be told.
"""

from __future__ import annotations

import glob
import json
import os
import shutil
import warnings
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, get_args

from torch import nn

from ..config.build import build_process, count_parameters
from ..config.schema import Config, UViTConfig
from ..config.sections import Weights
from ..data.sources import import_extra
from ..skips import AbsorbedScalingWarning, fuse_skips, scale_skips
from ..utils.atomic import (
    Files,
    open_to_umask,
    publish,
    read_tensors,
    remove_left_behind,
    replace_text,
    system_errors,
    writing,
)
from .card import UVIT_FILE, write_card
from .model import choose_checkpoint, read_network
from .run_dir import Run, RunError

Target = Literal["diffusers", "uvit"]

PREDICTIONS = {"epsilon": "epsilon", "x0": "sample", "v": "v_prediction"}
# In the config of a network whose scaling is not folded: diffusers has neither such a class nor, as it does not ask for
# that when it loads a single network, such blocks.
OWN_CLASS, OWN_BLOCK, SCALING = "ScaleLong", " with skips scaled by scalelong (see its README.md)", "scalelong"


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
    reason = fold_scaling(network)
    temporary = target.with_name(f".tmp-{os.getpid()}-{target.name}")
    remove_left_behind(target.parent, f".tmp-*-{glob.escape(target.name)}")
    try:
        with writing(target), system_errors(target):
            Files().make_folder(temporary)
            if to == "uvit":
                Files().write_tensors(temporary / UVIT_FILE, network.state_dict())
            else:
                write_diffusers(network, config, temporary)
                if reason is not None:
                    claim(temporary, config)
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
    fitting = "uvit" if isinstance(config.model, UViTConfig) else "diffusers"
    if to != fitting:
        raise ValueError(f"the network of this run is a {config.model.kind}: use --to {fitting}")
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
    if config.conditional:
        network.save_pretrained(folder / "unet")
        scheduler.save_pretrained(folder / "scheduler")
    else:
        diffusers.DDPMPipeline(unet=network, scheduler=scheduler).save_pretrained(folder)


def claim(folder: Path, config: Config) -> None:
    """Name the network's class and blocks after this package, so that it alone loads them, and say how they scale."""
    file, index, scaling = folder / "unet" / "config.json", folder / "model_index.json", config.scaling
    content = json.loads(file.read_bytes())
    content["_class_name"] = OWN_CLASS + content["_class_name"]
    content["up_block_types"] = [kind + OWN_BLOCK for kind in content["up_block_types"]]
    content[SCALING] = {"method": scaling.method, "where": scaling.where, **scaling.options}
    replace_text(file, json.dumps(content, indent=2) + "\n")
    if index.is_file():
        parts = json.loads(index.read_bytes()) | {"unet": ["scalelong", content["_class_name"]]}
        replace_text(index, json.dumps(parts, indent=2) + "\n")


def load_pipeline(folder: str | Path) -> Any:
    """The DDPMPipeline of a folder that was exported for diffusers, its skips scaled as they were in training.

    Of a network that takes labels or text, which that pipeline does not give it, use the parts `unet` and `scheduler`.
    """
    diffusers, place = import_extra("diffusers", "an exported pipeline"), Path(folder).expanduser() / "unet"
    if not (place / "config.json").is_file():
        raise RunError(f"{folder} has no unet/config.json: it was not written by scalelong export --to diffusers")
    content = json.loads((place / "config.json").read_bytes())
    name = str(content["_class_name"]).removeprefix(OWN_CLASS)
    scaling, kind = content.pop(SCALING, None), getattr(diffusers, name, None)
    if not (isinstance(kind, type) and issubclass(kind, nn.Module)):
        raise RunError(f"{place / 'config.json'} names {name!r}, which is no network of diffusers")
    if scaling is None:
        network: Any = kind.from_pretrained(place, use_safetensors=True)  # pyright: ignore[reportAttributeAccessIssue]
    else:
        content["up_block_types"] = [block.removesuffix(OWN_BLOCK) for block in content["up_block_types"]]
        network = kind.from_config(content)  # pyright: ignore[reportAttributeAccessIssue]
        with warnings.catch_warnings():
            # That a norm cancels the scaling was said when the network was trained.
            warnings.simplefilter("ignore", AbsorbedScalingWarning)
            scale_skips(network, **scaling)
        # Large networks have several files.
        network.load_state_dict({k: v for file in place.glob("*.safetensors") for k, v in read_tensors(file).items()})
    scheduler = diffusers.DDPMScheduler.from_pretrained(place.with_name("scheduler"))
    return diffusers.DDPMPipeline(network.eval(), scheduler)


def push(folder: Path, repository: str, *, private: bool = False) -> str:
    """Upload an exported folder to the Hugging Face hub; returns its address."""
    from huggingface_hub import HfApi

    hub = HfApi()
    hub.create_repo(repository, private=private, exist_ok=True)
    hub.upload_folder(repo_id=repository, folder_path=folder)
    return f"https://huggingface.co/{repository}"
