"""Which κ to take: from the data, the schedule and the network."""

from .advisor import KappaAdvice, KappaBand, kappa_band, suggest_kappa
from .block_gain import BlockGain, measure_gain

__all__ = ["BlockGain", "KappaAdvice", "KappaBand", "kappa_band", "measure_gain", "suggest_kappa"]
