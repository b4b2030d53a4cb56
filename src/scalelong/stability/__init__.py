"""The stability lab: the paper's theory as functions and in numbers, the choice of κ, and a monitor for any loop."""

from .callbacks import AccelerateMonitor, LightningMonitor
from .diagnosis import Diagnosis
from .gain import BlockGain, measure_gain
from .inputs import InputNorms, measure_inputs
from .kappa import KappaAdvice, KappaBand, kappa_band, suggest_kappa
from .monitor import SkipMonitor
from .oscillation import oscillation_index

__all__ = [
    "AccelerateMonitor",
    "BlockGain",
    "Diagnosis",
    "InputNorms",
    "KappaAdvice",
    "KappaBand",
    "LightningMonitor",
    "SkipMonitor",
    "kappa_band",
    "measure_gain",
    "measure_inputs",
    "oscillation_index",
    "suggest_kappa",
]
