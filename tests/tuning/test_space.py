"""Spaces: every mistake is one sentence at load; what is drawn reaches the configuration as it is meant."""

from __future__ import annotations

from typing import Any

import optuna
import pytest

from fedclust.clustering.distances import SEQUENCE_METRICS
from tuning.space import find_space, load_space, parse_space, shipped_spaces


def space(**entries):
    return {"parameters": {path.replace("__", "."): entry for path, entry in entries.items()}}


FLOAT = {"kind": "float", "low": 0, "high": 1}
CHOICE = {"kind": "categorical", "choices": ["a", "b"]}
WRONG = {
    "nothing": ({}, ["parameters"]),
    "empty": ({"parameters": {}}, ["at least one"]),
    "more entries": ({"parameters": {"a": FLOAT}, "trials": 3}, ["one entry", "'parameters'"]),
    "no path": (space(**{"a-b": FLOAT}), ["'a-b'", "dotted path"]),
    "no mapping": (space(a=3), ["a must be a mapping", "3"]),
    "no kind": (space(a={"low": 0}), ["kind", "log_float", "layers"]),
    "unknown kind": (space(a={"kind": "real", "low": 0, "high": 1}), ["'real'", "float", "categorical"]),
    "unknown key": (space(a={**FLOAT, "lo": 1}), ["lo", "low"]),
    "missing low": (space(a={"kind": "int", "high": 3}), ["low is missing"]),
    "empty range": (space(a={"kind": "float", "low": 1, "high": 1}), ["low 1", "high 1", "less"]),
    "low above high": (space(a={"kind": "int", "low": 5, "high": 2}), ["low 5", "high 2"]),
    "log at 0": (space(a={"kind": "log_float", "low": 0, "high": 1}), ["log", "above 0"]),
    "log below 0": (space(a={**FLOAT, "low": -1, "log": True}), ["log", "-1"]),
    "log with step": (space(a={"kind": "log_int", "low": 1, "high": 8, "step": 2}), ["log", "step"]),
    "log no flag": (space(a={**FLOAT, "log": "yes"}), ["log", "'yes'"]),
    "step 0": (space(a={**FLOAT, "step": 0}), ["step", "0"]),
    "step too large": (space(a={**FLOAT, "step": 2}), ["step", "2"]),
    "not whole": (space(a={"kind": "int", "low": 1.5, "high": 3}), ["low", "whole", "1.5"]),
    "not finite": (space(a={**FLOAT, "high": float("inf")}), ["high", "finite", "inf"]),
    "no number": (space(a={**FLOAT, "high": "much"}), ["high", "'much'"]),
    "no choices": (space(a={"kind": "categorical", "choices": []}), ["choices", "[]"]),
    "choices as text": (space(a={"kind": "categorical", "choices": "ab"}), ["choices", "'ab'"]),
    "choice of a kind": (space(a={"kind": "categorical", "choices": [[1]]}), ["choice", "[1]"]),
    "choice twice": (space(a={"kind": "categorical", "choices": [1, 2, 1]}), ["differ", "1, 2, 1"]),
    "layers": (space(a={"kind": "layers", "choices": ["12-0"]}), ["12-0", "512-256-128"]),
    "unknown condition": (space(a={**FLOAT, "when": {"b": [1]}}), ["'b'", "no parameter"]),
    "later condition": (space(a={**FLOAT, "when": {"b": ["a"]}}, b=CHOICE), ["'b'", "later"]),
    "own condition": (space(a={**CHOICE, "when": {"a": ["a"]}}), ["'a'", "later"]),
    "condition on a range": (space(b=FLOAT, a={**FLOAT, "when": {"b": [1]}}), ["choices", "b", "float"]),
    "impossible condition": (space(b=CHOICE, a={**FLOAT, "when": {"b": ["c"]}}), ["'c'", "'a', 'b'"]),
    "empty condition": (space(b=CHOICE, a={**FLOAT, "when": {}}), ["when"]),
}


@pytest.mark.parametrize(("content", "words"), WRONG.values(), ids=WRONG)
def test_mistakes_are_named(content, words):
    with pytest.raises(ValueError, match=r"^mine\.yaml: ") as error:
        parse_space(content, "mine.yaml")
    for word in words:
        assert word in str(error.value)


def test_yaml_reads_numbers_as_people_write_them_and_refuses_a_key_given_twice(tmp_path):
    file = tmp_path / "mine.yaml"
    file.write_text("parameters:\n  a.lr: {kind: log_float, low: 1e-5, high: 1e-2}\n")
    (parameter,) = load_space(file).parameters
    assert (parameter.distribution.low, parameter.distribution.high, parameter.distribution.log) == (1e-5, 1e-2, True)
    file.write_text("parameters:\n  a: {kind: int, low: 1, high: 2}\n  a: {kind: int, low: 1, high: 3}\n")
    with pytest.raises(ValueError, match='"a" given twice'):
        load_space(file)
    file.write_text("parameters: [")
    with pytest.raises(ValueError, match="no YAML"):
        load_space(file)


def test_values_as_arguments():
    found = parse_space(
        space(
            m__init_args__layers={"kind": "layers", "choices": ["512-256-128", [64, 32], 128]},
            m__rate={"kind": "log_float", "low": 1e-6, "high": 1},
            m__mode={"kind": "categorical", "choices": ["a b", None, True, 0.5]},
            m__size={"kind": "int", "low": 2, "high": 9, "step": 3},
        ),
        "space",
    )
    layers, rate, mode, size = found.parameters
    assert layers.distribution.choices == ("512-256-128", "64-32", "128")
    assert layers.override("512-256-128") == "--m.init_args.layers=[512, 256, 128]"
    assert rate.override(1e-5) == "--m.rate=1e-05"
    assert [mode.override(value) for value in mode.distribution.choices] == [
        "--m.mode=a b", "--m.mode=null", "--m.mode=true", "--m.mode=0.5"
    ]  # fmt: skip
    assert (size.distribution.high, size.distribution.step) == (8, 3)
    assert found.overrides({"size": 5, "rate": 0.1}) == ["--m.rate=0.1", "--m.size=5"]


def test_short_names_are_the_shortest_that_differ():
    found = parse_space(space(a__init_args__lr=FLOAT, b__init_args__lr=FLOAT, b__init_args__size=FLOAT), "space")
    assert [parameter.name for parameter in found.parameters] == ["a.lr", "b.lr", "size"]


def test_conditions():
    content = space(
        m__kind=CHOICE,
        m__deep={"kind": "categorical", "choices": [1, 2], "when": {"m.kind": "b"}},
        m__deeper={**FLOAT, "when": {"deep": [2]}},
    )
    found = parse_space(content, "space")
    fixed = optuna.trial.FixedTrial
    assert found.suggest(fixed({"kind": "a", "deep": 2, "deeper": 0.5})) == {"kind": "a"}
    assert found.suggest(fixed({"kind": "b", "deep": 1, "deeper": 0.5})) == {"kind": "b", "deep": 1}
    assert found.suggest(fixed({"kind": "b", "deep": 2, "deeper": 0.5})) == {"kind": "b", "deep": 2, "deeper": 0.5}
    points = list(found.probes())
    assert points[0] == {"kind": "a"}
    assert points[1] == {"kind": "b", "deep": 2, "deeper": 1.0}
    hidden = parse_space(space(m__kind=CHOICE, m__a={**FLOAT, "when": {"kind": "a"}}, m__b=FLOAT), "space")
    assert {"kind": "a", "a": 1.0, "b": 1.0} in list(hidden.probes())  # the upper end, which no other point has
    assert {"kind": "a", "a": 0.0, "b": 0.0} in list(hidden.probes())


def test_a_parameter_that_no_end_has_is_probed_too():
    three = {"kind": "categorical", "choices": ["a", "b", "c"]}
    found = parse_space(space(m__kind=three, m__only={**FLOAT, "when": {"kind": ["b"]}}), "space")
    assert list(found.probes())[2:] == [{"kind": "b", "only": 0.0}, {"kind": "b", "only": 1.0}]


def test_every_choice_is_probed_and_several_at_once():
    entries = {
        "m.a": {"kind": "categorical", "choices": [1, 2, 3, 4, 5]},
        "m.b": {"kind": "layers", "choices": ["1", "2", "3"]},
        "m.c": {**CHOICE, "when": {"a": [3]}},
    }  # fmt: skip
    points = list(parse_space({"parameters": entries}, "space").probes())
    assert points[:2] == [{"a": 1, "b": "1"}, {"a": 5, "b": "3"}]
    assert {point["a"] for point in points} == {1, 2, 3, 4, 5}
    assert {point["b"] for point in points} == {"1", "2", "3"}
    assert {point["c"] for point in points if "c" in point} == {"a", "b"}
    assert len(points) == 6


def test_shipped_spaces_are_found_by_name():
    assert set(shipped_spaces()) == {"feddcn", "flameche", "fmcl", "pa_cfl"}
    for name in ("feddcn", "feddcn.yaml", "tuning/spaces/feddcn.yaml"):
        assert find_space(name).resolve() == shipped_spaces()["feddcn"].resolve()
    with pytest.raises(ValueError, match=r"no file 'nothing'.*feddcn, flameche, fmcl, pa_cfl"):
        find_space("nothing")
    with pytest.raises(ValueError, match="elsewhere/feddcn"):
        find_space("elsewhere/feddcn.yaml")


def test_table_one_of_the_paper():
    found = {parameter.name: parameter for parameter in load_space("feddcn").parameters}
    assert found["hidden_dims"].distribution.choices == (
        "128", "256-128", "512-256", "512-256-128", "1024-512-256-128-64"
    )  # fmt: skip
    ranges = {name: (p.distribution.low, p.distribution.high) for name, p in found.items() if p.kind != "layers"}
    assert ranges == {
        "latent_dim": (3, 16), "geometry_pretrain": (1e-4, 1.0), "geometry_federated": (1e-4, 1.0),
        "cluster_weight": (1e-4, 1.0), "recon_weight": (0.1, 10.0), "lr": (1e-5, 1e-2),
    }  # fmt: skip
    assert all(found[name].distribution.log for name in ranges if name != "latent_dim")


def test_pa_cfl_draws_nothing_that_has_no_effect():
    found = {parameter.name: parameter for parameter in load_space("pa_cfl").parameters}
    # The other similarities show a server the whole gradient.
    assert set(found["similarity"].distribution.choices) <= set(SEQUENCE_METRICS)
    # FastDTW alone has a radius; bounds and noise play no part without privacy.
    if "radius" in found:
        assert list(found["radius"].when["similarity"]) == ["fastdtw"]
    assert not found.keys() & {"epsilon", "delta", "noise"}


@pytest.mark.parametrize("choices", [[1, True], [1, 1.0], [0, "a", False], ["a", "a"]])
def test_choices_that_optuna_cannot_tell_apart_are_refused(choices):
    with pytest.raises(ValueError, match=r"s: m\.x: choices must differ"):
        parse_space({"parameters": {"m.x": {"kind": "categorical", "choices": choices}}}, "s")


@pytest.mark.parametrize(
    ("low", "high", "step", "values"),
    [(0, 0.9, 0.3, [0, 0.3, 0.6, 0.9]), (0, 1, 0.3, [0, 0.3, 0.6, 0.9]), (0.1, 0.7, 0.2, [0.1, 0.3, 0.5, 0.7]),
     (-1, 1, 0.5, [-1, -0.5, 0, 0.5, 1]), (1e-5, 3e-5, "1e-5", [1e-5, 2e-5, 3e-5]),
     (0.9, 1.2, 0.3, [0.9, 1.2])],
)  # fmt: skip
@pytest.mark.filterwarnings("error")
def test_a_range_with_a_step_has_both_ends(low, high, step, values):
    space = parse_space({"parameters": {"model.x": {"kind": "float", "low": low, "high": high, "step": step}}}, "s")
    (found,) = space.parameters
    assert (found.end("low"), found.end("high")) == (values[0], values[-1])
    study = optuna.create_study(sampler=optuna.samplers.RandomSampler(seed=0))
    drawn = {space.suggest(study.ask())["x"] for _ in range(80)}
    assert sorted(drawn) == pytest.approx(values)


def test_widths_without_quotes_are_no_date_and_merge_keys_are_read(tmp_path: Any) -> None:
    file = tmp_path / "mine.yaml"
    file.write_text(
        "parameters:\n"
        "  a.hidden_dims: {kind: layers, choices: [1024-12-16, [64, 32]]}\n"
        "  a.lr: &range {kind: log_float, low: 1e-4, high: 1}\n"
        "  b.lr: {<<: *range, high: 10, when: {hidden_dims: [[64, 32]]}}\n"
    )
    widths, first, second = load_space(file).parameters
    assert vars(widths.distribution)["choices"] == ("1024-12-16", "64-32")
    assert (vars(first.distribution)["high"], vars(second.distribution)["high"]) == (1.0, 10.0)
    assert second.when == {"hidden_dims": ["64-32"]}


@pytest.mark.parametrize("path", ["name", "runs_root", "ckpt_path", "trainer.enable_progress_bar"])
def test_what_a_study_sets_itself_is_not_searched(path: str) -> None:
    entry = {"kind": "categorical", "choices": ["a", "b"]}
    with pytest.raises(ValueError, match=f"space: {path} cannot be searched"):
        parse_space({"parameters": {path: entry}}, "space")


@pytest.mark.parametrize("entry", [{"high": 10**400}, {"low": 1e-320, "high": 1e308, "step": 1e-300}])
def test_numbers_beyond_reason_name_their_parameter(entry: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=r"space: model\.lr"):
        parse_space({"parameters": {"model.lr": {"kind": "float", "low": 0, **entry}}}, "space")
