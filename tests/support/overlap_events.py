"""The order in which a backward over a process group starts all-to-alls, waits for them, computes weight gradients."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist

from megamoe import MegaMoE, MoEConfig, OverlapConfig
from megamoe.backends import BACKENDS

CONFIG = MoEConfig(256, 128, num_experts=8, top_k=2, initializer_range=0.1)


class Work:
    """A collective under way, whose wait is noted."""

    def __init__(self, work: Any, events: list[str]) -> None:
        self._work, self._events = work, events

    def wait(self) -> None:
        self._events.append("wait")
        self._work.wait()


@contextlib.contextmanager
def noted(backend: str) -> Iterator[list[str]]:
    """The events inside: "start" and "wait" of an all-to-all, "wgrad" when a weight's gradient is launched."""
    events: list[str] = []
    real = dist.all_to_all_single

    def all_to_all_single(*args: Any, **options: Any) -> Work:
        events.append("start")
        return Work(real(*args, **options), events)

    if backend == "cute":
        from cute_kernels import wgrad_launch as module

        name = "weight_gradients"
    else:
        module, name = BACKENDS[backend].steps, "wgrad"
    compute = getattr(module, name)

    def wgrad(*args: Any, **options: Any) -> Any:
        events.append("wgrad")
        return compute(*args, **options)

    with mock.patch.object(dist, "all_to_all_single", all_to_all_single), mock.patch.object(module, name, wgrad):
        yield events


def events_of_backward(backend: str, device: str, wgrad: str, **options: Any) -> tuple[list[str], dict[str, Any]]:
    """The events of one backward on this rank of the default group, and all gradients (after `backward_dw()`)."""
    torch.manual_seed(dist.get_rank())
    overlap = OverlapConfig(wgrad=wgrad)  # type: ignore[arg-type]
    world = dist.group.WORLD
    layer = MegaMoE(CONFIG, backend=backend, world=world, device=device, overlap=overlap, **options)  # type: ignore[arg-type]
    x = torch.randn(40, 256).bfloat16().to(device).requires_grad_()
    out = layer(x)
    with noted(backend) as events:
        out.backward(torch.ones_like(out))
        events.append("end")
        layer.backward_dw()
    grads = {name: p.grad for name, p in layer.named_parameters() if p.grad is not None}
    return events, {"x": x.grad, **grads}


def check(events: list[str], wgrad: str, per_weight: int) -> None:
    """Weight gradients lie between the start and the wait of one all-to-all, the one that brings dx home.

    Args:
        events: of a backward. wgrad: its mode. per_weight: launches for both weights together.
    """
    assert events.count("wgrad") == per_weight and events.count("start") == events.count("wait")
    text = " ".join(events)
    launches = " ".join(["wgrad"] * per_weight)
    if wgrad == "delayed":
        assert text.endswith(f"wait end {launches}"), text
    else:
        assert f"start {launches} wait" in text and text.endswith("end"), text
