"""The program that runs torch's tests of FlexAttention on our backends: what it says of tests that we wrote."""

from __future__ import annotations

from pathlib import Path

import pytest

pytest.importorskip("expecttest", reason="torch.testing is written with it (extra: test)")

from tests.flex_suite import NOT_COUNTED, REFUSED, RIGHT, WRONG, Calls, cases_of, loaded, outcome_of

SUITE = """
import unittest
import torch
from torch.nn.attention.flex_attention import create_block_mask, flex_attention
from torch.testing._internal.common_device_type import flex_attention_supported_platform as supported_platform

S = 2048
TEST_ON_CUDA = torch.cuda.is_available()
test_device = "cuda" if TEST_ON_CUDA else "cpu"


def drawn(length=S):
    return torch.randn(1, 2, length, 16, device=test_device, requires_grad=True)


class TestSome(unittest.TestCase):
    @supported_platform
    def test_right(self):
        q, device = drawn(), "cuda"
        if device == "cpu":
            self.skipTest("gradients")
        mask = create_block_mask(lambda b, h, i, j: i >= j, 1, 1, S, S)
        out = torch.compile(flex_attention, fullgraph=True)(q, q, q, block_mask=mask)
        torch.testing.assert_close(out, flex_attention(q, q, q, block_mask=mask))
        out.sum().backward()

    def test_right_in_eager_code_alone(self):
        q = drawn(64)
        self.assertEqual(flex_attention(q, q, q).shape, q.shape)

    def test_right_at_its_own_length(self):
        q = drawn()
        self.assertEqual(torch.compile(flex_attention)(q, q, q).shape[2], 2048)

    def test_right_by_the_class_of_its_error(self):
        q = drawn(64)
        with self.assertRaisesRegex(ValueError, "words of torch"):
            torch.compile(flex_attention)(q, q.half(), q)

    def test_refused(self):
        q = drawn(64)
        torch.compile(flex_attention)(q, q, q, score_mod=lambda s, b, h, i, j: s + torch.rand(()))

    def test_wrong(self):
        q = drawn(64)
        self.assertTrue(torch.compile(flex_attention)(q, q, q).isnan().any())

    def test_of_no_attention(self):
        self.assertTrue(False)

    @unittest.skipIf(TEST_ON_CUDA, "of CPUs")
    def test_left_out(self):
        pass
"""
ENDS = {
    "test_right": RIGHT,
    "test_right_in_eager_code_alone": RIGHT,
    "test_right_at_its_own_length": RIGHT,
    "test_right_by_the_class_of_its_error": RIGHT,
    "test_refused": REFUSED,
    "test_wrong": WRONG,
    "test_of_no_attention": NOT_COUNTED,
    "test_left_out": NOT_COUNTED,
}


def test_each_test_of_a_suite_ends_in_what_it_says(tmp_path: Path) -> None:
    path = tmp_path / "suite_of_ours.py"
    path.write_text(SUITE)
    both = ((True, Calls()), (False, Calls()))
    modules = tuple((loaded(path, calls, shorter=shorter), calls) for shorter, calls in both)
    found = {test: outcome_of(kind, test, modules).kind for kind, test in cases_of(modules[0][0])}
    assert found == ENDS
