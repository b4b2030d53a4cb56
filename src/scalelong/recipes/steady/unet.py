"""The blocks of diffusers' UNets, which train and draw in fewer passes over their images."""

from __future__ import annotations

from typing import Any

from diffusers.models.attention_processor import Attention
from diffusers.models.resnet import ResnetBlock2D
from torch import Tensor

from .layers import Draws, SteadyConv2d, has_hooks, must_be_steady


class SteadyResnet(Draws, ResnetBlock2D):
    """A block that does not divide by one, and that draws without copies: then it adds in place."""

    def forward(self, input_tensor: Tensor, temb: Tensor | None, *args: Any, **kwargs: Any) -> Tensor:
        if args or kwargs or temb is None or not self._is_plain:
            return super().forward(input_tensor, temb, *args, **kwargs)  # pyright: ignore[reportArgumentType]
        activate, shortcut = self.nonlinearity, self.conv_shortcut
        project: Any = self.time_emb_proj
        last: Any = self.conv2
        times = project(temb if self.skip_time_act else activate(temb))[:, :, None, None]
        hidden = self.conv1(activate(self.norm1(input_tensor)))
        if self.draws and must_be_steady(input_tensor):
            hidden = activate(self.norm2(hidden.add_(times)))
            return last.onto(input_tensor, hidden) if shortcut is None else last.into(shortcut(input_tensor), hidden)
        hidden = last(self.dropout(activate(self.norm2(hidden + times))))
        return (input_tensor if shortcut is None else shortcut(input_tensor)) + hidden

    @property
    def _is_plain(self) -> bool:
        """Whether it keeps the size, adds the times, and has the output of diffusers' UNets."""
        adds_times = self.time_embedding_norm == "default" and self.time_emb_proj is not None
        return adds_times and self.output_scale_factor == 1 and self.upsample is None and self.downsample is None

    def begin_drawing(self) -> None:
        convolutions = [each for each in (self.conv1, self.conv2, self.conv_shortcut) if each is not None]
        known = all(isinstance(each, SteadyConv2d) and each.draws and not has_hooks(each) for each in convolutions)
        drops = has_hooks(self.dropout) or (self.dropout.training and self.dropout.p > 0)
        self.draws = known and self._is_plain and not drops


class SteadyImageAttention(Attention):
    """Attention that returns whole planes for whole planes: its tokens become pixels with their channels last.

    What comes next would go on so, in a layout that is no longer that of its weights.
    """

    def forward(self, hidden_states: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        output = super().forward(hidden_states, *args, **kwargs)
        return output.contiguous() if hidden_states.ndim == 4 and hidden_states.is_contiguous() else output
