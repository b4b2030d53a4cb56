"""Linear probes: how well the class of an image can be told from a denoising network's features, block by block.

Images are noised to a few times, the output of each block is averaged over the image, and a linear classifier (ridge
regression on the classes) is fitted to it. Block, time and strength of the penalty are chosen on a part of the training
images that the classifiers were not fitted to; the choice is then confirmed, once, on images held out from training.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import cached_property, partial
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ..config.build import build_process, conditioning_of, open_inputs
from ..config.schema import Config
from ..config.sections import Weights
from ..data import DataError, Examples
from ..data.batches import Batch, Picked, make_batch
from ..data.decode import spread
from ..data.sources import images_fingerprint, short_hash
from ..diffusion import DiffusionProcess
from ..diffusion.guidance import Conditioning
from ..runs.model import choose_checkpoint, load_network, weights_digest
from ..runs.run_dir import Run
from ..utils.block_folder import Fingerprint, block_ranges
from ..utils.runtime import SINGLE, blocks_of, keyed_generator, own_device, tensors_in
from .features import BATCH, BLOCK, ShareDone, fill_features, stored_features
from .reference import Report, quiet

TIMES = (0.01, 0.03, 0.1, 0.2, 0.3, 0.5, 0.7)
FOLDER, FILE = "probe", "probe.json"
# Of the penalty, relative to the variance of the standardised features.
STRENGTHS = (1e-4, 1e-3, 1e-2, 1e-1, 1.0)
CHOOSING_PART = 0.2
NO_LABELS = "there are no labels to probe for: name their column with --labels, or as data.label_column of the recipe"


@dataclass(frozen=True)
class ProbePlan:
    """What is asked of a probe."""

    images: int = 5000
    """Training images, a fifth of which chooses block, time and penalty."""
    held_out: int = 2000
    times: tuple[float, ...] = TIMES
    """Shares of the schedule: 0 = no noise, 1 = nothing but noise."""
    seed: int = 0


@dataclass(frozen=True)
class Subject:
    """A network in eval mode, how it is asked, and what stands for it where features are kept."""

    network: nn.Module
    process: DiffusionProcess
    conditioning: Conditioning
    identity: Fingerprint


@dataclass(frozen=True)
class Images:
    """Labelled images: those of training, and after them those that are held out. Shape: labels (N,)."""

    train: Examples
    held_out: Examples
    train_rows: Sequence[int]
    held_out_rows: Sequence[int]

    @classmethod
    def of(cls, train: Examples, held_out: Examples, plan: ProbePlan) -> Images:
        return cls(train, held_out, spread(len(train), plan.images), spread(len(held_out), plan.held_out))

    def __len__(self) -> int:
        return len(self.train_rows) + len(self.held_out_rows)

    def pick(self, numbers: range) -> Picked:
        """Those of some numbers, with the noise of latents by their rows."""
        first, parts = len(self.train_rows), []
        own = [self.train_rows[number] for number in numbers if number < first]
        others = [self.held_out_rows[number - first] for number in numbers if number >= first]
        for examples, rows in ((self.train, own), (self.held_out, others)):
            if rows:
                parts.append(examples.pick(torch.tensor(rows), torch.tensor(rows)))
        columns = ([getattr(part, name) for part in parts] for name in ("labels", "text"))
        labels, text = (None if column[0] is None else torch.cat(column) for column in columns)
        return Picked(torch.cat([part.images for part in parts]), labels, text)

    @cached_property
    def labels(self) -> Tensor:
        parts = [self.pick(numbers).labels for numbers in block_ranges(len(self), BLOCK).values()]
        known = [part for part in parts if part is not None]
        if not known:
            raise DataError(NO_LABELS)
        return torch.cat(known)


@dataclass(frozen=True)
class Probe:
    """The accuracy of each block (row) at each time (column) on images that choose, and the best on held-out ones."""

    blocks: list[str]
    times: list[float]
    accuracies: list[list[float]]
    block: str
    time: float
    strength: float
    correct: int
    held_out: int
    chance: float
    """The share of the most frequent class among the held-out images."""
    fingerprint: Fingerprint

    @property
    def accuracy(self) -> float:
        return self.correct / self.held_out


def probe_run(
    folder: str | Path,
    plan: ProbePlan,
    *,
    labels: str | None = None,
    weights: Weights = "ema",
    checkpoint: str | int = "last",
    allow_code: bool = False,
    progress: Report = quiet,
) -> Probe:
    """Probe a checkpoint of a run for the labels of its data, or those of another column."""
    run = Run(Path(folder))
    config = labelled(run.config(allow_code=allow_code), labels, plan)
    chosen = choose_checkpoint(run, checkpoint)
    identity = {"step": chosen.step, "model": weights_digest(chosen, weights)[:16]}
    network = load_network(config, chosen, weights)
    return probe_recipe(network, config, identity, plan, run.folder / FOLDER, progress)


def labelled(config: Config, labels: str | None, plan: ProbePlan) -> Config:
    """The recipe with the column of the labels, and as many held-out images as are asked for if there are others."""
    data = config.data
    if labels is None and data.label_column is None:
        raise DataError(NO_LABELS)
    changed: dict[str, Any] = {"label_column": labels or data.label_column}
    if data.validation_split is not None and config.text is None and config.latents is None:
        changed["validation_count"] = plan.held_out
    return config.model_copy(update={"data": data.model_copy(update=changed)})


def probe_recipe(
    network: nn.Module, config: Config, identity: Fingerprint, plan: ProbePlan, folder: Path, progress: Report = quiet
) -> Probe:
    """Probe a network on the data of a recipe, with the noise of its process and without its condition."""
    for name in ("labels", "text"):
        block = getattr(config, name)
        if block is not None and not block.drop:
            raise ValueError(
                f"the network is told the {name} of each image and never learned to do without ({name}.drop is 0): "
                "what it knows by itself cannot be told apart"
            )
    inputs = open_inputs(config, progress=partial(progress, "images read"))
    subject = Subject(network, build_process(config.diffusion), conditioning_of(config, inputs.empty_text), identity)
    diffusion, data = config.diffusion.model_dump(mode="json"), short_hash(images_fingerprint(config.data))
    content = {"diffusion": diffusion, "data": data}
    return probe(subject, Images.of(inputs.batches.data, inputs.validation, plan), plan, content, folder, progress)


def probe(
    subject: Subject, images: Images, plan: ProbePlan, data: Fingerprint, folder: Path, progress: Report = quiet
) -> Probe:
    """Fit all probes; the features of finished blocks of images are kept in a folder of `folder`."""
    labels, widths = images.labels, feature_widths(subject, images)
    asked = [plan.images, plan.held_out, plan.seed]
    content = {**subject.identity, **data, "asked": asked, "blocks": widths, "labels": digest(labels)}
    place, count, train = folder / short_hash(content), len(images), len(images.train_rows)
    order = torch.randperm(train, generator=keyed_generator(plan.seed, "probe", 0))
    choosing, fitting = order.split([round(train * CHOOSING_PART), train - round(train * CHOOSING_PART)])
    cells: dict[tuple[str, float], tuple[float, float]] = {}
    for share in plan.times:
        features = features_at(share, subject, images, place, content | {"time": share}, plan.seed, progress)
        for number, (name, part) in enumerate(features.items()):
            progress(f"blocks probed at t = {share:g}", number + 1, len(widths))
            cells[name, share] = choose_strength(part, labels, fitting, choosing)
    name, share = max(cells, key=cells.__getitem__)
    best, strength = split_columns(stored(place, share, count), widths)[name], cells[name, share][1]
    scores, held_out = ridge(best[:train], labels[:train], best[train:], (strength,))[strength], labels[train:]
    return Probe(
        list(widths),
        list(plan.times),
        [[cells[block, time][0] for time in plan.times] for block in widths],
        block=name,
        time=share,
        strength=strength,
        correct=int((scores.argmax(dim=1) == held_out).sum()),
        held_out=len(held_out),
        chance=(held_out.bincount().max() / len(held_out)).item(),
        fingerprint=content | {"images": train},
    )


def choose_strength(features: Tensor, labels: Tensor, fitting: Tensor, choosing: Tensor) -> tuple[float, float]:
    """The best accuracy of a cell on the images that choose, and the strength of the penalty that gives it."""
    found = ridge(features[fitting], labels[fitting], features[choosing])
    return max((accuracy(scores, labels[choosing]), strength) for strength, scores in found.items())


def digest(labels: Tensor) -> str:
    return short_hash({"labels": labels.tolist()})


# Features.


def features_at(
    share: float,
    subject: Subject,
    images: Images,
    place: Path,
    content: Fingerprint,
    seed: int,
    progress: Report,
) -> dict[str, Tensor]:
    """The features of all images at one time, by block; those on the disk are not computed again. Shape: (N, D)."""

    def describe(numbers: range, done: ShareDone) -> Tensor:
        picked, generator = images.pick(numbers), keyed_generator(seed, "probe noise", numbers.start)
        noise = torch.randn(picked.images.shape, generator=generator)
        batch = make_batch(0, picked, flips=None, device=torch.device(own_device()))
        parts = []
        for rows in torch.arange(len(numbers)).split(BATCH):
            parts.append(torch.cat(list(describe_batch(subject, batch, noise, share, rows).values()), dim=1))
            done((int(rows[-1]) + 1) / len(numbers))
        return torch.cat(parts)

    shown = partial(progress, f"images at t = {share:g}")
    fill_features(stored_at(place, share), content, len(images), describe, SINGLE, shown)
    return split_columns(stored(place, share, len(images)), content["blocks"])


def stored_at(place: Path, share: float) -> Path:
    return place / f"t-{share:g}"


def stored(place: Path, share: float, count: int) -> Tensor:
    return torch.cat(list(stored_features(stored_at(place, share), count)))


def split_columns(features: Tensor, widths: dict[str, int]) -> dict[str, Tensor]:
    return dict(zip(widths, features.split(list(widths.values()), dim=1), strict=True))


@torch.inference_mode()
def describe_batch(subject: Subject, batch: Batch, noise: Tensor, share: float, rows: Tensor) -> dict[str, Tensor]:
    """The averaged output of each block for some images of a batch. Shape: rows (B,) → (B, D) each."""
    process, device = subject.process, batch.images.device
    x, own = batch.images[rows.to(device)], noise[rows].to(device)
    times = torch.full((len(rows),), share, device=device)
    if not process.schedule.is_continuous:
        times = (times * (process.schedule.num_steps - 1)).round().long()
    condition = subject.conditioning.of(batch)
    condition = subject.conditioning.drop_condition(condition, torch.ones(len(batch), dtype=torch.bool, device=device))
    with outputs_of(probed_blocks(subject.network)) as found:
        noisy = process.add_noise(x, own, times.clamp_min(1e-5) if process.schedule.is_continuous else times)
        subject.conditioning.predictor(subject.network, condition[rows.to(device)])(noisy, process.model_time(times))
    return {name: features.float().cpu() for name, features in found.items()}


def probed_blocks(network: nn.Module) -> dict[str, nn.Module]:
    """The blocks of encoder, middle and decoder; of a network without lists of blocks all its parts."""
    found = blocks_of(network)
    return {name: block for name, block in found.items() if "." in name or name.startswith("mid")} or found


@contextmanager
def outputs_of(blocks: dict[str, nn.Module]) -> Iterator[dict[str, Tensor]]:
    """What each block gives, averaged over tokens or pixels, in the order of their calls. Shape: (B, D)."""
    found: dict[str, Tensor] = {}

    def keep(name: str, module: nn.Module, args: Any, output: Any) -> None:
        features = next(tensors_in(output), None)
        if features is not None and features.ndim >= 3 and features.is_floating_point():
            found[name] = features.mean(dim=1) if features.ndim == 3 else features.flatten(2).mean(dim=2)

    with ExitStack() as stack:
        for name, block in blocks.items():
            stack.enter_context(block.register_forward_hook(partial(keep, name)))
        yield found


def feature_widths(subject: Subject, images: Images) -> dict[str, int]:
    """How many features each block has, in the order of their calls: found by one image."""
    batch = make_batch(0, images.pick(range(1)), flips=None, device=torch.device(own_device()))
    try:
        found = describe_batch(subject, batch, torch.zeros(batch.images.shape), 0.5, torch.arange(1))
    except (TypeError, ValueError, AttributeError, RuntimeError) as error:
        reason = " ".join(str(error).split())[:200]
        raise ValueError(f"{type(subject.network).__name__} cannot be asked about these images ({reason})") from error
    if not found:
        raise ValueError(f"{type(subject.network).__name__} has no block whose output is tokens or a feature map")
    return {name: features.shape[1] for name, features in found.items()}


# The classifier.


def ridge(
    features: Tensor, labels: Tensor, others: Tensor, strengths: Sequence[float] = STRENGTHS
) -> dict[float, Tensor]:
    """Fit the classes by ridge regression; what each strength of the penalty gives for other features.

    W = (XᵀX/N + λ)⁻¹ XᵀY/N with X standardised and Y one-hot, centred. Shape: (N, D), (N,), (M, D) → (M, classes).
    """
    mean, spread_of = features.double().mean(dim=0), features.double().std(dim=0).clamp_min(1e-8)
    x, other = ((part.double() - mean) / spread_of for part in (features, others))
    y = F.one_hot(labels).double()
    values, vectors = torch.linalg.eigh(x.T @ x / len(x))
    projected, rotated = vectors.T @ (x.T @ (y - y.mean(dim=0)) / len(x)), other @ vectors
    values = values.clamp_min(0).unsqueeze(1)
    return {strength: rotated @ (projected / (values + strength)) + y.mean(dim=0) for strength in strengths}


def accuracy(scores: Tensor, labels: Tensor) -> float:
    return (scores.argmax(dim=1) == labels).double().mean().item()
