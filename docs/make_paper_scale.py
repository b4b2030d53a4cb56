"""Write the table of docs/paper-scale.md: what each setting of the paper costs, counted and estimated, and its command.

python docs/make_paper_scale.py        # replaces what stands between the comments of docs/paper-scale.md; half a minute
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.utils.flop_counter import FlopCounterMode

from scalelong.config import Config, load_recipe
from scalelong.config.build import build_network, count_parameters
from scalelong.config.schema import UViTConfig

PAGE = Path(__file__).parent / "paper-scale.md"
RATE = 0.3 * 312e12  # FLOP/s: 30 % of what an A100 does in bf16 at most.
STATE = 20  # Bytes for a parameter: weight, gradient, two moments and EMA, in float32.
SHARE = 0.5  # Of the activations' bytes in float32, if they are kept in bf16.
FORWARD = 1 / 3  # Of the operations of a training step.
SAMPLES = 50_000

# The paper's FID: without scaling, with 1/√2, CS and LS.
FIDS = {
    "cifar10-unet": (3.17, 3.14, 3.05, 3.07),
    "cifar10-uvit-s2": (3.11, 3.11, 2.98, 3.01),
    "celeba64-uvit-s4": (2.87, 3.15, 2.78, 2.73),
    "imagenet64-unet": (3.77, 3.66, 3.48, 3.39),
    "imagenet64-uvit-m4": (5.85, 5.80, 5.68, 5.75),
    "imagenet64-uvit-l4": (4.26, 4.20, 3.83, 4.08),
    "coco-unet": (7.32, 7.19, 7.04, 6.89),
    "coco-uvit-s2": (5.95, 5.88, 5.77, 5.60),
}
PROCESSES = {"imagenet64": 8, "coco": 4}
COLUMNS = (
    *("command", "parameters", "steps × batch", "GFLOP per image", "EFLOP in all", "GPU hours ≈"),
    *("and 50,000 samples ≈", "GB, weights ≈", "GB, activations ≈", "the paper's FID: none, 1/√2, CS, LS"),
)


@dataclass(frozen=True)
class Cost:
    """Of training on one image: floating-point operations, forward and backward, and bytes kept for the backward."""

    parameters: int
    flops: int
    kept: int


def main() -> None:
    text = re.sub(r"(<!-- table -->\n\n).*?(\n\n<!-- end -->)", rf"\g<1>{table()}\g<2>", PAGE.read_text(), flags=re.S)
    PAGE.write_text(text, encoding="utf-8")


def table() -> str:
    rows = [COLUMNS, ("---",) * len(COLUMNS), *(row(load_recipe(name)) for name in FIDS)]
    return "\n".join(f"| {' | '.join(cells)} |" for cells in rows)


def row(config: Config) -> tuple[str, ...]:
    cost, training = measure(config), config.training
    total = cost.flops * training.steps * training.batch_size
    calls = config.sampling_steps * (1 if config.sampling.guidance == 1 else 2)
    return (
        command(config),
        f"{cost.parameters / 1e6:.0f} M",
        f"{training.steps:,} × {training.batch_size:,}",
        f"{cost.flops / 1e9:.0f}",
        f"{total / 1e18:.1f}",
        f"{total / RATE / 3600:,.0f}",
        f"{FORWARD * cost.flops * SAMPLES * calls / RATE / 3600:,.1f}",
        f"{STATE * cost.parameters / 1e9:.1f}",
        f"{SHARE * cost.kept * training.batch_size / 1e9:,.0f}",
        ", ".join(f"{fid:.2f}" for fid in FIDS[config.name]),
    )


def command(config: Config) -> str:
    count = PROCESSES.get(config.name.partition("-")[0], 1)
    launcher = "" if count == 1 else f"torchrun --nproc-per-node {count} -m "
    return f"`{launcher}scalelong train {config.name}`"


def measure(config: Config) -> Cost:
    """Counted in a pass over one image, of which no number is computed."""
    with torch.device("meta"):
        network, inputs = build_network(config), inputs_of(config)
    # A saved weight is in memory in any case, and what is saved twice is there once.
    weights = {storage(parameter) for parameter in network.parameters()}
    kept: dict[int, int] = {}

    def pack(tensor: Tensor) -> Tensor:
        if storage(tensor) not in weights:
            kept[storage(tensor)] = tensor.untyped_storage().nbytes()
        return tensor

    with FlopCounterMode(display=False) as counter:
        with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
            output: Any = network(**inputs)
        (output if isinstance(output, Tensor) else output.sample).sum().backward()
    return Cost(count_parameters(network), counter.get_total_flops(), sum(kept.values()))


def storage(tensor: Tensor) -> int:
    return tensor.untyped_storage()._cdata


def inputs_of(config: Config) -> dict[str, Tensor]:
    """One image, its time and its condition, by the names that the network has for them."""
    if isinstance(config.model, UViTConfig):
        names = ("x", "timesteps", "y", "context")
    else:
        names = ("sample", "timestep", "class_labels", "encoder_hidden_states")
    found = {names[0]: torch.zeros(1, *config.sample_shape), names[1]: torch.zeros(1)}
    if config.labels is not None:
        found[names[2]] = torch.zeros(1, dtype=torch.long)
    if config.text is not None:
        found[names[3]] = torch.zeros(1, config.text.max_length, config.text.width)
    return found


if __name__ == "__main__":
    main()
