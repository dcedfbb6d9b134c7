"""The texts that quality is measured on: WikiText-2, shipped whole so that every figure can be repeated."""

import gzip
from importlib import resources
from pathlib import Path

from hfaccel.errors import PatchError

SHIPPED = ("wikitext2_test", "wikitext2_valid")


def text(source: str | Path = "wikitext2_test") -> str:
    """A shipped text by name (`wikitext2_test`: perplexity, `wikitext2_valid`: calibration) or a UTF-8 file.

    Raises: PatchError if it is neither.
    """
    if source in SHIPPED:
        packed = resources.files("hfaccel.measure").joinpath("data", f"{source}.txt.gz").read_bytes()
        return gzip.decompress(packed).decode("utf-8")
    path = Path(source)
    if not path.is_file():
        raise PatchError(f"no text {str(source)!r}: neither a file nor one of {', '.join(SHIPPED)}")
    try:
        return path.read_text("utf-8")
    except UnicodeDecodeError as error:
        raise PatchError(f"{path} is not UTF-8 text: {error}") from error
