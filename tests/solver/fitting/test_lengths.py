"""Lengths of batches: lists, shares and counts, and the option `--lengths`."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import remat
from remat.commands.common.exits import UsageError
from remat.commands.common.step_options import parse_lengths
from remat.fitting.lengths import LengthDistribution


def test_a_length_counts_as_often_as_it_occurs() -> None:
    distribution = LengthDistribution.of([2048, 512, 512, 1024])
    assert distribution.weights == {512: 0.5, 1024: 0.25, 2048: 0.25}
    assert distribution == LengthDistribution.of({1024: 10, 2048: 10, 512: 20, 4096: 0})
    assert distribution == LengthDistribution.of([*np.array([2048, 512, 512, 1024])])
    assert distribution.longest == 2048
    assert distribution.fit("", 2).share == 0.75
    assert distribution.fit("", 0) == remat.fitting.lengths.LongestFit("", None, 0.0)


@pytest.mark.parametrize(
    ("lengths", "message"),
    [
        ([], r"the lengths are '\[\]'"),
        ("512", "the lengths are '512'"),
        (512, "the lengths are '512'"),
        ([0], "the length 0 is not a number of tokens"),
        ([512.0], "the length 512.0 is not a number of tokens"),
        ([True], "the length True is not a number of tokens"),
        ({512: -1}, "the share of the length 512 is -1"),
        ({512: float("nan")}, "the share of the length 512 is nan"),
        ({512: "1"}, "the share of the length 512 is '1'"),
        ({512: 0, 1024: 0}, "all lengths have a share of 0"),
        ({512: 1e308, 1024: 1e308}, r"the share of the length 512 is 1e\+308"),
        ([[512]], "the length .512. is not a number of tokens"),
        ([10**16], "the length 1000+ is not a number of tokens"),
    ],
)
def test_wrong_lengths_are_refused(lengths: Any, message: str) -> None:
    with pytest.raises(remat.RematError, match=message):
        LengthDistribution.of(lengths)


def test_the_option_is_a_list_shares_or_a_file(tmp_path: Path) -> None:
    assert parse_lengths("512, 2048,512").weights == {512: 2 / 3, 2048: 1 / 3}
    assert parse_lengths("512:70,2048:30").weights == {512: 0.7, 2048: 0.3}
    file = tmp_path / "lengths.json"
    for data in ([512, 512, 2048], {"512": 2, "2048": 1}):
        file.write_text(json.dumps(data))
        assert parse_lengths(str(file)).weights == {512: 2 / 3, 2048: 1 / 3}


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("512,long", "in --lengths, 'long' is not a number of tokens"),
        ("512:1,1024", "in --lengths, '1024' has no number as its share"),
        ("512:one", "in --lengths, '512:one' has no number as its share"),
        ("", "in --lengths, '' is not a number of tokens"),
        ("missing.json", "cannot read missing.json, the file of --lengths: No such file"),
    ],
)
def test_a_wrong_option_is_refused(text: str, message: str) -> None:
    with pytest.raises(UsageError, match=message):
        parse_lengths(text)


@pytest.mark.parametrize(
    "data", ["{", "7", '{"long": 1}', "[null]", "[{}]", '{"512": 1, "0512": 3}']
)
def test_a_wrong_file_is_refused(tmp_path: Path, data: str) -> None:
    file = tmp_path / "lengths.json"
    file.write_text(data)
    with pytest.raises(UsageError, match="in --lengths, "):
        parse_lengths(str(file))
