"""Self-conditioning: what the middle of the network knows of the whole image guides every block of its decoder.

The features of the middle block are averaged over the image and go through a small MLP. In a U-ViT the result is added
to the tokens that each decoder block gets, in a UNet of diffusers to the time embedding of its up blocks. The last
layer of the MLP starts at zero, and then the network computes to the bit what it did before (DDAE++, arXiv 2505.10999).
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple, TypeVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from .apply import follow_model, refuse_wrapped
from .hooks import NetworkHook, detach_hooks, in_data_parallel
from .site import Arguments, as_argument, forward_parameters

Model = TypeVar("Model", bound=nn.Module)
NAME = "self_conditioning"


class SelfConditioning(nn.Module):
    """LayerNorm, linear, SiLU, linear of the averaged features. Shape: (B, L, D) or (B, D, H, W) → (B, guide)."""

    def __init__(self, width: int, guide: int) -> None:
        super().__init__()
        # The features are a residual stream: without a norm what guides the decoder would grow as they do.
        self.norm = nn.LayerNorm(width)
        self.hidden = nn.Linear(width, width)
        self.last = nn.Linear(width, guide)
        nn.init.zeros_(self.last.weight)
        nn.init.zeros_(self.last.bias)

    def forward(self, features: Tensor) -> Tensor:
        pooled = features.mean(dim=1) if features.ndim == 3 else features.flatten(2).mean(dim=2)
        return self.last(F.silu(self.hidden(self.norm(pooled))))


class Passed:
    """What the middle block hands to the decoder within one forward pass; a copy of the network starts without it."""

    def __init__(self) -> None:
        self.guide: Tensor | None = None

    def __reduce__(self) -> tuple[Any, ...]:
        return Passed, ()


class GuideHook(NetworkHook):
    """A hook of self-conditioning; `is_last` is that of the last place that the guide goes to."""

    def __init__(self, network: nn.Module, module: nn.Module, passed: Passed, is_last: bool = False) -> None:
        super().__init__(network, NAME, module)
        self.passed, self.is_last = passed, is_last

    def attach(self, module: nn.Module) -> None:
        self.handle = module.register_forward_hook(self)

    def __call__(self, module: nn.Module, args: Arguments, output: Any) -> Any:
        """On the middle block: makes the guide."""
        if getattr(module, "_is_replica", False):
            raise in_data_parallel(type(module).__name__)
        self.passed.guide = self.held(output)

    def take(self, module: nn.Module, features: Tensor) -> Tensor:
        """The guide, as these features are kept; the last that takes it leaves nothing behind."""
        guide = self.passed.guide
        if guide is None:
            raise RuntimeError(
                f"{type(module).__name__} was called without the middle block before it, whose features guide it: "
                "recompute activations inside of the blocks, as enable_gradient_checkpointing does, not of whole ones"
            )
        if self.is_last:
            self.passed.guide = None
        return guide.to(features)


class TokensHook(GuideHook):
    """Forward hook on all blocks from the middle one to the last but one: adds the guide to the tokens they hand on.

    After a block and not before the next one: where the next is recomputed for its gradients, no guide is needed again.
    """

    def __init__(self, network: nn.Module, module: nn.Module, passed: Passed, is_first: bool, is_last: bool) -> None:
        super().__init__(network, module, passed, is_last)
        self.is_first = is_first

    def __call__(self, module: nn.Module, args: Arguments, output: Any) -> Tensor:
        if self.is_first:
            super().__call__(module, args, output)
        elif self.passed.guide is None:  # The block is recomputed, or called by itself.
            return output
        return output + self.take(module, output).unsqueeze(1)


class TimeHook(GuideHook):
    """Forward pre-hook on an up block: adds the guide to its time embedding."""

    def __init__(self, network: nn.Module, module: nn.Module, passed: Passed, is_last: bool, block: nn.Module) -> None:
        super().__init__(network, module, passed, is_last)
        self.argument = as_argument(block, "temb")

    def attach(self, module: nn.Module) -> None:
        self.handle = module.register_forward_pre_hook(self, with_kwargs=True)

    def __call__(self, module: nn.Module, args: Arguments, output: Any) -> Any:
        """Before the block, where torch gives its keyword arguments in the place of an output."""
        return self.argument.changed(args, output, lambda time: time + self.take(module, time))


class Bottleneck(NamedTuple):
    """A network whose middle block can guide its decoder: the widths of the block's features and of the guide."""

    network: nn.Module
    middle: nn.Module
    decoder: list[nn.Module]
    width: int
    guide: int
    has_tokens: bool


def condition_on_self(model: Model) -> Model:
    """Let the features of the middle block guide the decoder; the same function at the start. In place, and returned.

    For U-ViTs (also the public one) and diffusers' UNets, plain or with scaled skips, also inside a wrapper. Copies,
    state dicts and pickles take it along; conditioning again begins anew.

    >>> from scalelong.models import UViT
    >>> model = condition_on_self(UViT(img_size=8, embed_dim=32, depth=4, num_heads=2))
    >>> model.self_conditioning.last.weight.abs().max().item()
    0.0
    """
    refuse_wrapped(model)
    found = find_bottleneck(model)
    network = found.network
    if hasattr(network, NAME) and network not in conditioned_networks(network):
        raise ValueError(f"{type(network).__name__} already has an attribute {NAME!r} of its own, which this needs.")
    uncondition_on_self(model)
    with torch.inference_mode(False):
        module = SelfConditioning(found.width, found.guide)
    follow_model(module, found.middle)
    network.add_module(NAME, module.train(network.training))
    for place, hook in plan_hooks(found, module):
        hook.attach(place)
    return model


def uncondition_on_self(model: Model) -> Model:
    """Remove what `condition_on_self` added; does nothing on a network without it."""
    for network in conditioned_networks(model):
        detach_hooks(network, GuideHook)
        delattr(network, NAME)
    return model


def conditioned_networks(model: nn.Module) -> list[nn.Module]:
    """The modules at or below `model` that are conditioned on themselves."""
    held = ((network, network._modules.get(NAME)) for network in model.modules())
    # Adapters and sharding put another module there, which holds it.
    found = ((network, {type(part) for part in module.modules()}) for network, module in held if module is not None)
    return [network for network, kinds in found if any(issubclass(kind, SelfConditioning) for kind in kinds)]


def plan_hooks(found: Bottleneck, module: nn.Module) -> Iterator[tuple[nn.Module, GuideHook]]:
    """The modules to hook, and their hooks; nothing is attached yet."""
    network, middle, passed, last = found.network, found.middle, Passed(), len(found.decoder) - 1
    if not found.has_tokens:
        yield middle, GuideHook(network, module, passed)
    for number, block in enumerate(found.decoder):
        if found.has_tokens:
            place = found.decoder[number - 1] if number else middle
            yield place, TokensHook(network, module, passed, number == 0, number == last)
        else:
            yield block, TimeHook(network, module, passed, number == last, block)


def find_bottleneck(model: nn.Module) -> Bottleneck:
    """That of a U-ViT or of a UNet of diffusers at or below `model`, known by its structure."""
    for module in model.modules():
        middle, time = getattr(module, "mid_block", None), getattr(module, "time_embedding", None)
        if not isinstance(middle, nn.Module):
            continue
        if blocks := children_of(module, "in_blocks") and children_of(module, "out_blocks"):
            width = module.get_parameter("pos_embed").shape[-1]
            return Bottleneck(module, middle, blocks, width, width, has_tokens=True)
        blocks = children_of(module, "up_blocks")
        if isinstance(time, nn.Module) and blocks and all("temb" in forward_parameters(block) for block in blocks):
            last: Any = children_of(middle, "resnets")[-1]
            guide = len(time.get_parameter("linear_2.weight"))
            return Bottleneck(module, middle, blocks, last.out_channels, guide, has_tokens=False)
    raise ValueError(
        f"{type(model).__name__} has no bottleneck that is known: self-conditioning is for U-ViTs, and for UNets of "
        "diffusers with a middle block and up blocks that take the time"
    )


def children_of(module: nn.Module, name: str) -> list[nn.Module]:
    held = module._modules.get(name)
    return list(held) if isinstance(held, nn.ModuleList) else []
