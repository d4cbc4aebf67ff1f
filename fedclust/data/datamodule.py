"""`FederatedDataModule`: one data set, dealt to clients, for Lightning's Trainer and for the federation."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import numpy as np
import pytorch_lightning as pl
from torch import Tensor

from fedclust.checks import fraction, positive_int, seed_value
from fedclust.data.content import content_sums
from fedclust.data.deal import Deal, deal_source
from fedclust.data.loading import pooled_loader
from fedclust.data.partition import Natural, Partition
from fedclust.data.sources import SourceLoader, load_source
from fedclust.data.tables import ClientData, IntArray, Scaling, Source, Table
from fedclust.data.transforms import ClientTransform


class FederatedDataModule(pl.LightningDataModule):
    """A data set whose rows are dealt to clients, each with a train, a validation and a test part.

    Rows are put into client order once, in `setup` (which every attribute below calls when needed); each client's
    tables are views into the pooled ones, so asking for a client again and again costs no memory.

    Args:
        source: A name (digits, mnist, fashion_mnist, usps, cifar10, image_folder), a path to an `.npz` file or a
            folder of images, a `Source`, an `Encoded`, arrays ``(x,)`` or ``(x, y)`` or
            ``(x_train, y_train, x_test, y_test)``, or a list with one array, or one tuple ``(x, y)``, per client.
        partition: How rows are dealt. None: by natural clients if the source brings them, else
            ``Dirichlet(n_clients=5, alpha=0.5)`` with labels, every client with at least a twentieth of the rows, or
            ``Iid(n_clients=5)`` without.
        root: Where the files of a named data set lie; see `fedclust.data.sources`.
        seed: Seed of the partition and of all further draws. None: the seed given to Lightning's `seed_everything`
            (or `--seed_everything`), else 0.
        val_fraction: Share of each client's training rows that becomes its validation part, in [0, 1).
        test_fraction: Share held out as test part from a source that has none, in [0, 1); which rows these are does
            not depend on the seed.
        transform: Change per client, `Rotations` or `LabelSwaps`.
        batch_size: Rows per batch of the pooled loaders (plain Trainer); the last batch may be smaller.
        scale: "auto", "minmax", "standard" or "none"; see `fedclust.data.prepare`.
        layout: "auto", "channels_first" or "channels_last", for 4-D arrays.
        image_size: Height and width for images of a folder.
        image_channels: 1 or 3, for images of a folder.

    Raises:
        ValueError: For an argument outside its range; `setup` raises for data that cannot be used as asked.
    """

    def __init__(
        self,
        source: SourceLoader | str | Path | Source | list[Any] | tuple[Any, ...] | np.ndarray | Tensor = "digits",
        partition: Partition | None = None,
        root: str | None = None,
        seed: int | None = None,
        val_fraction: float = 0.1,
        test_fraction: float = 0.2,
        transform: ClientTransform | None = None,
        batch_size: int = 256,
        scale: str = "auto",
        layout: str = "auto",
        image_size: int | None = None,
        image_channels: int = 3,
    ) -> None:
        super().__init__()
        if partition is not None and not isinstance(partition, Partition):
            raise ValueError(
                "partition must be a Partition such as Dirichlet(5, 0.5), or Natural(ids) with one client id per row "
                f"for rows dealt by hand, got an object of type {type(partition).__name__}"
            )
        if transform is not None and not isinstance(transform, ClientTransform):
            raise ValueError(f"transform must be a ClientTransform such as Rotations(), got {transform!r}")
        self.seed = None if seed is None else seed_value("seed", seed)
        self.val_fraction = fraction("val_fraction", val_fraction)
        self.test_fraction = fraction("test_fraction", test_fraction)
        self.transform = transform
        self.batch_size = positive_int("batch_size", batch_size)
        self._source = source
        self._partition = partition
        self._source_options: dict[str, Any] = {
            "root": root,
            "scale": scale,
            "layout": layout,
            "image_size": image_size,
            "image_channels": image_channels,
        }
        self._deal: Deal | None = None
        self._content: Tensor | None = None
        self._limits: tuple[float, float] | None = None
        self._resolved_seed = 0

    def setup(self, stage: str | None = None) -> None:
        """Load the source and deal its rows; a second call does nothing."""
        if self._deal is not None:
            return
        self._resolved_seed = _resolve_seed(self.seed)
        ids = self._partition.ids if isinstance(self._partition, Natural) else None
        source = load_source(self._source, ids=ids, test_fraction=self.test_fraction, **self._source_options)
        self._deal = deal_source(source, self._partition, self.transform, self._resolved_seed, self.val_fraction)

    @property
    def _dealt(self) -> Deal:
        self.setup()
        assert self._deal is not None
        return self._deal

    @property
    def name(self) -> str:  # type: ignore[override]
        """Name of the source."""
        return self._dealt.name

    @property
    def resolved_seed(self) -> int:
        """The seed in use."""
        self.setup()
        return self._resolved_seed

    @property
    def partition(self) -> Partition:
        """The partition in use, with the source's ids where it takes them."""
        return self._dealt.partition

    @property
    def n_clients(self) -> int:
        """Number of clients."""
        return self._dealt.partition.n_clients

    @property
    def client_names(self) -> list[str]:
        """Name of each client: its natural id, or its number."""
        return self._dealt.partition.names()

    @property
    def input_shape(self) -> tuple[int, ...]:
        """Shape of one row, such as (1, 28, 28) or (784,)."""
        return tuple(self._dealt.train.table.x.shape[1:])

    @property
    def n_classes(self) -> int | None:
        """Number of classes, or None without labels."""
        return self._dealt.n_classes

    @property
    def class_names(self) -> list[str] | None:
        """Name of each class index, or None."""
        return self._dealt.class_names

    @property
    def scaling(self) -> Scaling | None:
        """How raw inputs were scaled (`scale="minmax"` or `"standard"`), or None."""
        return self._dealt.scaling

    @property
    def n_rows(self) -> list[int]:
        """Training rows of each client, after its validation share is taken out; 0 for an empty client."""
        return self._dealt.train.sizes()

    @property
    def groups(self) -> IntArray | None:
        """Planted group of each client, shape ``(n_clients,)``, or None."""
        return self._dealt.groups

    @property
    def train(self) -> Table:
        """Training rows of all clients, in client order."""
        return self._dealt.train.table

    @property
    def val(self) -> Table:
        """Validation rows of all clients, in client order."""
        return self._dealt.val.table

    @property
    def test(self) -> Table:
        """Test rows of all clients, in client order."""
        return self._dealt.test.table

    def client(self, client: int) -> ClientData:
        """One client's tables: views into the pooled ones, not to be changed in place.

        Raises:
            ValueError: If there is no client of that number.
        """
        if isinstance(client, bool) or not hasattr(client, "__index__") or not 0 <= client < self.n_clients:
            raise ValueError(f"client must be in 0..{self.n_clients - 1}, got {client!r}")
        return self._dealt.client(client)

    @property
    def content(self) -> Tensor | None:
        """What tells these rows from others, see `fedclust.data.content`; None for features (`Encoded`).

        Features differ between machines by more than rounding; the record of the partition names their encoder.
        """
        if self._content is None and self._dealt.encoder is None:
            self._content = content_sums([self.train, self.val, self.test])
        return self._content

    @property
    def limits(self) -> tuple[float, float]:
        """Smallest and largest value of the training rows, after scaling."""
        if self._limits is None:
            low, high = self.train.x.aminmax()
            self._limits = (float(low), float(high))
        return self._limits

    def partition_record(self) -> dict[str, Any]:
        """Everything needed to find each client's rows again, as values that go into JSON.

        Row numbers count in the source's own tables: train and val in its training table, test in its test table, or
        all three in one common table when the test part was held out (``"test_rows_in": "common"``). Entropies are in
        nats; the larger alpha of a Dirichlet partition, the larger they are.
        """
        deal = self._dealt
        entropies = deal.entropies or [None] * self.n_clients
        known = [value for value in entropies if value is not None]
        clients = []
        for number, name in enumerate(self.client_names):
            own = deal.client(number)
            clients.append(
                {
                    "client": number,
                    "name": name,
                    "group": None if deal.groups is None else int(deal.groups[number]),
                    "label_entropy": entropies[number],
                    "train": own.train.rows.tolist(),
                    "val": own.val.rows.tolist(),
                    "test": own.test.rows.tolist(),
                }
            )
        return {
            "source": deal.name,
            # Left out of all other records, so that their fingerprints in checkpoints stay what they were.
            **({} if deal.encoder is None else {"encoder": deal.encoder}),
            "partition": deal.partition.describe(),
            "transform": None if self.transform is None else self.transform.describe(),
            "seed": self._resolved_seed,
            "val_fraction": self.val_fraction,
            "test_fraction": self.test_fraction,
            "test_rows_in": "common" if deal.one_table else "test",
            "class_names": deal.class_names,
            "groups": None if deal.groups is None else deal.groups.tolist(),
            "mean_label_entropy": sum(known) / len(known) if known else None,
            "empty_clients": deal.empty_clients(),
            "clients": clients,
        }

    def _module_loader(self, name: str) -> Any | None:
        """The loader that the trainer's module brings itself (a federated loop does), or None."""
        trainer = getattr(self, "trainer", None)
        module = None if trainer is None else trainer.lightning_module
        method = getattr(module, name, None)
        return None if method is None else method()

    def train_dataloader(self) -> Any:
        """The module's own `round_loader()`, else shuffled batches ``{"x", "y", "index"}`` of the pooled train rows."""
        own = self._module_loader("round_loader")
        if own is not None:
            return own
        return pooled_loader(self.train, self.batch_size, seed=self.resolved_seed)

    def val_dataloader(self) -> Any:
        """The module's own `evaluation_loader()`, else batches of the pooled validation rows."""
        return self._evaluation_loader(self.val)

    def test_dataloader(self) -> Any:
        """The module's own `evaluation_loader()`, else batches of the pooled test rows."""
        return self._evaluation_loader(self.test)

    def predict_dataloader(self) -> Any:
        """The module's own `prediction_loader()`, else batches of the pooled test rows."""
        own = self._module_loader("prediction_loader")
        return self._evaluation_loader(self.test) if own is None else own

    def _evaluation_loader(self, table: Table) -> Any:
        if not len(table):
            return []
        own = self._module_loader("evaluation_loader")
        return pooled_loader(table, self.batch_size) if own is None else own


def _resolve_seed(seed: int | None) -> int:
    """Explicit seed, else Lightning's, else 0."""
    if seed is not None:
        return seed
    text = os.environ.get("PL_GLOBAL_SEED", "0")
    if not text.isdigit():
        raise ValueError(f"the environment variable PL_GLOBAL_SEED must be a whole number of at least 0, got {text!r}")
    return int(text)
