"""Run the code cells of notebooks in order, each notebook in one namespace, without Jupyter.

For machines that have Python, the repository and perhaps a GPU, but no kernel and no network. Cells
see what a kernel would give them but for IPython itself: no magics, no rich output, no value of a
cell's last line. Working directory is the notebook's, and commands that cells start find the
repository's package.

    python scripts/run_notebook.py notebooks/02_gpu_verification.ipynb [...]

Exits with 1 at the first cell that raises, and names it. What processes the cells have left running
in their namespace are ended.
"""

import argparse
import json
import os
import subprocess
import sys
import time
import traceback
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
PATIENCE = 30.0  # seconds that a process has to end before it is killed


def code_cells(path: Path) -> list[tuple[int, str]]:
    """Return number (counted from 1 over all cells) and source of each code cell."""
    cells = json.loads(path.read_text())["cells"]
    return [(i, "".join(c["source"])) for i, c in enumerate(cells, 1) if c["cell_type"] == "code"]


def run(path: Path) -> bool:
    """Run a notebook; returns whether every cell ran through."""
    os.chdir(path.parent)
    namespace: dict[str, Any] = {"__name__": "__main__"}
    try:
        for number, source in code_cells(path):
            print(f"\n--- {path.name}, cell {number}", flush=True)
            start = time.perf_counter()
            try:
                exec(compile(source, f"{path.name}, cell {number}", "exec"), namespace)
            except Exception:
                traceback.print_exc()
                print(f"FAILED: {path.name}, cell {number}", flush=True)
                return False
            print(f"--- {time.perf_counter() - start:.1f} s", flush=True)
        return True
    finally:
        for value in namespace.values():
            if isinstance(value, subprocess.Popen):
                _end(value)


def _end(process: subprocess.Popen[Any]) -> None:
    process.terminate()
    try:
        process.wait(PATIENCE)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()


def main(argv: list[str] | None = None) -> int:
    """Run the command; returns the exit code."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("notebooks", nargs="+", type=Path, metavar="FILE")
    paths = [p.resolve() for p in parser.parse_args(argv).notebooks]
    given = os.environ.get("PYTHONPATH")
    os.environ["PYTHONPATH"] = str(ROOT) + (os.pathsep + given if given else "")
    return int(not all(run(path) for path in paths))


if __name__ == "__main__":
    sys.exit(main())
