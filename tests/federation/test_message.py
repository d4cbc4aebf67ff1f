"""Messages: allowed types, size in bytes, exact round trip, fingerprints."""

from __future__ import annotations

import enum
import io
import warnings
from typing import Any

import numpy as np
import pytest
import torch

from fedclust.federation.message import (
    check_message,
    copied,
    digest,
    message_bytes,
    pack,
    tensors_under,
    unpack,
    value_bytes,
    with_prefix,
)

TORCH_TYPES = [
    torch.float64, torch.float32, torch.float16, torch.bfloat16, torch.complex64,
    torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8, torch.bool,
]  # fmt: skip
NUMPY_TYPES = ["bool", "int8", "int16", "int32", "int64", "uint8", "uint16", "uint32", "uint64",
               "float16", "float32", "float64", "complex64", "complex128"]  # fmt: skip
SHAPES = [(), (0,), (0, 3), (1,), (2, 3)]


class Colour(enum.IntEnum):
    RED = 1


class Name(str):
    __slots__ = ()


def test_a_column_of_one_element_has_the_digest_of_its_value() -> None:
    column = torch.arange(6).reshape(2, 3)[1:, 2]
    assert column.stride() == (3,)
    assert digest(column) == digest(torch.tensor([5]))


def test_every_allowed_type_passes_and_numpy_scalars_become_plain() -> None:
    message = {"t": torch.ones(2), "a": np.ones(2), "i": 1, "f": 0.5, "s": "x", "b": True, "y": b"z", "n": None}
    assert check_message(message, "client 1") == message
    numbers = {"i": np.int32(3), "f": np.float32(0.5), "b": np.bool_(True), "s": np.str_("é"), "d": np.float64(2.0)}
    plain = check_message(numbers, "client 1")
    assert {name: type(value) for name, value in plain.items()} == {
        "i": int,
        "f": float,
        "b": bool,
        "s": str,
        "d": float,
    }
    assert plain == {"i": 3, "f": 0.5, "b": True, "s": "é", "d": 2.0}


@pytest.mark.parametrize(
    "value",
    [
        {"a": 1}, [1], (1, 2), {1}, object(), 1j, torch.nn.Linear(1, 1), Colour.RED, Name("x"), np.complex64(1),
        range(3), np.array(["a"]), np.array([object()]), np.array(["2024-01-01"], dtype="datetime64[D]"),
        np.ones(2, dtype=">f4"), np.ones(2, dtype="longdouble"), np.longdouble(1), torch.eye(3).to_sparse(),
    ],
    ids=lambda value: type(value).__name__,
)  # fmt: skip
def test_other_and_nested_values_are_refused_with_sender_and_name(value: Any) -> None:
    with pytest.raises(TypeError, match=r"client 7.*'odd'"):
        check_message({"fine": 1, "odd": value}, "client 7")


@pytest.mark.parametrize("message", [[("a", 1)], None, "text", 3])
def test_a_message_is_a_mapping(message: Any) -> None:
    with pytest.raises(TypeError, match=r"server.*mapping"):
        check_message(message, "server")


@pytest.mark.parametrize("name", [1, None, b"a", ("a",)])
def test_names_are_strings(name: Any) -> None:
    with pytest.raises(TypeError, match=r"names are strings"):
        check_message({name: 1}, "server")


@pytest.mark.parametrize(
    ("value", "size"),
    [
        (None, 0), (1, 8), (2**80, 8), (1.5, 8), (True, 8), ("abc", 3), ("é", 2), ("", 0), (b"ab", 2),
        (torch.zeros(3, 4), 48), (torch.zeros(3, dtype=torch.bfloat16), 6), (torch.zeros(5, dtype=torch.bool), 5),
        (torch.tensor(1, dtype=torch.int64), 8), (torch.zeros(0, 9), 0), (torch.zeros(1).expand(10), 40),
        (np.zeros((2, 2), dtype=np.int16), 8), (np.zeros(()), 8), (np.zeros((4, 4))[::2, ::2], 32),
    ],
)  # fmt: skip
def test_sizes(value: Any, size: int) -> None:
    assert value_bytes(value) == size
    assert message_bytes({"a long name that does not count": value, "n": 1}) == size + 8


@pytest.mark.parametrize("dtype", TORCH_TYPES, ids=str)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_tensors_survive_packing_exactly(dtype: torch.dtype, shape: tuple[int, ...]) -> None:
    value = torch.full(shape, 3).to(dtype)
    back = unpack(pack({"v": value}))["v"]
    assert isinstance(back, torch.Tensor)
    assert (back.dtype, back.shape) == (dtype, torch.Size(shape))
    assert torch.equal(back, value)


@pytest.mark.parametrize("dtype", NUMPY_TYPES)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_arrays_survive_packing_exactly(dtype: str, shape: tuple[int, ...]) -> None:
    value = np.full(shape, 1).astype(dtype)
    back = unpack(pack({"v": value}))["v"]
    assert isinstance(back, np.ndarray)
    assert (str(back.dtype), back.shape) == (dtype, shape)
    assert np.array_equal(back, value)


def test_special_values_views_and_order_survive_packing() -> None:
    message = {
        "nan": torch.tensor([float("nan"), float("inf"), -0.0]),
        "strided": torch.arange(12.0).reshape(3, 4)[:, ::2],
        "fortran": np.asfortranarray(np.arange(6.0).reshape(2, 3)),
        "parameter": torch.nn.Parameter(torch.ones(2)),
        "int": 2**80, "float": 1e-300, "text": "é\x00", "bytes": b"\x00\xff", "none": None, "true": True,
    }  # fmt: skip
    back = unpack(pack(message))
    assert list(back) == list(message)
    assert torch.equal(back["nan"].view(torch.int32), message["nan"].view(torch.int32))
    assert torch.equal(back["strided"], message["strided"])
    assert np.array_equal(back["fortran"], message["fortran"])
    assert type(back["parameter"]) is torch.Tensor
    assert not back["parameter"].requires_grad
    for name in ("int", "float", "text", "bytes", "none", "true"):
        assert back[name] == message[name]
        assert type(back[name]) is type(message[name])


def test_packing_neither_warns_about_nor_shares_read_only_arrays() -> None:
    value = np.ones(3)
    value.flags.writeable = False
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        back = unpack(pack({"v": value}))["v"]
    back += 1
    assert value.tolist() == [1.0, 1.0, 1.0]


def test_unpacking_never_runs_pickled_code() -> None:
    buffer = io.BytesIO()
    torch.save({"values": {"x": Colour.RED}, "arrays": []}, buffer)
    with pytest.raises(Exception, match=r"Weights only load failed"):
        unpack(buffer.getvalue())


@pytest.mark.filterwarnings("ignore:Casting complex values")
@pytest.mark.parametrize("dtype", TORCH_TYPES, ids=str)
def test_digest_knows_type_shape_and_content(dtype: torch.dtype) -> None:
    value = torch.tensor([0, 1, 1, 0]).to(dtype)
    assert digest(value) == digest(value.clone())
    assert digest(value) == digest(torch.stack([value, value], 1)[:, 0])
    others = [torch.tensor([0, 1, 1, 1]).to(dtype), value.reshape(2, 2), value[:3], value.flip(0)[:0]]
    others += [value.to(other) for other in TORCH_TYPES if other != dtype]
    prints = [digest(other) for other in [value, *others]]
    assert len(set(prints)) == len(prints)


def test_digest_tells_plain_values_apart() -> None:
    values = [0, 1, True, 1.0, -0.0, 0.0, "1", b"1", None, "", np.ones(1), np.ones((1, 1)), torch.ones(1), np.ones(())]
    assert len({digest(value) for value in values}) == len(values)
    grid = np.arange(6.0).reshape(2, 3)
    assert digest(grid) == digest(np.asfortranarray(grid))
    assert digest(grid) != digest(grid.T.copy())


def test_a_copy_shares_nothing() -> None:
    message = {"t": torch.zeros(2, requires_grad=True), "a": np.zeros(2), "i": 3}
    copy = copied(message)
    assert not copy["t"].requires_grad
    copy["t"] += 1
    copy["a"] += 1
    assert message["t"].tolist() == [0.0, 0.0]
    assert message["a"].tolist() == [0.0, 0.0]
    assert copy["i"] == 3


def test_prefixes() -> None:
    inner = {"a": torch.ones(1), "b/c": torch.zeros(1)}
    message = {**with_prefix("weights", inner), "weightsx/a": torch.ones(9), "weights/n": 3}
    found = tensors_under("weights", message)
    assert list(found) == ["a", "b/c"]
    assert found["b/c"] is inner["b/c"]
    with pytest.raises(KeyError, match=r"decoder/"):
        tensors_under("decoder", message)
