"""What the commands print and read in common."""

import sys

import pytest
import typer
from typer.testing import CliRunner

from hfaccel.cli import app
from hfaccel.commands.terminal import counted, peer_pythons


def test_one_and_many():
    assert [counted(number, "window") for number in (0, 1, 2)] == ["0 windows", "1 window", "2 windows"]


def test_pythons_of_peers():
    assert peer_pythons(None) == {}
    pairs = [f"llama.cpp={sys.executable}", "hf=sh"]  # a name is looked up as a shell does
    assert peer_pythons(pairs) == {"llama.cpp": sys.executable, "hf": "sh"}


@pytest.mark.parametrize(
    ("pair", "words"),
    [
        ("python3", "'python3' is not NAME=PATH"),
        ("llama=/bin/sh", "'llama=/bin/sh': peers are hf, llama.cpp,"),
        ("hf={place}/none", "'hf={place}/none': '{place}/none' is no file that can be run"),
        ("hf={place}", "'{place}' is no file that can be run"),
        ("hf={place}/text", "'{place}/text' is no file that can be run"),
        ("hf=", "'hf=': '' is no file that can be run"),
    ],
)
def test_pythons_that_are_none_are_refused(pair, words, tmp_path):
    (tmp_path / "text").write_text("not to be run")
    with pytest.raises(typer.BadParameter) as refused:
        peer_pythons([pair.format(place=tmp_path)])
    assert words.format(place=tmp_path) in str(refused.value)


@pytest.mark.parametrize("command", ["bench", "eval"])
def test_a_wrong_python_is_seen_before_files_for_peers_are_made(command, tmp_path, monkeypatch):
    from hfaccel.measure import artifacts

    made = []
    monkeypatch.setattr(artifacts, "folder", lambda *args, **kwargs: made.append(args))
    monkeypatch.setattr(artifacts, "gguf_file", lambda *args, **kwargs: made.append(args))
    args = (command, "demo", "--against", "llama.cpp", "--peer-python", f"llama.cpp={tmp_path}/none")
    result = CliRunner().invoke(app, args)
    assert result.exit_code == 2 and made == []
    assert "no file that can be run" in " ".join(result.output.replace("│", " ").split())
