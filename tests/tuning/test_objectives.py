"""Objectives: label-free unless named otherwise, never the test split, never a misspelt metric."""

from __future__ import annotations

import math

import pytest

from tuning.objectives import NoSuchMetricError, Objective, check_available, parse_objectives, value_of


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("dbi", ["val/dbi:min"]),
        ("loss", ["loss:min"]),
        ("silhouette", ["val/silhouette:max"]),
        ("acc", ["val/acc:max"]),
        ("acc_mean", ["val/acc_mean:max"]),
        ("val/recon", ["val/recon:min"]),
        ("val/mine:max", ["val/mine:max"]),
        ("train/mine:min", ["train/mine:min"]),
        ("dbi:max", ["val/dbi:max"]),
        ("dbi, nmi", ["val/dbi:min", "val/nmi:max"]),
        (["loss", "val/populated"], ["loss:min", "val/populated:max"]),
    ],
)
def test_names(text, expected):
    assert [str(objective) for objective in parse_objectives(text)] == expected


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("", ["at least one", "dbi"]),
        ("accuracy", ["'accuracy'", "acc", "val/NAME"]),
        ("val/", ["'val/'"]),
        ("val/mine", ["val/mine:min", "val/mine:max"]),
        ("dbi:low", ["'low'", "min or max"]),
        ("test/acc", ["never selects by the test split", "val/acc"]),
        ("test/acc:max", ["never selects by the test split"]),
        ("dbi,val/dbi", ["twice"]),
    ],
)
def test_mistakes(text, words):
    with pytest.raises(ValueError, match="objective") as error:
        parse_objectives(text)
    assert all(word in str(error.value) for word in words)


def test_a_misspelt_metric_lists_what_there_is():
    known = {"val/dbi", "val/recon", "train/recon", "train/clust", "seconds/round"}
    terms = ("train/recon", "train/clust")
    check_available(parse_objectives("dbi,loss"), terms, known)
    with pytest.raises(NoSuchMetricError, match=r"'val/dbj'.*train/clust, train/recon, val/dbi, val/recon.*loss = "):
        check_available([Objective("val/dbj", "min")], terms, known)
    with pytest.raises(NoSuchMetricError, match="train/loss will not be logged"):
        check_available(parse_objectives("loss"), ("train/loss",), known)
    check_available([Objective("val/anything", "min")], (), frozenset())


def test_loss_is_the_sum_of_the_unweighted_terms():
    (loss,) = parse_objectives("loss")
    metrics = {"train/loss": 0.001, "train/recon": 2.0, "train/clust": 3.0, "train/geom": 5.0}
    terms = ("train/recon", "train/clust", "train/geom")
    assert value_of(loss, metrics, terms) == 10.0
    assert value_of(loss, {"train/recon": 2.0, "train/clust": 3.0}, terms) is None
    assert value_of(loss, metrics, ()) is None


def test_values_as_strict_json_has_them():
    (dbi,) = parse_objectives("dbi")
    assert math.isnan(value_of(dbi, {"val/dbi": None}, ()))
    assert value_of(dbi, {"val/dbi": "inf"}, ()) == math.inf
    assert value_of(dbi, {"val/recon": 1.0}, ()) is None


def test_the_worst_value():
    least, most = Objective("a", "min"), Objective("a", "max")
    assert (least.worst, most.worst) == (math.inf, -math.inf)
