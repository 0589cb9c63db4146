"""The index is whole: no item or case is missing, and every test it names exists."""

import ast
from functools import cache
from pathlib import Path

import pytest
from cases import CASES, NOT_TESTED, PARTLY
from contract import ITEMS

TESTS = Path(__file__).resolve().parents[1]
CASE_IDS = [
    f"C{number:03}"
    for number in (
        1, 2, 4, 5, 6, 7, 9, 11, 14, 15, 17, 18, 19, 22, 23, 25, 26, 27, 28, 29, 31, 32, 33, 35,
        37, 39, 40, 42, 43, 44, 46, 48, 50, 51, 53, 54, 56, 57, 60, 61, 63, 65, 66, 67, 68, 69,
        71, 72, 75, 76, 78, 79, 80, 82, 83, 85, 87, 88, 90, 91, 93, 95, 96, 97, 98, 101, 102,
        103, 105, 106, 108, 110, 112, 113, 114, 117, 118, 119, 120, 121, 123, 125, 127, 129,
        130, 131, 132, 134, 135, 137, 139, 140
    )
]  # fmt: skip


@cache
def functions_of(path: Path) -> dict[str, ast.FunctionDef]:
    """The test functions of a file by name."""
    functions = (n for n in ast.parse(path.read_text()).body if isinstance(n, ast.FunctionDef))
    return {f.name: f for f in functions if f.name.startswith("test_")}


def test_items_are_those_of_the_contract_in_its_order():
    assert list(ITEMS) == list(range(1, 56))


def test_every_case_has_tests_or_a_reason():
    assert sorted([*CASES, *NOT_TESTED]) == CASE_IDS
    assert set(PARTLY) <= set(CASES)


@pytest.mark.parametrize(
    ("name", "node_ids"),
    [*((str(number), tests) for number, (_, tests) in ITEMS.items()), *CASES.items()],
    ids=[*map(str, ITEMS), *CASES],
)
def test_named_tests_exist_and_run_by_default(name, node_ids):
    assert node_ids and len(set(node_ids)) == len(node_ids)
    for node_id in node_ids:
        path, _, function = node_id.partition("::")
        assert function in functions_of(TESTS / path), node_id
        marks = {ast.unparse(d) for d in functions_of(TESTS / path)[function].decorator_list}
        assert not marks & {"pytest.mark.slow", "pytest.mark.gpu", "pytest.mark.skip"}, node_id
