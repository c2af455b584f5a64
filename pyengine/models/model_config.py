"""The numbers of a model, under Hugging Face's names where it has them."""

from __future__ import annotations

from dataclasses import dataclass

from pyengine.models.positions import RopeConfig
from pyengine.native import Activation


@dataclass(frozen=True)
class ModelConfig:
    """One model's numbers under Hugging Face's names, defaults filled in.

    Attributes:
        max_position_embeddings: trained context length in tokens.
        position_limit: tokens beyond which the model cannot go at all (learned positions), or None.
        norm_eps: epsilon of every norm.
        activation: the MLP's nonlinearity; hidden_act is config.json's word for it.
        rope: rotary parameters, None where positions are ALiBi or learned.
        layer_windows: keys each layer sees, own included; 0 = all.
        attention_scales: factor on q.k of each layer.
        eos_token_ids: ids that end a text; generation_config.json overrides config.json.
        ignored_fields: keys of config.json that were not read and are not known to be harmless.
        source: the file this was read from.
    """

    model_type: str
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_hidden_layers: int
    num_attention_heads: int
    num_key_value_heads: int
    head_dim: int
    max_position_embeddings: int
    position_limit: int | None
    norm_eps: float
    hidden_act: str
    activation: Activation
    tie_word_embeddings: bool
    rope: RopeConfig | None
    layer_windows: tuple[int, ...]
    attention_scales: tuple[float, ...]
    bos_token_id: int | None
    eos_token_ids: tuple[int, ...]
    pad_token_id: int | None
    ignored_fields: tuple[str, ...]
    source: str

    @property
    def q_width(self) -> int:
        """Values of one row's queries, all heads together."""
        return self.num_attention_heads * self.head_dim

    @property
    def kv_width(self) -> int:
        """Values of one row's keys (or values), all kv heads together."""
        return self.num_key_value_heads * self.head_dim
