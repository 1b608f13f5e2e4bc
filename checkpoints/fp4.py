"""FP4 weights (e2m1 with one power-of-two scale per 1 x 32 block) as E4M3 with one per 128 x 128, exactly, and back."""

from __future__ import annotations

import torch
from torch.nn import functional

from checkpoints.errors import CheckpointError
from checkpoints.layouts import BLOCK

FP4_BLOCK = 32
E2M1_MAGNITUDES = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
_E4M3_LOWEST_BIT = -9
"""E4M3 holds multiples of 2^-9 with up to four significant bits, to 448."""
_BIAS = 127
_NONE = -(1 << 20)
_GROUPS = BLOCK // FP4_BLOCK
STRIP_ROWS = 128


def unpack_codes(packed: torch.Tensor) -> torch.Tensor:
    """4-bit codes of packed bytes [..., K / 2], low half first, as uint8 [..., K]."""
    data = packed.contiguous().view(torch.uint8)
    return torch.stack((data & 15, data >> 4), -1).flatten(-2)


def pack_codes(codes: torch.Tensor) -> torch.Tensor:
    """The inverse of `unpack_codes`."""
    low, high = codes.unflatten(-1, (-1, 2)).unbind(-1)
    return low | (high << 4)


def fp4_to_e4m3(
    packed: torch.Tensor, exponents: torch.Tensor, key: str = "weight"
) -> tuple[torch.Tensor, torch.Tensor]:
    """Convert one FP4 matrix without changing any value, a strip of rows at a time.

    Each 128 x 128 block gets the smallest power-of-two scale under which its largest value still fits, which leaves
    most room below; a block whose values span more than E4M3 holds under any scale is refused.

    Args:
        packed: bytes [N, K / 2] (uint8, int8 or float4_e2m1fn_x2), two codes each, low half first.
        exponents: uint8 [N, K / 32], 2^(b - 127) each, without 255.
        key: name of the matrix, for messages.

    Returns:
        E4M3 [N, K] and its scale exponents as int32 [ceil(N / 128), ceil(K / 128)]: 2^s each.

    Raises:
        CheckpointError: a block cannot be held exactly; the message names it.
    """
    n, k = packed.shape[0], 2 * packed.shape[1]
    data = torch.empty(n, k, dtype=torch.float8_e4m3fn, device=packed.device)
    scales = []
    for row in range(0, n, STRIP_ROWS):
        rows = slice(row, row + STRIP_ROWS)
        data[rows], scale = _convert_strip(unpack_codes(packed[rows]), exponents[rows], key, row // BLOCK)
        scales.append(scale)
    return data, torch.cat(scales)


def _convert_strip(
    codes: torch.Tensor, exponents: torch.Tensor, key: str, first_block: int
) -> tuple[torch.Tensor, torch.Tensor]:
    n, k = codes.shape
    groups = codes.unflatten(1, (-1, FP4_BLOCK))
    exponent = exponents.int() - _BIAS
    field, is_nonzero = (groups >> 1) & 3, (groups & 7) != 0  # magnitude: 2^(field - 1), 1.5 times that, or 0.5, 0
    has_any = is_nonzero.any(2)
    # 2^n times a magnitude stays within 448 for n <= 9 - field, so a scale 2^s needs exponent - s <= 9 - field
    top = torch.where(has_any, exponent - 9 + torch.where(is_nonzero, field, 0).amax(2), _NONE)
    scale = _per_block(top, _NONE).amax((1, 3))
    scale = torch.where(scale == _NONE, 0, scale).int()  # a block of zeros
    relative = torch.where(has_any, exponent - _expand(scale, n, exponent.shape[1]), 0)
    lowest_bit = torch.where(is_nonzero, field.clamp_min(1).to(torch.int8) - 1 - (groups & 1).to(torch.int8), 2).amin(2)
    lost = _per_block(relative + lowest_bit, 0).amin((1, 3)) < _E4M3_LOWEST_BIT
    if bool(lost.any()):
        row, col = lost.nonzero()[0].tolist()
        block = exponents[row * BLOCK : (row + 1) * BLOCK, col * 4 : (col + 1) * 4]
        raise CheckpointError(
            f"{key}: expected FP4 blocks whose values E4M3 holds under one scale per 128 x 128, got block "
            f"({first_block + row}, {col}) with exponents from {int(block.min()) - _BIAS} to "
            f"{int(block.max()) - _BIAS}. Dequantise this checkpoint to bf16 first."
        )
    values = _table((*E2M1_MAGNITUDES, *(-v for v in E2M1_MAGNITUDES)), codes).index_select(0, groups.flatten().int())
    values = values.view(groups.shape).mul_(exponent_to_scale(relative)[:, :, None])
    return values.view(n, k).to(torch.float8_e4m3fn), scale


def e4m3_to_fp4(data: torch.Tensor, scale: torch.Tensor, exponents: torch.Tensor) -> torch.Tensor:
    """The packed bytes that `fp4_to_e4m3` was given: its inverse, given the same exponents.

    Args:
        data: E4M3 [N, K].
        scale: int32 [ceil(N / 128), ceil(K / 128)], as fp4_to_e4m3 returned it.
        exponents: uint8 [N, K / 32].

    Returns:
        uint8 [N, K / 2].

    Raises:
        CheckpointError: a value is not an e2m1 value under these exponents (the weight was changed).
    """
    n, k = data.shape
    relative = exponents.int() - _BIAS - _expand(scale, n, k // FP4_BLOCK)
    relative = relative.clamp(-20, 20)  # beyond only where all values are zero
    magnitude = data.float().abs() * exponent_to_scale(-relative).repeat_interleave(FP4_BLOCK, 1)
    table = _table(E2M1_MAGNITUDES, data)
    codes = torch.searchsorted(table, magnitude.contiguous()).clamp_max(7)
    if not torch.equal(table[codes], magnitude):
        raise CheckpointError(
            "weight: expected the values that were read, got others. Save changed weights as F8_E4M3."
        )
    return pack_codes(codes.to(torch.uint8) | (torch.signbit(data.float()).to(torch.uint8) << 3))


def exponent_to_scale(exponent: torch.Tensor) -> torch.Tensor:
    """2^s as fp32, exactly, down to the subnormal 2^-149."""
    return torch.ldexp(torch.ones_like(exponent, dtype=torch.float64), exponent).float()


def scale_to_exponent(scale: torch.Tensor) -> torch.Tensor:
    """The inverse of `exponent_to_scale`; int32."""
    return torch.frexp(scale.double())[1].int() - 1


def _table(values: tuple[float, ...], like: torch.Tensor) -> torch.Tensor:
    return torch.tensor(values, device=like.device)


def _per_block(per_group: torch.Tensor, fill: int) -> torch.Tensor:
    """[N, K / 32] as [N blocks, 128, K blocks, 4], the last blocks filled up."""
    n, groups = per_group.shape
    padded = functional.pad(per_group, (0, -groups % _GROUPS, 0, -n % BLOCK), value=fill)
    return padded.unflatten(1, (-1, _GROUPS)).unflatten(0, (-1, BLOCK))


def _expand(blocks: torch.Tensor, n: int, groups: int) -> torch.Tensor:
    """One value per 128 x 128 block as one per 1 x 32 block [N, K / 32]."""
    return blocks.repeat_interleave(BLOCK, 0)[:n].repeat_interleave(_GROUPS, 1)[:, :groups]
