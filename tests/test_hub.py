"""C10: what the hub may answer, each with a sentence of its own; it is never really asked."""

import os
from types import SimpleNamespace

import pytest
from huggingface_hub import errors as hub_errors
from tiny_files import config_folder, tiny_folder
from transformers import GPT2Config

from pop_core import hub
from pop_core.errors import HubOffline, ModelGated, ModelNotFound, PopError, UnsupportedModel
from pop_core.loading import load_model


@pytest.fixture(scope="module")
def llama(tmp_path_factory):
    return tiny_folder(tmp_path_factory.mktemp("llama"), "llama")


def answer(status: int):
    return SimpleNamespace(status_code=status, headers={}, request=None)


FOUND = SimpleNamespace(sha="a" * 40)
REPO = hub_errors.RepositoryNotFoundError("secret", response=answer(404))
GATED = hub_errors.GatedRepoError("secret", response=answer(403))


@pytest.fixture
def asked(monkeypatch):
    """Make the three functions of the hub's client raise or return what a test says."""
    monkeypatch.setenv("HF_TOKEN", "hf_secret")

    def does(outcome):
        def call(*args, **options):
            assert options["token"] == (os.environ.get("HF_TOKEN") or False)
            if isinstance(outcome, BaseException):
                raise outcome
            return outcome

        return call

    def set_up(info=FOUND, config="", rest=""):
        monkeypatch.setattr(hub.HfApi, "model_info", does(info))
        monkeypatch.setattr(hub, "hf_hub_download", does(config))
        monkeypatch.setattr(hub, "snapshot_download", does(rest))

    return set_up


@pytest.mark.parametrize(
    "outcomes, error, said",
    [
        (dict(info=REPO), ModelNotFound, "no model 'owner/name' on the hub"),
        (dict(config=GATED), ModelGated, "HF_TOKEN has no access"),
        (dict(info=hub_errors.HfHubHTTPError("secret", response=answer(401))), ModelGated, "HF_TOKEN"),
        (dict(config=hub_errors.HfHubHTTPError("secret", response=answer(403))), ModelGated, "HF_TOKEN"),
        (dict(info=hub_errors.HfHubHTTPError("secret", response=answer(429))), HubOffline, "error 429"),
        (dict(config=hub_errors.RemoteEntryNotFoundError("x", response=answer(404))), ModelNotFound, "no config.json"),
        (dict(config=OSError(28, "No space left")), PopError, "cannot be written: .*No space left"),
    ],
)
def test_hub_errors_are_different_sentences(outcomes, error, said, asked):
    asked(**outcomes)
    with pytest.raises(error, match=said) as raised:
        load_model("owner/name")
    assert "secret" not in str(raised.value)


@pytest.mark.parametrize(
    "unreachable",
    [
        hub_errors.OfflineModeIsEnabled("x"),
        ConnectionError("x"),
        TimeoutError("x"),
        hub_errors.HTTPError("x"),
        hub_errors.HfHubHTTPError("x", response=answer(503)),
    ],
    ids=lambda error: type(error).__name__,
)
def test_offline_is_said_only_when_the_cache_does_not_help(unreachable, asked, llama):
    asked(info=unreachable, config=hub_errors.LocalEntryNotFoundError("x"))
    with pytest.raises(HubOffline, match="cannot be reached"):
        load_model("owner/name")
    asked(info=unreachable, config=llama / "config.json", rest=hub_errors.IncompleteSnapshotError("x", "y"))
    with pytest.raises(HubOffline, match="not whole in the local cache"):
        load_model("owner/name")
    asked(info=unreachable, config=llama / "config.json", rest=llama)
    assert load_model("owner/name").source == "hub"


def test_without_a_token_a_gated_model_asks_for_one(asked, monkeypatch):
    asked(config=GATED)
    monkeypatch.delenv("HF_TOKEN")
    with pytest.raises(ModelGated, match="set HF_TOKEN"):
        load_model("owner/name")


def test_weights_of_an_unsupported_hub_model_are_not_downloaded(asked, tmp_path):
    config_folder(tmp_path, GPT2Config())
    asked(config=tmp_path / "config.json", rest=AssertionError("downloaded"))
    with pytest.raises(UnsupportedModel, match="gpt2"):
        load_model("owner/name")


def test_a_hub_model_is_its_url_and_its_name(asked, llama):
    asked(config=llama / "config.json", rest=llama)
    loaded = load_model("https://huggingface.co/owner/name")
    assert (loaded.name, loaded.source) == ("owner/name", "hub")
