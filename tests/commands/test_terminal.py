"""What the commands print in common."""

from hfaccel.commands.terminal import counted


def test_one_and_many():
    assert [counted(number, "window") for number in (0, 1, 2)] == ["0 windows", "1 window", "2 windows"]
