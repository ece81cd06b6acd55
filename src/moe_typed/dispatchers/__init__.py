"""Dispatchers: how rows reach the ranks of their experts and come home."""

from .base import Dispatcher, MoELayer
from .standard import StandardDispatcher

__all__ = ["Dispatcher", "MoELayer", "StandardDispatcher"]
