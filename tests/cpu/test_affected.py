"""Which tests a change can break: by what they used when last recorded, and by imports where no record says."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests import affected, reached
from tests.affected import Tree
from tests.rooms import ROOT

TREE = Tree(
    {
        "composattn/__init__.py": "",
        "composattn/limits.py": "MOST = 3\n\n\ndef least():\n    return 1\n",
        "composattn/twice.py": "from .limits import MOST\n\nTWICE = 2 * MOST\n",
        "composattn/calls.py": "from .twice import TWICE\n\n\ndef call():\n    return TWICE\n",
        "composattn/small.py": "from .limits import least\n\n\ndef small():\n    return least()\n",
        "composattn/late.py": "def late():\n    from .kernel import Kernel\n    return Kernel()\n",
        "composattn/kernel.py": "class Kernel:\n    tile: int = 3\n",
        "tests/test_calls.py": "from composattn.calls import call\n",
        "tests/test_small.py": "from composattn.small import small\n",
        "tests/test_late.py": "from composattn.late import late\n",
        "tests/test_limits.py": "from composattn.limits import least\n",
    }
)
RECORD = {
    "tests/test_calls.py": {"tests/test_calls.py", "composattn/calls.py"},
    "tests/test_small.py": {"tests/test_small.py", "composattn/small.py", "docs/page.md"},
    "tests/test_late.py": {"tests/test_late.py", "composattn/late.py"},
    "tests/test_limits.py": {"tests/test_limits.py", "composattn/limits.py"},
}


@pytest.mark.parametrize(
    ("changed", "broken"),
    [
        ("composattn/calls.py", ["calls"]),
        ("composattn/limits.py", ["calls", "limits"]),  # its constant makes another file's
        ("composattn/kernel.py", ["late"]),  # imported inside of a function, no method ran, but a field may count
        ("docs/page.md", ["small"]),
        ("tests/test_small.py", ["small"]),
        ("tests/conftest.py", ["calls", "small", "late", "limits"]),
        ("composattn/gone.py", []),
    ],
)
def test_those_that_used_a_changed_file_or_what_is_made_of_its_data(changed: str, broken: list[str]) -> None:
    assert affected.affected([changed], TREE, RECORD) == [f"tests/test_{name}.py" for name in broken]


def test_a_test_that_was_never_recorded_uses_all_that_it_imports() -> None:
    record = {name: files for name, files in RECORD.items() if "late" not in name}
    assert affected.affected(["composattn/kernel.py"], TREE, record) == ["tests/test_late.py"]
    assert len(affected.affected(["composattn/limits.py"], TREE, {})) == 3


def test_one_that_opens_files_and_was_never_recorded_may_use_any() -> None:
    tree = Tree({"tests/test_pages.py": 'from tests.rooms import ROOT\ntext = (ROOT / "README.md").read_text()\n'})
    assert affected.affected(["README.md"], tree, {}) == ["tests/test_pages.py"]
    assert affected.affected(["README.md"], tree, {"tests/test_pages.py": set()}) == []


def test_a_file_that_is_new_is_used_by_who_uses_what_imports_it() -> None:
    record = RECORD | {"tests/test_small.py": {"tests/test_small.py", "composattn/small.py", "composattn/calls.py"}}
    assert affected.affected(["composattn/twice.py"], TREE, record) == ["tests/test_calls.py", "tests/test_small.py"]


def test_what_runs_and_what_is_read_is_recorded_and_nothing_else(tmp_path: Path) -> None:
    recorder, here = reached.Recorder(), Path(__file__)
    with recorder.test(here):
        assert Tree({"a.py": "import b\n", "b.py": ""}).closure("a.py") == {"a.py", "b.py"}
        (ROOT / "LICENSE").read_text()
    used = recorder.used[str(here.relative_to(ROOT))]
    assert {"tests/affected.py", "LICENSE"} <= used
    assert "tests/rooms.py" in used, "what it calls ran too"
    assert "tests/support.py" not in used and not any(name.startswith("/") for name in used)

    kept = tmp_path / "reached.json"
    reached.keep(recorder.used, kept)
    assert reached.recorded(kept) == recorder.used
    reached.keep({}, kept)
    assert reached.recorded(kept) == recorder.used, "what did not run again is known from before"
