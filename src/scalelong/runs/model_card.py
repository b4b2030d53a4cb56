"""The README of an exported model: what it is, how it was trained, how well it did, and how it is loaded."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ..config.schema import Config
from .metrics import read_metrics

FRONT = """---
library_name: {library}
tags: [diffusion, unconditional-image-generation, scalelong]
---
"""

BODY = """# {name}

{description}

| | |
| --- | --- |
| network | {network}, {parameters:,} parameters |
| data | `{data}` at {size}×{size} |
| long skips | {scaling} |
| trained | {step:,} steps of batch {batch}, {weights} weights |
| diffusion | {schedule} schedule, {time} time, predicts {prediction} |
| validation loss | {validation} |

## Load it

```python
{lines}
```

{note}
Made with scalelong; the method is that of Huang et al., *ScaleLong*, NeurIPS 2023.
"""


@dataclass(frozen=True)
class Card:
    """What the README says; `reason` is why the scaling could not be folded into the weights, if it could not."""

    config: Config
    run: Path
    step: int
    weights: str
    to: str
    parameters: int
    reason: str | None


def write_card(card: Card, path: Path) -> None:
    config = card.config
    text = BODY.format(
        name=config.name,
        description=config.description,
        network=describe_network(config),
        parameters=card.parameters,
        data=config.data.source,
        size=config.data.image_size,
        scaling=describe_scaling(config),
        step=card.step,
        batch=config.training.batch_size,
        weights={"ema": "averaged", "raw": "last"}[card.weights],
        schedule=config.diffusion.schedule,
        time=config.diffusion.time,
        prediction=config.diffusion.prediction,
        validation=validation_loss(card),
        lines="\n".join(load_lines(card)),
        note=note(card),
    )
    path.write_text(FRONT.format(library="diffusers" if card.to == "diffusers" else "pytorch") + text, encoding="utf-8")


def describe_network(config: Config) -> str:
    options = config.model.model_dump(mode="json", exclude_defaults=True, exclude={"kind"})
    return f"{config.model.kind} `{json.dumps(options)}`"


def describe_scaling(config: Config) -> str:
    scaling = config.scaling
    settings = "".join(f", {name} = {value}" for name, value in scaling.options.items())
    return "not scaled" if scaling.method == "none" else f"`{scaling.method}`{settings}, at the {scaling.where}"


def validation_loss(card: Card) -> str:
    """The last one up to the exported step."""
    key = "validation_loss_ema" if card.weights == "ema" else "validation_loss"
    lines: list[dict[str, Any]] = read_metrics(card.run / "metrics.jsonl")
    found = [line for line in lines if key in line and line["step"] <= card.step]
    return f"{found[-1][key]:.4f} at step {found[-1]['step']}" if found else "not measured"


def load_lines(card: Card) -> list[str]:
    """Code that loads the folder, with the scaling put back where it is not in the weights."""
    if card.to == "uvit":
        lines = ["from safetensors.torch import load_file", 'nnet.load_state_dict(load_file("nnet.safetensors"))']
        name = "nnet"
    elif card.config.conditional:
        kind = "UNet2DModel" if card.config.text is None else "UNet2DConditionModel"
        lines = [f"from diffusers import {kind}", f'unet = {kind}.from_pretrained("FOLDER", subfolder="unet")']
        name = "unet"
    else:
        lines = ["from diffusers import DDPMPipeline", 'pipeline = DDPMPipeline.from_pretrained("FOLDER")']
        name = "pipeline.unet"
    return lines + (scaling_lines(card, name) if card.reason is not None else [])


def scaling_lines(card: Card, name: str) -> list[str]:
    scaling = card.config.scaling
    options = "".join(f", {key}={value!r}" for key, value in scaling.options.items())
    where = "" if scaling.where == "input" else f", where={scaling.where!r}"
    return [
        "",
        "from safetensors.torch import load_file",
        "from scalelong import scale_skips",
        f'scale_skips({name}, "{scaling.method}"{where}{options})',
        f'{name}.skip_scaling.load_state_dict(load_file("FOLDER/skip_scaling.safetensors"))',
    ]


def note(card: Card) -> str:
    if card.reason is not None:
        return (
            "**The long skips of this network must be scaled again after loading**, as the lines above do: without "
            f"them it draws other images. The scaling is not in the weights, because {card.reason}.\n"
        )
    if card.config.scaling.method == "none":
        return ""
    return "The scaling of the long skips is folded into the weights: nothing else is needed to use it.\n"
