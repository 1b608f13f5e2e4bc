"""Overlap settings: what they refuse, files of measured ones, and how a layer comes by them."""

from __future__ import annotations

import copy
import dataclasses
import json
import pickle
import subprocess
import sys

import pytest
import torch

from megamoe import LocalWorld, MegaMoE, MoEConfig, MoEContext, OverlapConfig, Recipe, mega_moe
from megamoe.cli.problem import ProblemSpec, make_problem
from megamoe.errors import MegaMoERuntimeError, MegaMoETypeError, MegaMoEValueError
from megamoe.overlap import OverlapKey, read_entries, read_overlap, write_overlap
from megamoe.provenance import gpu_name
from tests.support import fake_cute
from tests.support.compare import assert_bitwise
from tests.support.moe_calls import run
from tests.support.source_tree import ROOT

CONFIG = MoEConfig(hidden_size=128, intermediate_size=64, num_experts=8, top_k=3, num_shared_experts=1)
SIZES = (8, 128, 64, 3)


def key_of(**changes: object) -> OverlapKey:
    return dataclasses.replace(OverlapKey.of(torch.device("cpu"), SIZES, 1, Recipe()), **changes)


@pytest.fixture
def path(tmp_path):
    return tmp_path / "overlap.json"


# ---------------------------------------------------------------- the settings


@pytest.mark.parametrize(
    "fields, match",
    [
        ({"wgrad": "later"}, "wgrad: expected 'inline', 'stream' or 'delayed', got 'later'"),
        ({"steal_us": 2000}, "steal_us: expected a number from 0 to 1000, got 2000"),
        ({"steal_us": float("nan")}, "steal_us: expected a number from 0 to 1000, got nan"),
        ({"steal_us": "all"}, "steal_us: expected a number from 0 to 1000, got 'all'"),
        ({"reserve_sms": -1}, "reserve_sms: expected an integer from 0 to 64, got -1"),
        ({"lag": 2.5}, "lag: expected an integer from 0 to 1024, got 2.5"),
        ({"pull_batch": 17}, "pull_batch: expected an integer from 0 to 16, got 17"),
        ({"lag": True}, "lag: expected an integer from 0 to 1024, got True"),
    ],
)
def test_values_outside_are_refused(fields, match):
    with pytest.raises(MegaMoEValueError, match=match):
        OverlapConfig(**fields)


def test_everything_that_is_wrong_is_named_at_once():
    with pytest.raises(MegaMoEValueError, match="wgrad: .*\nlag: "):
        OverlapConfig(wgrad="never", lag=-1)


def test_frozen_and_hashable():
    assert len({OverlapConfig(), OverlapConfig(), OverlapConfig(lag=8)}) == 2
    with pytest.raises(dataclasses.FrozenInstanceError):
        OverlapConfig().lag = 3
    assert str(OverlapConfig()) == "defaults" and str(OverlapConfig("stream", lag=8)) == "wgrad=stream, lag=8"


def test_names_of_the_kernels_choices():
    tile_config = pytest.importorskip("cute_kernels.tile_config")
    assert OverlapConfig(reserve_sms=4).tiling == {}
    tiling = OverlapConfig(lag=8, pull_batch=2).tiling
    assert tile_config.TileConfig(**tiling) == tile_config.TileConfig(group_blocks=8, pull_batch=2)


# ---------------------------------------------------------------- files


def test_a_file_gives_back_what_was_written(path):
    first, second = OverlapConfig("stream", lag=8), OverlapConfig(pull_batch=2)
    write_overlap(path, key_of(), first, {"us": 12.5})
    write_overlap(path, key_of(ranks=2), second, {})
    assert read_overlap(path, key_of()) == first and read_overlap(path, key_of(ranks=2)) == second
    write_overlap(path, key_of(), second, {})  # in the place of the first
    assert read_overlap(path, key_of()) == second and len(read_entries(path)) == 2


@pytest.mark.parametrize(
    "change",
    [
        {"gpu": "h100"}, {"num_experts": 16}, {"hidden_size": 256}, {"intermediate_size": 128}, {"top_k": 2},
        {"ranks": 4}, {"recipe": dataclasses.asdict(Recipe(scale_format="pow2"))},
    ],
    ids=str,
)  # fmt: skip
def test_a_foreign_file_is_refused(path, change):
    write_overlap(path, key_of(**change), OverlapConfig(lag=8), {})
    with pytest.raises(
        MegaMoEValueError, match=r"overlap: expected settings for E=8 .* on cpu in .*, got E=.* R=.*tune"
    ):
        read_overlap(path, key_of())


def test_a_stale_file_is_refused_and_replaced(path):
    write_overlap(path, key_of(kernel_hash="0123"), OverlapConfig(lag=8), {})
    with pytest.raises(MegaMoEValueError, match="overlap: expected settings of kernels .* got those of 0123. Run mega"):
        read_overlap(path, key_of())
    write_overlap(path, key_of(), OverlapConfig(lag=16), {})
    assert [entry["overlap"]["lag"] for entry in read_entries(path)] == [16]


@pytest.mark.parametrize(
    "content, match",
    [
        (None, "overlap: expected a file that megamoe tune wrote, got .*No such file"),
        ("{", "overlap: expected a file that megamoe tune wrote, got "),
        ("[1]", "which is another kind of JSON"),
        ('{"megamoe_overlap": 2}', "overlap: expected format 1, got format 2"),
        ('{"megamoe_overlap": 1, "settings": [{"gpu": "h200"}]}', "overlap: expected settings with .*hidden_size"),
        ('{"megamoe_overlap": 1}', "overlap: expected a list of settings, got NoneType in .*overlap.json"),
        ('{"megamoe_overlap": 1, "settings": null}', "overlap: expected a list of settings, got NoneType in "),
        ('{"megamoe_overlap": 1, "settings": {"gpu": "h200"}}', "overlap: expected a list of settings, got dict in "),
        ('{"megamoe_overlap": 1, "settings": [3]}', "overlap: expected settings with "),
        ('{"megamoe_overlap": 1, "settings": []}', "overlap: expected settings for .*, got none. Run megamoe tune"),
    ],
)
def test_what_is_no_such_file_is_refused(path, content, match):
    if content is not None:
        path.write_text(content)
    with pytest.raises(MegaMoEValueError, match=match):
        read_overlap(path, key_of())


@pytest.mark.parametrize(("field", "value"), [("overlap", None), ("recipe", ["fp8"]), ("kernel_hash", 17)])
def test_settings_of_other_types_are_refused(path, field, value):
    write_overlap(path, key_of(), OverlapConfig(), {})
    content = json.loads(path.read_text())
    content["settings"][0][field] = value
    path.write_text(json.dumps(content))
    with pytest.raises(MegaMoEValueError, match=f"overlap: expected a file .*, got other types of {field} in .*again"):
        read_overlap(path, key_of())


def test_the_library_does_not_need_its_command_line(path):
    """Reading settings imports nothing of it."""
    write_overlap(path, key_of(), OverlapConfig(lag=8), {})
    program = f"""
import sys, torch
from megamoe import MegaMoE, MoEConfig
MegaMoE(MoEConfig(128, 64, 8, 3), overlap={str(path)!r}, backend="torch", device="cpu")
print([name for name in sys.modules if name.startswith("megamoe.cli")])
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, cwd=ROOT)
    assert (done.stdout, done.returncode) == ("[]\n", 0), done.stderr


def test_cards_of_one_family_have_names_of_their_own(monkeypatch):
    names = {
        "NVIDIA H200": "h200",
        "NVIDIA H100 PCIe": "h100-pcie",
        "NVIDIA H100 NVL": "h100-nvl",
        "NVIDIA H100 80GB HBM3": "h100-80gb-hbm3",
        "NVIDIA GH200 480GB": "gh200-480gb",
        "NVIDIA GeForce RTX 4090": "geforce-rtx-4090",
        "NVIDIA RTX A6000": "rtx-a6000",
    }
    for name, want in names.items():
        monkeypatch.setattr(torch.cuda, "get_device_name", lambda device, name=name: name)
        assert gpu_name(torch.device("cuda", 0)) == want
    assert gpu_name(torch.device("cpu")) == "cpu"


def test_fields_of_another_version_are_refused(path):
    write_overlap(path, key_of(), OverlapConfig(), {})
    content = json.loads(path.read_text())
    content["settings"][0]["overlap"]["warps"] = 3
    path.write_text(json.dumps(content))
    with pytest.raises(MegaMoEValueError, match="overlap: expected fields of OverlapConfig in .*, got warps"):
        read_overlap(path, key_of())


# ---------------------------------------------------------------- layers


def test_a_layer_reads_its_file(path):
    write_overlap(path, key_of(), OverlapConfig("delayed", lag=8), {})
    layer = MegaMoE(CONFIG, overlap=path, backend="torch")
    assert layer.experts.context.overlap == OverlapConfig("delayed", lag=8)
    assert layer.shared.context.overlap == OverlapConfig("delayed")  # of another size
    assert layer.experts.context.deferred.mode == "delayed"
    with pytest.raises(MegaMoEValueError, match="overlap: expected settings for .* R=2 "):
        MegaMoE(CONFIG, overlap=str(path), world=LocalWorld(2))
    with pytest.raises(MegaMoEValueError, match="overlap: expected settings for .*bf16"):
        MegaMoE(CONFIG, overlap=path, recipe=Recipe("bf16"))


def test_what_is_no_setting_is_refused():
    with pytest.raises(MegaMoETypeError, match="overlap: expected an OverlapConfig, the path .* or None, got int"):
        MegaMoE(CONFIG, overlap=3)
    with pytest.raises(MegaMoETypeError, match="overlap: expected an OverlapConfig or None, got str"):
        MoEContext(overlap="overlap.json")


def test_without_a_module_gradients_are_inline():
    problem = make_problem(ProblemSpec((4,), 128, 128, 4, 2))
    with pytest.raises(MegaMoEValueError, match="context.overlap.wgrad: expected 'inline' where no module"):
        run(problem, MoEContext(overlap=OverlapConfig("stream")))
    run(problem, MoEContext(overlap=OverlapConfig(reserve_sms=4)), call=mega_moe)


def test_settings_may_change_between_steps():
    layer = MegaMoE(CONFIG, backend="torch")
    x = torch.randn(10, 128).bfloat16()
    layer(x).sum().backward()
    want = layer.experts.w13.grad.clone()
    layer.zero_grad()
    layer.set_overlap(OverlapConfig("delayed"))
    layer(x).sum().backward()
    assert layer.experts.w13.grad is None
    with pytest.raises(MegaMoERuntimeError, match=r"overlap: expected no weight gradients that wait, got 1. Call back"):
        layer.set_overlap(None)
    layer.backward_dw()
    assert_bitwise(layer.experts.w13.grad, want, "w13")
    layer.set_overlap(None)
    assert layer.experts.context.deferred is None


def test_copies_and_pickles_keep_their_settings():
    layer = MegaMoE(CONFIG, overlap=OverlapConfig("delayed", reserve_sms=2))
    for other in (copy.deepcopy(layer), pickle.loads(pickle.dumps(layer))):
        assert other.experts.context.overlap == OverlapConfig("delayed", reserve_sms=2)
        assert other.experts.context.deferred.mode == "delayed"
        assert other.experts.context.deferred is not layer.experts.context.deferred


def test_settings_reach_the_fused_launches(monkeypatch):
    backend = fake_cute.install(monkeypatch)
    seen = []
    for name in ("forward", "backward"):
        real = getattr(backend, name)
        note = lambda *a, real=real, **k: seen.append(a[-1].overlap) or real(*a, **k)  # noqa: E731
        monkeypatch.setattr(backend, name, note)
    overlap = OverlapConfig(reserve_sms=4)
    problem = make_problem(ProblemSpec((4,), 128, 128, 4, 2))
    run(problem, MoEContext(backend="cute", overlap=overlap))
    assert seen == [overlap, overlap]


@pytest.mark.parametrize("mode", ["inline", "stream", "delayed"])
def test_weight_gradients_beside_other_kernels_take_one_task_a_cta(monkeypatch, mode):
    """CTAs that end soon give their SMs to the kernels of the next layer; alone on the card they stay."""
    fake_cute.install(monkeypatch)
    from cute_kernels import wgrad_launch

    grids = []
    real = wgrad_launch.weight_gradients
    note = lambda *a, tasks_per_cta=None, **k: grids.append(tasks_per_cta) or real(*a, **k)  # noqa: E731
    monkeypatch.setattr(wgrad_launch, "weight_gradients", note)
    config = MoEConfig(128, 128, num_experts=8, top_k=2)
    layers = []
    for wgrad in (mode, "inline"):
        torch.manual_seed(0)
        layers.append(MegaMoE(config, backend="cute", overlap=OverlapConfig(wgrad=wgrad)))
        layers[-1](torch.linspace(-1, 1, 1280).view(10, 128).bfloat16()).sum().backward()
        layers[-1].backward_dw()
    assert grids == [1 if mode == "stream" else None, None]
    for got, want in zip(layers[0].parameters(), layers[1].parameters(), strict=True):
        assert_bitwise(got.grad, want.grad, "gradient")
