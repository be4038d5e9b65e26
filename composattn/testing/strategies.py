"""Hypothesis strategies for attention calls, masks and score mods; hypothesis shrinks what fails to a small case.

    from hypothesis import given
    from composattn.testing import check, strategies

    @given(strategies.cases())
    def test_attention(case):
        check(composattn.attention, case)

    @given(strategies.sites().flatmap(strategies.masks))
    def test_masks(mask): ...

Numbers in tensors come from a seed that hypothesis draws; what it shrinks are shapes, dtypes and the mods.
"""

from __future__ import annotations

import dataclasses

from ..errors import MissingDependency
from ..mods.mask import Mask
from ..mods.score import Score
from .cases import draw_case, draw_mask, draw_score
from .site import SMALL, Site, Space, draw_site
from .tolerance import Case

try:
    from hypothesis import strategies as st
except ImportError as missing:
    raise MissingDependency("composattn.testing.strategies needs hypothesis: pip install hypothesis") from missing


@st.composite
def cases(draw: st.DrawFn, space: Space = SMALL) -> Case:
    """Whole calls: shapes, dtype, tensors, mask, score mod, scale, gradients of the outputs."""
    return draw_case(draw(st.randoms()), space)


@st.composite
def sites(draw: st.DrawFn, space: Space = SMALL) -> Site:
    """Shapes and dtypes that mods can be drawn for."""
    return draw_site(draw(st.randoms()), space)


@st.composite
def masks(draw: st.DrawFn, site: Site) -> Mask:
    """Masks for the shapes of `site`."""
    return draw_mask(_here(site, draw))


@st.composite
def score_mods(draw: st.DrawFn, site: Site) -> Score:
    """Score mods for the shapes of `site`."""
    return draw_score(_here(site, draw))


def _here(site: Site, draw: st.DrawFn) -> Site:
    return dataclasses.replace(site, choices=draw(st.randoms()))
