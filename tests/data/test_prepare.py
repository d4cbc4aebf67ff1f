"""From raw arrays to tables: scaling (failure story A10), layout, labels, refusals."""

from __future__ import annotations

import warnings

import numpy as np
import pytest
import torch

from fedclust.data.prepare import RawData, build_source
from fedclust.data.sources import load_source
from fedclust.data.tables import Source, Table

IMAGES = np.random.default_rng(0).integers(0, 256, size=(50, 28, 28), dtype=np.uint8)
IMAGES[0, 0, 0], IMAGES[0, 0, 1] = 0, 255
LABELS = np.arange(50) % 5


def flat_rows(source: Source) -> torch.Tensor:
    assert source.test is not None
    return torch.cat([source.train.x.flatten(1), source.test.x.flatten(1)])


@pytest.mark.parametrize("scale", ["auto", "minmax", "standard", "none"])
def test_equivalent_shapes_give_equal_values(scale: str) -> None:
    """A10: 28x28, 1x28x28 and flat 784."""
    shapes = [(50, 28, 28), (50, 1, 28, 28), (50, 784), (50, 28, 28, 1)]
    sources = [load_source((IMAGES.reshape(shape), LABELS), scale=scale) for shape in shapes]
    assert [tuple(s.train.x.shape[1:]) for s in sources] == [(1, 28, 28), (1, 28, 28), (784,), (1, 28, 28)]
    for source in sources[1:]:
        assert torch.equal(flat_rows(source), flat_rows(sources[0]))


def test_uint8_and_floats_in_0_1_give_equal_values() -> None:
    """A10: uint8 0..255 in, float 0..1 in."""
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        from_bytes = load_source((IMAGES, LABELS))
        from_floats = load_source((IMAGES.astype(np.float32) / 255, LABELS))
        from_doubles = load_source((torch.from_numpy(IMAGES).double() / 255, LABELS))
    assert torch.equal(flat_rows(from_bytes), flat_rows(from_floats))
    assert torch.equal(flat_rows(from_bytes), flat_rows(from_doubles))
    assert flat_rows(from_bytes).dtype == torch.float32
    assert float(flat_rows(from_bytes).max()) == 1.0


@pytest.mark.parametrize("values", [IMAGES.astype(np.float32), IMAGES.astype(np.int64), IMAGES / 100.0 - 1])
def test_unscaled_values_warn_and_stay(values: np.ndarray) -> None:
    """A10: a warning on values outside [0, 1] with no scaling, saying what to do."""
    with pytest.warns(UserWarning, match=r'scale="standard".*output="linear"'):
        source = load_source((values, LABELS))
    order = np.concatenate([source.train.rows, source.test.rows])  # type: ignore[union-attr]
    assert np.array_equal(flat_rows(source).numpy(), values.reshape(50, -1)[order].astype(np.float32))


def test_scale_none_is_silent() -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert float(flat_rows(load_source((IMAGES, LABELS), scale="none")).max()) == 255.0


def test_statistics_come_from_train_alone() -> None:
    train = np.array([[0.0, 7.0], [2.0, 7.0], [4.0, 7.0]])
    test = np.array([[8.0, 7.0]])
    minmax = load_source((train, LABELS[:3], test, LABELS[:1]), scale="minmax")
    assert minmax.train.x.tolist() == [[0.0, 0.0], [0.5, 0.0], [1.0, 0.0]]
    assert minmax.test is not None
    assert minmax.test.x.tolist() == [[2.0, 0.0]]
    standard = load_source((train, LABELS[:3], test, LABELS[:1]), scale="standard")
    assert standard.train.x[:, 0].mean() == 0
    assert standard.train.x[:, 0].std(unbiased=False) == pytest.approx(1.0)
    assert standard.test is not None
    assert float(standard.test.x[0, 0]) == pytest.approx((8 - 2) / np.sqrt(8 / 3))


def test_layout_of_colour_images() -> None:
    last = np.arange(2 * 4 * 5 * 3, dtype=np.uint8).reshape(2, 4, 5, 3)
    first = np.moveaxis(last, 3, 1)
    expected = torch.from_numpy(first.astype(np.float32)) / 255
    for x in (last, first):
        assert torch.equal(load_source((x,), test_fraction=0.0).train.x, expected)
    odd = np.zeros((2, 6, 6, 3), dtype=np.uint8)
    assert load_source((odd,), layout="channels_first", test_fraction=0.0).train.x.shape == (2, 6, 6, 3)
    two = np.zeros((2, 6, 6, 2), dtype=np.uint8)
    assert load_source((two,), layout="channels_last", test_fraction=0.0).train.x.shape == (2, 2, 6, 6)


def test_the_client_of_a_bad_row_is_named() -> None:
    rows = [np.zeros((4, 2)), np.zeros((5, 2))]
    rows[1][3, 0] = np.nan
    with pytest.raises(ValueError, match=r"arrays: 1 train rows .* the first is row 3 of client 1;"):
        load_source(rows)
    labels = [np.zeros(4), np.array([0, 1, 0.5, 0, 0])]
    with pytest.raises(ValueError, match=r"row 2 of client 1 has 0\.5"):
        load_source([(np.zeros((len(y), 2)), y) for y in labels])


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf, 1e300])
def test_values_that_are_not_finite_are_refused(bad: float) -> None:
    x = np.zeros((10, 4))
    x[3, 1] = x[7, 0] = x[7, 2] = bad
    with pytest.raises(ValueError, match=r"2 train rows .* not finite .* first is row 3"):
        load_source((x,))
    with pytest.raises(ValueError, match=r"2 test rows"):
        load_source((np.zeros((3, 4)), np.zeros(3), x, np.zeros(10)))


def test_labels_are_mapped_to_indices() -> None:
    x = np.zeros((4, 2))
    for labels, names in (
        ([7, -1, 7, 3], ["-1", "3", "7"]),
        (["dog", "ant", "dog", "cat"], ["ant", "cat", "dog"]),
        ([7.0, -1.0, 7.0, 3.0], ["-1", "3", "7"]),
        (np.array(["dog", "ant", "dog", "cat"], dtype=object), ["ant", "cat", "dog"]),
    ):
        source = load_source((x, np.asarray(labels)), test_fraction=0.0)
        assert source.class_names == names
        assert source.train.y is not None
        assert source.train.y.tolist() == [2, 0, 2, 1]


def test_train_and_test_labels_share_one_mapping() -> None:
    source = load_source((np.zeros((2, 2)), np.array([5, 9]), np.zeros((2, 2)), np.array([7, 9])))
    assert source.class_names == ["5", "7", "9"]
    assert source.train.y is not None
    assert source.train.y.tolist() == [0, 2]
    assert source.test is not None
    assert source.test.y is not None
    assert source.test.y.tolist() == [1, 2]


@pytest.mark.parametrize(
    ("labels", "message"),
    [
        (np.zeros(3), "3 labels for 4 rows"),
        (np.zeros((4, 2)), r"labels must be one per row, shape \(n,\), got shape \(4, 2\)"),
        (np.array([0, 1, 0.5, 1]), "row 2 has 0.5"),
        (np.array([0, np.nan, 0, 1]), "row 1 has nan"),
        (np.array([1j, 0, 0, 0]), "whole numbers or strings, got dtype complex"),
    ],
)
def test_bad_labels_are_refused(labels: np.ndarray, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        load_source((np.zeros((4, 2)), labels))


def test_bad_inputs_are_refused() -> None:
    for x, message in (
        (np.zeros(4), r"shape \(n, features...\)"),
        (np.zeros((0, 4)), "no training rows"),
        (np.zeros((4, 0)), "no features"),
        (np.array([["a"]]), "must be numbers"),
    ):
        with pytest.raises(ValueError, match=message):
            load_source((x,))
    with pytest.raises(ValueError, match=r"train rows have shape \(4,\) but test rows \(5,\)"):
        load_source((np.zeros((3, 4)), np.zeros(3), np.zeros((3, 5)), np.zeros(3)))
    with pytest.raises(ValueError, match="both have labels, or neither"):
        load_source((np.zeros((3, 4)), np.zeros(3), np.zeros((3, 4)), None))
    with pytest.raises(ValueError, match="train inputs are uint8, test inputs float64"):
        load_source((np.zeros((3, 4), dtype=np.uint8), np.zeros(3), np.zeros((3, 4)), np.zeros(3)))
    with pytest.raises(ValueError, match="scale must be one of auto, minmax, standard, none, got 'max'"):
        load_source((np.zeros((3, 4)),), scale="max")
    with pytest.raises(ValueError, match="layout must be one of"):
        load_source((np.zeros((3, 4)),), layout="nhwc")


def test_bad_client_ids_are_refused() -> None:
    for ids, message in ((np.zeros(3), "must be whole numbers or strings"), (np.zeros(2, dtype=int), "2 client ids")):
        with pytest.raises(ValueError, match=message):
            build_source(RawData("own", np.zeros((3, 2)), ids=ids))


def test_held_out_rows_are_stratified_and_fixed() -> None:
    source, again = load_source((IMAGES, LABELS)), load_source((IMAGES, LABELS))
    assert source.test is not None
    assert again.test is not None
    assert np.array_equal(source.test.rows, again.test.rows)
    assert source.test.y is not None
    assert torch.bincount(source.test.y).tolist() == [2] * 5
    assert source.one_table
    assert np.array_equal(np.sort(np.concatenate([source.train.rows, source.test.rows])), np.arange(50))
    assert torch.equal(source.test.x[0, 0], torch.from_numpy(IMAGES[source.test.rows[0]]) / 255)


def test_table_checks_its_fields() -> None:
    x, y, rows = torch.zeros(3, 2), torch.zeros(3, dtype=torch.int64), np.arange(3)
    Table(x, y, rows)
    for bad in ((x.double(), y, rows), (x[:, 0], y, rows), (x, y.float(), rows), (x, y[:2], rows), (x, y, rows[:2])):
        with pytest.raises(ValueError, match=r"Table\."):
            Table(*bad)
    with pytest.raises(ValueError, match="labels run from 0 to 0, allowed 0 to -1"):
        Source("own", Table(x, y, rows), None, class_names=[])
    with pytest.raises(ValueError, match="ids has 2 entries for 3 rows"):
        Source("own", Table(x, y, rows), None, ids=np.arange(2))


def test_table_select() -> None:
    table = Table(torch.arange(6.0).reshape(3, 2), torch.tensor([0, 1, 2]), np.array([10, 20, 30]))
    picked = table.select([2, 0])
    assert picked.x.tolist() == [[4, 5], [0, 1]]
    assert picked.y is not None
    assert picked.y.tolist() == [2, 0]
    assert picked.rows.tolist() == [30, 10]
    assert len(table.select(np.empty(0, dtype=np.int64))) == 0
    view = table.select(slice(1, 3))
    assert view.x.data_ptr() == table.x[1:].data_ptr()
