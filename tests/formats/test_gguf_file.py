"""The reader against files that are wrong in one place, each refused by name; the `gguf` package reads the
sound ones beside it."""

import struct
import tracemalloc
from dataclasses import replace

import gguf
import numpy as np
import pytest
import torch

from gguf_bytes import File, Tensor, small_file, text
from hfaccel.formats.gguf_file import GGUFError, GGUFFile


def written(file: File, path) -> str:
    path.write_bytes(file.bytes())
    return str(path)


def test_a_sound_file_is_what_the_gguf_package_reads(tmp_path):
    place = written(small_file(), tmp_path / "a.gguf")
    mine, theirs = GGUFFile(place), gguf.GGUFReader(place)
    wanted = {k: f.contents() for k, f in theirs.fields.items() if not k.startswith("GGUF.")}
    assert mine.metadata == wanted
    assert [type(v) for v in mine.metadata.values()] == [type(v) for v in wanted.values()]
    assert list(mine.tensors) == [tensor.name for tensor in theirs.tensors]
    for tensor in theirs.tensors:
        info = mine.tensors[tensor.name]
        assert info.shape == tuple(tensor.shape.tolist())[::-1] and info.type.number == tensor.tensor_type
        assert np.array_equal(mine.rows(tensor.name).numpy().ravel(), tensor.data.view(np.uint8).ravel())
    assert mine.rows("second").shape == (3, 2 * 34)


def test_rows_outlive_the_file_object(tmp_path):
    place = written(small_file(), tmp_path / "a.gguf")
    rows = GGUFFile(place).rows("first")
    assert rows.view(torch.float32).tolist() == [[1, 2, 3, 4, 5]]


@pytest.mark.parametrize("alignment", [1, 8, 64, 4096])
def test_other_alignments(tmp_path, alignment):
    file = small_file()
    file.metadata.append(("general.alignment", alignment))
    place = written(replace(file, alignment=alignment), tmp_path / "a.gguf")
    assert GGUFFile(place).rows("first").view(torch.float32).tolist() == [[1, 2, 3, 4, 5]]


def key(name, value):
    def change(file: File) -> None:
        file.metadata.append((name, value))

    return change


def tensor(**fields):
    def change(file: File) -> None:
        file.tensors.append(
            Tensor(**{"name": "third", "shape": (8,), "type": 0, "data": b"\0" * 32} | fields)
        )

    return change


def whole(**fields):
    def change(file: File) -> None:
        for name, value in fields.items():
            setattr(file, name, value)

    return change


HUGE = 1 << 60
ARRAY = struct.pack("<I", 9)
BAD = {
    "magic": (whole(magic=b"GGML"), "starts with b'GGML'"),
    "version 1": (whole(version=struct.pack("<I", 1)), "of version 1; known are"),
    "version 4": (whole(version=struct.pack("<I", 4)), "of version 4; known are"),
    "big-endian": (whole(version=struct.pack(">I", 3)), "big-endian; known are"),
    "tensor count": (whole(tensor_count=HUGE), f"{HUGE} tensors of at least"),
    "key count": (whole(key_count=HUGE), f"{HUGE} metadata keys of at least"),
    "one key too many": (whole(key_count=8), "."),
    "text length": (key("k", struct.pack("<IQ", 8, HUGE)), "k of at least"),
    "key length": (key(b"", 1), "has no name"),
    "array length": (key("k", ARRAY + struct.pack("<IQ", 4, HUGE)), f"k: {HUGE} values"),
    "texts in an array": (key("k", ARRAY + struct.pack("<IQ", 8, HUGE)), f"k: {HUGE} texts"),
    "length that wraps": (key("k", ARRAY + struct.pack("<IQ", 10, (1 << 61) + 1)), "k: .* values"),
    "nested arrays": (key("k", ARRAY + struct.pack("<IQ", 9, 1) + ARRAY), "k is an array of arrays"),
    "value type": (key("k", struct.pack("<I", 13)), "k is of the unknown type 13"),
    "element type": (key("k", ARRAY + struct.pack("<IQ", 77, 1)), "k is of the unknown type 77"),
    "truth value": (key("k", struct.pack("<IB", 7, 2)), "k is a truth value of 2"),
    "truth values": (key("k", ARRAY + struct.pack("<IQ", 7, 1) + b"\x03"), "k is a truth value of 3"),
    "UTF-8 of a key": (key(b"k\xff", 1), "name of metadata key 7 is not UTF-8"),
    "UTF-8 of a value": (key("k", struct.pack("<I", 8) + text(b"\xc3\x28")), "k is not UTF-8"),
    "UTF-8 in an array": (
        key("k", ARRAY + struct.pack("<IQ", 8, 2) + text("good") + text(b"\xed\xa0\x80")),
        "k is not UTF-8",
    ),
    "key twice": (key("some.number", 8), "metadata key 'some.number' is there twice"),
    "alignment 0": (key("general.alignment", 0), "general.alignment is 0"),
    "alignment 24": (key("general.alignment", 24), "general.alignment is 24"),
    "alignment of text": (key("general.alignment", "32"), "general.alignment is '32'"),
    "tensor name": (tensor(name=""), "tensor 2 has no name"),
    "UTF-8 of a tensor": (tensor(name=b"\xff"), "name of tensor 2 is not UTF-8"),
    "tensor twice": (tensor(name="first"), "tensor first is there twice"),
    "no dimensions": (tensor(shape=()), "tensor third has 0 dimensions"),
    "five dimensions": (tensor(shape=(1, 1, 1, 1, 8)), "tensor third has 5 dimensions"),
    "a dimension of 0": (tensor(shape=(0, 8)), r"tensor third has the dimensions \[0, 8\]"),
    "absurd dimensions": (tensor(shape=(HUGE, HUGE)), "tensor third has the dimensions"),
    "a dimension too long": (tensor(shape=(1 << 40,)), "tensor third ends at byte"),
    "dimensions that wrap": (tensor(shape=(1 << 32, (1 << 32) + 1)), "tensor third has the dimensions"),
    "IQ type": (tensor(type=20), "tensor third is of type IQ4_NL; read are F32, "),
    "integer type": (tensor(type=26), "tensor third is of type I32; read are"),
    "unknown type": (tensor(type=99), "tensor third is of type 99; read are"),
    "rows no blocks": (tensor(type=8, shape=(4, 33)), r"tensor third: rows of 33 in blocks of 32 \(Q8_0\)"),
    "offset outside": (tensor(offset=1 << 30), "tensor third ends at byte"),
    "offset at the end": (tensor(offset=HUGE), "tensor third ends at byte"),
    "offset misaligned": (tensor(offset=40), "tensor third lies at offset 40, no multiple of 32"),
    "overlapping": (tensor(offset=32), "tensors (second|third) and (second|third) overlap"),
    "data cut off": (tensor(data=b"\0" * 31), "tensor third ends at byte .*: truncated"),
}


@pytest.mark.parametrize("change, words", BAD.values(), ids=BAD)
def test_what_is_wrong_is_named(tmp_path, change, words):
    file = small_file()
    change(file)
    place = written(file, tmp_path / "bad.gguf")
    tracemalloc.start()
    try:
        with pytest.raises(GGUFError, match=f"bad.gguf: .*{words}"):
            GGUFFile(place)
        assert tracemalloc.get_traced_memory()[1] < 200_000  # of what is claimed nothing is made
    finally:
        tracemalloc.stop()


def test_every_truncation_is_refused(tmp_path):
    whole = small_file().bytes()
    place = tmp_path / "short.gguf"
    for length in range(0, len(whole), 7):
        place.write_bytes(whole[:length])
        with pytest.raises(GGUFError, match="short.gguf: "):
            GGUFFile(place)
    place.write_bytes(whole[:-1])
    with pytest.raises(GGUFError, match="tensor second ends at byte"):
        GGUFFile(place)


def test_folders_and_files_that_are_not_there_are_the_system_s_errors(tmp_path):
    with pytest.raises(OSError, match="nowhere"):
        GGUFFile(tmp_path / "nowhere.gguf")
    with pytest.raises(OSError):
        GGUFFile(tmp_path)
