"""The catalogue of negative controls: one feature of a model made wrong on purpose, each.

Each control changes the declarative spec, the config, the stored weights, or what a step is told.
The forward pass has no branch for any of them. What a control needs of a model is a predicate over
its traits; where two ways of computing are the same by mathematics, it says it does not apply.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from pyengine.errors import CannotCompare
from pyengine.evidence.altered import Model
from pyengine.generation.engine import Engine
from pyengine.generation.scheduler import Runner
from pyengine.models.model_config import ModelConfig
from pyengine.models.positions import RopeConfig
from pyengine.models.spec import DecoderSpec
from pyengine.native import Activation


@dataclass(frozen=True)
class Control:
    """One feature made wrong.

    Attributes:
        name: as in `--control NAME`.
        mistake: what is done wrong.
        needs: traits a model must have, in words; applies: the same as a predicate.
        change: makes the mistake.
        numeric: a small error by nature, judged by NUMERIC_ERROR.
        coarse: a coarser format, judged by how much worse than q8_0 it is.
        degenerate: must be refused at load and, forced, caught as NaN by name.
        change_engine: a mistake in what a step is told rather than in the model.
    """

    name: str
    mistake: str
    needs: str
    applies: Callable[[DecoderSpec, ModelConfig], bool]
    change: Callable[[Model], None] = lambda model: None
    numeric: bool = False
    coarse: bool = False
    degenerate: bool = False
    change_engine: Callable[[Engine], None] | None = None


# ---- mistakes that take more than a line --------------------------------------------------------


class _SeeingAhead:
    """A scheduler's runner that tells attention every row is its chunk's last (a Runner)."""

    def __init__(self, runner: Runner) -> None:
        self._runner = runner
        self.buffers = runner.buffers

    def run(self, rows: int, *, logits: bool) -> None:
        """Lifts the causal mask inside the step, then runs it."""
        position, sequence = self.buffers.host["position"], self.buffers.host["sequence"]
        for lane in np.unique(sequence[:rows]):
            mine = np.flatnonzero((sequence[:rows] == lane) & (position[:rows] >= 0))
            position[mine] = position[mine].max(initial=-1)
        self._runner.run(rows, logits=logits)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._runner, name)


def _see_ahead(engine: Engine) -> None:
    scheduler = engine._scheduler  # what a step is told is made nowhere else
    assert scheduler is not None
    scheduler._runner = _SeeingAhead(scheduler._runner)


def _rotary(spec: DecoderSpec, config: ModelConfig) -> bool:
    return config.rope is not None


def _plain_rope(config: ModelConfig) -> bool:
    return config.rope is not None and config.rope.rope_type != "longrope"


def _spec(**changes: Any) -> Callable[[Model], None]:
    def change(model: Model) -> None:
        model.spec = replace(model.spec, **changes)

    return change


def _config(**changes: Any) -> Callable[[Model], None]:
    def change(model: Model) -> None:
        model.config = replace(model.config, **changes)

    return change


def _half_span(model: Model) -> None:
    model.set_rope(rotary_dim=model.rope.rotary_dim // 4 * 2)


def _interleave(model: Model) -> None:
    """Pairs (2j, 2j+1) rotate together: the kernel's (j, j+h) pairs after moving rows."""
    d, r = model.config.head_dim, model.rope.rotary_dim
    inside = np.concatenate([np.arange(0, r, 2), np.arange(1, r, 2), np.arange(r, d)])
    rows = model.config.q_width + model.config.kv_width
    heads = np.arange(0, rows, d)[:, None] + inside
    values = np.arange(rows, rows + model.config.kv_width)
    order = np.concatenate([heads.reshape(-1), values])
    model.reorder(order)
    model.reorder_norms(order)


def _degenerate_rope(model: Model) -> None:
    rope = RopeConfig("default", 0.0, model.config.head_dim)
    model.spec = replace(model.spec, position="rope")
    model.config = replace(model.config, rope=rope)


def _no_alibi(model: Model) -> None:
    model.spec = replace(model.spec, position="rope")  # without a table: no positions at all


def _roll_heads(model: Model) -> None:
    heads = np.roll(np.arange(model.config.num_attention_heads), 1)
    model.reorder_heads(heads, kv=True)


def _swap_q_k(model: Model) -> None:
    q, kv = model.config.q_width, model.config.kv_width
    model.reorder(np.concatenate([np.arange(q, 2 * q), np.arange(q), np.arange(2 * q, 2 * q + kv)]))


def _no_embedding_norm(model: Model) -> None:
    model.spec = replace(model.spec, embed_norm=False)
    for part in ("weight", "bias"):
        model.checkpoint.hide(model.name("embed_norm", part=part))


def _no_qk_norm(model: Model) -> None:
    model.hide("q_norm")
    model.hide("k_norm")
    model.spec = replace(model.spec, qk_norm=None)


def _no_qkv_bias(model: Model) -> None:
    roles = ("q", "k", "v") if model.spec.qkv == "split" else ("qkv",)
    for role in roles:
        for layer in model.layers:
            model.checkpoint.hide(model.name(role, layer, part="bias"))
    model.spec = replace(model.spec, qkv_bias=False)


def _swap_residual(model: Model) -> None:
    if model.spec.parallel_residual:
        model.copy("attn_norm", "mlp_norm")
    else:
        model.hide("mlp_norm")
    model.spec = replace(model.spec, parallel_residual=not model.spec.parallel_residual)


def _misgroup(model: Model) -> None:
    """Query head i reads kv head i % kv_heads: the same as moving query heads between groups."""
    kv = model.config.num_key_value_heads
    group = model.config.num_attention_heads // kv
    heads = np.arange(group * kv).reshape(group, kv).T.reshape(-1)
    model.reorder_heads(heads, kv=False)


def _offset_positions(model: Model) -> None:
    if model.spec.position == "learned":
        model.shift_rows("position_embed", "position_embed")
    else:
        model.rotate_queries()


# ---- the list -----------------------------------------------------------------------------------

CONTROLS: tuple[Control, ...] = (
    Control(
        "full-rope",
        "the whole head rotates",
        "rotary span smaller than the head",
        lambda s, c: _plain_rope(c) and c.rope is not None and c.rope.rotary_dim < c.head_dim,
        lambda m: m.set_rope(rotary_dim=m.config.head_dim),
    ),
    Control(
        "half-rope-span",
        "half of the rotary span rotates",
        "rotary positions, one set of frequencies, a span of 4 or more",
        lambda s, c: _plain_rope(c) and c.rope is not None and c.rope.rotary_dim >= 4,
        _half_span,
    ),
    Control(
        "interleaved-rope",
        "neighbours rotate together instead of halves",
        "rotary positions",
        _rotary,
        _interleave,
    ),
    Control("no-rope", "nothing rotates", "rotary positions", _rotary, _config(rope=None)),
    Control(
        "rope-theta",
        "the base of the frequencies is ten times too large",
        "rotary positions",
        _rotary,
        lambda m: m.set_rope(rope_theta=m.rope.rope_theta * 10),
    ),
    Control(
        "rotary-on-alibi",
        "a rotary path with no base of frequencies on a model that has ALiBi",
        "ALiBi",
        lambda s, c: s.position == "alibi",
        _degenerate_rope,
        degenerate=True,
    ),
    Control("no-alibi", "no position bias", "ALiBi", lambda s, c: s.position == "alibi", _no_alibi),
    Control(
        "alibi-slopes-shifted",
        "every head has its neighbour's slope",
        "ALiBi, 2 heads or more",
        lambda s, c: s.position == "alibi" and c.num_attention_heads > 1,
        _roll_heads,
    ),
    Control(
        "qkv-not-deinterleaved",
        "fused rows ordered by head are read as all q, all k, all v",
        "fused projection ordered by head, 2 heads or more",
        lambda s, c: s.qkv == "per_head" and c.num_attention_heads > 1,
        _spec(qkv="concat"),
    ),
    Control(
        "swap-q-k",
        "queries and keys change places",
        "as many key heads as query heads",
        lambda s, c: c.num_attention_heads == c.num_key_value_heads,
        _swap_q_k,
    ),
    Control(
        "no-embedding-norm",
        "the norm after the embedding is left out",
        "a norm after the embedding",
        lambda s, c: s.embed_norm,
        _no_embedding_norm,
    ),
    Control(
        "pre-norm-instead-of-post",
        "norms stand before the sublayers",
        "norms after the sublayers",
        lambda s, c: s.norm_placement == "post",
        _spec(norm_placement="pre"),
    ),
    Control(
        "qk-norm-per-head",
        "q and k are normalised head by head",
        "q and k norms over all heads together, 2 heads or more",
        lambda s, c: s.qk_norm == "full" and c.num_attention_heads > 1,
        lambda m: m.reshape_qk_norm("per_head"),
    ),
    Control(
        "qk-norm-full",
        "q and k are normalised over all heads together",
        "q and k norms head by head",
        lambda s, c: s.qk_norm == "per_head" and c.num_attention_heads > 1,
        lambda m: m.reshape_qk_norm("full"),
    ),
    Control(
        "qk-norm-off",
        "q and k are not normalised",
        "q and k norms",
        lambda s, c: s.qk_norm is not None,
        _no_qk_norm,
    ),
    Control(
        "mlp-norm-overwritten",
        "the loader puts the norm of attention's output into the MLP norm's slot",
        "norms after the sublayers",
        lambda s, c: s.norm_placement == "post",
        lambda m: m.copy("attn_norm", "mlp_norm"),
    ),
    Control(
        "no-qkv-bias",
        "the biases of q, k and v are dropped",
        "biases of q, k and v",
        lambda s, c: s.qkv_bias,
        _no_qkv_bias,
    ),
    Control(
        "residual-swapped",
        "parallel residual computed in sequence, or the other way round",
        "norms before the sublayers, residual from the stream",
        lambda s, c: s.norm_placement == "pre" and not s.residual_from_norm,
        _swap_residual,
    ),
    Control(
        "kv-heads-misgrouped",
        "query heads take key heads in turn instead of in groups",
        "2 key heads or more, each read by several query heads",
        lambda s, c: 1 < c.num_key_value_heads < c.num_attention_heads,
        _misgroup,
    ),
    Control(
        "sliding-window-off",
        "every layer sees everything",
        "a sliding window",
        lambda s, c: any(c.layer_windows),
        lambda m: _config(layer_windows=(0,) * len(m.layers))(m),
    ),
    Control(
        "longrope-short-only",
        "the short factors are used at every length",
        "longrope",
        lambda s, c: c.rope is not None and c.rope.rope_type == "longrope",
        lambda m: m.set_rope(long_factor=m.rope.short_factor),
    ),
    Control(
        "tied-head-broken",
        "the head is not the embedding but off by one row",
        "a head tied to the embedding",
        lambda s, c: c.tie_word_embeddings,
        lambda m: m.shift_rows("embed", "lm_head"),
    ),
    Control(
        "position-offset",
        "learned: every position one too high; rotary: queries one too high, keys not",
        "learned positions, or rotary ones with one set of frequencies and no q norm after the "
        "projection (ALiBi does not change when all distances grow by one)",
        lambda s, c: s.position == "learned" or (_plain_rope(c) and s.qk_norm is None),
        _offset_positions,
    ),
    Control(
        "causal-mask-off",
        "a position sees those after it in its chunk",
        "positions that are not learned (there the same number picks the position's vector)",
        lambda s, c: s.position != "learned",
        change_engine=_see_ahead,
    ),
    Control(
        "norm-eps",
        "the epsilon of the norms is ten times too large",
        "norms",
        lambda s, c: True,
        lambda m: _config(norm_eps=m.config.norm_eps * 10)(m),
        numeric=True,
    ),
    Control(
        "gelu",
        "the exact formula in place of the tanh approximation",
        "a tanh GELU",
        lambda s, c: c.activation == Activation.GELU_TANH,
        _config(activation=Activation.GELU_ERF),
        numeric=True,
    ),
    Control(
        "q8-one-scale-per-row",
        "8 bits with one scale for a row instead of one for 32 values, where a column stands out",
        "a gated MLP of 256 or more, so that a row has 8 blocks",
        lambda s, c: s.mlp == "gated" and c.intermediate_size >= 256,
        lambda m: m.quantise(block=None),
        coarse=True,
    ),
)


def find_control(name: str) -> Control:
    """The control of that name.

    Raises:
        CannotCompare: there is none; the message lists those there are.
    """
    for control in CONTROLS:
        if control.name == name:
            return control
    known = ", ".join(control.name for control in CONTROLS)
    raise CannotCompare(f"no control {name!r}; known: all, {known}")
