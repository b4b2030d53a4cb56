"""A trained run as others read it: a diffusers pipeline, or weights for the public U-ViT code, with a model card.

Constants are folded into the weights where that is exact. Where it is not, the weights are those of the unscaled
network, the scaling lies in a file beside them, and the model card has the lines that put it back.
"""

from __future__ import annotations

import importlib
import json
import os
import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, get_args

from torch import nn

from ..config.build import build_process, count_parameters
from ..config.schema import Config, UViTConfig, Weights
from ..skips import fuse_skips, unscale_skips
from ..utils.atomic import Files
from .model import choose_checkpoint, read_network
from .run_dir import Run, RunError, read_metrics

Target = Literal["diffusers", "uvit"]

PREDICTIONS = {"epsilon": "epsilon", "x0": "sample", "v": "v_prediction"}
SCALING_FILE = "skip_scaling.safetensors"
UVIT_FILE = "nnet.safetensors"


@dataclass(frozen=True)
class Export:
    """What was written; `reason` says why the scaling is beside the weights, None if it is in them."""

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
    scaling = network.get_submodule("skip_scaling").state_dict() if hasattr(network, "skip_scaling") else {}
    reason = fold_or_remove_scaling(network)
    temporary = target.with_name(f".tmp-{target.name}-{os.getpid()}")
    try:
        temporary.mkdir(parents=True)
        if to == "uvit":
            Files().write_tensors(temporary / UVIT_FILE, network.state_dict())
        else:
            write_diffusers(network, config, temporary)
        if reason is not None:
            Files().write_tensors(temporary / SCALING_FILE, scaling)
        write_card(temporary / "README.md", run, config, chosen.step, weights, parameters, reason)
        os.rename(temporary, target)
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
    if to == "diffusers" and config.diffusion.time == "continuous":
        raise ValueError("diffusers' schedulers count whole steps, but this run was trained in continuous time")


def fold_or_remove_scaling(network: nn.Module) -> str | None:
    """Fold the scaling into the weights, or take it away; returns why it could not be folded."""
    if not hasattr(network, "skip_scaling"):
        return None
    try:
        fuse_skips(network)
    except ValueError as error:
        unscale_skips(network)
        return str(error).partition(". ")[0]
    return None


def write_diffusers(network: Any, config: Config, folder: Path) -> None:
    """A folder for DDPMPipeline; a network that takes a condition is not its, and is written by itself."""
    diffusers = importlib.import_module("diffusers")
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


def push(folder: Path, repository: str, *, private: bool = False) -> str:
    """Upload an exported folder to the Hugging Face hub; returns its address."""
    from huggingface_hub import HfApi

    hub = HfApi()
    hub.create_repo(repository, private=private, exist_ok=True)
    hub.upload_folder(repo_id=repository, folder_path=folder)
    return f"https://huggingface.co/{repository}"


CARD = """---
library_name: {library}
tags: [diffusion, unconditional-image-generation, scalelong]
---
# {config.name}

{config.description}

| | |
| --- | --- |
| network | {config.model.kind} `{model}`, {parameters:,} parameters |
| data | `{config.data.source}` at {config.data.image_size}×{config.data.image_size} |
| long skips | {scaling} |
| trained | {step:,} steps of batch {config.training.batch_size}, {weights} weights |
| diffusion | {diffusion.schedule} schedule, {diffusion.time} time, predicts {diffusion.prediction} |
| validation loss | {validation} |

## Load it

```python
{lines}
```

{note}
Made with scalelong; the method is that of Huang et al., *ScaleLong*, NeurIPS 2023.
"""

FOLDED = "The scaling of the long skips is folded into the weights: nothing else is needed to use it.\n"
BESIDE = """**The long skips of this network must be scaled again after loading**, as the lines above do: without
them it samples other images. The scaling is not in the weights, because {reason}.
"""

SCALE_AGAIN = """
from safetensors.torch import load_file
from scalelong import scale_skips
scale_skips({name}, "{method}"{options})
{name}.skip_scaling.load_state_dict(load_file("FOLDER/{file}"))"""


def write_card(
    path: Path, run: Run, config: Config, step: int, weights: Weights, parameters: int, reason: str | None
) -> None:
    """The README: what the model is, how it was trained, how well it did, and how it is loaded."""
    scaling = config.scaling
    settings = "".join(f", {name} = {value}" for name, value in scaling.options.items())
    key = "validation_loss_ema" if weights == "ema" else "validation_loss"
    validated = [line for line in read_metrics(run.metrics.path) if key in line and line["step"] <= step]
    folded = "" if scaling.method == "none" else FOLDED
    text = CARD.format(
        config=config,
        library="pytorch" if isinstance(config.model, UViTConfig) else "diffusers",
        model=json.dumps(config.model.model_dump(mode="json", exclude_defaults=True, exclude={"kind"})),
        parameters=parameters,
        scaling="not scaled" if scaling.method == "none" else f"`{scaling.method}`{settings}, at the {scaling.where}",
        step=step,
        weights={"ema": "EMA", "raw": "last"}[weights],
        diffusion=config.diffusion,
        validation=f"{validated[-1][key]:.4f} at step {validated[-1]['step']}" if validated else "not measured",
        lines=code_that_loads(config, scale_again=reason is not None),
        note=folded if reason is None else BESIDE.format(reason=reason),
    )
    path.write_text(text, encoding="utf-8")


def code_that_loads(config: Config, *, scale_again: bool) -> str:
    """Code that loads the folder, and puts the scaling back where it is not in the weights."""
    if isinstance(config.model, UViTConfig):
        name = "nnet"
        code = f'from safetensors.torch import load_file\nnnet.load_state_dict(load_file("{UVIT_FILE}"))'
    elif config.conditional:
        name, kind = "unet", "UNet2DModel" if config.text is None else "UNet2DConditionModel"
        code = f'from diffusers import {kind}\nunet = {kind}.from_pretrained("FOLDER", subfolder="unet")'
    else:
        name = "pipeline.unet"
        code = 'from diffusers import DDPMPipeline\npipeline = DDPMPipeline.from_pretrained("FOLDER")'
    if not scale_again:
        return code
    scaling = config.scaling
    options = "" if scaling.where == "input" else f", where={scaling.where!r}"
    options += "".join(f", {key}={value!r}" for key, value in scaling.options.items())
    again = SCALE_AGAIN.format(name=name, method=scaling.method, options=options, file=SCALING_FILE)
    return f"{code}\n{again}"
