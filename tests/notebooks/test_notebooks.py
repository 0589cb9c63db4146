"""The notebooks run from top to bottom on a CPU; cells that need more say so and do nothing."""

import json
import sys
from pathlib import Path

import nbformat
import pytest
from nbclient import NotebookClient

NOTEBOOKS = Path(__file__).resolve().parents[2] / "notebooks"
SAYS = {  # something each prints, which shows that it got there
    "01_paged_kv_tour": [
        "24 of 27 tokens were cached",
        "copy block 2 to block",
        "same tokens: True",
    ],
    "02_gpu_verification": ["pageserve: installed"],
    "03_live_server": ["Paris", "vllm:generation_tokens_total", "ended with code 0"],
    "04_against_vllm": ["vLLM"],
}


@pytest.fixture
def kernel(tmp_path, monkeypatch):
    """A kernel of this very interpreter, whatever kernels the machine knows."""
    argv = [sys.executable, "-m", "ipykernel_launcher", "-f", "{connection_file}"]
    folder = tmp_path / "kernels" / "this-interpreter"
    folder.mkdir(parents=True)
    spec = {"argv": argv, "display_name": "this interpreter", "language": "python"}
    (folder / "kernel.json").write_text(json.dumps(spec))
    monkeypatch.setenv("JUPYTER_PATH", str(tmp_path))
    return folder.name


def test_every_notebook_is_listed():
    assert {p.stem for p in NOTEBOOKS.glob("*.ipynb")} == SAYS.keys()


@pytest.mark.parametrize("name", SAYS)
def test_notebook_runs(name, kernel):
    notebook = nbformat.read(NOTEBOOKS / f"{name}.ipynb", as_version=4)
    nbformat.validate(notebook)
    cells = [cell for cell in notebook.cells if cell.cell_type == "code"]
    assert not any(cell.outputs or cell.execution_count for cell in cells), "strip the outputs"
    resources = {"metadata": {"path": str(NOTEBOOKS)}}
    NotebookClient(notebook, timeout=240, kernel_name=kernel, resources=resources).execute()
    outputs = [output for cell in cells for output in cell.outputs]
    text = "".join(output.get("text", "") for output in outputs)
    for said in SAYS[name]:
        assert said in text
    if name.startswith("01"):
        pictures = [o for o in outputs if "image/png" in o.get("data", {})]
        assert len(pictures) >= 9
