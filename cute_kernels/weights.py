"""Weights in the kernels' order: a permutation of rows inside blocks, scales by tile. Torch only; any device.

A tile of 256 weight rows is two waves of 128; wave w holds 64 rows of each of two blocks of 128: in GEMM 1 of a block
of gate rows and of the block of up rows that belongs to it, in GEMM 2 of two neighbouring blocks. Inside 32 rows,
position 8 j + 2 q + b holds row 8 q + 2 j + b (j, q < 4, b < 2): a thread's accumulators are 8 neighbouring columns.
"""

from dataclasses import dataclass
from functools import lru_cache

import torch

BLOCK = 128
GATE_UP, ROWS = "gate_up", "rows"
_INSIDE = [8 * q + 2 * j + b for j in range(4) for q in range(4) for b in range(2)]  # of 32


@dataclass(frozen=True)
class KernelWeights:
    """One rank's weights as the fused kernel reads them.

    Attributes:
        w13: e4m3 [E_l, 2I, H], as `permute_rows` leaves it.
        s13: fp32 [E_l, H / 128, I / 128, 4]: for each k-block and tile the scales of its gate and its up block.
        w2: e4m3 [E_l, H rounded up to 256, I], as `permute_rows` leaves it.
        s2: fp32 [E_l, I / 128, ceil(H / 256), 4]: of the tile's two blocks of 128.
    """

    w13: torch.Tensor
    s13: torch.Tensor
    w2: torch.Tensor
    s2: torch.Tensor

    @property
    def num_local_experts(self) -> int:
        return self.w13.shape[0]


def row_order(kind: str, rows: int) -> torch.Tensor:
    """For each row of the kernel's order the row of the user's, int64 [rows rounded up to 256]; rows behind the last
    one count on (they are zeros).

    Args:
        kind: "gate_up" for [gate; up] stacked (rows = 2I), "rows" for plain rows.
        rows: a multiple of 128 (of 256 for "gate_up").
    """
    inside = torch.tensor(_INSIDE)
    wave = torch.cat([inside, inside + 32])  # 64 rows of a block
    tiles = -(-rows // 256)
    tile = torch.arange(tiles)[:, None, None, None]
    w = torch.arange(2)[None, :, None, None]
    block = torch.arange(2)[None, None, :, None]
    first = tile * BLOCK + block * (rows // 2) if kind == GATE_UP else tile * 256 + block * BLOCK
    return (first + w * 64 + wave[None, None, None, :]).reshape(-1)


def permute_rows(q_ENK: torch.Tensor, kind: str) -> torch.Tensor:
    """[E, N, K] in the kernel's order: rows by `row_order(kind, N)`, padded with zeros to whole tiles, in blocks of 256
    rows x 128 columns, each 32 KB in one piece and as shared memory holds it: [E, N / 256, K / 128, 256, 128] in
    memory, 16-byte granule c of row r at place c ^ (r % 8). The shape stays [E, N, K]; a new tensor, one gather."""
    experts, rows, width = q_ENK.shape
    padded = -(-rows // 256) * 256
    data = q_ENK.contiguous().view(torch.uint8)
    if padded != rows:
        data = torch.nn.functional.pad(data, (0, 0, 0, padded - rows))
    granules = data.view(torch.complex128).view(experts, -1)  # 16 bytes each
    order = granule_order(kind, rows, width, q_ENK.device)
    return torch.index_select(granules, 1, order).view(torch.uint8).view(experts, padded, width).view(q_ENK.dtype)


@lru_cache(maxsize=16)
def granule_order(kind: str, rows: int, width: int, device: torch.device) -> torch.Tensor:
    """For each 16-byte granule of an expert in the kernel's order, which granule of the user's [rows, width] (padded to
    whole tiles) it is; int64."""
    each = width // 16
    source = row_order(kind, rows).view(-1, 1, 256, 1) * each  # [tile, k-block, row, granule]
    block = torch.arange(width // BLOCK).view(1, -1, 1, 1) * (BLOCK // 16)
    granule = torch.arange(256).view(1, 1, -1, 1) % 8 ^ torch.arange(8).view(1, 1, 1, -1)
    return (source + block + granule).reshape(-1).to(device)


def tile_scales(first: torch.Tensor, second: torch.Tensor) -> torch.Tensor:
    """Scales [E, tiles, k-blocks] of a tile's two blocks -> [E, k-blocks, tiles, 4]; the other two words pad a bulk
    copy to its least size."""
    none = torch.zeros_like(first)
    return torch.stack([first, second, none, none], dim=-1).transpose(1, 2).contiguous().float()


def prepare_weights(w13_E2IH: torch.Tensor, s13: torch.Tensor, w2_EHI: torch.Tensor, s2: torch.Tensor) -> KernelWeights:
    """Brings FP8 weights into the kernel's order. The results are new tensors; the arguments may be dropped.

    Args:
        w13_E2IH, w2_EHI: e4m3 [E_l, 2I, H] and [E_l, H, I].
        s13, s2: fp32 scales [E_l, 2I / 128, H / 128] and [E_l, H / 128, I / 128].
    """
    inter, hidden = w13_E2IH.shape[1] // 2, w13_E2IH.shape[2]
    half = inter // BLOCK
    pad = hidden // BLOCK % 2
    s2 = torch.nn.functional.pad(s2, (0, 0, 0, pad))
    return KernelWeights(
        permute_rows(w13_E2IH, GATE_UP),
        tile_scales(s13[:, :half], s13[:, half:]),
        permute_rows(w2_EHI, ROWS),
        tile_scales(s2[:, 0::2], s2[:, 1::2]),
    )
