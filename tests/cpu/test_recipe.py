"""The recipe: frozen, hashable, and refusing what it cannot mean."""

import dataclasses
import re

import pytest

import megamoe
from megamoe.errors import MegaMoETypeError, MegaMoEValueError
from megamoe.recipe import Recipe


def test_defaults_are_the_documented_ones():
    assert Recipe() == Recipe(precision="fp8", scale_format="fp32", clamp=None, wgrad_operands="fp8")
    assert Recipe("bf16") == Recipe(precision="bf16", wgrad_operands="bf16") and Recipe("bf16").wgrad_operands == "bf16"
    assert megamoe.Recipe is Recipe


def test_is_a_cache_key():
    keys = {Recipe(), Recipe("bf16"), Recipe(scale_format="pow2"), Recipe(clamp=10.0), Recipe(clamp=7.0), Recipe()}
    keys |= {Recipe(wgrad_operands="fp8"), Recipe(wgrad_operands="bf16"), Recipe("bf16", wgrad_operands="bf16")}
    assert len(keys) == 6
    with pytest.raises(dataclasses.FrozenInstanceError):
        Recipe().clamp = 1.0


@pytest.mark.parametrize(
    "arguments,message",
    [
        ({"precision": "fp4"}, "precision: expected 'fp8' or 'bf16', got 'fp4'"),
        ({"scale_format": "e8m0"}, "scale_format: expected 'fp32' or 'pow2', got 'e8m0'"),
        ({"wgrad_operands": "fp4"}, "wgrad_operands: expected 'bf16' or 'fp8', got 'fp4'"),
        (
            {"wgrad_operands": "fp8", "precision": "bf16"},
            "wgrad_operands: expected 'bf16' where precision is 'bf16', got 'fp8'",
        ),
        ({"clamp": 0.0}, "clamp: expected a positive finite limit or None, got 0.0"),
        ({"clamp": -1.0}, "clamp: expected a positive finite limit or None, got -1.0"),
        ({"clamp": float("inf")}, "clamp: expected a positive finite limit or None, got inf"),
        ({"clamp": float("nan")}, "clamp: expected a positive finite limit or None, got nan"),
        ({"wgrad_operands": "fp16"}, "wgrad_operands: expected 'bf16' or 'fp8', got 'fp16'"),
        ({"precision": "bf16", "wgrad_operands": "fp8"}, "wgrad_operands: expected 'bf16' where precision is 'bf16'"),
    ],
)
def test_refusals(arguments, message):
    with pytest.raises(MegaMoEValueError, match=message):
        Recipe(**arguments)


@pytest.mark.parametrize("clamp", ["7", True, [1.0]])
def test_refuses_a_clamp_that_is_no_number(clamp):
    with pytest.raises(MegaMoETypeError, match=f"clamp: expected a number or None, got {re.escape(repr(clamp))}"):
        Recipe(clamp=clamp)
