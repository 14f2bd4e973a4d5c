"""Scopes: regions that are opened and closed by hand, and their inspection."""

from __future__ import annotations

from typing import Any

from ...plans.policy import Policy, SaveEverything
from ..region_access import RegionAccess
from .diagnostics.lone_scope import LoneScope
from .recording.threads import recorder_of_this_thread
from .region import TorchRegion
from .segment import close_region, open_region
from .selective import torch_policy

__all__ = ["TorchScope", "open_scope"]


class TorchScope(RegionAccess[TorchRegion]):
    """Access to a region that does not keep it alive: only its saved tensors do."""

    def __init__(self, name: str, policy: Policy | None) -> None:
        self.name = name
        self._is_closed = False
        recorder = recorder_of_this_thread()
        self._before = len(recorder.opened), recorder.idle
        try:
            self._begin(policy)
        except BaseException:
            recorder.unwind(*self._before)
            raise

    def _begin(self, policy: Policy | None) -> None:
        self._open = open_region(self.name, policy=policy)
        super().__init__(self._open)
        self.records = self._open is not None
        self._lone: LoneScope | None = None
        region = self._open
        if region is not None and region.parent is None and not isinstance(policy, SaveEverything):
            self._lone = LoneScope(region, recorder_of_this_thread(), region.backward_began)
            region.backward_began = self._lone

    @property
    def is_alive(self) -> bool:
        return self._region() is not None

    def close(self, *, quiet: bool) -> None:
        """Close the region; it can be called again after an interrupt."""
        try:
            if not self._is_closed:
                region, self._open = self._open, None
                close_region(region, None if quiet else f"scope {self.name!r}")
                if self._lone is not None:
                    self._lone.close()
                self._is_closed = True
        except BaseException:
            recorder_of_this_thread().unwind(*self._before)
            self._is_closed = True
            raise


def open_scope(name: str, *, policy: Any) -> TorchScope:
    return TorchScope(name, torch_policy(policy))
