"""The residual blocks of diffusers' UNets, which draw images in fewer passes over them."""

from __future__ import annotations

from typing import Any

from diffusers.models.resnet import ResnetBlock2D
from torch import Tensor

from .layers import Draws, SteadyConv2d, has_hooks, must_be_steady


class SteadyResnet(Draws, ResnetBlock2D):
    """A block that draws without copies: it adds in place, and divides by nothing that is one."""

    def forward(self, input_tensor: Tensor, temb: Tensor | None, *args: Any, **kwargs: Any) -> Tensor:
        if not self.draws or not must_be_steady(input_tensor):
            return super().forward(input_tensor, temb, *args, **kwargs)  # pyright: ignore[reportArgumentType]
        activate, shortcut = self.nonlinearity, self.conv_shortcut
        project: Any = self.time_emb_proj
        last: Any = self.conv2
        hidden = self.conv1(activate(self.norm1(input_tensor)))
        hidden += project(temb if self.skip_time_act else activate(temb))[:, :, None, None]
        hidden = activate(self.norm2(hidden))
        if shortcut is None:
            return last.onto(input_tensor, hidden)
        return last.into(shortcut(input_tensor), hidden)

    def begin_drawing(self) -> None:
        convolutions = [each for each in (self.conv1, self.conv2, self.conv_shortcut) if each is not None]
        known = all(isinstance(each, SteadyConv2d) and each.draws and not has_hooks(each) for each in convolutions)
        is_level = self.upsample is None and self.downsample is None
        adds_times = self.time_embedding_norm == "default" and self.time_emb_proj is not None
        drops = has_hooks(self.dropout) or (self.dropout.training and self.dropout.p > 0)
        self.draws = known and is_level and adds_times and self.output_scale_factor == 1 and not drops
