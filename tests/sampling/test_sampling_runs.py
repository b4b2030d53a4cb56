"""Drawing from a run: at one number of threads files depend on seed and batch, not on processes or interruptions."""

from __future__ import annotations

import os
import re
import shutil
import signal
import subprocess
import sys
import time
import warnings
from collections.abc import Callable
from importlib import import_module
from io import BytesIO
from pathlib import Path
from threading import Thread
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from checkpoint_cases import contents
from command_line import run as command
from run_cases import free_port, run_tiny, train_unet
from torch import Tensor

from scalelong import AbsorbedScalingWarning
from scalelong.cli import console
from scalelong.diffusion import SAMPLERS
from scalelong.diffusion.guidance import Condition
from scalelong.sampling import SampleRequest, sample_run
from scalelong.sampling.images import SampleFolder, images_in, read_image
from scalelong.sampling.sample_run import Sampler, title, with_sampling
from scalelong.utils.atomic import Busy, locked
from scalelong.utils.block_folder import BlockError
from scalelong.utils.runtime import Rank

sampling = import_module("scalelong.sampling.sample_run")  # The package's name for it is the function's.


def names(count: int) -> set[str]:
    return {f"{number:06d}.png" for number in range(count)}


# The folder, with images that show their number and how many were drawn together


class Interrupted(Exception):
    pass


class Painting:
    """Draws grey images; counts those drawn, and is interrupted when asked for more than `limit` blocks."""

    def __init__(self, limit: int | None = None, wait: float = 0.0) -> None:
        self.limit, self.wait = limit, wait
        self.drawn: list[range] = []

    def __call__(self) -> Callable[[range, Callable[[float], None]], Tensor]:
        return self.sample

    def sample(self, numbers: range, progress: Callable[[float], None]) -> Tensor:
        if len(self.drawn) == self.limit:
            raise Interrupted
        time.sleep(self.wait)
        self.drawn.append(numbers)
        levels = torch.tensor([(7 * number + 60 * len(numbers)) % 256 for number in numbers], dtype=torch.uint8)
        return levels.view(-1, 1, 1, 1).expand(-1, 1, 8, 8)


def place(folder: Path, count: int = 10, batch: int = 4, **settings: Any) -> SampleFolder:
    return SampleFolder(folder / "images", {"seed": 0, **settings}, count, batch)


def fill(folder: SampleFolder, painting: Painting | None = None, rank: Rank | None = None) -> list[range]:
    """The blocks that were sampled."""
    painting = painting or Painting()
    folder.fill(painting, rank or Rank())
    return painting.drawn


def blocks_of(folder: SampleFolder) -> list[range]:
    return list(folder.blocks.values())


def visible(folder: Path) -> set[str]:
    return {path.name for path in folder.iterdir() if not path.name.startswith(".")}


@pytest.fixture
def fresh(tmp_path_factory: pytest.TempPathFactory) -> dict[str, bytes]:
    """The files of ten images that were drawn by one process at once."""
    folder = place(tmp_path_factory.mktemp("fresh"))
    assert fill(folder) == [range(0, 4), range(4, 8), range(8, 10)]
    return contents(folder.folder)


@pytest.mark.parametrize("blocks", [0, 1, 2])
def test_an_interrupted_folder_is_absent_and_goes_on_where_it_was(
    blocks: int, tmp_path: Path, fresh: dict[str, bytes]
) -> None:
    folder = place(tmp_path)
    with pytest.raises(Interrupted):
        fill(folder, Painting(limit=blocks))
    assert not folder.folder.exists()
    assert len(images_in(folder.partial)) == 4 * blocks
    assert fill(folder) == blocks_of(folder)[blocks:]
    assert contents(folder.folder) == fresh
    assert fill(folder) == []
    assert visible(tmp_path) == {"images", "images.json"}


def test_a_sampler_that_cannot_be_loaded_leaves_nothing_behind(tmp_path: Path, fresh: dict[str, bytes]) -> None:
    def fail() -> Any:
        raise ValueError("there is no encoder")

    folder = place(tmp_path / "samples")
    with pytest.raises(ValueError, match="there is no encoder"):
        folder.fill(fail, Rank())
    assert not folder.folder.parent.exists()
    fill(place(tmp_path / "samples", 6))
    with pytest.raises(ValueError, match="there is no encoder"):
        folder.fill(fail, Rank())
    assert visible(tmp_path / "samples") == {"images", "images.json"}
    assert fill(folder) == [range(4, 8), range(8, 10)] and contents(folder.folder) == fresh


def test_a_block_of_which_files_are_missing_or_damaged_is_drawn_again(tmp_path: Path, fresh: dict[str, bytes]) -> None:
    folder = place(tmp_path)
    with pytest.raises(Interrupted):
        fill(folder, Painting(limit=2))
    (folder.partial / "000001.png").unlink()
    whole = (folder.partial / "000006.png").read_bytes()
    (folder.partial / "000006.png").write_bytes(whole[: len(whole) // 2])
    (folder.partial / ".tmp-000009.png").write_bytes(b"half")
    assert fill(folder) == blocks_of(folder)
    assert contents(folder.folder) == fresh


def test_a_finished_folder_that_lost_images_gets_them_back(tmp_path: Path, fresh: dict[str, bytes]) -> None:
    folder = place(tmp_path)
    fill(folder)
    (folder.folder / "000005.png").unlink()
    (folder.folder / "000009.png").write_bytes(b"")
    assert fill(folder) == [range(4, 8), range(8, 10)]
    assert contents(folder.folder) == fresh
    assert visible(tmp_path) == {"images", "images.json"}


def test_what_a_kill_left_behind_at_the_very_end_goes_with_the_next_command(tmp_path: Path) -> None:
    folder = place(tmp_path)
    fill(folder)
    whole = sorted(tmp_path.rglob("*"))
    (folder.folder / "index.json").write_text("{}")
    (tmp_path / "images.old").mkdir()
    assert fill(folder) == []
    assert sorted(tmp_path.rglob("*")) == whole


@pytest.mark.parametrize("interrupted", [False, True])
def test_more_images_are_added_and_equal_to_those_drawn_at_once(
    interrupted: bool, tmp_path: Path, fresh: dict[str, bytes]
) -> None:
    smaller, larger = place(tmp_path, 6), place(tmp_path)
    fill(smaller)
    if interrupted:
        with pytest.raises(Interrupted):
            fill(larger, Painting(limit=0))
        assert contents(smaller.folder).keys() == names(6) | {"grid.png"}
    # Images 4 and 5 were alone in their block, and are now with two others.
    assert fill(larger) == [range(4, 8), range(8, 10)]
    assert contents(larger.folder) == fresh


def test_fewer_images_than_there_are_change_nothing(tmp_path: Path, fresh: dict[str, bytes]) -> None:
    fill(place(tmp_path))
    assert fill(place(tmp_path, 3)) == []
    assert contents(tmp_path / "images") == fresh


@pytest.mark.parametrize("blocks", [1, 2, 9])
def test_images_of_other_settings_are_never_mixed(blocks: int, tmp_path: Path) -> None:
    if blocks < 3:
        with pytest.raises(Interrupted):
            fill(place(tmp_path), Painting(limit=blocks))
    else:
        fill(place(tmp_path))
    before = {path: path.read_bytes() for path in tmp_path.rglob("*.png")}
    with pytest.raises(BlockError, match=r"was made with other settings \(seed 0 → 1\): give the same ones, or remo"):
        fill(place(tmp_path, seed=1))
    with pytest.raises(BlockError, match=r"\(batch 4 → 5\)"):
        fill(place(tmp_path, batch=5))
    assert {path: path.read_bytes() for path in tmp_path.rglob("*.png")} == before
    shutil.rmtree(tmp_path / ("images.partial" if blocks < 3 else "images"))
    assert len(fill(place(tmp_path, seed=1))) == 3


def test_fewer_images_do_not_throw_away_an_interrupted_drawing_of_more(tmp_path: Path) -> None:
    with pytest.raises(Interrupted):
        fill(place(tmp_path), Painting(limit=2))
    with pytest.raises(BlockError, match="holds 8 of 10 images of an interrupted command: resume it with -n 10"):
        fill(place(tmp_path, 3))


def test_two_commands_cannot_draw_into_one_folder(tmp_path: Path) -> None:
    folder = place(tmp_path)
    with locked(folder.lock_file, "busy"), pytest.raises(Busy, match="another process is sampling into"):
        fill(folder)


@pytest.mark.parametrize("world", [2, 3, 5])
def test_processes_share_the_blocks_and_write_the_files_of_one(
    world: int, tmp_path: Path, fresh: dict[str, bytes]
) -> None:
    folder, paintings = place(tmp_path), [Painting(wait=0.01 * rank) for rank in range(world)]
    threads = [Thread(target=fill, args=(folder, paintings[rank], Rank(rank, world))) for rank in range(world)]
    for thread in reversed(threads):
        thread.start()
    for thread in threads:
        thread.join(timeout=20)
    assert not any(thread.is_alive() for thread in threads)
    assert contents(folder.folder) == fresh
    assert [painting.drawn for painting in paintings] == [blocks_of(folder)[rank::world] for rank in range(world)]


def test_processes_begin_anew_where_a_partial_folder_was_removed_and_its_settings_left(
    tmp_path: Path, fresh: dict[str, bytes]
) -> None:
    folder = place(tmp_path)
    with pytest.raises(Interrupted):
        fill(folder, Painting(limit=1))
    shutil.rmtree(folder.partial)
    second = Thread(target=fill, args=(folder, None, Rank(1, 2)), daemon=True)
    second.start()
    # Long enough for the second process to look for the folder several times before the first makes it.
    second.join(timeout=0.5)
    first = Thread(target=fill, args=(folder, None, Rank(0, 2)), daemon=True)
    first.start()
    for thread in (first, second):
        thread.join(timeout=20)
        assert not thread.is_alive()
    assert contents(folder.folder) == fresh


def test_what_two_processes_began_one_can_finish(tmp_path: Path, fresh: dict[str, bytes]) -> None:
    folder = place(tmp_path)
    with pytest.raises(Interrupted):
        fill(folder, Painting(limit=1), Rank(0, 2))
    with pytest.raises(Interrupted):
        fill(folder, Painting(limit=0), Rank(1, 2))
    assert fill(folder) == [range(4, 8), range(8, 10)]
    assert contents(folder.folder) == fresh


def test_the_grid_shows_the_first_images_only(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("scalelong.sampling.images.GRID_IMAGES", 4)
    fill(place(tmp_path))
    # Two rows of two, with gaps, enlarged to 400 pixels at least.
    assert read_image(tmp_path / "images" / "grid.png").shape == (1, 418, 418)


def test_progress_counts_the_images_of_all_processes(tmp_path: Path) -> None:
    folder, seen = place(tmp_path), []
    with pytest.raises(Interrupted):
        fill(folder, Painting(limit=1))

    def halfway(numbers: range, progress: Callable[[float], None]) -> Tensor:
        progress(0.5)
        return Painting().sample(numbers, progress)

    folder.fill(lambda: halfway, Rank(), lambda *done: seen.append(done))
    assert seen == [(4, 10), (4, 10), (6.0, 10), (8, 10), (9.0, 10), (10, 10)]


# Real runs


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("tiny")
    run_tiny(folder)
    return folder


def forget(run: Path) -> None:
    for path in sorted((run / "samples").rglob("*"), reverse=True):
        path.rmdir() if path.is_dir() else path.unlink()


def draw(run: Path, *, count: int = 10, batch: int = 4, sampler: str = "ddpm", **options: Any) -> dict[str, bytes]:
    """The files of images that are drawn anew."""
    forget(run)
    return contents(sample_run(run, count, steps=3, sampler=sampler, batch=batch, **options))


def test_an_interrupted_drawing_of_a_run_ends_as_one_that_was_not(run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    whole, original, calls = draw(run), Sampler.sample_batch, []

    def draw_one_block(sampler: Sampler, numbers: range, progress: Any) -> Tensor:
        if calls:
            raise Interrupted
        calls.append(numbers)
        return original(sampler, numbers, progress)

    monkeypatch.setattr(Sampler, "sample_batch", draw_one_block)
    with pytest.raises(Interrupted):
        draw(run)
    monkeypatch.setattr(Sampler, "sample_batch", original)
    assert contents(sample_run(run, 10, steps=3, sampler="ddpm", batch=4)) == whole


def pixels(files: dict[str, bytes]) -> Tensor:
    """Shape: (N, C, H, W), in the order of the names, without the grid."""
    return torch.stack([read_image(BytesIO(files[name])) for name in sorted(files) if name != "grid.png"]).int()


# Sums in another order change a colour by far less than a grey level, but may bring it to the other side of a border.
APART = 1


@pytest.mark.parametrize("sampler", SAMPLERS)
def test_at_another_batch_size_images_are_at_most_one_grey_level_apart(run: Path, sampler: str) -> None:
    by_batch = [pixels(draw(run, count=6, batch=batch, sampler=sampler)) for batch in (6, 4, 1)]
    assert all((images - by_batch[0]).abs().max() <= APART for images in by_batch)
    assert len({tuple(image.flatten().tolist()) for image in by_batch[0]}) == 6
    # Image k has the seed seed + k, here in another place of another block.
    later = pixels(draw(run, count=3, batch=2, sampler=sampler, seed=3))
    assert (later - by_batch[0][3:]).abs().max() <= APART


def test_a_class_and_a_prompt_are_both_told_to_a_network_that_takes_both(monkeypatch: pytest.MonkeyPatch) -> None:
    """A recipe with labels and text, whose encoder gives the length of a prompt."""
    from scalelong.config import load_recipe

    class Lengths:
        def __init__(self, *_: Any) -> None: ...

        def encode(self, captions: list[str]) -> Tensor:
            return torch.tensor([float(len(caption)) for caption in captions]).view(-1, 1, 1)

    monkeypatch.setattr(sampling, "TextEncoder", Lengths)
    both = ("data.label_column=label", "labels.classes=3", "data.caption_column=text", "text={encoder: x, width: 1}")
    config = load_recipe("digits", both)
    for request, labels in ((SampleRequest(2, "dog"), [2, 2]), (SampleRequest(None, "dog"), [1, 2])):
        condition = sampling.conditions_of(config, request)[1](range(4, 6))
        assert condition.labels is not None and condition.labels.tolist() == labels
        assert condition.text is not None and condition.text.flatten().tolist() == [3.0, 3.0]
    captions = Condition(torch.tensor([0, 1]), torch.ones(2, 1, 1))
    monkeypatch.setattr(sampling, "open_inputs", lambda config: SimpleNamespace(empty_text=torch.zeros(1, 1)))
    monkeypatch.setattr(sampling, "validation_condition", lambda *_, **__: captions)
    for request, labels in ((SampleRequest(2), [2, 2]), (SampleRequest(), [0, 1])):
        condition = sampling.conditions_of(config, request)[1](range(4, 6))
        assert condition.labels is not None and condition.labels.tolist() == labels
        assert condition.text is captions.text


def test_the_name_tells_prompts_apart() -> None:
    from scalelong.config import load_recipe

    config = with_sampling(load_recipe("digits"), sampler="heun", steps=20)
    requests = [SampleRequest(), SampleRequest(prompt="a dog"), SampleRequest(prompt="a cat")]
    titles = [title(config, request, 8, "ema", 5) for request in requests]
    assert titles[0] == "step-000008-ema-seed-5-heun-20-steps"
    assert len(set(titles)) == 3 and all(re.fullmatch(r"[\w.-]+", name) for name in titles)


def test_images_of_weights_that_are_no_longer_there_are_not_taken_for_those_of_the_run(
    run: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    draw(run)
    monkeypatch.setattr(sampling, "weights_digest", lambda checkpoint, weights: "other")
    with pytest.raises(BlockError, match="was made with other settings"):
        sample_run(run, 10, steps=3, sampler="ddpm", batch=4)


# The command


def test_sample_says_how_far_it_is_on_stderr_and_the_result_on_stdout(
    run: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    forget(run)
    monkeypatch.setattr(console, "SECONDS_BETWEEN_LINES", 0.0)
    arguments = ("sample", run, "-n", 4, "--batch", 2, "--sampler", "unipc", "--steps", 2)
    result = command(*arguments)
    folder = run / "samples" / "step-000008-ema-seed-0-unipc-2-steps"
    assert result.stdout == f"4 images and grid.png: {folder}\n", result.output
    assert result.stderr.splitlines() == [f"{done} of 4 images" for done in (0, 1, 2, 2, 3, 4, 4)]
    again = command(*arguments)
    assert (again.stdout, again.stderr) == (result.stdout, "")


def test_an_interruption_ends_in_one_line_and_is_gone_on_from(run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    forget(run)
    arguments = ("sample", run, "-n", 4, "--steps", 2)

    def interrupt(sampler: Sampler, numbers: range, progress: Any) -> Tensor:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(Sampler, "sample_batch", interrupt)
        result = command(*arguments)
    assert result.exit_code == 130
    assert result.stderr == "stopped: what is finished is kept, and the same command resumes\n"
    assert command(*arguments).exit_code == 0


def test_a_sampler_that_does_not_exist_fails_in_one_line_with_those_that_do(run: Path) -> None:
    result = command("sample", run, "--sampler", "eular")
    assert result.exit_code == 2
    assert result.stderr.count("\n") == 1 and all(repr(name) in result.stderr for name in SAMPLERS)
    assert result.stderr.startswith("error: --sampler: sampling.sampler: must be one of ")
    assert "got 'eular'" in result.stderr


def test_a_seed_that_no_generator_takes_fails_in_one_line(run: Path) -> None:
    result = command("sample", run, "--seed", 2**64)
    assert result.exit_code == 2
    assert result.stderr.count("\n") == 1 and "--seed" in result.stderr


def test_images_of_a_network_that_overflows_are_black_there_and_it_is_said(
    run: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def broken(*_: Any, seeds: list[int], **__: Any) -> Tensor:
        images = torch.ones(len(seeds), 1, 8, 8)
        images[1, 0, 0] = float("nan")
        return images

    monkeypatch.setattr(sampling, "sample", broken)
    files = pixels(draw(run, count=3, batch=3))
    assert files[1, 0, 0].eq(0).all() and files[0].eq(255).all()
    assert "1 of the images 0 to 2 are not numbers everywhere, and black there" in caplog.text


@pytest.fixture(scope="module")
def unet(tmp_path_factory: pytest.TempPathFactory) -> Path:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", AbsorbedScalingWarning)
        return train_unet(tmp_path_factory.mktemp("unet"), "diffusion.steps=1000")


def environment(threads: int = 1) -> dict[str, str]:
    return {**os.environ, "OMP_NUM_THREADS": str(threads)}


def finish(*command: str, threads: int = 1) -> dict[str, bytes]:
    """The files that a command of its own draws."""
    done = subprocess.run(
        [sys.executable, "-m", *command], capture_output=True, text=True, env=environment(threads), timeout=300
    )
    assert done.returncode == 0, done.stderr
    (line,) = done.stdout.splitlines()
    return contents(Path(line.partition(": ")[2]))


# All have one thread, as torchrun gives each process. The last batch of the second UNet is one image.
@pytest.mark.slow
@pytest.mark.parametrize(
    ("kind", "batch", "options"),
    [("run", 16, ()), ("run", 16, ("--compile",)), ("unet", 12, ()), ("unet", 5, ("--steps", "20"))],
)
def test_256_images_of_one_process_of_one_that_was_killed_and_of_two_are_the_same_files(
    kind: str, batch: int, options: tuple[str, ...], request: pytest.FixtureRequest
) -> None:
    run: Path = request.getfixturevalue(kind)
    arguments = ["sample", str(run), "-n", "256", "--batch", str(batch), "--steps", "50", *options]

    forget(run)
    whole = finish("scalelong", *arguments)
    assert whole.keys() == names(256) | {"grid.png"}

    forget(run)
    process = subprocess.Popen([sys.executable, "-m", "scalelong", *arguments], env=environment())
    while len(list((run / "samples").glob("*.partial/??????.png"))) < 128:
        assert process.poll() is None
        time.sleep(0.01)
    process.send_signal(signal.SIGKILL)
    process.wait()
    assert not list((run / "samples").glob("*/grid.png"))
    assert finish("scalelong", *arguments) == whole

    forget(run)
    launcher = ("torch.distributed.run", "--nproc-per-node=2", f"--master-port={free_port()}", "-m", "scalelong")
    assert finish(*launcher, *arguments) == whole


@pytest.mark.slow
@pytest.mark.parametrize(("kind", "batch"), [("run", 16), ("unet", 12), ("unet", 5)])
def test_with_another_number_of_threads_images_are_at_most_one_grey_level_apart(
    kind: str, batch: int, request: pytest.FixtureRequest
) -> None:
    run: Path = request.getfixturevalue(kind)
    found = []
    for threads in (1, 2):
        forget(run)
        command = ("scalelong", "sample", str(run), "-n", "64", "--batch", str(batch), "--steps", "50")
        found.append(pixels(finish(*command, threads=threads)))
    assert (found[1] - found[0]).abs().max() <= APART
