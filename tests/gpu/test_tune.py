"""`megamoe tune` on a GPU: fused kernels under other settings give the same bits, and the layer reads what it wrote."""

import json

import pytest
import torch

from megamoe import MegaMoE, MoEConfig, OverlapConfig
from megamoe.backends import Problem, why_not
from megamoe.cli import main
from megamoe.errors import MegaMoEValueError
from megamoe.recipe import Recipe

CONFIG = MoEConfig(256, 128, num_experts=8, top_k=2)
OPTIONS = ["--shape", "8,256,128,2", "--tokens", "256", "--rounds", "2", "--lag", "0", "--pull-batch", "0"]


@pytest.mark.parametrize("ranks", [1, 2])
def test_tune_writes_what_the_layer_reads(tmp_path, capsys, ranks):
    if reason := why_not("cute", Problem.of(torch.device("cuda"), Recipe(), 256, 128)):
        pytest.skip(reason)
    out = tmp_path / "overlap.json"
    more = ["--ranks", str(ranks), "--reserve-sms", "0,4", "--steal-us", "0"]
    assert main(["tune", *OPTIONS, *more, "--out", str(out)]) == 0
    text = capsys.readouterr().out
    assert "backend cute on cuda" in text and "reserve_sms=4" in text
    assert "other bits" not in text and "refused" not in text, text
    (entry,) = json.loads(out.read_text())["settings"]
    assert entry["ranks"] == ranks and entry["backend"] == "cute"
    if ranks == 1:
        layer = MegaMoE(CONFIG, overlap=out, device="cuda")
        assert layer.experts.context.overlap == OverlapConfig(**entry["overlap"])
    else:
        with pytest.raises(MegaMoEValueError, match="overlap: expected settings for .* R=1 "):
            MegaMoE(CONFIG, overlap=out, device="cuda")
    with pytest.raises(MegaMoEValueError, match="overlap: expected settings for .* on cpu"):
        MegaMoE(CONFIG, overlap=out, device="cpu")
