"""μP: the kind of every weight, from which its initial values and its learning rate at another width follow.

n is the width over the base width, at which nothing differs from the standard parametrization. With Adam
(arXiv 2203.03466, Table 8; for diffusion transformers arXiv 2505.15270):

| kind   | what                                         | initial std, over that at the base | rate | multiplier |
| ------ | -------------------------------------------- | ---------------------------------- | ---- | ---------- |
| input  | reads what does not grow: patches, labels    | 1                                  | 1    | 1          |
| hidden | reads and writes features                    | 1/√n                               | 1/n  | 1          |
| output | reads features, writes pixels                | 1                                  | 1    | 1/n        |
| vector | biases, norms, and what has one size always  | 1                                  | 1    | 1          |

Heads keep their size and grow in number, as those of U-ViT-S, -M and -L do: logits are q·k/√d_head as usual.
"""

from __future__ import annotations

import math
import re
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor, nn

Kind = Literal["input", "hidden", "output", "vector"]

RATIO = "width_ratio"
"""The attribute of a network in μP that holds n."""


@dataclass(frozen=True)
class Family:
    """The weights of a network that are neither hidden, as all other matrices, nor of one dimension."""

    inputs: str
    output: str
    """The module that writes the network's output; what follows it has one size always."""
    fixed: str = "(?!)"
    token_gates: bool = False
    """Whether the gates of learned scaling weigh tokens, whose number is one always, and not features."""
    drawn_alike: bool = False
    """Whether all matrices are drawn with the std of the base width; else each by the features that it reads."""


FAMILIES = {
    "UViT": Family(
        r"patch_embed\.proj\.weight|label_emb\.weight|context_embed\.weight|pos_embed",
        "decoder_pred",
        r"final_layer\.weight",
        token_gates=True,
        drawn_alike=True,
    ),
    "UNet2DModel": Family(r"conv_in\.weight|class_embedding\.weight", "conv_out"),
}


def family_of(network: nn.Module) -> Family:
    """Also of a network that FSDP shards, which is of a class that it makes of the network's own."""
    return next(FAMILIES[kind.__name__] for kind in type(network).__mro__ if kind.__name__ in FAMILIES)


def kinds_of(network: nn.Module) -> dict[str, Kind]:
    """The kind of every parameter, by name.

    >>> from scalelong.models import UViT
    >>> kinds = kinds_of(UViT(8, 4, embed_dim=16, depth=2, num_heads=2))
    >>> kinds["out_blocks.0.skip_linear.weight"], kinds["decoder_pred.weight"], kinds["norm.bias"]
    ('hidden', 'output', 'vector')
    """
    family, scaling = family_of(network), getattr(network, "skip_scaling", None)
    fixed = family.fixed
    if family.token_gates and getattr(scaling, "gate", None) != "channels":
        fixed = rf"{fixed}|skip_scaling\..*"
    rows: list[tuple[str, Kind]] = [
        (fixed, "vector"),
        (family.inputs, "input"),
        (rf"{family.output}\.weight", "output"),
    ]
    return {name: kind_of(name, parameter, rows) for name, parameter in network.named_parameters()}


def kind_of(name: str, parameter: Tensor, rows: list[tuple[str, Kind]]) -> Kind:
    named: list[Kind] = [kind for pattern, kind in rows if re.fullmatch(pattern, name)]
    return named[0] if named else "hidden" if parameter.ndim > 1 else "vector"


class Multiplier:
    """A forward pre-hook that multiplies what a module reads. An object, so that a copy of the network has it too."""

    def __init__(self, factor: float) -> None:
        self.factor = factor

    def __call__(self, module: nn.Module, inputs: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        return (inputs[0] * self.factor, *inputs[1:])


@torch.no_grad()
def parametrize(network: nn.Module, ratio: float) -> None:
    """Make of a network with standard initial values one in μP, in place. Once, before its skips are scaled."""
    if ratio == 1:
        return
    family, kinds = family_of(network), kinds_of(network)
    for name, parameter in network.named_parameters():
        if family.drawn_alike:
            if kinds[name] == "hidden":
                parameter.div_(math.sqrt(ratio))
        elif grew_smaller(name, kinds):
            parameter.mul_(math.sqrt(ratio))
    network.get_submodule(family.output).register_forward_pre_hook(Multiplier(1 / ratio))
    setattr(network, RATIO, ratio)


def grew_smaller(name: str, kinds: dict[str, Kind]) -> bool:
    """Whether torch draws this parameter by the number of features that are read, and μP does not."""
    weight = kinds.get(f"{name.removesuffix('.bias')}.weight")
    return kinds[name] == "output" or (name.endswith(".bias") and weight in ("hidden", "output"))


@torch.no_grad()
def fold_multiplier(network: nn.Module) -> None:
    """Put the multiplier of the output into its weight: any code that knows the network then computes the same."""
    ratio = getattr(network, RATIO, None)
    if ratio is None:
        return
    output: Any = network.get_submodule(family_of(network).output)
    hooks = output._forward_pre_hooks
    for key in [key for key, hook in hooks.items() if isinstance(hook, Multiplier)]:
        output.weight.mul_(hooks.pop(key).factor)
    delattr(network, RATIO)


def parameter_groups(network: nn.Module, weight_decay: float) -> list[dict[str, Any]]:
    """The groups of an Adam: hidden weights learn at 1/n of the rate (`lr_factor`).

    Their decay is n times the others': AdamW multiplies it by the rate, and what decays per step is to be the same.
    """
    kinds, groups = kinds_of(network), dict[float, list[Tensor]]()
    for name, parameter in network.named_parameters():
        if parameter.requires_grad:
            factor = 1 / getattr(network, RATIO) if kinds[name] == "hidden" else 1.0
            groups.setdefault(factor, []).append(parameter)
    return [
        {"params": parameters, "lr_factor": factor, "weight_decay": weight_decay / factor}
        for factor, parameters in groups.items()
    ]
