"""Block scales of quantised weights: the dtypes in which checkpoints store them, to fp32 and back without rounding."""

from __future__ import annotations

import torch

from checkpoints.errors import CheckpointError

SCALE_DTYPES = ("F32", "BF16", "F8_E8M0", "U8")
"""Scale dtypes that are understood; U8 holds the same biased exponents as F8_E8M0."""


def exponents_to_fp32(exponents: torch.Tensor) -> torch.Tensor:
    """2^(b - 127) of uint8 exponents 0..254 as fp32, exactly (b = 0 is the subnormal 2^-127)."""
    bits = exponents.to(torch.int32) << 23
    return torch.where(exponents == 0, torch.full_like(bits, 1 << 22), bits).view(torch.float32)


def fp32_to_exponents(scale: torch.Tensor) -> torch.Tensor:
    """The inverse of `exponents_to_fp32`.

    Raises:
        CheckpointError: a scale is no power of two from 2^-127 to 2^127.
    """
    bits = scale.contiguous().view(torch.int32)
    exponents = bits >> 23
    exact = torch.where(exponents == 0, bits == 1 << 22, bits & 0x7FFFFF == 0) & (bits > 0) & (exponents < 255)
    if not bool(exact.all()):
        wrong = scale[~exact].flatten()[0].item()
        raise CheckpointError(f"scale: expected powers of two to write as exponents, got {wrong}. Write them as F32.")
    return exponents.to(torch.uint8)


def read_exponents(stored: torch.Tensor, key: str, file: str) -> torch.Tensor:
    """Exponent bytes of an F8_E8M0 or U8 scale tensor.

    Raises:
        CheckpointError: a byte is 255, which stands for NaN.
    """
    exponents = stored.contiguous().view(torch.uint8)
    if bool((exponents == 255).any()):
        where = tuple((exponents == 255).nonzero()[0].tolist())
        raise CheckpointError(f"{file}: {key}: expected exponent bytes 0 to 254, got 255 (NaN) at {where}.")
    return exponents


def scale_to_fp32(stored: torch.Tensor, key: str, file: str) -> torch.Tensor:
    """A stored scale tensor as fp32, exactly.

    Args:
        stored: fp32, bf16, float8_e8m0fnu or uint8 (an exponent b means 2^(b - 127)), any shape.
        key: its name, for messages.
        file: its file, for messages.

    Raises:
        CheckpointError: another dtype; a NaN, infinite or negative scale.
    """
    if stored.dtype in (torch.uint8, torch.float8_e8m0fnu):
        return exponents_to_fp32(read_exponents(stored, key, file))
    if stored.dtype not in (torch.float32, torch.bfloat16):
        raise CheckpointError(f"{file}: {key}: expected a scale of {', '.join(SCALE_DTYPES)}, got {stored.dtype}.")
    scale = stored.float()
    good = scale.isfinite() & (scale >= 0)
    if not bool(good.all()):
        where = tuple((~good).nonzero()[0].tolist())
        raise CheckpointError(
            f"{file}: {key}: expected finite scales >= 0, got {scale[where].item()} at {where}. The file is damaged."
        )
    return scale


def scale_from_fp32(scale: torch.Tensor, dtype: str) -> torch.Tensor:
    """An fp32 scale in a dtype of SCALE_DTYPES: the inverse of `scale_to_fp32`.

    Raises:
        CheckpointError: the dtype cannot hold a scale exactly.
    """
    if dtype == "F32":
        return scale
    if dtype == "BF16":
        stored = scale.to(torch.bfloat16)
        if not torch.equal(stored.float(), scale):
            raise CheckpointError("scale: expected values that bf16 holds exactly, got others. Write them as F32.")
        return stored
    exponents = fp32_to_exponents(scale)
    return exponents if dtype == "U8" else exponents.view(torch.float8_e8m0fnu)
