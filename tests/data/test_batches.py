"""Laws of the order of images: a function of seed and step, the same however many processes share it."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from scalelong.data import Batches, BatchOrder, ImageSet, Picked
from scalelong.diffusion import to_uint8
from scalelong.utils.runtime import keyed_generator

ORDERS = st.builds(BatchOrder, size=st.integers(1, 12), batch_size=st.integers(1, 15), seed=st.integers(0, 2**63 - 1))


def numbered_images(count: int) -> ImageSet:
    """Images that differ from each other and from their mirror images; label i for image i."""
    images = torch.randint(0, 256, (count, 3, 4, 4), dtype=torch.uint8)
    images[:, :, :, 0], images[:, :, :, -1] = 0, 255
    return ImageSet(images, torch.arange(count))


@given(ORDERS)
def test_every_epoch_has_every_image_exactly_once(order: BatchOrder) -> None:
    endless = torch.cat([order.indices(step) for step in range(order.size)])
    epochs = endless.view(order.batch_size, order.size)
    assert torch.equal(epochs.sort(dim=1).values, torch.arange(order.size).expand_as(epochs))


@given(ORDERS, st.permutations(range(8)))
def test_a_batch_does_not_depend_on_what_was_asked_before(order: BatchOrder, steps: list[int]) -> None:
    uninterrupted = [order.indices(step) for step in range(8)]
    for step in steps:
        fresh = BatchOrder(order.size, order.batch_size, order.seed)
        assert torch.equal(order.indices(step), uninterrupted[step])
        assert torch.equal(fresh.indices(step), uninterrupted[step])


def test_epochs_and_seeds_have_orders_of_their_own() -> None:
    orders = [BatchOrder(100, 100, seed).indices(step).tolist() for seed in (0, 1) for step in range(3)]
    assert len({tuple(order) for order in orders}) == 6


def test_flips_are_a_function_of_seed_and_step() -> None:
    order = BatchOrder(10, 64, seed=3)
    steps = [order.flips(step) for step in range(100)]
    assert all(torch.equal(flips, BatchOrder(10, 64, seed=3).flips(step)) for step, flips in enumerate(steps))
    assert len({tuple(flips.tolist()) for flips in steps}) == 100
    # Six standard deviations of the mean of 6400 fair coins.
    assert abs(torch.stack(steps).float().mean().item() - 0.5) < 6 * 0.5 / 80


def test_seeds_are_a_function_of_seed_and_step_and_differ_between_examples() -> None:
    steps = [BatchOrder(10, 64, seed=3).seeds(step) for step in range(50)]
    assert all(torch.equal(seeds, BatchOrder(7, 64, seed=3).seeds(step)) for step, seeds in enumerate(steps))
    assert torch.stack(steps).unique().numel() == 50 * 64
    assert torch.stack(steps).min() >= 0
    assert not torch.equal(steps[0], BatchOrder(10, 64, seed=4).seeds(0))


class Latents:
    """Examples whose image is their index and seed, with features of a text."""

    def __len__(self) -> int:
        return 10

    def pick(self, indices: Tensor, seeds: Tensor) -> Picked:
        images = torch.stack([indices, seeds % 1000], dim=1).float().view(-1, 1, 1, 2)
        return Picked(images, text=indices.float().view(-1, 1, 1).expand(-1, 5, 3))


@pytest.mark.parametrize("world", [1, 2, 3])
def test_latents_and_text_pass_unchanged_and_unmirrored_with_the_seeds_of_their_examples(world: int) -> None:
    order = BatchOrder(10, 6, seed=1)
    parts = [Batches(Latents(), order, flip=True, rank=rank, world=world).at(4) for rank in range(world)]
    images = torch.cat([part.images for part in parts]).view(6, 2)
    assert images.dtype == torch.float32
    assert torch.equal(images, torch.stack([order.indices(4), order.seeds(4) % 1000], dim=1).float())
    texts = torch.cat([text for part in parts if (text := part.text) is not None])
    assert texts.shape == (6, 5, 3) and torch.equal(texts[:, 0, 0], order.indices(4).float())


@pytest.mark.parametrize("world", [1, 2, 3, 6])
def test_the_slices_of_all_ranks_in_order_are_the_batch_of_one_process(world: int) -> None:
    data, order = numbered_images(10), BatchOrder(10, 6, seed=1)
    for step in range(5):
        alone = Batches(data, order, flip=True).at(step)
        parts = [Batches(data, order, flip=True, rank=rank, world=world).at(step) for rank in range(world)]
        assert torch.equal(torch.cat([part.images for part in parts]), alone.images)
        assert torch.equal(torch.cat([label for part in parts if (label := part.labels) is not None]), alone.labels)


def test_batches_hold_the_images_and_labels_of_their_indices() -> None:
    data, order = numbered_images(9), BatchOrder(9, 5, seed=0)
    for batch in (Batches(data, order).at(step) for step in range(4)):
        assert torch.equal(batch.labels, order.indices(batch.step))
        assert torch.equal(to_uint8(batch.images), data.images[order.indices(batch.step)])


def test_exactly_the_chosen_images_are_mirrored() -> None:
    data, order = numbered_images(9), BatchOrder(9, 64, seed=0)
    originals = data.images[order.indices(2)]
    flipped = to_uint8(Batches(data, order, flip=True).at(2).images)
    chosen = order.flips(2)
    assert torch.equal(flipped[chosen], originals[chosen].flip(-1))
    assert torch.equal(flipped[~chosen], originals[~chosen])


def test_every_grey_level_survives_the_way_to_floats_and_back() -> None:
    levels = torch.arange(256, dtype=torch.uint8).view(1, 1, 16, 16)
    (image,) = Batches(ImageSet(levels), BatchOrder(1, 1, seed=0)).at(0).images
    assert image.dtype == torch.float32
    assert (image.min().item(), image.max().item()) == (-1.0, 1.0)
    assert torch.equal(to_uint8(image), levels[0])


def test_images_without_labels_make_batches_without_labels() -> None:
    data = ImageSet(numbered_images(4).images)
    batch = Batches(data, BatchOrder(4, 4, seed=0)).at(0)
    assert batch.labels is None and batch.text is None and batch.captions is None


def test_a_batch_that_cannot_be_shared_evenly_says_what_to_set() -> None:
    with pytest.raises(ValueError, match="batch of 10 .* by 4 processes: set training.batch_size to a multiple of 4"):
        Batches(numbered_images(4), BatchOrder(4, 10, seed=0), world=4)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: BatchOrder(0, 4, seed=0), "at least one image"),
        (lambda: BatchOrder(4, 4, seed=0).indices(-1), "counted from 0, got -1"),
        (lambda: BatchOrder(4, 4, seed=0).slice_of(2, 2), "rank must lie in 0 … 1, got 2"),
        (lambda: Batches(numbered_images(4), BatchOrder(5, 4, seed=0)), "of 5 images, but there are 4"),
    ],
)
def test_impossible_requests_are_refused(call, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        call()


def test_keyed_generators_differ_in_each_part_of_the_key() -> None:
    keys = [(0, "noise", 0), (1, "noise", 0), (0, "times", 0), (0, "noise", 1), (0, "noise", 10)]
    numbers = [torch.rand(4, generator=keyed_generator(*key)).tolist() for key in keys]
    again = [torch.rand(4, generator=keyed_generator(*key)).tolist() for key in keys]
    assert numbers == again
    assert len({tuple(some) for some in numbers}) == len(keys)
