"""Notebooks run without Jupyter, and a failing cell is named."""

import json
import os
import time
from pathlib import Path

import pytest
import run_notebook


@pytest.fixture
def notebook(tmp_path, monkeypatch):
    """A function that writes a notebook of these code cells, each behind one of prose."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PYTHONPATH", "elsewhere")  # put back afterwards

    def write(*cells):
        both = [(kind, s) for s in cells for kind, s in (("markdown", "*prose*"), ("code", s))]
        listed = [{"cell_type": k, "source": s.splitlines(keepends=True)} for k, s in both]
        path = tmp_path / "folder" / "test.ipynb"
        path.parent.mkdir(exist_ok=True)
        path.write_text(json.dumps({"cells": listed}))
        return str(path)

    return write


def test_cells_run_in_order_in_one_namespace_and_in_the_notebooks_folder(notebook, capsys):
    path = notebook(
        "import os\nx = [1]", "def add(y):\n    x.append(y)\n    return x", "print(add(2))"
    )
    assert run_notebook.main([path]) == 0
    out = capsys.readouterr().out
    assert "[1, 2]" in out and out.index("cell 2") < out.index("cell 4") < out.index("cell 6")
    path = notebook("from pathlib import Path\nassert Path.cwd().name == 'folder'", "x = 1")
    assert run_notebook.main([path, path]) == 0  # nothing of the first is left in the second


def test_the_first_cell_that_raises_ends_it_and_is_named(notebook, capsys):
    path = notebook("print('before')", "\n\n1 / 0", "print('behind')")
    assert run_notebook.main([path, path]) == 1
    captured = capsys.readouterr()
    assert "FAILED: test.ipynb, cell 4" in captured.out
    assert 'cell 4", line 3' in captured.err and "ZeroDivisionError" in captured.err
    assert captured.out.count("before") == 1 and "behind" not in captured.out


def test_commands_of_cells_find_the_package(notebook):
    """Also where it is not installed, and what was on the path stays there."""
    check = "import pageserve, sys; assert any(p.endswith('elsewhere') for p in sys.path)"
    path = notebook(
        f"import subprocess, sys\nsubprocess.run([sys.executable, '-c', {check!r}], check=True)"
    )
    assert run_notebook.main([path]) == 0


def test_processes_left_running_are_ended(notebook):
    cells = (
        "import subprocess, sys",
        "p = subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(99)'])",
        "open('pid', 'w').write(str(p.pid))",
        "1 / 0",
    )
    start = time.monotonic()
    assert run_notebook.main([notebook(*cells)]) == 1
    assert time.monotonic() - start < 20
    with pytest.raises(ProcessLookupError):
        os.kill(int(Path("pid").read_text()), 0)
