"""What `verify` returns, as people see it."""

from __future__ import annotations

from xml.etree import ElementTree

import numpy as np

import remat


def layer(x):
    return np.tanh(x * 2), x


def test_it_shows_what_was_compared() -> None:
    found = remat.verify(layer, np.ones(3))
    assert repr(found) == f"<Verification: {found}>"
    page = ElementTree.fromstring(found._repr_html_())
    rows = dict([cell.text for cell in row] for row in page.iter("tr"))
    assert rows["outputs"] == "2"
    assert rows["gradients"] == "1"
    assert rows["random state"] == "yes"
    assert page.find("caption").text == "layer: the same with and without checkpointing"
