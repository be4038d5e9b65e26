"""What notebooks and `print` show of masks, score mods and explanations; and the notebook of the recipes, run."""

from __future__ import annotations

import ast
import json
import re
import subprocess
import sys
import xml.etree.ElementTree as ET
from pathlib import Path
from typing import Any

import pytest
import torch

import composattn as ca
from composattn import errors
from composattn.analysis.drawing import DARK, PALE, SEEN, TESTED, WHOLE, Drawing, runs_of
from composattn.mods import alibi, bias, causal, document, sliding_window, softcap

NOTEBOOK = Path(__file__).parents[2] / "recipes" / "pictures.ipynb"
PLOTS = Path(__file__).parents[2] / "docs" / "plots"
SVG = "{http://www.w3.org/2000/svg}"


def area(svg: str, fill: str) -> float:
    """Pixels of a picture that are drawn in this colour, of paths of rectangles."""
    found = 0.0
    for path in ET.fromstring(svg).iter(f"{SVG}path"):
        if path.get("fill") == fill:
            for box in str(path.get("d")).split("z")[:-1]:
                width, height = box.partition("h")[2].partition("H")[0].split("v")
                found += float(width) * float(height)
    return found


def test_a_picture_of_a_mask_has_its_pairs_and_its_tiles() -> None:
    mask = causal() & sliding_window(12)
    svg, pixel = mask._repr_svg_(), 4.0**2
    assert area(svg, SEEN) == pixel * int(mask.dense(64, 64).sum())
    kinds = mask.tiles(64, 64, (8, 8))
    assert area(svg, TESTED) == 64 * pixel * int((kinds == 1).sum())
    assert area(svg, WHOLE) == 64 * pixel * int((kinds == 2).sum())


def test_tiles_at_the_edge_are_drawn_as_far_as_there_are_positions() -> None:
    svg = (~causal()).svg(20, 30, (8, 8))
    drawn = area(svg, TESTED) + area(svg, WHOLE)
    kinds = (~causal()).tiles(20, 30, (8, 8))[0, 0] > 0
    shown = kinds.repeat_interleave(8, 0)[:20].repeat_interleave(8, 1)[:, :30]
    assert drawn == pytest.approx(int(shown.sum()) * (256 / 30) ** 2, rel=1e-4)


def test_runs_are_the_true_cells_of_a_matrix() -> None:
    shown = torch.rand(9, 13) < 0.6
    shown[4:7] = shown[3]
    found = torch.zeros_like(shown)
    for row, rows, start, end in runs_of(shown):
        assert not found[row : row + rows, start:end].any()
        found[row : row + rows, start:end] = True
    assert torch.equal(found, shown)


def test_a_score_mod_is_drawn_as_a_curve_or_by_what_it_adds() -> None:
    curve, heat = softcap(30.0)._repr_svg_(), alibi(torch.tensor([0.1]))._repr_svg_()
    assert "score 90" in curve and "29.9" in curve
    assert "score" not in heat and heat.count("<path") > 5
    learned = bias(torch.nn.Parameter(torch.randn(1, 1, 64, 64)))
    assert ET.fromstring(learned._repr_svg_()).tag == f"{SVG}svg"


def test_every_picture_of_the_pages_has_a_dark_form() -> None:
    pictures = sorted(PLOTS.rglob("*.svg"))
    assert len(pictures) > 30
    assert [p.name for p in pictures if "prefers-color-scheme: dark" not in p.read_text()] == []


def test_words_of_the_pages_pictures_stand_on_colours_that_have_a_dark_form() -> None:
    for picture in sorted((PLOTS / "stages").iterdir()):
        assert set(re.findall(r'(?:fill|stroke)="(#[^"]*)"', picture.read_text())) <= set(DARK), picture.name


def test_every_colour_has_one_for_dark_paper() -> None:
    svg = causal().svg()
    assert "prefers-color-scheme: dark" in svg
    for light, dark in DARK.items():
        assert f'.composattn [fill="{light}"]{{fill:{dark}}}' in svg
    assert ET.fromstring(Drawing(10, 10, "a < b").svg()).get("class") == "composattn"


def test_print_draws_the_first_pairs_and_texts_have_the_name() -> None:
    mask = causal() & sliding_window(1)
    name, *rows = str(mask).splitlines()
    assert name == repr(mask) == f"{mask}" == "(causal & sliding_window(1))"
    assert len(rows) == 16 and rows[0] == "■" + " ·" * 15 and rows[2].startswith("· ■ ■ ·")


def test_a_mask_that_reads_a_short_table_is_drawn() -> None:
    assert "■" in document(torch.tensor([0, 0, 1, 1])).grid(4)
    with pytest.raises(errors.InvalidArgument, match="at least 1"):
        causal().svg(0)


def test_pictures_end_where_a_captured_tensor_does() -> None:
    table = torch.ones(5, 7).bool()
    assert str(document(torch.tensor([0, 0, 1, 1]))).splitlines()[1:] == ["■ ■ · ·"] * 2 + ["· · ■ ■"] * 2
    mask, size = ca.mask(lambda b, h, q, kv: table[q, kv]), 256 / 7
    assert mask.grid().splitlines() == [" ".join("■" * 7)] * 5
    assert area(mask.svg(), SEEN) == pytest.approx(35 * size**2, rel=1e-4)
    with pytest.raises(errors.InvalidArgument, match="at least 1"):
        alibi(torch.tensor([0.1])).svg(0)


@pytest.mark.parametrize("looked_at", [ca.Mask.dense, ca.Mask.tiles, ca.Mask.svg])
def test_pairs_beyond_a_captured_tensor_are_refused_as_in_a_call(looked_at: Any) -> None:
    ids = torch.tensor([0, 0, 1, 1])
    with pytest.raises(errors.CapturedIndexOutOfRange, match=r"shape \(4,\) is read at .* 8"):
        looked_at(document(ids), 8, 8)
    looked_at(document(ids) & (lambda b, h, q, kv: (q < 4) & (kv < 4)), 8, 8)  # whose mask hides them
    assert document(ids).dense(0, 8).shape == (1, 1, 0, 8)


def test_what_is_not_finite_is_not_drawn() -> None:
    far = ca.score(lambda score, b, h, q, kv: torch.where(q - kv > 9, -torch.inf, score - (q - kv)))
    heat = far.svg(64)
    shades = set(re.findall('<path d="[^"]*" fill="(#[0-9a-f]*)"/>', heat)) - {PALE}  # the head of an arrow
    assert sum(area(heat, shade) for shade in shades) == (10 * 64 - 45) * 4.0**2
    curve = ca.score(lambda score, b, h, q, kv: torch.sqrt(score)).svg()
    (line,) = re.findall(r'<polyline points="([^"]*)"[^>]*stroke-width="2.5"', curve)
    assert len(line.split()) == 61 and "nan" not in curve and "9.5" in curve  # from 0 to 90


def test_a_picture_is_a_file_of_what_svg_draws(tmp_path: Path) -> None:
    causal().picture(tmp_path / "mask.svg", 64, tile=(8, 8))
    assert (tmp_path / "mask.svg").read_text() == causal().svg()


def test_an_explanation_in_a_notebook_is_its_rows_and_its_mask() -> None:
    q, k, v = (torch.randn(1, 1, 32, 8) for _ in range(3))
    said = ca.Attention(mask_mod=causal()).explain(q, k, v)
    shown = said._repr_html_()
    assert shown.startswith("<svg") and shown.count("<tr>") == len(said.rows)
    assert "q &gt;= kv" in shown


def cells() -> list[str]:
    found: list[dict[str, Any]] = json.loads(NOTEBOOK.read_text())["cells"]
    return ["".join(cell["source"]) for cell in found if cell["cell_type"] == "code"]


def test_the_notebook_runs_and_what_its_cells_end_in_draws_itself() -> None:
    """Cell by cell as a notebook does."""
    lines = []
    for cell in cells():
        *before, last = ast.parse(cell).body
        lines.append("\n".join(ast.unparse(node) for node in before))
        if isinstance(last, ast.Expr) and not ast.unparse(last).startswith("print("):
            lines.append(f"_ = {ast.unparse(last)}")
            lines.append("assert (_._repr_html_ if hasattr(_, '_repr_html_') else _._repr_svg_)().startswith('<svg')")
        else:
            lines.append(ast.unparse(last))
    done = subprocess.run([sys.executable, "-c", "\n".join(lines)], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("(causal & document)\n■ ·")
