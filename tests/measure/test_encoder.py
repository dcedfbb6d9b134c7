"""measure/encoder.py: its command line."""

import sys

import pytest

from hfaccel.measure import encoder


def test_help_measures_nothing_and_a_recipe_is_passed_on(monkeypatch, capsys):
    asked = []

    def measure(recipe):
        return asked.append(recipe) or {"bf16": 0.5, recipe: 0.25, "ratio": 2.0}

    monkeypatch.setattr(encoder, "measure", measure)
    monkeypatch.setattr(sys, "argv", ["encoder", "--help"])
    with pytest.raises(SystemExit) as ended:
        encoder.main()
    assert ended.value.code == 0 and "usage: python -m hfaccel.measure.encoder" in capsys.readouterr().out
    monkeypatch.setattr(sys, "argv", ["encoder", "int4"])
    encoder.main()
    monkeypatch.setattr(sys, "argv", ["encoder"])
    encoder.main()
    assert asked == ["int4", "int8"] and "bf16 / int8" in capsys.readouterr().out
