"""Every operation with the options that are seldom given is held to what torch computes, or refused."""

from __future__ import annotations

import warnings

import pytest
from operation_options import OPTIONS
from test_operations import linear, paths, scale, stretch

from flatscope.network.operations import TABLE


@pytest.mark.parametrize("name", OPTIONS)
def test_options_change_what_is_said_of_an_operation(name: str) -> None:
    found = []
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # old names of torch
        for place, use in enumerate(OPTIONS[name]):
            curved = [said for said in linear(name, use) if "True, said: False" in said] if name in TABLE else []
            scaled = [said for said in scale(name, use) if "changes the function" in said]  # too little is not wrong
            found += [(place, said) for said in (*curved, *scaled, *paths(name, use), *stretch(name, use))]
    assert found == []
