"""models/positions.py: rotary frequencies against published numbers, tables, ALiBi slopes."""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np
import pytest

from pyengine.models.positions import (
    RopeConfig,
    alibi_slopes,
    frequencies,
    longrope_attention_factor,
    rope_rows,
    yarn_attention_factor,
)

PLAIN = RopeConfig("default", 10000.0, 8)


def test_the_exponent_runs_over_the_rotated_dimensions() -> None:
    assert np.allclose(frequencies(PLAIN), [1.0, 0.1, 0.01, 0.001], rtol=1e-15)


def test_linear_divides_every_frequency() -> None:
    rope = replace(PLAIN, rope_type="linear", factor=4.0)
    assert np.array_equal(frequencies(rope) * 4, frequencies(PLAIN))


def test_llama3_keeps_short_waves_and_stretches_long_ones() -> None:
    rope = replace(
        PLAIN, rope_type="llama3", rotary_dim=128, rope_theta=5e5, factor=8.0,
        original_max_position_embeddings=8192, low_freq_factor=1.0, high_freq_factor=4.0,
    )  # fmt: skip
    base = frequencies(replace(rope, rope_type="default"))
    turns = 8192 * base / (2 * math.pi)
    scaled = frequencies(rope)
    assert np.array_equal(scaled[turns >= 4], base[turns >= 4])
    assert np.allclose(scaled[turns <= 1], base[turns <= 1] / 8, rtol=1e-15)
    between = (turns > 1) & (turns < 4)
    keep = (turns[between] - 1) / 3
    assert between.any()
    assert np.allclose(scaled[between], base[between] * (keep + (1 - keep) / 8), rtol=1e-14)


def test_yarn_of_qwen25_bends_between_pairs_23_and_40() -> None:
    rope = replace(
        PLAIN, rope_type="yarn", rotary_dim=128, rope_theta=1e6, factor=4.0,
        original_max_position_embeddings=32768,
    )  # fmt: skip
    ratio = frequencies(rope) / frequencies(replace(rope, rope_type="default"))
    assert np.array_equal(ratio[:24], np.ones(24))
    assert ratio[24] < 1
    assert ratio[39] > 0.25
    assert np.allclose(ratio[40:], 0.25, rtol=1e-15)


def test_yarn_without_truncation_bends_elsewhere() -> None:
    rope = replace(
        PLAIN, rope_type="yarn", rotary_dim=128, rope_theta=1e6, factor=4.0,
        original_max_position_embeddings=32768,
    )  # fmt: skip
    exact = frequencies(replace(rope, truncate=False))
    assert not np.array_equal(exact, frequencies(rope))
    assert exact[24] < frequencies(replace(rope, rope_type="default"))[24]


def test_yarn_with_an_empty_band_does_not_divide_by_zero() -> None:
    rope = replace(
        PLAIN, rope_type="yarn", factor=4.0, original_max_position_embeddings=2, rope_theta=1e4
    )
    assert np.isfinite(frequencies(rope)).all()


def test_longrope_divides_by_one_of_two_lists() -> None:
    rope = replace(
        PLAIN, rope_type="longrope", original_max_position_embeddings=32,
        short_factor=(1.0, 2.0, 1.0, 1.0), long_factor=(4.0, 4.0, 5.0, 8.0),
    )  # fmt: skip
    assert np.allclose(frequencies(rope), [1.0, 0.05, 0.01, 0.001], rtol=1e-15)
    assert np.allclose(frequencies(rope, long=True), [0.25, 0.025, 0.002, 0.000125], rtol=1e-15)
    assert rope.switch_length == 32
    assert PLAIN.switch_length is None


def test_attention_factors_have_the_published_values() -> None:
    assert yarn_attention_factor(4.0) == pytest.approx(1.13863, abs=5e-6)
    assert yarn_attention_factor(1.0) == 1.0
    assert yarn_attention_factor(4.0, 1.0, 1.0) == 1.0
    assert yarn_attention_factor(4.0, 2.0, 1.0) == pytest.approx(1.27726 / 1.13863, abs=1e-5)
    assert longrope_attention_factor(131072 / 4096, 4096) == pytest.approx(1.190238, abs=5e-7)
    assert longrope_attention_factor(1.0, 4096) == 1.0


def test_a_row_holds_cosines_then_sines_times_the_attention_factor() -> None:
    rows = rope_rows(replace(PLAIN, attention_factor=1.5), 2, 4)
    assert rows.dtype == np.float32
    angle = np.array([2, 0.2, 0.02, 0.002])
    expected = 1.5 * np.concatenate([np.cos(angle), np.sin(angle)])
    assert np.array_equal(rows[0], expected.astype(np.float32))


def test_tables_keep_their_precision_at_long_positions() -> None:
    rope = RopeConfig("default", 1e6, 128)
    row = rope_rows(rope, 131071, 131072)[0]
    first = math.cos(131071.0 * 1e6 ** (-2 / 128))
    # One rounding to float32; a float32 angle would be off by 4e-3 here.
    assert abs(row[1] - first) <= 2**-24


def test_slices_of_the_table_join_without_a_seam() -> None:
    whole = rope_rows(PLAIN, 0, 10)
    assert np.array_equal(np.concatenate([rope_rows(PLAIN, 0, 3), rope_rows(PLAIN, 3, 10)]), whole)


@pytest.mark.parametrize(
    ("heads", "exponents"),
    [
        (1, [8]),
        (4, [2, 4, 6, 8]),
        (6, [2, 4, 6, 8, 1, 3]),
        (12, [1, 2, 3, 4, 5, 6, 7, 8, 0.5, 1.5, 2.5, 3.5]),
    ],
)
def test_slopes_of_uneven_head_counts_come_from_the_next_power(
    heads: int, exponents: list[float]
) -> None:
    expected = np.array([2.0**-e for e in exponents], np.float32)
    assert np.array_equal(alibi_slopes(heads), expected)


def test_there_is_one_slope_a_head_and_none_reaches_one() -> None:
    for heads in range(1, 113):
        slopes = alibi_slopes(heads)
        assert slopes.shape == (heads,)
        assert slopes.max() < 1
