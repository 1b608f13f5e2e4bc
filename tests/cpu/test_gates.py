"""The figures that decide: what passes, what fails, and that NaN, zeros and empty tensors never slip through."""

import math

import pytest
import torch

from megamoe.gates import GATES, rel_l2, sqnr_db, worst_expert_db, worst_row, worst_weight_grad
from tests.support.source_tree import ROOT


def test_table():
    fp8, bf16 = GATES["fp8"], GATES["bf16"]
    assert (fp8.tensor_db, fp8.expert_db, fp8.row, fp8.weight_grad, fp8.backends_db) == (21.0, 20.0, 0.15, 0.4, 46.0)
    assert (bf16.tensor_db, bf16.expert_db, bf16.row, bf16.weight_grad, bf16.backends_db) == (45, 43, 0.012, 0.03, 46)


@pytest.mark.parametrize("noise,db", [(0.1, 20.0), (0.01, 40.0), (1.0, 0.0)])
def test_sqnr_is_twenty_decibels_a_decade(noise, db):
    want = torch.randn(4096, 16)
    error = torch.randn_like(want)
    error *= noise * want.norm() / error.norm()
    assert rel_l2(want + error, want) == pytest.approx(noise, rel=1e-4)
    assert sqnr_db(want + error, want) == pytest.approx(db, abs=1e-2)


def test_equal_zero_and_nan():
    x = torch.randn(3, 4)
    assert sqnr_db(x, x) == math.inf
    assert rel_l2(torch.zeros(2), torch.zeros(2)) == 0.0
    assert rel_l2(torch.ones(2), torch.zeros(2)) == math.inf
    assert sqnr_db(torch.ones(2), torch.zeros(2)) == -math.inf
    assert math.isnan(rel_l2(torch.tensor([math.nan, 1.0]), torch.zeros(2)))
    assert not sqnr_db(torch.tensor([math.nan, 1.0]), torch.ones(2)) >= 0.0
    assert sqnr_db(torch.empty(0, 4), torch.empty(0, 4)) == math.inf


def test_worst_row_finds_the_row_and_measures_small_rows_by_the_rms():
    want = torch.ones(8, 16)
    want[5] = 0.0
    got = want.clone()
    got[3] *= 1.25
    error, row = worst_row(got, want)
    assert (row, error) == (3, pytest.approx(0.25))
    got = want.clone()
    got[5] = 0.5  # the zero row is judged by the rms norm of all rows
    rms = math.sqrt(7 * 16 / 8)
    error, row = worst_row(got, want)
    assert (row, error) == (5, pytest.approx(2.0 / rms))
    got[2, 0] = math.nan
    assert worst_row(got, want) == (math.inf, 2)
    assert worst_row(torch.empty(0, 4), torch.empty(0, 4)) == (0.0, -1)
    assert worst_row(torch.zeros(2, 2), torch.zeros(2, 2))[0] == 0.0
    assert worst_row(torch.ones(2, 2), torch.zeros(2, 2))[0] == math.inf


def test_worst_expert_finds_the_expert():
    want = torch.randn(4, 8, 8)
    want[1] = 0.0
    got = want.clone()
    got[2] *= 1.1
    assert worst_expert_db(got, want) == (pytest.approx(20.0, abs=1e-3), 2)
    got[1, 0, 0] = 1e-20  # an expert without rows must be exactly zero
    assert worst_expert_db(got, want) == (-math.inf, 1)
    got = want.clone()
    got[3, 0, 0] = math.nan
    assert worst_expert_db(got, want) == (-math.inf, 3)


def test_weight_grad_is_measured_by_its_spread():
    want, spread = torch.zeros(2, 2), torch.tensor([[2.0, 1.0], [0.0, 1.0]])
    got = torch.tensor([[1.0, 0.0], [0.0, 0.25]])
    assert worst_weight_grad(got, want, spread) == pytest.approx(0.5)
    got[1, 0] = 1e-9  # a slot without an expert has no spread and must be exactly zero
    assert worst_weight_grad(got, want, spread) == math.inf
    got[1, 0] = math.nan
    assert worst_weight_grad(got, want, spread) == math.inf
    assert worst_weight_grad(torch.empty(0, 2), torch.empty(0, 2), torch.empty(0, 2)) == 0.0


def test_the_documented_table_is_this_one():
    text = (ROOT / "docs" / "contract.md").read_text().split("## Gates")[1]
    rows = [[cell.strip() for cell in line.strip("|").split("|")] for line in text.splitlines() if line.startswith("|")]
    figures = [[float(cell.removesuffix(" dB")) for cell in row[1:]] for row in rows[2:]]
    fields = ("tensor_db", "expert_db", "row", "weight_grad", "backends_db", "emulation_db")
    assert figures == [[getattr(GATES[p], field) for p in ("fp8", "bf16")] for field in fields]
