"""What the project says of itself holds: import directions, file tree, tables."""

import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
README = (ROOT / "README.md").read_text()


def test_imports_go_one_way():
    """The contracts of pyproject.toml, as `lint-imports` checks them."""
    command = "from importlinter.cli import lint_imports_command as c; c()"
    done = subprocess.run([sys.executable, "-c", command], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout


def test_the_api_process_never_loads_torch():
    """A front-end that imports torch costs a second of start-up and a gigabyte of memory."""
    command = "import sys, pageserve.api.server; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", command], cwd=ROOT).returncode == 0


def test_file_tree_matches_the_disk():
    tree = README.split("## Files")[1].split("```")[1]
    named = set(re.findall(r"^  (\w[\w.]*/?) ", tree, re.M))
    there = {
        p.name + "/" * p.is_dir()
        for p in (ROOT / "pageserve").iterdir()
        if not p.name.startswith("__")
    }
    assert named == there


def test_named_tests_exist():
    for path in re.findall(r"`(tests/[\w/.]+)`", README):
        assert (ROOT / path).exists(), path


def test_tables_come_from_the_results():
    done = subprocess.run([sys.executable, "scripts/readme_tables.py", "--check"], cwd=ROOT)
    assert done.returncode == 0, "run python scripts/readme_tables.py"


@pytest.mark.parametrize("path", sorted((ROOT / "benchmarks").glob("*.py")), ids=lambda p: p.name)
def test_benchmarks_can_be_started(path):
    """Each command at least imports and prints its help from a checkout."""
    if "ArgumentParser" not in path.read_text():
        pytest.skip("takes no flags")
    done = subprocess.run(
        [sys.executable, str(path), "--help"], cwd=ROOT, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
