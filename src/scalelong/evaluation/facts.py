"""What figures depend on, known before an image is drawn; only those with equal facts may be compared."""

from __future__ import annotations

import hashlib

from ..config.schema import Config
from .feature_network import INCEPTION, FeatureNetwork
from .results import NotComparable
from .statistics import Facts, Reference


def network_facts(network: FeatureNetwork) -> Facts:
    return {"network": network.name, "weights": network.weights, "resize": network.resize}


def result_facts(
    config: Config,
    network: FeatureNetwork,
    reference: Reference,
    images: int,
    *,
    compiled: bool = False,
    precision: str = "fp32",
) -> Facts:
    """All that must be equal for two results to be compared."""
    return {
        **network_facts(network),
        "images": images,
        "sampler": describe_sampler(config, compiled=compiled),
        "precision": precision,
        # Images of the same caption are less varied than those of as many different ones.
        "captions": None if config.text is None else min(images, config.data.validation_count),
        "reference": content_of(reference),
        "reference_images": reference.statistics.count,
    }


def describe_sampler(config: Config, *, compiled: bool = False) -> str:
    """
    >>> from scalelong.config import load_recipe
    >>> describe_sampler(load_recipe("digits"))
    'ddpm, 200 steps'
    """
    sampling = config.sampling
    guidance = f", guidance {sampling.guidance:g}" if config.conditional else ""
    steps = min(sampling.steps, config.diffusion.steps)
    return f"{sampling.sampler}, {steps} steps{guidance}{', compiled' if compiled else ''}"


def content_of(reference: Reference) -> str:
    """The hash of the reference's images; of its mean, where the file does not say."""
    said = reference.facts.get("data")
    mean = reference.statistics.mean.numpy().tobytes()
    return hashlib.sha256(mean).hexdigest()[:16] if said is None else str(said)


def check_reference(reference: Reference, network: FeatureNetwork) -> None:
    """Raise unless a reference was made with the same network, weights and resize."""
    if not reference.facts:
        check_unsaid(network)
    wanted = network_facts(network)
    for key in reference.facts.keys() & wanted.keys():
        if reference.facts[key] != wanted[key]:
            raise NotComparable(
                f"the reference's {key} is {reference.facts[key]!r}, and the evaluation's is {wanted[key]!r}: "
                "make statistics with the same network (scalelong stats --network)"
            )


def check_unsaid(network: FeatureNetwork) -> None:
    """Raise unless a network may be that of a file that does not say it: pytorch-fid knows one network and weights."""
    if network.distance != "FID":
        raise NotComparable(
            "the reference does not say what it was made with, so it is taken for pytorch-fid's, whose network is "
            f"{INCEPTION!r} with the released weights, and the evaluation's is {network.name!r} with the weights "
            f"{network.weights}: make statistics with the same network (scalelong stats --network)"
        )
