"""Models from the Hugging Face hub, as folders in its cache: first the config, later the rest.

Every failure becomes one of four sentences: no such model, no access, hub not reachable, or not a usable model. The
only token used is $HF_TOKEN, and no message repeats it.
"""

import os
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from huggingface_hub import HfApi, hf_hub_download, snapshot_download
from huggingface_hub.errors import (
    EntryNotFoundError,
    GatedRepoError,
    HfHubHTTPError,
    HFValidationError,
    HTTPError,
    LocalEntryNotFoundError,
    RepositoryNotFoundError,
)
from huggingface_hub.utils import logging
from tqdm import tqdm

from .errors import HubOffline, ModelGated, ModelNotFound, PopError

WANTED = ["*.json", "*.safetensors", "*.jinja", "*.model", "*.txt"]
UNWANTED = ["*/*", "consolidated*"]  # other formats of the same weights
ANSWER_SECONDS = 10


@dataclass(frozen=True)
class HubModel:
    """A model on the hub at one commit, or what the local cache has of it when the hub did not answer."""

    repo: str
    commit: str | None

    def config_folder(self) -> Path:
        """A folder with at least the model's config.json."""
        with _clear_errors(self.repo):
            # by its branch and not by its commit: that leaves the note in the cache which commit the branch is at
            return Path(hf_hub_download(self.repo, "config.json", **self._access())).parent

    def folder(self, progress=None) -> Path:
        """The same folder with weights and tokenizer. An exception raised by `progress` stops the download."""
        with _clear_errors(self.repo):
            folder = snapshot_download(
                self.repo,
                revision=self.commit,
                allow_patterns=WANTED,
                ignore_patterns=UNWANTED,
                tqdm_class=_reporter(self.repo, progress),
                **self._access(),
            )
            return Path(folder)

    def _access(self) -> dict:
        return {"local_files_only": self.commit is None, "token": _token()}


def find(repo: str) -> HubModel:
    """Ask the hub about `repo`; one question, because its download functions retry for half a minute when offline."""
    with _clear_errors(repo):
        try:
            return HubModel(repo, HfApi().model_info(repo, timeout=ANSWER_SECONDS, token=_token()).sha)
        except HfHubHTTPError as error:
            if error.response.status_code < 500:
                raise
        except (HTTPError, ConnectionError, TimeoutError):
            pass
    return HubModel(repo, None)


def _token():
    return os.environ.get("HF_TOKEN") or False  # False: not the token that a login left in the home folder either


def _reporter(repo: str, progress):
    shown = [0.0]  # several bars count the same bytes, at different moments

    class Report(tqdm):
        """Tells `progress` about bytes and prints nothing."""

        def __init__(self, *args, **kwargs):
            super().__init__(*args, **kwargs | {"disable": True})
            self.counts_bytes, self.seen = kwargs.get("unit") == "B", 0

        def update(self, n=1):
            self.seen += n or 0
            if progress and self.counts_bytes and self.total and self.seen / self.total > shown[0]:
                shown[0] = min(1.0, self.seen / self.total)
                progress(shown[0], f"Downloading {repo}, {self.total / 1e6:.0f} MB")

    return Report


@contextmanager
def _clear_errors(repo: str):
    verbosity = logging.get_verbosity()
    logging.set_verbosity(logging.CRITICAL)  # its warnings are about what becomes an error here
    try:
        yield
    except (GatedRepoError, RepositoryNotFoundError, HFValidationError) as error:
        raise (_gated(repo) if isinstance(error, GatedRepoError) else _unknown(repo)) from None
    except LocalEntryNotFoundError:
        raise _offline(repo) from None
    except EntryNotFoundError:
        raise ModelNotFound(
            f"The hub model '{repo}' has no config.json; for a GGUF file, download it and give its path."
        ) from None
    except HfHubHTTPError as error:
        status = getattr(error.response, "status_code", None)
        if status in (401, 403):
            raise _gated(repo) from None
        raise HubOffline(f"The hub answered with error {status} for '{repo}'; try again later.") from None
    except (HTTPError, ConnectionError, TimeoutError):
        raise _offline(repo) from None
    except OSError as error:
        raise PopError(f"The hub's cache cannot be written: {error}.") from None
    finally:
        logging.set_verbosity(verbosity)


def _unknown(repo: str) -> ModelNotFound:
    return ModelNotFound(f"There is no model '{repo}' on the hub, or it is private; check the spelling of owner/name.")


def _gated(repo: str) -> ModelGated:
    if os.environ.get("HF_TOKEN"):
        return ModelGated(f"The token in HF_TOKEN has no access to '{repo}'; ask for access on the model's page.")
    return ModelGated(f"The model '{repo}' needs permission; set HF_TOKEN to a token that has access to it.")


def _offline(repo: str) -> HubOffline:
    return HubOffline(
        f"The hub cannot be reached, or HF_HUB_OFFLINE is set, and '{repo}' is not whole in the local cache; "
        "a local folder, a GGUF file or smollm2 needs no hub."
    )
