import base64
import io
import os
import struct
import warnings
import zlib

import numpy as np
import pytest
from PIL import Image, ImageCms

from pop_core.errors import PopError
from pop_core.pictures import open_picture, thumbnail

RED, GREEN, BLUE, WHITE, BLACK, YELLOW = (255, 0, 0), (0, 255, 0), (0, 0, 255), (255,) * 3, (0,) * 3, (255, 255, 0)
UPRIGHT = np.array([[RED, GREEN], [BLUE, WHITE], [BLACK, YELLOW]], np.uint8)  # no turn or flip of it looks the same
STORED = {  # by the standard: which side of the upright picture row 0 and column 0 of the file are
    1: lambda a: a,
    2: lambda a: a[:, ::-1],
    3: lambda a: a[::-1, ::-1],
    4: lambda a: a[::-1],
    5: lambda a: a.swapaxes(0, 1),
    6: lambda a: a.swapaxes(0, 1)[::-1],
    7: lambda a: a.swapaxes(0, 1)[::-1, ::-1],
    8: lambda a: a.swapaxes(0, 1)[:, ::-1],
}
pytestmark = pytest.mark.filterwarnings("error::RuntimeWarning", "error::ResourceWarning")

ROUND = dict(quality=95, subsampling=0)  # a JPEG that keeps the colours of squares
SRGB = ImageCms.ImageCmsProfile(ImageCms.createProfile("sRGB")).tobytes()
SWAPPED = SRGB.replace(b"rXYZ", b"temp", 1).replace(b"gXYZ", b"rXYZ", 1).replace(b"temp", b"gXYZ", 1)  # red is green


def red_inks():
    """A printer's profile in which every mixture of inks looks red, or black where there is black ink."""
    identity = bytes(range(256))
    table = b"mft1\0\0\0\0\4\3\2\0" + struct.pack(">9i", *[65536 * (i % 4 == 0) for i in range(9)])
    table += identity * 4 + bytes([138, 209, 198, 0, 128, 128]) * 8 + identity * 3
    fields = (144 + len(table), b"", 0x02100000, b"prtr", b"CMYK", b"Lab ", b"acsp", 63190, 65536, 54061)
    header = struct.pack(">I4sI4s4s4s12x4s28x3I48x", *fields)
    return header + struct.pack(">I4sII", 1, b"A2B0", 144, len(table)) + table


def squares(picture=UPRIGHT, side=16):
    return np.ascontiguousarray(picture.repeat(side, 0).repeat(side, 1))


def image(array, mode=None):
    made = Image.fromarray(np.ascontiguousarray(array))
    return made.convert(mode) if mode else made


def stored(made, kind, **options):
    buffer = io.BytesIO()
    (image(made) if isinstance(made, np.ndarray) else made).save(buffer, kind, **options)
    return buffer.getvalue()


def frames(kind, first=UPRIGHT, **options):
    return stored(first, kind, save_all=True, append_images=[image(255 - first), image(first[::-1])], **options)


def chunk(name, data):
    return struct.pack(">I", len(data)) + name + data + struct.pack(">I", zlib.crc32(name + data))


def png(width, height, depth, colour, rows, key=None):
    """A PNG as the standard writes it, also where Pillow would write another one."""
    header = struct.pack(">IIBBBBB", width, height, depth, colour, 0, 0, 0)
    chunks = chunk(b"IHDR", header) + (chunk(b"tRNS", struct.pack(f">{len(key)}H", *key)) if key else b"")
    body = zlib.compress(b"".join(b"\0" + row for row in rows))
    return b"\x89PNG\r\n\x1a\n" + chunks + chunk(b"IDAT", body) + chunk(b"IEND", b"")


def oriented(orientation):
    exif = Image.Exif()
    exif[0x0112] = orientation
    return exif


def paletted(**info):
    made = Image.fromarray(np.arange(6, dtype=np.uint8).reshape(3, 2))
    made.putpalette(UPRIGHT.tobytes())
    made.info.update(info)
    return made


def rgba(alpha=(255, 255, 0, 255, 255, 128)):
    return image(np.dstack([UPRIGHT, np.array(alpha, np.uint8).reshape(3, 2)]))


def row(*values):
    """One row of greys or colours as [1, W, 3]."""
    return np.array([[value if isinstance(value, tuple) else (value,) * 3 for value in values]], np.uint8)


def with_pixels(changes):
    changed = UPRIGHT.copy()
    for at, colour in changes.items():
        changed[at] = colour
    return changed


ON_WHITE = with_pixels({(1, 0): WHITE, (2, 1): (255, 255, 127)})
WITHOUT_BLUE = with_pixels({(1, 0): WHITE})
LA = np.array([[(9, 255), (9, 0), (0, 128)]], np.uint8)
DEEP, EIGHT = np.array([[0, 257, 25829, 65535]], np.uint16), row(0, 1, 101, 255)
BIG_ENDIAN = DEEP.astype(">u2").tobytes()
FLOATS, GREYS = np.array([[0, 0.2, 0.6, 1]], np.float32), row(0, 51, 153, 255)
ODD = np.array([[np.nan, np.inf, -np.inf, 0.5]], np.float32)
CMYK, INKS = (
    Image.frombytes("CMYK", (3, 1), bytes([0, 255, 255, 0, 0, 0, 0, 255, 255, 0, 0, 0])),
    row(RED, 0, (0, 255, 255)),
)
LAB = Image.frombytes("LAB", (3, 1), bytes([255, 0, 0, 0, 0, 0, 138, 81, 70]))
RGB_16 = struct.pack(">6H", 0x501, 0x601, 0x701, 0x501, 0x601, 0xFF01)
TALL, STRIP = np.tile(UPRIGHT, (111, 14, 1))[:332, :27], np.tile(UPRIGHT[:, :1], (67, 1, 1))[:199]
FILES = {  # name: the file, the pixels expected, the largest difference, words of the notice
    "jpeg": (stored(squares(), "JPEG", **ROUND), squares(), 8),
    "jpeg grey": (stored(squares(row(0, 90, 255))[:, :, 0], "JPEG"), squares(row(0, 90, 255)), 4),
    "jpeg cmyk": (stored(CMYK.resize((48, 16), Image.Resampling.NEAREST), "JPEG", quality=95), squares(INKS), 8),
    "jpeg, broken exif": (stored(squares(), "JPEG", exif=b"Exif\0\0MM\0*", **ROUND), squares(), 8),
    "png, broken exif": (stored(UPRIGHT, "PNG", exif=b"Exif\0\0II*\0\xff\xff\xff\xff"), UPRIGHT, 0),
    "mpo": (frames("MPO", squares(), **ROUND), squares(), 8),
    "bmp": (stored(UPRIGHT, "BMP"), UPRIGHT, 0),
    "webp": (stored(rgba(), "WEBP", lossless=True), ON_WHITE, 1),
    "rgba": (stored(rgba(), "PNG"), ON_WHITE, 0),
    "rgba, nothing to see": (stored(rgba((0,) * 6), "PNG"), np.full_like(UPRIGHT, 255), 0),
    "rgba, tiff": (stored(rgba(), "TIFF"), ON_WHITE, 0),
    "la": (stored(LA, "PNG"), row(9, 255, 127), 0),
    "palette": (stored(paletted(), "PNG"), UPRIGHT, 0),
    "palette, alpha": (stored(paletted(), "PNG", transparency=b"\xff\xff\0\xff\xff\x80"), ON_WHITE, 0),
    "palette, index": (stored(paletted(), "GIF", transparency=2), WITHOUT_BLUE, 0),
    "rgb, key": (png(2, 3, 8, 2, [line.tobytes() for line in UPRIGHT], BLUE), WITHOUT_BLUE, 0),
    "rgb 16, key": (png(2, 1, 16, 2, [RGB_16], (0x501, 0x601, 0x701)), row(255, (5, 6, 255)), 0),
    "grey 2, key": (png(4, 1, 2, 0, [b"\x1b"], [2]), row(0, 85, 255, 255), 0),
    "grey 4, key": (png(2, 1, 4, 0, [b"\x37"], [3]), row(255, 119), 0),
    "grey 8, key": (png(2, 1, 8, 0, [b"\x05\x09"], [5]), row(255, 9), 0),
    "grey 16, key": (png(4, 1, 16, 0, [BIG_ENDIAN], [257]), row(0, 255, 101, 255), 0),
    "1 bit": (png(4, 1, 1, 0, [b"\x50"]), row(0, 255, 0, 255), 0),
    "1 bit, key": (png(4, 1, 1, 0, [b"\x50"], [0]), row(255, 255, 255, 255), 0),
    "16 bit": (stored(DEEP, "PNG"), EIGHT, 0),
    "16 bit, big-endian": (stored(Image.frombytes("I;16B", (4, 1), BIG_ENDIAN), "TIFF"), EIGHT, 0),
    "32 bit": (stored(DEEP.astype(np.int32), "TIFF"), EIGHT, 0),
    "32 bit, wide": (stored(np.array([[-100, 0, 155]], np.int32), "TIFF"), row(0, 100, 255), 0, "from -100 to 155"),
    "float": (stored(FLOATS, "TIFF"), GREYS, 0),
    "float, wide": (stored(FLOATS * 400 - 100, "TIFF"), GREYS, 0, "from -100 to 300"),
    "float, nan": (stored(ODD, "TIFF"), row(0, 255, 0, 128), 0, "not finite"),
    "cmyk": (stored(CMYK, "TIFF"), INKS, 0),
    "lab": (stored(LAB, "TIFF"), row(255, 0, RED), 12),
    "profile": (stored(UPRIGHT, "PNG", icc_profile=SWAPPED), UPRIGHT[:, :, [1, 0, 2]], 2),
    "profile, alpha": (stored(rgba(), "PNG", icc_profile=SWAPPED), ON_WHITE[:, :, [1, 0, 2]], 2),
    "profile, cmyk": (stored(CMYK, "TIFF", icc_profile=red_inks()), row(RED, 0, RED), 12),
    "profile, broken": (stored(UPRIGHT, "PNG", icc_profile=b"not a profile"), UPRIGHT, 0),
    "profile, not its own": (stored(CMYK, "TIFF", icc_profile=SRGB), INKS, 0),
    "gif, 3 frames": (frames("GIF"), UPRIGHT, 0, "Only frame 1 of 3 is used"),
    "png, 3 frames": (frames("PNG"), UPRIGHT, 0, "Only frame 1 of 3 is used"),
    "webp, 3 frames": (frames("WEBP", lossless=True), UPRIGHT, 0, "Only frame 1 of 3 is used"),
    "tiff, 3 pages": (frames("TIFF"), UPRIGHT, 0, "Only frame 1 of several is used"),
    "1 x 1": (stored(UPRIGHT[:1, :1], "PNG"), UPRIGHT[:1, :1], 0),
    "27 x 332": (stored(TALL, "PNG"), TALL, 0),
    "1 x 199": (stored(STRIP, "PNG"), STRIP, 0),
}


def check(picture, expected, most, *notices):
    assert type(picture.image) is Image.Image and picture.image.mode == "RGB"
    assert not picture.image.info and not dict(picture.image.getexif())
    pixels = np.asarray(picture.image).astype(int)
    assert pixels.shape == expected.shape and (picture.height, picture.width) == expected.shape[:2]
    assert np.abs(pixels - expected).max() <= most
    assert len(picture.notices) == len(notices)
    assert all(words in said for words, said in zip(notices, picture.notices, strict=True)), picture.notices


def lazy(data):
    return Image.open(io.BytesIO(data))


def loaded(data):
    made = lazy(data)
    made.load()
    return made


@pytest.mark.parametrize("name", FILES)
def test_an_odd_picture_is_the_same_whichever_way_it_comes(name, tmp_path):
    data, *expected = FILES[name]
    path = tmp_path / "no suffix"
    path.write_bytes(data)
    made = lazy(data)
    for source in (path, str(path), data, io.BytesIO(data), made):
        check(open_picture(source), *expected)
    assert made.info.get("transparency") == lazy(data).info.get("transparency")
    if name not in (
        "rgb 16, key",
        "grey 2, key",
        "grey 4, key",
    ):  # decoded, Pillow no longer knows the depth of the key
        check(open_picture(loaded(data)), *expected)


@pytest.mark.parametrize("orientation", STORED)
@pytest.mark.parametrize("kind", ["JPEG", "PNG", "WEBP", "TIFF", "tiff_lzw"])
def test_every_orientation_is_turned_upright_once(kind, orientation):
    options = {"JPEG": ROUND, "WEBP": dict(lossless=True), "tiff_lzw": dict(compression="tiff_lzw")}.get(kind, {})
    data = stored(STORED[orientation](squares()), kind[:4].upper(), exif=oriented(orientation), **options)
    for source in (data, lazy(data), loaded(data), open_picture(data).image):
        check(open_picture(source), squares(), 8)


@pytest.mark.parametrize("orientation", [0, 9, 65535])
def test_an_orientation_that_does_not_exist_is_ignored(orientation):
    check(open_picture(stored(UPRIGHT, "PNG", exif=oriented(orientation))), UPRIGHT, 0)


MODES = [
    (Image.frombytes("La", (3, 1), bytes([9, 255, 0, 0, 0, 128])), row(9, 255, 127)),
    (rgba().convert("RGBa"), ON_WHITE),
    (Image.frombytes("RGBX", (2, 3), rgba().tobytes()), UPRIGHT),
    (image(UPRIGHT, "YCbCr"), UPRIGHT),
    (image(UPRIGHT, "HSV"), UPRIGHT),
    (paletted(transparency=2), WITHOUT_BLUE),
    (paletted(transparency=2).convert("PA"), WITHOUT_BLUE),
    (Image.frombytes("I;16L", (4, 1), DEEP.astype("<u2").tobytes()), EIGHT),
    (Image.frombytes("I;16B", (4, 1), BIG_ENDIAN), EIGHT),
]


@pytest.mark.parametrize(("made", "expected"), MODES, ids=[made.mode for made, _ in MODES])
def test_a_pil_image_of_any_mode(made, expected):
    before = (made.mode, made.tobytes(), dict(made.info))
    check(open_picture(made), expected, 3)
    assert before == (made.mode, made.tobytes(), dict(made.info))


ARRAYS = [  # the array, the pixels expected, words of the notice
    (UPRIGHT[::-1, ::-1], UPRIGHT[::-1, ::-1]),
    (UPRIGHT[:, :, 0], UPRIGHT[:, :, :1].repeat(3, 2)),
    (UPRIGHT[:, :, :1], UPRIGHT[:, :, :1].repeat(3, 2)),
    (LA, row(9, 255, 127)),
    (np.asarray(rgba()), ON_WHITE),
    (np.asarray(rgba()) * np.uint16(257), ON_WHITE),
    (np.asarray(rgba()) / 255, ON_WHITE),
    (UPRIGHT.astype(np.float16) / 255, UPRIGHT),
    (UPRIGHT.astype(np.float32), UPRIGHT, "from 0 to 255"),
    (DEEP.astype(">u2"), EIGHT),
    (np.full((1, 1), np.nan), row(0), "not finite"),
    (np.full((1, 1), 7.0), row(0), "from 7 to 7"),
]


@pytest.mark.parametrize("case", ARRAYS, ids=lambda case: f"{case[0].dtype} {case[0].shape}")
def test_an_array(case):
    array, expected, *notices = case
    before = array.copy()
    check(open_picture(array), expected, 0, *notices)
    assert array.tobytes() == before.tobytes()


def test_an_animation_stays_at_its_frame():
    made = lazy(frames("GIF"))
    made.seek(1)
    check(open_picture(made), 255 - UPRIGHT, 0, "Only frame 2 of 3")
    assert made.tell() == 1 and np.array_equal(np.asarray(made.convert("RGB")), 255 - UPRIGHT)


@pytest.mark.parametrize("kind", ["JPEG", "PNG"])
def test_a_large_picture_is_reduced_and_said(kind):
    data = stored(image(UPRIGHT).resize((1000, 4500), Image.Resampling.NEAREST), kind)
    pictures = [open_picture(source) for source in (data, lazy(data), loaded(data))]
    for picture in pictures:
        assert picture.notices == ("The picture was reduced from 1,000 × 4,500 to 910 × 4,096 pixels.",)
        assert (picture.width, picture.height) == (1000, 4500)
        assert np.array_equal(np.asarray(picture.image), np.asarray(pictures[0].image))
    centres = np.asarray(pictures[0].image)[[682, 2048, 3413]][:, [227, 682]].astype(int)
    assert np.abs(centres - UPRIGHT).max() < 4


def test_an_image_that_is_reduced_or_turned_is_not_modified():
    made = Image.new("RGB", (4500, 3), BLUE)
    made.info["exif"] = oriented(6).tobytes()
    picture = open_picture(made)
    assert (picture.width, picture.height) == (3, 4500) and len(picture.notices) == 2
    assert made.size == (4500, 3) and made.getexif()[0x0112] == 6 and made.getcolors() == [(13500, BLUE)]


@pytest.mark.parametrize(("size", "padded"), [((1, 200), (2, 200)), ((1, 300), (2, 300)), ((1000, 2), (1000, 6))])
def test_a_strip_is_padded_with_white_not_stretched(size, padded):
    picture = open_picture(Image.new("RGB", size, RED))
    assert picture.image.size == padded and (picture.width, picture.height) == size
    assert f"from {size[0]:,} × {size[1]:,} to {padded[0]:,} × {padded[1]:,} pixels" in picture.notices[0]
    area = size[0] * size[1]
    assert sorted(picture.image.getcolors()) == sorted([(area, RED), (padded[0] * padded[1] - area, WHITE)])
    assert picture.image.getpixel(((padded[0] - 1) // 2, (padded[1] - 1) // 2)) == RED


def test_a_very_long_strip_is_reduced_and_padded():
    picture = open_picture(stored(Image.new("RGB", (10000, 1), BLUE), "PNG"))
    assert picture.image.size == (4096, 21) and len(picture.notices) == 2
    assert np.all(np.asarray(picture.image)[10] == BLUE)


@pytest.mark.parametrize("size", [(20_000, 20_000), (9_400, 9_400), (80_000_001, 1), (2**31 - 1, 2**31 - 1)])
def test_too_many_pixels_are_refused_by_the_header(size):
    with warnings.catch_warnings(), pytest.raises(PopError, match="at most 80 million pixels") as refused:
        warnings.simplefilter("error")
        open_picture(png(*size, 8, 2, [b""]))  # decoding it would say that it is damaged
    assert f"{size[0]:,} × {size[1]:,} pixels" in str(refused.value)


def test_as_many_pixels_as_are_allowed_are_read():
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        picture = open_picture(stored(Image.new("1", (80_000, 1000), 1), "PNG"))
    assert (picture.width, picture.height) == (80_000, 1000) and picture.image.getcolors() == [(4096 * 51, WHITE)]


JPEG, PNG = FILES["jpeg"][0], FILES["rgba"][0]
DAMAGED = [
    ("JPEG", JPEG[:-200]),
    ("JPEG", JPEG[:20]),
    ("PNG", PNG[:20]),
    ("PNG", PNG[:-30]),
    ("PNG", lazy(PNG[:-30])),
    ("WEBP", FILES["webp"][0][:-9]),
    ("GIF", FILES["gif, 3 frames"][0][:50]),
    ("BMP", FILES["bmp"][0][:-4]),
    ("TIFF", FILES["float"][0][:100]),
]
REFUSED = [
    *[(source, f"{kind} file is damaged or cut off") for kind, source in DAMAGED],
    (b"", "is empty"),
    (b"just words", "not a picture that can be read"),
    (b"%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 9 9\n", "not a picture that can be read"),
    (b'<?xml version="1.0"?>\n<svg xmlns="http://www.w3.org/2000/svg"/>', "SVG"),
    (b"%PDF-1.7\n", "PDF"),
    (b"\0\0\0\x18ftypheic\0\0\0\0mif1heic", "HEIC"),
    (b"\0\0\0\x18ftypmif1\0\0\0\0mif1heic", "HEIC"),
    (bytes(50_000_001), "larger than 50 MB"),
    ("https://example.org/cat.png", "web address"),
    ("data:image/png;base64,AAAA", "web address"),
    ("no/such/cat.png", "no file no/such/cat.png"),
    ("x" * 5000, "xxx cannot be opened"),
    ("nul\0.png", "no file"),
    (".", "is a folder"),
    (None, "must be a file"),
    (3, "must be a file"),
    (io.StringIO("words"), "must be a file"),
]


@pytest.mark.parametrize(("source", "words"), REFUSED, ids=[words for _, words in REFUSED])
def test_what_is_not_a_picture_is_one_sentence_that_says_what_is_allowed(source, words):
    with pytest.raises(PopError, match=words) as refused:
        open_picture(source)
    sentence = str(refused.value)
    assert len(sentence) < 350 and sentence.endswith(".") and "JPEG, PNG, WebP, GIF, BMP and TIFF" in sentence


@pytest.mark.parametrize(
    "array", [np.zeros((2, 2), int), np.zeros(4, np.uint8), np.zeros((2, 2, 5)), np.array([["a"]])]
)
def test_an_array_that_is_no_picture(array):
    with pytest.raises(PopError, match=r"uint8, uint16 or float of shape \[H, W\]"):
        open_picture(array)


@pytest.mark.parametrize("source", [np.zeros((0, 3, 3), np.uint8), Image.new("RGB", (0, 5))])
def test_a_picture_without_pixels(source):
    with pytest.raises(PopError, match="no pixels"):
        open_picture(source)


@pytest.mark.skipif(not os.path.isdir("/proc/self/fd"), reason="counts open files as Linux shows them")
@pytest.mark.parametrize("data", [FILES["tiff, 3 pages"][0], FILES["jpeg"][0]])
def test_no_file_stays_open(data, tmp_path):
    path = tmp_path / "picture"
    path.write_bytes(data)
    before = len(os.listdir("/proc/self/fd"))
    picture = open_picture(path)
    assert len(os.listdir("/proc/self/fd")) == before and picture.image.size


def test_a_file_object_is_read_from_its_start_and_stays_open():
    file = io.BytesIO(PNG)
    file.read()
    check(open_picture(file), ON_WHITE, 0)
    assert not file.closed


def test_a_thumbnail_is_a_small_jpeg_in_a_data_uri():
    made = image(squares(side=200))
    start, _, data = thumbnail(made, 60).partition(",")
    small = lazy(base64.b64decode(data))
    assert start == "data:image/jpeg;base64" and small.format == "JPEG" and small.size == (40, 60)
    assert np.abs(np.asarray(small)[10::20, 10::20].astype(int) - UPRIGHT).max() < 30
    assert made.size == (400, 600)
