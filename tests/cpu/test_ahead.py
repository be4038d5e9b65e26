"""Kernels compiled where no GPU is: what the command line keeps is what a first call on a device then loads."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

import composattn as ca
from composattn import backends
from composattn.__main__ import main
from composattn.backends.fused.compiling import compile as compiling
from composattn.backends.fused.compiling import inspect, toolchain
from composattn.backends.fused.tiles.target import TARGETS, Target
from composattn.mods import alibi, causal, document, neighborhood, sliding_window, softcap

GPU_OF = {target.arch: capability for capability, target in TARGETS.items()}
IDS = torch.arange(512) // 97
PICKED = torch.zeros(1, 1, 8, 2, dtype=torch.int32)


@pytest.fixture
def compiled(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> list[Any]:
    """The plans that a stand-in for the compiler was given; what it makes of them does nothing when it is called."""
    made: list[Any] = []

    def compile_it(plan: Any, text: Path | None = None) -> Any:
        made.append(plan)
        for suffix in ("ptx", "cubin") if text is not None else ():
            (text / f"kernel.{suffix}").write_text(f".entry it .reqntid 128 of {plan.key}")
        return SimpleNamespace(export_to_c=lambda path, symbol: Path(path).write_text(plan.key))

    def load(path: Path) -> Any:
        return lambda *given: None

    monkeypatch.setenv("COMPOSATTN_CACHE_DIR", str(tmp_path / "cache"))
    monkeypatch.setattr(compiling, "_run_compiler", compile_it)
    monkeypatch.setattr(compiling, "_linked", lambda object_file: None)
    monkeypatch.setattr(compiling, "_LOADERS", {".o": load})
    monkeypatch.setattr(compiling, "_load_object", load)
    monkeypatch.setattr(compiling, "_compiled", {})
    monkeypatch.setattr(inspect, "_binary_tool", lambda name: None)
    return made


def on_a_gpu(monkeypatch: pytest.MonkeyPatch, arch: str, sms: int) -> str:
    """CPU tensors seem to lie on a GPU of this machine code; the name of its backend."""
    major, minor = GPU_OF[arch]
    facts = SimpleNamespace(name="a GPU", major=major, minor=minor, multi_processor_count=sms, L2_cache_size=7)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: facts)
    backend = TARGETS[major, minor].backend
    there = dataclasses.replace(backends.BACKENDS[backend], unavailable=lambda device: None)
    monkeypatch.setitem(backends.BACKENDS, backend, there)
    return backend


def rows(*shape: int) -> torch.Tensor:
    return torch.zeros(shape, dtype=torch.bfloat16)


Call = Callable[[str], Any]


def call_of(mods: dict[str, Any], *tensors: torch.Tensor, **options: Any) -> Call:
    """A call of a backend, planned anew."""
    return lambda backend: ca.Attention(**mods, backend=backend)(*tensors, **options)


def dense(q_len: int = 512, *, asks: str | None = None, **mods: Any) -> Call:
    asked = {} if asks is None else {asks: True}
    return call_of(mods, rows(2, 4, q_len, 64), rows(2, 2, 512, 64), rows(2, 2, 512, 64), **asked)


def packed(*, used: bool = False, **mods: Any) -> Call:
    cu, some = torch.tensor([0, 512, 1024], dtype=torch.int32), torch.tensor([500, 3], dtype=torch.int32)
    given = ca.Varlen(cu, seqused_q=some, seqused_k=some) if used else ca.Varlen(cu)
    return call_of(mods, rows(1024, 4, 64), rows(1024, 2, 64), rows(1024, 2, 64), varlen=given)


def paged(q_len: int = 512, **mods: Any) -> Call:
    pages = ca.Paged(torch.zeros(2, 8, dtype=torch.int32), 64, torch.tensor([500, 3], dtype=torch.int32))
    return call_of(mods, rows(2, 4, q_len, 64), rows(40, 2, 64, 64), rows(40, 2, 64, 64), paged=pages)


def learning(**mods: Any) -> Call:
    q, k, v = (rows(2, heads, 512, 64).requires_grad_() for heads in (4, 2, 2))
    return lambda backend: call_of(mods, q, k, v)(backend).sum().backward()


LEARNED = torch.ones(4).requires_grad_()
SLOPES = alibi(LEARNED)
SHAPE, ONE_QUERY = ["--shape", "2,4,2,512,512,64"], ["--shape", "2,4,2,1,512,64"]
DOCUMENTS, BLOCKS = document(IDS) & causal(), ca.BlockSparse.topk(PICKED, 64, 512, 512)
CALLS: dict[str, tuple[list[str], Call]] = {
    # what is compiled, and the call that comes later
    "out-alone": (SHAPE, dense()),
    "with-lse": ([*SHAPE, "--lse"], dense(asks="return_lse")),
    "with-max-scores": ([*SHAPE, "--max-scores"], dense(asks="return_max_scores")),
    "window": ([*SHAPE, "--mask", "causal() & sliding_window(9)"], dense(mask_mod=causal() & sliding_window(9))),
    "alibi-softcap": ([*SHAPE, "--score", "alibi(4) >> softcap(3.0)"], dense(score_mod=alibi(4) >> softcap(3.0))),
    "documents": ([*SHAPE, "--mask", f"{__name__}:DOCUMENTS"], dense(mask_mod=document(IDS) & causal())),
    "lists": ([*SHAPE, "--mask", "neighborhood((16, 32), (9, 5))"], dense(mask_mod=neighborhood((16, 32), (9, 5)))),
    "block-sparse": ([*SHAPE, "--mask", f"{__name__}:BLOCKS"], dense(mask_mod=BLOCKS)),
    "packed": ([*SHAPE, "--varlen", "--mask", "causal()"], packed(mask_mod=causal())),
    "packed-used": ([*SHAPE, "--varlen", "--seqused"], packed(used=True)),
    "paged": ([*SHAPE, "--page-size", "64"], paged()),
    "one-query": ([*ONE_QUERY, "--page-size", "64"], paged(1)),
    "split": ([*ONE_QUERY, "--split-kv", "4"], dense(1, schedule=ca.Schedule(split_kv=4))),
    "gradient": ([*SHAPE, "--gradient", "--mask", "causal()"], learning(mask_mod=causal())),
    "learned-slopes": ([*SHAPE, "--gradient", "--score", f"{__name__}:SLOPES"], learning(score_mod=alibi(LEARNED))),
}


def first_call_compiles_nothing(
    compiled: list[Any], monkeypatch: pytest.MonkeyPatch, folder: Path, name: str, arch: str, sms: int
) -> set[str]:
    """Asserts it of a call on a device whose cache folder is what the command line wrote; says which kernels."""
    arguments, call = CALLS[name]
    assert main(["compile", "--target", arch, "--sms", str(sms), "--out", str(folder), *arguments]) == 0
    ahead = {plan.key: plan.step for plan in compiled}
    compiled.clear()
    monkeypatch.setenv("COMPOSATTN_CACHE_DIR", str(folder))
    call(on_a_gpu(monkeypatch, arch, sms))
    assert compiled == []
    assert len(compiling._compiled) == len(ahead)
    return set(ahead.values())


# of the GPUs that share kernels by day one
AHEAD = [(name, target.arch) for target in TARGETS.values() if target.backend != "warp" for name in CALLS]
AHEAD += [("out-alone", "sm_86"), ("paged", "sm_86"), ("gradient", "sm_86")]
AT_NIGHT = [(name, t.arch) for t in TARGETS.values() if t.backend == "warp" for name in CALLS]


@pytest.mark.parametrize(
    ("name", "arch"),
    [*AHEAD, *(pytest.param(*each, marks=pytest.mark.slow) for each in AT_NIGHT if each not in AHEAD)],
)
def test_the_first_call_on_a_device_loads_what_was_compiled_ahead(
    compiled: list[Any], monkeypatch: pytest.MonkeyPatch, tmp_path: Path, name: str, arch: str
) -> None:
    kernels = first_call_compiles_nothing(compiled, monkeypatch, tmp_path / "ahead", name, arch, 148)
    backward = {"preprocess", "backward", "postprocess"}
    also = {"split": {"combine"}, "gradient": backward, "learned-slopes": {"units", *backward}}
    assert kernels >= {"forward"} | also.get(name, set())


def test_a_gpu_of_another_size_compiles_its_own(
    compiled: list[Any], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    arguments, call = CALLS["out-alone"]
    main(["compile", "--target", "sm_100a", "--out", str(tmp_path / "ahead"), *arguments])
    monkeypatch.setenv("COMPOSATTN_CACHE_DIR", str(tmp_path / "ahead"))
    call(on_a_gpu(monkeypatch, "sm_100a", 152))
    assert [plan.target.sms for plan in compiled] == [148, 152]
    compiled.clear()
    compiling._compiled.clear()
    first_call_compiles_nothing(compiled, monkeypatch, tmp_path / "sized", "out-alone", "sm_100a", 152)


def test_what_is_kept_is_not_compiled_again(compiled: list[Any], tmp_path: Path) -> None:
    for _ in range(2):
        assert main(["compile", "--target", "sm_100a", "--out", str(tmp_path / "ahead"), *SHAPE]) == 0
    assert len(compiled) == 1


@pytest.mark.parametrize(
    ("driver", "installed", "wanted"),
    [
        (None, (12, 13), 13),
        (13, (12, 13), 13),
        (14, (12, 13), 13),
        (12, (12, 13), 12),
        (13, (12,), 12),
        (None, (), None),
    ],
)
def test_the_compiler_that_counts_is_the_newest_that_the_driver_knows(
    monkeypatch: pytest.MonkeyPatch, driver: int | None, installed: tuple[int, ...], wanted: int | None
) -> None:
    """The kernel language chooses so too: a machine with no driver and one with a new driver share kernels."""
    found = {package: "4.8" if cuda in installed else None for package, cuda in toolchain.COMPILERS.items()}
    monkeypatch.setattr(toolchain, "_installed", lambda: iter(found.items()))
    monkeypatch.setattr(toolchain, "_driver", lambda: driver)
    assert toolchain.compiler() == f"compiler of CUDA {wanted}"


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--page-size", "64", "--gradient"], "GradientUnsupported: keys in pages are for inference"),
        (["--page-size", "48"], "UnsupportedPageSize"),
        (["--seqused"], "InvalidCommandLine: --seqused says how many rows"),
        (["--split-kv", "1000"], "InvalidSchedule: split_kv is 1000"),
        (["--backend", "streaming"], "is PyTorch and has no kernels to compile; take one of hopper, blackwell, warp"),
        (["--out", "/proc/none"], "InvalidCommandLine: --out /proc/none can't be a cache folder: it can't be made"),
        (["--score", "alibi(torch.rand(3))"], "CapturedIndexOutOfRange"),
    ],
)
def test_what_can_not_be_compiled_is_refused_by_name(
    compiled: list[Any], capsys: pytest.CaptureFixture[str], arguments: list[str], said: str
) -> None:
    assert main(["compile", *SHAPE, *arguments]) == 1
    assert said in capsys.readouterr().err
    assert compiled == []


@pytest.mark.parametrize("option", ["--sms", "--page-size", "--split-kv"])
def test_a_count_is_a_number_from_one(capsys: pytest.CaptureFixture[str], option: str) -> None:
    with pytest.raises(SystemExit):
        main(["compile", option, "0"])
    assert "wanted a number from 1, got '0'" in capsys.readouterr().err


def test_on_a_machine_with_a_gpu_it_is_that_one_which_is_compiled_for(
    compiled: list[Any], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    on_a_gpu(monkeypatch, "sm_103a", 160)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (10, 3))
    main(["compile", "--out", str(tmp_path / "ahead"), *SHAPE])
    assert [(plan.target.arch, plan.target.sms) for plan in compiled] == [("sm_103a", 160)]
    assert compiled[0].target == Target.of(torch.device("cuda"))
