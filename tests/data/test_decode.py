"""Laws of decoding: whatever the size, mode and orientation, a picture becomes what an eye would see of it."""

from __future__ import annotations

import struct
import zlib
from pathlib import Path
from typing import Any

import pytest
import torch
from image_cases import config, picture_of, pictures, pixels_of, saved
from PIL import Image
from torch import Tensor

from scalelong.data import DataError
from scalelong.data.decode import decode, open_picture, ordered_map, to_pixels
from scalelong.data.sources import digits_table


def loaded(raw: Any, **options: Any) -> Tensor:
    """What an undecoded picture becomes. Shape: (C, 6, 6)."""
    with open_picture(raw) as picture:
        return to_pixels(picture, config("anywhere", **options))


def as_loaded(picture: Image.Image, kind: str = "PNG", **options: Any) -> Tensor:
    return loaded(saved(picture, kind), **options)


def png_of_16_bits(colour_type: int, *samples: int, chunks: tuple[tuple[bytes, bytes], ...] = ()) -> bytes:
    """A 6×6 PNG of one colour with 16 bits for each sample, which PIL reads but does not write."""

    def chunk(kind: bytes, content: bytes) -> bytes:
        return struct.pack(">I", len(content)) + kind + content + struct.pack(">I", zlib.crc32(kind + content))

    rows = (b"\0" + struct.pack(f">{len(samples)}H", *samples) * 6) * 6
    header = chunk(b"IHDR", struct.pack(">IIBBBBB", 6, 6, 16, colour_type, 0, 0, 0))
    parts = (chunk(*some) for some in (*chunks, (b"IDAT", zlib.compress(rows)), (b"IEND", b"")))
    return b"\x89PNG\r\n\x1a\n" + header + b"".join(parts)


@pytest.mark.parametrize("form", ["bytes", "path", "struct of bytes", "struct of a path"])
def test_every_form_in_which_a_dataset_holds_a_picture_gives_the_same_pixels(tmp_path: Path, form: str) -> None:
    (picture,) = pictures(1)
    content, file = saved(picture), tmp_path / "0.png"
    file.write_bytes(content)
    forms = {
        "bytes": content,
        "path": str(file),
        "struct of bytes": {"bytes": content, "path": "gone.png"},
        "struct of a path": {"bytes": None, "path": str(file)},
    }
    assert torch.equal(loaded(forms[form]), pixels_of(picture))


@pytest.mark.parametrize(("width", "height"), [(18, 6), (6, 18)])
def test_cropping_keeps_the_centre_of_the_longer_side(width: int, height: int) -> None:
    whole = torch.randint(0, 256, (3, height, width), dtype=torch.uint8)
    top, left = (height - 6) // 2, (width - 6) // 2
    assert torch.equal(as_loaded(picture_of(whole)), whole[:, top : top + 6, left : left + 6])


def test_shrinking_averages_what_is_finer_than_a_pixel() -> None:
    rows, columns = torch.meshgrid(torch.arange(48), torch.arange(48), indexing="ij")
    checkerboard = ((rows + columns) % 2 * 255).to(torch.uint8).expand(3, 48, 48)
    # Without antialiasing every pixel would be black or white. At the border the filter sees half a period more.
    assert (as_loaded(picture_of(checkerboard)).int() - 127).abs().max() <= 3


@pytest.mark.parametrize("size", [(1, 1), (1, 40), (40, 1), (3, 2), (7, 301)])
def test_a_picture_of_one_colour_keeps_it_whatever_its_size(size: tuple[int, int]) -> None:
    assert (as_loaded(Image.new("RGB", size, (10, 200, 30))) == torch.tensor([10, 200, 30]).view(3, 1, 1)).all()


def test_padding_puts_the_picture_unchanged_into_the_middle_of_black() -> None:
    whole = torch.randint(1, 256, (3, 4, 2), dtype=torch.uint8)
    framed = torch.zeros(3, 6, 6, dtype=torch.uint8)
    framed[:, 1:5, 2:4] = whole
    assert torch.equal(as_loaded(picture_of(whole), fit="pad"), framed)


def test_padding_refuses_a_picture_that_is_too_large_and_names_it() -> None:
    message = r"data.fit: 7×7 is larger than the 6×6 to pad it to; use data.fit: crop \(row 3\)"
    with pytest.raises(DataError, match=message):
        decode("row 3", saved(pictures(1, size=7)[0]), config("anywhere", fit="pad"))


def test_a_box_is_cut_out_before_the_picture_is_fitted() -> None:
    whole = torch.randint(0, 256, (3, 12, 10), dtype=torch.uint8)
    assert torch.equal(as_loaded(picture_of(whole), box=[1, 5, 7, 11]), whole[:, 5:11, 1:7])
    # Of a box that is no square, the centre is kept.
    assert torch.equal(as_loaded(picture_of(whole), box=[0, 2, 10, 8]), whole[:, 2:8, 2:8])
    edge = as_loaded(picture_of(whole), box=[6, 8, 10, 12], fit="pad")
    assert torch.equal(edge[:, 1:5, 1:5], whole[:, 8:, 6:])


def test_a_box_is_that_of_the_upright_picture() -> None:
    upright = torch.randint(0, 256, (3, 10, 8), dtype=torch.uint8)
    exif = Image.Exif()
    exif[0x0112] = 6
    stored = saved(picture_of(upright).transpose(ORIENTATIONS[6]), exif=exif)
    assert torch.equal(loaded(stored, box=[1, 3, 7, 9]), upright[:, 3:9, 1:7])


def test_the_box_of_celeba_gives_the_face_that_uvit_and_ddim_train_on() -> None:
    from scalelong.config import load_recipe

    whole = picture_of(torch.randint(0, 256, (3, 218, 178), dtype=torch.uint8))
    # 64 pixels to each side of column 89, row 121.
    face = whole.crop((89 - 64, 121 - 64, 89 + 64, 121 + 64)).resize((64, 64), Image.Resampling.BICUBIC)
    for name in ("celeba64-uvit-s4", "celeba64-unet"):
        assert torch.equal(to_pixels(whole, load_recipe(name).data), pixels_of(face))


@pytest.mark.parametrize(("box", "size"), [([0, 0, 8, 7], "7×7"), ([0, 0, 7, 8], "7×7")])
def test_a_picture_that_does_not_contain_the_box_is_named(box: list[int], size: str) -> None:
    message = f"data.box: {box} reaches out of {size}; choose a smaller box, or null to take whole images (row 3)"
    with pytest.raises(DataError) as caught:
        decode("row 3", saved(pictures(1, size=7)[0]), config("anywhere", box=box))
    assert str(caught.value) == message


@pytest.mark.parametrize(
    "picture",
    [Image.new("L", (6, 6), 77), Image.new("LA", (6, 6), (77, 255)), Image.new("I;16", (6, 6), 77 * 256 + 99)],
    ids=lambda picture: picture.mode,
)
def test_grey_pictures_become_three_equal_channels(picture: Image.Image) -> None:
    assert (as_loaded(picture) == 77).all() and as_loaded(picture).shape == (3, 6, 6)
    assert (as_loaded(picture, channels=1) == 77).all() and as_loaded(picture, channels=1).shape == (1, 6, 6)


def test_black_and_white_become_0_and_255() -> None:
    picture = Image.new("1", (6, 6), 0)
    picture.putpixel((2, 1), 1)
    assert as_loaded(picture, channels=1).unique().tolist() == [0, 255]


def test_colours_become_grey_by_their_luminance() -> None:
    # Red's share of the luminance in ITU-R 601.
    assert (as_loaded(Image.new("RGB", (6, 6), (255, 0, 0)), channels=1) == round(0.299 * 255)).all()


@pytest.mark.parametrize("kind", ["PNG", "WEBP"])
def test_transparent_parts_are_white(kind: str) -> None:
    picture = Image.new("RGBA", (6, 6), (255, 0, 0, 0))
    picture.putpixel((2, 1), (10, 20, 30, 255))
    pixels = loaded(saved(picture, kind, **({"lossless": True} if kind == "WEBP" else {})))
    assert pixels[:, 1, 2].tolist() == [10, 20, 30]
    assert pixels[:, 0, 0].tolist() == [255, 255, 255]


def test_half_transparent_parts_are_mixed_with_white() -> None:
    pixels = as_loaded(Image.new("RGBA", (6, 6), (0, 0, 0, 128)))
    assert (pixels == 127).all()


def test_a_palette_is_looked_up() -> None:
    original = Image.new("RGB", (6, 6), (10, 200, 30))
    assert torch.equal(as_loaded(original.quantize(4)), pixels_of(original))


@pytest.mark.parametrize("kind", ["PNG", "GIF"])
def test_a_palettes_transparent_colour_is_white(kind: str) -> None:
    picture = Image.new("P", (6, 6), 0)
    picture.putpalette([255, 0, 0, 10, 20, 30])
    picture.putpixel((2, 1), 1)
    pixels = loaded(saved(picture, kind, transparency=0))
    assert pixels[:, 1, 2].tolist() == [10, 20, 30]
    assert pixels[:, 0, 0].tolist() == [255, 255, 255]


def test_a_palette_with_an_opacity_for_each_colour_is_mixed_with_white() -> None:
    picture = Image.new("P", (6, 6), 0)
    picture.putpalette([0, 0, 0, 10, 20, 30])
    picture.putpixel((2, 1), 1)
    pixels = loaded(saved(picture, transparency=bytes([128, 255])))
    assert pixels[:, 1, 2].tolist() == [10, 20, 30]
    assert pixels[:, 0, 0].tolist() == [127, 127, 127]


@pytest.mark.parametrize(
    ("content", "expected"),
    [
        (png_of_16_bits(0, 0x8123), [0x81, 0x81, 0x81]),
        (png_of_16_bits(2, 0x8123, 0x10FF, 0xFF00), [0x81, 0x10, 0xFF]),
        (png_of_16_bits(6, 0x8123, 0x10FF, 0xFF00, 0xFFFF), [0x81, 0x10, 0xFF]),
        (png_of_16_bits(4, 0x8123, 0xFFFF), [0x81, 0x81, 0x81]),
        (png_of_16_bits(0, 0x8123, chunks=((b"tRNS", struct.pack(">H", 0x1000)),)), [0x81, 0x81, 0x81]),
        (saved(Image.new("I;16", (6, 6), 0x8123), "TIFF"), [0x81, 0x81, 0x81]),
        (saved(Image.new("I;16B", (6, 6), 0x8123), "TIFF"), [0x81, 0x81, 0x81]),
    ],
    ids=["grey", "RGB", "RGBA", "grey and alpha", "grey with a transparent level", "TIFF", "TIFF, other end first"],
)
def test_sixteen_bits_keep_their_upper_half(content: bytes, expected: list[int]) -> None:
    assert loaded(content)[:, 3, 3].tolist() == expected


@pytest.mark.parametrize(("mode", "what"), [("F", "floats"), ("I", "32-bit integers")])
def test_pixels_of_unknown_range_are_broken_instead_of_black(mode: str, what: str) -> None:
    content = saved(Image.new(mode, (6, 6), 1), "TIFF")
    reason = decode("row 1", content, config("unused"))
    assert reason == f"ValueError: its pixels are {what}, whose range is not known; save it with 8 or 16 bits"


def test_a_grey_map_of_sixteen_bits_keeps_their_upper_half() -> None:
    content = b"P5 6 6 65535\n" + struct.pack(">H", 0x8123) * 36
    assert loaded(content)[:, 3, 3].tolist() == [0x81] * 3


@pytest.mark.parametrize("kind", ["TIFF", "JPEG"])
def test_cmyk_becomes_rgb(kind: str) -> None:
    pixels = as_loaded(Image.new("CMYK", (6, 6), (255, 0, 0, 0)), kind)
    assert pixels[:, 0, 0].tolist() == [0, 255, 255]


# How a picture is stored so that the reader, told by the EXIF orientation, sees it upright.
ORIENTATIONS = {
    2: Image.Transpose.FLIP_LEFT_RIGHT,
    3: Image.Transpose.ROTATE_180,
    4: Image.Transpose.FLIP_TOP_BOTTOM,
    5: Image.Transpose.TRANSPOSE,
    6: Image.Transpose.ROTATE_90,
    7: Image.Transpose.TRANSVERSE,
    8: Image.Transpose.ROTATE_270,
}


@pytest.mark.parametrize("orientation", ORIENTATIONS)
def test_a_picture_is_turned_upright_as_its_exif_says(orientation: int) -> None:
    upright = torch.randint(0, 256, (3, 6, 6), dtype=torch.uint8)
    exif = Image.Exif()
    exif[0x0112] = orientation
    stored = saved(picture_of(upright).transpose(ORIENTATIONS[orientation]), exif=exif)
    assert torch.equal(loaded(stored), upright)


@pytest.mark.parametrize("kind", ["GIF", "PNG", "WEBP"])
def test_of_an_animation_the_first_frame_is_taken(kind: str) -> None:
    first, second = Image.new("RGB", (6, 6), (255, 255, 255)), Image.new("RGB", (6, 6), (0, 0, 0))
    content = saved(first, kind, save_all=True, append_images=[second], duration=100)
    assert (loaded(content) == 255).all()


JPEG = saved(pictures(1, size=64)[0], "JPEG")


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"this is no image",
        JPEG[: len(JPEG) // 2],
        saved(pictures(1)[0])[:-30],
        None,
        {"bytes": None, "path": None},
    ],
    ids=["empty", "text", "truncated JPEG", "truncated PNG", "null", "struct of nulls"],
)
def test_what_cannot_be_read_gives_a_reason_instead_of_pixels(content: Any) -> None:
    reason = decode("row 0", content, config("anywhere"))
    assert isinstance(reason, str) and reason


def test_a_decompression_bomb_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Image, "MAX_IMAGE_PIXELS", 100)
    assert "DecompressionBomb" in str(decode("row 0", saved(pictures(1, size=64)[0]), config("anywhere")))


@pytest.mark.parametrize("workers", [1, 2, 7])
def test_threads_do_not_change_the_order(workers: int) -> None:
    assert list(ordered_map(lambda number: number * 2, range(1000), workers)) == list(range(0, 2000, 2))


def test_threads_read_only_a_little_ahead_and_stop_when_nobody_asks() -> None:
    taken: list[int] = []
    results = ordered_map(abs, (taken.append(number) or number for number in range(10_000)), workers=2)
    next(results)
    results.close()
    assert len(taken) < 200


def test_an_error_in_a_thread_is_raised_where_its_result_would_have_been() -> None:
    results = ordered_map(lambda number: 1 // number, [1, 0], workers=2)
    with pytest.raises(ZeroDivisionError):
        list(results)


def test_digits_are_decoded_from_their_grey_levels() -> None:
    raw = next(digits_table().rows([5]))["image"]
    assert torch.equal(loaded(raw, image_size=8, channels=1)[0], torch.from_numpy(raw))
