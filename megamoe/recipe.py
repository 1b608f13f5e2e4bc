"""The numerical recipe: every choice of format and rounding that reference, Triton and CuTe share."""

from __future__ import annotations

import dataclasses
from typing import Literal

from megamoe.errors import MegaMoETypeError, MegaMoEValueError, expected

BLOCK = 128
"""Channels of one activation scale, rows and columns of one weight scale, rows to which a segment is aligned."""

E4M3_MAX = 448.0
MIN_AMAX = 2.0**-100
"""Floor of a block's largest magnitude, so that an all-zero block has a positive, finite scale."""


@dataclasses.dataclass(frozen=True)
class Recipe:
    """How numbers are rounded on their way through the layer. Hashable: it is part of every cache key.

    Args:
        precision: "fp8" quantises activations 1x128 and weights 128x128 to e4m3 with fp32 scales; "bf16" rounds the
            same quantities to bf16 and uses no scales.
        scale_format: "fp32" keeps s = max(amax, 2^-100) / 448; "pow2" rounds it up to a power of two before it is used.
            Models trained with fp32 scales lose accuracy with "pow2", so it is never chosen silently.
        clamp: limit c of the gated activation (gate <= c, |up| <= c) as in DeepSeek-V4 and GLM; None: no limit.
        wgrad_operands: what the weight gradients multiply. "fp8", the default with precision "fp8": the gradients of
            gate and up, p * A and what travelled, rounded to e4m3 once more along rows (`torch_steps.wgrad_operands`).
            "bf16": the same in bf16. On an H200 at DeepSeek-V3's shape the fused backward takes 10.3 ms with "fp8" and
            14.0 ms with "bf16"; the weight gradients are at 23.1 and 24.3 dB against the fp64 oracle (November 2026).
            None: by the precision; with precision "bf16" there is only "bf16".

    Raises:
        MegaMoETypeError: for a clamp that is no number. MegaMoEValueError: for a value outside these.
    """

    precision: Literal["fp8", "bf16"] = "fp8"
    scale_format: Literal["fp32", "pow2"] = "fp32"
    clamp: float | None = None
    wgrad_operands: Literal["bf16", "fp8"] = None  # type: ignore[assignment]  # never None behind __post_init__

    def __post_init__(self) -> None:
        if self.precision not in ("fp8", "bf16"):
            raise MegaMoEValueError(expected("precision", "'fp8' or 'bf16'", repr(self.precision)))
        if self.scale_format not in ("fp32", "pow2"):
            raise MegaMoEValueError(expected("scale_format", "'fp32' or 'pow2'", repr(self.scale_format)))
        if self.clamp is not None and (not isinstance(self.clamp, (int, float)) or isinstance(self.clamp, bool)):
            raise MegaMoETypeError(expected("clamp", "a number or None", repr(self.clamp)))
        if self.clamp is not None and not 0 < self.clamp < float("inf"):
            raise MegaMoEValueError(expected("clamp", "a positive finite limit or None", self.clamp))
        if self.wgrad_operands is None:  # equal recipes compare and hash equal, however they are spelled
            object.__setattr__(self, "wgrad_operands", self.precision)
        if self.wgrad_operands not in ("bf16", "fp8"):
            raise MegaMoEValueError(expected("wgrad_operands", "'bf16' or 'fp8'", repr(self.wgrad_operands)))
        if self.wgrad_operands == "fp8" and self.precision != "fp8":
            raise MegaMoEValueError(expected("wgrad_operands", "'bf16' where precision is 'bf16'", "'fp8'"))
