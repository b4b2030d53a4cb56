"""A feature network so small that laws about evaluations take milliseconds, and features with known statistics."""

from __future__ import annotations

import warnings
from pathlib import Path

import torch
from torch import Tensor, nn

from scalelong.config import load_recipe
from scalelong.evaluation import FeatureNetwork, Reference
from scalelong.evaluation.features import Resize
from scalelong.evaluation.inception import FIDInception
from scalelong.evaluation.metrics import statistics_of
from scalelong.training import train


def tiny_network(name: str = "tiny", width: int = 16, seed: int = 0) -> FeatureNetwork:
    """Random convolution, ReLU, mean and spread of each channel: knows nothing, but sees colour, noise and blur."""
    kernel = torch.randn(width // 2, 3, 3, 3, generator=torch.Generator().manual_seed(seed))
    resize = Resize(16, mean=(0.5,) * 3)

    def forward(images: Tensor) -> Tensor:
        x = torch.conv2d(resize(images), kernel).relu()
        return torch.cat([x.mean((2, 3)), x.std((2, 3))], 1)

    return FeatureNetwork(name, f"weights-{seed}", str(resize), "FD-tiny", forward)


def smooth_images(count: int, seed: int) -> Tensor:
    """Random images with edges: coarse random colours, enlarged. Shape: (count, 3, 16, 16), uint8."""
    coarse = torch.rand(count, 3, 4, 4, generator=torch.Generator().manual_seed(seed))
    return (coarse.repeat_interleave(4, 2).repeat_interleave(4, 3) * 255).round().byte()


def gaussians(count: int, width: int, seed: int, *, mean: float = 0.0, stretch: float = 0.0) -> Tensor:
    """Features with mean `mean` and covariance AᵀA, A = 1 + stretch·random. Shape: (count, width), float64."""
    generator = torch.Generator().manual_seed(seed)
    # The matrix does not depend on the seed: sets with equal options are drawn from the same distribution.
    fixed = torch.randn(width, width, generator=torch.Generator().manual_seed(99), dtype=torch.float64)
    mixing = torch.eye(width, dtype=torch.float64) + stretch * fixed / width**0.5
    return torch.randn(count, width, generator=generator, dtype=torch.float64) @ mixing + mean


def reference_of(features: Tensor, network: FeatureNetwork) -> Reference:
    facts = {"network": network.name, "weights": network.weights, "resize": network.resize, "data": "synthetic"}
    return Reference(statistics_of(features), {**facts}, features.float())


def inception_file(path: Path) -> Path:
    """Random weights under the names of pytorch-fid's file, the classifier's included."""
    torch.manual_seed(0)
    classifier = {"fc.weight": torch.randn(1008, 2048) / 8, "fc.bias": torch.randn(1008)}
    torch.save({**FIDInception().state_dict(), **classifier}, path)
    return path


class ScriptedFeatures(nn.Module):
    """The same kind of network, as a TorchScript file that another process can load."""

    def __init__(self, seed: int) -> None:
        super().__init__()
        kernel = torch.randn(4, 3, 3, 3, generator=torch.Generator().manual_seed(seed))
        self.kernel = nn.Parameter(kernel, requires_grad=False)

    def forward(self, x: Tensor) -> Tensor:
        y = torch.conv2d(x, self.kernel).relu()
        return torch.cat([y.mean((2, 3)), y.std((2, 3))], 1)


def script_file(path: Path, seed: int = 0) -> Path:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)
        torch.jit.save(torch.jit.script(ScriptedFeatures(seed)), str(path))
    return path


TINY = (
    *("model.embed_dim=16", "model.depth=2", "model.num_heads=2", "data.validation_count=1500"),
    *("training.batch_size=8", "training.steps=3", "training.validate_every=null", "training.sample_every=null"),
    *("sampling.sampler=ddim", "sampling.steps=2"),
)


def tiny_run(out: Path, *overrides: str) -> Path:
    return train(load_recipe("digits", [*TINY, *overrides]), out).folder
