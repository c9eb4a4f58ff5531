"""Opens data files: decompresses them, and turns errors of reading into one sentence."""

import gzip
import io
import lzma
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import fsspec
import pyarrow as pa
from fsspec.compression import compr

from mbd_core.errors import error_sentence

COMPRESSED = {b"\x1f\x8b": "gzip", b"BZh": "bz2", b"\xfd7zXZ\x00": "xz", b"\x28\xb5\x2f\xfd": "zstd"}
HEAD = 64  # bytes that show the format


@contextmanager
def one_sentence(path: str) -> Iterator[None]:
    """Turns the errors of a storage or of a format's library into a `ValueError` of one sentence. A `ValueError` of
    the project passes through unchanged."""
    try:
        yield
    except (pa.ArrowException, UnicodeDecodeError) as error:
        raise ValueError(f"{path} cannot be read: {' '.join(str(error).split())}") from None
    except OSError as error:
        raise ValueError(f"{path} cannot be read: {error.strerror or ' '.join(str(error).split())}") from None
    except ImportError as error:
        raise ValueError(f"{path} cannot be read without a package that is not installed: {error}") from None
    except ValueError:
        raise
    except Exception as error:  # each storage raises its own types, as S3 does without credentials
        raise ValueError(f"{path} cannot be read: {error_sentence(error)}") from None


@contextmanager
def opened(path: str) -> Iterator[tuple[Any, bytes]]:
    """A decompressed file at its beginning, and its first `HEAD` bytes."""
    with fsspec.open(path, "rb") as stored:
        file: Any = stored if stored.seekable() else io.BytesIO(stored.read())
        head = read_head(file)
        compression = next((name for magic, name in COMPRESSED.items() if head.startswith(magic)), None)
        if compression is None:
            yield file, head
            return
        try:
            with _unpacked(file, compression) as unpacked:
                yield unpacked, read_head(unpacked)
        except (gzip.BadGzipFile, EOFError, zlib.error, lzma.LZMAError) as error:
            raise ValueError(f"{path} has damaged {compression} data ({error})") from None


def _unpacked(packed: Any, compression: str) -> Any:
    """The decompressed file. pyarrow reads zstd, for which fsspec would need one more package."""
    if compression == "zstd":
        return io.BufferedReader(pa.CompressedInputStream(pa.PythonFile(packed, mode="r"), compression))
    return compr[compression](packed, mode="rb")


def read_head(file: Any) -> bytes:
    """The first bytes of a file, which stays at its beginning."""
    if not file.seekable():
        return bytes(file.peek(HEAD)[:HEAD])
    head: bytes = file.read(HEAD)
    file.seek(0)
    return head
