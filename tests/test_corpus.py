"""The shipped texts are those of WikiText-2, byte for byte; anything else is a file or an error."""

import hashlib

import pytest

from hfaccel import PatchError
from hfaccel.measure.corpus import SHIPPED, text

SHA256 = {
    "wikitext2_test": "d790b833ef8cf03a90db7bf1271b7520b83c45ce07ba3c1a9699df81e239eca0",
    "wikitext2_valid": "f0737ed31fc1329026e95cb8b98e19c2a182c39c240ab909dc31abf2f8af58e8",
}


@pytest.mark.parametrize("name", SHIPPED)
def test_shipped_texts_are_whole(name):
    assert hashlib.sha256(text(name).encode()).hexdigest() == SHA256[name]


def test_a_file_is_read_as_utf8(tmp_path):
    file = tmp_path / "text.txt"
    file.write_text("Übermaß\n", "utf-8")
    assert text(file) == text(str(file)) == "Übermaß\n"


def test_what_is_no_text_is_refused(tmp_path):
    with pytest.raises(PatchError, match="wikitext2_test, wikitext2_valid"):
        text("wikitext2_train")
    file = tmp_path / "latin1.txt"
    file.write_bytes(b"\xe9t\xe9")
    with pytest.raises(PatchError, match="latin1.txt is not UTF-8"):
        text(file)
