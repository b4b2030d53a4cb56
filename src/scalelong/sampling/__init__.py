"""Images of a trained run, each from a seed of its own."""

from .sample_run import SampleRequest, sample_run

__all__ = [
    "SampleRequest",
    "sample_run",
]
