"""Sampling parameters: what is accepted, what is refused by name, and how a row is packed."""

from __future__ import annotations

import math
from typing import Any, get_type_hints

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pyengine import SamplingParams
from pyengine.errors import RequestError
from pyengine.generation.sampling import SamplingOptions, pack_floats, pack_ints
from pyengine.native.ops import SAMPLE_FLOATS, SAMPLE_INTS, SAMPLE_MAX_BANNED


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"temperature": -0.1}, "temperature=-0.1: must be >= 0"),
        ({"temperature": math.nan}, "temperature=nan: must be finite"),
        ({"temperature": "0"}, "temperature='0': must be a number"),
        ({"temperature": True}, "temperature=True: must be a number"),
        ({"top_k": -2}, "top_k=-2: must be >= -1"),
        ({"top_k": 1.5}, "top_k=1.5: must be an integer"),
        ({"top_p": 0}, "top_p=0: must be > 0"),
        ({"top_p": 1.1}, "top_p=1.1: must be between 0.0 and 1.0"),
        ({"min_p": -1}, "min_p=-1"),
        ({"repetition_penalty": 0}, "repetition_penalty=0: must be > 0"),
        ({"repetition_penalty": -1.0}, "repetition_penalty=-1.0: must be > 0"),
        ({"max_new_tokens": -1}, "max_new_tokens=-1"),
        ({"max_new_tokens": 1.0}, "max_new_tokens=1.0: must be an integer"),
        ({"stop": ""}, "not a non-empty string"),
        ({"stop": ["a", ""]}, "not a non-empty string"),
        ({"stop": 5}, "stop=5: must be a string or a list"),
        ({"stop": ["x"] * 65}, "65 strings, at most 64"),
        ({"logprobs": -1}, "logprobs=-1"),
        ({"logit_bias": [1]}, "must map token ids"),
        ({"logit_bias": {"7": 1.0}}, "logit_bias id='7': must be an integer"),
        ({"logit_bias": {7: math.inf}}, "must be finite"),
        ({"logit_bias": {5: 1e39}}, "logit_bias[5]=1e+39: must be within +-1e+30"),
        ({"temperature": 10**400}, "must be finite"),
        ({"repetition_penalty": 1e-300}, "repetition_penalty=1e-300: must be between"),
        ({"presence_penalty": -1e20}, "presence_penalty=-1e+20: must be between"),
        ({"seed": "x"}, "seed='x': must be an integer"),
        ({"ignore_eos": 1}, "ignore_eos=1"),
    ],
)
def test_bad_values_are_refused_by_name(values: dict[str, Any], message: str) -> None:
    with pytest.raises(RequestError) as caught:
        SamplingParams(**values)
    assert message in str(caught.value)


def test_unknown_names_are_refused_and_none_means_absent() -> None:
    with pytest.raises(RequestError, match="unknown sampling parameter 'beams'"):
        SamplingParams.from_mapping({"beams": 4})
    assert SamplingParams.from_mapping({"top_k": None, "seed": None}) == SamplingParams()


@given(
    seed=st.integers(0, 2**64 - 1),
    top_k=st.integers(-1, 2**40),
    banned=st.lists(st.integers(0, 10**6), max_size=SAMPLE_MAX_BANNED),
)
def test_a_packed_row_holds_the_whole_seed_and_pads_the_banned(
    seed: int, top_k: int, banned: list[int]
) -> None:
    row = pack_ints(SamplingParams(top_k=top_k), seed=seed, position=9, slot=2, banned=banned)
    assert len(row) == SAMPLE_INTS and all(-(2**31) <= word < 2**31 for word in row)
    assert row[0] == min(max(top_k, 0), 2**31 - 1)
    assert (row[1] % 2**32) | (row[2] % 2**32) << 32 == seed
    assert row[3:5] == [9, 2]
    assert row[-SAMPLE_MAX_BANNED:] == banned + [-1] * (SAMPLE_MAX_BANNED - len(banned))


def test_floats_are_packed_in_the_headers_order() -> None:
    params = SamplingParams(
        temperature=0.1, top_p=0.2, min_p=0.3, repetition_penalty=0.4,
        presence_penalty=0.5, frequency_penalty=0.6,
    )  # fmt: skip
    assert pack_floats(params) == [0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.0, 0.0]
    assert len(pack_floats(params)) == SAMPLE_FLOATS


def test_keywords_are_typed_as_the_parameters_are() -> None:
    assert get_type_hints(SamplingOptions) == get_type_hints(SamplingParams)
