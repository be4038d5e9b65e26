"""The cycle model: the paper's tables from shapes, units and loops from a made-up machine code, tiles from masks."""

from __future__ import annotations

import dataclasses
import itertools
from pathlib import Path

import pytest
import torch

from benchmarks import tile_model
from benchmarks.cases import CASES, Case, select
from benchmarks.model import held, peer, roofline
from benchmarks.model.clocks import OPCODES, TARGETS, UNIT_OF, UnknownOpcode, busy, kind_of, product, shared_bytes
from benchmarks.model.loops import inner_loops, roles
from benchmarks.model.sass import SassInstruction, disassembled
from benchmarks.model.visits import makespan, of_head, seen_keys
from composattn.backends.fused.compiling import disk_cache

B200 = TARGETS["sm_100a"]
CPU = torch.device("cpu")


# --- shapes -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("rows", "wanted"), [(128, (1024, 768, 1024)), (256, (2048, 1536, 2048))])
def test_the_papers_forward_table_comes_out_of_the_shape(rows: int, wanted: tuple[int, ...]) -> None:
    """Table 1 of FlashAttention-4: tensor core, shared memory, exponential unit at N = D = 128."""
    found = roofline.forward(rows, 128, 128, 128, B200)
    assert tuple(found[unit] for unit in ("matrix", "shared", "exp")) == wanted


@pytest.mark.parametrize(
    ("paired", "wanted", "shared"),
    [(False, (2560, 2048, 256, 0, 1024, 1024), 3328), (True, (2560, 1536, 256, 384, 512, 1024), 2688)],
)
def test_the_papers_backward_table_comes_out_of_the_shape(paired: bool, wanted: tuple[int, ...], shared: int) -> None:
    """Table 3, row by row: at M = N = D = 128 of one SM, alone and as one of a pair."""
    rows = roofline.backward_rows(128, 128, 128, B200, paired)
    assert tuple(rows[name] for name in ("matrix", "operands", "dS", "exchange", "dQ", "exp")) == wanted
    assert roofline.backward(128, 128, 128, B200, paired) == {"matrix": 2560, "shared": shared, "exp": 1024}


@pytest.mark.parametrize(("d", "dv", "most"), [(128, 128, 1.24), (192, 128, 2.48), (128, 192, 2.37)])
def test_two_blocks_pay_up_to_so_many_times_the_area(d: int, dv: int, most: float) -> None:
    wide = max(d, dv) > 128
    keys = 64 if wide else 128
    alone = roofline.backward(128, keys, d, B200, dv=dv, transposed=wide)
    paired = roofline.backward(128, 128, d, B200, True, dv)
    assert 128 // keys * max(alone.values()) / max(paired.values()) == pytest.approx(most, abs=0.01)


def test_transposed_sums_read_p_too_and_whole_products_of_their_columns() -> None:
    """By hand, of 128 queries x 64 keys with D 192 and Dv 128: 4096 operations of bf16 and 64 elements a clock."""
    rows = roofline.backward_rows(128, 64, 192, B200, dv=128, transposed=True)
    assert rows["matrix"] == 128 * 64 * (192 + 128 + 256 + 128 + 192) / 4096
    scores, sums = (128 + 64) * (192 + 128), 128 * (256 + 64 * 2) + 128 * (128 + 64)
    assert rows["operands"] == (scores + sums + 128 * 64 * 1.5 + 192 * 64) / 64
    assert (rows["dS"], rows["dQ"]) == (2 * 128 * 64 / 64, 2 * 128 * 192 * 4 / 128)


def test_two_blocks_with_half_of_the_queries_each_are_as_fast_as_products_at_d_256() -> None:
    """By hand, of 128 queries x 128 keys by each; flash-attn-4's two kernels multiply 7 times, not 5."""
    rows = roofline.backward_rows(256, 64, 256, B200, paired=True, transposed=True)
    left, right, half = 128 * 256, 128 * 256 // 2, 256 * 64 // 2
    assert rows["operands"] == (4 * (left + right) + right) / 64 == 3328
    assert rows["dS"] == 4 * half / 64 == 512, "P and dS, each at home and abroad"
    assert rows["exchange"] == 2 * half / 64 == 256, "what is abroad goes out, and comes in"
    assert rows["dQ"] == 128 * 256 / 32 == 1024, "each number once"
    found = roofline.backward(256, 64, 256, B200, paired=True, transposed=True)
    assert found == {"matrix": 5120, "shared": 5120, "exp": 1024}
    theirs = 7 * 2 * 128 * 128 * 256 / B200.matrix
    assert max(found.values()) <= 0.85 * theirs


@pytest.mark.parametrize(("d", "dv"), [(256, 256), (256, 128), (192, 192), (128, 256)])
def test_wide_rows_take_one_block_half_as_long_again_at_least(d: int, dv: int) -> None:
    found = roofline.backward(128, 64, d, B200, dv=dv, transposed=True)
    assert 2 * max(found.values()) >= 1.5 * 5120


def test_a_doubled_exponential_unit_halves_its_clocks_alone() -> None:
    one, other = (roofline.forward(256, 128, 128, 128, TARGETS[arch]) for arch in ("sm_100a", "sm_103a"))
    assert other == one | {"exp": one["exp"] / 2}


# --- machine code -----------------------------------------------------------------------------------------------


def code(text: str) -> tuple[SassInstruction, ...]:
    """Lines of machine code as nvdisasm prints them; `name:` is a label."""
    lines = []
    for n, line in enumerate(text.strip().splitlines()):
        bare = line.strip()
        lines.append(f".L_x_{bare[:-1]}:" if bare.endswith(":") else f"        /*{16 * n:04x}*/  {bare} ;")
    return disassembled("\n".join(lines))


PADDING = "\n".join(["FADD R1, R2, R3"] * 16)
EXPONENTIALS = "\n".join(["MUFU.EX2 R1, R2"] * 16)
TWO_ROLES = f"""
@P0 BRA `(.L_x_7)
UTMALDG.4D [UR8], [UR4]
1:
SYNCS.PHASECHK.TRANS64.TRYWAIT P1, [UR5], R3
@!P1 BRA `(.L_x_8)
2:
UTMALDG.4D [UR8], [UR4]
{PADDING}
@P2 BRA `(.L_x_1)
EXIT
7:
HGMMA.64x128x16.F32.BF16 R24, gdesc[UR4], R24, gsb0
3:
HGMMA.64x128x16.F32.BF16 R24, gdesc[UR4], R24
HGMMA.64x64x16.F32.BF16 R24, R88, gdesc[UR4], R24, gsb0
@P3 BRA `(.L_x_4)
FSEL R1, R2, R3, P4
FSEL R1, R2, R3, P4
4:
{EXPONENTIALS}
VOTE.ANY R5, PT, P5
ISETP.NE.U32.AND P6, PT, R5, RZ, PT
@!P6 BRA `(.L_x_5)
FMUL R1, R2, R3
FMUL R1, R2, R3
FMUL R1, R2, R3
5:
STS.128 [R7], R8
@P2 BRA `(.L_x_3)
6:
HGMMA.64x128x16.F32.BF16 R24, gdesc[UR4], R24, gsb0
{EXPONENTIALS}
{PADDING}
@P2 BRA `(.L_x_6)
EXIT
8:
SYNCS.PHASECHK.TRANS64.TRYWAIT P1, [UR5], R3
@P1 BRA `(.L_x_2)
BRA `(.L_x_8)
"""


def test_loops_are_found_by_what_jumps_back_and_roles_by_what_leads_to_what() -> None:
    copies, working = roles(code(TWO_ROLES))
    assert (copies.job, len(copies.loops)) == ("copies", 1)
    assert (working.job, len(working.loops)) == ("matrix and softmax", 2)
    assert [len(loop.body) for loop in working.loops] == [29, 34]
    assert [loop.selects for loop in working.loops] == [2, 0]
    assert working.plain is working.loops[1] and working.tested is working.loops[0]


def test_code_that_waits_out_of_line_is_no_loop() -> None:
    waits = [loop for loop in inner_loops(code(TWO_ROLES)) if loop.counts["SYNCS"] > 1]
    assert not waits


def test_the_way_of_an_untested_tile_skips_tests_and_rescales_but_no_work() -> None:
    (_, working) = roles(code(TWO_ROLES))
    first = working.loops[0]
    plain, tested = (first.path(t) for t in (False, True))
    for way in (plain, tested):
        names = [i.name for i in way]
        assert (names.count("HGMMA"), names.count("MUFU"), names.count("FMUL")) == (2, 16, 0)
    assert [sum(i.name == "FSEL" for i in way) for way in (plain, tested)] == [0, 2]
    assert len(tested) == len(plain) + 2 == len(first.body) - 3


def test_a_tile_that_is_computed_again_is_on_no_way() -> None:
    """Its speculative maximum was too low; tiles that search for theirs have a longer loop of their own."""
    found = f"""
    1:
    HGMMA.64x128x16.F32.BF16 R24, gdesc[UR4], R24, gsb0
    {EXPONENTIALS}
    {PADDING}
    @P2 BRA `(.L_x_1)
    2:
    HGMMA.64x128x16.F32.BF16 R24, gdesc[UR4], R24, gsb0
    {EXPONENTIALS}
    VOTE.ANY P0, P0
    @!P0 BRA `(.L_x_3)
    HGMMA.64x128x16.F32.BF16 R24, gdesc[UR4], R24, gsb0
    {EXPONENTIALS}
    3:
    @P2 BRA `(.L_x_2)
    BRA `(.L_x_1)
    EXIT
    """
    (working,) = roles(code(found))
    looks, guesses = working.loops
    assert (working.plain, working.tested) == (guesses, looks)
    assert len(guesses.path(False)) == len(guesses.path(True)) < len(looks.body) < len(guesses.body)


def test_instructions_keep_the_units_of_the_table_busy() -> None:
    given = code(
        """
        HGMMA.64x128x16.F32.BF16 R24, gdesc[UR4], R24
        HGMMA.64x64x16.F32.BF16 R24, R88, gdesc[UR4], R24, gsb0
        MUFU.EX2 R1, R2
        MUFU.RCP R1, R2
        FFMA R1, R2, R3, R4
        FFMA2 R2, R4.F32x2.HI_LO, R6.F32x2.HI_LO, R8.F32x2.HI_LO
        @!P0 FMNMX3 R1, R2, R3, R4
        STS.128 [R1], R4
        LDSM.16.M88.4 R4, [R1]
        SHFL.BFLY PT, R1, R2, 0x1, 0x1f
        UIADD3 UR4, UPT, UPT, UR5, 0x1, URZ
        BAR.SYNC.DEFER_BLOCKING 0x1, 0x100
        """
    )
    assert busy(given, TARGETS["sm_90a"]) == {
        # products of 64 x 128 x 16 and 64 x 64 x 16, a quarter for each warp; the second's left operand is in registers
        "matrix": (64 + 32) / 4,
        "shared": ((2 * 16 * (128 + 64) + 2 * 16 * 64) / 4 + 512 + 512 + 128) / 128,
        "exp": 16.0,
        "fma": 1.0 + 2.0,
        "alu": 2.0,
        "issue": 12.0,
        "reduce": 0.0,
    }
    assert busy(given, TARGETS["sm_103a"])["exp"] == 4.0 + 8.0  # 2^x alone is doubled
    assert given[6].predicate == "@!P0"


def test_an_opcode_that_no_row_names_is_refused() -> None:
    (unknown,) = code("FROBNICATE R1, R2")
    with pytest.raises(UnknownOpcode, match=r"FROBNICATE has no unit.*clocks\.py"):
        kind_of(unknown)


def test_every_kind_is_one_that_costs_something_or_is_said_to_cost_a_slot() -> None:
    assert set(OPCODES.values()) == {*UNIT_OF, "matrix", "shared", "other"}
    assert all(B200.of(kind) > 0 for kind in UNIT_OF)


@pytest.mark.parametrize(
    ("text", "wanted"),
    [("STS [R1], R2", 128), ("LDS.64 R2, [R1]", 256), ("STS.U8 [R1], R2", 32), ("LDSM.16.M88 R4, [R1]", 128)],
)
def test_shared_memory_moves_the_bytes_of_the_suffix(text: str, wanted: int) -> None:
    assert shared_bytes(code(text)[0]) == wanted


def test_only_a_product_is_a_product() -> None:
    others = code("FFMA R1, R2, R3, R4\nUTCHMMA gdesc[UR4], gdesc[UR6], tmem[UR8], UP0")
    assert [product(i) for i in others] == [(0, 0)] * 2


# --- tiles ------------------------------------------------------------------------------------------------------


INTERVALS = "D128 S8192 (full|causal|window|documents|eight|prefix)"


@pytest.mark.parametrize("name", [case.name for case in select(["forward"], INTERVALS)])
def test_a_row_sees_the_keys_that_its_mask_says(name: str) -> None:
    (case,) = (c for c in CASES if c.name == name)
    pattern = case.pattern(case, CPU)
    first, behind = seen_keys(case, pattern)
    rows = torch.tensor([0, 700, 1023, 1024, 2199, 4095, 8000, 8191])
    keys = torch.arange(8192)
    zero = torch.zeros((), dtype=torch.int64)
    seen = pattern.mask_mod(zero, zero, rows[:, None], keys) if pattern.mask_mod else torch.ones(8, 8192).bool()
    wanted = (keys >= torch.from_numpy(first)[rows, None]) & (keys < torch.from_numpy(behind)[rows, None])
    assert bool((seen == wanted).all())


@pytest.mark.parametrize(("direction", "packed"), list(itertools.product(("forward", "backward"), (False, True))))
def test_causal_tiles_of_64_by_32(direction: str, packed: bool) -> None:
    (case,) = [c for c in CASES if c.name == "forward D128 S8192 causal"]
    tiny: Case = dataclasses.replace(case, q_len=128, kv_len=128, direction=direction)
    pattern = tiny.pattern(tiny, CPU)
    if packed:
        pattern = dataclasses.replace(pattern, document_starts=(0, 128))
    (found,) = of_head(tiny, pattern, 64, 32, packed)
    if direction == "forward":
        assert found.plain.tolist() == [0, 2] and found.tested.tolist() == [2, 2]
    else:
        assert found.plain.tolist() == [1, 1, 0, 0] and found.tested.tolist() == [1, 1, 1, 1]


def test_blocks_run_where_a_sm_is_free() -> None:
    assert makespan([3, 3, 2, 2, 2], 2) == 7
    assert makespan([], 4) == 0


# --- held to what was measured ----------------------------------------------------------------------------------


def row(name: str, measured: float, modelled: float) -> held.Row:
    return held.Row(name, "run", "composattn", measured, dict.fromkeys(held.READINGS, modelled))


def test_reliability_counts_the_rows_that_differ() -> None:
    rows = [
        row("forward a", 1.10, 1.50),
        row("forward b", 1.02, 0.50),  # differs by less than 3 %
        row("backward c", 0.90, 1.20),
        row("backward d", 0.90, 1.005),  # the model sees no difference
    ]
    found = held.Reliability.of(rows, "bound")
    assert found == held.Reliability(right=1, wrong=1, neither=1, always_ours=1) and not found.is_enough
    assert held.Reliability.of(rows, "bound", "forward").is_enough
    assert held.confusion(rows, "bound", "backward") == {("theirs", "ours"): 1, ("theirs", "neither"): 1}


def test_what_was_kept_is_joined_with_what_is_measured_now(tmp_path: Path) -> None:
    (run, case, by, measured), *_ = held.measured_rows()
    path = tmp_path / "model" / "kept.json"
    held.keep({held.key(case, by): {"bound": 1.25, "sum": 0.75}, "gone: composattn": {}}, {"commit": "this"}, path)
    (first, *more) = held.rows(held.kept(path))
    assert (first.name, first.run, first.measured, first.modelled["sum"]) == (case.name, run, measured, 0.75)
    assert all(row.name == case.name for row in more)
    assert held.kept(tmp_path / "none.json") == {}


def test_the_record_has_most_of_the_measured_rows() -> None:
    assert len(held.rows(held.kept())) >= 75


def test_a_missing_peer_is_named_with_what_to_install(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(peer, "_found", lambda module: module not in ("einops", "quack"))
    assert tile_model.main(["--target", "sm_100a", "--peer", "flash-attn-4"]) == 2
    told = capsys.readouterr().err
    assert told.startswith("not installed: quack-kernels, einops; pip install") and "flash-attn-4==" in told


def test_a_peers_kernels_of_another_name_are_refused(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    def compiled(call: peer.PeerCall, arch: str, folder: Path) -> None:
        (folder / "tile.json").write_text("{}")
        (folder / "flash_attncutesm100_hd256_2cta_fmha_backward.sm_100a.cubin").touch()

    monkeypatch.setattr(peer, "version", lambda: "4")
    monkeypatch.setattr(peer, "seconds_to_compile", compiled)
    monkeypatch.setattr(disk_cache, "usable", lambda: tmp_path)
    with pytest.raises(peer.PeerRefused, match="kernels of their own"):
        peer.peer_kernel(peer.PeerCall("backward", 256), "sm_100a")


def test_ratios_say_how_reliable_they_are() -> None:
    assert "first run --target sm_90a" in tile_model.reliability([], "bound")
    assert tile_model.reliability([row("forward a", 1.10, 1.50)], "bound").startswith(
        "right on an H200 in 1 of 1 (100%"
    )
    assert tile_model.reliability([row("forward a", 1.10, 0.50)], "bound").startswith("NOT RELIABLE, ")
