"""The model card of an export: what the network is, how it was trained, how well it did, and how it is loaded."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from ..config.own import is_file
from ..config.schema import Config, PythonConfig, ScalingConfig, UViTConfig
from ..config.sections import Weights
from .run_dir import Run, read_metrics

# Of a network's settings: what says where it came from, and not what it is.
NOT_SHOWN = {"kind", "weights", "weights_sha256", "skips"}
UVIT_FILE = "nnet.safetensors"

CARD = """---
library_name: {library}
tags: [diffusion, {task}, scalelong]
---
{first}# {config.name}

{config.description}

| | |
| --- | --- |
| network | {config.model.kind} `{model}`, {parameters:,} parameters |
| data | `{config.data.source}` at {config.data.image_size}×{config.data.image_size} |
| long skips | {scaling} |
| trained | {step:,} steps of batch {config.training.batch_size}, {weights} weights |
| diffusion | {diffusion.schedule} schedule, {diffusion.time} time, predicts {diffusion.prediction} |
| condition | {condition} |
| validation loss | {validation} |

## Load it

```python
{lines}
```

{note}
Made with scalelong; the method is that of Huang et al., *ScaleLong*, NeurIPS 2023.
"""

# Before everything else: whoever reads one line has read it.
FIRST = "**{library} alone cannot load this network, whose long skips are scaled by scalelong: {how}.**\n\n"
FOLDED = "The scaling of the long skips is folded into the weights: nothing else is needed to use it.\n"
BESIDE = """**The long skips of this network must be scaled again after loading**, as the lines above do: without
them it samples other images. The scaling is not folded into the weights, because {reason}.
"""
OWN_CODE = """from functools import partial
import scalelong
{first}
nnet = scalelong.from_pretrained({build}, "FOLDER")"""
UVIT_CODE = f'''from safetensors.torch import load_file
{{again}}nnet.load_state_dict(load_file("{UVIT_FILE}"))'''
GUIDANCE = (
    "; guidance w: ε = ε(∅) + w·(ε(c) − ε(∅)), as diffusers' `guidance_scale`: 1 is the condition alone, "
    "and (1 + w')·ε(c) − w'·ε(∅) has w' = w − 1"
)


def write_card(
    path: Path, run: Run, config: Config, step: int, weights: Weights, parameters: int, reason: str | None
) -> None:
    """The README: what the model is, how it was trained, how well it did, and how it is loaded."""
    scaling, is_uvit = config.scaling, isinstance(config.model, UViTConfig)
    settings = "".join(f", {name} = {value}" for name, value in scaling.options.items())
    key = "validation_loss_ema" if weights == "ema" else "validation_loss"
    validated = [line for line in read_metrics(run.metrics.path) if key in line and line["step"] <= step]
    is_own = isinstance(config.model, PythonConfig)
    library, how = ("U-ViT", "see below") if is_uvit else ("diffusers", "use `scalelong.runs.export.load_pipeline`")
    library, how = ("torch", "use `scalelong.from_pretrained`") if is_own else (library, how)
    folded = "" if scaling.method == "none" else FOLDED
    text = CARD.format(
        config=config,
        first="" if reason is None else FIRST.format(library=library, how=how),
        library="pytorch" if is_uvit or is_own else "diffusers",
        task=f"{'' if config.conditional else 'un'}conditional-image-generation",
        model=json.dumps(describe_network(config)),
        parameters=parameters,
        scaling="not scaled" if scaling.method == "none" else f"`{scaling.method}`{settings}, at the {scaling.where}",
        step=step,
        weights={"ema": "EMA", "raw": "last"}[weights],
        diffusion=config.diffusion,
        condition=describe_condition(config),
        validation=f"{validated[-1][key]:.4f} at step {validated[-1]['step']}" if validated else "not measured",
        lines=code_that_loads(config, scaled=reason is not None),
        note=folded if reason is None else BESIDE.format(reason=reason),
    )
    path.write_text(text, encoding="utf-8")


def describe_network(config: Config) -> dict[str, Any]:
    """The settings of the network; of a path to its code the name of the file, which lies beside the card."""
    shown = config.model.model_dump(mode="json", exclude_defaults=True, exclude=NOT_SHOWN)
    return {key: Path(value).name if key == "factory" else value for key, value in shown.items()}


def describe_condition(config: Config) -> str:
    """Classes and captions, what stands for none, and what the scale of the guidance means."""
    labels, text, said = config.labels, config.text, []
    if labels is not None:
        none = f", and {labels.classes} stands for no class" if labels.drop else ", and none stands for no class"
        said.append(f"`num_classes` {labels.embeddings}: the labels are 0 to {labels.classes - 1}{none}")
    if text is not None:
        none = "the empty one" if text.drop else "none"
        said.append(f"captions, as `{text.encoder}` gives their features; {none} stands for no caption")
    guided = any(block is not None and block.drop for block in (labels, text))
    return "; ".join(said) + (GUIDANCE if guided else "; not trained for guidance") if said else "none"


def code_that_loads(config: Config, *, scaled: bool) -> str:
    """Code that loads the folder, with the scaling where it is not folded into the weights."""
    if isinstance(config.model, PythonConfig):
        place, _, name = config.model.factory.rpartition(":")
        first = f"from {Path(place).stem if is_file(place) else place} import {name.partition('.')[0]}"
        options = "".join(f", {key}={value!r}" for key, value in config.model.options.items())
        return OWN_CODE.format(first=first, build=f"partial({name}{options})")
    if isinstance(config.model, UViTConfig):
        return UVIT_CODE.format(again=code_that_scales(config.scaling) if scaled else "")
    if scaled:
        return 'from scalelong.runs.export import load_pipeline\npipeline = load_pipeline("FOLDER")'
    if config.conditional:
        kind = "UNet2DModel" if config.text is None else "UNet2DConditionModel"
        return f'from diffusers import {kind}\nunet = {kind}.from_pretrained("FOLDER", subfolder="unet")'
    return 'from diffusers import DDPMPipeline\npipeline = DDPMPipeline.from_pretrained("FOLDER")'


def code_that_scales(scaling: ScalingConfig) -> str:
    options = "" if scaling.where == "input" else f", where={scaling.where!r}"
    options += "".join(f", {key}={value!r}" for key, value in scaling.options.items())
    return f'from scalelong import scale_skips\nscale_skips(nnet, "{scaling.method}"{options})\n'
