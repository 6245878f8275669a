"""A18 and the estimates: what is counted is what a loaded model holds, and a limit is the lowest of all limits."""

import pytest
import torch
from tiny import MAKERS, tiny_model

from pop_core import cgroup, memory
from pop_core.errors import NotEnoughMemory


@pytest.mark.parametrize("name", MAKERS)
@pytest.mark.parametrize("dtype", (torch.float32, torch.bfloat16))
def test_the_estimate_is_what_the_loaded_model_holds(name, dtype):
    model = tiny_model(name).to(dtype)
    assert memory.model_bytes(model.config, dtype) == sum(p.nbytes for p in model.parameters())


def test_tied_weights_are_counted_once():
    tied, untied = (memory.model_bytes(tiny_model(name).config, torch.float32) for name in ("llama-tied", "llama"))
    assert untied - tied == tiny_model("llama").lm_head.weight.nbytes


def test_quantised_layers_count_with_their_stored_bits():
    config = tiny_model("llama").config
    full = memory.model_bytes(config, torch.bfloat16)
    config.quantization_config = {"quant_method": "bitsandbytes", "load_in_4bit": True}
    layers = sum(p.numel() for p in tiny_model("llama").model.layers.parameters() if p.dim() == 2)
    assert full - memory.model_bytes(config, torch.bfloat16) == layers * (16 - 4) // 8


def test_require_names_what_is_needed_and_what_is_free(monkeypatch):
    monkeypatch.setattr(memory, "free_bytes", lambda device: 3_000_000_000)
    memory.require(3_000_000_000, "cpu", "the model")
    with pytest.raises(NotEnoughMemory, match=r"the model needs about 8\.0 GB, and 3\.0 GB is free on cpu\.$"):
        memory.require(8_000_000_000, "cpu", "the model")


def test_free_memory_is_the_lower_of_system_and_container(monkeypatch):
    system = memory.free_bytes("cpu")
    assert system > 0
    monkeypatch.setattr(cgroup, "memory_free", lambda: 12345)
    assert memory.free_bytes("cpu") == 12345
    monkeypatch.setattr(cgroup, "memory_free", lambda: 1 << 62)
    assert memory.free_bytes("cpu") < 1 << 50


@pytest.fixture
def tree(tmp_path, monkeypatch):
    """An invented /sys/fs/cgroup: `tree(membership, {file: text})`."""

    def build(membership: str, files: dict):
        (tmp_path / "membership").write_text(membership)
        for name, text in files.items():
            (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
            (tmp_path / name).write_text(text + "\n")
        monkeypatch.setattr(cgroup, "ROOT", tmp_path)
        monkeypatch.setattr(cgroup, "MEMBERSHIP", tmp_path / "membership")

    return build


def test_cgroup_version_2(tree):
    tree(
        "0::/pod/box",
        {
            "pod/memory.max": "5000",
            "pod/memory.current": "1000",
            "pod/memory.stat": "anon 1\ninactive_file 200",
            "pod/box/memory.max": "max",
            "pod/box/memory.current": "900",
            "pod/box/cpu.max": "150000 100000",
            "pod/cpu.max": "max 100000",
        },
    )
    assert cgroup.memory_free() == 5000 - 1000 + 200
    assert cgroup.cpu_quota() == 1.5


def test_cgroup_version_1(tree):
    tree(
        "4:memory:/docker/x\n3:cpu,cpuacct:/docker/x",
        {
            "memory/docker/x/memory.limit_in_bytes": "7000",
            "memory/docker/x/memory.usage_in_bytes": "8000",
            "cpu/cpu.cfs_quota_us": "200000",
            "cpu/cpu.cfs_period_us": "100000",
            "cpu/docker/x/cpu.cfs_quota_us": "-1",
            "cpu/docker/x/cpu.cfs_period_us": "100000",
        },
    )
    assert cgroup.memory_free() == 0  # over its limit, not below nothing
    assert cgroup.cpu_quota() == 2.0


def test_no_cgroup_is_no_limit(tree):
    tree("", {})
    assert cgroup.memory_free() is None and cgroup.cpu_quota() is None
