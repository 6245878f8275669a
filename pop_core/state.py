"""What one run owns, once its prompt is read and for as long as it writes."""

from dataclasses import dataclass

from .cache import KVCache
from .channels import OnlineChannels, StaticChannels
from .decoder import Decoder, Ffn, Positions


@dataclass
class State:
    """decoder: over the layers that run. channels: None where all of them run. ffn: of tokens that are written, where
    it is not the model's own."""

    decoder: Decoder
    cache: KVCache
    positions: Positions
    channels: OnlineChannels | StaticChannels | None = None
    ffn: Ffn | None = None
