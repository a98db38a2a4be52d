"""The contract: the picture shows the numbers of the log and no others, and the same log gives the same bytes."""

from __future__ import annotations

import io
import subprocess
import sys
from pathlib import Path

import pytest
from test_log import Settings, at

from ckptkit.errors import ResourceError, UsageError
from ckptkit.train.log import Evaluation, open_log
from ckptkit.train.log_file import read_log
from ckptkit.train.plot import draw, panels, plot_run


def make_run(run: Path, last: int = 6) -> Path:
    log = open_log(Settings(console=False), run, 0, io.StringIO())
    for step in range(1, last + 1):
        loss = float("nan") if step == 3 else 3.0 / step
        log.step(at(step, loss=loss, lr=1e-3 / step, grad_norm=0.1 * step, memory_bytes=step * 10**9))
        if step % 2 == 0:
            log.eval(step, Evaluation(loss=4.0 / step, perplexity=1.0, tokens=1, seconds=0.0))
    log.close()
    return run


def drawn(run: Path) -> dict[str, list[tuple[list[float], list[float]]]]:
    """Return what the figure's lines hold, by the title of their panel."""
    figure = draw(panels(read_log(run / "log.jsonl")), run.name)
    return {
        axes.get_title(): [(list(line.get_xdata()), list(line.get_ydata())) for line in axes.get_lines()]
        for axes in figure.axes
    }


def test_the_curves_are_the_numbers_of_the_log(tmp_path: Path) -> None:
    lines = drawn(make_run(tmp_path / "run"))
    steps = [1, 2, 3, 4, 5, 6]
    finite = [1, 2, 4, 5, 6]
    assert lines == {
        "loss": [(finite, [3.0 / s for s in finite]), ([2, 4, 6], [4.0 / s for s in (2, 4, 6)])],
        "learning rate": [(steps, [1e-3 / s for s in steps])],
        "gradient norm": [(steps, [0.1 * s for s in steps])],
        "memory of a step, GB": [(steps, [s * 10**9 * 1e-9 for s in steps])],
    }


def test_another_log_gives_other_curves(tmp_path: Path) -> None:
    """The control of the test above."""
    assert drawn(make_run(tmp_path / "a", 6)) != drawn(make_run(tmp_path / "b", 7))


def test_a_run_without_evaluations_has_one_curve_of_loss(tmp_path: Path) -> None:
    assert len(drawn(make_run(tmp_path, 1))["loss"]) == 1


def test_the_picture_is_a_png_and_the_same_bytes_each_time(tmp_path: Path) -> None:
    run = make_run(tmp_path / "run")
    plot_run(run, tmp_path / "a.png")
    plot_run(run / "log.jsonl", tmp_path / "c.png")
    code = (
        "import sys\nfrom pathlib import Path\nfrom ckptkit.train.plot import plot_run\n"
        "plot_run(*map(Path, sys.argv[1:]))"
    )
    subprocess.run([sys.executable, "-c", code, str(run), str(tmp_path / "b.png")], check=True)
    one = (tmp_path / "a.png").read_bytes()
    assert one[:8] == b"\x89PNG\r\n\x1a\n"
    assert one == (tmp_path / "b.png").read_bytes()
    assert one != (tmp_path / "c.png").read_bytes(), "the control: another title"
    assert sorted(path.name for path in tmp_path.iterdir()) == ["a.png", "b.png", "c.png", "run"]


def test_a_log_without_lines_or_without_a_file_is_refused_in_words(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="cannot read"):
        plot_run(tmp_path, tmp_path / "a.png")
    log = open_log(Settings(), tmp_path, 0, io.StringIO())
    log.note("nothing yet")
    log.close()
    with pytest.raises(UsageError, match="has no step to draw"):
        plot_run(tmp_path, tmp_path / "a.png")
    assert not (tmp_path / "a.png").exists()


def test_a_picture_that_cannot_be_written_is_an_error_in_words(tmp_path: Path) -> None:
    run = make_run(tmp_path / "run")
    with pytest.raises(ResourceError, match="cannot write"):
        plot_run(run, tmp_path / "none/a.png")


def test_without_matplotlib_it_says_what_to_install(tmp_path: Path) -> None:
    run = make_run(tmp_path / "run")
    code = (
        "import sys\nsys.modules['matplotlib'] = None\nfrom pathlib import Path\n"
        "from ckptkit.errors import UsageError\nfrom ckptkit.train.plot import plot_run\n"
        "try:\n    plot_run(Path(sys.argv[1]), Path('a.png'))\nexcept UsageError as error:\n    print(error)"
    )
    done = subprocess.run(
        [sys.executable, "-c", code, str(run)], capture_output=True, text=True, check=True, cwd=tmp_path
    )
    assert "needs the package `matplotlib`" in done.stdout and "ckptkit-mindspore[train]" in done.stdout


def test_drawing_is_imported_where_it_is_done() -> None:
    code = (
        "import sys, ckptkit.train.plot, ckptkit.train.log\n"
        "print({'matplotlib', 'numpy', 'pydantic'} & sys.modules.keys())"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == "set()\n"
