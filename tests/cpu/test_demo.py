"""The demo: green as it is, red with one wrong expert, which it names; the checkpoint it makes is DeepSeek-V3's."""

import argparse
import json
import re

import pytest
import torch
from safetensors import safe_open

pytest.importorskip("transformers")

from checkpoints import convert_to_fp8
from examples import demo

SMALL = ["--device", "cpu", "--backend", "torch", "--hidden", "256", "--intermediate", "128", "--tokens", "64"]


def arguments(*options: str) -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    demo.add_arguments(parser)
    return parser.parse_args([*SMALL, *options])


def test_every_stage_passes(capsys):
    assert demo.main(SMALL) == 0
    text = capsys.readouterr().out
    assert "every gate passes" in text and "FAIL" not in text
    for line in ("gate_up", "h", "y", "out", "dX", "dp", "dx", "dW13", "dW2", "oracle's dW2", "expert ids", "d router"):
        assert re.search(rf"^  {re.escape(line)} .*pass$", text, re.M), line
    assert re.search(r"^  expert ids +exact", text, re.M)


@pytest.mark.parametrize("expert", [0, 5])
def test_a_wrong_expert_turns_it_red_and_is_named(expert, capsys):
    assert demo.main([*SMALL, "--break-expert", str(expert)]) == 1
    text = capsys.readouterr().out
    failed = {line.split()[0] for line in text.splitlines() if "FAIL" in line and line.startswith("  ")}
    assert {"gate_up", "h", "y", "out", "dx", "dW13", "dW2"} <= failed
    named = re.findall(r"^  (?:gate_up|h|y|dW13|dW2) .*expert (\d+):", text, re.M)
    assert named and set(named) == {str(expert)}
    assert not failed & {"x", "dh", "expert", "oracle's"}, "what comes before the fault, and the judges, stay green"
    assert "lines FAIL their gate" in text


def test_the_checkpoint_has_the_official_names_and_scales(tmp_path):
    demo.write_checkpoint(arguments(), tmp_path / "bf16")
    keys = convert_to_fp8(tmp_path / "bf16", tmp_path / "fp8", demo.quantize_matrix)
    assert len(keys) == 3 * 16 + 3
    index = json.loads((tmp_path / "fp8" / "model.safetensors.index.json").read_text())["weight_map"]
    assert len(set(index.values())) > 1, "several shards"
    for e in range(16):
        for name in ("gate_proj", "up_proj", "down_proj"):
            key = f"model.layers.1.mlp.experts.{e}.{name}.weight"
            with safe_open(tmp_path / "fp8" / index[key], "pt") as shard:
                weight = shard.get_tensor(key)
            with safe_open(tmp_path / "fp8" / index[f"{key}_scale_inv"], "pt") as shard:
                scale = shard.get_tensor(f"{key}_scale_inv")
            assert weight.dtype == torch.float8_e4m3fn and scale.dtype == torch.float32
            assert scale.shape == tuple(-(-n // 128) for n in weight.shape)
    assert "model.layers.1.mlp.gate.e_score_correction_bias" in index
    config = json.loads((tmp_path / "fp8" / "config.json").read_text())
    assert config["model_type"] == "deepseek_v3"
    assert config["quantization_config"]["weight_block_size"] == [128, 128]


def test_without_transformers_it_says_what_is_missing(monkeypatch, capsys):
    import sys

    monkeypatch.setitem(sys.modules, "transformers", None)
    assert demo.main(SMALL) == 2
    assert "transformers: expected an installed package, got none. pip install" in capsys.readouterr().err


@pytest.mark.parametrize(
    "options,message",
    [
        (
            ["--hidden", "0", "--tokens", "-1"],
            "demo: --tokens: expected at least 1, got -1.\n--hidden: expected at least 1, got 0",
        ),
        (["--experts", "6"], "demo: --experts: expected a multiple of the 4 groups, got 6"),
        (["--top-k", "9"], "demo: --top-k: expected 1 to the 8 experts of two groups, got 9"),
        (["--break-expert", "16"], "demo: --break-expert: expected an expert below 16, got 16"),
        (["--device", "bogus"], "demo: --device: expected cpu.*, got 'bogus'"),
        (["--folder", "/proc/nowhere"], "demo: .*No such file.*/proc/nowhere"),
        (["--backend", "cute"], "demo: backend: 'cute' does not run this"),
    ],
    ids=lambda v: " ".join(v) if isinstance(v, list) else "",
)
def test_refusals(options, message, capsys):
    assert demo.main([*SMALL, *options]) == 1
    assert re.search(message, capsys.readouterr().err)
