"""Pictures are reproducible and can be told apart without colour."""

import plots
import pytest
from matplotlib.figure import Figure


def draw(path):
    with plots.figure(path, title="T", xlabel="x (s)", ylabel="y (tokens/s)") as axes:
        plots.lines(axes, [1, 2, 3], {"a": [1, 2, 3], "b": [3, 2, 1]})
    with plots.figures(path.with_name("bars"), ["one", "two"]) as (left, right):
        plots.bars(left, ["p", "q"], {"a": [1, 2], "b": [2, 1]}, number="{:.0f}")
        plots.bars(right, ["p", "q"], {"a": [1, 2]})


def test_the_same_data_gives_the_same_bytes(tmp_path):
    draw(tmp_path / "1" / "v1.5")
    draw(tmp_path / "2" / "v1.5")
    names = sorted(p.name for p in (tmp_path / "1").iterdir())
    assert names == ["bars.png", "bars.svg", "v1.5.png", "v1.5.svg"]
    for name in names:
        assert (tmp_path / "1" / name).read_bytes() == (tmp_path / "2" / name).read_bytes()


def test_series_differ_without_colour():
    axes = Figure().subplots()
    plots.lines(axes, [1, 2], {str(i): [1, 2] for i in range(7)})
    styles = {(line.get_marker(), str(line._dash_pattern)) for line in axes.get_lines()}
    assert len(styles) == 7
    axes = Figure().subplots()
    plots.bars(axes, ["g"], {str(i): [1] for i in range(7)})
    assert len({c.patches[0].get_hatch() for c in axes.containers}) == 7


def test_nothing_is_saved_when_drawing_fails(tmp_path):
    with pytest.raises(ZeroDivisionError), plots.figure(tmp_path / "v", title="T"):
        raise ZeroDivisionError
    assert not list(tmp_path.iterdir())
