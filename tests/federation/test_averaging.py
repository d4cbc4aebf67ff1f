"""Weighted averaging of model states: exact values, BatchNorm, types, and errors that name the client."""

from __future__ import annotations

import copy
import itertools

import pytest
import torch
from torch import Tensor, nn

from fedclust.federation.averaging import WeightedAverage, check_weights, weighted_average
from fedclust.random import torch_generator


def state(value: float, **more: Tensor) -> dict[str, Tensor]:
    return {"w": torch.full((2, 3), value), **more}


def network(seed: int, dtype: torch.dtype = torch.float32) -> nn.Module:
    generator = torch_generator(seed, "init")
    module = nn.Sequential(nn.Linear(4, 3), nn.BatchNorm1d(3), nn.Linear(3, 2)).to(dtype)
    for parameter in module.parameters():
        parameter.data = torch.randn(parameter.shape, generator=generator).to(dtype)
    return module


@pytest.mark.parametrize("weights", [(1, 3), (10, 30), (0.25, 0.75)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16, torch.float16])
def test_zero_and_one_with_weights_one_and_three_give_three_quarters(weights: tuple, dtype: torch.dtype) -> None:
    states = [{"w": torch.zeros(3, dtype=dtype)}, {"w": torch.ones(3, dtype=dtype)}]
    for order in ([0, 1], [1, 0]):
        result = weighted_average([states[i] for i in order], [weights[i] for i in order])
        assert result["w"].tolist() == [0.75] * 3
        assert result["w"].dtype == dtype


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("weight", [1, 7, 1797, 0.1])
def test_one_client_and_equal_clients_give_themselves_bit_for_bit(dtype: torch.dtype, weight: float) -> None:
    own = network(0, dtype).state_dict()
    own["0.bias"][0] = -0.0
    for states, weights in (([own], [weight]), ([own] * 3, [weight, 2.0, 3.3]), ([own, own], [0, weight])):
        result = weighted_average(states, weights)
        assert list(result) == list(own)
        for key, value in own.items():
            assert result[key].dtype == value.dtype
            assert torch.equal(result[key], value)
    assert torch.signbit(weighted_average([own], [weight])["0.bias"][0])


def test_batch_norm_statistics_are_averaged_by_rows_in_any_order() -> None:
    modules = []
    for client, mean in enumerate((0.0, 10.0)):
        layer = nn.BatchNorm1d(2, momentum=None)
        x = torch.randn(500, 2, generator=torch_generator(0, client)) + mean
        for batch in x.split(100):
            layer(batch)
        modules.append(layer)
    states = [module.state_dict() for module in modules]
    for order in ([0, 1], [1, 0]):
        result = weighted_average([states[i] for i in order], [500, 500])
        assert result["running_mean"].tolist() == pytest.approx([5.0, 5.0], abs=0.15)
        expected = (states[0]["running_mean"].double() + states[1]["running_mean"].double()) / 2
        assert torch.equal(result["running_mean"], expected.float())
        variance = (states[0]["running_var"].double() + states[1]["running_var"].double()) / 2
        assert torch.equal(result["running_var"], variance.float())
    uneven = weighted_average(states, [100, 300])["running_mean"]
    assert uneven.tolist() == pytest.approx([7.5, 7.5], abs=0.15)


def test_the_integer_counter_stays_an_integer_and_the_state_loads() -> None:
    states = [network(seed).state_dict() for seed in (0, 1)]
    for own, count in zip(states, (3, 4), strict=True):
        own["1.num_batches_tracked"] = torch.tensor(count)
    result = weighted_average(states, [5, 7])
    counter = result["1.num_batches_tracked"]
    assert counter.dtype == torch.int64
    assert counter.shape == ()
    assert counter.item() == 4
    network(2).load_state_dict(result, strict=True)


def test_integers_and_booleans_take_the_largest() -> None:
    a = {"i": torch.tensor([1, 9], dtype=torch.int32), "b": torch.tensor([True, False])}
    b = {"i": torch.tensor([2, -5], dtype=torch.int32), "b": torch.tensor([False, False])}
    result = weighted_average([a, b], [1, 1])
    assert result["i"].tolist() == [2, 9]
    assert result["i"].dtype == torch.int32
    assert result["b"].tolist() == [True, False]


def test_half_precision_is_summed_wide_and_rounded_once() -> None:
    values = [1.0, 1 + 2**-7, 1 + 2**-6]  # neighbours in bfloat16
    states = [{"w": torch.tensor([v], dtype=torch.bfloat16)} for v in values]
    weights = [1] * 3
    assert weighted_average(states, weights)["w"].item() == 1 + 2**-7
    many = [{"w": torch.tensor([0.1 * (i % 7)], dtype=torch.float16)} for i in range(3000)]
    exact = sum(s["w"].double().item() for s in many) / 3000
    assert weighted_average(many, [1] * 3000)["w"].item() == pytest.approx(exact, rel=2**-11)


def test_a_bfloat16_model_loads_its_average() -> None:
    result = weighted_average([network(s, torch.bfloat16).state_dict() for s in (0, 1)], [1, 2])
    target = network(3, torch.bfloat16)
    target.load_state_dict(result, strict=True)
    assert {p.dtype for p in target.parameters()} == {torch.bfloat16}


def test_any_order_gives_the_same_float32() -> None:
    states, weights = [network(seed).state_dict() for seed in range(4)], [3, 11, 200, 7]
    exact = sum(w * s["0.weight"].double() for w, s in zip(weights, states, strict=True)) / sum(weights)
    for order in itertools.permutations(range(4)):
        result = weighted_average([states[i] for i in order], [weights[i] for i in order])
        assert torch.allclose(result["0.weight"].double(), exact, rtol=1e-7, atol=1e-8)


def test_streaming_equals_the_whole_and_keeps_running() -> None:
    states, weights = [network(seed).state_dict() for seed in range(3)], [3, 1, 5]
    average = WeightedAverage()
    for i, (own, weight) in enumerate(zip(states, weights, strict=True)):
        average.add(own, weight)
        expected = weighted_average(states[: i + 1], weights[: i + 1])
        assert all(torch.equal(average.result()[key], expected[key]) for key in expected)


def test_nothing_is_modified_or_shared() -> None:
    states = [network(seed).state_dict() for seed in range(2)]
    before = copy.deepcopy(states)
    average = WeightedAverage()
    for own in states:
        average.add(own, 2)
    first = average.result()
    for value in first.values():
        value.fill_(77)
    assert all(torch.equal(own[k], old[k]) for own, old in zip(states, before, strict=True) for k in own)
    again = average.result()
    assert again["0.weight"].max() < 77
    assert again["1.num_batches_tracked"] == 0
    single = weighted_average([states[0]], [1])
    single["0.weight"].fill_(5)
    assert torch.equal(states[0]["0.weight"], before[0]["0.weight"])


def test_parameters_that_need_gradients_are_taken_by_value() -> None:
    result = weighted_average([dict(network(0).named_parameters())], [1])
    assert not any(value.requires_grad for value in result.values())


def test_weights_of_zero_are_one_clear_error_in_every_way_in() -> None:
    sentence = r"total weight is 0.*client 0: 0, client 1: 0"
    with pytest.raises(ValueError, match=sentence):
        weighted_average([state(0), state(1)], [0, 0])
    with pytest.raises(ValueError, match=sentence):
        check_weights([0.0, 0.0], ["client 0", "client 1"])
    average = WeightedAverage()
    average.add(state(0), 0)
    average.add(state(1), 0)
    with pytest.raises(ValueError, match=sentence):
        average.result()
    for nothing in (lambda: weighted_average([], []), lambda: WeightedAverage().result()):
        with pytest.raises(ValueError, match=r"total weight is 0.*no client replied"):
            nothing()


@pytest.mark.parametrize(
    ("weights", "named"),
    [((float("nan"), 1), "a: nan"), ((-1, 2), "a: -1"), ((1, float("inf")), "b: inf"), ((1, -1), "b: -1")],
)
def test_bad_weights_name_the_client(weights: tuple, named: str) -> None:
    sentence = f"weights must be finite and at least 0, and the total weight above 0, got .*{named}"
    with pytest.raises(ValueError, match=sentence):
        weighted_average([state(0), state(1)], weights, names=["a", "b"])
    name, weight = named[0], weights["ab".index(named[0])]
    with pytest.raises(ValueError, match=sentence):
        WeightedAverage().add(state(0), weight, name)


@pytest.mark.parametrize(
    ("second", "words"),
    [
        ({}, "the state is empty"),
        ({"v": torch.zeros(2, 3)}, r"missing \['w'\], unexpected \['v'\]"),
        (state(0, extra=torch.zeros(1)), r"unexpected \['extra'\]"),
        ({"w": torch.zeros(3, 2)}, r"w is \(3, 2\) torch.float32, but client 4 has \(2, 3\) torch.float32"),
        ({"w": torch.zeros(2, 3).double()}, "w is .* torch.float64"),
        ({"w": torch.zeros(2, 3).long()}, "w is .* torch.int64"),
        ({"w": [1.0]}, "w must be a real tensor, got list"),
        ({"w": torch.zeros(2, 3, dtype=torch.complex64)}, "w must be a real tensor, got torch.complex64"),
        ({"w": torch.full((2, 3), float("nan"))}, "6 of 6 values of w are NaN or infinite"),
        ({"w": torch.tensor([[0, 1, 2], [3, float("inf"), 5]])}, "1 of 6 values of w are NaN or infinite"),
    ],
)
def test_a_state_that_does_not_fit_names_client_and_entry(second: dict, words: str) -> None:
    with pytest.raises(ValueError, match=f"client 9: .*{words}"):
        weighted_average([state(1.0), second], [1, 1], names=["client 4", "client 9"])
    average = WeightedAverage()
    average.add(state(1.0), 1, "client 4")
    with pytest.raises(ValueError, match=f"client 9: .*{words}"):
        average.add(second, 1, "client 9")
    assert torch.equal(average.result()["w"], state(1.0)["w"])  # the failed client left no trace


def test_a_client_of_weight_zero_does_not_count() -> None:
    lost = state(float("nan"))
    assert torch.equal(weighted_average([lost, state(2.0)], [0, 5])["w"], state(2.0)["w"])


def test_lists_of_unequal_length_are_refused() -> None:
    with pytest.raises(ValueError, match="got 2 states, 1 weights and 2 names"):
        weighted_average([state(0), state(1)], [1])
    with pytest.raises(ValueError, match="and 1 names"):
        weighted_average([state(0), state(1)], [1, 1], names=["a"])
