"""Measures the bytes of storages from when they are made to when they are freed."""

from __future__ import annotations

from functools import partial
from typing import Any
from weakref import ref

from torch import Tensor

from ..memory.tensors import is_plain

__all__ = ["StorageMeter"]


class StorageMeter:
    """Counts the bytes of the storages that a pass has made and that are alive.

    It holds none of them: a weak reference to a storage tells when it is freed. Parameters' own
    gradients are taken out of the count when they are accumulated.
    """

    def __init__(self) -> None:
        self.live = 0
        self.peak = 0
        self.curve: list[int] = []  # what was live whenever something was made
        self._storages: dict[int, tuple[ref[Any], int]] = {}  # by address, while they are alive

    def add(self, tensor: Tensor) -> bool:
        """Count the storage of a tensor; return whether it was not counted before."""
        if not is_plain(tensor):
            return False
        storage = tensor.untyped_storage()
        key = storage._cdata
        if key in self._storages:
            return False
        nbytes = storage.nbytes()
        self._storages[key] = ref(storage, partial(_freed, ref(self), key)), nbytes
        self.live += nbytes
        self.peak = max(self.peak, self.live)
        self.curve.append(self.live)
        return True

    def has(self, tensor: Tensor) -> bool:
        """Return whether the storage of a tensor is counted."""
        return is_plain(tensor) and tensor.untyped_storage()._cdata in self._storages

    def had(self, nbytes: int) -> None:
        """Count memory that a kernel had besides, while it made what was counted last."""
        self.peak = max(self.peak, self.live + nbytes)

    def remove(self, tensor: Tensor) -> None:
        """Count the storage of a tensor no longer."""
        if is_plain(tensor):
            self._remove(tensor.untyped_storage()._cdata)

    def _remove(self, key: int) -> None:
        _, nbytes = self._storages.pop(key, (None, 0))
        self.live -= nbytes


def _freed(meter: ref[StorageMeter], key: int, _: Any) -> None:
    counting = meter()
    if counting is not None:
        counting._remove(key)
