"""Which κ to take: from the data, the schedule and the network."""

from .advisor import KappaAdvice, KappaBand, kappa_band, suggest_kappa
from .block_gain import BlockGain, measure_gain
from .input_norms import InputNorms, measure_inputs

__all__ = [
    "BlockGain",
    "InputNorms",
    "KappaAdvice",
    "KappaBand",
    "kappa_band",
    "measure_gain",
    "measure_inputs",
    "suggest_kappa",
]
