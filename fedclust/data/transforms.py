"""Changes applied to one client's rows: feature shift (rotated images) and concept shift (swapped labels)."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from fedclust.checks import positive_int, real_number
from fedclust.data.tables import IntArray, Table
from fedclust.described import Described


class ClientTransform(Described, ABC):
    """A change of a client's train, validation and test rows, the same for all clients of one planted group.

    Client ``i`` is in group ``i % n_groups``, unless `client_groups` says otherwise.

    Args:
        n_groups: Number of groups.
        client_groups: Group of each client, one entry per client, or None.
    """

    def __init__(self, n_groups: int, client_groups: list[int] | None = None) -> None:
        self.n_groups = positive_int("n_groups", n_groups)
        if client_groups is not None:
            client_groups = [positive_int("client_groups", group, least=0) for group in client_groups]
            if any(group >= n_groups for group in client_groups):
                raise ValueError(f"client_groups must lie in 0..{n_groups - 1}, got {client_groups}")
        self.client_groups = client_groups

    @abstractmethod
    def apply(self, client: int, table: Table) -> Table:
        """The client's rows after the change; `table` itself stays as it is.

        Args:
            client: Number of the client, from 0.
            table: Its rows.
        """

    def check(self, input_shape: tuple[int, ...], n_classes: int | None) -> None:
        """Refuse data that the change cannot be applied to, before any row is touched.

        Raises:
            ValueError: If inputs of this shape, or this number of classes (None: no labels), do not fit.
        """
        return

    def group_of(self, client: int) -> int:
        """Planted group of one client.

        Raises:
            ValueError: If `client_groups` was given and is shorter.
        """
        if self.client_groups is None:
            return client % self.n_groups
        if client >= len(self.client_groups):
            raise ValueError(f"client_groups has {len(self.client_groups)} entries, client {client} has none")
        return self.client_groups[client]

    def groups(self, n_clients: int) -> IntArray:
        """Planted group of each client, shape ``(n_clients,)``.

        Raises:
            ValueError: If `client_groups` was given for another number of clients.
        """
        if self.client_groups is not None and len(self.client_groups) != n_clients:
            raise ValueError(f"client_groups has {len(self.client_groups)} entries for {n_clients} clients")
        return np.array([self.group_of(client) for client in range(n_clients)], dtype=np.int64)


class Rotations(ClientTransform):
    """Feature shift: images of group ``g`` are turned by ``degrees[g]`` counter-clockwise.

    Multiples of 90 degrees are exact (no pixel value changes); other angles are interpolated and corners filled with 0.

    Args:
        degrees: One angle per group.
        client_groups: Group of each client; None: client ``i`` is in group ``i % len(degrees)``.
    """

    def __init__(
        self, degrees: list[float] | tuple[float, ...] = (0, 90, 180, 270), client_groups: list[int] | None = None
    ) -> None:
        if not isinstance(degrees, (list, tuple)) or len(degrees) == 0:
            raise ValueError(f"degrees must be a list of at least one angle, got {degrees!r}")
        self.degrees = [real_number("degrees", angle) for angle in degrees]
        if not np.isfinite(self.degrees).all():
            raise ValueError(f"degrees must be finite, got {degrees}")
        super().__init__(len(self.degrees), client_groups)

    def check(self, input_shape: tuple[int, ...], n_classes: int | None) -> None:
        """Refuse rows that are no images, and images that are not square where a quarter turn is asked for."""
        if len(input_shape) != 3:
            raise ValueError(f"Rotations needs images (channels, height, width), got rows of shape {input_shape}")
        if input_shape[1] != input_shape[2] and any(angle % 180 == 90 for angle in self.degrees):
            raise ValueError(f"Rotations by 90 or 270 degrees needs square images, got {input_shape[1:]}")

    def apply(self, client: int, table: Table) -> Table:
        """The client's rows, turned by its group's angle."""
        self.check(tuple(table.x.shape[1:]), None)
        return replace(table, x=_turn(table.x, self.degrees[self.group_of(client)]))


def _turn(x: Tensor, angle: float) -> Tensor:
    if angle % 360 == 0 or len(x) == 0:
        return x
    if angle % 90 == 0:
        return torch.rot90(x, int(angle % 360 // 90), dims=(-2, -1)).contiguous()
    from torchvision.transforms import InterpolationMode
    from torchvision.transforms.functional import rotate

    turned: Tensor = rotate(x, angle, interpolation=InterpolationMode.BILINEAR)
    return turned


class LabelSwaps(ClientTransform):
    """Concept shift: in group ``g`` the two labels of each pair change places.

    Args:
        pairs: For each group a list of pairs of class indices, such as ``[[], [(0, 1)], [(2, 3), (4, 5)]]``; an empty
            list leaves a group's labels as they are. A label may be in one pair of a group only.
        client_groups: Group of each client; None: client ``i`` is in group ``i % len(pairs)``.
    """

    def __init__(self, pairs: list[list[tuple[int, int]]], client_groups: list[int] | None = None) -> None:
        if not isinstance(pairs, (list, tuple)) or len(pairs) == 0:
            raise ValueError(f"pairs must hold one list of label pairs per group, got {pairs!r}")
        self.pairs = [self._checked(number, group) for number, group in enumerate(pairs)]
        super().__init__(len(self.pairs), client_groups)

    @staticmethod
    def _checked(number: int, group: Any) -> list[list[int]]:
        name = f"pairs[{number}]"
        if not isinstance(group, (list, tuple)) or not all(
            isinstance(pair, (list, tuple)) and len(pair) == 2 for pair in group
        ):
            raise ValueError(f"{name} must be a list of pairs of two class indices, got {group!r}")
        checked = [[positive_int(name, label, least=0) for label in pair] for pair in group]
        used = [label for pair in checked for label in pair]
        if len(set(used)) != len(used):
            raise ValueError(f"{name} uses a label twice: {group!r}")
        return checked

    def check(self, input_shape: tuple[int, ...], n_classes: int | None) -> None:
        """Refuse data without labels, and pairs that name a label which the data does not have."""
        if n_classes is None:
            raise ValueError("LabelSwaps needs labels, but the data has none")
        highest = max((label for group in self.pairs for pair in group for label in pair), default=0)
        if highest >= n_classes:
            raise ValueError(f"LabelSwaps names label {highest}, the data has labels 0..{n_classes - 1}")

    def apply(self, client: int, table: Table) -> Table:
        """The client's rows with its group's label pairs swapped."""
        if table.y is None:
            raise ValueError("LabelSwaps needs labels, but the data has none")
        swapped = table.y.clone()
        for first, second in self.pairs[self.group_of(client)]:
            swapped[table.y == first] = second
            swapped[table.y == second] = first
        return replace(table, y=swapped)
