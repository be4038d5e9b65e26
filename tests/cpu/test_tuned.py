"""Forms that a user's calls were timed to want: who takes them, who does not, and what is said of it."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest
import torch

from composattn.__main__ import main
from composattn.analysis.program import Program
from composattn.backends.fused.compiling import disk_cache, tuned
from composattn.backends.fused.compiling.tuned import Tuned
from composattn.backends.fused.planning.tables import first
from composattn.backends.fused.tiles.target import HOPPER
from composattn.backends.hopper.backward_choice import backward_facts, choose_backward
from composattn.backends.hopper.forward_choice import choose_forward, forward_facts
from composattn.backends.hopper.tiling import TABLES
from composattn.call.problem import Problem
from composattn.call.schedule import Schedule

CALL = Problem(4, 16, 16, 2048, 2048, 128, 128, torch.bfloat16, torch.device("cpu"))
FASTER = Tuned("large", "large, stays", 1.07, "a GPU")


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv(disk_cache.VARIABLE, str(tmp_path / "cache"))
    return tmp_path / "cache"


def key(problem: Problem = CALL) -> str:
    return tuned.key_of(forward_facts(problem, Program(), HOPPER))


def test_a_call_takes_the_form_that_was_fastest_here_and_says_so() -> None:
    assert choose_forward(CALL, Program(), HOPPER).tiling.persistent
    tuned.keep({key(): FASTER})
    assert not choose_forward(CALL, Program(), HOPPER).tiling.persistent
    words = choose_forward(CALL, Program(), HOPPER).words
    said = first(TABLES["forms"], forward_facts(CALL, Program(), HOPPER))
    assert str(said) != FASTER.form
    found = f"form: large; tuned: +7.0% over large, stays, timed on this machine (a GPU); the tables say {said}"
    assert found in words


def test_so_does_a_backward() -> None:
    call = backward_facts(CALL, Program(), HOPPER, False)
    tuned.keep({tuned.key_of(call): dataclasses.replace(FASTER, form="64 queries, blocks stay")})
    assert choose_backward(CALL, Program(), HOPPER, False).tiling.tile_m == 64
    assert choose_backward(CALL, Program(), HOPPER, True).tiling.tile_m == 80, "in a fixed order nobody timed it"
    assert "form: 64 queries, blocks stay; tuned: +7.0%" in choose_backward(CALL, Program(), HOPPER, False).words


@pytest.mark.parametrize(
    "changes", [{"batch": 5}, {"kv_len": 2049}, {"dtype": torch.float16}, {"schedule": Schedule(batch_invariant=True)}]
)
def test_other_calls_keep_the_forms_of_the_table(changes: dict[str, object]) -> None:
    other = dataclasses.replace(CALL, **changes)  # type: ignore[arg-type]
    before = choose_forward(other, Program(), HOPPER).tiling
    tuned.keep({key(): FASTER})
    assert choose_forward(other, Program(), HOPPER).tiling == before


def test_a_form_that_cuts_no_such_call_any_more_is_passed_by() -> None:
    before = choose_forward(CALL, Program(), HOPPER).tiling
    tuned.keep({key(): dataclasses.replace(FASTER, form="documents")})
    assert choose_forward(CALL, Program(), HOPPER).tiling == before


def test_a_file_that_others_could_have_written_says_nothing(folder: Path) -> None:
    tuned.keep({key(): FASTER})
    folder.chmod(0o777)
    tuned._read.cache_clear()
    assert choose_forward(CALL, Program(), HOPPER).tiling.persistent


@pytest.mark.parametrize(
    "damage", ["", '{"a": {"form": "x"', "[]", '{"a": 3}', '{"a": {"form": "x", "speed": 2}}', "\xff"]
)
def test_a_file_that_is_cut_off_or_of_another_version_says_nothing(folder: Path, damage: str) -> None:
    tuned.keep({key(): FASTER}).write_text(damage, encoding="latin1")
    tuned._read.cache_clear()
    with pytest.warns(UserWarning, match=r"tuned\.json can't be read"):
        assert choose_forward(CALL, Program(), HOPPER).tiling.persistent
    path = tuned.keep({key(): FASTER})
    assert set(tuned.kept(path)) == {key()}


def test_what_is_kept_is_added_to_what_was() -> None:
    tuned.keep({"one": FASTER})
    path = tuned.keep({"two": FASTER})
    assert set(tuned.kept(path)) == {"one", "two"}


def test_forms_are_asked_for_and_candidates_told_apart_by_their_tilings() -> None:
    with tuned.asking(forward="large") as asked:
        assert not choose_forward(CALL, Program(), HOPPER).tiling.persistent
    (names,) = asked.met.values()
    assert names[:1] == ["large, guesses, stays"] or names[0] == "large, stays"
    assert len(names) == len(set(names)) > 2
    assert choose_forward(CALL, Program(), HOPPER).tiling.persistent, "outside nobody asks"


@pytest.mark.skipif(torch.cuda.is_available(), reason="says what a machine with no GPU says")
def test_with_no_gpu_tune_is_refused_by_name(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["tune"]) == 1
    assert "BackendUnavailable: composattn tune times kernels, and there is no GPU here" in capsys.readouterr().err
