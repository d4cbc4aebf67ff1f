"""Vectorised: padded rows enter neither a loss nor a statistic."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from nets import BODIES, Net, ask, assert_close
from torch import Tensor

from fedclust.federation import padding
from fedclust.federation.backend import InProcess
from fedclust.federation.errors import ClientError
from fedclust.federation.padding import mean_squared_error
from fedclust.federation.vectorised import Vectorised


@pytest.mark.parametrize("body", [body for body in BODIES if body != "plain"])
def test_what_is_in_padded_rows_changes_no_bit(connect: Any, monkeypatch: Any, body: str) -> None:
    expected = ask(connect(Vectorised(), Net(body)))
    padded: list[int] = []

    def other(rows: Tensor, length: int) -> Tensor:
        padded.append(length - len(rows))
        return torch.cat([rows, torch.full((length - len(rows), *rows.shape[1:]), 7.0)])

    monkeypatch.setattr(padding, "pad_rows", other)
    found = ask(connect(Vectorised(), Net(body)))
    assert max(padded) > 2
    assert_close(found, expected, atol=0.0)


@pytest.mark.parametrize("what", ["loss", "norm"])
def test_padded_rows_taken_as_real_ones_would_be_found_out(connect: Any, monkeypatch: Any, what: str) -> None:
    """The equality above is not for lack of padding."""
    expected = ask(connect(InProcess(), Net("BatchNorm")))
    if what == "loss":
        monkeypatch.setattr("nets.mask_of", lambda batch, name: None)
    else:
        monkeypatch.setattr("fedclust.federation.masked_norm.normalise", _all_rows)
    found = ask(connect(Vectorised(), Net("BatchNorm")))
    with pytest.raises(AssertionError):
        assert_close(found, expected)


def _all_rows(layer: Any, x: Tensor, mask: Tensor) -> Tensor:
    return type(layer).forward(layer, x)


def test_masked_means_by_hand() -> None:
    values, mask = torch.tensor([[1.0, 3.0], [5.0, 7.0], [100.0, 100.0]]), torch.tensor([1.0, 1.0, 0.0])
    assert float(padding.mean_over_rows(values, mask)) == 4.0
    assert float(padding.mean_over_rows(values[:, 0], mask)) == 3.0
    assert float(mean_squared_error(values, torch.zeros(3, 2), mask)) == (1 + 9 + 25 + 49) / 4
    logits, labels = torch.tensor([[0.0, 0.0], [0.0, math.log(3)], [9.0, 0.0]]), torch.tensor([0, 1, 1])
    expected = (math.log(2) + math.log(4 / 3)) / 2
    assert float(padding.mean_cross_entropy(logits, labels, mask)) == pytest.approx(expected)


def test_entries_with_other_numbers_of_rows_get_lengths_of_their_own() -> None:
    batches = [{"x": torch.ones(4, 2), "z": torch.ones(2), "w": torch.ones(4)},
               {"x": torch.ones(3, 2), "z": torch.ones(4), "w": torch.ones(3)}]  # fmt: skip
    stacked, counts = padding.stack_batches(batches, ["client 0", "client 1"])
    assert {name: tuple(value.shape) for name, value in stacked.items()} == {
        "x": (2, 4, 2), "mask/x": (2, 4), "z": (2, 5), "mask/z": (2, 5), "w": (2, 4), "mask/w": (2, 4)
    }  # fmt: skip
    assert stacked["mask/z"].tolist() == [[1, 1, 0, 0, 0], [1, 1, 1, 1, 0]]
    assert counts == {4: (4, 3), 5: (2, 4)}


@pytest.mark.parametrize(
    ("other", "text"),
    [({"y": torch.ones(3, 2)}, r"client 0 has \['x'\], client 1 has \['y'\]"),
     ({"x": torch.ones(3, 5)}, r"'x'.*client 1 has torch.float32 \(3, 5\)"),
     ({"x": torch.ones(3, 2, dtype=torch.int64)}, r"'x'.*client 1 has torch.int64")],
)  # fmt: skip
def test_batches_that_do_not_fit_are_refused_by_name(other: Any, text: str) -> None:
    with pytest.raises(ValueError, match=text):
        padding.stack_batches([{"x": torch.ones(3, 2)}, other], ["client 0", "client 1"])


def test_a_module_must_declare_that_it_honours_masks(connect: Any, monkeypatch: Any) -> None:
    monkeypatch.setattr(Net, "honours_row_masks", False)
    with pytest.raises(ClientError, match=r"client 0.*Net does not declare honours_row_masks = True"):
        ask(connect(Vectorised(), Net()))
    assert_close(
        ask(connect(Vectorised(), Net(), (8, 16, 24, 8, 8))), ask(connect(InProcess(), Net(), (8, 16, 24, 8, 8)))
    )
