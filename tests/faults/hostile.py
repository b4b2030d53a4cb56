"""Data and models that somebody else made, by accident or with intent: they are refused in a line, or used as data.

Nothing in them is run, no file is opened because they say so, and they take no more memory than there is.
"""

from __future__ import annotations

import io
import json
import os
import pickle
import random
import resource
import shutil
import struct
import sys
import tarfile
import zipfile
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

from image_cases import saved, write_parquet
from prepare_cases import save_all, tiny_job
from run_cases import TINY

from scalelong.data.prepare import prepare
from scalelong.runs.checkpoint import MANIFEST, manifest_of
from scalelong.utils.atomic import describe_files, to_json

from .cases import RECOVERED, Case, Outcome, Shared, pick, wrong
from .children import End, command, sets
from .damage import DAMAGE, refusing

MEMORY = 8 << 30
RESIDENT_KB = 3 << 20
SIZE = 8


def guarded(function: Callable[[], object], canary: Path) -> Callable[[], object]:
    """With little memory, and a watch over a file that nothing has a reason to open."""

    def run() -> None:
        resource.setrlimit(resource.RLIMIT_AS, (MEMORY, MEMORY))

        def watch(event: str, args: tuple[Any, ...]) -> None:
            if event == "open" and str(args[0]) == str(canary):
                os.write(2, b"Traceback (most recent call last): the canary was opened\n")
                os._exit(77)

        sys.addaudithook(watch)
        try:
            function()
        finally:
            if resource.getrusage(resource.RUSAGE_SELF).ru_maxrss > RESIDENT_KB:
                os.write(2, b"Traceback (most recent call last): too much memory\n")

    return run


def verdict(end: End) -> Outcome:
    if end.refused:
        return Outcome("refused")
    return RECOVERED if end.code == 0 and not end.traced else wrong(end)


# Data


def hostile_data(case: Case) -> Outcome:
    """A set of images in any of the forms that are read, and a run of one step on it."""
    canary = case.place / "canary.png"
    canary.write_bytes(picture(case.chance))
    kind = case.chance.choice((parquet, archive, tape, folder))
    source = kind(case.chance, case.place, canary)
    if case.chance.random() < 0.4 and source.is_file():
        source.write_bytes(case.chance.choice(DAMAGE)(source.read_bytes(), case.chance))
    data = (f"data.source={source}", "data.channels=1", f"data.image_size={SIZE}", "data.validation_count=4")
    data += ("data.image_column=image", "data.label_column=null", "data.workers=1", "training.steps=1")
    overrides = sets([*TINY, *data])
    os.environ["SCALELONG_CACHE"] = os.environ["HF_DATASETS_CACHE"] = str(case.place / "cache")
    return verdict(case.call(guarded(command("train", "digits", *overrides, "--out", case.place / "run"), canary)))


def picture(chance: random.Random) -> bytes:
    from PIL import Image

    return saved(Image.frombytes("RGB", (SIZE, SIZE), chance.randbytes(3 * SIZE * SIZE)))


def strange_picture(chance: random.Random) -> bytes:
    good = picture(chance)
    kinds = (
        lambda: chance.choice(DAMAGE)(good, chance),
        lambda: huge_png(chance.choice((3000, 30_000, 2**31 - 1))),
        lambda: b"GIF89a" + chance.randbytes(50),
        lambda: pickle.dumps(Bomb()),
        lambda: b"<svg xmlns='http://www.w3.org/2000/svg'><image href='file:///etc/passwd'/></svg>",
        lambda: b"",
    )
    return chance.choice(kinds)()


def huge_png(side: int) -> bytes:
    """A file of some kilobytes that says it is a picture of so many pixels."""

    def chunk(name: bytes, data: bytes) -> bytes:
        return struct.pack(">I", len(data)) + name + data + struct.pack(">I", zlib.crc32(name + data))

    rows = zlib.compress(bytes(1 << 20))
    header = struct.pack(">IIBBBBB", side, side, 8, 2, 0, 0, 0)
    return b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", header) + chunk(b"IDAT", rows) + chunk(b"IEND", b"")


def some_pictures(chance: random.Random) -> list[bytes]:
    """Images of which none, one, some or all are strange."""
    share = chance.choice((0, 0.005, 0.1, 1))
    return [strange_picture(chance) if chance.random() < share else picture(chance) for _ in range(24)]


def parquet(chance: random.Random, place: Path, canary: Path) -> Path:
    rows: list[Any] = [{"bytes": data, "path": None} for data in some_pictures(chance)]
    path = chance.choice((str(canary), f"file://{canary}", "http://127.0.0.1:9/x.png", "/dev/zero", "../../x", "a\0b"))
    columns: dict[str, list[Any]] = {"image": rows, "label": [row % 3 for row in range(24)]}
    match chance.randrange(7):
        case 0:
            columns["image"][3] = {"bytes": None, "path": path}
        case 1:
            columns["image"] = [{"bytes": None, "path": path}] * 24
        case 2:
            columns["image"] = [path] * 24
        case 3:
            columns["image"] = [[1.5, float("nan")]] * 24
        case 4:
            columns = {"other": [1]}
        case 5:
            columns["image"] = [None, *rows[1:]]
        case _:
            pass
    return write_parquet(
        place / "source" / f"{chance.choice(('a', 'train', 'text', chr(27) + '[31m'))}.parquet", **columns
    )


def names(chance: random.Random) -> list[str]:
    prefix = chance.choice(
        ("", "cat/", "../", "/tmp/", "a/" * 50, "x" * 200 + "/", "train/cat/", "__MACOSX/", "\x1b[2J/")
    )
    ending = chance.choice((".png", ".png", ".png", ".jpg", ".PNG", ".txt", ".pth", ".eps", ".py"))
    return [f"{prefix}{number:03d}{ending}" for number in range(24)]


def archive(chance: random.Random, place: Path, canary: Path) -> Path:
    file = place / "source.zip"
    with zipfile.ZipFile(file, "w", zipfile.ZIP_DEFLATED) as made:
        for name, data in zip(names(chance), some_pictures(chance), strict=True):
            made.writestr(name, data)
        if chance.random() < 0.1:
            made.writestr("bomb.png", bytes(400 << 20))
    return file


def tape(chance: random.Random, place: Path, canary: Path) -> Path:
    file = place / "source.tar"
    with tarfile.open(file, "w") as made:
        for name, data in zip(names(chance), some_pictures(chance), strict=True):
            entry = tarfile.TarInfo(name)
            entry.size = len(data)
            if chance.random() < 0.02:
                entry.type, entry.linkname, entry.size = tarfile.SYMTYPE, str(canary), 0
            made.addfile(entry, io.BytesIO(data))
    return file


def folder(chance: random.Random, place: Path, canary: Path) -> Path:
    source = place / chance.choice(("source", "text", "pandas", "a b", "ä"))
    source.mkdir()
    for number, data in enumerate(some_pictures(chance)):
        (source / f"{number:03d}.png").write_bytes(data)
    if chance.random() < 0.2:
        (source / f"{source.name}.py").write_text(f"open({str(canary)!r}).read()")
    if chance.random() < 0.2:
        (source / chance.choice(("dataset_infos.json", "README.md", "metadata.csv", "x.csv"))).write_text(
            "file_name\n---\n{["
        )
    return source


# Models


class Bomb:
    """What a pickle could do to whoever loads it."""

    def __reduce__(self) -> tuple[Any, tuple[str]]:
        return (exec, ("import os; os.write(2, b'Traceback (most recent call last): code was run'); os._exit(78)",))


def hostile_model(case: Case) -> Outcome:
    """A checkpoint, an encoder or a feature network that was exchanged, checksums included, and then used."""
    canary = case.place / "canary"
    canary.touch()
    use = pick(case, checkpoint=3, encoder=2, inspect=2, features=1)
    return verdict(case.call(guarded(USES[use](case), canary)))


def poisoned(data: bytes, chance: random.Random) -> bytes:
    """Another content for a file with tensors or JSON."""
    kinds = (
        lambda: chance.choice(DAMAGE)(data, chance),
        lambda: pickle.dumps(Bomb()),
        lambda: struct.pack("<Q", chance.choice((0, 2**40, 2**63, 100))) + data[8:],
        lambda: chance.choice((b"null", b"[1]", b"{}", b'{"a": 1}', b"[" * 100_000, b"\xff\xfe", b'"x"')),
        lambda: wrong_types(data, chance),
    )
    return chance.choice(kinds)()


def wrong_types(data: bytes, chance: random.Random) -> bytes:
    """JSON with a value of another kind in one of its places, or a safetensors file that says so of a tensor."""
    try:
        content = json.loads(data)
    except ValueError:
        return data.replace(b"F32", chance.choice((b"I32", b"F99", b"U8 ", b"F16")), 1)
    if isinstance(content, dict) and content:
        content[chance.choice(sorted(content))] = chance.choice(
            (None, "x", -1, 1e308, [], {"a": 1}, True, 10**12, [10**9])
        )
    return json.dumps(content).encode()


def use_checkpoint(case: Case) -> Callable[[], object]:
    """One whose manifest is right, as somebody makes it who knows how."""
    run = case.copy(case.shared.half("plain"))
    newest = run / "checkpoints" / "step-000006"
    file = newest / case.chance.choice(("model.safetensors", "ema.safetensors", "optimizer.safetensors", "state.json"))
    file.write_bytes(poisoned(file.read_bytes(), case.chance))
    files = [path for path in sorted(newest.iterdir()) if path.name != MANIFEST]
    (newest / MANIFEST).write_bytes(manifest_of(6, None, describe_files(files)))
    if case.chance.random() < 0.5:
        return command("train", "--out", run)
    return command("sample", run, "-n", 1, "--steps", 1)


def use_encoder(case: Case) -> Callable[[], object]:
    case.shared.make("encoders", save_all)
    root = Path(shutil.copytree(case.shared.folder / "encoders", case.place / "encoders"))
    exchange(root / case.chance.choice(("bert", "autoencoder")), case.chance)
    return refusing(lambda: prepare(tiny_job(root, case.place / "out")))


def use_inspect(case: Case) -> Callable[[], object]:
    network = Path(shutil.copytree(unet(case.shared), case.place / "network"))
    exchange(network, case.chance)
    return command("inspect", network)


def use_features(case: Case) -> Callable[[], object]:
    case.shared.whole("evaluated")
    run, network = case.copy(case.shared.whole("plain")), case.place / case.chance.choice(("net.pt", "net.safetensors"))
    network.write_bytes(poisoned((case.shared.folder / "net.pt").read_bytes(), case.chance))
    return command("evaluate", run, "-n", 20, "--network", network)


USES = {"checkpoint": use_checkpoint, "encoder": use_encoder, "inspect": use_inspect, "features": use_features}


def exchange(folder: Path, chance: random.Random) -> None:
    """Poison a file of a model, or add one that some libraries would run."""
    file = chance.choice([path for path in sorted(folder.rglob("*")) if path.is_file()])
    file.write_bytes(poisoned(file.read_bytes(), chance))
    if chance.random() < 0.3:
        for name in ("pytorch_model.bin", "diffusion_pytorch_model.bin"):
            (folder / name).write_bytes(pickle.dumps(Bomb()))
        for tensors in folder.glob("*.safetensors"):
            tensors.unlink()
    if chance.random() < 0.3:
        code = {"auto_map": {"AutoModel": "code.Model", "AutoConfig": "code.Config"}, "model_type": "own"}
        (folder / "code.py").write_text("import os; os._exit(78)")
        for config in folder.glob("config.json"):
            config.write_bytes(to_json(code))


def unet(shared: Shared) -> Path:
    def save(folder: Path) -> None:
        from diffusers import UNet2DModel

        blocks = {"down_block_types": ("DownBlock2D",) * 2, "up_block_types": ("UpBlock2D",) * 2}
        UNet2DModel(sample_size=8, block_out_channels=(8, 16), norm_num_groups=4, **blocks).save_pretrained(folder)

    return shared.make("unet", save)
