"""The Python blocks of docs/integrations*.md run as they stand, one after the other, on a small model."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from tests.support.source_tree import ROOT, fenced_blocks


def blocks_of(name: str) -> list[str]:
    return fenced_blocks((ROOT / "docs" / name).read_text(), ("python",))


def test_the_integrations_do_what_the_page_says(tmp_path: Path) -> None:
    pytest.importorskip("transformers", minversion="5")
    from tests.support.tiny_models import make_model

    make_model("deepseek_v3").bfloat16().save_pretrained(tmp_path)
    blocks = blocks_of("integrations.md")
    assert len(blocks) == 6
    exec("\n".join(blocks), {"folder": str(tmp_path)})
    torch._dynamo.reset()


def test_the_page_on_overlap(capsys: pytest.CaptureFixture[str]) -> None:
    blocks = blocks_of("integrations_overlap.md")
    assert len(blocks) == 3
    exec("\n".join(blocks), {})
    assert capsys.readouterr().out
