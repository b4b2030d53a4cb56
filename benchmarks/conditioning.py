"""Does a trained network heed its condition? Two checks, each with its uncertainty.

Classes: a small classifier, trained here on the run's own training images, judges drawn images of every class at
several strengths of guidance. Captions: the validation loss with each image's own caption against that with another
image's, pair by pair, with the same noise and times.

Examples:
  python benchmarks/conditioning.py runs/cifar10-tiny-class-cs --images 500 --guidance 0 1 2 3
  python benchmarks/conditioning.py runs/flickr-tiny-cs --shuffles 4
"""

from __future__ import annotations

import argparse
import json
import math
import time
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from scalelong.config import Config
from scalelong.config.build import build_process, conditioning_of, open_inputs, spread_labels
from scalelong.data import ImageSet, load_images
from scalelong.runs import Run
from scalelong.runs.model import load_network
from scalelong.sampling.sample_run import sample_network, with_sampling
from scalelong.training.loss import Validation


def main() -> None:
    options = parse()
    run = Run(options.run)
    config, checkpoint = run.config(), run.checkpoints().latest()
    if checkpoint is None:
        raise SystemExit(f"{options.run} has no checkpoint yet")
    torch.manual_seed(0)
    network = load_network(config, checkpoint, "ema")
    judge = judge_classes if config.labels is not None else judge_captions
    result = {"run": config.name, "step": checkpoint.step, **judge(network, config, options)}
    if options.json:
        options.json.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("run", type=Path, help="the folder of a run with labels or captions")
    parser.add_argument("--images", type=int, default=500, help="images drawn for each strength of guidance")
    parser.add_argument("--guidance", type=float, nargs="+", default=[0.0, 1.0, 2.0, 3.0])
    parser.add_argument("--sampler", default="dpm-solver++")
    parser.add_argument("--steps", type=int, default=25, help="steps of the sampler")
    parser.add_argument("--epochs", type=int, default=6, help="epochs of the classifier")
    parser.add_argument("--shuffles", type=int, default=4, help="how many other captions each image is tried with")
    parser.add_argument("--json", type=Path, help="write the figures to this file as well")
    return parser.parse_args()


def judge_classes(network: nn.Module, config: Config, options: argparse.Namespace) -> dict[str, object]:
    assert config.labels is not None
    data = load_images(config.data, classes=config.labels.classes)
    classifier = train_classifier(data.train, config.labels.classes, options.epochs)
    real = accuracy(classifier, data.validation.images, required(data.validation))
    print(f"classifier on {len(data.validation)} real validation images: {share(real, len(data.validation))}")
    condition = spread_labels(config, options.images)
    found = {}
    for guidance in options.guidance:
        guided = with_sampling(config, guidance=guidance, sampler=options.sampler, steps=options.steps)
        images = sample_network(network, guided, conditioning_of(config), condition, count=options.images)
        assert condition.labels is not None
        found[guidance] = accuracy(classifier, images, condition.labels)
        print(f"guidance {guidance:g}: {share(found[guidance], options.images)} as asked", flush=True)
    return {
        "real": real,
        "as_asked": found,
        "images": options.images,
        "sampler": options.sampler,
        "sampler_steps": options.steps,
    }


def share(value: float, count: int) -> str:
    """A proportion with its 95 % interval (normal approximation)."""
    return f"{value:.1%} ± {1.96 * math.sqrt(value * (1 - value) / count):.1%}"


def required(data: ImageSet) -> Tensor:
    assert data.labels is not None
    return data.labels


def train_classifier(data: ImageSet, classes: int, epochs: int) -> nn.Module:
    """Three convolutions with batch norms; enough to tell objects apart in small pictures."""
    layers: list[nn.Module] = []
    width = data.images.shape[1]
    for channels in (32, 64, 128):
        layers += [nn.Conv2d(width, channels, 3, padding=1, bias=False), nn.BatchNorm2d(channels), nn.ReLU()]
        layers += [nn.MaxPool2d(2)]
        width = channels
    network = nn.Sequential(*layers, nn.AdaptiveAvgPool2d(2), nn.Flatten(), nn.Dropout(0.2), nn.Linear(512, classes))
    steps = math.ceil(len(data) / 128) * epochs
    optimizer = torch.optim.AdamW(network.parameters(), lr=3e-3, weight_decay=0.05)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, 3e-3, total_steps=steps)
    start = time.perf_counter()
    for _ in range(epochs):
        for rows in torch.randperm(len(data)).split(128):
            images = normal(data.images[rows])
            images = torch.where(torch.rand(len(rows), 1, 1, 1) < 0.5, images.flip(-1), images)
            loss = F.cross_entropy(network(images), required(data)[rows])
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            schedule.step()
    print(f"classifier trained in {time.perf_counter() - start:.0f} s", flush=True)
    return network.eval()


def normal(images: Tensor) -> Tensor:
    return images.float() / 127.5 - 1


@torch.no_grad()
def accuracy(classifier: nn.Module, images: Tensor, labels: Tensor) -> float:
    found = torch.cat([classifier(normal(part)).argmax(1) for part in images.split(250)])
    return (found == labels).double().mean().item()


def judge_captions(network: nn.Module, config: Config, options: argparse.Namespace) -> dict[str, object]:
    """The mean difference of the loss, other caption minus own, over images, with its standard error."""
    inputs = open_inputs(config)
    conditioning = conditioning_of(config, inputs.empty_text)
    validation = Validation(
        inputs.validation, build_process(config.diffusion), conditioning, seed=config.seed, batch_size=64
    )
    rows = torch.arange(len(inputs.validation))
    own = validation.losses(network, rows)
    # Every other caption belongs to another image, never to the same.
    others = [rows.roll(1 + shift * 37) for shift in range(options.shuffles)]
    other = torch.stack([validation.losses(network, rows, told) for told in others]).mean(0)
    difference = other - own
    mean, error = difference.mean().item(), (difference.std() / math.sqrt(len(rows))).item()
    t = mean / error
    p = math.erfc(abs(t) / math.sqrt(2))
    print(f"validation loss of {len(rows)} images: own caption {own.mean():.5f}, another's {other.mean():.5f}")
    print(f"difference {mean:.5f} ± {1.96 * error:.5f} (95 %), t = {t:.2f}, two-sided p = {p:.2g}")
    return {"own": own.mean().item(), "other": other.mean().item(), "difference": mean, "error": error, "p": p}


if __name__ == "__main__":
    main()
