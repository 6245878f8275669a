"""Whatever a person hands over as a picture, as one upright 8-bit RGB picture on white.

The same pixels come out whether it arrives as a path, bytes, an open file or a PIL image. The size is judged by the
header, so nothing that is refused is ever decoded. Colours with an ICC profile are brought to sRGB.
"""

import base64
import os
from contextlib import suppress
from dataclasses import dataclass
from io import BytesIO
from pathlib import Path

import numpy as np
from PIL import Image, ImageCms

from .errors import PopError

FORMATS = ("JPEG", "PNG", "WEBP", "GIF", "BMP", "TIFF", "AVIF")  # not all of Pillow's: EPS would start Ghostscript
ALLOWED = "JPEG, PNG, WebP, GIF, BMP and TIFF are accepted"
MOST_PICTURES = 64  # of a prompt
MOST_BYTES = 50_000_000
MOST_PIXELS = 80_000_000  # below the number at which Pillow warns of its own accord
LONGEST_SIDE = 4096
MOST_RATIO = 199  # the processors of the Qwen family refuse more than 200
_TURNS = ("FLIP_LEFT_RIGHT", "ROTATE_180", "FLIP_TOP_BOTTOM", "TRANSPOSE", "ROTATE_270", "TRANSVERSE", "ROTATE_90")
TURNS = {orientation: Image.Transpose[turn] for orientation, turn in enumerate(_TURNS, start=2)}  # to upright


@dataclass(frozen=True)
class Picture:
    """An upright 8-bit RGB picture of ours, and the sentences that the person should see.

    width, height: of what came in, in pixels, upright, before it was reduced or padded.
    """

    image: Image.Image
    width: int
    height: int
    notices: tuple[str, ...] = ()


def open_picture(source) -> Picture:
    """The picture in a path, bytes, a binary file object, a `PIL.Image.Image` or an array.

    Arrays are uint8, uint16 or float, [H, W] or [H, W, 1 to 4]. Of an animation the first frame is taken, of a PIL
    image the frame that it is at. Raises `PopError` for what is not a picture, damaged, or above `MOST_BYTES` or
    `MOST_PIXELS`. The source is not modified.
    """
    if isinstance(source, np.ndarray):
        image, size, notices = _from_array(source)
    else:
        image, size, notices = _decode(source if isinstance(source, Image.Image) else _header(_read(source)))
    if image.size != size:
        notices += (f"The picture was reduced from {_words(size)} to {_words(image.size)} pixels.",)
    image, padded = _padded(image)
    return Picture(image, *size, notices + padded)


def in_a_row(images) -> tuple:
    """Pictures as a tuple, also where somebody gave one alone, or None."""
    if images is None:
        return ()
    return tuple(images) if isinstance(images, (list, tuple)) else (images,)


def thumbnail(picture: Image.Image, side: int = 320) -> str:
    """The picture as a data URI (JPEG) for a page, its longest side at most `side` pixels: large enough to lay a map of
    its tokens over."""
    small = picture.convert("RGB")
    small.thumbnail((side, side))
    buffer = BytesIO()
    small.save(buffer, "JPEG", quality=85)
    return "data:image/jpeg;base64," + base64.b64encode(buffer.getvalue()).decode()


def _read(source) -> bytes:
    """All bytes of a path, bytes or file object, at most one more than is allowed."""
    data = source
    if isinstance(source, (str, os.PathLike)):
        data = _read_path(os.fspath(source))
    elif hasattr(source, "read"):
        with suppress(AttributeError, OSError):  # a stream that cannot go back is read from where it is
            source.seek(0)
        data = source.read(MOST_BYTES + 1)
    if not isinstance(data, (bytes, bytearray, memoryview)):
        raise PopError(f"A picture must be a file, its bytes, a PIL image or an array; {ALLOWED}.")
    if len(data) > MOST_BYTES:
        raise PopError(f"The file is larger than {MOST_BYTES // 10**6} MB, the most that can be given; {ALLOWED}.")
    return bytes(data)


def _read_path(name) -> bytes:
    path, shown = Path(os.fsdecode(name)), os.fsdecode(name)[:200]
    if "://" in shown or shown.startswith("data:"):
        raise PopError(f"A web address is not a picture; save it and give the file ({ALLOWED}).")
    try:
        if path.is_dir():
            raise PopError(f"{shown} is a folder; give one picture file ({ALLOWED}).")
        if not path.is_file():
            raise PopError(f"There is no file {shown}; give a picture file ({ALLOWED}).")
        with open(path, "rb") as file:
            return file.read(MOST_BYTES + 1)
    except OSError as error:
        raise PopError(f"{shown} cannot be opened ({error.strerror}); give a picture file ({ALLOWED}).") from None


def _header(data: bytes) -> Image.Image:
    """The picture opened but not decoded. `Image.open` is not used: it judges the size before we know it."""
    kind = _foreign(data)
    Image.init()
    for name in FORMATS if kind is None else ():
        factory, accepts = Image.OPEN.get(name, (None, None))
        if factory and accepts(data[:16]) is True:  # a sentence instead of True: no decoder here
            try:
                return factory(BytesIO(data), "")
            except Exception:  # a damaged header can raise anything
                raise _damaged(name) from None
    raise PopError(f"The file is {kind or 'not a picture that can be read'}; {ALLOWED}.")


def _foreign(data: bytes) -> str | None:
    """What is often taken for a picture that we can read, by name."""
    if not data:
        return "empty"
    if data.startswith(b"%PDF"):
        return "a PDF, not a picture"
    if b"<svg" in data[:1024]:
        return "an SVG drawing, not a picture of pixels"
    if data[4:8] == b"ftyp" and b"avi" not in data[8:64]:
        return "a HEIC picture or a video, which cannot be read"
    return None


def _damaged(name: str | None) -> PopError:
    return PopError(f"The {name or 'picture'} file is damaged or cut off; give a whole one ({ALLOWED}).")


def _check_size(width: int, height: int):
    if not width * height:
        raise PopError(f"The picture has no pixels ({width} × {height}); at least 1 × 1 is needed.")
    if width * height > MOST_PIXELS:
        most = f"at most {MOST_PIXELS // 10**6} million pixels are accepted"
        raise PopError(f"The picture is {width:,} × {height:,} pixels; {most}.")


def _from_array(values: np.ndarray) -> tuple[Image.Image, tuple[int, int], tuple[str, ...]]:
    kind, shape = values.dtype, values.shape
    number = kind.kind == "f" or (kind.kind == "u" and kind.itemsize <= 2)
    if not number or len(shape) not in (2, 3) or (len(shape) == 3 and shape[2] not in (1, 2, 3, 4)):
        allowed = "uint8, uint16 or float of shape [H, W] or [H, W, 1 to 4] is accepted"
        raise PopError(f"An array of {kind} and shape {list(shape)} is not a picture; {allowed}.")
    _check_size(shape[1], shape[0])
    grey = len(shape) == 3 and shape[2] == 1
    eight, notices = _eight_bits(values[..., 0] if grey else values)
    image = Image.fromarray(np.ascontiguousarray(eight))
    return _rgb(image), image.size, notices


def _decode(image: Image.Image) -> tuple[Image.Image, tuple[int, int], tuple[str, ...]]:
    """Upright RGB of at most `LONGEST_SIDE`, the upright size before that, and notices; `image` may not be loaded."""
    _check_size(*image.size)
    key = _colour_key(image)
    try:
        image.load()
    except Exception:  # a decoder can raise anything on damaged bytes
        raise _damaged(image.format) from None
    if image.mode[0] in "IF":  # I;16 and its kin, I, F: one channel of more than 8 bits
        values = np.asarray(image)
        eight, notices = _eight_bits(values)
        if isinstance(key, int):
            eight[values == key] = 255
        rgb = _rgb(Image.fromarray(eight))
    else:
        rgb, notices = _rgb(image, key), ()
    rgb.info.clear()
    notices, orientation = notices + _frames(image), _orientation(image)
    if orientation not in TURNS:
        return rgb, image.size, notices
    return rgb.transpose(TURNS[orientation]), image.size[:: -1 if orientation >= 5 else 1], notices


def _colour_key(image: Image.Image):
    """The transparent colour in numbers of 8 bits: Pillow scales the pixels of a PNG, not its colour key."""
    key, tiles = image.info.get("transparency"), getattr(image, "tile", None)
    raw = tiles[0][3] if tiles and image.format == "PNG" and key is not None else None
    if raw in ("L;2", "L;4"):
        return key * 255 // (2 ** int(raw[-1]) - 1)
    return tuple(value >> 8 for value in key) if raw == "RGB;16B" else key


def _rgb(image: Image.Image, key=None) -> Image.Image:
    """A new RGB image of at most `LONGEST_SIDE` from one with 8 bits a channel: straight colours, in sRGB, on white."""
    profile = image.info.get("icc_profile")
    if key is not None:
        image = image.copy()
        image.info["transparency"] = key
    if not image.has_transparency_data:
        return _srgb(_shrunk(image if image.mode in ("L", "RGB", "CMYK") else image.convert("RGB")), profile)
    image = image.convert("LA") if image.mode == "La" else image  # Pillow knows no other way from La
    image = _shrunk(image if image.mode == "RGBA" else image.convert("RGBA"))
    white = Image.new("RGB", image.size, "white")
    white.paste(_srgb(image.convert("RGB"), profile), mask=image.getchannel("A"))
    return white


def _shrunk(image: Image.Image) -> Image.Image:
    """Before any work on colours, to save memory. Pillow weighs colours by their alpha here."""
    longest = max(image.size)
    if longest <= LONGEST_SIDE:
        return image
    size = [max(1, round(side * LONGEST_SIDE / longest)) for side in image.size]
    return image.resize(size, Image.Resampling.BICUBIC, reducing_gap=2.0)


def _srgb(image: Image.Image, profile: bytes | None) -> Image.Image:
    if profile:
        with suppress(Exception):  # damaged, of another colour space, or no LittleCMS: the colours as they are stored
            source, target = ImageCms.ImageCmsProfile(BytesIO(profile)), ImageCms.createProfile("sRGB")
            return ImageCms.profileToProfile(image, source, target, outputMode="RGB")
    return image.convert("RGB")


def _eight_bits(values: np.ndarray) -> tuple[np.ndarray, tuple[str, ...]]:
    """uint8 from numbers of any type: 16 bits by 257, floats in [0, 1] by 255, the rest by its own range."""
    if values.dtype == np.uint8:
        return values, ()
    if values.dtype.kind in "iu" and values.min() >= 0 and values.max() <= 65535:
        return ((values.astype(np.uint32) + 128) // 257).astype(np.uint8), ()
    finite, notices = values[np.isfinite(values)], ()
    if finite.size < values.size:
        notices = ("Values that are not finite numbers are drawn black, or white for plus infinity.",)
    low, high = (float(finite.min()), float(finite.max())) if finite.size else (0.0, 1.0)
    if low < 0 or high > 1:
        notices = (f"The values from {low:g} to {high:g} were spread from black to white.", *notices)
    else:
        low, high = 0.0, 1.0
    unit = values.astype(np.float64)  # then in place: a picture may have 80 million of them
    unit -= low
    unit *= 255 / ((high - low) or 1.0)
    np.clip(np.nan_to_num(unit, copy=False), 0, 255, out=unit)
    return np.rint(unit, out=unit).astype(np.uint8), notices


def _orientation(image: Image.Image):
    with suppress(Exception):  # a broken EXIF block says nothing about which way is up
        return image.getexif().get(0x0112)


def _frames(image: Image.Image) -> tuple[str, ...]:
    """A notice if there is more than one frame (the second picture in a phone's MPO is none)."""
    with suppress(Exception):  # a file that is damaged after its first frame
        if image.format != "MPO" and getattr(image, "is_animated", False):
            # Pillow counts the pages of a TIFF in quadratic time
            count = "several" if image.format == "TIFF" else f"{image.n_frames:,}"
            return (f"Only frame {image.tell() + 1} of {count} is used.",)
    return ()


def _padded(image: Image.Image) -> tuple[Image.Image, tuple[str, ...]]:
    """White on both sides of a strip: the content stays as it is, where scaling would stretch it."""
    least = -(-max(image.size) // MOST_RATIO)
    if min(image.size) >= least:
        return image, ()
    white = Image.new("RGB", (max(image.width, least), max(image.height, least)), "white")
    white.paste(image, ((white.width - image.width) // 2, (white.height - image.height) // 2))
    why = f"one side may be at most {MOST_RATIO} times the other"
    return white, (f"White was added from {_words(image.size)} to {_words(white.size)} pixels, because {why}.",)


def _words(size: tuple[int, int]) -> str:
    return f"{size[0]:,} × {size[1]:,}"
