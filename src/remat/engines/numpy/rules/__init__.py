"""NumPy functions that autograd lacks or gets wrong; importing a module registers its rules."""

from . import algebra, arranging, fourier, reducing

__all__ = ["algebra", "arranging", "fourier", "reducing"]
