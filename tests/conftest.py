"""How long one example takes says nothing on a shared machine, so hypothesis sets no deadline."""

from hypothesis import settings

settings.register_profile("remat", parent=settings.default, deadline=None)
settings.load_profile("remat")
