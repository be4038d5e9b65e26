"""The disk cache: its key has all that decides a kernel, its entries come back whole, its folder is the user's own."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import time
import warnings
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from composattn.backends.fused.compiling import compile as compiling
from composattn.backends.fused.compiling import disk_cache, toolchain
from composattn.errors import BackendUnavailable

ROOT = Path(__file__).parents[2]


# --- the key ----------------------------------------------------------------------------------------------------


def test_the_key_changes_with_every_file_that_compiling_can_reach(tmp_path: Path) -> None:
    copy = tmp_path / "composattn"
    shutil.copytree(toolchain.PACKAGE, copy)
    first = toolchain.source_hash(copy)
    files = [p for p in copy.rglob("*.*") if p.suffix in (".py", ".json")]
    reached = [p for p in files if p.relative_to(copy).parts[0] not in ("emulator", "testing")]
    planned = ("backends/fused/planning/plan.py", "backends/hopper/forward.py", "backends/hopper/forward.json")
    known = ("graph/gradient.py", "analysis/solve.py", *planned)
    assert {copy / name for name in known} < set(reached)
    unseen = []
    for path in reached:
        text = path.read_bytes()
        path.write_bytes(text + b"\n")
        if toolchain.source_hash(copy) == first:
            unseen.append(path)
        path.write_bytes(text)
    assert unseen == []


def test_planning_and_gradients_reach_nothing_that_the_key_leaves_out() -> None:
    # with no kernel language: what plans and graphs import; tests/compile asks the same of compiling itself
    code = (
        "import sys, torch, composattn as ca; from composattn.backends.fused.compiling import toolchain;"
        "from composattn.backends.fused.planning import plan_backward;"
        "from composattn.backends.fused.tiles.target import HOPPER; q = torch.empty(1, 1, 64, 64, dtype=torch.float16);"
        "attn = ca.Attention(score_mod=ca.mods.softcap(3.0));"
        "plan_backward.plan_backward(ca.call.problem.Problem.of(q, q, q), attn.program, HOPPER);"
        "files = {m.__file__ for n, m in sys.modules.items() if n.split('.')[0] == 'composattn'};"
        "print(sorted(files - {str(p) for p in toolchain.sources()}))"
    )
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=False)
    assert (done.stdout.strip(), done.returncode) == ("[]", 0), done.stderr


def test_a_renamed_file_is_another_source(tmp_path: Path) -> None:
    (tmp_path / "a.py").write_text("x = 1\n")
    first = toolchain.source_hash(tmp_path)
    (tmp_path / "a.py").rename(tmp_path / "b.py")
    assert toolchain.source_hash(tmp_path) != first


def test_the_key_sees_what_the_kernel_language_reads_from_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    plan: Any = SimpleNamespace(key="a plan", target=SimpleNamespace(arch="sm_90a"))
    plain = compiling.content_hash(plan)
    for name, value in (("CUTE_DSL_COMPILER_OPT", "remarks"), ("CUTE_DSL_LINEINFO", "1"), ("CUTE_DSL_ARCH", "sm_80")):
        with monkeypatch.context() as changed:
            changed.setenv(name, value)
            assert compiling.content_hash(plan) != plain, name
    with monkeypatch.context() as changed:  # as the plan's target says anyway
        changed.setenv("CUTE_DSL_ARCH", "sm_90a")
        assert compiling.content_hash(plan) == plain


@pytest.mark.parametrize("name", ["processor", "versions", "source_hash"])
def test_the_key_sees(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    before = toolchain._of_process.__wrapped__()
    monkeypatch.setattr(toolchain, name, lambda: "another")
    assert toolchain._of_process.__wrapped__() != before


def test_the_processor_is_told_by_its_instruction_sets(monkeypatch: pytest.MonkeyPatch) -> None:
    def told(flags: str, clock: str = "2000") -> str:
        text = f"processor : 0\nmodel name : a chip\ncpu MHz : {clock}\nflags : {flags}\n\nprocessor : 1\n"
        monkeypatch.setattr(Path, "read_text", lambda self: text)
        return toolchain.processor()

    assert told("sse2 avx2") != told("sse2 avx2 avx512f")
    assert told("sse2 avx2", "2000") == told("sse2 avx2", "3100")


# --- entries ----------------------------------------------------------------------------------------------------


def test_an_entry_comes_back_as_it_was_put(tmp_path: Path) -> None:
    kept = disk_cache.put(tmp_path, "key", ".so", b"machine code")
    assert disk_cache.get(tmp_path, "key", ".so") == kept
    assert kept.read_bytes() == b"machine code"
    assert disk_cache.get(tmp_path, "key", ".o") is None
    assert disk_cache.get(tmp_path, "other", ".so") is None


@pytest.mark.parametrize("damage", [lambda b: b[:-1], lambda b: b"", lambda b: bytes([b[0] ^ 1]) + b[1:]])
def test_a_damaged_entry_is_noticed_and_removed(tmp_path: Path, damage: Any) -> None:
    kept = disk_cache.put(tmp_path, "key", ".ptx", b"machine code")
    kept.write_bytes(damage(b"machine code"))
    with pytest.warns(UserWarning, match=r"compiling again: .* is damaged"):
        assert disk_cache.get(tmp_path, "key", ".ptx") is None
    assert not kept.exists()


def test_an_entry_that_cannot_be_read_is_compiled_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    kept = disk_cache.put(tmp_path, "key", ".so", b"machine code")

    def gone(path: Path) -> bytes:
        kept.unlink()  # by another process, between a look at the folder and this one
        raise FileNotFoundError(path)

    monkeypatch.setattr(Path, "read_bytes", gone)
    with pytest.warns(UserWarning, match=r"compiling again: .* can't be read"):
        assert disk_cache.get(tmp_path, "key", ".so") is None


def test_what_a_killed_writer_left_goes_and_what_others_write_now_stays(tmp_path: Path) -> None:
    left, now = tmp_path / ".writing" / "left", tmp_path / ".writing" / "now"
    for folder in (left, now):
        folder.mkdir(parents=True)
        (folder / "kernel.so").write_bytes(b"half")
    long_ago = time.time() - 2 * 3600
    os.utime(left, (long_ago, long_ago))
    disk_cache.put(tmp_path, "key", ".so", b"machine code")
    assert [p.name for p in (tmp_path / ".writing").iterdir()] == ["now"]


def test_a_writer_that_fails_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: Any) -> None:
        raise OSError("no space left on device")

    monkeypatch.setattr(os, "replace", full)
    with pytest.warns(UserWarning, match="no space left"), pytest.raises(OSError, match="no space left"):
        disk_cache.put(tmp_path, "key", ".so", b"machine code")
    assert [p for p in tmp_path.rglob("*") if p.is_file()] == []


# --- the folder -------------------------------------------------------------------------------------------------


@pytest.fixture
def at(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    place = tmp_path / "cache"
    monkeypatch.setenv("COMPOSATTN_CACHE_DIR", str(place))
    return place


def test_the_folder_is_made_for_its_user_alone(at: Path) -> None:
    assert disk_cache.usable() == at
    assert at.stat().st_mode & 0o777 == 0o700


@pytest.mark.parametrize("mode", [0o777, 0o770, 0o720, 0o1777])
def test_a_folder_that_others_can_write_to_is_not_used(at: Path, mode: int) -> None:
    at.mkdir()
    at.chmod(mode)
    with pytest.warns(UserWarning, match="others can write to it"):
        used = disk_cache.usable()
    assert used == disk_cache.of_process() != at
    assert used.stat().st_mode & 0o777 == 0o700


def test_a_folder_that_others_can_read_is_used(at: Path) -> None:
    at.mkdir(mode=0o755)
    assert disk_cache.usable() == at


def test_a_folder_of_another_user_is_not_used(at: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    at.mkdir()
    owner = at.stat().st_uid
    monkeypatch.setattr(os, "getuid", lambda: owner + 1)
    facts = SimpleNamespace(st_mode=at.stat().st_mode, st_uid=owner + 2)
    assert "belongs to user" in str(disk_cache._distrusted(facts))  # type: ignore[arg-type]
    assert disk_cache._distrusted(SimpleNamespace(st_mode=facts.st_mode, st_uid=0)) is None  # type: ignore[arg-type]


def test_a_folder_is_not_used_below_one_where_everyone_can_write(at: Path) -> None:
    at.parent.chmod(0o777)
    with pytest.warns(UserWarning, match="everyone can write to .* put another folder in its place"):
        assert disk_cache.usable() == disk_cache.of_process()
    at.parent.chmod(0o1777)  # as /tmp: only its owner moves what lies there
    assert disk_cache.usable() == at


@pytest.mark.skipif(os.getuid() != 0, reason="only root gives files away")
def test_a_folder_is_not_used_that_a_link_or_a_folder_of_another_user_leads_to(at: Path, tmp_path: Path) -> None:
    (tmp_path / "elsewhere").mkdir(mode=0o700)
    at.symlink_to(tmp_path / "elsewhere")
    assert disk_cache.usable() == at, "a link of one's own"
    os.lchown(at, 12345, -1)
    assert f"{at} is a link of user 12345" in str(disk_cache.unusable(at))
    at.unlink()
    os.chown(tmp_path, 12345, -1)
    assert f"{tmp_path} belongs to user 12345" in str(disk_cache.unusable(at))


@pytest.mark.parametrize("mode", [0o620, 0o602, 0o666])
def test_an_entry_that_others_can_write_to_is_not_loaded(tmp_path: Path, mode: int) -> None:
    kept = disk_cache.put(tmp_path, "key", ".so", b"machine code")
    kept.chmod(mode)
    with pytest.warns(UserWarning, match="compiling again: others can write to"):
        assert disk_cache.get(tmp_path, "key", ".so") is None
    kept.chmod(0o600)
    kept.parent.chmod(0o770)
    with pytest.warns(UserWarning, match="compiling again: others can write to"):
        assert disk_cache.get(tmp_path, "key", ".so") is None


def test_what_is_compiled_again_is_found_by_the_next_process(tmp_path: Path) -> None:
    kept = disk_cache.put(tmp_path, "key", ".so", b"machine code of others")
    kept.parent.chmod(0o775)  # as copies of a folder leave it that share a group's umask
    made = disk_cache.put(tmp_path, "key", ".so", b"machine code")
    assert disk_cache.get(tmp_path, "key", ".so") == made
    assert not kept.exists() and made.parent.stat().st_mode & 0o777 == 0o700


def test_an_entry_is_no_link(tmp_path: Path) -> None:
    kept = disk_cache.put(tmp_path, "key", ".so", b"machine code")
    kept.rename(tmp_path / "moved.so")
    kept.symlink_to(tmp_path / "moved.so")
    with pytest.warns(UserWarning, match="is a link"):
        assert disk_cache.get(tmp_path, "key", ".so") is None


def test_entries_are_written_for_their_user_alone_whatever_the_umask_is(tmp_path: Path) -> None:
    before = os.umask(0)
    try:
        kept = disk_cache.put(tmp_path, "key", ".so", b"machine code")
    finally:
        os.umask(before)
    assert not (kept.stat().st_mode | kept.parent.stat().st_mode) & 0o022
    assert disk_cache.get(tmp_path, "key", ".so") == kept


def test_a_file_in_place_of_the_folder_is_said(at: Path) -> None:
    at.write_text("")
    with pytest.warns(UserWarning, match="compiled kernels are not kept"):
        assert disk_cache.usable() == disk_cache.of_process()


def test_a_tilde_is_the_home(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("COMPOSATTN_CACHE_DIR", "~/kernels")
    assert disk_cache.folder() == tmp_path / "kernels"
    monkeypatch.delenv("COMPOSATTN_CACHE_DIR")
    assert disk_cache.folder() == tmp_path / ".cache" / "composattn"


@pytest.mark.parametrize("home", [None, ""])
def test_a_user_with_no_home_and_no_passwd_entry_has_a_folder(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, home: str | None
) -> None:
    import pwd

    def unknown(uid: int) -> Any:
        raise KeyError(f"uid not found: {uid}")

    monkeypatch.setattr(pwd, "getpwuid", unknown)
    monkeypatch.delenv("HOME") if home is None else monkeypatch.setenv("HOME", home)
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    for asked in ("", "~/kernels"):
        monkeypatch.setenv("COMPOSATTN_CACHE_DIR", asked)
        assert disk_cache.usable() == tmp_path / f"composattn-{os.getuid()}"


# --- compiling through it ---------------------------------------------------------------------------------------


class Compiler:
    """Stands for the kernel language: `made` are the plans that it compiled."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.made: list[Any] = []
        self.monkeypatch = monkeypatch
        monkeypatch.setattr(compiling, "_run_compiler", self.compile)
        monkeypatch.setattr(compiling, "_linked", lambda made: None)
        self.loads_with(self.load)

    def loads_with(self, library: Any, object_file: Any = None) -> None:
        """From now on; what loads object files is as at first if it is not given."""
        loads = {".so": library, ".o": object_file or self.load}
        self.monkeypatch.setattr(compiling, "_LOADERS", loads)
        self.monkeypatch.setattr(compiling, "_load_library", loads[".so"])
        self.monkeypatch.setattr(compiling, "_load_object", loads[".o"])

    def compile(self, plan: Any, text: Path | None = None) -> Any:
        self.made.append(plan)
        return SimpleNamespace(export_to_c=lambda path, symbol: Path(path).write_text(plan.key))

    @staticmethod
    def load(path: Path) -> Any:
        return path.read_text


def kernel_of_new_process(key: str) -> str:
    compiling._compiled.clear()
    plan: Any = SimpleNamespace(key=key, title=f"forward {key}", target=SimpleNamespace(arch="sm_90a"))
    return str(compiling.compile_plan(plan)())


@pytest.fixture
def compiler(monkeypatch: pytest.MonkeyPatch) -> Compiler:
    monkeypatch.setattr(compiling, "_compiled", {})
    return Compiler(monkeypatch)


def test_a_new_process_compiles_nothing_that_is_kept(at: Path, compiler: Compiler) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert [kernel_of_new_process(key) for key in "aab"] == ["a", "a", "b"]
    assert [plan.key for plan in compiler.made] == ["a", "b"]


def test_the_log_says_what_is_compiled_and_where_it_is_kept(
    at: Path, compiler: Compiler, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO", "composattn")
    assert [kernel_of_new_process("a") for _ in range(2)] == ["a", "a"]
    begun, done = caplog.messages  # the second time nothing is compiled
    assert begun == "compiling forward a"
    assert re.fullmatch(rf"compiled forward a: \d+\.\d s, kept in {re.escape(str(at))}", done)


def test_a_damaged_kernel_is_compiled_again(at: Path, compiler: Compiler) -> None:
    kernel_of_new_process("a")
    (kept,) = at.rglob("kernel-*")
    kept.write_text("b")
    with pytest.warns(UserWarning, match="is damaged"):
        assert kernel_of_new_process("a") == "a"
    assert kernel_of_new_process("a") == "a"
    assert len(compiler.made) == 2


def test_a_kernel_that_cannot_be_loaded_is_compiled_again(at: Path, compiler: Compiler) -> None:
    kernel_of_new_process("a")

    def fails(path: Path) -> Any:
        compiler.loads_with(compiler.load)
        raise OSError("libgone.so: no such file")

    compiler.loads_with(compiler.load, fails)
    with pytest.warns(UserWarning, match=r"compiling again: .* can't be loaded \(libgone"):
        assert kernel_of_new_process("a") == "a"
    assert len(compiler.made) == 2


def test_an_object_file_is_kept_where_the_folder_takes_no_libraries(
    at: Path, compiler: Compiler, monkeypatch: pytest.MonkeyPatch
) -> None:
    def noexec(path: Path) -> Any:
        raise OSError("failed to map segment from shared object")

    monkeypatch.setattr(compiling, "_linked", lambda made: made)
    compiler.loads_with(noexec)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert [kernel_of_new_process("a") for _ in range(2)] == ["a", "a"]
    assert [p.suffix for p in at.rglob("kernel-*")] == [".o"]
    assert len(compiler.made) == 1


def test_a_kernel_that_can_be_written_nowhere_is_refused_by_name(
    at: Path, compiler: Compiler, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: Any) -> None:
        raise OSError("no space left on device")

    monkeypatch.setattr(os, "replace", full)
    with pytest.warns(UserWarning, match="no space left"), pytest.raises(BackendUnavailable, match="set TMPDIR"):
        kernel_of_new_process("a")


def test_nothing_is_taken_from_or_left_in_a_folder_of_others(at: Path, compiler: Compiler) -> None:
    kernel_of_new_process("a")
    (kept,) = at.rglob("kernel-*")
    at.chmod(0o777)
    with pytest.warns(UserWarning, match="others can write to it"):
        assert kernel_of_new_process("a") == "a"
    assert len(compiler.made) == 2
    assert list(at.rglob("kernel-*")) == [kept]
