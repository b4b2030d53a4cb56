"""Does the distance measure what it should? On real images: halves of the training set, the test set, noise and blur.

The figures of two halves are the noise floor; growing damage must raise them. The bias is what the distance of two
sets of the same kind is above 0, which depends on how many images there are.

Examples:
  python benchmarks/metrics.py path/to/cifar10 --images 500
  python benchmarks/metrics.py path/to/cifar10 --images 2000 --network inception --json metrics.json
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Iterator
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor

from scalelong.data import DataConfig, load_images
from scalelong.evaluation import FeatureNetwork, Figure, Reference, load_features
from scalelong.evaluation.evaluate import figures_of
from scalelong.evaluation.metrics import statistics_of

NOISE = (2, 4, 8, 16, 32)
"""Standard deviations, in grey levels."""
BLUR = (0.5, 1.0, 2.0)
"""Standard deviations, in pixels."""


def main() -> None:
    options = parse()
    network, count = load_features(options.network), options.images
    first, second, test = load_sets(options.data, count)
    begin = time.perf_counter()
    reference = describe(network(first), network)
    halves = network(second)
    rate = (len(first) + len(second)) / (time.perf_counter() - begin)
    print(f"{network.distance}, {len(first)} reference images, {rate:.1f} images/s", flush=True)
    rows: dict[str, dict[str, Figure]] = {}
    for name, features in cases(second[:count], test[:count], halves, network):
        rows[name] = figures_of(features, reference, network)
        print(f"{name:>16}  " + "  ".join(f"{key} {value}" for key, value in rows[name].items()), flush=True)
    if options.json:
        content = {name: {key: vars(value) for key, value in row.items()} for name, row in rows.items()}
        options.json.write_text(json.dumps({"rate": rate, "figures": content}, indent=1) + "\n", encoding="utf-8")


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("data", help="a folder with the splits train and test, 32×32 pixels")
    parser.add_argument("--images", type=int, default=500, help="in each set; the two halves have twice as many")
    parser.add_argument("--network", default="efficientnet-lite0")
    parser.add_argument("--json", type=Path, help="write the figures to this file as well")
    return parser.parse_args()


def load_sets(source: str, count: int) -> tuple[Tensor, Tensor, Tensor]:
    """Two disjoint sets of training images, twice as many, and test images, all spread over their split."""
    config = DataConfig(
        source=source, image_size=32, image_column="img", validation_split="test", validation_count=count
    )
    data = load_images(config)
    step = len(data.train) // (4 * count)
    return (
        data.train.images[::step][: 4 * count : 2],
        data.train.images[::step][1 : 4 * count : 2],
        data.validation.images,
    )


def describe(features: Tensor, network: FeatureNetwork) -> Reference:
    return Reference(statistics_of(features), {"network": network.name}, features)


def cases(second: Tensor, test: Tensor, halves: Tensor, network: FeatureNetwork) -> Iterator[tuple[str, Tensor]]:
    count = len(second)
    for size in (count // 4, count // 2, count, len(halves)):
        yield f"half, {size}", halves[:size]
    yield "test", network(test)
    for level in NOISE:
        yield f"noise {level}", network(add_noise(second, level))
    for sigma in BLUR:
        yield f"blur {sigma}", network(blur(second, sigma))


def add_noise(images: Tensor, level: float) -> Tensor:
    noise = torch.randn(images.shape, generator=torch.Generator().manual_seed(0))
    return (images + level * noise).round().clamp(0, 255).byte()


def blur(images: Tensor, sigma: float) -> Tensor:
    """Gaussian blur; the border is mirrored. Shape: (B, C, H, W), uint8."""
    radius = max(1, round(3 * sigma))
    offsets = torch.arange(-radius, radius + 1.0)
    weights = torch.exp(-(offsets**2) / (2 * sigma**2))
    weights = (weights / weights.sum()).expand(images.shape[1], 1, 1, -1)
    x = F.pad(images.float(), (radius,) * 4, mode="reflect")
    for kernel in (weights, weights.transpose(2, 3)):
        x = F.conv2d(x, kernel, groups=images.shape[1])
    return x.round().clamp(0, 255).byte()


if __name__ == "__main__":
    main()
