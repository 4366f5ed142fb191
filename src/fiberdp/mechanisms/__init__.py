"""The gate: a clipped sum goes in, a release comes out.  Nothing to the right of it can name a raw gradient."""

from fiberdp.mechanisms.gaussian import Gaussian

MECHANISMS = {cls.name: cls for cls in (Gaussian,)}

__all__ = ["MECHANISMS", "Gaussian"]
