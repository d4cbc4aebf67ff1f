"""Rows from outside: shapes, scaling, labels, and what is refused."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from fedclust.data.inputs import Inputs
from fedclust.data.tables import ClientData, Scaling, Table


@pytest.fixture
def images() -> Inputs:
    return Inputs((1, 2, 2), 3, None)


@pytest.mark.parametrize("shape", [(5, 1, 2, 2), (5, 2, 2), (5, 4)])
def test_images_flat_rows_and_missing_channels_are_the_same(images: Inputs, shape: tuple[int, ...]) -> None:
    x = np.arange(20, dtype=np.uint8).reshape(shape)
    rows = images.rows(x)
    assert rows.shape == (5, 1, 2, 2)
    assert rows.dtype == torch.float32
    assert torch.equal(rows.flatten(), torch.arange(20) / 255)


def test_a_fitted_scaling_is_applied_and_tables_are_taken_as_they_are() -> None:
    inputs = Inputs((2,), None, Scaling(np.array([1.0, 0.0]), np.array([2.0, 4.0])))
    assert inputs.rows(np.array([[3, 4]], dtype=np.uint8)).tolist() == [[1.0, 1.0]]
    table = Table(torch.ones(1, 2), None, np.arange(1))
    assert inputs.rows(table) is table.x


@pytest.mark.parametrize(
    ("x", "text"),
    [
        (np.zeros((3, 5)), r"x must have shape \(n, 1, 2, 2\) or \(n, 4\), not \(3, 5\)"),
        (np.zeros(4), r"not \(4,\)"),
        (np.array([[0, 0, 0, 0], [0, np.nan, 0, 0.0]]), r"1 rows of x hold NaN or infinite values, first row 1"),
    ],
)
def test_rows_that_do_not_fit_are_refused(images: Inputs, x: Any, text: str) -> None:
    with pytest.raises(ValueError, match=text):
        images.rows(x)


def test_a_new_client_brings_rows_and_maybe_labels(images: Inputs) -> None:
    x = np.zeros((3, 4))
    without = images.client(x)
    assert (len(without.train), len(without.val), len(without.test)) == (3, 0, 0)
    assert without.train.y is None
    for labels in ([0, 2, 1], torch.tensor([0, 2, 1])):
        y = images.client((x, labels)).train.y
        assert y is not None
        assert y.tolist() == [0, 2, 1]
    given = ClientData(without.train, without.val, without.test)
    assert images.client(given).train is given.train
    assert images.client(without.train).train is without.train


@pytest.mark.parametrize(
    ("y", "text"),
    [
        ([0, 1], r"labels must be 3 whole numbers or names, one per row, got int64 \(2,\)"),
        ([0.0, 0.5, 2.0], "labels must be among 0, 1, 2, got 0.5"),
        ([[0, 1, 2]], r"one per row, got int64 \(1, 3\)"),
        ([0, 1, 3], "labels must be among 0, 1, 2, got 3"),
        ([-1, 1, 2], "labels must be among 0, 1, 2, got -1"),
    ],
)
def test_labels_that_do_not_fit_are_refused(images: Inputs, y: list[float], text: str) -> None:
    with pytest.raises(ValueError, match=text):
        images.client((np.zeros((3, 4)), y))


@pytest.mark.parametrize(
    ("names", "labels", "indices"),
    [
        (["1", "2", "3"], [3, 1, 2], [2, 0, 1]),
        (["1", "2", "3"], [3.0, 1.0, 2.0], [2, 0, 1]),
        (["0", "1", "2"], [True, False, True], [1, 0, 1]),
        (["cat", "cow", "dog"], ["dog", "cat", "cow"], [2, 0, 1]),
        (["cat", "cow", "dog"], np.array(["dog", "cat", "cow"], dtype=object), [2, 0, 1]),
        (["cat", "cow", "dog"], [2, 0, 1], [2, 0, 1]),
    ],
)
def test_labels_mean_what_the_source_called_them(names: list[str], labels: Any, indices: list[int]) -> None:
    inputs = Inputs((4,), 3, None, class_names=names)
    y = inputs.client((np.zeros((3, 4)), labels)).train.y
    assert y is not None
    assert y.tolist() == indices


def test_an_index_is_no_label_where_labels_are_numbers() -> None:
    with pytest.raises(ValueError, match="labels must be among 1, 2, 3, got 0"):
        Inputs((4,), 3, None, class_names=["1", "2", "3"]).client((np.zeros((3, 4)), [0, 1, 2]))


def test_a_pair_is_for_assign_only(images: Inputs) -> None:
    with pytest.raises(ValueError, match=r"not a tuple; \(rows, labels\) and whole clients are for `assign`"):
        images.rows((np.zeros((3, 4)), [0, 1, 2]))


def test_a_client_without_rows_is_refused(images: Inputs) -> None:
    with pytest.raises(ValueError, match="no row"):
        images.client(np.zeros((0, 4)))
