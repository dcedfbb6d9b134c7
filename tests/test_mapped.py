"""mapped.py: packing what a file maps leaves neither its pages nor a copy of it in memory."""

import os
import re
from pathlib import Path

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import save_file

import hfaccel
from hfaccel.journal import Journal
from hfaccel.mapped import drop_pages
from hfaccel.quant.linear import is_packed
from hfaccel.report import model_bytes
from tiny import tiny

MATRIX = 1024 * 1024 * 4  # bytes, many pages


def resident(file) -> int:
    """Bytes of a file that this process has in memory through its maps."""
    total, inside = 0, False
    for line in Path("/proc/self/smaps").read_text().splitlines():
        if re.match(r"[0-9a-f]+-[0-9a-f]+ ", line):
            inside = line.endswith(os.path.realpath(file))
        elif inside and line.startswith("Rss:"):
            total += 1024 * int(line.split()[1])
    return total


@pytest.fixture
def file(tmp_path):
    place = tmp_path / "x.safetensors"
    save_file({name: torch.full((1024, 1024), float(i)) for i, name in enumerate("abc")}, place)
    return place


def test_pages_go_and_come_back(file):
    with safe_open(file, "pt") as opened:
        a, b = opened.get_tensor("a"), opened.get_tensor("b")
    assert a.sum() == 0 and b.sum() == 1 << 20 and resident(file) >= 2 * MATRIX
    gone = drop_pages(b, str(file))
    assert MATRIX - 2 * 4096 <= gone <= MATRIX
    assert MATRIX <= resident(file) < 1.2 * MATRIX
    assert b.sum() == 1 << 20


def test_memory_that_is_not_that_file_is_left_alone(file, tmp_path):
    """Anonymous memory would be zeros afterwards, and a write to a mapped page would be lost."""
    plain = torch.ones(1024, 1024)
    assert drop_pages(plain, str(file)) == 0 and plain.sum() == 1 << 20
    with safe_open(file, "pt") as opened:
        b = opened.get_tensor("b")
    b.mul_(5)
    save_file({"b": b}, tmp_path / "other.safetensors")
    assert drop_pages(b, str(tmp_path / "other.safetensors")) == 0
    assert drop_pages(b[:0], str(file)) == drop_pages(b.T, str(file)) == 0
    assert b.sum() == 5 << 20


def test_loading_with_a_recipe_keeps_packed_weights_and_one_matrix(tmp_path, monkeypatch):
    """Resident at every step of packing: what is not packed at all, and the matrix at hand."""
    wide = {"hidden_size": 512, "intermediate_size": 1408, "num_hidden_layers": 4, "vocab_size": 1024}
    original = tiny("llama", **wide, num_attention_heads=8, num_key_value_heads=2)
    original.save_pretrained(tmp_path)
    file = tmp_path / "model.safetensors"
    largest = 1408 * 512 * 4
    untouched = 1024 * 512 * 4 + 9 * 512 * 4  # the embedding and the norms
    seen = []
    release = Journal.release
    monkeypatch.setattr(
        Journal, "release", lambda journal, p: (release(journal, p), seen.append(resident(file)))
    )
    model = hfaccel.from_pretrained(tmp_path, "int4")
    packed = [m for m in model.modules() if is_packed(m)]
    assert len(packed) == len(seen) == 4 * 7 + 1
    around = (1 << 17) * len(packed)  # pages that the system maps around one that is read, at a matrix's ends
    assert max(seen) <= untouched + largest + around
    assert resident(file) <= untouched + around < 0.5 * model_bytes(original)
    assert model_bytes(model) < 0.35 * model_bytes(original)
    hfaccel.unpatch(model)
    assert all(torch.equal(a, b) for a, b in zip(model.parameters(), original.parameters(), strict=True))


def test_weights_changed_since_are_spilled_and_come_back(tmp_path):
    original = tiny("llama")
    original.save_pretrained(tmp_path)
    model = hfaccel.from_pretrained(tmp_path)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(1.5)
    wanted = {name: t.clone() for name, t in model.state_dict().items()}
    hfaccel.unpatch(hfaccel.patch(model, "int8"))
    assert all(torch.equal(t, wanted[name]) for name, t in model.state_dict().items())
