"""Layers that train faster on a CPU than torch's own; names, parameters and results (to rounding) are theirs."""

from .layers import take_cpu_layers

__all__ = ["take_cpu_layers"]
