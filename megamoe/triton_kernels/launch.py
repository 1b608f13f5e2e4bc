"""What launches share: byte views, tables of base pointers, and what a device can run.

The kernels are not specialised (`do_not_specialize`) on numbers that neither vectorise an access nor bound a loop: one
compilation then serves any T, E, K and R.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from megamoe.triton_kernels.numerics import INTERPRETED


def words(x: torch.Tensor) -> torch.Tensor:
    """A matrix of any dtype as the widest integers its rows consist of: 32 bits where they fit, else bytes."""
    row_bytes = x.shape[-1] * x.element_size()
    wide = row_bytes % 4 == 0 and x.data_ptr() % 4 == 0
    return x.contiguous().view(torch.int32 if wide else torch.uint8)


def pointer_table(groups: Sequence[Sequence[torch.Tensor]]) -> torch.Tensor:
    """Base addresses, int64 [groups, R] on the device of the tensors, which must outlive the launch.

    One tensor a group needs no table: the kernels take it as an argument.
    """
    return _table([[x.data_ptr() for x in group] for group in groups], groups[0][0].device)


def pool_table(pools: Sequence[torch.Tensor]) -> torch.Tensor:
    """Base addresses and row counts, int64 [2, R]; see `pointer_table`."""
    return _table([[x.data_ptr() for x in pools], [x.shape[0] for x in pools]], pools[0].device)


def _table(values: list[list[int]], device: torch.device) -> torch.Tensor:
    table = torch.tensor(values, dtype=torch.int64)
    if device.type != "cuda" or not torch.cuda.is_current_stream_capturing():
        return table.to(device, non_blocking=True)
    captured = torch.empty_like(table, device=device)  # a graph cannot copy from pageable memory: one fill a value
    for to, value in zip(captured.view(-1), table.view(-1).tolist(), strict=True):
        to.fill_(value)
    return captured


def why_not(device: torch.device, precision: str) -> str | None:
    """Why the kernels of this package don't run on `device`, or None.

    Args:
        device: where the tensors are. precision: "fp8" or "bf16".
    """
    if device.type == "cpu":
        return (
            None if INTERPRETED else "CPU tensors need Triton's interpreter: set TRITON_INTERPRET=1 before the import."
        )
    if device.type != "cuda":
        return f"Triton kernels run on CUDA devices, not on {device.type}."
    capability = torch.cuda.get_device_capability(device)
    needed = (8, 9) if precision == "fp8" else (8, 0)
    if capability < needed:
        has, needs = (".".join(map(str, c)) for c in (capability, needed))
        return f"{precision} needs compute capability {needs}, this device has {has}."
    return None
